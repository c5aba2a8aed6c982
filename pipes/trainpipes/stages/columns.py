from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, Self

import pyarrow as pa

from trainpipes._internal.checks import (
    ColumnName,
    Ge,
    IntArray,
    column_names,
    is_given_name,
    is_name,
    repeated,
    require,
)
from trainpipes._internal.messages import need_columns, no_columns
from trainpipes.columns.arrays import to_arrow
from trainpipes.columns.block import BadCell, Block
from trainpipes.columns.columns import table_of, to_columns
from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.planning.chain import MixingSource
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.read_columns import at_row, blame, refused
from trainpipes.interfaces.stage import Stage
from trainpipes.tokenizers.engine import Ragged


class ChooseStage(kinds.RunStage, takes="columns or objects", gives="choice"):
    """A stage that leaves out or renames columns, or keys of rows that no columns can be made of."""

    def process(self, run: Run) -> Run:
        self._check_rows(run)
        rows = run.block.data
        if isinstance(rows, list):
            return run.with_block(run.block.with_data(self._of_rows(rows, run.block.ids)))
        return run.with_block(columns_of(run.block, self).with_columns(self._of_table))

    def _of_table(self, table: pa.Table) -> pa.Table:
        names = self._chosen(table.column_names)
        return table.select([*names]).rename_columns([*names.values()])

    def _of_rows(self, rows: list[Any], ids: IntArray) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        keys: list[str] | None = None
        for number, row in enumerate(rows):
            try:
                if not isinstance(row, dict):
                    raise no_columns(type(row).__name__, self)
                if keys != [*row]:
                    keys = [*row]
                    names = self._chosen(keys)
            except (ConfigError, SchemaError) as error:
                blame(error, self, int(ids[number]))
                raise
            found.append({new: row[old] for old, new in names.items()})
        return found

    @abstractmethod
    def _chosen(self, columns: Sequence[str]) -> dict[str, str]:
        """The names that columns get, by those that they have; without those that are left out."""


class _ByName(ChooseStage):
    """Takes the names of columns as its arguments."""

    columns: Sequence[str]

    def check(self) -> None:
        self._set(columns=column_names(self.columns, f"{self.name}(columns)", 1, is_given_name))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.columns))})"


class Select(_ByName):
    """Keep some columns, in the order given.

    Args:
        columns: names to keep, as arguments or in a list.

    Raises:
        SchemaError: a column is not there.

    >>> import pyarrow as pa, trainpipes as tp
    >>> list(tp.from_arrow(pa.table({"x": [1, 2], "y": [3, 4]})).select("y"))
    [{'y': 3}, {'y': 4}]
    """

    def _chosen(self, columns: Sequence[str]) -> dict[str, str]:
        need_columns(columns, self.columns, self)
        return {name: name for name in self.columns}


class DropColumns(_ByName):
    """Leave out some columns, and keep all others in their order.

    Args:
        columns: names to leave out, as arguments or in a list.

    Raises:
        ConfigError: no column would be left.
        SchemaError: a column is not there.

    >>> import pyarrow as pa, trainpipes as tp
    >>> list(tp.from_arrow(pa.table({"x": [1, 2], "y": [3, 4]})).drop_columns("y"))
    [{'x': 1}, {'x': 2}]
    """

    def _chosen(self, columns: Sequence[str]) -> dict[str, str]:
        need_columns(columns, self.columns, self)
        gone = frozenset(self.columns)
        kept = {name: name for name in columns if name not in gone}
        if not kept:
            said = f"rows keep one column at least, and have {', '.join(map(str, columns))}"
            raise ConfigError(f"{self}: {said}; leave one in")
        return kept


class Rename(ChooseStage):
    """Give columns other names.

    Args:
        names: new names by old names.

    Raises:
        ConfigError: two columns would have the same name.
        SchemaError: a column is not there.

    >>> import trainpipes as tp
    >>> list(tp.from_dataset([{"text": "hi"}]).rename({"text": "prompt"}))
    [{'prompt': 'hi'}]
    """

    names: Mapping[str, str]

    def check(self) -> None:
        names = self.names
        pairs = names.items() if isinstance(names, Mapping) else ()
        good = len(pairs) > 0 and all(is_given_name(old) and is_name(new) for old, new in pairs)
        require(good, "rename(names)", "a dict of old names to new ones", names)
        self._set(names=dict(names))

    def _chosen(self, columns: Sequence[str]) -> dict[str, str]:
        need_columns(columns, list(self.names), self)
        renamed = {name: self.names.get(name, name) for name in columns}
        twice = sorted(repeated([*renamed.values()]))
        if twice:
            raise ConfigError(f"{self}: columns need different names, got {twice} twice")
        return renamed


def columns_of(block: Block, caller: object) -> Block:
    if block.has_columns:
        return block
    return block.with_data(table_of(block.data, caller))


def columns_as(block: Block, format: str, caller: Stage) -> Any:
    try:
        return to_columns(table_of(block.data, caller), format)
    except BadCell as bad:
        error = refused(caller, f": {bad}", DataError)
        blame(error, caller, None if bad.row is None else int(block.ids[bad.row]))
        raise error from None


def row_table(
    run: Run, caller: kinds.RunStage, needs: Sequence[str] = (), adds: Iterable[str] = ()
) -> tuple[Block, pa.Table]:
    """Rows as a table that has the columns needed, and none of those to be added."""
    caller._check_rows(run)
    block = columns_of(run.block, caller)
    table = block.data
    assert isinstance(table, pa.Table)
    need_columns(table.column_names, needs, caller)
    for name in adds:
        if name in table.column_names:
            raise taken(name, caller)
    return block, table


