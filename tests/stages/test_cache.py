"""``cache``: rows made once, the same as without, whatever happens to the files they are kept in."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from trainpipes import ConfigError, Pipeline, SchemaError
from trainpipes._internal import messages as warn_once
from trainpipes.cache import kept_file
from trainpipes.cache.kept_file import locked
from trainpipes.interfaces.stage_kinds import Rows, TableStage
from trainpipes.stages import block_cache
from trainpipes.testing import digest

ROWS = 330


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three files of 110 rows in row groups of 25."""
    folder = tmp_path / "data"
    folder.mkdir()
    for n in range(3):
        write(folder / f"part-{n}.parquet", 110 * n)
    return folder


def write(path: Path, first: int, rows: int = 110, word: str = "row") -> None:
    ids = range(first, first + rows)
    columns = {"x": ids, "text": [f"{word} {i} " + "and more " * (i % 7) for i in ids]}
    pq.write_table(pa.table(columns), path, row_group_size=25)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test."""
    folder = tmp_path / "kept"
    monkeypatch.setenv("TRAINPIPES_CACHE", str(folder))
    monkeypatch.setattr(warn_once, "_warned", set())
    return folder


def rows(data: Path) -> Pipeline:
    return tp.list_files(data).read_parquet()


def text(data: Path) -> Pipeline:
    return rows(data).tokenize("bytes")


def batches(pipe: Pipeline) -> Pipeline:
    return pipe.sharding_filter(12).shuffle(60, seed=5).batch(8)


def digests(pipe: Any, epochs: int = 1) -> list[list[str]]:
    return [[digest(batch) for batch in pipe] for _ in range(epochs)]


def odd(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 2)


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": 2 * row["x"], "length": len(row["text"])}


def refuse(row: dict[str, Any]) -> dict[str, Any]:
    if row["x"] == 171:
        raise ValueError("no")
    return row


def entries(kept: Path) -> list[Path]:
    return sorted(kept.glob("rows/*/*.arrow"))


#: What ``Counted`` returns: where it is given, nothing is called to find it.
COUNTED = pa.schema([("x", pa.int64()), ("n", pa.int64())])


class Counted:
    """A function of a row that counts its calls, in a file so that other processes count along."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._seen = 0

    def fingerprint(self) -> str:
        return "counted"

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        with open(self.log, "ab", buffering=0) as file:
            file.write(b"%d\n" % row["x"])
        return {"x": row["x"], "n": len(row["text"])}

    def calls(self) -> list[int]:
        """Those since the last time. The file is left in place: another thread may be writing to it."""
        found = self.log.read_bytes()[self._seen :] if self.log.exists() else b""
        self._seen += len(found)
        return sorted(map(int, found.split()))


