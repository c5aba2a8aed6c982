"""The named values of an item, each with its type, shape, and range or text; and its pictures, made small."""

from __future__ import annotations

import base64
import dataclasses
import html
import wave
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from importlib.util import find_spec
from io import BytesIO
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import LazyBatches
from trainpipes.errors import MOST_OF_URL, cut, escaped, hidden, shown

Array = npt.NDArray[Any]

#: Values of an item that are looked at, and how deep within each other.
MOST_VALUES, DEEPEST = 64, 4
#: What may stand beside token ids, after the same prefix, and is 0 on padding.
MASKS = ("segment_ids", "attention_mask", "input_mask")
#: Characters of a name, of a text, and of another value; texts of a batch that are quoted.
NAME, TEXT, QUOTED, FEW = 80, 200, 120, 3
#: Numbers of a series, at least, of which a wave form is shown, and how many characters that has.
WAVES, BARS = 4000, 24
#: Seconds of a sound that a notebook plays; pixels of its spectrogram, and samples of one of its columns.
PLAYED, WIDE, HIGH, WINDOW = 20, 400, 96, 512
#: Pixels of a side of a small picture; frames of a clip that are shown.
SIDE, FRAMES = 96, 8


def as_mapping(value: Any) -> Mapping[str, Any] | None:
    """A mapping, named tuple or dataclass as a dict; None for anything else."""
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in islice(value.items(), MOST_VALUES + 1)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def leaves(item: Any, of_row: bool = False) -> tuple[list[tuple[str, Any]], bool]:
    """The values of an item with their names, ``0.input`` for one within another, and whether there are
    more.

    >>> leaves(({"x": 1, "y": "a"}, 2))
    ([('0.x', 1), ('0.y', 'a'), ('1', 2)], False)
    """
    named = list(islice(_leaves("", item, 0, of_row), MOST_VALUES + 1))
    return named[:MOST_VALUES], len(named) > MOST_VALUES


def _leaves(name: str, value: Any, depth: int, of_row: bool) -> Iterator[tuple[str, Any]]:
    named = as_mapping(value)
    if named is None and _holds_several(value, depth, of_row):
        named = {str(k): inner for k, inner in enumerate(value[: MOST_VALUES + 1])}
    if not named or depth >= DEEPEST:
        yield name, value
        return
    for key, inner in named.items():
        yield from _leaves(f"{name}.{key}" if name else key, inner, depth + 1, of_row)


def _holds_several(value: Any, depth: int, of_row: bool) -> bool:
    """Whether a sequence is several values, such as (inputs, targets)."""
    if not isinstance(value, list | tuple) or not value:
        return False
    if depth == 0 and isinstance(value, tuple):
        return True
    if depth and not of_row and as_mapping(value[0]) is not None:
        return False
    return all(hasattr(part, "shape") or as_mapping(part) for part in value[:8])


def head(value: Any) -> Array | None:
    """The numbers of an array or tensor; None where none can be read."""
    if isinstance(value, torch.Tensor):
        try:
            value = value.detach().cpu().resolve_conj().resolve_neg()
            narrow = value.is_floating_point() and value.dtype != torch.float64
            value = (value.float() if narrow else value).numpy()
        except (RuntimeError, TypeError, AttributeError):
            return None
    value = np.asarray(value) if isinstance(value, np.generic) else value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value
    return None


def rows_of(item: Any) -> int | None:
    """Rows of a batch: as many as its first list or matrix has, or else its first vector; not one of values
    of all rows, which has offsets beside it.
    """
    if isinstance(item, list) and item and as_mapping(item[0]) is not None:
        return len(item)
    named = {k: v for k, v in leaves(item)[0] if isinstance(v, list) or getattr(v, "ndim", None)}
    counts = {
        k: int(v.size(0)) if isinstance(v, torch.Tensor) else len(v) for k, v in named.items()
    }
    matrix = next((k for k, v in named.items() if isinstance(v, list) or v.ndim > 1), None)
    if matrix is not None:
        return counts[matrix]
    if begins := [f"{k}_offsets" for k in counts if f"{k}_offsets" in counts]:
        places = counts[begins[0]]  # of which the last may be an end
        others = (n for k, n in counts.items() if f"{k}_offsets" not in counts and k not in begins)
        return next((n for n in others if places - n in (0, 1)), places)
    return next(iter(counts.values()), None)


def masks_of(item: Mapping[str, Any]) -> list[torch.Tensor]:
    """The masks of a batch: the first of each prefix, such as "chosen_"."""
    masks: dict[str, torch.Tensor] = {}
    for end in MASKS:
        for name, value in item.items():
            if str(name).endswith(end) and isinstance(value, torch.Tensor) and value.ndim == 2:
                masks.setdefault(str(name).removesuffix(end), value)
    return list(masks.values())


