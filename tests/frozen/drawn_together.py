"""Sources of several sources, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frozen.drawing import Stage
from frozen.drawn_rows import OrderOfRows

__all__ = ["Together"]


class Together(OrderOfRows):
    """Starts a chain with concat, zip or mix."""

    def _part(self, kinds: Sequence[tuple[int, str]], most: int = 0) -> Together:
        """A source of several, with a few stages of its own."""
        part = Together(self.d)
        part.start(self.d.weighted(kinds))
        if most:
            part.add("take", by_place=[most])
        return part

    def _together(self, parts: list[Together], columns: dict[str, str]) -> list[Any]:
        """The parts as data, each with the same columns."""
        found = []
        for part in parts:
            if list(part.columns or {}) != list(columns):
                part.add("select", by_place=list(columns))
            found.append({"source": part.source, "stages": part.stages})
        return found

    PARTS = ((4, "table"), (3, "parquet_all"), (2, "json_all"), (1, "rows_all"))

    def _parquet_all(self) -> None:
        self.source, self.columns = ["parquet", {"": ["$data.path('parquet')"]}], dict(self.FULL)

    def _json_all(self) -> None:
        self.source = ["json", {"": ["$data.path('json')"], "block_rows": 9}]
        self.columns = dict(self.FULL)

    def _rows_all(self) -> None:
        self.source, self.columns = ["dataset", {"": ["$data.rows(31, 100)"]}], dict(self.FULL)

    def _stream_all(self) -> None:
        self.source, self.columns = ["iterable", {"": ["$data.Generated(33)"]}], dict(self.FULL)

    def _concat(self) -> None:
        self.columns = {c: self.FULL[c] for c in ["x", *self.d.some(list(self.FULL)[1:], 2)]}
        if self.d.chance(20):
            self.columns = {"x": "number", "answer": "text"}
        parts = [self._part(self.PARTS) for _ in range(self.d.between(2, 3))]
        for part in parts:
            if self.d.chance(25):
                part.add(self.d.pick(["take", "skip"]), by_place=[self.d.between(3, 12)])
        found = self._together(parts, self.columns)
        if list(self.columns) == ["x", "answer"]:
            stages: list[Stage] = [["select", {"": ["x", "answer"]}]]
            found.append({"source": ["table", {"": ["$data.narrow()"]}], "stages": stages})
        self.python = all(part.source[0] == "dataset" for part in parts)
        self.source = [self.d.weighted([(3, "concat"), (1, "plus")]), {"parts": found}]

    def _zip(self) -> None:
        first = self._part([(4, "table"), (4, "parquet_all"), (2, "json_all")], most=17)
        first.stages.clear()
        count = 97
        if first.source[0] == "table":
            first.source = ["table", {"": ["$data.table(97)"]}]
        names = self.d.some(["x", "text", "tokens", "label"], 2)
        first.add("select", by_place=names)
        if self.d.chance(30):
            first.add("take", by_place=[61])
            count = 61
        second = {"source": ["tensors", {"": [f"$**data.vectors({count})"]}], "stages": []}
        second["stages"] = [["rename", {"": [{"x": "z", "y": "v"}]}]]
        parts = [{"source": first.source, "stages": first.stages}, second]
        if self.d.chance(30):
            third = [["select", {"": ["answer"]}]]
            parts.append({"source": ["table", {"": [f"$data.table({count})"]}], "stages": third})
        self.columns = {c: self.FULL[c] for c in names} | {"z": "number", "v": "vector"}
        if len(parts) == 3:
            self.columns["answer"] = "text"
        self.source = [self.d.weighted([(3, "zip"), (1, "beside")]), {"parts": parts}]

    def _mix(self) -> None:
        self.finite_uncounted = True
        self.columns = {c: self.FULL[c] for c in ["x", "text", "tokens"]}
        streams = False
        names = "abc"[: self.d.between(2, 3)]
        drawn = []
        for number in range(len(names)):
            part = self._part([*self.PARTS, (1, "stream_all")])
            if self.d.chance(40):
                part.add("take", by_place=[self.d.between(5, 40)])
            if self.d.chance(60):
                part.add("shuffle", buffer=self.d.pick([5, 20]), seed=number)
            if self.d.chance(25):
                part.add("keep", by_place=["$pc.field('x') > 7"])
            drawn.append(part)
            streams = streams or len(part.stages) > 0 or part.source[0] == "iterable"
        found = self._together(drawn, self.columns)
        options: dict[str, Any] = {"parts": dict(zip(names, found, strict=True))}
        how = self.d.weighted([(5, "weights"), (2, "schedule"), (1, "temperature"), (2, "plain")])
        if streams and self.d.chance(90):
            how = self.d.pick(["weights", "weights", "schedule"])
        stop = self.d.weighted([(5, None), (2, "first_exhausted"), (3, "repeat")])
        if stop is not None:
            options["stop"] = stop
        if how == "weights":
            options["weights"] = {name: self.d.between(1, 5) for name in names}
        if how == "temperature":
            options["temperature"] = 2.0
        if how == "schedule":
            options["schedule"] = [
                [0, {name: self.d.between(1, 4) for name in names}],
                [self.d.between(10, 40), {name: self.d.between(1, 4) for name in names}],
            ]
            if self.d.chance(50):
                options["interpolation"] = "linear"
        if how in ("weights", "schedule") and self.d.chance(25):
            options["by"], options["tokens"] = "tokens", "tokens"
        if self.d.chance(20) and stop != "repeat":
            options["repetitions"] = {"a": 2}
        if self.d.chance(30):
            options["column"] = "from"
            self.columns["from"] = "text"
        self.endless = stop == "repeat"
        self.source = ["mix", options]
