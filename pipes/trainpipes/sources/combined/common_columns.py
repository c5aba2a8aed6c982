"""What the rows of several pipelines become, so that they can be rows of one: of one kind, with one schema.

Where all give columns, those are widened to types that hold the values of all. Where some give columns and
others tensors or Python objects, these become columns. Where all give Python objects, or the same tensors,
they stay as they are. Which it is does not depend on the rows that happen to be read first: it is found from
what is known of the sources, and from the first row of those of which too little is.

A ``CommonColumns`` is asked by all threads that read; one of them finds the answer, under the lock that
schemas are found under.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import pyarrow as pa

from trainpipes.columns.block import Block
from trainpipes.columns.columns import table_of
from trainpipes.columns.joined import unlike
from trainpipes.columns.row_schema import UnfitRow, table_of_rows
from trainpipes.columns.row_types import NoColumn, fixed_shape, unite
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.planning.as_columns import gives_objects, known_columns
from trainpipes.engine.planning.chain import Inputs
from trainpipes.engine.planning.first_rows import UnfitRows, find_schema, first_rows
from trainpipes.engine.planning.schemas import searching
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
)

#: What a state knows the schema of a pipeline's rows by.
KEY = "common"
#: What the rows of each pipeline are to each other: rows of one sequence, or parts of the same rows.
Joined = Literal["one sequence", "side by side"]


class CommonColumns:
    """The columns that rows of several pipelines have alike, or side by side.

    Args:
        asker: the stage's name, for messages.
        stage: the stage, as it prints.
        parts: of each pipeline what it reads, and the stages that its rows go through.
        joined: what its rows are to those of the others.
    """

    def __init__(
        self,
        asker: str,
        stage: str,
        parts: Mapping[Any, tuple[Inputs, Sequence[Stage]]],
        joined: Joined = "one sequence",
    ) -> None:
        self._asker = asker
        self._stage = stage
        self._parts = parts
        self._joined = joined
        self._kinds: Mapping[Any, Any] = {}
        self._found: tuple[Mapping[Any, pa.Schema] | None] | None = None
        self._first: tuple[Any, Any] | None = None

    def of(self, name: Any, block: Block) -> Block:
        """Rows of a pipeline as the others go with them.

        Raises:
            SchemaError: they do not; names two pipelines, and what each has.
            ConfigError: side by side, two pipelines have a column of one name.
        """
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
            block = block.with_data(table_of(block.data, self._asker))
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
        """Of each pipeline the columns, as far as they are known without reading a row."""
        return [known_columns(inputs, steps) for inputs, steps in self._parts.values()]

    def changed(self, name: Any) -> str | None:
        """What the columns of a pipeline's rows become, where they do not stay as they are; else None."""
        wanted = self.wanted
        if wanted is None or wanted.get(name) == self._kinds.get(name):
            return None
        return str(wanted[name])

    # What is wanted

    def _find(self) -> Mapping[Any, pa.Schema] | None:
        if all(is_python(inputs) for inputs, _ in self._parts.values()):
            return None
        found = {n: kind_of(*part, self._stage) for n, part in self._parts.items()}
        self._kinds = kinds = {name: kind for name, kind in found.items() if kind is not None}
        if not kinds:
            return {}
        given = {name: kind for name, kind in kinds.items() if isinstance(kind, pa.Schema)}
        if len(given) < len(kinds):
            if not given and self._stay(kinds):
                return None
            given = self._as_columns(kinds)
        if self._joined == "side by side":
            return given
        schema = self._united(given)
        return dict.fromkeys(self._parts, schema)

    def _stay(self, kinds: Mapping[Any, Any]) -> bool:
        """Whether rows of these kinds go together as they are."""
        (first, *others), found = kinds.values(), set(map(type, kinds.values()))
        if (
            OBJECTS in kinds.values()
        ):  # those above count on columns where a source without rows has them
            maybe = all(gives_objects(inputs.chain.stages) for inputs, _ in self._parts.values())
            return maybe and found == {str}
        if self._joined == "side by side":
            return len({kind[0] is None for kind in (first, *others)}) == 1
        return all(difference(first, kind) is None for kind in others)

    def _as_columns(self, kinds: Mapping[Any, Any]) -> dict[Any, pa.Schema]:
        """The columns that rows of each pipeline make."""
        found: dict[Any, pa.Schema] = {}
        for name, kind in kinds.items():
            if isinstance(kind, pa.Schema):
                found[name] = kind
            elif isinstance(kind, tuple):
                found[name] = self._of_tensors(name, kinds)
        typed = {
            field.name
            for schema in found.values()
            for field in schema
            if self._joined == "one sequence"
        }
        for name, kind in kinds.items():
            if kind == OBJECTS:
                inputs, steps = self._parts[name]
                find = partial(self._of_objects, name, steps, typed, kinds)
                schema = inputs.schemas.get(KEY, find)
                assert schema is not None
                found[name] = schema
        once = [name for name, kind in kinds.items() if kind == ONCE]
        if once and (self._joined == "side by side" or not found):
            raise SchemaError(
                f"{self._asker}(): {self._named(once[0])} gives Python objects that can't be read twice to "
                "find their columns: give those by schema= of a map() in between, "
                "schema=pa.schema([...])",
                stage=self._stage,
            )
        return {name: found[name] for name in kinds if name in found}

    def _of_tensors(self, name: Any, kinds: Mapping[Any, Any]) -> pa.Schema:
        inputs, steps = self._parts[name]
        data = first_rows(inputs, steps, self._stage)
        assert isinstance(data, TensorRows)
        other = next(own for own in kinds if own != name)
        if data.names is None or kinds[name][0] is None:
            raise self._unlike(name, self._named(other), said(kinds[name]), said(kinds[other]))
        return table_of(data, self._stage).schema.remove_metadata()

    def _of_objects(
        self, name: Any, steps: Sequence[Stage], typed: set[str], kinds: Mapping[Any, Any]
    ) -> pa.Schema:
        """The columns that rows of a pipeline make which are Python objects."""
        asker = f"{self._asker}()"
        try:
            return find_schema(self._parts[name][0], steps, asker, typed=typed)
        except UnfitRows as error:
            other = next((own for own, kind in kinds.items() if kind != OBJECTS), name)
            raise SchemaError(
                f"{self._asker}(): {self._rule} {self._named(other)} has {said(kinds[other])}, "
                f"{self._named(name)} Python objects that make no columns: {error.message}; or have all "
                "give Python objects, by map()",
                path=error.path, row_group=error.row_group, row=error.row, stage=self._stage,
            ) from error  # fmt: skip

    def _united(self, given: Mapping[Any, pa.Schema]) -> pa.Schema:
        """The columns that hold the rows of all."""
        fields: dict[str, tuple[pa.Field, Any]] = {}
        first: tuple[Any, pa.Schema] | None = None
        for name, schema in given.items():
            if first is None:
                first = name, schema
                fields = {field.name: (field, name) for field in schema}
                continue
            odd = difference(first[1], schema, names_only=True)
            if odd is not None:
                raise self._unlike(name, self._named(first[0]), *odd[::-1])
            for field in schema:
                known, whose = fields[field.name]
                try:
                    fields[field.name] = _wider(known, field), whose
                except NoColumn:
                    raise self._unlike(
                        name,
                        self._named(whose),
                        f"column {field.name!r} as {field.type}",
                        f"column {field.name!r} as {known.type}",
                    ) from None
        return pa.schema([field for field, _ in fields.values()])

    # Rows that are made

    def _of_rows(self, name: Any, block: Block, schema: pa.Schema) -> pa.Table:
        rows: Any = block.data
        try:
            return table_of_rows(rows, schema)
        except UnfitRow as unfit:
            raise self._marked(
                SchemaError(
                    f"{self._asker}(): rows of {self._named(name)} become columns, as those of other sources "
                    f"are, and a row {unfit}: give all rows the same columns with map()",
                    stage=self._stage,
                ),
                int(block.ids[unfit.number]),
            ) from unfit.__cause__

    def _unfit(self, name: Any, block: Block, schema: pa.Schema, error: Exception) -> SchemaError:
        """What to raise where a value does not fit a wider type, as few do."""
        low, high = 0, len(block)  # rows up to low fit, those up to high do not
        while high - low > 1:
            middle = (low + high) // 2
            table: Any = block.slice(low, middle).data
            try:
                in_columns(table, schema)
                low = middle
            except pa.ArrowException:
                high = middle
        odd = difference(schema, columns_of(block.within)) or ("", "")
        found = SchemaError(
            f"{self._asker}(): {self._named(name)} has {odd[1]}, which becomes {odd[0]}, as the other "
            f"sources ask for, and a value does not fit: {error}; convert them by map_batches()",
            stage=self._stage,
        )
        return self._marked(found, int(block.ids[low]))

    def _marked(self, error: SchemaError, row: int) -> SchemaError:
        error._trainpipes = self._stage, row
        return error

    def _compared(self, name: Any, block: Block) -> Block:
        """Rows that stay as they are, if they are what those of the first pipeline read are."""
        if self._joined == "side by side":
            return block
        kind = columns_of(block.within)
        first = self._first = self._first or (name, kind)
        odd = difference(first[1], kind)
        if odd is None:
            arrow = isinstance(kind, pa.Schema)
            return block.with_columns(lambda t: in_columns(t, first[1])) if arrow else block
        raise self._unlike(name, self._named(first[0]), *odd[::-1])

    # Messages

    @property
    def _rule(self) -> str:
        if self._joined == "side by side":
            return "rows of all sources have columns, and"
        return "rows of all sources have the same columns, and"

    def _named(self, name: Any) -> str:
        return f"source {name}" if isinstance(name, int) else repr(name)

    def _unlike(self, name: Any, other: str, has: str, other_has: str) -> SchemaError:
        return SchemaError(
            f"{self._asker}(): {self._rule} {other} has {other_has}, {self._named(name)} {has}; "
            "make them alike in one of the two, by select(), rename() or map_batches()",
            stage=self._stage,
        )


def _wider(one: pa.Field, other: pa.Field) -> pa.Field:
    """The field that holds the values of both."""
    shapes = {fixed_shape(field.type) for field in (one, other)} - {None}
    if len(shapes) > 1:
        raise NoColumn
    kind = one.type if one.type.equals(other.type) else unite(one.type, other.type)
    return pa.field(one.name, kind, one.nullable or other.nullable)