def with_column(table: pa.Table, field: str | pa.Field, column: Any) -> pa.Table:
    """A table with a column in the place of that of its name, or at the end."""
    name = field if isinstance(field, str) else field.name
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), field, column)
    return table.append_column(field, column)


def with_ids(
    block: Block, columns: Mapping[str, Ragged], gone: Collection[str], caller: Stage
) -> Block:
    """Rows with columns of token ids for those that are gone; rows that are dicts have arrays."""
    data: Any = block.data
    rows = data if isinstance(data, list) else [data.column_names]
    present = {name for row in rows for name in row if name not in gone}
    for name in columns:
        if name in present:
            raise taken(name, caller)
    if isinstance(data, list):
        lists = zip(*(ragged.to_rows() for ragged in columns.values()), strict=True)
        other_columns = ({k: v for k, v in row.items() if k not in gone} for row in data)
        ids = (dict(zip(columns, values, strict=True)) for values in lists)
        pairs = zip(other_columns, ids, strict=True)
        return block.with_data([row | ids_of_row for row, ids_of_row in pairs])
    data = data.drop_columns(list({*gone}))
    for name, ragged in columns.items():
        data = data.append_column(name, ragged.to_arrow())
    return block.with_data(data)


def check_collates(caller: Stage, below: Sequence[Stage]) -> None:
    """Raise if the input of a stage that collates is no batch of rows, by the stages below it."""
    stages = [*kinds.stages_within(below)]
    if any(isinstance(stage, CollatingStage) for stage in stages):
        why = "another stage has collated them already: leave one of the two out"
        raise ConfigError(f"{caller} takes rows that batch() has grouped, and {why}")
    batches = [stage for stage in below if isinstance(stage, kinds.BatchingStage)]
    if len(batches) > 1:
        way = f"put {caller.name}() before it"
        raise ConfigError(
            f"{caller} takes batches of rows, and {batches[-1]} makes lists of batches: {way}"
        )


class CollatingStage(kinds.FinishingStage):
    """A stage that makes a single item of the rows of a batch: as ``batch`` cut them, or in a list that a
    function made of these.
    """

    def _resolve(self, below: Sequence[Stage]) -> Self:
        check_collates(self, below)
        return self

    def _refuse_collated(self, run: Run) -> None:
        for number, item in enumerate(run.items or ()):
            if not isinstance(item, list):
                got = f"got a {type(item).__name__} that a stage before it made of one"
                way = f"return a list of rows there, or leave {self.name}() out"
                raise ConfigError(f"{self} takes batches of rows, {got}: {way}")
            if not item:
                got = "got one without rows: leave such batches out with filter(len)"
                raise at_row(f"{self} takes batches of rows, {got}", self, run.row_ids(number)[0])


def unbatched(caller: Stage, row: Any) -> ConfigError:
    got = f"a row ({type(row).__name__})"
    return ConfigError(f"{caller} works on batches, got {got}: put .batch(n) before it")


def taken(name: str, caller: Stage) -> DataError:
    ways = ["rename() it", f"leave it out with drop_columns({name!r})"]
    if any(isinstance(value, str) and value == name for value in caller.options.values()):
        ways.insert(1, "give the new one another name")
    way = ", or ".join(ways)
    return refused(caller, f": the rows have a column {name!r} already; {way}")


#: Stages after which rows have no place in file order.
MOVING = kinds.ShuffleStage | kinds.PackingStage | kinds.BatchingStage | kinds.RepeatStage


class Enumerate(kinds.RunStage, depends_on={"row"}):
    """Add each row's number in file order over all files.

    Stands before stages that drop or reorder rows: a row then has the same number in every epoch
    and on every rank. Rows that are not dicts become pairs ``(number, row)``.

    Args:
        start: the number of the first row.
        output_column: the new column, int64.

    >>> import pyarrow as pa, trainpipes as tp
    >>> list(tp.from_arrow(pa.table({"x": ["a", "b", "c"]})).skip(1).enumerate().shuffle(9, seed=1))
    [{'x': 'c', 'index': 1}, {'x': 'b', 'index': 0}]
    """

    start: Annotated[int, Ge(-(2**62), 2**62)] = 0
    _: KW_ONLY
    output_column: ColumnName = "index"

    _passed = 0  # rows that are skipped below

    def _resolve(self, below: Sequence[Stage]) -> Self:
        for stage in below:
            way = "or number the batches in the loop, for n, batch in enumerate(loader)"
            if isinstance(stage, MixingSource):
                way = "in each of its sources, which each have a file order of their own"
            elif stage.traits.keeps_rows and not isinstance(stage, MOVING):
                continue
            place = f"put it before {stage.name}()"
            if reader := kinds.reader_of(stage, below):
                place = f"leave out the option of {reader}() that drops rows"
                place += f" and put {stage.name}() after {self.name}()" * (stage.name != reader)
            raise ConfigError(f"{self} numbers rows in file order: {place}, {way}")
        passed = sum(s.count for s in below if isinstance(s, kinds.CountingStage) and s.skips)
        return self._resolved(_passed=passed)

    def process(self, run: Run) -> Run:
        block, name = run.block, self.output_column
        numbers = block.ids + (self.start - self._passed)
        data = block.data
        if isinstance(data, TensorRows) and data.names is not None:
            data = table_of(data, self)
        if isinstance(data, pa.Table):
            if name in data.column_names:
                raise taken(name, self)
            return run.with_block(block.with_data(data.append_column(name, to_arrow(numbers))))
        if any(isinstance(row, Mapping) and name in row for row in block.rows()):
            raise taken(name, self)
        pairs = zip(numbers.tolist(), block.rows(), strict=True)
        rows = [{**r, name: n} if isinstance(r, Mapping) else (n, r) for n, r in pairs]
        return run.with_block(block.with_data(rows))
