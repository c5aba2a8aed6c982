"""What a file format tells of itself: which blocks a file has, where their bytes are, and what these mean."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes.engine.layout import IntArray
from trainpipes.sources.files.file_bytes import FetchedBytes, FileBytes, merged


class OtherBytesError(Exception):
    """A file holds something else than when it was scanned; says what is different."""


@dataclass(frozen=True, eq=False)
class Layout:
    """What a format has found in one file: its blocks, and what their rows are.

    Args:
        rows: rows of each block, int64 ``[blocks]``.
        start: where the bytes of each block begin in the file, int64 ``[blocks]``.
        stop: where they end, int64 ``[blocks]``.
        schema: columns and types of the file's rows; one without columns if only the rows themselves say.
        extra: what the format needs besides to decode a block.

    Raises:
        ValueError: the numbers are no counts and places of as many blocks.
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
    found = object.__new__(Layout)
    vars(found).update(rows=rows, start=start, stop=stop, schema=schema, extra=extra)
    return found


def _counts(name: str, values: npt.ArrayLike) -> IntArray:
    found = np.asarray(values)
    if found.ndim != 1 or (len(found) and (found.dtype.kind not in "iu" or found.min() < 0)):
        raise ValueError(f"Layout({name}) is a list of integers of 0 or more, got {values!r:.80}")
    return found.astype(np.int64, copy=False)


class Format(ABC):
    """A file format of your own: it says which blocks a file has, and decodes one of them.

    The rest is as for any other format: shuffle, shards, exact seek to any row, resume on any number of
    ranks, columns and types that are the same in all files, and an index that is made once.

    A format has no state, and can be pickled: several threads and processes use it.

    Attributes:
        name: what messages and the index call it.
        suffixes: what names of its files in folders end with; ``("",)`` for all.
        key: options on which the layout or the rows depend, as text; a state is refused if it differs.

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
        """Look at a file, once: an index keeps what is found. Called by several threads.

        Args:
            file: its bytes: ``file.size``, ``file.name``, ``file.read([(start, stop), ...])``, which gives a
                memoryview for each range, and ``file.stream(start)``, an open file.

        Raises:
            Exception: any, if it is no such file; the message names the file and says why.
        """

    def ranges(
        self, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> list[tuple[int, int]]:
        """Bytes that ``decode`` will read of a block: those of files on other machines are fetched ahead. All
        bytes from ``start`` to ``stop``, unless a format says otherwise.

        Args:
            layout: of the file.
            block: number of the block in it.
            columns: names of the columns that are wanted; None for all.
        """
        return [(int(layout.start[block]), int(layout.stop[block]))]

    @abstractmethod
    def decode(
        self, data: Any, layout: Layout, block: int, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a block, in order: as many as the layout counts. Several small batches take less memory
        than one.

        Args:
            data: the bytes of the file, with ``data.mapped()`` of one on this machine.
            layout: of the file.
            block: number of the block in it.
            columns: names of the columns that are wanted; None for all. Others may come, and are dropped.
        """

    def fingerprint(self) -> Any:
        """What a state knows the format by, of JSON types."""
        return {"format": self.name, "key": self.key}

    # What most formats leave as it is

    def open(self, data: FileBytes, layout: Layout) -> Any:
        """What ``decode`` is given in place of the bytes, for as long as a reader stays in a file: for
        formats that keep something open. It is closed after, if it has ``close``."""
        return data

    def fetch(
        self, data: FileBytes, layout: Layout, blocks: Sequence[int], columns: Sequence[str] | None
    ) -> Any:
        """The same for a file on another machine, with the bytes of blocks that follow each other. Called
        ahead of reading them, by any thread."""
        ranges = [one for block in blocks for one in self.ranges(layout, block, columns)]
        return self.open(FetchedBytes(data, ranges), layout)

    def fetched_bytes(
        self, layout: Layout, blocks: Sequence[int], columns: Sequence[str] | None
    ) -> float:
        """About how many bytes ``fetch`` gets; 0 if it is not to be called."""
        ranges = [one for block in blocks for one in self.ranges(layout, block, columns)]
        return float(sum(stop - start for start, stop in merged(ranges)))

    def take(
        self, data: FileBytes, layout: Layout, rows: Any, columns: Sequence[str] | None
    ) -> Any:
        """Rows by their numbers in a file, in this order: a record batch or tensors, or a list of them. The
        numbers are an array; where ``by_number`` is set, also a slice."""
        raise NotImplementedError

    def unfit(self, layout: Layout, local: bool) -> bool:
        """Whether rows of a file cannot be read by number, for instance since it is compressed."""
        return not local

    def change(self, data: FileBytes, layout: Layout) -> str:
        """How a file whose rows cannot be read differs from the one that was scanned; "" if it does not. What
        its size, time of change or etag tells is known besides."""
        return ""

    def block_key(self, layout: Layout, blocks: range) -> list[Any]:
        """What identifies the rows of blocks besides the file and their numbers, of JSON types."""
        return []

    def note(self, layout: Layout) -> str:
        """What a state knows a file by besides its name, size and number of rows."""
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
    """What ``packed`` was given."""
    at = 8 + int.from_bytes(data[:8], "little")
    values, arrays = json.loads(data[8:at])
    for name, kind, count in arrays:
        values[name] = np.frombuffer(data, kind, count, at)
        at += values[name].nbytes
    found: dict[str, Any] = values
    return found
