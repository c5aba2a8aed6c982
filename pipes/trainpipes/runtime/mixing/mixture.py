"""The rows of several pipelines as one source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainpipes.cursor import is_count
from trainpipes.runtime.mixing.mix_rules import MixRules
from trainpipes.runtime.mixing.mix_windows import MixWindows
from trainpipes.runtime.mixing.mixed_ids import MixedIds
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.pool import Pool
from trainpipes.runtime.shards.places import leads
from trainpipes.runtime.source import Place, RowMixture, RowSource, RowStream

__all__ = ["Mixture"]

#: Rows or tokens by which a source may be ahead, at most; it is a row's length, about.
MOST_AHEAD = 1 << 40


class Mixture(RowMixture):
    """The rows of several pipelines.

    Args:
        sources: where the rows of each pipeline are from, by name.
        sizes: rows of an epoch of each, None where they are not counted.
        data: what identifies the data of each, of plain JSON types.
        lines: for ``explain()``.
    """

    def __init__(
        self,
        sources: Mapping[str, RowSource | RowStream],
        sizes: Mapping[str, int | None],
        data: Mapping[str, Any],
        lines: list[tuple[str, str]],
    ) -> None:
        self.sources = dict(sources)
        self.sizes = dict(sizes)
        self.ids: MixedIds = MixedIds(
            {n: s.ids if isinstance(s, Mixture) else None for n, s in sources.items()}
        )
        self._data = dict(data)
        self._lines = lines

    def fingerprint(self) -> dict[str, Any]:
        return {"sources": self._data}

    def describe(self) -> list[tuple[str, str]]:
        return self._lines

    def windows(self, plan: Plan, pool: Pool | None, number: int) -> MixWindows:
        return MixWindows(plan, self, pool, number)

    def place_of(self, plan: Plan, row: int) -> Place:
        path, row = self.ids.find(row)
        for name in path:
            plan = plan.mixed[name]
        place = plan.place_of(row)
        return Place(place.path, place.row_group, place.row, "/".join(path))

    def leads(self, plan: Plan, shard: int, place: dict[str, Any]) -> bool:
        mix: Any = plan.stages[0]
        rules: MixRules = mix.rules(self)
        found = dict(place)
        epoch, window, row = (found.pop(key) for key in ("epoch", "window", "row"))
        if window != 0:
            return False
        if not found:
            return bool(row == 0)
        cursors = found.pop("sources", None)
        # Shares are counted anew where the mix was changed.
        good = _are_even(found.pop("ahead", [0] * len(rules.names)), rules)
        if rules.lengths is not None:
            good = good and is_count(found.pop("tokens", None))
        if not good or found or not isinstance(cursors, dict):
            return False
        return cursors.keys() <= set(rules.names) and all(
            _may_be(plan.mixed[name], shard, epoch, cursor) for name, cursor in cursors.items()
        )


def _are_even(ahead: Any, rules: MixRules) -> bool:
    """Whether sources may be as far ahead as this: in sum they never are."""
    if not isinstance(ahead, list) or len(ahead) != len(rules.names):
        return False
    most = sum(rules.steps[0]) * MOST_AHEAD
    return all(type(a) is int and -most <= a <= most for a in ahead) and sum(ahead) == 0


def _may_be(plan: Plan, shard: int, number: int, cursor: Any) -> bool:
    if not isinstance(cursor, dict) or cursor.get("gone", True) is not True:
        return False
    return leads(plan, shard, number, {k: v for k, v in cursor.items() if k != "gone"})
