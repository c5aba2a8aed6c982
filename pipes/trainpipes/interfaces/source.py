"""The sources of rows.

A ``RowSource`` lists its blocks (row groups, ranges of indices) in advance, so that numbers alone
plan, shuffle and deal an epoch. A ``RowStream`` is read from the start, and a resume skips.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes import errors
from trainpipes._internal.checks import IntArray
from trainpipes.columns.payload import Payload, join_payloads
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.interfaces.stage import is_ours


@dataclass(frozen=True, repr=False)
class Place:
    """Where a row is, as errors and ``locate`` say it.

    Attributes:
        path: the file; None for rows in memory.
        row_group: the row group, record batch or block, from 0.
        row: the row in its file, from 0.
        source: the name of its source in a ``mix``.

    >>> from trainpipes import Place
    >>> str(Place("a.parquet", row_group=2, row=41))
    'a.parquet, row group 2, row 41'
    """

    path: str | None = None
    row_group: int | None = None
    row: int | None = None
    source: str | None = None  # of several that are mixed

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        said = ", ".join(f"{name}={value!r}" for name, value in values)
        return errors.hidden(f"{type(self).__name__}({said})")

    def __str__(self) -> str:
        parts = [] if self.source is None else [f"source {self.source!r}"]
        if self.path is not None:
            parts.append(errors.hidden(self.path))
        if self.row_group is not None:
            parts.append(f"row group {self.row_group}")
        if self.row is not None:
            parts.append(f"row {self.row}")
        return ", ".join(parts) or "an unknown row"


class Reader(Protocol):
    """Reads one span's blocks; to go on where the last call ended costs nothing."""

    def read(self, block: int, start: int, stop: int) -> Payload: ...

    def close(self) -> None: ...


class Taker(Protocol):
    """Takes rows by number, for several threads."""

    def take(self, index: IntArray) -> Payload: ...

    def coming(self, index: IntArray) -> None: ...


@runtime_checkable
class LooksAhead(Protocol):
    """A reader that can begin to fetch blocks before they are read.

    ``turns``: of each block, when it is needed, comparable over the readers of a process; ``most``: bytes
    that all of them may hold.
    """

    def expect(
        self, blocks: Sequence[int], turns: Sequence[float] = (), most: float = math.inf
    ) -> None: ...


def checked_source(source: Any, caller: object) -> RowSource | RowStream:
    if not isinstance(source, RowSource | RowStream):
        raise errors.ConfigError(
            f"{caller}: open() returns a RowSource or a RowStream, got {type(source).__name__}"
        )
    if is_ours(type(source)):
        return source
    if isinstance(source, RowSource):
        given = getattr(source, "lengths", None)
        lengths = np.asarray(given)
        good = lengths.ndim == 1 and (lengths.dtype.kind in "iu" or not len(lengths))
        if not good or (lengths < 0).any() or float(lengths.sum(dtype=np.float64)) >= 2**62:
            raise errors.ConfigError(
                f"{caller}: {type(source).__name__}.lengths must be the rows of each block, integers of 0 or "
                f"more in an array [blocks], got {errors.shown(lengths.tolist())}"
            )
        try:
            if lengths is not given or lengths.dtype != np.int64:
                source.lengths = lengths.astype(np.int64)
        except AttributeError as error:
            raise errors.ConfigError(
                f"{caller}: {type(source).__name__}.lengths must be an array of int64 where it cannot be "
                f"set, as of a property, got {errors.shown(given)}; write np.array(..., dtype=np.int64)"
            ) from error
    try:
        json.dumps(source.fingerprint())
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.ConfigError(
            f"{caller}: {type(source).__name__}.fingerprint() must be a dict of texts, numbers and lists of "
            f"these, which a state keeps as JSON: {error}; write int(...) around NumPy's numbers"
        ) from error
    return source


def read_rows(source: RowSource, reader: Reader, block: int, start: int, stop: int) -> Payload:
    """Rows of a block; raises DataError where a source, or a format, of the user's gives others."""
    data = reader.read(block, start, stop)
    if is_ours(type(source)) and getattr(source, "is_ours", True):
        return data
    good = isinstance(data, pa.Table | list | TensorRows)
    if not good or len(data) != stop - start:
        got = f"{len(data):,} rows" if good else f"{type(data).__name__}"
        raise errors.DataError(
            f"{type(source).__name__}.read({block}, {start}, {stop}) returns the {stop - start:,} rows of a "
            f"block from {start} on, as a pyarrow.Table or a list, got {got}"
        )
    return data


