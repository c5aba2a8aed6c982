"""What the plan of a chain asks of its stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from trainpipes.errors import ConfigError

Beside = Literal["row", "place", "epoch"]


@dataclass(frozen=True)
class Traits:
    """What a stage is to the plan: class keywords, and what its options change of them.

    Args:
        keeps_rows: one row comes out for each that goes in; in order, except of a shuffle.
        share: the share of rows that it lets through on average, if known.
        depends_on: what the result depends on beside the values of a row: its number ("row"), its
            file ("place"), the "epoch".
        takes: Arrow "columns", made of Python objects if need be; "columns or objects" that Arrow
            cannot hold; else "rows" of any kind.
        gives: Python "objects"; columns of "found types", those of the first rows; a "choice" of the
            columns, perhaps under other names; else "rows" of the kind that it gets.
        ragged: with ``takes``, the columns whose arrays may differ in length; None for all.
        per_row: it calls Python for each row or batch: those that are due, and few ahead.
        in_caller: only the thread that iterates (or a worker process) may call it.
        reorders: rows come in another order every epoch.
        versioned: an option that is a function; a state knows it by ``version`` if that is given.
        asks_inputs: it is bound to what the pipeline reads, as ``_inputs``.
        holds_data: its options hold rows, which are not copied.
        has_blocks: of a source: its rows are Arrow, in blocks with a key for ``cache()``.
        random_access: of a source: rows can be chosen by number.
        orders_rows: of a source: a shuffle would undo the order of its rows.
        makes_batches: of a source: an item is a batch already.
        read_once: of a source: rows can be read only once.
        endless: of a source: an epoch has no end.
        grows: of a source: each epoch has the files that stand there when it begins.
        pins: of a source: all epochs have the version that is the newest when the run begins; states name it.
        one_consumer: of a source: why ranks or workers cannot share it; "" if they can.
    """

    keeps_rows: bool = True
    share: float | None = None
    depends_on: Iterable[Beside] = frozenset()
    takes: Literal["rows", "columns", "columns or objects"] = "rows"
    gives: Literal["rows", "objects", "found types", "choice"] = "rows"
    ragged: Collection[str] | None = None
    per_row: bool = False
    in_caller: bool = False
    reorders: bool = False
    versioned: str | None = None
    asks_inputs: bool = False
    holds_data: bool = False
    has_blocks: bool = False
    random_access: bool = False
    orders_rows: bool = False
    makes_batches: bool = False
    read_once: bool = False
    endless: bool = False
    grows: bool = False
    pins: bool = False
    one_consumer: str = ""

    def __post_init__(self) -> None:
        known = get_args(Beside)
        if isinstance(self.depends_on, str) or not {*self.depends_on} <= {*known}:
            raise ConfigError(f"depends_on must be a set of {known}, got {self.depends_on!r}")
