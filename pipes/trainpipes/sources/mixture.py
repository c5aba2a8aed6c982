from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import IntArray
from trainpipes._internal.pool import Pool
from trainpipes.columns.arrays import python_to_arrow, to_arrow
from trainpipes.columns.block import SOURCE_BIT, Block
from trainpipes.columns.run import Run
from trainpipes.engine.planning.chain import RowMixture
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.reading.windows import MixedWindows, WindowedMixture
from trainpipes.engine.shards.lane import Lane
from trainpipes.engine.shards.shard_rows import RUN_ROWS, Shards, open_windows
from trainpipes.interfaces.read_columns import lengths_of, refused
from trainpipes.interfaces.source import RowStream
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import FinishingStage, PackingStage, RunStage
from trainpipes.sources.common_columns import columns_of, said, united
from trainpipes.sources.mix_runs import MixRuns

#: Bits of a row's number that tell its source.
TAG_BITS = 23
ROW_MASK = (1 << SOURCE_BIT) - 1

#: Names that lead to a source, from the outermost mix inwards.
Path = tuple[str, ...]

#: Where an epoch ends, for ``explain()``.
_ENDS = {
    "all_exhausted": "an epoch ends when each has been gone through",
    "first_exhausted": "an epoch ends with the first that has been gone through",
    "repeat": "without an end",
}


class Gives(Enum):
    """The kind of the rows that the sources of a mix give."""

    ROWS = "rows"
    BATCHES = "batches of rows"
    FINISHED = "finished batches"

    @property
    def unit(self) -> str:
        return "rows" if self is Gives.ROWS else "batches"


def rows_of(plan: Plan) -> int | None:
    """Rows or batches in an epoch; None where they are not counted."""
    return plan.counts.batches_in_epoch if plan.counts.known else None


