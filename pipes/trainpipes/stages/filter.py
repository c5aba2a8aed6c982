from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import wrong
from trainpipes.columns.arrays import to_arrow, to_numpy
from trainpipes.columns.columns import table_of
from trainpipes.columns.run import Run
from trainpipes.kinds.blame import each, refused
from trainpipes.kinds.stage import made_once
from trainpipes.kinds.stage_kinds import RunStage


def as_expression(filter: Any, caller: str) -> pc.Expression:
    if isinstance(filter, pc.Expression):
        return filter
    try:
        import pyarrow.parquet as pq

        return pq.filters_to_expression(filter)
    except Exception as error:  # of any kind, for a list of any values
        example = '[["x", ">", 20], ["lang", "in", ["en", "de"]]]'
        rule = f"a pyarrow expression, or a list such as {example}"
        way = "put .filter(function) after it" if callable(filter) else str(error)
        raise wrong(caller, rule, filter, way) from None


class Filter(RunStage):
    """Keep the rows for which a predicate holds; after ``batch``, the batches.

    The number of rows of an epoch is then unknown: ``len()`` raises a TypeError, and several ranks
    need ``.repeat()``.

    Args:
        predicate: a function of one item returning a bool; a ``pyarrow.compute`` expression over
            columns (much faster), where null counts as False; or conditions that all hold:
            ``[["x", ">", 20], ["lang", "in", ["en", "de"]]]``, or a list of such lists, of which
            one holds.
        version: names the function in checkpoints; see ``map``.
        thread_safe: whether several threads may call the function at once; see ``map``.

    >>> import pyarrow as pa, pyarrow.compute as pc, trainpipes as tp
    >>> pipe = tp.from_arrow(pa.table({"x": [1, 2, 3]}))
    >>> list(pipe.filter(pc.field("x") > 1))
    [{'x': 2}, {'x': 3}]
    """

    keeps_rows = False
    draws_by = (
        "draw in a map(fn, rng=True) before it, and look here at the column that it adds; sample(fraction) "
        "keeps a share of the rows"
    )

    free = frozenset({"thread_safe"})

    predicate: Callable[[Any], bool] | pc.Expression | Sequence[Any]
    _: KW_ONLY
    version: str | None = None
    thread_safe: bool = False

    def check(self) -> None:
        if isinstance(self.predicate, list | tuple):
            as_expression(self.predicate, "filter(predicate)")
        elif not isinstance(self.predicate, pc.Expression) and not callable(self.predicate):
            rule = "a function of one row or a pyarrow.compute expression"
            raise wrong("filter(predicate)", rule, self.predicate)

    @made_once
    def _expression(self) -> pc.Expression | None:
        if callable(self.predicate):
            return None
        return as_expression(self.predicate, "filter(predicate)")

    @property
    def needs_columns(self) -> bool:  # type: ignore[override]
        return not callable(self.predicate)

    @property
    def per_row(self) -> bool:  # type: ignore[override]
        return not self.needs_columns

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if self._expression is not None:
            identity["predicate"] = str(self._expression)
        elif self.version is not None:
            identity["predicate"] = f"version {identity.pop('version')}"
        return identity

    def process(self, run: Run) -> Run:
        if callable(self.predicate):
            kept = map(bool, each(self, self.predicate, run))
            mask = np.fromiter(kept, dtype=np.bool_, count=len(run))
        else:
            mask = self._holds(run)
        return run if mask.all() else run.pick(np.flatnonzero(mask).astype(np.int64))

    def _holds(self, run: Run) -> np.ndarray[Any, np.dtype[np.bool_]]:
        self._check_rows(run, single=True)
        table = table_of(run.block.data, self)
        try:
            kept = table.append_column("", to_arrow(np.arange(len(table)))).filter(self._expression)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, KeyError) as error:
            said = f" does not fit the columns {table.column_names}: {error}"
            raise refused(self, said) from error
        mask = np.zeros(len(table), dtype=np.bool_)
        mask[to_numpy(kept.column(table.num_columns))] = True
        return mask
