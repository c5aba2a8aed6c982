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
from collections.abc import Sequence
from typing import Any

__all__ = ["CHAINS", "LEAVING", "Chain", "Draws", "draw", "short"]

Chain = dict[str, Any]
Stage = list[Any]

#: How many there are.
CHAINS = 2000
#: From this number on they are of what the library is going to leave out.
LEAVING = 1920


class Draws:
    """Numbers drawn one after the other: SplitMix64, of a seed."""

    def __init__(self, seed: int) -> None:
        first = sha256(f"chain {seed}".encode()).digest()  # else neighbours draw the same, shifted
        self._state = int.from_bytes(first[:8], "big")

    def _bits(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) % 2**64
        z = self._state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    def below(self, count: int) -> int:
        return self._bits() % count

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent

    def pick(self, values: Sequence[Any]) -> Any:
        return values[self.below(len(values))]

    def weighted(self, choices: Sequence[tuple[int, Any]]) -> Any:
        left = self.below(sum(weight for weight, _ in choices))
        for weight, value in choices:
            left -= weight
            if left < 0:
                return value
        raise AssertionError

    def some(self, values: Sequence[Any], count: int) -> list[Any]:
        """So many of them, in their order."""
        left = list(range(len(values)))
        while len(left) > count:
            left.pop(self.below(len(left)))
        return [values[i] for i in left]


