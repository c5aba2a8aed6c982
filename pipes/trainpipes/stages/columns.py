"""``select`` and ``rename``: which columns go on, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from trainpipes._internal.checks import column_names, repeated, require
from trainpipes._internal.messages import need_columns
from trainpipes.columns.bad_text import BadCell
from trainpipes.columns.block import Block
from trainpipes.columns.columns import table_of, to_columns
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError, DataError
from trainpipes.kinds.blame import blame
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import RunStage


class Select(RunStage):
    """Keeps some columns, in the order given.

    In: rows with columns. Out: the same rows, fewer columns. Cursor: none of its own. Costs nothing.
    Columns that no stage needs are better not read at all: ``read_parquet(columns=...)``.

    Args:
        columns: names to keep.

    Raises:
        SchemaError: a column is not there; names the nearest.
    """

    needs_columns = True
    names_only = True

    columns: Sequence[str]

    def check(self) -> None:
        self._set(columns=column_names(self.columns, "select(columns)"))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.columns))})"

    def process(self, run: Run) -> Run:
        block = columns_of(run.block, self)
        return run.with_block(block.with_columns(self._chosen))

    def _chosen(self, table: pa.Table) -> pa.Table:
        need_columns(table.column_names, self.columns, self)
        return table.select(self.columns)


class Rename(RunStage):
    """Gives columns other names.

    In: rows with columns. Out: the same rows. Cursor: none of its own. Costs nothing.

    Args:
        names: new name of each old one.

    Raises:
        ConfigError: two columns would have the same name.
        SchemaError: a column is not there.
    """

    needs_columns = True
    names_only = True

    names: Mapping[str, str]

    def check(self) -> None:
        names = self.names
        pairs = names.items() if isinstance(names, Mapping) else ()
        good = names and pairs and all(isinstance(n, str) and n for p in pairs for n in p)
        require(good, "rename(names)", "a dict of old names to new ones", names)
        self._set(names=dict(names))

    def process(self, run: Run) -> Run:
        block = columns_of(run.block, self)
        return run.with_block(block.with_columns(self._renamed))

    def _renamed(self, table: pa.Table) -> pa.Table:
        need_columns(table.column_names, list(self.names), self)
        renamed = [self.names.get(name, name) for name in table.column_names]
        twice = sorted(repeated(renamed))
        if twice:
            raise ConfigError(f"{self}: columns need different names, got {twice} twice")
        return table.rename_columns(renamed)


def columns_of(block: Block, asker: object) -> Block:
    """Rows as Arrow columns, gathered or not."""
    if block.has_columns:
        return block
    return block.with_data(table_of(block.data, asker))


def columns_as(block: Block, format: str, asker: Stage) -> Any:
    """Rows in the form that a user's function takes: "arrow", "numpy" or "torch".

    Raises:
        DataError: a null where the array of a column has no place for one; names the row.
    """
    try:
        return to_columns(table_of(block.data, asker), format)
    except BadCell as bad:
        error = DataError(f"{asker}: {bad}", stage=str(asker))
        blame(error, asker, None if bad.row is None else int(block.ids[bad.row]))
        raise error from None
