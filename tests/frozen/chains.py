"""The chains: drawn from their numbers, the same on every machine and with every version of Python.

A chain is plain data in words of its own, which ``adapter.py`` puts into the library's:

    {"source": [name, options], "stages": [[name, options], ...], "run": {...}}

Texts that begin with "$" are code. Options of "" are given by place. ``run`` says how it is read: by the
pipeline or a ``Loader``, how many epochs, and the legs: [ranks, workers, until], where ``until`` is a number
of items of each rank, "last" (the last item has come) or "end" (the epoch has ended).
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from frozen.drawn_batches import Batches
from frozen.drawn_together import Together
from frozen.draws import Draws

__all__ = ["CHAINS", "LEAVING", "Chain", "WholeChain", "draw", "fingerprint", "short"]

Chain = dict[str, Any]

#: How many there are.
CHAINS = 2000
#: From this number on they are of what the library is going to leave out.
LEAVING = 1920


class WholeChain(Together, Batches):
    """A chain from its source to how it is read."""

    def body(self) -> None:
        """All stages after the source."""
        pictures = self.of("picture")
        alone = self.scalar == "batches"
        if not alone:
            self._before(pictures)
        self._deal_and_shuffle()
        if alone:
            self._after_batch()
            return
        self._between(pictures)
        self._batching()

    def _before(self, pictures: list[str]) -> None:
        d = self.d
        mixed = self.source[0] == "mix"
        if not mixed and d.chance(12):
            self.add(d.pick(["take", "skip"]), by_place=[d.pick([5, 11, 30])])
        if (
            not mixed
            and not self.stream
            and d.chance(1 if self.shuffled or self.finite_uncounted else 11)
        ):
            options: dict[str, Any] = {"output": "place"} if d.chance(50) else {}
            self.add("number", **options)
            if self.columns is not None:
                self.columns[options.get("output", "index")] = "number"
            else:
                self.scalar = "other"
        for _ in range(d.weighted([(6, 0), (3, 1), (1, 2)])):
            if not pictures:
                self._row_stage()
        drawn = any(s[1].get("rng") or s[0] in ("mask", "transform") for s in self.stages)
        if not self.stream and not mixed:
            if d.chance(10):
                self._keep()
            if d.chance(12):
                self._choose()
            early = self.of("text") and d.chance(15) and not pictures
            if early:
                self._tokenize()
            blocks = self.source[0] in (
                "parquet",
                "arrow",
                "json",
                "csv",
                "text",
                "tar",
                "table",
                "paths",
            )
            blocks = blocks and not self.sampled
            if blocks and d.chance(22 if not early else 70) and not drawn:
                self.numbered = False
                options = {"by_place": ["$data.own('cache')"]} if d.chance(70) else {}
                self.add("cache", **options)
                if self.d.chance(15):
                    self._keep()

    def _between(self, pictures: list[str]) -> None:
        d = self.d
        if pictures:
            name = pictures[0]
            options: dict[str, Any] = {}
            if d.chance(30):
                options["output"] = "image"
            if name != "bytes":
                options["column"] = name
            self.add("decode", **options)
            assert self.columns is not None
            del self.columns[name]
            self.columns["image"] = "image"
        for name in self.of("image"):
            self._picture_stages(name)
        if (
            self.columns is not None
            and {"text", "answer", "x"} <= set(self.columns)
            and d.chance(8)
        ):
            self._chat()
        texts = self.of("text") and not self.of("image")
        if texts and "input_ids" not in (self.columns or {}) and d.chance(38):
            self._tokenize()
        for _ in range(d.weighted([(5, 0), (4, 1), (2, 2)])):
            self._row_stage()
        if d.chance(18):
            self._keep()
        if d.chance(8):
            if (
                self.columns is not None
                and self.columns.get("text") == "text"
                and "x" in self.columns
            ):
                self.add("expand", by_place=["$functions.words"])
                self.columns = {"x": "number", "word": "text"}
                self.finite_uncounted = True
                self.told = False
                if d.chance(30):
                    self.add("tokenize", by_place=["bytes", "word"])
                    self.columns = {"x": "number", "input_ids": "ids"}
            elif self.scalar == "int" and self.columns is None:
                self.add("expand", by_place=["$functions.twice"])
                self.finite_uncounted = True
        if self.shards == 1 and d.chance(6):
            self.add(d.pick(["take", "skip"]), by_place=[d.pick([5, 11, 30])])
            self.finite_uncounted = True
        ids = self.of("ids")
        if "labels" in ids:
            ids.remove("labels")
        if len(ids) == 1 and d.chance(28):
            self._pack(ids[0])


SOURCES: list[tuple[int, str]] = [
    (16, "parquet"), (8, "arrow"), (8, "json"), (7, "csv"), (5, "text"), (6, "numpy"), (8, "map"), (4, "tar"),
    (3, "bytes"), (7, "images"), (4, "files"), (4, "paths"), (9, "table"), (9, "dataset"), (6, "tensors"),
    (7, "iterable"), (3, "node"), (6, "concat"), (6, "zip"), (10, "mix"),
]  # fmt: skip


def draw(number: int) -> Chain:
    """The chain of that number."""
    draws = Draws(number)
    if number >= LEAVING:
        return leaving(number, draws)
    if number % 10 == 9:
        from frozen.recipes import recipe

        return recipe(number // 10, draws)
    drawing = WholeChain(draws)
    drawing.start(draws.weighted(SOURCES))
    drawing.body()
    return {"source": drawing.source, "stages": drawing.stages, "run": drawing.plan()}


def leaving(number: int, draws: Draws) -> Chain:
    """Chains of what will be left out: when it is, these go, and no others."""
    drawing = WholeChain(draws)
    which = ["draw", "unbatch", "tokenized_by", "tabular", "evaluation"][number % 5]
    if which in ("tabular", "evaluation"):
        from frozen.recipes import recipe

        return recipe(number, draws, which)
    if which == "draw":
        drawing.start(draws.pick(["table", "tensors", "map"]))
        drawing.shards = draws.pick([4, 12])
        drawing.add("deal", shards=drawing.shards)
        drawing.add("draw", by_place=["$tp.samplers.RandomSampler(seed=3)"])
        drawing.shuffled = True
        drawing._batching()
    elif which == "unbatch":
        drawing._parquet_all()
        drawing._deal_and_shuffle()
        drawing.add("select", by_place=["tokens"])
        drawing.add("unbatch")
        drawing.add("batch", by_place=[draws.between(3, 9)])
        drawing.finite_uncounted = True
    else:
        drawing._parquet_all()
        drawing._deal_and_shuffle()
        drawing.add("tokenized_by", by_place=["bytes", "tokens"])
        drawing.add("select", by_place=["x", "tokens"])
        drawing.add("batch", by_place=[draws.between(3, 9)])
        drawing.add("pad")
    return {"source": drawing.source, "stages": drawing.stages, "run": drawing.plan()}


def short(chain: Chain) -> str:
    """A chain in one line: its stages, and how it is read."""
    name, options = chain["source"]
    if name == "recipe":
        name = f"recipe:{options['name']}"
    parts = options.get("parts")
    if parts:
        each = parts.values() if isinstance(parts, dict) else parts
        name += f"({','.join(part['source'][0] for part in each)})"
    run = chain["run"]
    legs = " ".join(
        f"{ranks}{'w' if workers else ''}:{'' if until is None else until}"
        for ranks, workers, until in run["legs"]
    )
    return f"{' '.join([name, *(stage[0] for stage in chain['stages'])])} | {legs}"


def fingerprint(chain: Chain) -> str:
    """Tells whether a chain is still drawn as it was."""
    return sha256(json.dumps(chain).encode()).hexdigest()[:8]
