"""Columns of images, sound and video in a sample: which they are, how long, and what cannot be decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.pool import default_threads, side_by_side
from trainpipes.media import sound, video
from trainpipes.media.files import Undecodable
from trainpipes.stages.decode_image import by_pillow

#: How files begin, and what they hold; of MP4 and RIFF bytes 8 to 12 say it.
BEGINS = {
    b"\xff\xd8\xff": "image", b"\x89PNG": "image", b"GIF8": "image", b"\0\0\0\x0cjP": "image",
    b"fLaC": "sound", b"OggS": "sound", b"ID3": "sound", b"\xff\xfb": "sound", b"\xff\xf3": "sound",
    b"\x1aE\xdf\xa3": "video", b"FLV": "video",
}  # fmt: skip
BRANDS = {
    b"WEBP": "image", b"WAVE": "sound", b"AVI ": "video", b"M4A ": "sound", b"avif": "image",
    b"avis": "image", b"mif1": "image", b"heic": "image",
}  # fmt: skip
#: The package that looks at each.
PACKAGES = {"image": "PIL", "sound": "soundfile", "video": "av"}
#: Rows whose first bytes say what a column holds; forms of sounds or videos that are printed.
LOOKED_AT, FORMS = 64, 3


class Length(NamedTuple):
    """The seconds of a sound or a video, NaN if unknown; and its rate and channels, or its size and rate."""

    seconds: float
    form: str


@dataclass(frozen=True)
class Clips:
    """How long the sounds or videos of a column are.

    Attributes:
        column: that holds their bytes.
        kind: "sound" or "video".
        rows: of the sample whose length is known.
        hours: of all rows of the files, estimated.
        seconds: the "least", the "mean" and the "most" of a row.
        forms: how many rows of the sample are of each: rate and channels, or size and frames a second; those
            of most rows first.
    """

    column: str
    kind: str
    rows: int
    hours: float
    seconds: dict[str, float]
    forms: dict[str, int]

    @property
    def cells(self) -> list[str]:
        """What a table shows of it."""
        hours = f"{self.hours:,.3g}"
        seconds = " / ".join(f"{value:,.3g}" for value in self.seconds.values())
        more = len(self.forms) - FORMS
        forms = [*list(self.forms)[:FORMS], *([f"{more:,} more"] if more > 0 else [])]
        return [self.column, hours, seconds, "; ".join(forms)]


def clips_of(
    column: str, kind: str, lengths: Sequence[Length], total: int, looked_at: int
) -> Clips:
    """What a sample says of a column of ``total`` rows, of which it has ``looked_at``."""
    known = np.array([length.seconds for length in lengths if length.seconds >= 0])
    least, mean, most = (known.min(), known.mean(), known.max()) if len(known) else [np.nan] * 3
    forms = Counter(length.form for length in lengths).most_common()
    hours = float(known.sum()) * total / max(1, looked_at) / 3600
    seconds = {"least": float(least), "mean": float(mean), "most": float(most)}
    return Clips(column, kind, len(known), hours, seconds, dict(forms))


def looked_into(table: pa.Table, of_images: bool) -> Iterator[tuple[str, str, int, str | Length]]:
    """Of each image, sound and video: column, kind, row, and why it cannot be decoded ("" if it can), or its
    length. Nothing of kinds whose package is not installed.
    """
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
            column = pc.struct_field(column, "bytes")
        if column.type not in (pa.binary(), pa.large_binary()) or not len(column):
            continue
        kind = "image" if of_images else kind_of(column)
        if not kind or find_spec(PACKAGES[kind]) is None:
            continue
        look, threads = LOOKS[kind], default_threads() or 1

        def found(content: Any, look: Callable[[bytes], str | Length] = look) -> str | Length:
            try:
                return look(content.as_py()) if content.is_valid else ""
            except Undecodable as error:
                return str(error)

        for row, result in enumerate(side_by_side(found, column, threads, "trainpipes-look")):
            if isinstance(result, str) and result and not of_images:
                result = f"column {name!r}: {result}"
            yield name, kind, row, result


def kind_of(column: pa.ChunkedArray) -> str:
    """What most of the first rows of a column of bytes are; "" for anything else."""
    heads: list[bytes] = pc.binary_slice(column.slice(0, LOOKED_AT).drop_null(), 0, 12).to_pylist()
    kinds = Counter(map(kind_of_head, heads)).most_common(1)
    return kinds[0][0] if kinds and 2 * kinds[0][1] > len(heads) else ""


def kind_of_head(head: bytes) -> str:
    """What a file is that begins so; "" for anything else."""
    if head[4:8] == b"ftyp":
        return BRANDS.get(head[8:12], "video")
    if head[:4] == b"RIFF":
        return BRANDS.get(head[8:12], "")
    return next((kind for begin, kind in BEGINS.items() if head.startswith(begin)), "")


def _of_image(content: bytes) -> str:
    by_pillow(content, "RGB", 1)
    return ""


def _of_sound(content: bytes) -> Length:
    rate, channels, samples = sound.header_of(BytesIO(content))
    seconds = samples / rate if samples >= 0 else np.nan
    return Length(seconds, f"{rate:,} Hz, {channels} channel{'s' * (channels != 1)}")


def _of_video(content: bytes) -> Length:
    seconds, fps, height, width = video.header_of(BytesIO(content))
    form = f"{width} x {height} pixels, {fps:.4g} frames a second"
    return Length(seconds if seconds >= 0 else np.nan, form)


LOOKS: dict[str, Callable[[bytes], str | Length]] = {
    "image": _of_image,
    "sound": _of_sound,
    "video": _of_video,
}
