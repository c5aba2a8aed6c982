"""Batches and what comes after them, and how a chain is read, drawn."""

from __future__ import annotations

from typing import Any

from frozen.drawn_tokens import TokenStages

__all__ = ["Batches"]


class Batches(TokenStages):
    """Batches, and the plan of a run."""

    def _batching(self) -> None:
        d = self.d
        if not self.endless and d.chance(11):
            times = d.weighted([(7, None), (2, 2), (1, 3)])
            self._repeat(times)
        if self.of("ids", "even ids") and self.of("nulls") and d.chance(92):
            for name in self.of("nulls"):
                self.add("drop", by_place=[name])
                del self.columns[name]  # type: ignore[union-attr]
        lengths = self.of("ids")
        how = d.weighted([(70, "batch"), (12, "none"), (10, "tokens"), (14, "buckets")])
        if how in ("tokens", "buckets") and not lengths:
            how = "batch"
        if how == "none":
            if (
                not self.endless
                and not self.repeated
                and d.chance(20)
                and (self.shuffled or self.shards == 1)
            ):
                self.add(d.pick(["take", "skip"]), by_place=[d.pick([5, 11, 30])])
            return
        if how == "batch":
            options: dict[str, Any] = {"drop_last": True} if d.chance(30) else {}
            self.add(
                "batch", by_place=[d.weighted([(6, 4), (3, 3), (3, 7), (1, 1), (1, 16)])], **options
            )
        else:
            column = d.pick(lengths)
            self.finite_uncounted = True
            options = {} if column == "input_ids" else {"column": column}
            if how == "tokens":
                long = 400 if column in ("input_ids", "target_ids", "labels") else 24
                options["max_tokens"] = long
                if not options.get("column") and d.chance(50):
                    options["column"] = column
                if d.chance(40):
                    options["max_rows"] = d.pick([3, 6])
                if d.chance(20):
                    options |= {"max_tokens": 12, "on_long": "alone"}
                self.add("batch", **options)
            else:
                if d.chance(70):
                    options["buffer"] = d.pick([8, 16, 40])
                if d.chance(50):
                    options["buckets"] = d.pick([2, 3, 5])
                elif d.chance(50):
                    options["boundaries"] = [3, 6]
                by_tokens = d.chance(20)
                if d.chance(25) and not by_tokens:
                    options["drop_last"] = True
                if d.chance(40):
                    options["seed"] = d.below(9)
                if by_tokens:
                    options["max_tokens"] = 500
                    self.add("buckets", **options)
                else:
                    self.add("buckets", by_place=[d.pick([3, 4])], **options)
        self._after_batch()

    def _repeat(self, times: int | None) -> None:
        self.add("repeat", by_place=[] if times is None else [times])
        self.repeated = True
        self.endless = times is None

    def _after_batch(self) -> None:
        d = self.d
        rows = True
        if d.chance(5) and self.scalar != "batches":
            self.add("keep", by_place=["$functions.some_batches"])
            self.finite_uncounted = True
        self._collate()
        rows = not any(stage[0] in ("pad", "collate") for stage in self.stages)
        if d.chance(8):
            function = d.pick(
                ["counted", "jitter_batch", "first_of"] if rows else ["counted", "jitter_batch"]
            )
            options: dict[str, Any] = {"rng": True} if function == "jitter_batch" else {}
            if d.chance(25):
                options["num_workers"] = 2
            self.add("each", by_place=[f"$functions.{function}"], **options)
        buckets = any(stage[0] == "buckets" for stage in self.stages)
        if not self.endless and not self.repeated and d.chance(3 if buckets else 12):
            self.add(d.pick(["take", "skip"]), by_place=[d.pick([1, 3, 8])])
        if not self.endless and not self.repeated and d.chance(20):
            self._repeat(d.weighted([(6, None), (3, 2), (1, 3)]))
        if d.chance(7):
            self.add("pin")
        if d.chance(7):
            options = {"depth": d.pick([1, 3])} if d.chance(50) else {}
            self.add("to", by_place=["cpu"], **options)

    def _collate(self) -> None:
        d = self.d
        if self.scalar == "batches" or self.columns is None:
            whole = d.chance(50) and self.scalar in ("int", "pair", "batches")
            if whole and self.columns is None:
                self.add("collate")
            return
        ragged = self.of("ids")
        uneven = self.of("image", "nulls")
        if ragged and not self.of("image") and d.chance(75):
            options: dict[str, Any] = {}
            if d.chance(25):
                options["multiple"] = d.pick([4, 8])
            if d.chance(20):
                options["side"] = "left"
            if d.chance(20):
                options["max_length"] = d.pick([5, 12])
                if d.chance(50):
                    options["cut"] = "left"
            if self.padless or d.chance(25):
                options["value"] = 7
            if d.chance(20):
                options["mask"] = d.pick([False, {ragged[0]: "seen"}])
            if d.chance(15):
                options["columns"] = {ragged[0]: {"value": 5}}
            if d.chance(12):
                options["dtype"] = d.pick(["$torch.int32", "$torch.float32"])
            self.add("pad", **options)
            return
        how = d.weighted(
            [(40, "plain"), (12, "arrow"), (12, "numpy"), (8, "torch"), (8, "fn"), (20, "rows")]
        )
        if how == "plain" and (ragged or uneven):
            how = "rows"
        if how in ("numpy", "torch") and (ragged or self.of("image", "text", "bytes") or uneven):
            how = "arrow"
        if how == "arrow" and (self.python or self.of("image")):
            how = "rows"
        if how == "plain":
            self.add("collate")
        elif how == "arrow":
            self.add(
                "collate",
                by_place=["$functions.arrow_names"] if d.chance(40) else [],
                format="arrow",
            )
        elif how in ("numpy", "torch"):
            self.add("collate", by_place=["$functions.total"] if d.chance(30) else [], format=how)
        elif how == "fn":
            self.add("collate", by_place=["$functions.longest"])

    # How it is read

    def plan(self) -> dict[str, Any]:
        """Ranks, workers, legs."""
        d = self.d
        able = [r for r in (1, 2, 3, 4) if self.shards % r == 0]
        agreeing = self.finite_uncounted and not self.endless and not self.ragged
        several = len(able) > 1 and d.chance(70 if not agreeing else 20)
        wrong = d.chance(1)
        apart = several and ((agreeing and not wrong) or d.chance(2))
        reads = "loader" if apart or d.chance(65) else "pipe"
        workers = 0
        if reads == "loader" and d.chance(3):
            workers = 2
        epochs = 1 if self.endless else d.weighted([(1, 1), (5, 2), (2, 3)])
        legs: list[list[Any]] = []
        for _ in range(d.weighted([(1, 0), (5, 1), (3, 2), (1, 3)])):
            ranks = d.pick(able) if several else 1
            until = d.weighted(
                [(10, d.between(1, 9)), (2, "last"), (2, "end"), (2, d.between(5, 30)), (1, 0)]
            )
            legs.append([ranks, workers if d.chance(60) else 0, until])
        legs.append([d.pick(able) if several else 1, 0, None])
        if self.ragged:
            legs = [[legs[0][0], *leg[1:]] for leg in legs]
        if wrong:
            legs[-1][0] = d.pick([5, 7])
        return {
            "reads": reads,
            "threads": d.weighted([(60, 0), (25, 2), (15, None)]),
            "epochs": epochs,
            "limit": d.pick([30, 48]) if self.endless else None,
            "legs": legs,
            "apart": apart,
            "ragged": self.ragged,
            "own_states": d.chance(50),
            "uncounted": self.finite_uncounted,
        }
