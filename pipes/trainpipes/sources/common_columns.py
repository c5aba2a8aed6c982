"""One kind and schema for the rows of several pipelines, whichever are read first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from trainpipes._internal.locks import ForkLock
from trainpipes.columns.block import Block, first_bad
from trainpipes.columns.columns import table_of
from trainpipes.columns.payload import Payload, unlike
from trainpipes.columns.python_values import table_of_rows
from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.columns.types import Rule, UnfitRow, UnlikeFields, difference, unite_schemas
from trainpipes.engine.planning.column_types import (
    ColumnTypes,
    gives_objects,
    is_of_rows,
    may_give_objects,
)
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.errors import SchemaError, TrainpipesError
from trainpipes.interfaces.read_columns import at_row
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage import Stage, is_ours
from trainpipes.interfaces.stage_kinds import RunStage

#: What a state knows the schema of a pipeline's rows by.
KEY = "common"
OBJECTS = "Python objects"


class CommonColumns:
    """The columns that rows of several pipelines have alike or, if ``beside``, side by side.

    ``parts``: of each pipeline its inputs, and the stages below these columns.
    """

    def __init__(self, stage: Stage, beside: bool = False) -> None:
        self.stage, self._beside = stage, beside
        self.parts: dict[Any, tuple[Inputs, Sequence[Stage]]] = {}
        self._found: tuple[Mapping[Any, pa.Schema] | None] | None = None
        self._searching = ForkLock()  # see ``Schemas``

    @property
    def wanted(self) -> Mapping[Any, pa.Schema] | None:
        """The columns of each pipeline's rows; None where they stay as they are."""
        if self._found is None:
            with self._searching:
                if self._found is None:
                    self._found = (self._find(),)
        return self._found[0]

    def _find(self) -> Mapping[Any, pa.Schema] | None:
        if all(_is_python(inputs) for inputs, _ in self.parts.values()):
            return None
        all_kinds = {name: self._kind(*part) for name, part in self.parts.items()}
        kinds = {name: kind for name, kind in all_kinds.items() if kind is not None}
        schemas = {name: kind for name, kind in kinds.items() if isinstance(kind, pa.Schema)}
        if not schemas and self._stay(list(kinds.values())):
            return None
        schemas |= {n: self._of_tensors(n, kinds) for n, k in kinds.items() if isinstance(k, tuple)}
        typed = (
            set()
            if self._beside
            else {name for schema in schemas.values() for name in schema.names}
        )
        for name in [name for name in kinds if name not in schemas]:
            find = partial(self._of_objects, name, typed, kinds)
            schemas[name] = self.parts[name][0].schemas.get(KEY, find)
        schemas = {name: schemas[name] for name in kinds}
        if self._beside:
            return schemas
        return dict.fromkeys(self.parts, united(schemas, f"{self.stage.name}()", str(self.stage)))

    def _kind(self, inputs: Inputs, steps: Sequence[Stage]) -> Any:
        """``columns_of`` the rows, or None for no rows."""
        known = ColumnTypes(inputs).known(steps)
        if known is not None:
            empty = isinstance(inputs.source, RowSource) and not inputs.blocks.rows
            return None if empty else known
        if _is_python(inputs) or inputs.chain.opener.traits.read_once:
            return OBJECTS
        try:
            data = ColumnTypes(inputs).first_rows(steps, str(self.stage))
        except Exception as error:
            if isinstance(error, TrainpipesError) and not hasattr(error, "_trainpipes"):
                raise
            return None  # it is about a row, and raised when that is due
        return None if data is None else columns_of(data)

    def _stay(self, kinds: Sequence[Any]) -> bool:
        alike = all(kind == kinds[0] for kind in kinds)
        if OBJECTS not in kinds:
            return alike or self._beside
        # Stages above count on columns if a source without rows has them.
        return alike and all(
            may_give_objects(inputs.chain.stages) for inputs, _ in self.parts.values()
        )

    def _of_tensors(self, name: Any, kinds: Mapping[Any, Any]) -> pa.Schema:
        if kinds[name][0] is None:
            other = next(known for known in kinds if known != name)
            pair = name, said(kinds[name]), other, said(kinds[other])
            raise _unlike(*pair, f"{self.stage.name}()", str(self.stage), self._beside)
        inputs, steps = self.parts[name]
        data = ColumnTypes(inputs).first_rows(steps, str(self.stage))
        assert data is not None
        return table_of(data, self.stage).schema.remove_metadata()

    def _of_objects(self, name: Any, typed: set[str], kinds: Mapping[Any, Any]) -> pa.Schema:
        caller = f"{self.stage.name}()"
        try:
            inputs, steps = self.parts[name]
            return ColumnTypes(inputs).find(steps, caller, typed=typed)
        except SchemaError as error:
            if not is_of_rows(error):
                raise
            other = next((known for known, kind in kinds.items() if kind != OBJECTS), name)
            raise SchemaError(
                f"{caller}: {_rule(self._beside)} {_named(other)} has {said(kinds[other])}, "
                f"{_named(name)} Python objects that make no columns: {error.message}; or have all "
                "give Python objects, by map()",
                path=error.path, row_group=error.row_group, row=error.row, stage=str(self.stage),
            ) from error  # fmt: skip