class Child:
    """A process that runs a function, which it gives a way to say something. At the end it is killed."""

    def __init__(self, function: Callable[[Callable[[Any], None]], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._said, say = context.Pipe(duplex=False)
        self._process = context.Process(target=function, args=(say.send,))
        self._process.start()
        say.close()

    def hear(self) -> Any:
        assert self._said.poll(30)
        return self._said.recv()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


# The same rows, in the same order

WAYS: dict[str, Callable[[Pipeline, Callable[[Pipeline], Pipeline]], Pipeline]] = {
    "tokenized": lambda p, c: batches(c(p.tokenize("bytes"))).pad_collate(),
    "straight from the files": lambda p, c: batches(c(p)),
    "a filter below": lambda p, c: batches(c(p.filter(odd).tokenize("bytes"))).pad_collate(),
    "filters below and above": lambda p, c: batches(
        c(p.filter(odd)).filter(pc.field("x") > 77).map(doubled)
    ),
    "all dropped": lambda p, c: c(p.filter(pc.field("x") < 0)).shuffle(50).batch(4),
    "most dropped": lambda p, c: (
        c(p.map(doubled).filter(lambda r: r["x"] > 600)).shuffle(50).batch(4)
    ),
    "a Python function": lambda p, c: batches(c(p.map(doubled))),
    "not shuffled": lambda p, c: c(p.tokenize("bytes")).sharding_filter(4).batch(8).pad_collate(),
    "not shuffled, a filter below": lambda p, c: c(p.filter(odd)).sharding_filter(4).batch(8),
    "not shuffled, most dropped": lambda p, c: c(
        p.map(doubled).filter(lambda r: r["x"] > 600)
    ).batch(3),
    "strided": lambda p, c: c(p.filter(odd)).sharding_filter(3, split="stride").batch(5),
    "cut in file order": lambda p, c: batches(
        c(p.skip(13).take(200).tokenize("bytes"))
    ).pad_collate(),
    "cut on the way": lambda p, c: c(p.filter(odd)).skip(9).take(90).batch(8),
    "rolling": lambda p, c: c(p.filter(odd)).sharding_filter(4).shuffle(40).repeat(3).batch(8),
    "files shuffled": lambda p, c: c(
        tp.list_files(p.stages[0].options["urls"]).shuffle(seed=2).read_parquet(["x"])
    ).batch(8),
}


@pytest.mark.filterwarnings("ignore:an epoch of this pipeline gives nothing")
@pytest.mark.parametrize("name", WAYS)
def test_batches_are_the_same_and_states_load_with_and_without(
    name: str, data: Path, kept: Path
) -> None:
    with_it, without = (
        partial(WAYS[name], rows(data), c) for c in (lambda p: p.cache(), lambda p: p)
    )
    reference = digests(without(), 2)
    for _ in range(2):  # cold, then warm
        assert digests(with_it(), 2) == reference
        assert entries(kept)
    for saving, loading in ((with_it, without), (without, with_it), (with_it, with_it)):
        whole = len(reference[0])
        for k in sorted({0, min(1, whole), whole // 2, whole}):
            pipe = saving()
            iterator = iter(pipe)
            for _ in range(k):
                next(iterator)
            state = pipe.state_dict()
            resumed = loading()
            assert state is not None
            resumed.load_state_dict(state)
            found = digests(resumed)[0]
            # A state at an epoch's end goes on with the next.
            assert found in (reference[0][k:], reference[1])


def test_a_state_of_a_pipeline_that_tokenizes_after_the_shuffle_loads(data: Path) -> None:
    def make(first: bool, c: Callable[[Pipeline], Pipeline]) -> Pipeline:
        pipe = rows(data).filter(odd)
        pipe = c(pipe.tokenize("bytes").select("input_ids")) if first else pipe
        pipe = pipe.sharding_filter(12).shuffle(60, seed=5)
        return (
            (pipe if first else pipe.tokenize("bytes").select("input_ids")).batch(8).pad_collate()
        )

    plain = make(False, lambda p: p)
    want = digests(plain)[0]
    for saving, loading in ((True, False), (False, True)):
        pipe = make(saving, lambda p: p.cache())
        iterator = iter(pipe)
        for _ in range(5):
            next(iterator)
        state = pipe.state_dict()
        resumed = make(loading, lambda p: p.cache())
        assert state is not None
        resumed.load_state_dict(state)
        assert digests(resumed)[0] == want[5:]


def test_rows_are_made_once(data: Path, tmp_path: Path) -> None:
    count = Counted(tmp_path / "log")
    pipe = batches(rows(data).map(count, schema=COUNTED).cache())
    first = list(pipe)
    assert count.calls() == list(range(ROWS))
    assert len(list(pipe)) == len(first)
    assert len(list(batches(rows(data).map(count, schema=COUNTED).cache()))) == len(first)
    other = (
        rows(data)
        .map(count, schema=COUNTED)
        .cache()
        .shuffle(99, seed=8)
        .batch(3)
        .collate(format="arrow")
    )
    assert sum(map(len, other)) == ROWS
    assert count.calls() == []


def test_ranks_and_workers_make_no_row_twice_and_see_each_once(data: Path, tmp_path: Path) -> None:
    count = Counted(tmp_path / "log")
    alone = digests(batches(rows(data).map(count, schema=COUNTED)))[0]
    count.calls()
    ranks = [
        batches(rows(data).map(count, schema=COUNTED).cache()).distributed(rank=r, world_size=2)
        for r in (0, 1)
    ]
    found = [digests(pipe)[0] for pipe in ranks]
    assert [d for step in zip(*found, strict=False) for d in step] == alone[: 2 * len(found[1])]
    assert count.calls() == list(range(ROWS))
    loader = tp.Loader(batches(rows(data).map(count, schema=COUNTED).cache()), num_workers=2)
    assert digests(loader)[0] == alone
    assert count.calls() == []


def test_threads_share_a_cold_cache(data: Path, tmp_path: Path) -> None:
    count = Counted(tmp_path / "log")
    found: list[Any] = []

    def read() -> None:
        found.append([row["x"] for row in rows(data).map(count, schema=COUNTED).cache()])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(ROWS))] * 4
    assert sorted(count.calls()) == list(range(ROWS))


def test_rows_keep_their_identity_where_a_filter_below_dropped_some(data: Path) -> None:
    for _ in range(2):  # cold, then warm
        for pipe in (
            batches(rows(data).filter(odd).cache().map(refuse)),
            rows(data).filter(odd).cache().map(refuse),
        ):
            with pytest.raises(ValueError, match="no") as caught:
                list(pipe)
            assert f"{data}/part-1.parquet, row group 2, row 61" in str(caught.value.__notes__)


def test_columns_are_found_of_rows_of_which_a_filter_below_dropped_some(data: Path) -> None:
    for _ in range(2):  # cold, then warm
        pipe = rows(data).filter(odd).cache().map(dict).rename({"x": "y"})
        assert [row["y"] for row in pipe] == list(range(1, ROWS, 2))


def test_an_error_below_names_the_row_and_leaves_nothing_behind(data: Path, kept: Path) -> None:
    with pytest.raises(ValueError, match="no") as caught:
        list(rows(data).filter(odd).map(refuse).cache())
    assert f"{data}/part-1.parquet, row group 2, row 61" in str(caught.value.__notes__)
    assert len(entries(kept)) == 7  # the row groups before
    assert not [path for path in kept.rglob("*") if path.suffix in (".part", ".lock")]


# What is kept


def test_an_entry_is_an_arrow_stream_mapped_into_memory(data: Path, kept: Path) -> None:
    list(batches(text(data).cache()).pad_collate())
    assert len(entries(kept)) == 15
    with pa.memory_map(str(entries(kept)[0])) as source:
        table = pa.ipc.open_stream(source).read_all()
    assert table.schema.field("input_ids").type == pa.list_(pa.int32())
    plan = text(data).cache().batch(8)._iteration.plan
    assert plan.inputs.cached_blocks is not None
    gc.collect()  # what earlier tests left may be freed at any time
    before = pa.total_allocated_bytes()
    block = plan.inputs.cached_blocks.read([(3, 2, 9)], plan.inputs.source.reader())
    assert pa.total_allocated_bytes() <= before  # the rows lie in the file
    assert block.ids.tolist() == list(range(77, 84))


def test_a_large_row_group_is_kept_in_parts(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "FILE_ROWS", 100)
    pq.write_table(pa.table({"x": range(1000), "text": ["a"] * 1000}), tmp_path / "big.parquet")
    count = Counted(tmp_path / "log")
    pipe = (
        tp.list_files(tmp_path / "big.parquet")
        .read_parquet()
        .filter(odd)
        .map(count, schema=COUNTED)
        .cache()
    )
    first = next(iter(pipe.shuffle(100, max_bytes=5000).batch(4)))
    assert len(first) == 4
    assert len(count.calls()) < 500
    found = [row["x"] for row in pipe]
    assert found == list(range(1, 1000, 2))
    assert len(entries(kept)) == 10


def test_a_column_that_is_null_in_one_block_only_joins_the_others(data: Path) -> None:
    def sparse(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "x": row["x"],
            "y": None if row["x"] < 60 else "y",
            "z": [] if row["x"] < 60 else [1.5],
        }

    want = [sparse(row) for row in rows(data)]
    assert [row for _ in range(2) for row in rows(data).map(sparse).cache()] == want * 2
    shuffled = rows(data).map(sparse).cache().shuffle(200).batch(50)
    assert sorted((r for b in shuffled for r in b), key=lambda r: r["x"]) == want


def test_dictionary_columns_are_kept(data: Path) -> None:
    def coded(table: pa.Table) -> pa.Table:
        return table.set_column(1, "text", table.column("text").dictionary_encode())

    pipe = rows(data).map_batches(coded)
    assert [list(pipe.cache().shuffle(100).batch(20)) for _ in range(2)] == [
        list(pipe.shuffle(100).batch(20))
    ] * 2


def test_rows_of_a_table_in_memory_are_known_by_what_they_hold(tmp_path: Path) -> None:
    count = Counted(tmp_path / "log")

    def pipe(texts: list[str]) -> Pipeline:
        return (
            tp.from_arrow(pa.table({"x": range(3), "text": texts}))
            .map(count, schema=COUNTED)
            .cache()
        )

    assert [row["n"] for _ in range(2) for row in pipe(["a", "bb", "c"])] == [1, 2, 1] * 2
    assert count.calls() == [0, 1, 2]
    assert [row["n"] for row in pipe(["a", "bbb", "c"])] == [1, 3, 1]


# What makes rows others


def lengths(data: Path, make: Callable[[Pipeline], Pipeline]) -> int:
    return sum(row["n"] for row in make(rows(data)))


def test_a_changed_file_is_read_again_even_if_its_footer_is_the_same(
    data: Path, kept: Path
) -> None:
    columns = {"x": pa.array([1, 5, 9]), "text": ["aa", "bb", "cc"]}
    path = data / "part-1.parquet"
    pq.write_table(
        pa.table(columns), path, use_dictionary=False, compression="none", write_statistics=False
    )
    before, size = [row["text"] for row in rows(data).cache()], path.stat().st_size
    path.write_bytes(path.read_bytes().replace(b"bb", b"BB"))
    os.utime(path, ns=(1, 1))
    assert path.stat().st_size == size
    after = [row["text"] for row in rows(data).cache()]
    assert (before[111], after[111]) == ("bb", "BB")
    assert len(entries(kept)) == 5 + 1 + 5 + 1  # only the one that changed


def test_data_that_was_moved_is_known_again(data: Path, tmp_path: Path) -> None:
    count = Counted(tmp_path / "log")
    list(rows(data).map(count, schema=COUNTED).cache())
    count.calls()
    moved = data.rename(tmp_path / "elsewhere")
    assert len(list(rows(moved).map(count, schema=COUNTED).cache())) == ROWS
    assert count.calls() == []


def test_stages_columns_and_versions_keep_rows_apart(data: Path, kept: Path) -> None:
    read = tp.list_files(data).read_parquet
    for number, pipe in enumerate(
        [
            read(["x"]).cache(),
            read(["text"]).cache(),
            read(["text"]).tokenize("bytes").cache(),
            read(["text"]).tokenize("bytes", max_length=5).cache(),
            read(["text"]).tokenize("bytes", max_length=5).cache(version="2"),
            read(["text"]).tokenize("bytes").map(len_of).cache(),
            read(["text"]).tokenize("bytes").map(len_of, version="2").cache(),
        ],
        start=1,
    ):
        for _ in range(2):
            assert len(list(pipe)) == ROWS
        assert len(entries(kept)) == 15 * number


def len_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": len(row["input_ids"])}


def test_functions_of_one_name_are_told_apart_by_what_they_do(data: Path, kept: Path) -> None:
    def times(k: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda row: {"n": k * row["x"]}

    def with_default(k: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda row, k=k: {"n": k * row["x"]}

    total = sum(range(ROWS))
    for function in (
        lambda row: {"n": row["x"]},
        lambda row: {"n": row["x"] * 1},
        times(1),
        with_default(1),
        partial(multiplied, 1),
        Times(1).of,
        Times(1),
    ):
        assert lengths(data, lambda p, f=function: p.map(f).cache()) == total
    for function in (
        lambda row: {"n": row["x"] + row["x"]},
        times(2),
        with_default(2),
        partial(multiplied, 2),
        Times(2).of,
        Times(2),
    ):
        assert lengths(data, lambda p, f=function: p.map(f).cache()) == 2 * total
    before = len(entries(kept))
    assert lengths(data, lambda p: p.map(times(2)).cache()) == 2 * total
    assert len(entries(kept)) == before  # the same function made anew is the same


SCRIPT = """
def helper(x):
    return {k} * x
FACTOR = {k}
calls = 0
def by_helper(row):
    global calls
    calls += 1
    return {{"n": helper(row["x"])}}
def by_constant(row):
    return {{"n": [FACTOR * n for n in [row["x"]]][0]}}
"""


def test_helpers_and_constants_of_a_script_count_and_its_counters_do_not(
    data: Path, kept: Path
) -> None:
    total = sum(range(ROWS))
    for k, known in ((1, 0), (2, 0), (1, 30), (2, 30)):
        script: dict[str, Any] = {"__name__": "script"}
        exec(SCRIPT.format(k=k), script)
        before = len(entries(kept))
        for name in ("by_helper", "by_constant"):
            for _ in range(2):
                assert lengths(data, lambda p, f=script[name]: p.map(f).cache()) == k * total
        assert len(entries(kept)) == before + 30 - known


def multiplied(k: int, row: dict[str, Any]) -> dict[str, Any]:
    return {"n": k * row["x"]}


class Times:
    def __init__(self, k: int) -> None:
        self.k = k

    def of(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"n": self.k * row["x"]}

    __call__ = of


def test_a_version_stands_for_the_function(data: Path, kept: Path) -> None:
    one, two = (lambda row: {"n": row["x"]}), (lambda row: {"n": -row["x"]})
    assert lengths(data, lambda p: p.map(one, version="1").cache()) > 0
    assert lengths(data, lambda p: p.map(two, version="1").cache()) > 0  # as one says that it is
    assert lengths(data, lambda p: p.map(two, version="2").cache()) < 0


# Rows that Python made


def test_arrays_keep_their_dtype(data: Path) -> None:
    def arrays(row: dict[str, Any]) -> dict[str, Any]:
        n = row["x"] % 4
        return {
            "a": np.arange(n, dtype=np.int16),
            "b": torch.ones(n),
            "c": np.float32(0.5),
            "d": np.ones((2, 2)),
        }

    for _ in range(2):
        pipe = rows(data).map(arrays).cache().batch(8).collate(format="arrow")
        table = next(iter(pipe))
        assert table.schema.field("a").type == pa.list_(pa.int16())
        assert table.schema.field("b").type == pa.list_(pa.float32())
        assert table.column("a").to_pylist()[:5] == [[], [0], [0, 1], [0, 1, 2], []]
        assert table.column("d").to_pylist()[0] == [[1.0, 1.0], [1.0, 1.0]]


REFUSED = {
    "no dict": (lambda row: (row["x"],), "is no dict, got tuple"),
    "objects": (lambda row: {"x": object()}, "Arrow columns cannot hold"),
    "huge": (lambda row: {"x": 1 << 80}, "the column holds int64"),
    "keys": (lambda row: {1: 2}, r"has the key 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_of_which_no_columns_can_be_made_are_refused(name: str, data: Path) -> None:
    function, said = REFUSED[name]
    with pytest.raises(SchemaError, match=f"cache.. works on columns.*{said}"):
        list(rows(data).map(function).cache())


def test_rows_with_other_keys_come_back_with_those_of_all(data: Path) -> None:
    pipe = rows(data).map(lambda row: {"x": {"a": 1}} if row["x"] % 2 else {"x": {"b": 2}, "y": 3})
    first = {"x": {"a": None, "b": 2}, "y": 3}
    second = {"x": {"a": 1, "b": None}, "y": None}
    assert [list(pipe.cache())[:2] for _ in range(2)] == [[first, second]] * 2


def test_a_warm_cache_calls_no_function(data: Path, tmp_path: Path) -> None:
    count = Counted(tmp_path / "log")
    pipe = batches(rows(data).map(count).cache())
    cold = digests(pipe)
    assert len(count.calls()) > ROWS  # of the first rows the schema was found
    assert digests(batches(rows(data).map(count).cache())) == cold
    assert count.calls() == []


def test_types_are_those_of_the_datas_first_rows_in_all_entries(data: Path, kept: Path) -> None:
    def mixed(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": row["x"] + 0.5 if row["x"] < first else row["x"]}

    first = 0
    whole = [row["x"] for row in rows(data).map(mixed, version="1").cache()]
    assert {type(x) for x in whole} == {int}
    first = -1
    write(data / "a.parquet", -2, 3)  # comes first, and is not whole
    for _ in range(2):
        whole = [row["x"] for row in rows(data).map(mixed, version="1").cache()]
        assert {type(x) for x in whole} == {float}
        assert whole == [-1.5, -1, 0, *range(ROWS)]


def test_which_row_it_is_is_said(data: Path) -> None:
    for odd_one in (object(), "text", [1], 1 << 70):
        with pytest.raises(SchemaError, match=r"part-1\.parquet, row group 2, row 61\)") as caught:
            list(rows(data).map(lambda r, o=odd_one: {"y": o if r["x"] == 171 else r["x"]}).cache())
        assert (caught.value.row_group, caught.value.row) == (2, 61)
        assert caught.value.path == f"{data}/part-1.parquet"


def test_nan_tuples_and_none_come_back(data: Path) -> None:
    def function(row: dict[str, Any]) -> dict[str, Any]:
        return {"a": float("nan"), "b": (1, 2), "c": None, "d": [0.5, None], "e": b"x", "f": True}

    for _ in range(2):
        row = next(iter(rows(data).map(function).cache()))
        assert row["a"] != row["a"]
        assert {**row, "a": 0} == {
            "a": 0,
            "b": [1, 2],
            "c": None,
            "d": [0.5, None],
            "e": b"x",
            "f": True,
        }


# Files that are not what they were


#: What an entry may become; tests/cache/test_cache_damage.py damages them at random.
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut by a byte": lambda content: content[:-1],
    "longer": lambda content: content + b"more",
    "zeros": lambda content: content[:600] + bytes(400) + content[1000:],
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_entry_is_made_again(how: str, data: Path, kept: Path) -> None:
    want = digests(batches(text(data).cache()).pad_collate())
    for path in entries(kept)[::3]:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(DAMAGES[how](content))
    with pytest.warns(UserWarning, match=r"was damaged: .* made again.*check the disk") as caught:
        assert digests(batches(text(data).cache()).pad_collate()) == want
    assert len(caught) == 1
    assert tp.cache.info().blocks == 15
    about = [kept_file.read(path, {"rows": path.parent.name + path.stem}) for path in entries(kept)]
    assert all(table is not None for table in about)


def test_another_entry_in_its_place_is_not_taken_for_it(data: Path, kept: Path) -> None:
    want = list(text(data).cache())
    first, second, *_ = entries(kept)
    first.unlink()
    os.link(second, first)
    assert list(text(data).cache()) == want


def test_what_is_removed_meanwhile_is_made_again(data: Path) -> None:
    want = digests(batches(text(data)).pad_collate())[0]
    found = []
    for n, batch in enumerate(batches(text(data).cache()).pad_collate()):
        found.append(digest(batch))
        if n % 5 == 0:
            tp.cache.clear()
    assert found == want


# How much is kept


def test_the_least_recently_used_go_first(data: Path, kept: Path) -> None:
    one = rows(data).cache()
    list(one)
    size = tp.cache.info().block_bytes
    for path in entries(kept):
        os.utime(path, ns=(1, 1))
    first = tp.list_files(data / "part-0.parquet").read_parquet().cache()
    list(first)  # names are relative to what is listed: other entries
    mine = set(entries(kept)) - {p for p in entries(kept) if p.stat().st_atime_ns == 1}
    assert len(mine) == 5
    most = size + sum(path.stat().st_size for path in mine)  # all that is there
    other = rows(data).map(doubled).cache(max_bytes=most)
    assert [row["x"] for row in other] == [2 * n for n in range(ROWS)]
    assert tp.cache.info().block_bytes <= most
    assert tp.cache.info().blocks < 15 + 5 + 15
    assert mine <= set(entries(kept))
    assert not any(path.stat().st_atime_ns == 1 for path in mine)


def test_room_is_kept_under_max_bytes_at_every_moment(data: Path) -> None:
    most = 6000
    want = digests(batches(text(data)).pad_collate(), 2)
    pipe, found = batches(text(data).cache(max_bytes="6 kB")).pad_collate(), []
    for _ in range(2):
        found.append([])
        # No threads: what info() says is of no one moment where others write meanwhile.
        for batch in tp.Loader(pipe, threads=0):
            assert tp.cache.info().block_bytes <= most
            found[-1].append(digest(batch))
    assert found == want
    assert tp.cache.info().blocks > 0


def test_an_entry_that_is_too_large_is_said_once(data: Path, kept: Path) -> None:
    want = digests(batches(text(data)).pad_collate(), 2)
    with pytest.warns(
        UserWarning, match=r"max_bytes must be at least the size of an entry, got 100"
    ) as caught:
        assert digests(batches(text(data).cache(max_bytes=100)).pad_collate(), 2) == want
    assert len(caught) == 1
    assert not entries(kept)


# Where it cannot be kept


def test_an_unwritable_folder_is_said_once_and_does_without(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    want = digests(batches(text(data)).pad_collate(), 2)
    with pytest.warns(
        UserWarning, match=r"cannot be kept in .*goes on without.*cache\(path="
    ) as caught:
        assert digests(batches(text(data).cache(tmp_path / "file")).pad_collate(), 2) == want
    assert len(caught) == 1


def test_a_full_disk_is_said_once_and_leaves_nothing_half_written(data: Path, kept: Path) -> None:
    want = 2 * sum(len(row["input_ids"]) for row in text(data))

    def child(say: Callable[[Any], None]) -> None:
        rows = text(data).cache()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # No file may grow beyond 1000 bytes, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = sum(len(row["input_ids"]) for _ in range(2) for row in rows)
        say((found, [str(w.message) for w in caught if "cache" in str(w.message)]))

    with Child(child) as process:
        found, said = process.hear()
    assert found == want
    assert len(said) == 1
    assert "goes on without" in said[0]
    assert not [path for path in kept.rglob("*") if path.is_file()]


def test_it_can_be_switched_off(data: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = digests(batches(text(data)).pad_collate())
    assert digests(batches(text(data).cache(kept, enabled=False)).pad_collate()) == want
    assert not [path for path in kept.rglob("*") if path.is_file()]
    monkeypatch.setenv("TRAINPIPES_CACHE", "off")
    pipe = batches(text(data).cache(kept)).pad_collate()
    assert digests(pipe) == want
    assert ("cache", "off") in pipe.explain().lines
    assert not entries(kept)


def test_explain_says_where_it_is_and_how_much_is_there(data: Path, kept: Path) -> None:
    pipe = batches(text(data).cache())
    assert dict(pipe.explain().lines)["cache"] == f"{kept}: 0 of 15 blocks kept, 0.0 MB"
    list(text(data).cache().take(60))
    assert dict(pipe.explain().lines)["cache"].startswith(f"{kept}: 3 of 15 blocks kept")


# Where it cannot stand

MISPLACED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "after a shuffle": (
        lambda d: text(d).shuffle(9).cache(),
        r"cache.. stands after shuffle.*put it before shuffle.*\.tokenize\(\.\.\.\)\.cache\(\)\.shuffle",
    ),
    "after a batch": (lambda d: text(d).batch(4).cache(), r"put it before batch\(\)"),
    "after a repeat": (lambda d: text(d).repeat().cache(), r"put it before repeat\(\)"),
    "after a skip on the way": (
        lambda d: rows(d).filter(odd).skip(3).cache(),
        r"put it before skip\(\)",
    ),
    "twice": (lambda d: rows(d).cache().cache(), r"has one cache\(\)"),
    "above an iterable": (
        lambda d: tp.from_iterable(list).cache(),
        r"from_iterable.* gives others: leave the cache out",
    ),
    "above a dataset": (lambda d: tp.from_dataset([1, 2]).cache(), r"from_dataset.* gives others"),
    "above tensors": (lambda d: tp.from_tensors([1, 2]).cache(), r"from_tensors.* gives others"),
    "above names": (lambda d: tp.list_files(d).cache(), r"list_files.* gives others"),
    "at a URL": (
        lambda d: rows(d).cache("s3://bucket/x"),
        r"a path on this machine.*s3://bucket/x",
    ),
    "nowhere": (lambda d: rows(d).cache(""), "must be a path, got ''"),
    "in no room": (
        lambda d: rows(d).cache(max_bytes=0),
        r"\(max_bytes\) must be a number of bytes.*got 0",
    ),
    "of a version that is a number": (
        lambda d: rows(d).cache(version=2),
        "version.* must be text, got 2",
    ),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", MISPLACED)
def test_it_is_refused_where_it_cannot_stand(name: str, data: Path) -> None:
    make, said = MISPLACED[name]
    with pytest.raises(ConfigError, match=said):
        make(data)


def test_a_stage_that_differs_from_epoch_to_epoch_is_refused_below(data: Path) -> None:
    from trainpipes.stages.map import Map

    class Noisy(Map, depends_on={"epoch"}):
        pass

    with pytest.raises(
        ConfigError, match=r"other rows in every epoch.*put cache\(\) before noisy\(\)"
    ):
        rows(data).then(Noisy(fn=doubled)).cache()


# Several processes


def test_two_processes_share_a_cold_cache_and_make_no_row_twice(data: Path, tmp_path: Path) -> None:
    count = Counted(tmp_path / "log")
    start = multiprocessing.get_context("fork").Barrier(2)

    def slowly(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.001)
        return count(row)

    def child(say: Callable[[Any], None]) -> None:
        pipe = batches(rows(data).map(slowly, schema=COUNTED).cache())
        start.wait(20)
        say(digests(pipe))

    with Child(child) as one, Child(child) as two:
        said = [one.hear(), two.hear()]
    assert said[0] == said[1]
    assert count.calls() == list(range(ROWS))
    assert said[0] == digests(batches(rows(data).map(count, schema=COUNTED)))
    assert tp.cache.info().blocks == 15


def test_a_process_killed_while_writing_leaves_nothing_that_is_taken_for_an_entry(
    data: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(say: Callable[[Any], None]) -> None:
        def stop(*_: object) -> None:  # all is written, nothing renamed
            say("written")
            time.sleep(60)

        monkeypatch.setattr(kept_file.os, "replace", stop)
        list(text(data).cache())

    with Child(child) as process:
        assert process.hear() == "written"
        waiting = text(data).cache()
    (left,) = kept.rglob("*.part")
    assert not entries(kept)
    assert list(waiting) == list(text(data))
    assert left.exists()  # it may be another's work
    os.utime(left, ns=(1, 1))
    list(rows(data).map(doubled).cache(max_bytes=1 << 30))
    assert not left.exists()
    assert not list(kept.rglob("*.lock"))


def lock_of_first(pipe: Pipeline, kept: Path) -> AbstractContextManager[bool]:
    """What keeps others from making the first row group again; none is kept afterwards."""
    list(pipe)
    (path,) = (path for path in entries(kept) if checked_rows(path)[0] == 0)
    tp.cache.clear()
    return locked(path.with_suffix(".lock"))


def checked_rows(path: Path) -> list[int]:
    with pa.memory_map(str(path)) as source:
        return list(pa.ipc.open_stream(source).read_all().column("x").to_pylist())


def test_who_finds_an_entry_being_made_takes_others_first_and_then_waits_for_it(
    data: Path, kept: Path, tmp_path: Path
) -> None:
    count = Counted(tmp_path / "log")
    pipe = rows(data).map(count, schema=COUNTED).cache()
    lock = lock_of_first(pipe, kept)
    count.calls()
    assert lock.__enter__()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(row["x"] for row in pipe))
    thread.start()
    calls: list[int] = []
    deadline = time.monotonic() + 20
    while len(calls) < ROWS - 25 and time.monotonic() < deadline:
        calls += count.calls()
        time.sleep(0.01)
    assert sorted(calls) == list(range(25, ROWS))
    assert thread.is_alive()
    lock.__exit__(None, None, None)  # as a process does that is killed
    thread.join(20)
    assert found == list(range(ROWS))
    assert count.calls() == list(range(25))


def test_one_does_not_wait_for_ever(
    data: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "PATIENCE", 0.05)
    lock = lock_of_first(rows(data).cache(), kept)
    assert lock.__enter__()
    assert len(list(rows(data).cache())) == ROWS
    lock.__exit__(None, None, None)


# What it is for


@pytest.mark.slow
def test_the_second_epoch_of_text_is_much_faster(tmp_path: Path) -> None:
    from tokenizer_fixtures import bpe

    words = " ".join(f"word{n % 97} of {n}" for n in range(60))
    for n in range(4):
        pq.write_table(
            pa.table({"text": [f"{n} {i} {words}" for i in range(4000)]}),
            tmp_path / f"{n}.parquet",
            row_group_size=1000,
        )

    def make(with_cache: bool) -> Pipeline:
        rows = tp.list_files(tmp_path / "*.parquet").read_parquet().tokenize(bpe())
        return (
            rows.cache(enabled=with_cache).sharding_filter(24).shuffle(4000).batch(32).pad_collate()
        )

    def seconds(pipe: Pipeline) -> float:
        started = time.perf_counter()
        for _ in pipe:
            pass
        return time.perf_counter() - started

    pipes = {with_cache: make(with_cache) for with_cache in (True, False)}
    first = {w: seconds(p) for w, p in pipes.items()}
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(3):
        for with_cache, pipe in pipes.items():
            taken[with_cache].append(seconds(pipe))
    ratio = sorted(taken[False])[1] / sorted(taken[True])[1]
    print(f"first epoch {first}, later ones {ratio:.1f} times as fast with the cache")  # noqa: T201
    assert ratio > 1.5


def test_nothing_is_warned_of_where_all_is_well(data: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert (
                sum(len(b["input_ids"]) for b in batches(text(data).cache()).pad_collate()) == ROWS
            )


def test_a_sample_of_rows_by_their_place_is_of_that_place(tmp_path: Path, kept: Path) -> None:
    folder = tmp_path / "data" / "en"
    folder.mkdir(parents=True)
    write(folder / "part.parquet", 0)

    def chosen(url: Path, c: Callable[[Pipeline], Pipeline]) -> list[int]:
        return [row["x"] for row in c(tp.list_files(url).read_parquet().sample(0.5))]

    want = [chosen(url, lambda p: p) for url in (folder, tmp_path / "data")]
    assert want[0] != want[1]
    for _ in range(2):
        assert [chosen(url, lambda p: p.cache()) for url in (folder, tmp_path / "data")] == want


class Numbered(TableStage, depends_on={"row"}):
    """Notes each row's number over all files."""

    def open(self) -> Callable[[pa.Table, Rows], pa.Table]:
        return lambda table, rows: table.append_column("number", pa.array(rows.ids))


def test_what_depends_on_a_rows_number_is_made_again_where_that_changes(data: Path) -> None:
    for _ in range(2):
        for order in ("012", "201"):
            files = [data / f"part-{n}.parquet" for n in order]
            found = tp.list_files(files).read_parquet().then(Numbered()).cache()
            assert [row["number"] for row in found] == list(range(ROWS))


def test_as_a_node_it_does_the_same(data: Path, kept: Path) -> None:
    from torchdata.nodes import Loader

    from trainpipes.nodes import Batch, Cache, ListFiles, PadCollate, ReadParquet, Shuffle, Tokenize

    def chain() -> Any:
        rows = ReadParquet(ListFiles(urls=data))
        return PadCollate(Batch(Shuffle(Cache(Tokenize(rows, "bytes")), 60, seed=5), 8))

    want = digests(text(data).shuffle(60, seed=5).batch(8).pad_collate())[0]
    for _ in range(2):
        assert [digest(batch) for batch in Loader(chain())] == want
    assert len(entries(kept)) == 15
