"""What stages share that decode files (pictures, sound, video), and ``decode_image``."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import KW_ONLY
from io import BytesIO
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import ColumnName, Count, need
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.engine.calling import Answer, row_words
from trainpipes.engine.processes.executors import Threads
from trainpipes.errors import UnreadableError, hidden, shown
from trainpipes.filesystems.retry import Retry
from trainpipes.filesystems.systems import open_named
from trainpipes.interfaces.quarantine import LeftOut, OnBadRow, leaves_out
from trainpipes.interfaces.read_columns import blame, cell, refused
from trainpipes.interfaces.stage import Tally, made_once
from trainpipes.media import Undecodable, bytes_of
from trainpipes.stages.columns import taken
from trainpipes.stages.map import RowFunction

#: Characters of a path, at most; what is longer is shown in part.
LONG = 255


class Decoder(RowFunction, asks_inputs=True):
    """A stage that decodes a column of files, in the engine's threads: ``column``, ``output_column``,
    ``on_error``, ``folder``, ``storage_options`` and ``retry`` are its options. Of a batch it leaves
    out rows, and of batches those without any.

    Attributes:
        said: the kind of value, in errors.
        unit: the same in counts of rows that are left out.
    """

    free = frozenset({"folder", "storage_options", "retry"})
    rng = False
    shares = True
    thread_safe = True
    _rows_of_batches = _gives_arrays = True

    said: ClassVar[str]
    unit: ClassVar[str]

    @abstractmethod
    def decoded(self, value: Any, row: Any, rng: Any) -> Any:
        """What a value of a row becomes; raises ``Undecodable``. With ``rng`` it gets the row's generator."""

    def check(self) -> None:
        self._set(retry=Retry.of(self.options["retry"], f"{self.name}(retry)"))

    @contextmanager
    def opened(self, value: Any, whole: bool) -> Iterator[BinaryIO]:
        """What a value names, opened: bytes, a path or URL, or a struct of both. What cannot be decoded of a
        path is raised with it.
        """
        content = bytes_of(value)
        if isinstance(value, Mapping) and not isinstance(content, bytes):
            content = value.get("path")
        if content is None or content == "":
            raise Undecodable("it is empty" if content == "" else "it is null")
        if isinstance(content, bytes):
            yield BytesIO(content)
            return
        if not isinstance(content, str | os.PathLike):
            got = f"{shown(content, 60)} ({type(content).__name__})"
            kinds = "the bytes of files, or their paths or URLs"
            raise refused(self, f": column {self.options['column']!r} holds {kinds}, got {got}")
        path = os.fspath(content)
        folder, options = self.options["folder"], self.options["storage_options"]
        start = None if folder is None else os.fspath(folder)
        try:
            about = start, options, self.options["retry"], whole, self.name
            with closing(open_named(path, *about)) as file:
                yield file
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
            why = error.strerror or "there is no such file"
            if "://" in path:
                pass
            elif len(path) > LONG:
                why = f"{why}; map() makes bytes of base64"
            elif not os.path.isabs(path) and "\0" not in path:
                place = start or "the folder where the program runs"
                why = f"{why} in {place}, where paths begin unless folder= names another"
            raise Undecodable(f"{_short(hidden(path))}: {why}") from None
        except Undecodable as error:
            raise Undecodable(f"{hidden(path)}: {error}") from error

    @property
    def _output(self) -> str:
        output: str | None = self.options["output_column"]
        return output or str(self.options["column"])

    def _decoded_row(self, row: Any, rng: Any) -> dict[str, Any]:
        column, output = self.options["column"], self._output
        value = cell(row, column, self)
        if output != column and output in row:
            raise taken(output, self)
        several = isinstance(value, list | tuple)
        values = [self.decoded(v, row, rng) for v in (value if several else [value])]
        decoded = values if several else values[0]
        return {output if k == column else k: decoded if k == column else v for k, v in row.items()}

    def _traits(self) -> dict[str, Any]:
        return {"keeps_rows": not leaves_out(self.options["on_error"])}

    def _settle(self, threads: int) -> None:
        # Where the thread that iterates calls functions of the user's, others decode for it.
        self._running.executor = Threads(threads) if threads else None

    @property
    def function(self) -> tuple[Callable[..., Any], Any]:
        return self._fresh()._decoded_or_not, ""

    def _items(self, run: Run) -> Sequence[Any]:
        self._check_rows(run)
        return run.block.rows()

    def _words(self, run: Run) -> Any:
        return row_words(run.block) if self.rng else None

    def _decoded_or_not(self, row: Any, rng: Any = None) -> dict[str, Any] | Undecodable:
        try:
            return self._decoded_row(row, rng)
        except Undecodable as error:
            if not self.traits.keeps_rows:
                return error
            column = self.options["column"]
            said = f"column {column!r} holds no {self.said} that can be decoded: {error}"
            way = 'fix it, or leave such rows out with on_error="skip"'
            raise UnreadableError(f"{self}: {said}; {way}", stage=str(self)) from None

    def _with(self, run: Run, answer: Answer) -> Run:
        (rows, error), ids = answer, run.block.ids
        if error is not None:
            blame(error, self, int(ids[len(rows)]))
            raise error
        block, run = run.block, run.with_block(self._filled(run.block, rows))
        if self.traits.keeps_rows:
            return run
        good = np.array([not isinstance(row, Undecodable) for row in rows], dtype=np.bool_)
        self._left_out.drop(block, (~good).astype(np.int64), lambda row: rows[row])
        if good.all() or run.bounds is None:
            return run if good.all() else run.pick(np.flatnonzero(good))
        # Of batches with the rows that are left, those that have any.
        bounds = np.concatenate([[0], np.cumsum(good)])[run.bounds].astype(np.int64)
        shorter = Run(run.block.take(np.flatnonzero(good)), run.cursors, bounds)
        return shorter.keep(np.diff(bounds) > 0)

    def _filled(self, block: Block, decoded: list[Any]) -> Block:
        """Rows with their decoded values; where that is ``Undecodable``, they are left out after it."""
        return block.with_data(decoded)

    @made_once
    def _left_out(self) -> LeftOut:
        why, on_error = "they cannot be decoded", self.options["on_error"]
        return LeftOut(self, why, self.unit, unit="", on_error=on_error)

    def _tallies(self) -> Sequence[Tally]:
        return (self._left_out,)


