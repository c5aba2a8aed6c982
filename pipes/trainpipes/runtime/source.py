"""What a pipeline needs of the place its rows come from.

A ``RowSource`` lists its blocks (row groups, ranges of indices) before anything is read, so that
the epoch can be planned, shuffled and dealt by numbers alone. A ``RowStream`` cannot: it is read
from the start, and a resume skips.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trainpipes.errors import ConfigError
from trainpipes.order import IntArray
from trainpipes.runtime.rows.block import Payload

__all__ = [
    "LooksAhead",
    "Place",
    "Reader",
    "RowMixture",
    "RowSource",
    "RowStream",
    "StreamReader",
]


@dataclass(frozen=True)
class Place:
    """Where a row stands, for messages."""

    path: str | None = None
    row_group: int | None = None
    row: int | None = None
    source: str | None = None  # of several that are mixed

    def __str__(self) -> str:
        parts = [] if self.source is None else [f"source {self.source!r}"]
        if self.path is not None:
            parts.append(self.path)
        if self.row_group is not None:
            parts.append(f"row group {self.row_group}")
        if self.row is not None:
            parts.append(f"row {self.row}")
        return ", ".join(parts) or "an unknown row"


class Reader(Protocol):
    """Reads one span's blocks. Reading on where the last call ended costs nothing extra."""

    def read(self, block: int, start: int, stop: int) -> Payload:
        """Rows ``start`` to ``stop`` of a block."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class LooksAhead(Protocol):
    """A reader that is glad to know what it will be asked for."""

    def expect(self, blocks: Sequence[int]) -> None:
        """Say which blocks will be read next, in order."""
        ...


class RowSource(ABC):
    """Rows whose blocks are known before they are read.

    A source of one's own sets ``lengths``, and defines ``fingerprint`` and ``read``; or ``reader``, where
    what reads has a place of its own, such as an open file.

    Attributes:
        lengths: rows in each block, in file order, int64 ``[blocks]``.
        row_bytes: bytes of an average row in memory, as far as it can be told; None if unknown.
        block_bytes: bytes of each block, float64 ``[blocks]``; None if all rows count alike.
        plans: of the pipelines whose rows these are, if there are several.
    """

    lengths: IntArray
    row_bytes: float | None = None
    block_bytes: npt.NDArray[np.float64] | None = None
    plans: Sequence[Any] = ()

    def reader(self) -> Reader:
        """What reads a span's blocks. Readers may be used by different threads."""
        return self

    def read(self, block: int, start: int, stop: int) -> Payload:
        """Rows ``start`` to ``stop`` of a block. May be called by several threads."""
        raise ConfigError(
            f"{type(self).__name__} needs read(block, start, stop), which returns rows of a block"
        )

    def close(self) -> None:  # noqa: B027  (nothing to close is the usual case)
        """Let go of what reading holds."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What a state knows the data by, of plain JSON types. Counts come before digests, so that a
        message names them.

        Tables and tensors in memory are known by all of their rows. Files are known by their names below
        their common root, sizes and row counts, which tell almost any change of their content and cost no
        read; memory maps by what their headers say, files of bare numbers by their sizes. A dataset, and
        what is iterated, is known by its class or function, or ``version=``, and its length: that its rows
        are the same is for the user to see to.
        """

    def block_key(self, block: int) -> Any:
        """What tells a block's rows from any others, of JSON types; None if nothing does."""
        return None

    def place(self, block: int, row: int) -> Place:
        """Where row ``row`` of a block stands."""
        return Place(row_group=block, row=row)

    def describe(self) -> list[tuple[str, str]]:
        """Lines for ``explain()``: what, how much."""
        return []


class StreamReader(ABC):
    """One pass over a stream."""

    @abstractmethod
    def read(self, rows: int) -> Payload | None:
        """The next ``rows`` rows, fewer at the end, None past it."""

    def state(self) -> dict[str, Any]:
        """Where the next ``read`` starts, for streams that can go there; else empty."""
        return {}

    def close(self) -> None:  # noqa: B027  (nothing to close is the usual case)
        """Let go of what the pass holds."""


class RowStream(ABC):
    """Rows that come one after the other and cannot be listed."""

    @property
    def length(self) -> int | None:
        """Rows in each epoch, if they can be told."""
        return None

    @abstractmethod
    def open(self, epoch: int, state: dict[str, Any] | None) -> StreamReader:
        """A pass from its start, or from where an earlier pass's ``state()`` says."""

    @property
    def seekable(self) -> bool:
        """Whether ``state()`` leads back without reading again from the start."""
        return False

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What a state knows the stream by, of plain JSON types; see ``RowSource.fingerprint``."""

    def describe(self) -> list[tuple[str, str]]:
        """Lines for ``explain()``: what, how much."""
        return []


class RowMixture(RowStream):
    """Rows of several pipelines, each of which is read by windows of its own.

    A plan is given as ``Any`` here: it is made of what stands above this file.
    """

    @abstractmethod
    def windows(self, plan: Any, pool: Any, number: int) -> Any:
        """The windows of all pipelines, for the shards of one process; see ``Plan.windows``."""

    @abstractmethod
    def place_of(self, plan: Any, row: int) -> Place:
        """Where the row of that number stands."""

    @abstractmethod
    def leads(self, plan: Any, shard: int, place: dict[str, Any]) -> bool:
        """Whether a position may be one of a shard's, as far as can be told."""

    def open(self, epoch: int, state: dict[str, Any] | None) -> StreamReader:
        raise TypeError("a mixture has no one order of its own: each shard mixes for itself")
