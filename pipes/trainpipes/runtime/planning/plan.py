"""From a record of stages to what will happen: which stage stands where, how the epoch is cut, and what reads
its windows. Reads nothing but the source's listing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np

from trainpipes.checksum import checksum, unsealed
from trainpipes.order import Layout, StreamLayout
from trainpipes.runtime.caching.cached import CachedBlocks
from trainpipes.runtime.planning.counted import Counted
from trainpipes.runtime.planning.first_rows import MOST_ROWS
from trainpipes.runtime.pool import Pool
from trainpipes.runtime.reading.numbered import NumberedWindows, buffered_numbers, drawn_numbers
from trainpipes.runtime.reading.random_access import RandomAccessSource
from trainpipes.runtime.reading.stream_windows import StreamWindows
from trainpipes.runtime.reading.windows import ListedWindows, Windows, chain_before
from trainpipes.runtime.source import Place, RowMixture, RowSource, RowStream
from trainpipes.state import BatchSizes

__all__ = ["Plan"]

#: The part of windows and those read ahead together, and that of what is not shuffled, in bytes.
AHEAD_SHARE = 5 / 6
AHEAD_BYTES = 256 << 20


class Plan(Counted):
    """What a chain of stages amounts to.

    Args:
        stages: the chain, first one first; the instances belong to the plan.
        source: rows already listed, if another plan of the same chain has; listed anew otherwise.
        schemas: of such a plan; its own otherwise.
    """

    #: Whether it is made to look at rows, not to be trained on.
    quiet = False

    def resized(self, sizes: BatchSizes | None) -> Plan:
        """This plan for a pass in which the size of micro-batches was changed."""
        if sizes == self.sizes:
            return self
        plan = Plan(self.stages, self.source, self.schemas)
        plan.sizes = sizes
        return plan

    @cached_property
    def mixed(self) -> dict[str, Plan]:
        """The plans of the pipelines whose rows are mixed; none where rows are of one source."""
        if not isinstance(self.source, RowMixture):
            return {}
        mix: Any = self.stages[0]
        plans: dict[str, Plan] = mix.plans(self)
        for name, plan in plans.items():
            self.schemas.join(name, plan.schemas)
        return plans

    def windows(self, pool: Pool | None = None, number: int = 0) -> Windows:
        """The windows of this plan, for the shards of one process.

        Args:
            pool: reads ahead.
            number: of the pass.
        """
        if isinstance(self.source, RowMixture):
            windows: Windows = self.source.windows(self, pool, number)
            return windows
        before = chain_before(self.before[self.cached or 0 :])
        if isinstance(self.source, RowStream):
            assert isinstance(self.layout, StreamLayout)
            cut = (self.skip_rows, self.stop_rows)
            return StreamWindows(self.source, self.layout.window_rows, cut, self.seed, before)
        assert isinstance(self.layout, Layout)
        cached = self.cached_blocks
        source = self.source
        if isinstance(source, RandomAccessSource) and self.drawn is not None:
            numbers = drawn_numbers(self.drawn, self.skip_rows, self.blocks.rows)
            repeats = self.shuffle is not None and self.shuffle.name != "shuffle"
            return NumberedWindows(source, self.layout_of, numbers, repeats)
        if isinstance(source, RandomAccessSource) and source.by_number and not self.before:
            numbers = buffered_numbers(source, self.blocks, self.block_order, self.seed)
            return NumberedWindows(source, self.layout_of, numbers)
        keeps = all(s.keeps_rows for s in self.before) or (cached is not None and cached.holes)
        return ListedWindows(
            self.source, self.blocks, self.layout_of, self.block_order, self.seed, before, keeps,
            None if self.reads_user_code else pool, self._ahead_bytes(), cached,
            partial(self._following, self.first_epoch(number)),
        )  # fmt: skip

    def _following(self, first_epoch: int, shard: int, epoch: int) -> int | None:
        """The span that a shard comes to after an epoch; None where the pass ends with it."""
        last = self.times is not None and epoch + 1 >= first_epoch + self.times
        if last or self.repeat is None:
            return None
        return self.slot(shard, epoch + 1, first_epoch) % self.layout_of(epoch + 1).num_spans

    @cached_property
    def cached_blocks(self) -> CachedBlocks | None:
        """What a cache() keeps; None where nothing is kept."""
        if self.cache is None or self.cached is None:
            return None
        assert isinstance(self.source, RowSource)
        below = self.before[: self.cached]
        reader = len(self.file_stages) if self.stages[0].role == "files" else 0
        return CachedBlocks(
            self.source, self.blocks.firsts, [self.stages[reader], *below], self.cache,
            chain_before(below), holes=self.shuffle is None and not all(s.keeps_rows for s in below),
            listed=getattr(self.stages[0], "urls", None), first=self.first_keys,
        )  # fmt: skip

    def first_keys(self) -> list[Any]:
        """What tells the rows that types of columns are found from."""
        assert isinstance(self.source, RowSource)
        firsts, found = self.blocks.firsts, []
        for block in np.flatnonzero(self.blocks.lengths).tolist():
            if firsts[block] - firsts[0] >= MOST_ROWS:
                break
            found.append([int(self.blocks.begins[block]), self.source.block_key(block)])
        return found

    def _ahead_bytes(self) -> int:
        """What windows may take in memory, with those that are read ahead."""
        if self.shuffle is None:
            return AHEAD_BYTES
        return int(self.shuffle.max_bytes * AHEAD_SHARE)

    # Who may call what

    @cached_property
    def reads_user_code(self) -> bool:
        """Whether to read a window calls functions that are not ours."""
        return any(stage.runs_user_code for stage in [self.stages[0], *self.before])

    @cached_property
    def runs_user_code(self) -> bool:
        """Whether a function that is not ours is called for rows or batches."""
        return self.reads_user_code or any(stage.runs_user_code for stage in self.after)

    def place_of(self, row: int) -> Place:
        """Where a row, numbered in file order, stands."""
        if isinstance(self.source, RowSource):
            return self.blocks.locate(self.source, row)
        if isinstance(self.source, RowMixture):
            return self.source.place_of(self, row)
        return Place(row=row)

    # Schemas of rows that are Python objects

    @property
    def notes(self) -> dict[str, Any]:
        """What a state keeps beside the identity, and goes on with."""
        schemas = self.schemas.notes()
        return {"schemas": schemas} if schemas else {}

    def adopt(self, notes: Mapping[str, Any]) -> None:
        """Go on with what a state kept.

        Raises:
            StateError: it is damaged, or does not go with the pipeline.
        """
        if "schemas" in notes:
            self.schemas.load(notes["schemas"])

    # Identity

    @cached_property
    def identity(self) -> str:
        """What a state must agree on with the pipeline that loads it, as JSON. Stages that may stand
        before or after the shuffle are named after it, wherever they are written."""
        return self._identity(moved=True)

    @cached_property
    def tag(self) -> str:
        """A checksum of it, which tells cursors from those of another pipeline."""
        return checksum(self.identity)

    def identity_for(self, state: Any) -> str:
        """The identity for a state to be compared with: older ones have stages as they were written."""
        written = self._identity(moved=False)
        saved = state.get("pipeline") if isinstance(state, Mapping) else None
        as_written = isinstance(saved, str) and unsealed(saved)[0] == written
        return written if as_written else self.identity

    def _identity(self, moved: bool) -> str:
        shaping = [s for s in self.stages if s.role not in ("place", "files", "cache")]
        places = {
            "reader": 0,
            "source": 0,
            "shard": 1,
        }  # where it stands in a chain changes nothing
        shaping.sort(key=lambda s: places.get(s.role, 2))
        if moved and self.shuffle in shaping:
            before = shaping[: shaping.index(self.shuffle)]
            last = max((n for n, s in enumerate(before) if not s.keeps_rows), default=-1)
            later = [s for s in before[last + 1 :] if s.role == "rows"]
            shaping = [s for s in shaping if s not in later]
            after = shaping.index(self.shuffle) + 1
            shaping[after:after] = later
        stages = [stage.identity() for stage in shaping]
        return json.dumps(
            {"data": self.source.fingerprint(), "stages": stages}, separators=(",", ":")
        )