class Mixture(WindowedMixture):
    """Rows of sources, mixed by steps of whole weights from ``starts`` on: rows or, by ``lengths``, tokens.
    The sources have numbers in the order of their names.
    """

    def __init__(self, mix: Any, plans: Mapping[str, Plan]) -> None:
        self.mix, self.plans = mix, plans
        self.names = tuple(sorted(plans))
        self.sizes = {name: rows_of(plan) for name, plan in plans.items()}
        steps: tuple[list[int], list[tuple[int, ...]]] = mix.steps(self.sizes)
        self.starts, self.steps = steps
        #: Whether shares are counted in tokens.
        self.by_tokens = mix.weight_by == "tokens"
        #: What they are counted in.
        self.unit: str = "tokens" if self.by_tokens else mix.gives.unit
        self.max_epochs: list[int | None] = [mix.limits[name] for name in self.names]
        streams = [plans[name].inputs.source for name in self.names]
        self.may_be_endless = [
            isinstance(stream, RowStream)
            and not isinstance(stream, RowMixture)
            and stream.length is None
            for stream in streams
        ]
        sources = {name: plan.inputs.source for name, plan in plans.items()}
        self.ids: MixedIds = MixedIds(
            {n: s.ids if isinstance(s, Mixture) else None for n, s in sources.items()}
        )

    def __reduce__(self) -> Any:
        return self.mix.opened, ({name: plan.inputs.source for name, plan in self.plans.items()},)

    def fingerprint(self) -> dict[str, Any]:
        data = {name: plan.inputs.source.fingerprint() for name, plan in self.plans.items()}
        return {"sources": data}

    def describe(self) -> list[tuple[str, str]]:
        rows, mix = self._epoch_rows(), self.mix
        lines = [("mix", f"{len(self.names)} sources by {mix.weight_by}; {_ENDS[mix.stop]}")]
        for name, plan in self.plans.items():
            i, size = self.names.index(name), self.sizes[name]
            shares = [step[i] / sum(step) for step in self.steps]
            text = f"{shares[0]:.1%}" + (f" to {shares[-1]:.1%}" if len(shares) > 1 else "")
            unit = mix.gives.unit
            text += f" with an unknown number of {unit}" if size is None else f", {size:,} {unit}"
            if rows is not None and size:
                times = min(rows * shares[0] / size, self.max_epochs[i] or math.inf)
                text += f", gone through {times:.2f} times in an epoch of the mix"
            lines.append((f"  {name}", text))
            lines += [(f"    {label}", line) for label, line in plan.inputs.source.describe()]
        return lines

    def _epoch_rows(self) -> float | None:
        """About how many rows an epoch has, where that is known."""
        first, counted = self.mix.stop == "first_exhausted", [self.sizes[n] for n in self.names]
        if self.mix.traits.endless or self.by_tokens or len(self.steps) > 1 or None in counted:
            return None
        total = sum(self.steps[0])
        parts = zip(counted, self.steps[0], self.max_epochs, strict=True)
        ends = [(n or 0) * total / w * (limit or 1 if first else 1) for n, w, limit in parts if w]
        return min(ends) if first else max(ends)

    def drawn_from(self, name: str, run: Run, above: Sequence[Stage]) -> tuple[Run, list[int]]:
        """A source's items with the mixture's numbers, and the tokens of each if these are counted: those
        that the stages ``above`` let through.
        """
        block, ids = run.block, partial(self.ids.of, name)
        tokens = np.zeros(len(block), np.int64)
        if self.by_tokens:
            tokens = self.tokens(block, above)
        if self.mix.gives is Gives.FINISHED:  # sources may have other columns: only tokens are left
            bounds = np.arange(len(block) + 1) if run.bounds is None else run.bounds
            items, block = run.unroll(), block.with_data(tokens.tolist())
            run = Run(block, run.cursors, bounds, items)
        block.ids = ids(block.ids)
        if block.made_of is not None:
            block.made_of = block.made_of._replace(ids=ids(block.made_of.ids))
        if not self.by_tokens:
            return run, []
        each = tokens if run.bounds is None else np.add.reduceat(tokens, run.bounds[:-1])
        return run, each.tolist()

    def tokens(self, block: Block, above: Sequence[Stage]) -> IntArray:
        """The units that each row of a source counts, int64 ``[rows]``."""
        column = self.mix.column
        lengths = np.maximum(1, lengths_of(block, column, self.mix))
        for stage in above:
            lengths = stage._kept_lengths(column, lengths)
            if isinstance(stage, PackingStage):  # later stages cut rows made of many
                break
        return lengths

    def with_names(self, run: Run, source: IntArray) -> Run:
        """The items of sources, with the sources' names if these are asked for."""
        if self.mix.output_column is None:
            return run
        if run.items is not None:
            names = [self.names[i] for i in source.tolist()]
            return run.with_items([*map(self._with_name, run.items, names)])
        if run.bounds is not None:
            source = np.repeat(source, np.diff(run.bounds))
        return run.with_block(self._named(run.block, source))

    def _with_name(self, batch: Any, name: str) -> Any:
        column = self.mix.output_column
        if isinstance(batch, Mapping) and column not in batch:
            return {**batch, column: name}
        keys = isinstance(batch, Mapping)
        got = f"one with the keys {list(batch)}" if keys else type(batch).__name__
        raise refused(
            self.mix,
            f": output_column={column!r} needs batches that are dicts without it, got {got}",
        )

    def _named(self, block: Block, source: IntArray) -> Block:
        column, data = self.mix.output_column, cast(Any, block.data)
        table = isinstance(data, pa.Table)
        if not table and not (isinstance(data, list) and all(isinstance(r, Mapping) for r in data)):
            raise refused(
                self.mix,
                f": output_column={column!r} needs rows with columns, got {said(columns_of(data))}; make "
                "dicts with map() in the sources",
            )
        if column in data.column_names if table else any(column in row for row in data):
            raise refused(
                self.mix,
                f": the rows have a column {column!r} already; give output_column another name",
            )
        if table:
            added = python_to_arrow(self.names, pa.string()).take(to_arrow(source))
            return block.with_data(data.append_column(column, added))
        rows = zip(data, source.tolist(), strict=True)
        return block.with_data([{**row, column: self.names[i]} for row, i in rows])

    def windows(self, plan: Plan, pool: Pool | None, pass_number: int) -> MixWindows:
        return MixWindows(plan, self, pool, pass_number)

    def naming(self, name: str) -> RunStage:
        return _Named(self, name)

    def united(self, schemas: Mapping[str, pa.Schema], caller: str) -> pa.Schema:
        fields = united(schemas, caller, caller, "values")
        return pa.schema([(field.name, field.type) for field in fields])

    def where(self, row: int) -> tuple[Path, int]:
        ((path, _, (row_below,)),) = self.ids.split(np.array([row], dtype=np.int64))
        return path, int(row_below)


class _Named(RunStage, holds_data=True):
    mixture: Any
    source: str

    def process(self, run: Run) -> Run:
        mixture, ids = self.mixture, self.mixture.ids
        number = np.full(len(run), mixture.names.index(self.source), dtype=np.int64)
        run = mixture.with_names(run.with_block(run.block.of_epoch(run.block.epoch)), number)
        run.block.ids = ids.of(self.source, run.block.ids)
        return run

    def telling(self, runs: Iterator[Run]) -> Iterator[Run]:
        """The runs that it gets, of which errors name rows by the mix's numbers."""
        try:
            yield from runs
        except Exception as error:
            self.mixture.ids.tell(self.source, error)
            raise


