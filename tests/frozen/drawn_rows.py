"""Order, dealing and choice of rows, and stages that keep rows, drawn."""

from __future__ import annotations

from typing import Any

from frozen.drawn_sources import Sources

__all__ = ["OrderOfRows", "RowStages"]


class OrderOfRows(Sources):
    """Deals and shuffles."""

    def _deal_and_shuffle(self, rows: int = 97, deal: int = 72, shuffle: int = 65) -> None:
        steps = []
        if self.shards == 1 and self.d.chance(deal if self.source[0] != "node" else 5):
            self.shards = self.d.weighted(
                [(5, 4), (5, 12), (3, 24), (2, 6), (2, 2), (1, 1), (1, 8)]
            )
            options: dict[str, Any] = {"shards": self.shards}
            if self.d.chance(22):
                options["how"] = "stride"
            if self.d.chance(12):
                options["tail"] = "ragged"
                self.ragged = True
            steps.append(["deal", options])
        mixed = self.source[0] == "mix" and not self.d.chance(4)
        if not self.shuffled and not self.sampled and not mixed and self.d.chance(shuffle):
            self.shuffled = True
            if self.numbered and self.d.chance(35):
                options = {"scope": "global", "seed": self.d.below(9)}
            else:
                options = {"buffer": self.d.pick([3, 7, 9, 16, 20, 40, rows, 500])}
                if self.d.chance(70):
                    options["seed"] = self.d.below(99)
            steps.append(["shuffle", options])
        if self.d.chance(30):
            steps.reverse()
        self.stages += steps