def read_full(reader: StreamReader, rows: int) -> Payload | None:
    """A stream's next rows: fewer only at its end, None past it."""
    parts: list[Payload] = []
    while rows:
        data = reader.read(rows)
        if data is None:
            break
        if not isinstance(data, pa.Table | list | TensorRows) or len(data) > rows:
            got = f"{len(data):,}" if isinstance(data, pa.Table | list) else type(data).__name__
            raise errors.DataError(
                f"{type(reader).__name__}.read({rows}) returns at most {rows:,} rows, as a pyarrow.Table "
                f"or a list, or None at the end, got {got}"
            )
        if not len(data) and not is_ours(type(reader)):
            raise errors.DataError(
                f"{type(reader).__name__}.read({rows}) returns a row or more, and None at the end, got no "
                "row: let it read on until there is one"
            )
        parts.append(data)
        rows -= len(data)
    return join_payloads(parts) if len(parts) > 1 else parts[0] if parts else None


class RowSource(ABC):
    """Rows whose blocks are known before they are read.

    Your own source sets ``lengths``, and defines ``fingerprint`` and ``read``; or ``reader``
    instead of ``read``, if reading has a state, such as an open file.

    Attributes:
        lengths: rows in each block, in file order, int64 ``[blocks]``.
        row_bytes: bytes of an average row in memory; None if unknown.
        block_bytes: bytes of each block, float64 ``[blocks]``; None if all rows count alike.
        schema: Arrow schema of all rows, if known in advance.
        unread: blocks left out of every epoch, bool ``[blocks]``; their rows are numbered.
        is_filtered: blocks that are read hold only rows that pass the reader's filter.
        file_of_block: the file of each block, int64 ``[blocks]``; None if there are no files.

    >>> import numpy as np, trainpipes as tp
    >>> class Squares(tp.RowSource):
    ...     lengths = np.array([3, 2])  # two blocks
    ...
    ...     def read(self, block, start, stop):
    ...         return [(3 * block + n) ** 2 for n in range(start, stop)]
    ...
    ...     def fingerprint(self):
    ...         return {"squares": 5}
    >>> class FromSquares(tp.Source):
    ...     def open(self):
    ...         return Squares()
    >>> list(tp.Pipeline([FromSquares()]).batch(3))
    [[0, 1, 4], [9, 16]]
    """

    lengths: IntArray
    row_bytes: float | None = None
    block_bytes: npt.NDArray[np.float64] | None = None
    schema: pa.Schema | None = None
    unread: npt.NDArray[np.bool_] | None = None
    is_filtered: bool = False
    named_by: tuple[Any, int] | None = None
    joined_inputs: Sequence[Any] = ()
    file_of_block: IntArray | None = None
    #: What a state names of a source that grows: files below the listed folder, or a version.
    epoch_files: Sequence[str] = ()

    def reader(self) -> Reader:
        """A reader of a span's blocks. Different threads may use different readers."""
        return self

    def read(self, block: int, start: int, stop: int) -> Payload:
        """Rows ``start`` to ``stop`` of a block. May be called by several threads."""
        raise errors.ConfigError(
            f"{type(self).__name__} needs read(block, start, stop), which returns rows of a block"
        )

    def close(self) -> None:  # noqa: B027  (nothing to close is the usual case)
        """Close the resources of reading, such as files."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data in a state, of JSON types: tables and tensors by all rows, files
        by names, sizes and row counts, others by class or ``version=`` and length. Put counts
        before digests: a message names the first difference.
        """

    def _check_length(self) -> None:  # noqa: B027  (most are of files, which are compared as they are read)
        """Raise DataChangedError where there are more rows than when it was opened, or fewer: asked as a
        pass begins.
        """

    def block_key(self, block: int) -> Any:
        """What identifies a block's rows, of JSON types; None if nothing does."""
        return None

    def place(self, block: int, row: int) -> Place:
        """Where row ``row`` of a block is: file, row group, row."""
        return Place(row_group=block, row=row)

    def places(self, block: int, row: int) -> list[Place]:
        """Where all parts of a row are, of rows joined side by side."""
        return [self.place(block, row)]

    def _decoding_bytes(
        self, blocks: npt.NDArray[Any], spans: int, threads: bool, fetched: float
    ) -> int:
        """Bytes of a process for open files and what is fetched ahead, where so many spans are open.

        ``blocks``: bytes of the rows of each; ``threads``: whether several read at a time; ``fetched``: most
        that is fetched.
        """
        return 0

    def describe(self) -> list[tuple[str, str]]:
        """Lines for ``explain()``: pairs of a label and a text."""
        return []


