"""How often each label comes in the data: one pass over one column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from trainpipes._internal.messages import need_columns
from trainpipes._internal.progress import Progress
from trainpipes.columns.run import Run
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.look.lengths import Numbered, walk
from trainpipes.pipeline import Pipeline
from trainpipes.sources.mixed.mix import Mix
from trainpipes.stages.batch import Batch
from trainpipes.stages.columns import Rename, Select, row_table
from trainpipes.stages.labels import EncodeLabels, Label, LabelColumn

#: Rows that are counted at a time.
ROWS = 65_536
#: More different values than these are no labels, and would fill the memory.
MOST_VALUES = 1 << 22
#: Stages that say in which order rows come, how often and where: none of it changes the counts.
ORDERING = ("shuffle", "shard", "repeat", "place", "cache")


class CountLabels(RunStage):
    """Counts labels, texts or int64, of the rows that pass."""

    needs_columns = True

    column: str
    found: Counter[Label]

    def __repr__(self) -> str:
        return f"stats(labels={self.column!r})"

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self)
        need_columns(table.column_names, [self.column], self)
        labels = LabelColumn(table[self.column], self.column, self, block.ids)
        for one in labels.values.value_counts().to_pylist():
            self.found[one["values"]] += one["counts"]
        if len(self.found) > MOST_VALUES:
            raise ConfigError(
                f"stats(labels) must be a column of labels, got {self.column!r} with more than "
                f"{MOST_VALUES:,} different values; name another one"
            )
        return run


def label_counts(pipeline: Pipeline, column: str) -> dict[Label, int]:
    """Rows of each label of a column, in sorted order; of encoded ones, of each class."""
    stages = list(takewhile(lambda s: s.role not in ("batch", "pack", "finish"), pipeline._stages))
    found: Counter[Label] = Counter()
    for place in reversed(range(len(stages))):
        stage: Any = stages[place]
        if isinstance(stage, EncodeLabels) and stage.output_column == column:
            if stage.counts is not None:
                return dict(enumerate(stage.counts))
            found.update(dict.fromkeys(range(stage.num_classes), 0))
            del stages[place + 1 :]
            break
        if not stage.keeps_rows or stage.calls_function or column in getattr(stage, "names", ()):
            break  # it may change the labels, or leave rows out
    for part in _parts(stages):
        found.update(_counted(_needed(part, column), column))
    return {value: found[value] for value in sorted(found, key=lambda v: (isinstance(v, str), v))}


def _parts(stages: Sequence[Stage]) -> list[Sequence[Stage]]:
    """The chains whose rows are mixed, each with the stages above the mix."""
    first, *above = stages
    if not isinstance(first, Mix):
        return [stages]
    mixed = first.sources.values()
    return [part for one in mixed for part in _parts([*one._stages, *above])]


def _needed(stages: Sequence[Stage], column: str) -> list[Stage]:
    left = [stage for stage in stages if stage.role not in ORDERING]
    above: list[Stage] = []
    while True:
        stage: Any = left.pop()
        if isinstance(stage, Rename) and column in stage.names.values():
            old = next(name for name, new in stage.names.items() if new == column)
            above.insert(0, Rename({old: column}))
            column = old
        elif isinstance(stage, EncodeLabels) and column == stage.output_column:
            above.insert(0, stage)
            column = stage.column
        elif not (isinstance(stage, Select) and column in stage.columns):
            break
    if stage.role == "reader" and column in (stage.options.get("columns", ()) or [column]):
        stage = stage.replaced(columns=[column])
    return [*left, stage, *above]


def _counted(stages: Sequence[Stage], column: str) -> Counter[Label]:
    found: Counter[Label] = Counter()
    plan = Plan.of([*stages, CountLabels(column, found), Batch(ROWS), Numbered()], quiet=True)
    chain = plan.chain
    if chain.endless or chain.opener.read_once:
        why = "have no end" if chain.endless else "can be read only once"
        raise ConfigError(
            f"stats(labels) must be a column of rows that can all be read before training, got {column!r} of "
            f"{chain.stages[0]}, whose rows {why}; count the labels of its source"
        )
    with Progress(f"counting {column!r}", plan.inputs.epoch_rows, "rows") as progress:
        for ids, _ in walk(plan):
            progress.advance(len(ids))
    return found
