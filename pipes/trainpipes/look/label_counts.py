"""How often each label comes in the data, and what weights that makes for the classes.

One pass over one column: of files, no other is read. Every row is counted once, whatever order, draw, shards
or weights of a mix the pipeline gives it. The same on all ranks, each of which makes the pass by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from trainpipes._internal.naming import need_columns
from trainpipes._internal.progress import counted
from trainpipes._internal.shown import shown
from trainpipes._internal.warn_once import warn_once
from trainpipes.columns.arrays import list_array, to_arrow
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.pipeline import Pipeline
from trainpipes.sources.mixed.mix import Mix
from trainpipes.stages.columns import Rename, Select
from trainpipes.stages.encode_labels import EncodeLabels, Label
from trainpipes.stages.label_column import LabelColumn
from trainpipes.stages.ragged_column import row_table

__all__ = ["class_counts", "class_weights", "value_counts"]

#: Rows that are counted at a time.
ROWS = 65_536
#: More different values than these are no labels, and would fill the memory.
MOST_VALUES = 1 << 22
#: Stages that say in which order rows come, how often and where: none of it changes the counts.
ORDERING = ("shuffle", "shard", "repeat", "place", "cache")


class ReadLabels(RunStage):
    """Leaves of the rows their labels alone: texts or int64, or lists of these.

    Args:
        column: the labels.
        asker: who counts them, for messages.
    """

    thread_safe = True
    needs_columns = True

    column: str
    _: KW_ONLY
    asker: str

    @property
    def name(self) -> str:
        return str(vars(self).get("asker", "value_counts"))

    def __repr__(self) -> str:
        return f"{self.asker}({self.column!r})"

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self)
        need_columns(table.column_names, [self.column], self)
        labels = LabelColumn(table[self.column], self.column, self, block.ids)
        values = labels.values if labels.is_text else to_arrow(labels.values)
        if labels.lengths is not None:
            places = list_array(np.arange(len(values)), labels.lengths)
            values = type(places).from_arrays(places.offsets, values)
        return run.with_block(block.with_data(pa.table({self.column: values})))


def value_counts(pipeline: Pipeline, column: str, asker: str = "value_counts") -> dict[Label, int]:
    """Rows of each value of a column, the values in sorted order: integers, then texts."""
    found: Counter[Label] = Counter()
    for stages in _parts(pipeline._stages):
        found.update(_counted(_narrowed(stages, column), column, asker))
    order = sorted(found, key=lambda value: (isinstance(value, str), value))
    return {value: found[value] for value in order}


def class_counts(pipeline: Pipeline) -> list[int]:
    """Rows of each class that the last ``encode_labels`` of a pipeline makes; counted once for that stage
    above those below it."""
    stages = pipeline._stages
    place = next(
        (n for n, s in reversed([*enumerate(stages)]) if isinstance(s, EncodeLabels)), None
    )
    if place is None:
        raise ConfigError(
            "class_weights() weighs the classes that encode_labels() makes, and this pipeline has none: "
            "add .encode_labels(column, classes=...)"
        )
    stage: Any = stages[place]
    if stage.counts is not None:
        return list(stage.counts)
    below = stages[:place]
    kept = vars(stage).get("_counted")
    if kept is None or list(map(id, kept[0])) != list(map(id, below)):
        numbers = value_counts(Pipeline(stages[: place + 1]), stage.output_column, "class_weights")
        counts = [numbers.get(number, 0) for number in range(stage.num_classes)]
        vars(stage)["_counted"] = kept = (below, counts)
    return list(kept[1])


def class_weights(counts: Sequence[int]) -> torch.Tensor:
    """A weight for each class, float32 ``[C]``: n / (C * its rows), 0 for a class without a row."""
    rows = np.array(counts, dtype=np.float64)
    if not rows.all():
        lacking = np.flatnonzero(rows == 0).tolist()
        warn_once(
            f"class_weights(): {len(lacking):,} of {len(rows):,} classes have no row, and weigh 0: "
            f"{shown(lacking)}"
        )
    weights = np.divide(rows.sum(), len(rows) * rows, out=np.zeros(len(rows)), where=rows > 0)
    return torch.from_numpy(weights.astype(np.float32))


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


def _counted(stages: Sequence[Stage], column: str, asker: str) -> Counter[Label]:
    pipeline = Pipeline([*stages, ReadLabels(column, asker=asker)], (0, 1))
    chain = pipeline._session.plan.chain
    if chain.endless or chain.opener.read_once:
        why = "have no end" if chain.endless else "can be read only once"
        raise ConfigError(
            f"{asker}({column!r}) reads all rows before training, and those of {chain.stages[0]} "
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
                f"{asker}({column!r}): the column holds more than {MOST_VALUES:,} different values, which "
                "are no labels: name another one"
            )
    return found