def python_value(scalar: Any) -> Any:
    """A value of Arrow as Python has it; its type as text where Python has none."""
    try:
        return scalar.as_py()
    except (ValueError, ArithmeticError, pa.ArrowException):
        return f"<{scalar.type}>"


def cells_of(name: str, value: Any, rate: int | None = None) -> list[str]:
    """A value's name, type, shape, and range or text; of sound with so many samples a second, its length and
    level.
    """
    try:
        kind, shape, text = _described(value)
        if rate is not None and (sounds := sounds_of(value, rate, 1)):
            text = str(sounds[0])
    except Exception:  # of a class of the user's: the other values are to be shown
        kind, shape, text = type(value).__name__, None, ""
    sizes = "" if shape is None else f"[{', '.join(f'{n:,}' for n in shape)}]"
    return [escaped(name, NAME) or "·", kind, sizes, text]


def _described(value: Any) -> tuple[str, Sequence[int] | None, str]:
    if isinstance(value, torch.Tensor):
        kind = f"tensor {str(value.dtype).removeprefix('torch.')}"
        if value.device.type != "cpu":
            kind += f" on {value.device}"
        if value.is_nested:
            return f"nested {kind}", [value.size(0)], ""
        return kind, value.shape, _span(value)
    if isinstance(value, np.ndarray) and (value.dtype.kind not in "OUS" or value.ndim != 1):
        return f"array {value.dtype}", value.shape, _span(value)
    if isinstance(value, list | tuple | np.ndarray):
        kind = f"array {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        numbers = all(isinstance(part, int | float) for part in value)
        span = _span(np.array(value)) if numbers else ""
        few = [_quoted(part, NAME, quotes=True) for part in value[:FEW]]
        text = ", ".join(few + ["…"] * (len(value) > FEW))
        return kind, [len(value)], "  ".join(filter(None, [span, text]))
    if isinstance(value, str):
        kind = "str" if len(value) <= TEXT else f"str of {len(value):,} characters"
        return kind, None, _quoted(value, TEXT)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes of {len(value):,}", None, escaped(shown(bytes(value[:32]), 60))
    kind = "None" if value is None else type(value).__name__
    return kind, None, _quoted(value, QUOTED)


def _quoted(value: Any, most: int, quotes: bool = False) -> str:
    if not isinstance(value, str):
        return escaped(shown(value, most), most)
    text = escaped(cut(hidden(cut(value, MOST_OF_URL)), most), most)
    return f"'{text}'" if quotes else text


def _span(value: Any) -> str:
    numbers = head(value)
    if numbers is None or not numbers.size or numbers.dtype.kind not in "biuf":
        return ""
    if numbers.dtype.kind != "f":
        return f"{numbers.min()} to {numbers.max()}"
    real = numbers[~np.isnan(numbers)]
    span = [f"{real.min():.4g} to {real.max():.4g}"] if real.size else []
    if numbers.ndim == 1 and real.size >= WAVES:
        span.append(wave_form(real))
    return "  ".join(span + [f"{numbers.size - real.size:,} NaN"] * (real.size < numbers.size))


def wave_form(samples: Array) -> str:
    """How loud a sound is from its start to its end, as bars.

    >>> wave_form(np.sin(np.arange(4800)) * np.linspace(0, 1, 4800))
    '▁▁▁▂▂▂▃▃▃▄▄▄▅▅▅▆▆▆▇▇▇███'
    """
    parts = np.array_split(samples.astype(np.float64), BARS)
    with np.errstate(all="ignore"):
        levels = np.sqrt([np.mean(part**2) for part in parts])
        heights = np.nan_to_num(levels / levels.max() * 7.999, posinf=7.0)
    return "".join("▁▂▃▄▅▆▇█"[int(min(height, 7))] for height in heights)


