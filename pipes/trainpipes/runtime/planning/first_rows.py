"""The schema of rows that are Python objects, found from the first of them in file order.

It must be the same wherever a run starts, on every rank and in every worker. So the rows are read from the
start of the data once more, with the random choices of epoch 0, and put through the stages below; functions
among these are called for them once more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.errors import SchemaError, TrainpipesError
from trainpipes.order import IntArray
from trainpipes.runtime.kinds import open_stage
from trainpipes.runtime.rows.block import Block, payload_bytes
from trainpipes.runtime.rows.row_schema import SchemaFinder, UnfitRow
from trainpipes.runtime.rows.row_types import NoColumn, is_open, unite, written
from trainpipes.runtime.run import Cursors, Run, RunSource
from trainpipes.runtime.source import RowMixture, RowSource, RowStream, read_full, read_rows
from trainpipes.runtime.stage import Stage

__all__ = ["Unfit", "find_schema"]

#: Rows that a schema is found from, and the most that are read for it where some columns hold only None.
ROWS, MOST_ROWS, MOST_BYTES = 256, 10_000, 64 << 20
#: Rows that are read at a time.
STEP = 64
START = {"epoch": 0, "window": 0, "row": 0}


class Unfit(Exception):
    """The first rows make no columns.

    Args:
        error: says why.
    """

    def __init__(self, error: SchemaError) -> None:
        super().__init__(str(error))
        self.error = error


def find_schema(
    plan: Any,
    below: Sequence[Stage],
    asker: str,
    cure: str = "give them by schema= of the stage that makes the rows, schema={}",
    rows_of: Callable[[Block], Sequence[Any]] = Block.rows,
) -> pa.Schema:
    """The schema that rows have after some stages of a plan.

    Args:
        plan: the pipeline's.
        below: stages on rows, first one first.
        asker: who needs columns, for messages.
        cure: what to do where types are not found; their schema goes in.
        rows_of: makes the rows that are looked at of those that come out of the stages.

    Raises:
        Unfit: a row is no dict, holds what Arrow can't, or does not go with those before it.
        SchemaError: a column has no type in all that is looked at.
    """
    if isinstance(plan.source, RowMixture):
        found = {
            name: find_schema(part, [*part.before, *part.after, *below], asker, cure, rows_of)
            for name, part in plan.mixed.items()
        }
        return _of_all(found, asker)
    finder = SchemaFinder()
    source = _FirstRows(plan, asker)
    try:
        for run in _runs(source, below):
            if rows_of is Block.rows and isinstance(run.block.data, pa.Table):
                return run.block.data.schema.remove_metadata()
            rows = rows_of(run.block)
            for start in range(0, len(rows), STEP):
                _add(finder, rows[start : start + STEP], run.block.ids[start:], plan, asker)
                if finder.rows >= ROWS and not finder.open:
                    return finder.schema
    except (TrainpipesError, Unfit):
        raise
    except Exception:  # of a user's function; it is raised when its row is due
        if not finder.rows or finder.open:
            raise
    finally:
        source.close()
    if source.cut and (finder.open or not finder.rows):
        raise _no_type(finder.schema, source.rows, asker, cure)
    return finder.schema


def _no_type(schema: pa.Schema, rows: int, asker: str, cure: str) -> SchemaError:
    names = [field.name for field in schema if is_open(field.type)]
    what = f"column {names[0]!r} holds" if len(names) == 1 else f"columns {names} hold"
    said = f"{what} nothing but None or empty lists" if names else "there is no row"
    text = written(schema).replace("pa.null()", "...")
    return SchemaError(
        f"{asker} needs the types of columns, and in the first {rows:,} rows {said}: {cure.format(text)}",
        stage=asker,
    )


def _add(finder: SchemaFinder, rows: Sequence[Any], ids: IntArray, plan: Any, asker: str) -> None:
    try:
        finder.add(rows)
    except UnfitRow as unfit:
        place = plan.place_of(int(ids[unfit.number]))
        found = SchemaError(
            f"{asker} works on columns, and a row {unfit}; make dicts whose values go together with map() "
            f"(at {place})",
            path=place.path, row_group=place.row_group, row=place.row, source=place.source, stage=asker,
        )  # fmt: skip
        raise Unfit(found) from None


def _of_all(found: dict[str, pa.Schema], asker: str) -> pa.Schema:
    """The schema of all sources of a mix: the same columns, whose types go together."""
    first, *others = found
    types = {field.name: field.type for field in found[first]}
    for name in others:
        schema = found[name]
        odd = sorted(set(schema.names) ^ set(types))
        for column in odd:
            has, lacks = (name, first) if column in schema.names else (first, name)
            raise SchemaError(
                f"{asker}: rows of all sources have the same columns, and {has!r} has {column!r}, which "
                f"{lacks!r} has not; bring them in line in the sources, by map() or select()",
                stage=asker,
            )
        for field in schema:
            try:
                types[field.name] = unite(types[field.name], field.type)
            except NoColumn as error:
                raise SchemaError(
                    f"{asker}: rows of all sources have the same columns, and {field.name!r} holds {error} "
                    f"in {first!r} and {name!r}; bring them in line in the sources, by map()",
                    stage=asker,
                ) from None
    return pa.schema(list(types.items()))


def _runs(source: _FirstRows, below: Sequence[Stage]) -> Iterator[Run]:
    """What the first rows become."""
    # Batches are made of rows as they are, in an order that says nothing of their columns.
    stages = [stage for stage in below if stage.role != "batch"]

    def opened(level: int, state: dict[str, Any]) -> RunSource:
        if not level:
            return source
        return open_stage(stages[level - 1], partial(opened, level - 1), state)

    chain = opened(len(stages), dict(START))
    while True:
        try:
            yield chain.next_run()
        except StopIteration:
            return


class _FirstRows:
    """The rows of a source in file order, as far as they are looked at.

    Attributes:
        rows: that were read.
        cut: whether there are more.
    """

    def __init__(self, plan: Any, asker: str) -> None:
        self._plan = plan
        self.rows = 0
        self._bytes = 0
        self.cut = False
        source = plan.source
        if getattr(source, "read_once", False):
            raise SchemaError(
                f"{asker} needs the types of columns, and rows of {plan.stages[0]} can't be read twice to "
                "find them: give them by schema= of a map() in between, schema=pa.schema([...])",
                stage=asker,
            )
        self._reader: Any = None
        stream = isinstance(source, RowStream)
        self._parts = self._of_stream(source) if stream else self._of_blocks(source)

    def next_run(self) -> Run:
        if self.rows >= MOST_ROWS or self._bytes >= MOST_BYTES:
            self.cut = True
            raise StopIteration
        data, first = next(self._parts)
        ids = np.arange(first, first + len(data), dtype=np.int64)
        self.rows += len(data)
        self._bytes += payload_bytes(data) or sum(map(_bytes_of, data))
        return Run(Block(data, ids), Cursors.counting(dict(START), np.arange(len(data) + 1)))

    def _of_blocks(self, source: RowSource) -> Generator[tuple[Any, int], None, None]:
        self._reader = source.reader()
        firsts, begins = self._plan.blocks.firsts, self._plan.blocks.begins
        for block, rows in enumerate(self._plan.blocks.lengths.tolist()):
            begin = int(begins[block])
            for start in range(begin, begin + rows, STEP):
                stop = min(start + STEP, begin + rows, start + MOST_ROWS - self.rows)
                yield (
                    read_rows(source, self._reader, block, start, stop),
                    int(firsts[block]) + start,
                )

    def _of_stream(self, source: RowStream) -> Generator[tuple[Any, int], None, None]:
        self._reader = source.open(0, None)
        row, stop = 0, self._plan.stop_rows
        while stop is None or row < stop:
            wanted = STEP if row >= self._plan.skip_rows else min(STEP, self._plan.skip_rows - row)
            data = read_full(self._reader, wanted if stop is None else min(wanted, stop - row))
            if data is None:
                return
            row += len(data)
            if row > self._plan.skip_rows:
                yield data, row - len(data)

    def close(self) -> None:
        self._parts.close()
        if self._reader is not None:
            self._reader.close()


def _bytes_of(value: Any) -> int:
    """About how large a Python object is; the same in every process."""
    if isinstance(value, dict):
        return sum(map(_bytes_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value[:64])) * max(1, len(value)) // max(1, len(value[:64]))
    return getattr(value, "nbytes", 0) or (len(value) if isinstance(value, str | bytes) else 8)
