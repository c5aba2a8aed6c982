"""The types of columns: known from the source and from stages, or found from the first rows.

What is found must be the same wherever a run starts. So the rows are read once more from the start, with
the random choices of epoch 0, and put through the stages below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import IntArray
from trainpipes.columns.arrays import holds
from trainpipes.columns.block import Block
from trainpipes.columns.payload import Payload, payload_bytes
from trainpipes.columns.python_values import table_of_rows
from trainpipes.columns.run import Cursors, Run
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.columns.types import SchemaFinder, UnfitRow, is_open, written
from trainpipes.engine.calling import open_stages
from trainpipes.engine.planning.chain import RowMixture
from trainpipes.engine.planning.inputs import SAMPLE_ROWS, Inputs
from trainpipes.errors import ConfigError, SchemaError, WorkerError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.quarantine import NOT_OF_ROWS
from trainpipes.interfaces.source import RowSource, RowStream, read_full, read_rows
from trainpipes.interfaces.stage import Stage, aside, is_ours

#: Rows that a schema is found from; where some columns hold only None in them, more are read, up to
#: ``SAMPLE_ROWS``, or so many bytes.
ROWS = 256
MOST_BYTES = 64 << 20
#: Rows that are read at a time.
STEP = 64
#: Rows, and the number of the first of them.
Parts: TypeAlias = Generator[tuple[Payload, int], None, None]
START = {"epoch": 0, "window": 0, "row": 0}


def is_of_rows(error: Exception) -> bool:
    """Whether it says that the first rows make no columns."""
    return hasattr(error, "_of_rows")


class ColumnTypes:
    """The types of the columns of a chain's rows."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    @property
    def _steps(self) -> tuple[Stage, ...]:
        chain = self.inputs.chain
        return chain.before + chain.after_on_rows

    def known(self, steps: Sequence[Stage]) -> pa.Schema | None:
        """The columns after some stages, where nothing must be read to know them; else None."""
        source = self.inputs.source
        schema = source.schema if isinstance(source, RowSource) else None
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

    def columns(self) -> dict[str, str]:
        """Types of the columns of rows before they are batched, as text; may read the first rows."""
        data = self._schema_or_rows("explain().columns")
        if isinstance(data, pa.Schema):
            return _types(data)
        if isinstance(data, TensorRows):
            dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in data.tensors]
            return dict(zip(data.names or (), dtypes, strict=False))
        if data and isinstance(data[0], dict):
            return {k: type(v).__name__ for k, v in data[0].items() if isinstance(k, str)}
        return {}

    def columns_if_known(self) -> dict[str, str]:
        schema = self.known(self._steps)
        return {} if schema is None else _types(schema)

    def of_rows(self, caller: str) -> pa.Schema | None:
        """The columns of rows before they are batched; None where rows have none. May read the first rows."""
        data = self._schema_or_rows(caller)
        return data if isinstance(data, pa.Schema) else None

    def _schema_or_rows(self, caller: str) -> pa.Schema | Payload | None:
        schema = self.known(self._steps)
        if schema is not None:
            return schema
        data = self.first_rows(self._steps, caller)
        return data.schema if isinstance(data, pa.Table) else data

    # From the first rows

    @aside()
    def find(
        self,
        below: Sequence[Stage],
        caller: str,
        cure: str = "give them by schema= of the stage that makes the rows, schema={}",
        made_of: Callable[[Block], Block] | None = None,
        typed: Collection[str] = (),
        whole: Inputs | None = None,
        **how: Any,
    ) -> pa.Schema:
        """The schema of rows after some stages.

        Args:
            caller: who needs columns, for messages.
            cure: the way out where types are not found.
            made_of: makes Python rows of those after the stages.
            typed: columns whose types are known from elsewhere.
            whole: the mix that the pipeline is part of, for messages.
            how: see ``SchemaFinder``.

        Raises:
            SchemaError: a row makes no columns, or does not fit those before it; or a column has no type
                in all that is looked at.
        """
        inputs = self.inputs
        if isinstance(inputs.source, RowMixture):
            found = {
                name: ColumnTypes(part).find(
                    steps, caller, cure, made_of, whole=whole or inputs, **how
                )
                for name, part, steps in self._parts_of_mix(inputs.source, below)
            }
            with_rows = {name: schema for name, schema in found.items() if schema.names}
            return inputs.source.united(with_rows or found, caller)
        finder, source, typed = SchemaFinder(**how), _FirstRows(inputs, caller), set(typed)
        runs = source.runs()
        try:
            for run in _runs(runs, below):
                if made_of is None and isinstance(run.block.data, pa.Table):
                    return run.block.data.schema.remove_metadata()
                block = run.block if made_of is None else made_of(run.block)
                rows = block.rows()
                for start in range(0, len(rows), STEP):
                    ids = block.ids[start:]
                    _add(finder, rows[start : start + STEP], ids, whole or inputs, caller)
                    if finder.rows >= ROWS and typed >= set(finder.open):
                        return finder.schema
        except Exception as error:  # about a row: raised when that is due
            waits = not (is_of_rows(error) or isinstance(error, (*NOT_OF_ROWS, WorkerError)))
            if not waits or not finder.rows or finder.open:
                raise
        finally:
            runs.close()
        schema = finder.schema
        unknown = {field.name for field in schema if is_open(field.type)}
        if source.cut and (not typed >= unknown or not finder.rows):
            raise _no_type(schema, source.rows, caller, cure)
        return schema

    @aside()
    def first_rows(self, below: Sequence[Stage], caller: str) -> Payload | None:
        """One row after some stages, or a few; None where the first ``SAMPLE_ROWS`` give none."""
        inputs = self.inputs
        if isinstance(inputs.source, RowMixture):
            for _, part, steps in self._parts_of_mix(inputs.source, below):
                data = ColumnTypes(part).first_rows(steps, caller)
                if data is not None:
                    return data
            return None
        keeps = all(
            isinstance(stage, kinds.RunStage) and stage.traits.keeps_rows for stage in below
        )
        with closing(_FirstRows(inputs, caller, 1 if keeps else STEP).runs()) as rows:
            return next((run.block.data for run in _runs(rows, below)), None)

    def _parts_of_mix(
        self, mixture: RowMixture, below: Sequence[Stage]
    ) -> Iterator[tuple[str, Inputs, Sequence[Stage]]]:
        below = kinds.without(below, kinds.CountingStage)  # it counts rows of the mix
        for name, part in self.inputs.mixed.items():
            yield name, part, (*_on_rows(part.chain.steps), mixture.naming(name), *below)