class MixWindows(MixedWindows):
    def __init__(self, plan: Plan, mixture: Mixture, pool: Pool | None, pass_number: int) -> None:
        self.plan, self.mixture, self._pool = plan, mixture, pool
        self._epoch = plan.chain.first_epoch(pass_number)
        #: Whole weights in place of the mixture's steps, for each of the plan's new weights.
        self.new_weights: list[tuple[int, ...]] = [
            mixture.mix.reweighed(new.weights).steps(mixture.sizes)[1][0]
            for new in plan.new_weights
        ]
        self.shards_of: dict[str, Shards] = {}
        above = plan.chain.after + plan.inputs.above
        #: Of each source the stages that rows have yet to go through.
        self.above = {
            name: [s for s in part.chain.after if isinstance(s, FinishingStage)] + [*above]
            for name, part in plan.mixed.items()
        }

    def _open(self, shards: int) -> None:
        mixture, plans = self.mixture, self.plan.mixed
        if not self.shards_of:
            steps = [*mixture.steps, *self.new_weights]
            totals = [sum(step) for step in steps]
            for name, *weights in zip(mixture.names, *steps, strict=True):
                part = plans[name].worked_by(self.plan.workers)
                windows = open_windows(part, self._pool, self._epoch)
                share = max(w / total for w, total in zip(weights, totals, strict=True))
                sharing = max(1, round(shards / max(2 * share, 0.01)))
                # Runs are as long as the share asks for: others wait for the last row of each.
                most = max(16, math.ceil(2 * share * RUN_ROWS))
                self.shards_of[name] = Shards(part, windows, sharing, most)

    def expect(self, shard: int, state: dict[str, Any], shards: int) -> None:
        self._open(shards)
        for name, source_shards in self.shards_of.items():
            cursor = state.get("sources", {}).get(name)
            if not (cursor or {}).get("gone"):
                Lane(source_shards, shard, state["epoch"], cursor)  # asks for the rows it needs

    def open(
        self,
        shard: int,
        state: dict[str, Any],
        rows: tuple[int, int],
        shards: int,
        first: int,
        weights: int | None,
    ) -> MixRuns:
        self._open(shards)
        most = max(8, self.plan.chain.batch_size) if _calls_rows(self.plan) else rows[0]
        of_each = max(plan.chain.batch_size for plan in self.plan.mixed.values())
        rows = min(rows[0], max(1, most // of_each)), min(rows[1], max(1, most // of_each))
        new = None if weights is None else self.new_weights[weights]
        return MixRuns(self, shard, state, rows, first, new)

    def close(self) -> None:
        for source_shards in self.shards_of.values():
            source_shards.windows.close()

    def let_go(self) -> None:
        for source_shards in list(self.shards_of.values()):
            source_shards.windows.let_go()


def _calls_rows(mix: Plan) -> bool:
    return any(
        stage.traits.per_row for plan in mix.mixed.values() for stage in plan.chain.steps
    ) or any(map(_calls_rows, mix.mixed.values()))


class MixedIds:
    """Numbers of a mix's rows: source and row.

    >>> ids = MixedIds({"code": None, "web": None})
    >>> ids.of("web", np.array([7])).tolist()
    [4104363656790147079]
    >>> [(path, rows.tolist()) for path, _, rows in ids.split(np.array([4104363656790147079]))]
    [(('web',), [7])]
    """

    def __init__(self, below: Mapping[str, MixedIds | None]) -> None:
        self._below = below
        self._paths: dict[int, Path] = {}  # by the upper bits of a number
        inner = {name: [()] if ids is None else ids._paths.values() for name, ids in below.items()}
        for path in sorted((name, *path) for name, paths in inner.items() for path in paths):
            digest = hashlib.sha256(json.dumps(path).encode()).digest()
            tag = int.from_bytes(digest[:8], "big") % (1 << TAG_BITS)
            while tag in self._paths:
                tag = (tag + 1) % (1 << TAG_BITS)
            self._paths[tag] = path
        self._tags = {path: tag for tag, path in self._paths.items()}

    def of(self, name: str, rows: IntArray) -> IntArray:
        """The numbers of a source's rows."""
        below = self._below[name]
        if below is None:
            return rows | (self._tags[name,] << SOURCE_BIT)
        tagged = np.empty_like(rows)
        for path, places, ids_below in below.split(rows):
            tagged[places] = ids_below | (self._tags[name, *path] << SOURCE_BIT)
        return tagged

    def tell(self, name: str, error: Exception) -> None:
        """Make an error about a row of a source one about that row of the mix."""
        stage, row = getattr(error, "_trainpipes", (None, None))
        if row is not None:
            number = self.of(name, np.array([row], dtype=np.int64))
            error._trainpipes = stage, int(number[0])  # type: ignore[attr-defined]

    def split(self, rows: IntArray) -> Iterator[tuple[Path, IntArray, IntArray]]:
        """The path of each source, the places of its rows, and their numbers in it."""
        tags = rows >> SOURCE_BIT
        for tag in np.unique(tags).tolist():
            places = np.flatnonzero(tags == tag)
            yield self._paths[tag], places, rows[places] & ROW_MASK