class Alike(RunStage, holds_data=True):
    """Gives one pipeline's rows the common columns."""

    thread_safe = True

    columns: Any
    part: Any

    def process(self, run: Run) -> Run:
        wanted = self.columns.wanted
        schema = None if wanted is None else wanted.get(self.part)
        if schema is None or not len(
            run.block
        ):  # or no row of it was found when others were looked at
            return run
        return run.with_block(self._fitted(run.block, schema))

    def _fitted(self, block: Block, schema: pa.Schema) -> Block:
        data: Any = block.within
        if isinstance(data, list):
            return block.with_data(self._of_rows(block, schema))
        if isinstance(data, TensorRows):
            data = table_of(block.data, self)
            block = block.with_data(data)
        given_schema = data.schema
        if given_schema.equals(schema, check_metadata=True):
            return block
        if difference(schema, given_schema, names_only=True) is not None:
            raise unlike(schema, given_schema)
        try:
            return block.with_columns(partial(_in_columns, schema))
        except pa.ArrowException as error:
            column, *types = difference(schema, given_schema) or ("", None, None)
            becomes, has = (_typed(column, kind) for kind in types)
            raise self._refusal(
                f"{_named(self.part)} has {has}, which becomes {becomes}, as the other sources ask for, and "
                f"a value does not fit: {error}; convert them by map_batches()",
                int(block.ids[first_bad(len(block), partial(_fails, block, schema))]),
            ) from error

    def _of_rows(self, block: Block, schema: pa.Schema) -> pa.Table:
        rows: Any = block.data
        try:
            return table_of_rows(rows, schema)
        except UnfitRow as unfit:
            raise self._refusal(
                f"rows of {_named(self.part)} become columns, as those of other sources are, and a row "
                f"{unfit}: give all rows the same columns with map()",
                int(block.ids[unfit.number]),
            ) from unfit.__cause__

    def _refusal(self, problem: str, row: int) -> Exception:
        stage = self.columns.stage
        return at_row(f"{stage.name}(): {problem}", stage, row, SchemaError)

    def __repr__(self) -> str:
        return str(self.columns.stage)


def united(
    schemas: Mapping[Any, pa.Schema], caller: str, stage: str, rule: Rule = "shapes"
) -> pa.Schema:
    """The columns that hold the values of all."""
    first, schema = next(iter(schemas.items()))

    def named_alike() -> Iterator[tuple[Any, pa.Schema]]:
        for name, other in schemas.items():
            odd = difference(schema, other, names_only=True)
            if odd is not None:
                column, *types = odd
                has_first, has = (_typed(column, kind) for kind in types)
                raise _unlike(name, has, first, has_first, caller, stage)
            yield name, other

    try:
        return unite_schemas(named_alike(), rule)
    except UnlikeFields as error:
        (first_name, known), (name, field) = error.first, error.second
        has_first, has = (_typed(f.name, f.type) for f in (known, field))
        raise _unlike(name, has, first_name, has_first, caller, stage) from None


def columns_of(data: Payload) -> Any:
    """What rows of different sources must agree in: columns and types, or tensors' dtypes and shapes."""
    if isinstance(data, pa.Table):
        return data.schema.remove_metadata()
    if isinstance(data, TensorRows):
        return data.names, tuple((t.dtype, tuple(t.shape[1:])) for t in data.slice(0, 0).tensors)
    return OBJECTS


def _typed(name: str, kind: pa.DataType | None) -> str:
    return f"no column {name!r}" if kind is None else f"column {name!r} as {kind}"


def said(kind: Any) -> str:
    if isinstance(kind, pa.Schema):
        return f"Arrow columns {', '.join(kind.names)}"
    if isinstance(kind, str):
        return kind
    names, shapes = kind
    text = f"tensors {', '.join(f'{dtype}{list(shape)}' for dtype, shape in shapes)}"
    return text if names is None else f"{text} named {', '.join(names)}"


def _in_columns(wanted: pa.Schema, table: pa.Table) -> pa.Table:
    same = table.schema.remove_metadata().equals(wanted, check_metadata=True)
    return table if same else table.select(wanted.names).cast(wanted)


def _fails(block: Block, wanted: pa.Schema, start: int, stop: int) -> bool:
    try:
        _in_columns(wanted, block.slice(start, stop).data)
    except pa.ArrowException:
        return True
    return False


def _is_python(inputs: Inputs) -> bool:
    stages = inputs.chain.stages
    return gives_objects(stages) and all(is_ours(type(stage)) for stage in stages)


def _named(name: Any) -> str:
    return f"source {name}" if isinstance(name, int) else repr(name)


def _rule(beside: bool) -> str:
    return f"rows of all sources have{'' if beside else ' the same'} columns, and"


def _unlike(
    name: Any, has: str, other: Any, other_has: str, caller: str, stage: str, beside: bool = False
) -> SchemaError:
    return SchemaError(
        f"{caller}: {_rule(beside)} {_named(other)} has {other_has}, {_named(name)} {has}; "
        "make them alike in one of the two, by select(), rename() or map_batches()",
        stage=stage,
    )
