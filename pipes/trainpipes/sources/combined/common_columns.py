"""One kind and schema for the rows of several pipelines, whichever are read first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pyarrow as pa

from trainpipes.columns.bad_text import first_bad
from trainpipes.columns.block import Block
from trainpipes.columns.columns import table_of
from trainpipes.columns.joined import unlike
from trainpipes.columns.row_types import NoColumn, fixed_shape, unite
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.columns.value_column import UnfitRow, table_of_rows
from trainpipes.engine.planning.as_columns import gives_objects, known_columns
from trainpipes.engine.planning.first_rows import UnfitRows, find_schema, first_rows
from trainpipes.engine.planning.inputs import Inputs, searching
from trainpipes.errors import SchemaError
from trainpipes.kinds.stage import Stage
from trainpipes.sources.combined.row_kinds import (
    OBJECTS,
    ONCE,
    columns_of,
    difference,
    in_columns,
    is_python,
    kind_of,
    said,
    united,
)

#: What a state knows the schema of a pipeline's rows by.
KEY = "common"
#: What the rows of each pipeline are to each other: rows of one sequence, or parts of the same rows.
Joined = Literal["one sequence", "side by side"]


@dataclass(eq=False)
class CommonColumns:
    """The columns that rows of several pipelines have alike, or side by side."""

    caller: str
    stage: str
    parts: Mapping[Any, tuple[Inputs, Sequence[Stage]]]
    joined: Joined = "one sequence"

    def __post_init__(self) -> None:
        self._kinds: Mapping[Any, Any] = {}
        self._found: tuple[Mapping[Any, pa.Schema] | None] | None = None
        self._first: tuple[Any, Any] | None = None

    def of(self, name: Any, block: Block) -> Block:
        if not len(block):
            return block
        wanted = self.wanted
        if wanted is None:
            return self._compared(name, block)
        schema, data = wanted.get(name), block.within
        if schema is None:  # no row of it was found when others were looked at
            return block
        if isinstance(data, list):
            return block.with_data(self._of_rows(name, block, schema))
        if isinstance(data, TensorRows):
            block = block.with_data(table_of(block.data, self.caller))
            data = block.within
        assert isinstance(data, pa.Table)
        if data.schema.equals(schema, check_metadata=True):
            return block
        if difference(schema, columns_of(data), names_only=True) is not None:
            raise unlike(schema, data.schema)
        try:
            return block.with_columns(lambda table: in_columns(table, schema))
        except pa.ArrowException as error:
            raise self._unfit(name, block, schema, error) from error

    @property
    def wanted(self) -> Mapping[Any, pa.Schema] | None:
        """The columns of each pipeline's rows; None where they stay as they are."""
        if self._found is None:
            with searching:
                if self._found is None:
                    self._found = (self._find(),)
        return self._found[0]

    def known(self) -> list[pa.Schema | None]:
        return [known_columns(inputs, steps) for inputs, steps in self.parts.values()]

    def changed(self, name: Any) -> str | None:
        wanted = self.wanted
        if wanted is None or wanted.get(name) == self._kinds.get(name):
            return None
        return str(wanted[name])

    # What is wanted

    def _find(self) -> Mapping[Any, pa.Schema] | None:
        if all(is_python(inputs) for inputs, _ in self.parts.values()):
            return None
        found = {n: kind_of(*part, self.stage) for n, part in self.parts.items()}
        self._kinds = kinds = {name: kind for name, kind in found.items() if kind is not None}
        if not kinds:
            return {}
        given = {name: kind for name, kind in kinds.items() if isinstance(kind, pa.Schema)}
        if len(given) < len(kinds):
            if not given and self._stay(kinds):
                return None
            given = self._as_columns(kinds)
        if self.joined == "side by side":
            return given
        return dict.fromkeys(self.parts, united(given, self._unlike, _wider))

    def _stay(self, kinds: Mapping[Any, Any]) -> bool:
        first, *others = kinds.values()
        if (
            OBJECTS in kinds.values()
        ):  # stages above count on columns if a source without rows has them
            maybe = all(gives_objects(inputs.chain.stages) for inputs, _ in self.parts.values())
            return maybe and all(isinstance(kind, str) for kind in kinds.values())
        if self.joined == "side by side":
            return len({kind[0] is None for kind in (first, *others)}) == 1
        return all(difference(first, kind) is None for kind in others)

    def _as_columns(self, kinds: Mapping[Any, Any]) -> dict[Any, pa.Schema]:
        found = {name: kind for name, kind in kinds.items() if isinstance(kind, pa.Schema)}
        found |= {n: self._of_tensors(n, kinds) for n, k in kinds.items() if isinstance(k, tuple)}
        alike = self.joined == "one sequence"
        typed = {field.name for schema in found.values() for field in schema if alike}
        for name, kind in kinds.items():
            if kind == OBJECTS:
                inputs, steps = self.parts[name]
                find = partial(self._of_objects, name, steps, typed, kinds)
                schema = inputs.schemas.get(KEY, find)
                assert schema is not None
                found[name] = schema
        once = [name for name, kind in kinds.items() if kind == ONCE]
        if once and (self.joined == "side by side" or not found):
            raise SchemaError(
                f"{self.caller}(): {_named(once[0])} gives Python objects that can't be read twice to "
                "find their columns: give those by schema= of a map() in between, "
                "schema=pa.schema([...])",
                stage=self.stage,
            )
        return {name: found[name] for name in kinds if name in found}

    def _of_tensors(self, name: Any, kinds: Mapping[Any, Any]) -> pa.Schema:
        data = first_rows(*self.parts[name], self.stage)
        assert isinstance(data, TensorRows)
        other = next(own for own in kinds if own != name)
        if data.names is None or kinds[name][0] is None:
            raise self._unlike(name, said(kinds[name]), other, said(kinds[other]))
        return table_of(data, self.stage).schema.remove_metadata()

    def _of_objects(
        self, name: Any, steps: Sequence[Stage], typed: set[str], kinds: Mapping[Any, Any]
    ) -> pa.Schema:
        try:
            return find_schema(self.parts[name][0], steps, f"{self.caller}()", typed=typed)
        except UnfitRows as error:
            other = next((own for own, kind in kinds.items() if kind != OBJECTS), name)
            raise SchemaError(
                f"{self.caller}(): {self._rule} {_named(other)} has {said(kinds[other])}, "
                f"{_named(name)} Python objects that make no columns: {error.message}; or have all "
                "give Python objects, by map()",
                path=error.path, row_group=error.row_group, row=error.row, stage=self.stage,
            ) from error  # fmt: skip

    # Rows that are made

    def _of_rows(self, name: Any, block: Block, schema: pa.Schema) -> pa.Table:
        rows: Any = block.data
        try:
            return table_of_rows(rows, schema)
        except UnfitRow as unfit:
            raise self._marked(
                f"rows of {_named(name)} become columns, as those of other sources are, and a row {unfit}: "
                "give all rows the same columns with map()",
                int(block.ids[unfit.number]),
            ) from unfit.__cause__

    def _unfit(self, name: Any, block: Block, schema: pa.Schema, error: Exception) -> SchemaError:

        def fails(start: int, stop: int) -> bool:
            table: Any = block.slice(start, stop).data
            try:
                in_columns(table, schema)
            except pa.ArrowException:
                return True
            return False

        becomes, has = difference(schema, columns_of(block.within)) or ("", "")
        return self._marked(
            f"{_named(name)} has {has}, which becomes {becomes}, as the other sources ask for, and a value "
            f"does not fit: {error}; convert them by map_batches()",
            int(block.ids[first_bad(len(block), fails)]),
        )

    def _marked(self, problem: str, row: int) -> SchemaError:
        error = SchemaError(f"{self.caller}(): {problem}", stage=self.stage)
        error._trainpipes = self.stage, row
        return error

    def _compared(self, name: Any, block: Block) -> Block:
        if self.joined == "side by side":
            return block
        kind = columns_of(block.within)
        first = self._first = self._first or (name, kind)
        odd = difference(first[1], kind)
        if odd is not None:
            raise self._unlike(name, odd[1], first[0], odd[0])
        if not isinstance(kind, pa.Schema):
            return block
        return block.with_columns(lambda table: in_columns(table, first[1]))

    # Messages

    @property
    def _rule(self) -> str:
        same = " the same" if self.joined == "one sequence" else ""
        return f"rows of all sources have{same} columns, and"

    def _unlike(self, name: Any, has: str, other: Any, other_has: str) -> SchemaError:
        return SchemaError(
            f"{self.caller}(): {self._rule} {_named(other)} has {other_has}, {_named(name)} {has}; "
            "make them alike in one of the two, by select(), rename() or map_batches()",
            stage=self.stage,
        )


def _named(name: Any) -> str:
    return f"source {name}" if isinstance(name, int) else repr(name)


def _wider(one: pa.Field, other: pa.Field) -> pa.Field:
    shapes = {fixed_shape(field.type) for field in (one, other)} - {None}
    if len(shapes) > 1:
        raise NoColumn
    return pa.field(one.name, unite(one.type, other.type), one.nullable or other.nullable)