class Drawing:
    """A chain while it is drawn.

    Attributes:
        columns: kinds of the columns by name: "number", "real", "nulls" (numbers and nulls), "text", "ids", "bytes",
            "image", "vector", "flag", "words" (lists of texts), "messages"; None where rows are no dicts.
        python: whether rows are Python's own, not columns.
        stream: whether rows cannot be listed.
        numbered: whether rows can be read by their numbers.
    """

    def __init__(self, draws: Draws) -> None:
        self.d = draws
        self.source: Stage = []
        self.stages: list[Stage] = []
        self.columns: dict[str, str] | None = None
        self.python = False
        self.stream = False
        self.numbered = False
        self.scalar = "dict"
        self.shards = 1
        self.ragged = False
        self.endless = False
        self.finite_uncounted = False
        self.shuffled = False
        self.vocabulary = 300
        self.told = False
        self.packed = False
        self.repeated = False
        self.padless = False
        self.sampled = False
        self.long = 1

    def add(self, name: str, **options: Any) -> None:
        self.stages.append([name, {k if k != "by_place" else "": v for k, v in options.items()}])

    def of(self, *kinds: str) -> list[str]:
        """Columns of these kinds."""
        return [name for name, kind in (self.columns or {}).items() if kind in kinds]

    # Sources

    FULL = {
        "x": "number", "text": "text", "answer": "text", "tokens": "ids", "label": "text",
        "score": "nulls", "flag": "flag",
    }  # fmt: skip

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
            options = {k: v for k, v in options.items() if k != ""} | {"as": name, "": options[""][1:]}
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
        columns = {"x": "number", "text": "text", "answer": "text", "label": "text", "score": "nulls"}
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
            self.columns = {**self.columns, **{name: "text" for name in options["text"]}}
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
        columns = {"x": "number", "tokens": "ids"} if which == "map" else {"x": "number", "half": "real"}
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

    def _part(self, kinds: Sequence[tuple[int, str]], most: int = 0) -> Drawing:
        """A source of several, with a few stages of its own."""
        part = Drawing(self.d)
        part.start(self.d.weighted(kinds))
        if most:
            part.add("take", by_place=[most])
        return part

    def _together(self, parts: list[Drawing], columns: dict[str, str]) -> list[Any]:
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

    # Stages before and after the order of rows

    def _deal_and_shuffle(self, rows: int = 97, deal: int = 72, shuffle: int = 65) -> None:
        steps = []
        if self.shards == 1 and self.d.chance(deal if self.source[0] != "node" else 5):
            self.shards = self.d.weighted([(5, 4), (5, 12), (3, 24), (2, 6), (2, 2), (1, 1), (1, 8)])
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
            self.add("part", by_place=[parts], part=self.d.pick(["train", "valid"]), **keyed, **seed)

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
        if "label" in self.columns and self.columns["label"] == "text" and "labels" not in self.columns:
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

    def _tokenize(self) -> None:
        assert self.columns is not None
        texts = self.of("text")
        options: dict[str, Any] = {}
        tokenizer = self.d.weighted([(6, "bytes"), (5, "$data.path('words.json')"), (1, "$functions.codes")])
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
                options: dict[str, Any] = {"padding": self.d.pick([1, 2])} if self.d.chance(60) else {}
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

    # The whole chain

    def body(self) -> None:
        """All stages after the source."""
        d = self.d
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
        if not mixed and not self.stream and d.chance(1 if self.shuffled or self.finite_uncounted else 11):
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
            blocks = self.source[0] in ("parquet", "arrow", "json", "csv", "text", "tar", "table", "paths")
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
        if self.columns is not None and {"text", "answer", "x"} <= set(self.columns) and d.chance(8):
            self._chat()
        texts = self.of("text") and not self.of("image")
        if texts and "input_ids" not in (self.columns or {}) and d.chance(38):
            self._tokenize()
        for _ in range(d.weighted([(5, 0), (4, 1), (2, 2)])):
            self._row_stage()
        if d.chance(18):
            self._keep()
        if d.chance(8):
            if self.columns is not None and self.columns.get("text") == "text" and "x" in self.columns:
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
            if not self.endless and not self.repeated and d.chance(20) and (self.shuffled or self.shards == 1):
                self.add(d.pick(["take", "skip"]), by_place=[d.pick([5, 11, 30])])
            return
        if how == "batch":
            options: dict[str, Any] = {"drop_last": True} if d.chance(30) else {}
            self.add("batch", by_place=[d.weighted([(6, 4), (3, 3), (3, 7), (1, 1), (1, 16)])], **options)
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
            function = d.pick(["counted", "jitter_batch", "first_of"] if rows else ["counted", "jitter_batch"])
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
            if d.chance(50) and self.scalar in ("int", "pair", "batches") and not self.of("words"):
                if self.columns is None:
                    self.add("collate")
            return
        columns = self.columns
        ragged = self.of("ids")
        uneven = self.of("image", "messages", "nulls", "words")
        if ragged and not self.of("image", "messages") and d.chance(75):
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
        how = d.weighted([(40, "plain"), (12, "arrow"), (12, "numpy"), (8, "torch"), (8, "fn"), (20, "rows")])
        if how == "plain" and (ragged or uneven):
            how = "rows"
        if how in ("numpy", "torch") and (ragged or self.of("image", "text", "bytes", "messages") or uneven):
            how = "arrow"
        if how == "arrow" and (self.python or self.of("image")):
            how = "rows"
        if how == "plain":
            self.add("collate")
        elif how == "arrow":
            self.add("collate", by_place=["$functions.arrow_names"] if d.chance(40) else [], format="arrow")
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
            until = d.weighted([(10, d.between(1, 9)), (2, "last"), (2, "end"), (2, d.between(5, 30)), (1, 0)])
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
    drawing = Drawing(draws)
    drawing.start(draws.weighted(SOURCES))
    drawing.body()
    return {"source": drawing.source, "stages": drawing.stages, "run": drawing.plan()}


def leaving(number: int, draws: Draws) -> Chain:
    """Chains of what will be left out: when it is, these go, and no others."""
    drawing = Drawing(draws)
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
        f"{ranks}{'w' if workers else ''}:{'' if until is None else until}" for ranks, workers, until in run["legs"]
    )
    return f"{' '.join([name, *(stage[0] for stage in chain['stages'])])} | {legs}"


def fingerprint(chain: Chain) -> str:
    """Tells whether a chain is still drawn as it was."""
    return sha256(json.dumps(chain).encode()).hexdigest()[:8]
