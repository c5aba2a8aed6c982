"""Chains of any stages in any order, drawn so that most of them fit together."""

from __future__ import annotations

import random
from typing import Any

from chains import Chain, Stage

__all__ = ["draw_chain"]


def draw_chain(draw: random.Random) -> Chain:
    """A chain of any of them, with an order that mostly fits."""
    return Drawing(draw).whole()


class Drawing:
    """Draws the parts of one chain; rows of different sources have different numbers."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._sources = self._mixed = 0

    def _odds(self, share: float) -> bool:
        return self._draw.random() < share

    def whole(self) -> Chain:
        draw = self._draw
        level = 2 if self._odds(0.35) else 1 if self._odds(0.3) else 0
        batches = draw.choice(["", "", "rows", "tensors"]) if level == 2 else ""
        self._shards = shards = draw.choice([1, 1, 1, 1, 1, 2, 3, 4, 6, draw.randint(2, 8), 12, 24])
        source, batched = self._source(level, batches), bool(batches)
        split = "stride" if self._odds(0.1) and source[0] not in ("mix", "iterable") else "spans"
        stages: list[Stage] = []
        if source[0] != "mix" and self._odds(0.2):
            stages += self._counting(60)
        if not stages and source[0] in ("arrow", "parquet") and self._odds(0.1):
            stages += [*self._kept(), ("cache",)]
        if not stages and source[0] in ("arrow", "dataset") and self._odds(0.15):
            stages.append(("shuffle all", draw.randint(0, 9)))
        stages += [] if batched else self._rows(source)
        if batched or self._odds(0.75):
            stages += self._batches(batches, stages)
        mixes_forever = source[0] == "mix" and dict(source[2])["stop"] == "repeat"
        if self._odds(0.35):
            # After take and skip, which do not count over epochs.
            first = max(
                (n + 1 for n, s in enumerate(stages) if s[0] in ("take", "skip", "cache")),
                default=0,
            )
            times = None if mixes_forever else draw.choice([1, 2, 2, 3, None])
            stages.insert(draw.randint(first, len(stages)), ("repeat", times))
        if shards > 1 or self._odds(0.3):
            stages.insert(draw.randint(0, len(stages)), ("sharding_filter", shards, split))
        return Chain(source, tuple(stages))

    def _source(self, level: int, batches: str, deep: int = 0) -> Stage:
        """A source, which gives batches of some kind or rows."""
        if level == 2:
            return self._mix(batches, deep)
        if level == 1:
            plain = [Chain(self._plain("arrow", "dataset", "parquet")) for _ in range(2)]
            chains = [Chain(c.source, tuple(self._counting(40) * self._odds(0.3))) for c in plain]
            return "concat", tuple(chains)
        return self._plain("arrow", "arrow", "dataset", "iterable", "parquet", "parquet")

    def _plain(self, *kinds: str) -> Stage:
        draw, first = self._draw, 1000 * self._sources
        self._sources += 1
        kind = draw.choice(kinds)
        if kind == "parquet":
            groups = tuple(draw.randint(0, 12) for _ in range(draw.randint(1, 3)))
            return kind, first, (*groups, draw.randint(24, 30))
        return kind, first, draw.choice([24, 40, draw.randint(24, 48)])

    def _mix(self, batches: str, deep: int) -> Stage:
        draw = self._draw
        chains, inner_batches = [], False
        for _ in range(draw.choice([1, 2, 2, 2, 3 - deep])):
            inner = deep < 1 and self._odds(0.2)
            source = self._source(2 if inner else int(self._odds(0.15)), batches, deep + 1)
            made = inner and batches
            inner_batches = inner_batches or made
            stages = [] if made else self._rows(source, short=True, alike=True)
            if batches and not made:
                stages.append(("batch", draw.randint(1, 5), self._odds(0.2)))
                stages += (
                    [(draw.choice(["pad_collate", "collate"]),)] if batches == "tensors" else []
                )
            self._mixed += 1
            chains.append((f"s{self._mixed}", Chain(source, tuple(stages))))
        weights = {name: draw.choice([1, 1, 2, 3, 0.5]) for name, _ in chains}
        stops = ["all_exhausted", "all_exhausted", "first_exhausted", *["repeat"] * (not deep)]
        options = {"weights": weights, "stop": draw.choice(stops)}
        if self._odds(0.15) and options["stop"] == "all_exhausted":
            options["max_epochs"] = draw.randint(1, 3)
        if self._odds(0.15) and not (inner_batches and batches == "tensors"):
            options |= {"weight_by": "tokens", "column": "ids"}
        if self._odds(0.2) and not deep and batches != "tensors":
            options |= {"output_column": "from"} if not batches else {}
        return "mix", tuple(chains), tuple(options.items())

    def _kept(self) -> list[Stage]:
        """Stages on rows whose work a cache keeps."""
        return self._draw.sample([("filter columns", 2), ("filter", 5)], self._draw.randint(0, 2))

    def _counting(self, most: int) -> list[Stage]:
        draw = self._draw
        skip, take = ("skip", draw.randint(0, 9)), ("take", draw.randint(24, 24 + most))
        return draw.choice([[take], [skip], [skip, take]])

    def _rows(self, source: Stage, short: bool = False, alike: bool = False) -> list[Stage]:
        """Stages on rows. ``alike``: that leave the columns as they are."""
        draw = self._draw
        objects = source[0] in ("dataset", "iterable") or source[0] == "mix"
        stages: list[Stage] = []
        packed = regroups = False
        for _ in range(draw.choice([0, 1, 1, 2, 3] if short else [0, 1, 2, 2, 3, 4, 5])):
            kinds = ["shuffle", "shuffle", "filter", "flat_map", "deduplicate", "stateful"]
            kinds += [] if regroups else ["sample"]
            if packed:
                kinds = ["shuffle"]
            elif not alike:
                kinds += ["map", "map rng", "select"]
                kinds += [] if objects else ["map_batches", "filter columns"]
            elif not objects:
                kinds += ["filter columns"]
            if self._shards == 1 and self._odds(0.3):
                kinds += ["take", "skip"]
            if not packed and not alike and self._odds(0.3):
                kinds = ["pack"]
            kind = draw.choice(kinds)
            if kind == "deduplicate" and ("select",) in stages:
                kind = "shuffle"
            if kind == "map_batches" and (kind,) in stages:
                kind = "filter columns"
            stages.append(self._stage(kind))
            packed = packed or kind == "pack"
            regroups = regroups or kind in ("deduplicate", "stateful", "flat_map", "pack")
            objects = objects or kind in ("map", "map rng", "flat_map", "stateful")
        return stages

    def _batches(self, made: str, below: list[Stage]) -> list[Stage]:
        draw = self._draw
        packed = any(stage[0] == "pack" for stage in below)
        column = "input_ids" if packed else "ids"
        kinds = ["batch", "batch", "batch", "batch", "batch tokens", "buckets"]
        stages = [] if made else [self._stage(draw.choice(kinds), column)]
        tensors = made == "tensors"
        for _ in range(draw.choice([0, 1, 1, 2, 3, 4])):
            kinds = ["shuffle", "shuffle", "batch", "map batch", "filter batch", "take", "skip"]
            if not tensors and not made and len(stages) == 1:
                kinds += ["pad_collate", "pad_collate", "collate"]
            if self._shards > 1 and self._odds(0.8):
                kinds = [kind for kind in kinds if kind not in ("take", "skip")]
            kind = draw.choice(kinds)
            stages.append(self._stage(kind, most=4))
            tensors = tensors or kind in ("pad_collate", "collate")
        return stages

    def _stage(self, kind: str, column: str = "ids", most: int = 9) -> Stage:
        draw = self._draw
        options: dict[str, Any] = {
            "filter": lambda: (draw.choice([2, 3, 5]),),
            "filter columns": lambda: (draw.choice([0, 2, 5]),),
            "sample": lambda: (draw.choice([0.5, 0.8]), draw.randrange(1000)),
            "deduplicate": lambda: draw.choice([("g",), ("x",), ("g", "s"), ("s", "p")]),
            "stateful": lambda: (draw.choice(["keeps back", "changes"]),),
            "shuffle": lambda: (draw.choice([1, 3, 5, 9, 20, 40, 100]), draw.randint(0, 9)),
            "take": lambda: (draw.choice([0, 1, 3, 7, 20, 50]),),
            "skip": lambda: (draw.choice([0, 1, 3, 7, 20]),),
            "pack": lambda: (
                draw.choice([4, 8, 16]), draw.choice(["best_fit", "first_fit", "concat"]),
                draw.choice([5, 20, 40]),
            ),
            "batch": lambda: (draw.randint(1, most), self._odds(0.25)),
            "batch tokens": lambda: (draw.choice([6, 12, 30]), column),
            "buckets": lambda: (draw.randint(1, 6), self._odds(0.25), draw.choice([4, 12, 40]), column),
            "filter batch": lambda: (draw.choice([2, 3, 5]),),
        }  # fmt: skip
        return (kind, *options.get(kind, tuple)())
