"""Tokens, packing and pictures, drawn."""

from __future__ import annotations

from typing import Any

from frozen.drawn_rows import RowStages

__all__ = ["TokenStages"]


class TokenStages(RowStages):
    """Stages on texts, ids and pictures."""

    def _tokenize(self) -> None:
        assert self.columns is not None
        texts = self.of("text")
        options: dict[str, Any] = {}
        tokenizer = self.d.weighted(
            [(6, "bytes"), (5, "$data.path('words.json')"), (1, "$functions.codes")]
        )
        plain = self.padless = tokenizer == "$functions.codes"
        if self.d.chance(45):
            options["max_length"] = self.d.pick([8, 16, 40])
            if self.d.chance(30):
                options["cut"] = "left"
        if self.d.chance(40) and tokenizer == "bytes":
            options["eos"] = True
        how = self.d.weighted([(5, "one"), (3, "joined"), (2, "apart"), (1, "pair")])
        if len(texts) < 2 or plain:
            how = "one"
        first, second = (texts * 2)[:2]
        gone = [first, second] if how != "one" else [first]
        for name in gone:
            self.columns.pop(name, None)
        if self.d.chance(15):
            options["keep_text"] = True
            self.columns |= dict.fromkeys(gone, "text")
        if how == "one":
            self.add("tokenize", by_place=[tokenizer, first], **options)
            self.columns["input_ids"] = "ids"
            if self.d.chance(20) and not plain and "labels" not in self.columns:
                self.stages[-1][1]["labels"] = True
                self.columns["labels"] = "ids"
        elif how == "joined":
            if self.d.chance(60) and "labels" not in self.columns:
                options["labels"] = second
                self.columns["labels"] = "ids"
            self.add("tokenize", by_place=[tokenizer, [first, second]], **options)
            self.columns["input_ids"] = "ids"
        elif how == "apart":
            names = {first: "input_ids", second: "target_ids"}
            self.add("tokenize", by_place=[tokenizer, names], **options)
            self.columns |= {"input_ids": "ids", "target_ids": "ids"}
        else:
            tokenizer = "$data.path('words.json')"
            options.pop("eos", None)
            self.add("tokenize", by_place=[tokenizer, [first, second]], pair=True, **options)
            self.columns |= {"input_ids": "ids"}
            self.columns["token_type_ids"] = "ids"
        self.told = tokenizer == "$data.path('words.json')"

    def _chat(self) -> None:
        self.add("each", by_place=["$functions.conversation"])
        options: dict[str, Any] = {}
        if self.d.chance(50):
            options["max_length"] = self.d.pick([40, 90])
        if self.d.chance(25):
            options["labels"] = False
        self.add("chat", by_place=["$data.chat_tokenizer()"], **options)
        self.columns = {"x": "number", "input_ids": "ids", "labels": "ids"}
        if "labels" in options:
            del self.columns["labels"]

    def _picture_stages(self, name: str) -> None:
        """Stages of images, on a column of arrays."""
        assert self.columns is not None
        column = {} if name == "image" else {"column": name}
        even = False
        for _ in range(self.d.between(1, 3)):
            how = self.d.pick(["crop", "flip", "resized", "size", "middle", "transform"])
            if even and how not in ("flip", "transform"):
                continue
            seed = {"seed": self.d.below(9)} if self.d.chance(40) else {}
            if how == "crop":
                options: dict[str, Any] = (
                    {"padding": self.d.pick([1, 2])} if self.d.chance(60) else {}
                )
                if options and self.d.chance(30):
                    options["fill"] = 9
                size = self.d.pick([6, [8, 7]])
                size = "$(8, 7)" if isinstance(size, list) else size
                self.add("random_crop", by_place=[size], **options, **seed, **column)
                even = True
                self.long = 6
            elif how == "flip":
                options = {"direction": "vertical"} if self.d.chance(30) else {}
                self.add("flip", by_place=[self.d.pick([0.5, 0.2])], **options, **seed, **column)
            elif how == "resized":
                options = {"scale": [0.3, 0.9]} if self.d.chance(30) else {}
                self.add("random_resized_crop", by_place=[7], **options, **seed, **column)
                even = True
            elif how == "size":
                self.add("resize", by_place=["$(9, 8)"], **column)
                even = True
            elif how == "middle":
                self.add("center_crop", by_place=[6], **column)
                even = True
            else:
                self.add("transform", by_place=["$functions.Jitter()"], **seed, **column)
        if self.d.chance(25):
            self.add("normalize", by_place=[0.5, 0.25], **column)
        self.columns[name] = "vector" if even else "image"

    def _pack(self, column: str) -> None:
        assert self.columns is not None
        d = self.d
        self.finite_uncounted = True
        chosen = [column, *(["labels"] if self.columns.get("labels") == "ids" else [])]
        if list(self.columns) != chosen:
            self.add("select", by_place=chosen)
        options: dict[str, Any] = {"method": d.pick(["best_fit", "first_fit", "concat"])}
        if column != "input_ids":
            options["column"] = column
        if d.chance(60) and options["method"] != "concat":
            options["buffer"] = d.pick([4, 9, 24])
        if d.chance(20):
            options["max_documents"] = 3
        if d.chance(20) and options["method"] != "concat":
            options["on_long"] = d.pick(["split", "truncate", "drop"])
        if self.padless or d.chance(30):
            options["pad"] = 9
        if d.chance(30):
            options["seed"] = d.below(9)
        self.add("pack", by_place=[d.pick([16, 24, 60])], **options)
        self.columns = {column: "even ids", "labels": "even ids", "position_ids": "even ids",
                        "segment_ids": "even ids"}  # fmt: skip
        self.packed = True
