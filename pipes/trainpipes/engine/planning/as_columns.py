from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.block import Block
from trainpipes.columns.payload import Payload
from trainpipes.columns.row_types import written
from trainpipes.columns.run import Run
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.columns.value_column import UnfitRow, table_of_rows
from trainpipes.engine.planning.first_rows import UnfitRows, find_schema, first_rows
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage import Stage, is_ours


class AsColumns(kinds.RunStage, per_row=True, asks_inputs=True):
    """Turns rows that are dicts into Arrow columns of one schema, given or found once. Called by any thread.

    Args:
        caller: the stage that needs columns, for messages.
        may_stay: whether rows stay as they are where the first ones make no columns.
        key: of its schema in ``Schemas``.
        ragged: see ``SchemaFinder``.
    """

    thread_safe = True

    caller: str
    schema: pa.Schema | None = None
    may_stay: bool = False
    key: str = ""
    ragged: Collection[str] | None = None

    def identity(self) -> dict[str, Any]:
        return {"stage": self.name, "schema": None if self.schema is None else written(self.schema)}

    def __repr__(self) -> str:
        return f"columns for {self.caller}"

    def _traits(self) -> dict[str, Any]:
        return {"gives": "found types" if self.schema is None else "rows"}

    def _bound(self, inputs: Inputs) -> AsColumns:
        if self.schema is not None:
            inputs.schemas.give(self.key, self.schema)
        return super()._bound(inputs)

    @property
    def kept(self) -> pa.Schema | None:
        """The schema; None where rows stay as they are. Raises SchemaError if there is none."""
        found: pa.Schema | None = self._inputs.schemas.get(self.key, self._find)
        return found

    def _find(self) -> pa.Schema | None:
        inputs: Inputs = self._inputs
        steps, kept = inputs.chain.steps, inputs.chain.cached or 0
        below = steps[: steps.index(self)]
        find = partial(find_schema, inputs, below, self.caller, ragged=self.ragged)
        cached = inputs.cached_blocks if len(below) < kept else None
        try:
            return find() if cached is None else cached.schema(self.key, find)
        except UnfitRows:
            if self.may_stay:
                return None
            raise

    def process(self, run: Run) -> Run:
        data = run.block.data
        if not isinstance(data, list) or run.items is not None:
            return run
        schema = self.kept
        if schema is None:
            return run
        try:
            table = table_of_rows(data, schema, self.schema is None)
        except UnfitRow as unfit:
            error = SchemaError(self._refusal(unfit, schema), stage=self.caller)
            error._trainpipes = self.caller, int(run.block.ids[unfit.number])
            raise error from unfit.__cause__
        return run.with_block(run.block.with_data(table))

    def _refusal(self, unfit: UnfitRow, schema: pa.Schema) -> str:
        given = self.schema is not None
        which = "of the schema given" if given else "with the types of the first rows"
        cure = "give all rows the same columns with map()"
        if self.ragged is not None:
            cure += "; if lengths may differ, pass ragged=[...]"
        if unfit.column is not None and unfit.found is not None:
            fields = {field.name: field.type for field in schema} | {unfit.column: unfit.found}
            wider = pa.schema(list(fields.items()))
            if not wider.equals(schema):
                cure = f"give the stage that makes the rows schema={written(wider)}, or {cure}"
        return f"{self.caller} works on columns {which}, and a row {unfit}: {cure}"


def known_columns(inputs: Inputs, steps: Sequence[Stage]) -> pa.Schema | None:
    schema = inputs.source.schema if isinstance(inputs.source, RowSource) else None
    start = 0
    for number, stage in enumerate(steps):
        if isinstance(stage, AsColumns) and stage.schema is not None:
            schema, start = stage.schema, number + 1
    rest = steps[start:]
    if schema is None or not all(stage.traits.gives == "choice" for stage in rest):
        return None
    empty = Block(pa.Table.from_batches([], schema), np.empty(0, dtype=np.int64))
    found = kinds.put_through(rest, empty).data
    assert isinstance(found, pa.Table)
    return found.schema.remove_metadata()


def columns(inputs: Inputs) -> dict[str, str]:
    data = _schema_or_rows(inputs, "explain().columns")
    if isinstance(data, pa.Schema):
        return _types(data)
    if isinstance(data, TensorRows):
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in data.tensors]
        return dict(zip(data.names or (), dtypes, strict=False))
    if data and isinstance(data[0], dict):
        return {k: type(v).__name__ for k, v in data[0].items() if isinstance(k, str)}
    return {}


def columns_if_known(inputs: Inputs) -> dict[str, str]:
    schema = known_columns(inputs, inputs.chain.before + inputs.chain.after_on_rows)
    return {} if schema is None else _types(schema)


def _types(schema: pa.Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def row_schema(inputs: Inputs, caller: str) -> pa.Schema | None:
    data = _schema_or_rows(inputs, caller)
    return data if isinstance(data, pa.Schema) else None


def _schema_or_rows(inputs: Inputs, caller: str) -> pa.Schema | Payload | None:
    chain = inputs.chain
    steps = chain.before + chain.after_on_rows
    schema = known_columns(inputs, steps)
    if schema is not None:
        return schema
    data = first_rows(inputs, steps, caller)
    return data.schema if isinstance(data, pa.Table) else data


def gives_objects(stages: Sequence[Stage]) -> bool:
    return with_columns(stages)[1]


def with_columns(stages: Sequence[Stage]) -> tuple[list[Stage], bool]:
    """The stages, with ``AsColumns`` where objects must become columns; and whether they give objects."""
    found: list[Stage] = []
    objects = batched = False
    number = 0
    for stage in stages:
        traits = stage.traits
        needs_columns = traits.takes != "rows"
        if needs_columns and objects and not _in_batches(stage, stages[0], batched):
            stays, ragged = traits.takes == "columns or objects", traits.ragged
            found.append(AsColumns(str(stage), may_stay=stays, key=str(number), ragged=ragged))
            number += 1
        found.append(stage)
        batched = batched or isinstance(stage, kinds.BatchingStage)
        # A source of the user's may give objects or columns; so may a function.
        ours = is_ours(type(stage)) or isinstance(stage, kinds.TableStage)
        makes, schema = traits.gives == "objects" or not ours, stage.options.get("schema")
        if isinstance(stage, kinds.CombiningSource):
            makes = all(map(gives_objects, stage.chains))
        given = makes and isinstance(schema, pa.Schema)
        if given and batched:
            raise ConfigError(
                f"{stage} comes after batch(), and schema= is for rows: put the stage before "
                "batch(), or leave schema out"
            )
        if given:
            found.append(AsColumns(str(stage), schema, key=str(number)))
            number += 1
        if makes or needs_columns:
            objects = makes and not given
    return found, objects


def _in_batches(stage: Stage, first: Stage, batched: bool) -> bool:
    """Whether a stage that collates gets batches that were made elsewhere."""
    made = first.traits.makes_batches or first.traits.read_once
    return isinstance(stage, kinds.FinishingStage) and (not batched or made)