class StreamReader(ABC):
    """One pass over a ``RowStream``, which shows an example."""

    @abstractmethod
    def read(self, rows: int) -> Payload | None:
        """The next rows, ``rows`` of them at most and one at least; None at the end."""

    def state(self) -> dict[str, Any]:
        """The position of the next ``read``; an empty dict if the stream cannot seek."""
        return {}

    def close(self) -> None:  # noqa: B027  (nothing to close is the usual case)
        """Close the resources of the pass, such as files."""


class RowStream(ABC):
    """Rows in turn, whose number may be unknown.

    Your own stream defines ``open`` and ``fingerprint``. With ``seekable = True`` a resume passes what the
    reader's ``state()`` returned to ``open``; else it reads from the start and skips.

    >>> import trainpipes as tp
    >>> class Countdown(tp.RowStream):
    ...     seekable = True
    ...
    ...     def open(self, epoch, state):
    ...         return CountdownReader((state or {"at": 5})["at"])
    ...
    ...     def fingerprint(self):
    ...         return {"countdown from": 5}
    >>> class CountdownReader(tp.StreamReader):
    ...     def __init__(self, at):
    ...         self.at = at
    ...
    ...     def read(self, rows):
    ...         found = list(range(self.at, max(0, self.at - rows), -1))
    ...         self.at -= len(found)
    ...         return found or None
    ...
    ...     def state(self):
    ...         return {"at": self.at}
    >>> class FromCountdown(tp.Source):
    ...     def open(self):
    ...         return Countdown()
    >>> list(tp.Pipeline([FromCountdown()]).batch(2))
    [[5, 4], [3, 2], [1]]
    """

    @property
    def length(self) -> int | None:
        """Rows in each epoch; None if unknown."""
        return None

    @abstractmethod
    def open(self, epoch: int, state: dict[str, Any] | None) -> StreamReader:
        """A pass from its start, or from the ``state()`` of an earlier pass."""

    @property
    def seekable(self) -> bool:
        """Whether a pass can start at a ``state()`` without reading from the start."""
        return False

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the stream in a state, of JSON types; see ``RowSource.fingerprint``."""

    def describe(self) -> list[tuple[str, str]]:
        """Lines for ``explain()``: pairs of a label and a text."""
        return []


class RandomAccessSource(RowSource):
    """Rows that can be read by number, for samplers and a global shuffle. ``by_number``: this is as
    good as reading blocks, and windows hold numbers only. ``holds_numbers``: a window's bytes
    are those of numbers, which shapes the order.
    """

    by_number: bool = False
    holds_numbers: bool = False

    @abstractmethod
    def take(self, index: IntArray) -> Payload:
        """The rows at ``index``, int64 in file order over all blocks, any order, repeats allowed.
        Several threads may call it.
        """

    def will_need(self, start: int, stop: int) -> None:
        """Rows ``start`` to ``stop`` will soon be asked for."""

    def taker(self) -> Taker:
        """What a window takes its rows from."""
        return self

    def coming(self, index: IntArray) -> None:
        """A thread asks for the rows at ``index`` next, in this order."""


class NumberedRowsSource(RandomAccessSource):
    """Rows in even blocks that are cheap to take by number: tables, tensors, the indices of a dataset. A
    subclass defines ``slice`` and ``take``.
    """

    by_number = True

    def __init__(self, rows: int, block_rows: int = 8192) -> None:
        self.rows = rows
        self._starts = even_blocks(rows, block_rows)
        self.lengths = np.diff(self._starts)

    @abstractmethod
    def slice(self, start: int, stop: int) -> Payload:
        """Rows ``start`` to ``stop``."""

    def read(self, block: int, start: int, stop: int) -> Payload:
        first = int(self._starts[block])
        return self.slice(first + start, first + stop)

    def place(self, block: int, row: int) -> Place:
        return Place(row=int(self._starts[block]) + row)

    def describe(self) -> list[tuple[str, str]]:
        return [("rows", f"{self.rows:,}")]


def even_blocks(rows: int, block_rows: int) -> IntArray:
    """First row of each block of ``block_rows`` rows, and the end: int64 ``[blocks + 1]``.

    >>> even_blocks(10, 4).tolist(), even_blocks(0, 4).tolist()
    ([0, 4, 8, 10], [0, 0])
    """
    starts = np.arange(0, max(1, rows), block_rows, dtype=np.int64)
    return np.append(starts, rows)
