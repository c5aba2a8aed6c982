"""How the sources of a mix are mixed. Immutable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from trainpipes.columns.arrays import python_to_arrow, to_arrow
from trainpipes.columns.block import Block
from trainpipes.engine.layout import IntArray
from trainpipes.errors import SchemaError
from trainpipes.sources.combined.same_columns import columns_of, said

Stop = Literal["all_exhausted", "first_exhausted", "repeat"]


@dataclass(frozen=True)
class MixRules:
    """How sources are mixed.

    Args:
        names: of the sources, sorted.
        starts: where each step of the schedule begins, in rows or tokens of the whole mix; the first at 0.
        steps: whole weights of the sources in each step, all with the same sum.
        max_epochs: how often each source may be gone through in an epoch of the mix; None for no limit.
        stop: what ends an epoch of the mix.
        lengths: tokens of each row, where tokens are counted: int64 ``[rows]``, 1 or more.
        output_column: of the sources' names, to be added; None for none.
        asker: the stage, for messages.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    max_epochs: tuple[int | None, ...]
    stop: Stop
    lengths: Callable[[Block], IntArray] | None
    output_column: str | None
    asker: object

    def with_names(self, block: Block, source: IntArray) -> Block:
        """Rows with a column that names the source of each, where one is wanted.

        Args:
            block: the rows.
            source: number of each row's source, int64 ``[rows]``.

        Raises:
            SchemaError: the rows have no columns, or this one already.
        """
        column, data = self.output_column, block.data
        if column is None:
            return block
        if isinstance(data, pa.Table):
            names = set(data.column_names)
        elif isinstance(data, list) and all(isinstance(row, Mapping) for row in data):
            names = {name for row in data for name in row}
        else:
            raise SchemaError(
                f"{self.asker}: output_column={column!r} needs rows with columns, got "
                f"{said(columns_of(data))}; make dicts with map() in the sources",
                stage=str(self.asker),
            )
        if column in names:
            raise SchemaError(
                f"{self.asker}: the rows have a column {column!r} already; give output_column another name",
                stage=str(self.asker),
            )
        if isinstance(data, pa.Table):
            added = python_to_arrow(self.names, pa.string()).take(to_arrow(source))
            return block.with_data(data.append_column(column, added))
        rows = zip(data, source.tolist(), strict=True)
        return block.with_data([{**row, column: self.names[i]} for row, i in rows])
