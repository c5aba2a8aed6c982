"""The schema of rows that are Python objects, found from the first of them.

It must be the same wherever a run starts. So the rows are read once more from the start, with the
random choices of epoch 0, and put through the stages below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trainpipes._internal.types import IntArray
from trainpipes.columns.block import Block
from trainpipes.columns.payload import Payload, payload_bytes
from trainpipes.columns.row_types import is_open, written
from trainpipes.columns.run import Cursors, Run
from trainpipes.columns.value_column import SchemaFinder, UnfitRow
from trainpipes.engine.calling.open_stages import open_stages
from trainpipes.engine.planning.inputs import SAMPLE_ROWS, Inputs
from trainpipes.engine.planning.mixture import RowMixture
from trainpipes.errors import SchemaError, TrainpipesError
from trainpipes.interfaces.source import RowStream, read_full, read_rows
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import (
    BalanceStage,
    BatchingStage,
    CountingStage,
    FinishingStage,
    RunStage,
    first_of,
    without,
)
from trainpipes.interfaces.tally import aside

#: Rows that a schema is found from; where some columns hold only None in them, more are read, up to
#: ``SAMPLE_ROWS``, or so many bytes.
ROWS = 256
MOST_BYTES = 64 << 20
#: Rows that are read at a time.
STEP = 64
#: Rows, and the number of the first of them.
Parts: TypeAlias = Generator[tuple[Payload, int], None, None]
START = {"epoch": 0, "window": 0, "row": 0}


class UnfitRows(SchemaError):
    """The first rows make no columns."""


@aside()
def find_schema(
    inputs: Inputs,
    below: Sequence[Stage],
    caller: str,
    cure: str = "give them by schema= of the stage that makes the rows, schema={}",
    made_of: Callable[[Block], Block] | None = None,
    typed: Collection[str] = (),
    whole: Inputs | None = None,
    ragged: Collection[str] | None = None,
) -> pa.Schema:
    """The schema of rows after some stages.

    Args:
        caller: who needs columns, for messages.
        cure: what to do where types are not found.
        made_of: makes Python rows of those after the stages.
        typed: columns whose types are known from elsewhere.
        whole: the mix that the pipeline is part of, for messages.
        ragged: see ``SchemaFinder``.

    Raises:
        UnfitRows: a row makes no columns, or does not fit those before it.
        SchemaError: a column has no type in all that is looked at.
    """
    if isinstance(inputs.source, RowMixture):
        found = {
            name: find_schema(
                part, steps, caller, cure, made_of, whole=whole or inputs, ragged=ragged
            )
            for name, part, steps in _parts_of_mix(inputs, inputs.source, below)
        }
        with_rows = {name: schema for name, schema in found.items() if schema.names}
        return inputs.source.united(with_rows or found, caller)
    finder, source, typed = SchemaFinder(ragged), _FirstRows(inputs, caller), set(typed)
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
    except TrainpipesError:
        raise
    except Exception:  # of a user function: raised when its row is due
        if not finder.rows or finder.open:
            raise
    finally:
        runs.close()
    if source.cut and (not typed >= set(finder.open) or not finder.rows):
        raise _no_type(finder.schema, source.rows, caller, cure)
    return finder.schema


@aside()
def first_rows(inputs: Inputs, below: Sequence[Stage], caller: str) -> Payload | None:
    """One row after some stages, or a few; None where the first ``SAMPLE_ROWS`` give none."""
    if isinstance(inputs.source, RowMixture):
        for _, part, steps in _parts_of_mix(inputs, inputs.source, below):
            data = first_rows(part, steps, caller)
            if data is not None:
                return data
        return None
    keeps = all(isinstance(stage, RunStage) and stage.traits.keeps_rows for stage in below)
    with closing(_FirstRows(inputs, caller, 1 if keeps else STEP).runs()) as rows:
        return next((run.block.data for run in _runs(rows, below)), None)


def _parts_of_mix(
    inputs: Inputs, mixture: RowMixture, below: Sequence[Stage]
) -> Iterator[tuple[str, Inputs, Sequence[Stage]]]:
    below = without(below, CountingStage)  # it counts rows of the mix
    for name, part in inputs.mixed.items():
        yield name, part, (*_on_rows(part.chain.steps), mixture.naming(name), *below)


def _no_type(schema: pa.Schema, rows: int, caller: str, cure: str) -> SchemaError:
    names = [field.name for field in schema if is_open(field.type)]
    what = f"column {names[0]!r} holds" if len(names) == 1 else f"columns {names} hold"
    said = f"{what} nothing but None or empty lists" if names else "there is no row"
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
        raise UnfitRows(
            f"{caller} works on columns, and a row {unfit}; make dicts with values of the same types "
                f"with map() (at {place})",
            path=place.path, row_group=place.row_group, row=place.row, source=place.source, stage=caller,
        ) from None  # fmt: skip


def _runs(rows: Iterator[Run], below: Sequence[Stage]) -> Iterator[Run]:
    runs, _ = open_stages(_on_rows(below), lambda _: rows, dict(START))
    return runs


def _on_rows(stages: Sequence[Stage]) -> list[Stage]:
    """Without what is on batches: functions on batches are not called for rows."""
    stages = without(stages, BalanceStage)
    batch = first_of(stages, BatchingStage)
    cut = len(stages) if batch is None else stages.index(batch)
    later = without(stages[cut:], FinishingStage | BatchingStage)
    return [*stages[:cut], *(stage for stage in later if stage.traits.takes != "rows")]


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
