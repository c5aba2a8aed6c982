from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.types import IntArray
from trainpipes.sources.files.file_bytes import FetchedBytes, FileBytes, merged

#: Names of columns; None for all.
Columns = Sequence[str] | None


class OtherBytesError(Exception):
    """A file is not the one that was scanned; the message says what is different."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The blocks that a format found in a file.

    Args:
        rows: rows of each block, int64 ``[blocks]``.
        start: where the bytes of each block begin in the file, int64 ``[blocks]``.
        stop: where they end, int64 ``[blocks]``.
        schema: columns and types; no columns if only the rows show them.
        extra: more that ``decode`` needs.

    Raises:
        ValueError: the arrays differ in length.
    """

    rows: IntArray
    start: IntArray
    stop: IntArray
    schema: pa.Schema
    extra: bytes = b""

    def __post_init__(self) -> None:
        numbers = [_counts(name, getattr(self, name)) for name in ("rows", "start", "stop")]
        if len({len(each) for each in numbers}) > 1 or (numbers[1] > numbers[2]).any():
            lengths = ", ".join(f"{len(each):,}" for each in numbers)
            raise ValueError(
                "Layout(rows, start, stop) are numbers of the same blocks, none of which ends before it "
                f"begins, got {lengths} of them"
            )
        for name, each in zip(("rows", "start", "stop"), numbers, strict=True):
            object.__setattr__(self, name, each)


def checked_layout(
    rows: IntArray, start: IntArray, stop: IntArray, schema: pa.Schema, extra: bytes
) -> Layout:
    """A layout of numbers that were checked when it was kept."""
    layout = object.__new__(Layout)
    vars(layout).update(rows=rows, start=start, stop=stop, schema=schema, extra=extra)
    return layout


def _counts(name: str, values: npt.ArrayLike) -> IntArray:
    counts = np.asarray(values)
    if counts.ndim != 1 or (len(counts) and (counts.dtype.kind not in "iu" or counts.min() < 0)):
        raise ValueError(f"Layout({name}) is a list of integers of 0 or more, got {values!r:.80}")
    return counts.astype(np.int64, copy=False)


