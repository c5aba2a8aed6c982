"""The rows of several pipelines as one source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainpipes.order import Layout
from trainpipes.runtime.mixing.mix_rules import MixRules
from trainpipes.runtime.mixing.mix_windows import MixWindows
from trainpipes.runtime.mixing.mixed_ids import MixedIds
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.pool import Pool
from trainpipes.runtime.source import Place, RowMixture, RowSource, RowStream

__all__ = ["Mixture"]


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

    def leads(self, plan: Plan, state: dict[str, Any]) -> bool:
        rules: MixRules = plan.stages[0].rules(self)
        ahead = state.get("ahead", [0] * len(rules.names))
        good = isinstance(ahead, list) and len(ahead) == len(rules.names)
        good = good and all(isinstance(a, int) for a in ahead)
        good = good and isinstance(state.get("tokens", 0), int) and state["window"] == 0
        cursors = state.get("sources", {})
        if not good or not isinstance(cursors, dict) or not cursors.keys() <= set(rules.names):
            return False
        return all(self._may_be(plan.mixed[n], c, state["epoch"]) for n, c in cursors.items())

    def _may_be(self, plan: Plan, cursor: Any, number: int) -> bool:
        below = cursor
        while isinstance(below, dict) and "below" in below:
            below = below["below"]
        if not isinstance(below, dict) or not isinstance(cursor.get("at"), int):
            return False
        if not all(
            isinstance(below.get(k), int) and below[k] >= 0 for k in ("epoch", "window", "row")
        ):
            return False
        first = plan.first_epoch(number)
        if not first <= below["epoch"] < plan.first_epoch(number + 1):
            return False
        if isinstance(plan.source, RowMixture):
            return plan.source.leads(plan, below)
        layout = plan.layout_of(below["epoch"])
        if not isinstance(layout, Layout):
            return True
        most = max(layout.num_windows(span) for span in range(layout.num_spans))
        return bool(below["window"] <= max(most, 1))
