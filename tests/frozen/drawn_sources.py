"""Sources of one kind, drawn."""

from __future__ import annotations

from typing import Any

from frozen.drawing import Drawing

__all__ = ["Sources"]


class Sources(Drawing):
    """Starts a chain with files or rows."""

    def start(self, kind: str) -> None:
        getattr(self, f"_{kind}")()

    def _only(self, columns: dict[str, str], percent: int = 35) -> list[str] | None:
        """Some of the columns, x always."""
        if not self.d.chance(percent):
            self.columns = dict(columns)
            return None
        names = self.d.some([c for c in columns if c != "x"], self.d.between(1, 3))
        chosen = [c for c in columns if c == "x" or c in names]
        self.columns = {c: columns[c] for c in chosen}
        return chosen

    def _read(self, name: str, files: str, options: dict[str, Any]) -> None:
        """As one call, or by a list of files first."""
        if self.d.chance(30):
            self.source = ["paths", {"": [files]}]
            how = self.d.weighted([(5, None), (3, "shuffle"), (2, "deal")])
            if how == "shuffle":
                self.add("shuffle", buffer=self.d.pick([9, 20, 60]), seed=self.d.below(9))
                self.shuffled = True
            if how == "deal":
                self.shards = self.d.pick([4, 12])
                self.add("deal", shards=self.shards)
            options = {k: v for k, v in options.items() if k != ""} | {
                "as": name,
                "": options[""][1:],
            }
            self.stages.append(["read", options])
        else:
            self.source = [name, options]

    def _parquet(self) -> None:
        which = self.d.weighted([(6, "parquet"), (2, "many"), (1, "hive")])
        columns = dict(self.FULL)
        options: dict[str, Any] = {}
        if which == "hive":
            columns["part"] = "text"
            options["partitioning"] = "hive"
        chosen = self._only(columns)
        if self.d.chance(15):
            self.finite_uncounted = True
            options["filter"] = self.d.pick(
                [
                    "$(pc.field('x') > 9) & (pc.field('x') < 80)",
                    "$pc.field('label') != 'dog'",
                    "$pc.field('score') < 2.5",
                ]
            )
        place = ["$data.path('parquet/*.parquet')"]
        if which == "many":
            place = ["$data.path('many')"]
        if which == "hive":
            place = ["$data.path('hive')"]
        self._read("parquet", place[0], {"": [*place, *([chosen] if chosen else [])], **options})

    def _arrow(self) -> None:
        chosen = self._only(self.FULL)
        options: dict[str, Any] = {}
        if self.d.chance(50):
            options["block_rows"] = self.d.pick([5, 9, 32])
        place = self.d.pick(["$data.path('arrow')", "$data.path('arrow/0.arrow')"])
        self._read("arrow", place, {"": [place, *([chosen] if chosen else [])], **options})

    def _json(self) -> None:
        chosen = self._only(self.FULL)
        options: dict[str, Any] = {}
        if self.d.chance(60):
            options["block_rows"] = self.d.pick([5, 9, 32])
        if self.d.chance(30):
            options["infer"] = "all"
        place = self.d.weighted([(4, "$data.path('json')"), (1, "$data.path('array.json')")])
        self._read("json", place, {"": [place, *([chosen] if chosen else [])], **options})

    def _csv(self) -> None:
        columns = {
            "x": "number",
            "text": "text",
            "answer": "text",
            "label": "text",
            "score": "nulls",
        }
        options: dict[str, Any] = {}
        place = self.d.weighted([(3, "$data.path('csv')"), (1, "$data.path('rows.tsv')")])
        if self.d.chance(15) and place.endswith("('csv')"):
            chosen = None
            self.columns = {"a": "text", "b": "text", "c": "text", "d": "text", "e": "text"}
            options["names"] = list("abcde")
            if self.d.chance(50):
                options["schema"] = "$pa.schema([(n, pa.string()) for n in 'abcde'])"
        else:
            chosen = self._only(columns)
            if self.d.chance(25):
                options["infer"] = "all"
        if self.d.chance(60):
            options["block_rows"] = self.d.pick([5, 8, 30])
        self._read("csv", place, {"": [place, *([chosen] if chosen else [])], **options})

    def _text(self) -> None:
        unit = self.d.weighted([(5, "line"), (3, "paragraph"), (2, "document")])
        place = "$data.path('documents')" if unit == "document" else "$data.path('text')"
        options: dict[str, Any] = {"": [place], "unit": unit}
        if self.d.chance(50):
            options["block_rows"] = self.d.pick([3, 7, 11])
        name = "text"
        if self.d.chance(25):
            name = options["column"] = "said"
        self.columns = {name: "text"}
        self._read("text", place, options)

    def _numpy(self) -> None:
        options: dict[str, Any] = {}
        if self.d.chance(50):
            options["block_rows"] = self.d.pick([4, 9, 25])
        if self.d.chance(65):
            place = "$data.path('npz')"
            self.columns = {"x": "number", "y": "vector"}
            chosen = ["x"] if self.d.chance(30) else None
            if chosen:
                self.columns = {"x": "number"}
            options[""] = [place, *([chosen] if chosen else [])]
        else:
            place = "$data.path('npy')"
            options[""] = [place]
            name = "array"
            if self.d.chance(40):
                name = options["column"] = "y"
            self.columns = {name: "vector"}
        self.numbered = True
        self._read("numpy", place, options)

    def _tar(self) -> None:
        place = self.d.pick(["$data.path('tar')", "$data.path('tar/a.tar')"])
        options: dict[str, Any] = {"": [place]}
        self.columns = {"__key__": "text", "txt": "bytes", "cls": "bytes"}
        if self.d.chance(60):
            options["text"] = self.d.pick([["txt"], ["txt", "cls"]])
            self.columns = {**self.columns, **dict.fromkeys(options["text"], "text")}
        if self.d.chance(40):
            options["block_rows"] = self.d.pick([5, 9])
        if self.d.chance(20):
            options["missing"] = "null"
        self._read("tar", place, options)

    def _bytes(self) -> None:
        place = "$data.path('blobs')"
        options: dict[str, Any] = {"": [place]}
        if self.d.chance(70):
            options["block_rows"] = self.d.pick([1, 5, 16])
        self.columns = {"path": "text", "bytes": "bytes"}
        self._read("bytes", place, options)
        self._without_paths()

    def _images(self) -> None:
        place = "$data.path('pictures')"
        options: dict[str, Any] = {"": [place]}
        if self.d.chance(70):
            options["block_rows"] = self.d.pick([2, 5, 16])
        self.columns = {"bytes": "picture", "path": "text", "label": "number", "class": "text"}
        self._read("images", place, options)
        self._without_paths()

    def _without_paths(self) -> None:
        """Folders are other ones each time, and so are the paths in rows."""
        self.add("drop", by_place=["path"])
        del self.columns["path"]  # type: ignore[union-attr]

    def _files(self) -> None:
        place = "$data.path('blobs')"
        if self.d.chance(60):
            options = {"": [place, "$functions.blocks_of", "$functions.count_blocks"]}
        else:
            options = {"": ["$data.path('documents')", "$functions.all_of"]}
            self.stream = True
            self.finite_uncounted = True
        if self.d.chance(30):
            options["version"] = "2"  # type: ignore[assignment]
        self.columns = {"x": "number", "text": "text"}
        self.source = ["files", options]

    def _map(self) -> None:
        self.numbered = True
        which = self.d.weighted([(4, "map"), (2, "flat"), (4, "bin")])
        if which == "bin":
            length = self.d.pick([5, 8, 16])
            options: dict[str, Any] = {"dtype": "uint16", "length": length}
            self.columns = {"input_ids": "even ids"}
            if self.d.chance(50):
                options["labels"] = True
                self.columns["labels"] = "even ids"
            self.source = ["map", {"": ["$data.path('tokens.bin')"], **options}]
            return
        columns = (
            {"x": "number", "tokens": "ids"} if which == "map" else {"x": "number", "half": "real"}
        )
        options = {"": [f"$data.path('{which}')"]}
        self.columns = dict(columns)
        if self.d.chance(25):
            options["columns"] = ["x"]
            self.columns = {"x": "number"}
        self.source = ["map", options]

    def _table(self) -> None:
        self.numbered = True
        count, first = self.d.pick([97, 97, 50, 20, 5]), self.d.pick([0, 0, 30])
        self.source = ["table", {"": [f"$data.table({count}, {first})"]}]
        self.columns = dict(self.FULL)

    def _dataset(self) -> None:
        self.numbered = True
        self.python = True
        which = self.d.weighted([(4, "rows"), (2, "squares"), (2, "records"), (1, "list")])
        if which == "rows":
            count = self.d.pick([97, 61, 13])
            given = [f"$data.rows({count})"]
            self.columns = dict(self.FULL)
        elif which == "squares":
            count, given = 61, ["$data.Squares()"]
            self.columns, self.scalar = None, "pair"
        elif which == "records":
            count, given = 53, ["$data.Records()"]
            self.columns = {"x": "number", "pair": "vector", "text": "text"}
        else:
            count, given = 40, ["$list(range(40))"]
            self.columns, self.scalar = None, "int"
        options: dict[str, Any] = {}
        if self.d.chance(45):
            seed = self.d.below(9)
            sampler = self.d.pick(
                [
                    f"$tp.samplers.RandomSampler({count}, seed={seed})",
                    f"$tp.samplers.RandomSampler({count}, replacement=True, num_samples=70, seed={seed})",
                    f"$tp.samplers.SequentialSampler({count})",
                    f"$tp.samplers.SubsetRandomSampler(range(3, {count - 2}), seed={seed})",
                    f"$tp.samplers.WeightedRandomSampler([n % 4 for n in range({count})], 50, seed={seed})",
                    f"$tp.samplers.WeightedRandomSampler([1 + n % 3 for n in range({count})], "
                    f"{count - 4}, replacement=False, seed={seed})",
                    "$[5, 3, 9, 1, 1, 12, 0, 7, 7, 2]",
                ]
            )
            self.sampled = True
            if self.d.chance(20) and sampler.startswith("$tp"):
                options["batch_sampler"] = f"$tp.samplers.BatchSampler({sampler[1:]}, 4, False)"
                self.scalar = "batches"
            else:
                given.append(sampler)
        self.source = ["dataset", {"": given, **options}]

    def _tensors(self) -> None:
        self.numbered = True
        which = self.d.weighted([(4, "vectors"), (2, "pixels"), (1, "places")])
        if which == "vectors":
            count = self.d.pick([61, 20, 97])
            self.source = ["tensors", {"": [f"$**data.vectors({count})"]}]
            self.columns = {"x": "number", "y": "vector"}
        elif which == "pixels":
            self.source = ["tensors", {"": ["$**data.pixels()"]}]
            self.columns = {"image": "image", "label": "number"}
        else:
            self.source = ["tensors", {"": ["$np.arange(60.0)", "$np.arange(120).reshape(60, 2)"]}]
            self.columns, self.scalar, self.python = None, "pair", True

    def _iterable(self) -> None:
        self.stream = self.finite_uncounted = True
        self.python = True
        if self.d.chance(60):
            count = self.d.pick([71, 30])
            self.columns = dict(self.FULL)
            self.source = ["iterable", {"": [f"$data.Generated({count})"]}]
        else:
            self.source = ["iterable", {"": [self.d.pick(["$data.numbers(61)", "$range(40)"])]}]
            self.columns, self.scalar = None, "int"

    def _node(self) -> None:
        self.stream = True
        self.python = True
        wrapper = "$__import__('torchdata.nodes').nodes.IterableWrapper"
        if self.d.chance(50):
            self.source = ["node", {"": [f"{wrapper}(data.rows(41))"]}]
            self.columns = dict(self.FULL)
        else:
            self.source = ["node", {"": [f"{wrapper}(range(61))"]}]
            self.columns, self.scalar = None, "int"

    def _paths(self) -> None:
        place = self.d.pick(["many", "documents"])
        self.source = ["paths", {"": [f"$data.path('{place}')"]}]
        if self.d.chance(30) and place == "many":
            self.add("keep", by_place=["$functions.later"])
            self.finite_uncounted = True
        # What is read is what a path leads to: paths themselves are other ones each time.
        name = "parquet" if place == "many" else "text"
        self._deal_and_shuffle(rows=13)
        if name == "parquet":
            self.stages.append(["read", {"as": "parquet"}])
            self.columns = dict(self.FULL)
        else:
            self.stages.append(["read", {"as": "text", "unit": "document"}])
            self.columns = {"text": "text"}
