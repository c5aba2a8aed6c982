"""The windows of all sources of a mix, side by side."""

from __future__ import annotations

import math
import threading
from typing import Any

from trainpipes.runtime.mixing.mix_columns import Columns
from trainpipes.runtime.mixing.mix_feed import MixFeed
from trainpipes.runtime.mixing.mix_rules import MixRules
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.pool import Pool
from trainpipes.runtime.shards.chains import RUN_ROWS, Chains
from trainpipes.runtime.shards.making import Maker

__all__ = ["MixWindows"]


class MixWindows:
    """The windows of all sources of a mix, for the shards of one process.

    Args:
        plan: of the mix.
        mixture: its rows.
        pool: reads ahead.
        number: of the pass.
    """

    def __init__(self, plan: Plan, mixture: Any, pool: Pool | None, number: int) -> None:
        self.plan = plan
        mix: Any = plan.stages[0]
        self.rules: MixRules = mix.rules(mixture)
        self.ids = mixture.ids
        plans = plan.mixed
        epoch = plan.first_epoch(number)
        self._windows = [plans[name].windows(pool, epoch) for name in self.rules.names]
        self._plans = [plans[name] for name in self.rules.names]
        self._chains: list[Chains] | None = None
        self.columns = Columns(self.rules.asker)
        self._lock = threading.Lock()

    def chains(self, shards: int) -> list[Chains]:
        """Chains of all sources, with runs as long as their shares ask for."""
        with self._lock:
            if self._chains is None:
                total = sum(self.rules.steps[0])
                most = [max(column) / total for column in zip(*self.rules.steps, strict=True)]
                self._chains = []
                for plan, windows, share in zip(self._plans, self._windows, most, strict=True):
                    chains = Chains(plan, windows, max(1, round(shards / max(2 * share, 0.01))))
                    chains.run_rows = min(chains.run_rows, max(16, math.ceil(2 * share * RUN_ROWS)))
                    self._chains.append(chains)
            return self._chains

    @property
    def calls_rows(self) -> bool:
        """Whether Python is called for each row of a source, so that few are made at a time."""
        return any(_calls_rows(plan) for plan in self._plans)

    def expect_parts(self, shard: int, state: dict[str, Any], shards: int) -> None:
        """Keep what a shard will need of each source, from ``state`` on."""
        for name, chains in zip(self.rules.names, self.chains(shards), strict=True):
            cursor = state.get("sources", {}).get(name)
            if cursor is None or not cursor.get("gone"):
                Maker(chains, shard, state["epoch"], cursor)

    def feed(
        self,
        shard: int,
        state: dict[str, Any],
        rows: tuple[int, int],
        shards: int,
        last_epoch: int | None,
        rolling: bool,
    ) -> MixFeed:
        """The rows of one shard from ``state`` on.

        Args:
            shard: which shard.
            state: as a run gave it, or of an epoch's start.
            rows: most rows in a run, and in the first one.
            shards: how many there are in this process.
            last_epoch: as ``Feed`` takes it.
            rolling: as ``Feed`` takes it.
        """
        return MixFeed(self, self.chains(shards), shard, state, rows, last_epoch, rolling)

    # What other windows have, and a mix has no use for

    def expect(self, user: int, epoch: int, span: int, window: int) -> None:
        """Nothing: see ``expect_parts``."""

    def start(self, epoch: int) -> dict[str, Any]:
        return {}

    def planned(self, epoch: int, span: int, window: int) -> int | None:
        return None

    def get(self, user: int, epoch: int, span: int, window: int, state: dict[str, Any]) -> None:
        raise TypeError("a mix is read by feed()")

    def close(self) -> None:
        for windows in self._windows:
            windows.close()


def _calls_rows(plan: Plan) -> bool:
    own = [*plan.before, *plan.after]
    return any(s.per_row for s in own) or any(map(_calls_rows, plan.mixed.values()))