class Sound(NamedTuple):
    """A sound ``[samples]``, or of several that which is printed: of batches the first."""

    samples: Array
    rate: int
    most: int
    is_batch: bool

    def __str__(self) -> str:
        seconds = f"{'up to ' * self.is_batch}{self.most / self.rate:,.2f} s at {self.rate:,} Hz"
        power = float(np.mean(self.samples.astype(np.float64) ** 2)) if self.samples.size else 0.0
        level = f"{10 * np.log10(power):.1f} dB" if power else "silence"
        level = level if np.isfinite(power) else "NaN or infinity"
        wave = wave_form(self.samples) if len(self.samples) >= BARS and power else ""
        return "  ".join(filter(None, [f"{seconds}, {level}", wave]))

    @property
    def html(self) -> str:
        """A player of its first seconds, and where Pillow is, how loud each frequency is over time."""
        samples = self.samples[: PLAYED * self.rate]
        file = BytesIO()
        with wave.open(file, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(self.rate)
            out.writeframes(
                (np.clip(np.nan_to_num(samples), -1, 1) * 32767).astype("<i2").tobytes()
            )
        data = base64.b64encode(file.getvalue()).decode("ascii")
        player = f'<audio controls src="data:audio/wav;base64,{data}"></audio>'
        return player if find_spec("PIL") is None else f"{player} {spectrogram(samples).html}"


def sounds_of(value: Any, rate: int, rows: int) -> list[Sound]:
    """The sounds of a value ``[samples]`` or ``[batch, samples]``, ``rows`` at most."""
    samples = head(value) if isinstance(value, torch.Tensor | np.ndarray) else None
    if (
        samples is None
        or samples.dtype.kind != "f"
        or samples.ndim not in (1, 2)
        or not samples.size
    ):
        return []
    several = samples.ndim == 2
    return [
        Sound(row, rate, samples.shape[-1], several)
        for row in (samples[:rows] if several else [samples])
    ]


def spectrogram(samples: Array) -> Picture:
    """How loud each frequency is over time, from 0 at the bottom to half the rate: 80 dB, black to white."""
    from PIL import Image

    padded = np.pad(np.nan_to_num(samples), (0, max(0, WINDOW - len(samples))))
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)
    places = np.linspace(0, len(windows) - 1, min(len(windows), WIDE)).astype(int)
    power = np.abs(np.fft.rfft(windows[places] * np.hanning(WINDOW))) ** 2
    decibels = 10 * np.log10(power / max(float(power.max()), 1e-12) + 1e-8)
    gray = ((decibels.T[::-1] + 80) * (255 / 80)).clip(0, 255).astype(np.uint8)
    out = BytesIO()
    image = Image.fromarray(gray).resize((len(places), HIGH))
    image.save(out, "PNG")
    return Picture(image.width, image.height, out.getvalue())


@runtime_checkable
class MakesPictures(Protocol):
    """A stage that makes batches of token ids and pictures."""

    @property
    def picture_token(self) -> int | None:
        """The token that stands for a part of a picture."""

    def pictures(self, rows: Sequence[Any]) -> list[list[Any]]:
        """Pillow's images in each row of the batch that is made of these rows."""


class Picture(NamedTuple):
    """A picture's size, and a small copy as PNG."""

    width: int
    height: int
    png: bytes

    def __str__(self) -> str:
        return f"{self.width:,} x {self.height:,}"

    @property
    def html(self) -> str:
        data = base64.b64encode(self.png).decode("ascii")
        return f'<img src="data:image/png;base64,{data}" title="{html.escape(str(self))}">'


class WithRows(NamedTuple):
    """An item, and the rows that it was made of."""

    item: Any
    rows: Sequence[Any]


def with_rows(run: Run) -> MutableSequence[Any]:
    items, block, bounds = run.unroll(), run.block, run.bounds
    if bounds is None:
        bounds = np.arange(len(items) + 1, dtype=np.int64)

    def known(k: int) -> WithRows:
        first, stop = int(bounds[k]), int(bounds[k + 1])
        return WithRows(items[k], list(block.slice(first, stop - first).rows()))

    return LazyBatches(known, len(items))


def small(picture: Any) -> Picture:
    width, height = picture.size
    picture = picture.convert("RGB")
    picture.thumbnail((SIDE, SIDE))
    out = BytesIO()
    picture.save(out, "PNG")
    return Picture(width, height, out.getvalue())


def strips_of(value: Any, rows: int | None) -> list[list[Picture]]:
    """Some frames of a clip, uint8 ``[T, H, W, C]`` or ``[T, C, H, W]`` of 1 or 3 channels; or with ``rows``
    of so many clips of a batch. None of anything else, or without Pillow.
    """
    if not isinstance(value, torch.Tensor | np.ndarray) or find_spec("PIL") is None:
        return []
    clips = head(value) if value.ndim == 4 + (rows is not None) else None
    if clips is None or clips.dtype != np.uint8 or not clips.size:
        return []
    clips = clips[None] if rows is None else clips[:rows]
    clips = clips if clips.shape[4] in (1, 3) else clips.transpose(0, 1, 3, 4, 2)
    if clips.shape[4] not in (1, 3):
        return []
    return [_strip(clip.repeat(3 // clip.shape[3], axis=3)) for clip in clips]


def _strip(frames: Array) -> list[Picture]:
    from PIL import Image

    chosen = np.linspace(0, len(frames) - 1, min(len(frames), FRAMES)).round().astype(int)
    return [small(Image.fromarray(np.ascontiguousarray(frames[n]))) for n in chosen]
