"""How often each label comes in the data.

One pass over one column: of files, no other is read. Every row is counted once, whatever order, draw, shards
or weights of a mix the pipeline gives it. The same on all ranks, each of which makes the pass by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.messages import need_columns
from trainpipes._internal.progress import counted
from trainpipes.columns.arrays import list_array, to_arrow
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.pipeline import Pipeline
from trainpipes.sources.mixed.mix import Mix
from trainpipes.stages.columns import Rename, Select
from trainpipes.stages.encode_labels import EncodeLabels, Label
from trainpipes.stages.label_column import LabelColumn, row_table

#: Rows that are counted at a time.
ROWS = 65_536
#: More different values than these are no labels, and would fill the memory.
MOST_VALUES = 1 << 22
#: Stages that say in which order rows come, how often and where: none of it changes the counts.
ORDERING = ("shuffle", "shard", "repeat", "place", "cache")


class ReadLabels(RunStage):
    """Leaves of the rows their labels alone: texts or int64, or lists of these."""

    thread_safe = True
    needs_columns = True

    column: str

    @property
    def name(self) -> str:
        return "stats"

    def __repr__(self) -> str:
        return f"stats(labels={self.column!r})"

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self)
        need_columns(table.column_names, [self.column], self)
        labels = LabelColumn(table[self.column], self.column, self, block.ids)
        values = labels.values if labels.is_text else to_arrow(labels.values)
        if labels.lengths is not None:
            places = list_array(np.arange(len(values)), labels.lengths)
            values = type(places).from_arrays(places.offsets, values)
        return run.with_block(block.with_data(pa.table({self.column: values})))


def label_counts(pipeline: Pipeline, column: str) -> dict[Label, int]:
    """Rows of each label of a column, in sorted order: integers, then texts. Of a column that
    ``encode_labels`` makes, of each class, also those that no row has."""
    stages = _on_rows(pipeline._stages, column)
    found: Counter[Label] = Counter()
    last: Any = stages[-1]
    if isinstance(last, EncodeLabels) and last.output_column == column:
        if last.counts is not None:
            return dict(enumerate(last.counts))
        found.update(dict.fromkeys(range(last.num_classes), 0))
    for part in _parts(stages):
        found.update(_counted(_narrowed(part, column), column))
    order = sorted(found, key=lambda value: (isinstance(value, str), value))
    return {value: found[value] for value in order}


def _on_rows(stages: Sequence[Stage], column: str) -> Sequence[Stage]:
    """The stages below those that make batches; up to the one that encodes the labels, if those above it
    leave the rows and their labels as they are."""
    batched = (n for n, stage in enumerate(stages) if stage.role in ("batch", "pack", "finish"))
    rows = stages[: next(batched, len(stages))]
    for place in reversed(range(len(rows))):
        stage: Any = rows[place]
        if isinstance(stage, EncodeLabels) and stage.output_column == column:
            return rows[: place + 1]
        if not stage.keeps_rows or stage.runs_user_code or column in getattr(stage, "names", ()):
            break
    return rows


def _parts(stages: Sequence[Stage]) -> list[Sequence[Stage]]:
    """The chains whose rows are mixed, each with the stages above the mix; the chain itself without one."""
    first, *above = stages
    if not isinstance(first, Mix):
        return [stages]
    found: list[Sequence[Stage]] = []
    for pipeline in first.sources.values():
        found += _parts([*pipeline._stages, *above])
    return found


def _narrowed(stages: Sequence[Stage], column: str) -> list[Stage]:
    """The stages that it takes to read a column: of files, the others are not read."""
    left = list(stages)
    above: list[Stage] = []
    while len(left) > 1:
        stage: Any = left[-1]
        if stage.role == "reader":
            given = stage.options.get("columns")
            if "columns" in stage.options and (given is None or column in given):
                left[-1] = stage.replaced(columns=[column])
            break
        if isinstance(stage, Select) and column in stage.columns:
            above.append(Select([column]))
        elif isinstance(stage, Rename) and column in stage.names.values():
            old = next(name for name, new in stage.names.items() if new == column)
            above.append(Rename({old: column}))
            column = old
        elif isinstance(stage, EncodeLabels) and column == stage.output_column:
            above.append(stage)
            column = stage.column
        elif stage.role not in ORDERING:
            break
        left.pop()
    rest = [stage for stage in left if stage.role not in ORDERING]
    return [*rest, *reversed(above)]


def _counted(stages: Sequence[Stage], column: str) -> Counter[Label]:
    pipeline = Pipeline([*stages, ReadLabels(column)], (0, 1))
    chain = pipeline._session.plan.chain
    if chain.endless or chain.opener.read_once:
        why = "have no end" if chain.endless else "can be read only once"
        raise ConfigError(
            f"stats(labels={column!r}) reads all rows before training, and those of {chain.stages[0]} "
            f"{why}: give the list of labels"
        )
    found: Counter[Label] = Counter()
    rows = pipeline._session.plan.inputs.epoch_rows
    tables = pipeline.batch(ROWS).collate(format="arrow")
    for table in counted(tables, f"counting {column!r}", rows, "rows", size=None):
        values = table[column]
        if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            values = pc.list_flatten(values)
        tally = values.value_counts()
        for value, count in zip(
            tally.field(0).to_pylist(), tally.field(1).to_pylist(), strict=True
        ):
            found[value] += count
        if len(found) > MOST_VALUES:
            raise ConfigError(
                f"stats(labels={column!r}): the column holds more than {MOST_VALUES:,} different values, "
                "which are no labels: name another one"
            )
    return found
