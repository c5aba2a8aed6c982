"""The columns of mixed rows: the same ones in all sources, and their names."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from trainpipes.arrays import python_to_arrow, to_arrow
from trainpipes.errors import SchemaError
from trainpipes.order import IntArray
from trainpipes.runtime.mixing.mix_rules import MixRules
from trainpipes.runtime.rows.block import Block
from trainpipes.runtime.rows.same_columns import columns_of, difference, in_columns, said

__all__ = ["Columns", "with_names"]


class Columns:
    """What the rows of all sources must agree in: the columns of the first that is read.

    Args:
        asker: the stage, for messages.
    """

    def __init__(self, asker: object) -> None:
        self._asker = asker
        self._kind: tuple[str, Any] | None = None
        self._lock = threading.Lock()

    def alike(self, name: str, block: Block) -> Block:
        """Rows of a source with columns in the order of the first source's.

        Raises:
            SchemaError: they have others.
        """
        data = block.gathered_from()[0]
        kind = columns_of(data)
        with self._lock:
            if self._kind is None:
                self._kind = name, kind
            first, wanted = self._kind
        unlike = difference(wanted, kind)
        if unlike is None:
            arrow = isinstance(data, pa.Table)
            return block.with_columns(lambda t: in_columns(t, wanted)) if arrow else block
        raise SchemaError(
            f"{self._asker}: rows of all sources have the same columns, and {first!r} has {unlike[0]}, "
            f"{name!r} {unlike[1]}; bring them in line in the sources, by select(), rename() or "
            "map_batches()",
            stage=str(self._asker),
        )


def with_names(block: Block, source: IntArray, rules: MixRules) -> Block:
    """Rows with a column that names the source of each.

    Args:
        block: the rows.
        source: number of each row's source, int64 ``[rows]``.
        rules: say which column.

    Raises:
        SchemaError: the rows have no columns, or this one already.
    """
    column = rules.column
    assert column is not None
    data = block.data
    names = list(data.column_names) if isinstance(data, pa.Table) else []
    if isinstance(data, list) and all(isinstance(row, Mapping) for row in data):
        names = [name for row in data for name in row]
    elif not isinstance(data, pa.Table):
        raise SchemaError(
            f"{rules.asker}: column={column!r} needs rows with columns, got {said(columns_of(data))}; make "
            "dicts with map() in the sources",
            stage=str(rules.asker),
        )
    if column in names:
        raise SchemaError(
            f"{rules.asker}: the rows have a column {column!r} already; give column another name",
            stage=str(rules.asker),
        )
    if isinstance(data, list):
        rows = zip(data, source.tolist(), strict=True)
        return block.with_data([{**row, column: rules.names[i]} for row, i in rows])
    added = python_to_arrow(rules.names, pa.string()).take(to_arrow(source))
    return block.with_data(data.append_column(column, added))