def _short(path: str) -> str:
    return path if len(path) <= LONG else f"{path[:60]}… ({len(path):,} characters)"


#: An image, ``[C, H, W]``.
Pixels = npt.NDArray[Any]
Box = tuple[int, int, int, int]
Mode = Literal["RGB", "L", "RGBA", "P", "I"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]

#: What modes are of masks, and the types of their numbers.
IDS: Mapping[str, Any] = {"P": np.uint8, "I": np.int32}
#: What is decoded. Others of Pillow's formats run programs (EPS), or are no pictures.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
#: Pixels of a resized image, at most: a sliver that is scaled by its short side would fill the memory.
MOST_PIXELS = 1 << 28


class NoPicture(Undecodable):
    """Bytes of which no picture can be made."""


def by_pillow(content: bytes, mode: Mode, least: int | None = None) -> Pixels:
    """An image file's pixels, upright, ``[C, H, W]``; of several frames the first."""
    return planes(np.asarray(picture_of(content, mode, least)))


def picture_of(content: bytes, mode: Mode, least: int | None = None) -> Any:
    """The same as an image of Pillow's."""
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            if least is not None:
                image.draft(None, (least, least))
            top = top_of(image) if mode in IDS else None
            image.load()
            with suppress(Exception):  # of damaged EXIF, anything
                ImageOps.exif_transpose(image, in_place=True)
            picture: Any = eight_bits(image) if mode not in IDS else ids_of(image, mode, top)
            if picture.mode == "P" and "transparency" in picture.info:
                picture = picture.convert("RGBA")
            if picture.mode != mode and mode not in IDS:
                picture = picture.convert(mode)
    except NoPicture:
        raise
    except Exception as error:  # of damaged files, plugins raise any error
        said = " ".join(str(error).split()).replace(" <_io.BytesIO object", "").split(" at 0x")[0]
        raise NoPicture(f"{said or type(error).__name__} ({len(content):,} bytes)") from error
    return picture


def eight_bits(image: Any) -> Any:
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = f"numbers of 32 bits (Pillow's mode {image.mode})"
        way = 'mode="I" keeps them' if image.mode == "I" else "decode these in a map()"
        raise NoPicture(f"it holds {kind}, which have no fixed range: {way}")
    return image


def top_of(image: Any) -> int | None:
    """The number that Pillow makes white of, where that is not the largest of 8 or 16 bits."""
    coded = image.tile[0][3] if image.tile else None
    if image.format == "PPM" and isinstance(coded, tuple):
        return int(coded[1])
    name = coded[0] if isinstance(coded, tuple) and coded else coded
    return {"L;2": 3, "L;4": 15}.get(str(name)[:3])