class Format(ABC):
    """A file format of your own: it finds the blocks of a file, and decodes one of them.

    It has no state and is picklable: threads and processes share it.

    Attributes:
        name: what messages and the index call it.
        suffixes: endings of its files in folders; ``("",)`` for all.
        key: options that change the layout or the rows, as text; a state with another key is refused.

    >>> import numpy as np, pathlib, pyarrow as pa, tempfile, trainpipes as tp
    >>> class Numbers(tp.Format):
    ...     name, suffixes, schema = "numbers", (".i8",), pa.schema([("x", pa.int64())])
    ...     def scan(self, file):
    ...         start = np.arange(0, file.size, 800)
    ...         stop = np.append(start[1:], file.size)
    ...         return tp.Layout((stop - start) // 8, start, stop, self.schema)
    ...     def decode(self, data, layout, block, columns):
    ...         [content] = data.read(self.ranges(layout, block, columns))
    ...         yield pa.record_batch({"x": np.frombuffer(content, "<i8")})
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.i8").write_bytes(np.arange(1000, dtype="<i8").tobytes())
    >>> rows = tp.read_files(folder, Numbers())
    >>> len(rows), next(iter(rows.skip(750)))
    (1000, {'x': 750})
    """

    name: str
    suffixes: tuple[str, ...] = ("",)
    key: str = ""
    #: What messages call blocks, whether they number them, and whether a state knows the rows of each.
    blocks_called, places_blocks, known_by_blocks = "blocks", False, False
    #: Whether ``fetch`` gets a part of what is large, so that it can be called for blocks of any size.
    fetches_parts = False
    #: Whether rows can be read by their numbers, by ``take``; and whether that is as good as by blocks.
    random_access = by_number = False
    #: In which files, and what to do with others, as text.
    fit, otherwise = "files that are on this machine", "shuffle within a buffer"

    @abstractmethod
    def scan(self, file: FileBytes) -> Layout:
        """Find the blocks of a file, for the index. Several threads call it.

        Args:
            file: ``file.size``, ``file.name``, ``file.read([(start, stop), ...])``, which returns a
                memoryview for each range, and ``file.stream(start)``, an open file.

        Raises:
            Exception: any, if the file is not of this format; the message should name the file.
        """

    def ranges(self, layout: Layout, block: int, columns: Columns) -> list[tuple[int, int]]:
        """The bytes that ``decode`` reads of a block, by default from ``start`` to ``stop``. Remote ones are
        fetched ahead.

        Args:
            layout: of the file.
            block: number of the block in it.
            columns: names of the wanted columns; None for all.
        """
        return [(int(layout.start[block]), int(layout.stop[block]))]

    @abstractmethod
    def decode(
        self, data: Any, layout: Layout, block: int, columns: Columns
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a block in order, as many as the layout counts.

        Args:
            data: the bytes of the file; ``data.mapped()`` maps a local one.
            layout: of the file.
            block: number of the block in it.
            columns: names of the wanted columns; None for all. Others may come, and are dropped.
        """

    def fingerprint(self) -> Any:
        """What identifies the format in a state, of JSON types."""
        return {"format": self.name, "key": self.key}

    # What most formats leave as it is

    def open(self, data: FileBytes, layout: Layout) -> Any:
        """What ``decode`` gets instead of the bytes, kept while a reader stays in a file; closed if it has
        ``close``.
        """
        return data

    def fetch(
        self, data: FileBytes, layout: Layout, blocks: Sequence[int], columns: Columns
    ) -> Any:
        """``open`` of a remote file, with the bytes of some blocks. Any thread calls it ahead."""
        ranges = [span for block in blocks for span in self.ranges(layout, block, columns)]
        return self.open(FetchedBytes(data, ranges), layout)

    def fetched_bytes(self, layout: Layout, blocks: Sequence[int], columns: Columns) -> float:
        """About how many bytes ``fetch`` gets; 0 to never call it."""
        ranges = [span for block in blocks for span in self.ranges(layout, block, columns)]
        return float(sum(stop - start for start, stop in merged(ranges)))

    def take(self, data: FileBytes, layout: Layout, rows: Any, columns: Columns) -> Any:
        """Rows by number: a record batch, tensors, or a list. ``rows`` is an array or, with ``by_number``, a
        slice.
        """
        raise NotImplementedError

    def unfit(self, layout: Layout, local: bool) -> bool:
        """Whether rows of a file cannot be read by number, as of a compressed one."""
        return not local

    def change(self, data: FileBytes, layout: Layout) -> str:
        """How an unreadable file differs from the scanned one, beyond size and time; or ""."""
        return ""

    def block_key(self, layout: Layout, blocks: range) -> list[Any]:
        """What identifies the rows of some blocks, besides file and numbers; of JSON types."""
        return []

    def note(self, layout: Layout) -> str:
        """What identifies a file in a state, besides name, size and row count."""
        return ""

    def content(self, layout: Layout) -> str:
        """What ``scan`` read of a file's content, as text such as a checksum: a state knows the file by it.

        By default "", nothing: then a store's ETag counts, or size alone.
        """
        return ""

    def describe(self, layouts: Sequence[Layout]) -> list[tuple[str, str]]:
        """More lines for ``explain()``: pairs of a label and a text."""
        return []


def packed(**values: Any) -> bytes:
    """Values of JSON types and arrays of numbers as bytes, for ``Layout.extra``.

    >>> unpacked(packed(kind="a", at=np.array([1, 2])))
    {'kind': 'a', 'at': array([1, 2])}
    """
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in values.items() if name not in arrays}
    about = [plain, [[name, each.dtype.str, len(each)] for name, each in arrays.items()]]
    head = json.dumps(about, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    parts = [len(head).to_bytes(8, "little"), head, *(each.tobytes() for each in arrays.values())]
    return b"".join(parts)


def unpacked(data: bytes) -> dict[str, Any]:
    at = 8 + int.from_bytes(data[:8], "little")
    values, arrays = json.loads(data[8:at])
    for name, kind, count in arrays:
        values[name] = np.frombuffer(data, kind, count, at)
        at += values[name].nbytes
    named: dict[str, Any] = values
    return named