class RowStages(OrderOfRows):
    """Stages on rows."""

    def _keep(self) -> None:
        """A filter."""
        self.finite_uncounted = True
        if self.columns is None:
            if self.scalar == "int":
                self.add("keep", by_place=["$functions.third"])
            return
        if "x" not in self.columns:
            name = self.d.pick(list(self.columns))
            if self.columns[name] == "text":
                self.add("keep", by_place=[f"$pc.utf8_length(pc.field('{name}')) > 7"])
            return
        self.add(
            "keep",
            by_place=[
                self.d.pick(
                    [
                        "$functions.odd",
                        "$pc.field('x') > 20",
                        "$(pc.field('x') < 11) | (pc.field('x') > 33)",
                        "$pc.bit_wise_and(pc.field('x'), 3) != 1",
                    ]
                )
            ],
        )

    def _choose(self) -> None:
        """``sample`` or ``split``."""
        self.finite_uncounted = True
        keyed = {"key": "x"} if self.d.chance(40) and "x" in (self.columns or {}) else {}
        seed = {"seed": self.d.below(9)} if self.d.chance(50) else {}
        if self.d.chance(50):
            self.add("sample", by_place=[self.d.pick([0.3, 0.6, 0.9])], **keyed, **seed)
        else:
            parts = {"train": 0.7, "valid": 0.3}
            self.add(
                "part", by_place=[parts], part=self.d.pick(["train", "valid"]), **keyed, **seed
            )

    def _names(self) -> None:
        """``select``, ``drop`` or ``rename``."""
        assert self.columns is not None
        how = self.d.pick(["select", "drop", "rename"])
        if how == "select":
            left = [c for c in self.columns if c != "x"]
            names = self.d.some(left, self.d.between(1, 3))
            chosen = [c for c in self.columns if c == "x" or c in names]
            if self.d.chance(30):
                chosen.reverse()
            self.add("select", by_place=chosen)
            self.columns = {c: self.columns[c] for c in chosen}
        elif how == "drop":
            left = [c for c in self.columns if c != "x"]
            if len(left) > 1:
                name = self.d.pick(left)
                self.add("drop", by_place=[name])
                del self.columns[name]
        else:
            free = [c for c in self.columns if c not in ("x", "tokens", "text", "image", "bytes")]
            if free:
                name = self.d.pick(free)
                self.add("rename", by_place=[{name: f"{name}_2"}])
                self.columns = {(f"{c}_2" if c == name else c): k for c, k in self.columns.items()}

    def _row_stage(self) -> None:
        """A stage that keeps rows."""
        if self.of("image"):
            return  # of several sizes, which make no column
        if self.columns is None:
            if self.scalar == "int":
                self.add("each", by_place=["$functions.plus"])
            elif self.scalar == "pair":
                self.add("each", by_place=["$functions.swap"])
            return
        choices: list[tuple[int, str]] = [(2, "names")]
        if "x" in self.columns and self.columns["x"] == "number":
            choices += [(2, "double"), (2, "jitter"), (1, "negative"), (2, "outer")]
        if "text" in self.columns and self.columns["text"] == "text" and "loud" not in self.columns:
            choices += [(2, "upper")]
        if "tokens" in self.columns and "length" not in self.columns:
            choices += [(2, "lengths")]
        if self.of("ids"):
            choices += [(2, "truncate"), (2, "labels"), (3, "mask")]
        if (
            "label" in self.columns
            and self.columns["label"] == "text"
            and "labels" not in self.columns
        ):
            choices += [(4, "classes")]
        getattr(self, f"_do_{self.d.weighted(choices)}")()

    def _do_names(self) -> None:
        self._names()

    def _do_double(self) -> None:
        workers = {"num_workers": 2} if self.d.chance(15) else {}
        self.add("each", by_place=["$functions.double"], **workers)

    def _do_jitter(self) -> None:
        assert self.columns is not None
        options: dict[str, Any] = {"rng": True}
        if self.d.chance(50):
            options["seed"] = self.d.below(9)
        if self.d.chance(20):
            options["num_workers"] = 2
        self.add("each", by_place=["$functions.jitter"], **options)
        self.columns |= {"noise": "real", "more": "number"}

    def _do_negative(self) -> None:
        self.add("columns", by_place=["$functions.negative"], format="numpy")
        self.columns = {"x": "number"}

    def _do_outer(self) -> None:
        assert self.columns is not None
        if "outer" in self.columns:
            return
        self.add("add_columns", by_place=["$functions.outer"], format="torch")
        self.columns["outer"] = "vector"

    def _do_upper(self) -> None:
        assert self.columns is not None
        if self.d.chance(50):
            self.add("add_columns", by_place=["$functions.upper"])
            self.columns["loud"] = "text"
        else:
            self.add("columns", by_place=["$functions.upper"], format="arrow")
            self.columns = {"loud": "text"}

    def _do_lengths(self) -> None:
        assert self.columns is not None
        if self.columns["tokens"] == "ids":
            self.add("add_columns", by_place=["$functions.lengths"], format="numpy")
            self.columns["length"] = "number"

    def _do_truncate(self) -> None:
        name = self.d.pick(self.of("ids"))
        options: dict[str, Any] = {"columns": name}
        if self.d.chance(40):
            options["cut"] = self.d.pick(["left", "right"])
        self.add("truncate", by_place=[self.d.pick([2, 4, 10])], **options)

    def _do_labels(self) -> None:
        assert self.columns is not None
        if "labels" in self.columns:
            return
        name = self.d.pick(self.of("ids"))
        options = {"ignore": [3, 5]} if self.d.chance(50) else {}
        self.add("labels", by_place=[name], **options)
        self.columns["labels"] = "ids"

    def _do_mask(self) -> None:
        assert self.columns is not None
        if "labels" in self.columns:
            return
        name = self.d.pick(self.of("ids"))
        options: dict[str, Any] = {"column": name}
        if not (self.told and name == "input_ids"):
            options |= {"mask": 299, "special": [7], "vocabulary": 299}
        if self.d.chance(40):
            options["seed"] = self.d.below(9)
        if self.d.chance(20):
            options |= {"random": 0.3, "keep": 0.2}
        self.add("mask", by_place=[self.d.pick([0.15, 0.5])], **options)
        self.columns["labels"] = "ids"

    def _do_classes(self) -> None:
        assert self.columns is not None
        classes: Any = self.d.pick([["cat", "dog", "eel"], {"eel": 0, "cat": 1, "dog": 2}])
        options = {"output": "kind"} if self.d.chance(40) else {}
        self.add("classes", classes=classes, **options)
        del self.columns["label"]
        self.columns[options.get("output", "labels")] = "number"