def ids_of(image: Any, mode: Mode, top: int | None = None) -> Any:
    """The numbers of a mask as they are: places in a palette, or of gray, of which ``top`` is white."""
    from PIL import Image

    if image.mode not in ("1", "L", "P", "I") and not image.mode.startswith("I;16"):
        got = f"it holds colors (Pillow's mode {image.mode})"
        raise NoPicture(f"{got}, and mode={mode!r} keeps numbers of classes: make them in a map()")
    ids = np.asarray(image)
    if top is not None and ids.dtype != np.bool_:
        ids = np.rint(ids * (top / (255 if image.mode == "L" else 65_535))).astype(np.int32)
    if mode == "P" and ids.max() > 255:
        raise NoPicture(f'it holds numbers up to {ids.max():,}, above 255: mode="I" keeps them')
    return Image.fromarray(ids.astype(IDS[mode]))


def planes(array: Any) -> Pixels:
    array = array[:, :, None] if array.ndim == 2 else array
    pixels: Pixels = np.array(array.transpose(2, 0, 1), order="C")
    return pixels


def resized(
    image: Pixels, size: tuple[int, int], interpolation: Interpolation, box: Box | None = None
) -> Pixels:
    from PIL import Image

    height, width = size
    if image.dtype != np.uint8 and (image.dtype != np.int32 or len(image) > 1):
        raise NoPicture(f"must be of uint8, got {image.dtype}: put normalize() after it")
    if height * width > MOST_PIXELS:
        was = f"of {image.shape[1]} x {image.shape[2]} pixels would become {height:,} x {width:,}"
        raise NoPicture(f"{was}: leave it out with filter(), or give the size as (height, width)")
    if box is None and size == image.shape[1:]:
        return image
    if box is not None and (box[3] - box[1], box[2] - box[0]) == size:
        return np.array(image[:, box[1] : box[3], box[0] : box[2]], order="C")
    rows = image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))
    picture = Image.fromarray(rows)
    if len(image) == 4:  # of RGBA, Pillow multiplies the others by the fourth first
        picture = Image.frombuffer("CMYK", picture.size, rows, "raw", "CMYK", 0, 1)
    by = Image.Resampling[interpolation.upper()]
    return planes(np.asarray(picture.resize((width, height), by, box)))


class DecodeImage(Decoder):
    """Decode images: JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, AVIF and JPEG 2000.

    The column holds the files' bytes, their paths or URLs, or structs with ``bytes`` or ``path``; rows
    become dicts with an array, uint8 ``[C, H, W]``. A list of these becomes a list of arrays. Put it
    after ``shuffle``, whose buffer then holds no pixels. An image is turned upright by its EXIF
    orientation; transparency is dropped unless ``mode="RGBA"``; of 16 bits a channel the upper 8 are
    kept, of several frames the first. Of paths a file is read when it is decoded; ``read_images`` reads
    those on servers ahead.

    Args:
        column: the column of bytes, paths or URLs.
        output_column: the column of images, in place of ``column``.
        mode: "RGB", C = 3; "L" for gray, C = 1; "RGBA" for color and alpha, C = 4. Of masks, C = 1,
            numbers of classes as they are, in a palette or gray: "P" up to 255, or "I", int32.
        on_error: for an image that cannot be decoded, or a null: "raise"; or "skip" the row and log
            how many.
        min_size: decode a JPEG at a half, a quarter or an eighth of its size if both sides keep
            this many pixels: faster for large photos, with other pixel values.
        folder: that paths are relative to.
        storage_options: options of the fsspec file system of URLs; never shown or saved.
        retry: as in ``list_files``.

    Raises:
        MissingExtraError: Pillow is not installed.
        SchemaError: the column is not there, or ``output_column`` already is.
        UnreadableError: an image cannot be decoded.

    >>> import io, trainpipes as tp
    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (4, 2), (255, 0, 0)).save(file, "PNG")
    >>> rows = tp.from_dataset([{"bytes": file.getvalue(), "label": 3}])
    >>> row = next(iter(rows.decode_image()))
    >>> row["image"].shape, row["image"][:, 0, 0].tolist(), row["label"]
    ((3, 2, 4), [255, 0, 0], 3)
    """

    said, unit = "picture", "image"

    column: ColumnName = "bytes"
    _: KW_ONLY
    output_column: ColumnName = "image"
    mode: Mode = "RGB"
    on_error: OnBadRow = "raise"
    min_size: Count | None = None
    folder: str | os.PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = None
    retry: Retry | Mapping[str, Any] = Retry()

    def check(self) -> None:
        super().check()
        need("PIL", "decode_image()")

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "decoder": "pillow"}  # other decoders give other pixels

    def decoded(self, value: Any, row: Any, rng: Any) -> Pixels:
        with self.opened(value, True) as file:
            return by_pillow(file.read(), self.mode, self.min_size)
