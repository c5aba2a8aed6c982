"""Reads the files of ``inspect_files``: their footers, a sample of rows, and which columns are images, sound
and video.
"""

from __future__ import annotations

import glob
import posixpath
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes import errors
from trainpipes._internal.checks import IntArray
from trainpipes._internal.pool import default_threads, side_by_side
from trainpipes._internal.progress import counted
from trainpipes.columns.columns import table_of
from trainpipes.engine.iterating.iteration_state import plan_of
from trainpipes.engine.record import Record
from trainpipes.filesystems.retry import Stopped
from trainpipes.filesystems.systems import is_local, open_system
from trainpipes.interfaces.quarantine import PLACES
from trainpipes.interfaces.source import Place, RowSource
from trainpipes.interfaces.stage import snake_case
from trainpipes.media import Undecodable, sound, video
from trainpipes.sources.files.decoded_files import BAD, separate
from trainpipes.sources.files.file_reader import (
    COMPRESSED,
    each_file,
    ends_of_names,
    reader_by_name,
)
from trainpipes.sources.files.folders import METADATA, natural
from trainpipes.sources.files.formats import reason
from trainpipes.sources.files.list_files import FileList, ListFiles
from trainpipes.sources.from_memmap import FromMemmap
from trainpipes.sources.mapped_rows import is_memmap
from trainpipes.sources.read_arrow import ReadArrow, saved_files
from trainpipes.sources.read_csv import ReadCsv
from trainpipes.sources.read_files import ReadImages
from trainpipes.sources.read_json import ReadJson
from trainpipes.sources.read_numpy import ReadNumpy
from trainpipes.sources.read_parquet import ReadParquet
from trainpipes.sources.read_text import ReadText
from trainpipes.sources.read_webdataset import ReadWebdataset
from trainpipes.sources.tables.read_delta import ReadDelta
from trainpipes.sources.tables.read_iceberg import ReadIceberg
from trainpipes.sources.tables.read_lance import ReadLance
from trainpipes.stages.decoding import by_pillow