def _types(schema: pa.Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def _no_type(schema: pa.Schema, rows: int, caller: str, cure: str) -> SchemaError:
    names = [field.name for field in schema if is_open(field.type)]
    subject = f"column {names[0]!r} holds" if len(names) == 1 else f"columns {names} hold"
    said = f"{subject} nothing but None or empty lists" if names else "there is no row"
    text = written(schema).replace("pa.null()", "...")
    return SchemaError(
        f"{caller} needs the types of columns, and in the first {rows:,} rows {said}: {cure.format(text)}",
        stage=caller,
    )


def _add(
    finder: SchemaFinder, rows: Sequence[Any], ids: IntArray, inputs: Inputs, caller: str
) -> None:
    try:
        finder.add(rows)
    except UnfitRow as unfit:
        place = inputs.place_of(int(ids[unfit.number]))
        error = SchemaError(
            f"{caller} works on columns, and a row {unfit}; put it before the stage that makes such values, "
            f"or make dicts with values of the same types with map() (at {place})",
            path=place.path, row_group=place.row_group, row=place.row, source=place.source, stage=caller,
        )  # fmt: skip
        error._of_rows = True
        raise error from None


def _runs(rows: Iterator[Run], below: Sequence[Stage]) -> Iterator[Run]:
    part: list[Stage] = []
    for stage in _on_rows(below):
        telling = getattr(stage, "telling", None)  # of ``RowMixture.naming``
        if telling is not None:
            rows, part = telling(_opened(part, rows)), []
        part.append(stage)
    return _opened(part, rows)


def _opened(stages: Sequence[Stage], rows: Iterator[Run]) -> Iterator[Run]:
    return open_stages(stages, lambda _: rows, dict(START))[0]


def _on_rows(stages: Sequence[Stage]) -> list[Stage]:
    """Without stages on batches: functions on batches are not called for rows."""
    stages = kinds.without(stages, kinds.BalanceStage)
    batch = kinds.first_of(stages, kinds.BatchingStage)
    cut = len(stages) if batch is None else stages.index(batch)
    later = kinds.without(stages[cut:], kinds.FinishingStage | kinds.BatchingStage)
    by_row = (s for s in later if s.traits.takes != "rows" or getattr(s, "_rows_of_batches", False))
    return [*stages[:cut], *by_row]


def _run_of(data: Payload, first: int) -> Run:
    ids = np.arange(first, first + len(data), dtype=np.int64)
    return Run(Block(data, ids), Cursors.counting(dict(START), np.arange(len(data) + 1)))


class _FirstRows:
    """The first rows of a pipeline, in steps, for ``SchemaFinder``."""

    def __init__(self, inputs: Inputs, caller: str, step: int = STEP) -> None:
        chain = inputs.chain
        if chain.opener.traits.read_once:
            raise SchemaError(
                f"{caller} needs the types of columns, and rows of {chain.stages[0]} can't be read twice to "
                "find them: give them by schema= of a map() in between, schema=pa.schema([...])",
                stage=caller,
            )
        self.rows = 0
        self.cut = False
        of_source = _of_stream if isinstance(inputs.source, RowStream) else _of_blocks
        self._parts = of_source(inputs, step)

    def runs(self) -> Generator[Run, None, None]:
        size = 0
        with closing(self._parts) as parts:
            for data, first in parts:
                self.rows += len(data)
                size += _bytes_of(data) if isinstance(data, list) else payload_bytes(data)
                yield _run_of(data, first)
                if self.rows >= SAMPLE_ROWS or size >= MOST_BYTES:
                    self.cut = True
                    return


def _of_blocks(inputs: Inputs, step: int) -> Parts:
    source, blocks, left = inputs.listed, inputs.blocks, SAMPLE_ROWS
    with closing(source.reader()) as reader:
        for block, rows in enumerate(blocks.lengths.tolist()):
            begin = int(blocks.begins[block])
            for start in range(begin, begin + rows, step):
                stop = min(start + step, begin + rows, start + left)
                left -= stop - start
                first = int(blocks.firsts[block]) + start
                yield read_rows(source, reader, block, start, stop), first


def _of_stream(inputs: Inputs, step: int) -> Parts:
    skip, stop = inputs.chain.skip_rows, inputs.chain.stop_rows
    row = 0
    assert isinstance(inputs.source, RowStream)
    with closing(inputs.source.open(0, None)) as reader:
        while stop is None or row < stop:
            wanted = step if row >= skip else min(STEP, skip - row)
            data = read_full(reader, wanted if stop is None else min(wanted, stop - row))
            if data is None:
                return
            row += len(data)
            if row > skip:
                yield data, row - len(data)


def _bytes_of(value: Any) -> int:
    """Roughly; the same in every process."""
    if isinstance(value, dict):
        return sum(map(_bytes_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value[:64])) * max(1, len(value)) // max(1, len(value[:64]))
    return getattr(value, "nbytes", 0) or (len(value) if isinstance(value, str | bytes) else 8)


# Rows as columns


class AsColumns(kinds.RunStage, per_row=True, asks_inputs=True):
    """Turns rows that are dicts into Arrow columns of a schema, given or found once. Called by any thread.

    Args:
        caller: the stage that needs columns, for messages.
        may_stay: whether rows stay as they are where the first ones make no columns.
        keeps_dicts: whether rows stay dicts where their values hold dicts, whose keys may differ.
        key: of its schema in ``Schemas``.
        ragged, pads: see ``SchemaFinder``.
    """

    thread_safe = True

    caller: str
    schema: pa.Schema | None = None
    may_stay: bool = False
    keeps_dicts: bool = False
    key: str = ""
    ragged: Collection[str] | None = None
    pads: bool = False

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
        steps, cached_steps = inputs.chain.steps, inputs.chain.cached or 0
        below = steps[: steps.index(self)]
        how: Any = {"ragged": self.ragged, "pads": self.pads, "lossless": self.may_stay}
        find = partial(ColumnTypes(inputs).find, below, self.caller, **how)
        cached = inputs.cached_blocks if len(below) < cached_steps else None
        try:
            return find() if cached is None else cached.schema(self.key, find)
        except SchemaError as error:
            if not (self.may_stay and is_of_rows(error)):
                raise
            return None

    def process(self, run: Run) -> Run:
        data = run.block.data
        if not isinstance(data, list) or run.items is not None:
            return run
        schema = self.kept
        if schema is None:
            return run
        if self.keeps_dicts and any(holds(kind, pa.types.is_struct) for kind in schema.types):
            return run.with_block(run.block.with_data(_with_keys(data, schema.names)))
        try:
            table = table_of_rows(data, schema, self.schema is None)
        except UnfitRow as unfit:
            error = SchemaError(self._refusal(unfit, schema), stage=self.caller)
            error._trainpipes = self.caller, int(run.block.ids[unfit.number])
            raise error from unfit.__cause__
        return run.with_block(run.block.with_data(table))

    def _refusal(self, unfit: UnfitRow, schema: pa.Schema) -> str:
        has_schema = self.schema is not None
        which = "of the schema given" if has_schema else "with the types of the first rows"
        cure = "give all rows the same columns with map()"
        if self.ragged is not None:
            cure += "; if lengths may differ, pass ragged=[...]"
        if unfit.column is not None and unfit.found is not None:
            fields = {field.name: field.type for field in schema} | {unfit.column: unfit.found}
            wider = pa.schema(list(fields.items()))
            if not wider.equals(schema):
                cure = f"give the stage that makes the rows schema={written(wider)}, or {cure}"
        return f"{self.caller} works on columns {which}, and a row {unfit}: {cure}"


def _with_keys(rows: list[Any], names: list[str]) -> list[Any]:
    """Rows that are dicts, with these keys first, and None where they lack one."""
    return [
        {**dict.fromkeys(names), **row} if isinstance(row, dict) and [*row] != names else row
        for row in rows
    ]


def gives_objects(stages: Sequence[Stage]) -> bool:
    """Whether they give objects, of any rows."""
    return _arranged(stages)[1]


def may_give_objects(stages: Sequence[Stage]) -> bool:
    """Whether they give objects where these make no columns, at least."""
    return _arranged(stages)[2]


def with_columns(stages: Sequence[Stage]) -> list[Stage]:
    """The stages, with ``AsColumns`` where objects must become columns."""
    return _arranged(stages)[0]


def _arranged(stages: Sequence[Stage]) -> tuple[list[Stage], bool, bool]:
    """What ``with_columns``, ``gives_objects`` and ``may_give_objects`` say."""
    found: list[Stage] = []
    objects = may_be = batched = arrays = False
    number = 0
    for stage in stages:
        traits = stage.traits
        needs_columns, stays = traits.takes != "rows", traits.takes == "columns or objects"
        due = needs_columns and may_be and not _in_batches(stage, stages[0], batched)
        arrays = arrays or getattr(stage, "_gives_arrays", False)
        if due and not (stays and arrays):
            how: Any = {"ragged": traits.ragged, "pads": traits.pads}
            how["keeps_dicts"] = traits.gives == "choice"
            found.append(AsColumns(str(stage), may_stay=stays, key=str(number), **how))
            number += 1
        found.append(stage)
        batched = batched or isinstance(stage, kinds.BatchingStage)
        # A source of the user's may give objects or columns; so may a function.
        ours = is_ours(type(stage)) or isinstance(stage, kinds.TableStage)
        makes, schema = traits.gives == "objects" or not ours, stage.options.get("schema")
        if isinstance(stage, kinds.CombiningSource):
            parts = [_arranged(chain) for chain in stage.chains]
            makes, may_be = (all(part[n] for part in parts) for n in (1, 2))
        has_schema = makes and isinstance(schema, pa.Schema)
        if has_schema and batched:
            raise ConfigError(
                f"{stage} comes after batch(), and schema= is for rows: put the stage before "
                "batch(), or leave schema out"
            )
        if has_schema:
            found.append(AsColumns(str(stage), schema, key=str(number)))
            number += 1
        if makes or needs_columns:
            objects = makes and not has_schema
            may_be = objects or (may_be and traits.gives == "choice")
    return found, objects, may_be


def _in_batches(stage: Stage, first: Stage, batched: bool) -> bool:
    """Whether a stage that collates gets batches that were made elsewhere."""
    batched_below = first.traits.makes_batches or first.traits.read_once
    return isinstance(stage, kinds.FinishingStage) and (not batched or batched_below)