#: How files begin, and their kinds; of MP4 and RIFF bytes 8 to 12 say it.
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
#: Rows whose first bytes tell the kind of a column; forms of sounds or videos that are printed.
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
        rows: of the sample whose length is known; ``unknown``: of others, as of streams without a duration.
        hours: of all rows of the files, estimated from those that are known; None without any.
        seconds: the "least", the "mean" and the "most" of a row; None without any.
        forms: how many rows of the sample are of each: rate and channels, or size and frames a second; those
            of most rows first.
    """

    column: str
    kind: str
    rows: int
    unknown: int
    hours: float | None
    seconds: dict[str, float | None]
    forms: dict[str, int]

    @property
    def cells(self) -> list[str]:
        """What a table shows of it."""
        values = self.hours, *self.seconds.values()
        hours, *each = ("?" if value is None else f"{value:,.3g}" for value in values)
        rows = self.rows + self.unknown
        seconds = " / ".join(each) + f", {self.unknown:,} of {rows:,} unknown" * bool(self.unknown)
        more = len(self.forms) - FORMS
        forms = [*list(self.forms)[:FORMS], *([f"{more:,} more"] if more > 0 else [])]
        return [self.column, hours, seconds, "; ".join(forms)]


def clips_of(
    column: str, kind: str, lengths: Sequence[Length], total: int, looked_at: int
) -> Clips:
    """What a sample says of a column of ``total`` rows, of which it has ``looked_at``."""
    known = [length.seconds for length in lengths if length.seconds >= 0]
    mean = float(np.mean(known)) if known else None
    seconds = {"least": min(known, default=None), "mean": mean, "most": max(known, default=None)}
    forms = Counter(length.form for length in lengths).most_common()
    hours = None if mean is None else mean * len(lengths) * total / max(1, looked_at) / 3600
    unknown = len(lengths) - len(known)
    return Clips(column, kind, len(known), unknown, hours, seconds, dict(forms))


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


#: What reads files, by the name of its stage.
CLASSES: dict[str, Any] = {
    snake_case(kind.__name__): kind
    for kind in (
        ReadParquet, ReadJson, ReadCsv, ReadArrow, ReadText, ReadWebdataset, ReadNumpy, ReadImages,
    )
}  # fmt: skip
#: Formats without a header: a file is read once to count its rows.
SCANNED = ("read_json", "read_csv", "read_text", "read_webdataset")
#: What reads row groups; and, of a table, the lines of ``explain()`` that are shown.
ROW_GROUPS, TABLE_LINES = (
    ("read_parquet", "read_delta", "read_iceberg"),
    ("version", "deleted rows"),
)
#: Those of which rows that cannot be parsed are counted.
TEXTS = ("read_json", "read_csv", "read_text")
#: Bytes of such files that are read, about 1 s a GB; a quarter of that if they are compressed or remote. Of
#: more, some of so many files are, the small ones first.
SCANNED_BYTES, SCANNED_FILES = 256 << 20, 64
#: Columns of names, of the samples of archives and of images: their lengths say nothing, and all differ.
NAMES = ("__key__", "path")
#: Pieces of consecutive rows that a sample has: of files on this machine, and of others, which cost requests.
LOCAL_PIECES, REMOTE_PIECES = 64, 16
#: Rows of such a piece at least.
PIECE_ROWS = 16
#: Bytes of a sample: of files on this machine, and of others.
LOCAL_BYTES, REMOTE_BYTES = 256 << 20, 32 << 20
#: How far into a row group a piece may begin: all before it is decoded, too.
DEPTH_BYTES = 16 << 20
#: Images of a sample, where each is a request.
REMOTE_IMAGES = 64
#: Files of ``save_to_disk`` that describe the data beside them.
ABOUT = ("state.json", "dataset_info.json", "dataset_dict.json")
#: Errors that are not about a single file.
OF_ALL = (errors.UnreachableError, Stopped, MemoryError, errors.MissingExtraError)


@dataclass
class Found:
    """The files, in groups that are read together, each by the name of its first file."""

    reader: str
    urls: Sequence[str]
    count: int
    bytes: int
    remote: bool = False
    sources: list[tuple[str, RowSource]] = field(default_factory=list)
    sampled: dict[str, pa.Schema] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)
    clips: dict[tuple[str, str], list[Length]] = field(default_factory=dict)  # by column and kind
    bad_rows: int = 0
    looked_at: int = 0
    scale: float = 1.0
    table: dict[str, str] = field(default_factory=dict)

    @property
    def schemas(self) -> dict[str, pa.Schema]:
        """Of each source, the schema of its headers, or else of the sample."""
        known = dict(self.sampled)
        for name, source in self.sources:
            rows = getattr(source, "rows_schema", None)
            if (schema := source.schema if rows is None else rows) is not None:
                known[name] = schema
        return known

    def note(self, place: Place, why: str) -> None:
        """A row of the sample cannot be used."""
        self.bad_rows += 1
        if len(self.bad) < PLACES:
            self.bad[errors.hidden(str(place))] = errors.hidden(why)

    @property
    def lengths(self) -> IntArray:
        """Rows of all blocks, int64 ``[blocks]``."""
        lengths = (source.lengths for _, source in self.sources)
        return np.concatenate([np.empty(0, np.int64), *lengths])

    @property
    def block_bytes(self) -> npt.NDArray[np.float64]:
        """Bytes of all blocks before compression, float64 ``[blocks]``."""
        usual = self.bytes / max(1, self.scale * self.lengths.sum())
        sizes = [
            (source.row_bytes or usual) * source.lengths
            if source.block_bytes is None
            else source.block_bytes
            for _, source in self.sources
        ]
        return np.concatenate([np.empty(0), *sizes])


def find_files(urls: Sequence[str], storage_options: Mapping[str, Any] | None) -> Found:
    """The files of the format with most bytes, and facts that need no reading of rows."""
    if not urls:
        raise errors.MissingFilesError(
            "inspect_files(files) must be a path, folder, glob or URL, or a list of them, got none"
        )
    if all(any(map(is_memmap, [url, *glob.glob(f"{glob.escape(url)}/*/")])) for url in urls):
        source = FromMemmap(list(urls) if len(urls) > 1 else urls[0]).open()
        size = int((source.row_bytes or 0) * source.lengths.sum())
        count = len(np.unique(source.file_of_block))
        return Found("from_memmap", urls, count, size, sources=[(urls[0], source)])
    if (table := _found_table(urls, storage_options)) is not None:
        return table
    files = ListFiles(urls=list(urls), suffix="", storage_options=storage_options).files()
    readers = np.array([reader_by_name(name) for name in files.names])
    sizes = np.maximum(files.sizes, 0)
    known = sorted({*readers.tolist()} - {""})
    if not known:
        raise errors.ConfigError(
            f"inspect_files(files) must end in {', '.join(ends_of_names()[:12])}, …, got {len(files):,} "
            f"others, such as {errors.cut(files.names[0])}; rename them"
        )
    reader = max(known, key=lambda kind: sizes[readers == kind].sum())
    about = ABOUT if reader == "read_arrow" else ()
    beside = zip(files.names, readers, strict=True)
    others = [
        errors.hidden(n) for n, kind in beside if kind not in ("", reader) and not n.endswith(about)
    ]
    files = files.pick(np.flatnonzero(readers == reader).astype(np.int64))
    if reader == "read_arrow":
        files = saved_files(files, "inspect_files()")
    size, remote = int(np.maximum(files.sizes, 0).sum()), not all(map(is_local, files.systems))
    sample = Found(reader, list(urls), len(files), size, remote, others=others)
    _open(sample, files)
    return sample


def _found_table(urls: Sequence[str], storage_options: Mapping[str, Any] | None) -> Found | None:
    """A table with versions, as its newest version describes it; None for files."""
    if len(urls) != 1 or (reader_by_name(urls[0]) and not urls[0].endswith(METADATA)):
        return None
    stage = _table_stage(urls[0], storage_options)
    if stage is None:
        return None
    source: Any = stage.open()
    sizes = source.sizes if hasattr(source, "sizes") else source.file_bytes
    lines = {label: text for label, text in source.describe() if label in TABLE_LINES}
    found = Found(stage.name, urls, len(sizes), int(sizes.sum()), sources=[(urls[0], source)])
    found.table = lines
    return found


def _table_stage(url: str, storage_options: Mapping[str, Any] | None) -> Any:
    options: dict[str, Any] = {"storage_options": storage_options}
    if url.endswith(METADATA):
        return ReadIceberg(url, **options)
    system, path = open_system(url, storage_options or {})

    def inside(folder: str) -> list[str]:
        place = posixpath.join(path, folder)
        try:
            return [posixpath.basename(name.rstrip("/")) for name in system.ls(place, detail=False)]
        except (OSError, ValueError):
            return []  # whoever reads it says so

    names = [name.lstrip("_") for name in inside("")]
    if "delta_log" in names:
        return ReadDelta(url, **options)
    if "versions" in names and "data" in names:
        return ReadLance(url, **options)
    if "metadata" in names:
        files = sorted((n for n in inside("metadata") if n.endswith(METADATA)), key=natural)
        if files:
            return ReadIceberg(posixpath.join(url, "metadata", files[-1]), **options)
    return None


def _open(sample: Found, files: FileList) -> None:
    wanted = _wanted_files(sample, files)

    def look(*numbers: int, bad_rows: str = "skip") -> list[tuple[str, RowSource]]:
        some = files.pick(np.array(numbers, dtype=np.int64))
        name = errors.hidden(some.names[0])
        try:
            return [(name, _opened(sample.reader, some, bad_rows))]
        except OF_ALL:
            raise
        except Exception as error:
            if len(numbers) == 1:
                if bad_rows == "skip":
                    return look(*numbers, bad_rows="raise")  # raises for the bad rows
                sample.unreadable[name] = reason_of(name, error)
            return []

    # Those without a header are read to their end, once, and so each by itself.
    sample.sources = look(*wanted) if wanted and sample.reader not in SCANNED else []
    if sample.reader in SCANNED or (len(wanted) > 1 and not sample.sources):
        one_by_one = each_file(
            files, lambda n, _: look(n), "inspect_files()", "data",
            wanted=wanted, job="looking at files",
        )  # fmt: skip
        sample.sources = [source for several in one_by_one.values() for source in several]
        if sample.reader in SCANNED and len(wanted) < len(files):
            read = sum(int(files.sizes[n]) for n, several in one_by_one.items() if several)
            sample.scale = sample.bytes / max(1, read)


def _wanted_files(sample: Found, files: FileList) -> list[int]:
    if sample.reader == "read_images":
        empty = np.flatnonzero(files.sizes == 0).tolist()
        sample.unreadable.update((errors.hidden(files.names[n]), "empty: 0 bytes") for n in empty)
        return np.flatnonzero(files.sizes != 0).tolist()
    packed = any(name.lower().endswith((*COMPRESSED, ".tgz")) for name in files.names)
    most = SCANNED_BYTES // 4 if sample.remote or packed else SCANNED_BYTES
    if sample.reader not in SCANNED or sample.bytes <= most:
        return list(range(len(files)))
    spread = np.arange(0, len(files), -(-len(files) // SCANNED_FILES))
    spread = spread[np.argsort(files.sizes[spread], kind="stable")]
    fit = int((np.cumsum(files.sizes[spread]) <= most).sum())
    return sorted(spread[: max(1, fit)].tolist())


def _opened(reader: str, files: FileList, bad_rows: str) -> RowSource:
    listed, kind = Record([ListFiles.of(files, files.names)]), CLASSES[reader]
    options: dict[str, Any] = {"on_error": bad_rows} if reader in TEXTS else {}
    options |= {"missing": "null"} if reader == "read_webdataset" else {}
    if reader != "read_images":
        return _source(listed.then(kind(index=False, **options)))
    try:
        return _source(listed.then(kind()))
    except errors.ConfigError:  # they are not in folders of classes
        return _source(listed.then(kind(labels=None)))


def _source(record: Record) -> RowSource:
    source: RowSource = plan_of(record).inputs.listed
    return source


def reason_of(name: str, error: Exception) -> str:
    """What an error says of a file."""
    if not isinstance(error, errors.TrainpipesError):
        return errors.hidden(reason(error))
    lines = str(error).splitlines()
    line = next((line for line in lines if line.lstrip().startswith(name)), lines[0]).strip()
    return line.removeprefix(name).lstrip(",: ")


def read_sample(sample: Found, rows: int, small: bool) -> list[pa.Table]:
    """About ``rows`` rows in pieces; files that cannot be decoded go to ``found.unreadable``."""
    most = REMOTE_BYTES if sample.remote or small else LOCAL_BYTES
    if size := float(sample.block_bytes.sum()):
        rows = min(rows, max(1, int(most * int(sample.lengths.sum()) / size)))
    if sample.remote and sample.reader == "read_images":
        rows = min(rows, REMOTE_IMAGES)
    tables: list[pa.Table] = []
    places = _places(sample, rows)
    pieces = counted(places, "reading some rows of files", len(places), "pieces")
    for number, of_source in groupby(pieces, itemgetter(0)):
        name, source = sample.sources[number]
        with closing(source.reader()) as reader:
            for _, *place in of_source:
                try:
                    table = table_of(reader.read(*place), "inspect_files()")
                except OF_ALL:
                    raise
                except Exception as error:
                    path = errors.hidden(getattr(error, "path", None) or name)
                    sample.unreadable[path] = reason_of(path, error)
                    continue
                block, start, _ = place
                sample.looked_at += len(table)
                if BAD.name in table.column_names:
                    table, bad = separate(table)
                    for row, (why, _) in bad.items():
                        sample.note(source.place(block, start + row), why)
                    table = table.take(np.setdiff1d(np.arange(len(table)), [*bad]))
                of_images = sample.reader == "read_images"
                for column, kind, row, result in looked_into(table, of_images):
                    if isinstance(result, Length):
                        sample.clips.setdefault((column, kind), []).append(result)
                    elif result:
                        sample.note(source.place(block, start + row), result)
                tables.append(table)
                sample.sampled.setdefault(name, table.schema)
                most -= tables[-1].nbytes
                if most < 0:
                    return tables
    return tables


def _places(sample: Found, rows: int) -> list[tuple[int, int, int, int]]:
    blocks = [
        (n, b) for n, (_, source) in enumerate(sample.sources) for b in range(len(source.lengths))
    ]
    lengths, ends = sample.lengths, np.cumsum(sample.lengths)
    total = int(lengths.sum())
    if total <= rows:
        return [(*blocks[n], 0, int(lengths[n])) for n in np.flatnonzero(lengths).tolist()]
    pieces = max(1, min(REMOTE_PIECES if sample.remote else LOCAL_PIECES, rows // PIECE_ROWS))
    each = rows // pieces
    edges = np.linspace(0, total, pieces + 1)[:-1].astype(np.int64)
    owners = np.searchsorted(ends, edges, side="right")
    lengths_there = lengths[owners]
    # Only the beginning of a large row group is read: its pieces are spread over that.
    deep = DEPTH_BYTES / np.maximum(1.0, sample.block_bytes[owners] / lengths_there)
    reach = np.maximum((np.bincount(owners)[owners] + 1) * each, deep) / lengths_there
    within = (edges - ends[owners] + lengths_there) * np.minimum(1.0, reach)
    starts = within.astype(np.int64)
    places = np.stack([owners, starts, np.minimum(lengths_there, starts + each)], 1).tolist()
    return [(*blocks[owner], start, stop) for owner, start, stop in places]
