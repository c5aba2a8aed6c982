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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import trainpipes as tp
from forked import Child
from trainpipes import ConfigError, Pipeline, SchemaError
from trainpipes.cache import kept_file
from trainpipes.cache.kept_file import locked
from trainpipes.interfaces.stage_kinds import Rows, TableStage
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
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_warned_of: None) -> Path:
    """A cache of its own for each test."""
    folder = tmp_path / "kept"
    monkeypatch.setenv("TRAINPIPES_CACHE", str(folder))
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

    def of(self, rows: Pipeline) -> Pipeline:
        return rows.map(self, schema=COUNTED).cache()

    def calls(self) -> list[int]:
        """Those since the last time. The file is left in place: another thread may be writing to it."""
        found = self.log.read_bytes()[self._seen :] if self.log.exists() else b""
        self._seen += len(found)
        return sorted(map(int, found.split()))


# The same rows, in the same order

WAYS: dict[str, Callable[[Pipeline, Callable[[Pipeline], Pipeline]], Pipeline]] = {
    "tokenized": lambda p, c: batches(c(p.tokenize("bytes"))).pad_collate(),
    "straight from the files": lambda p, c: batches(c(p)),
    "a filter below": lambda p, c: batches(c(p.filter(odd).tokenize("bytes"))).pad_collate(),
    "filters below and above": lambda p, c: (
        batches(c(p.filter(odd)).filter(pc.field("x") > 77).map(doubled))
    ),
    "columns of rows that a filter left": lambda p, c: c(p.filter(odd)).map(dict).rename({"x": "y"}).batch(8),
    "all dropped": lambda p, c: c(p.filter(pc.field("x") < 0)).shuffle(50).batch(4),
    "most dropped": lambda p, c: c(p.map(doubled).filter(lambda r: r["x"] > 600)).shuffle(50).batch(4),
    "a Python function": lambda p, c: batches(c(p.map(doubled))),
    "not shuffled": lambda p, c: c(p.tokenize("bytes")).sharding_filter(4).batch(8).pad_collate(),
    "not shuffled, a filter below": lambda p, c: c(p.filter(odd)).sharding_filter(4).batch(8),
    "not shuffled, most dropped": lambda p, c: c(p.map(doubled).filter(lambda r: r["x"] > 600)).batch(3),
    "strided": lambda p, c: c(p.filter(odd)).sharding_filter(3, split="stride").batch(5),
    "cut in file order": lambda p, c: batches(c(p.skip(13).take(200).tokenize("bytes"))).pad_collate(),
    "cut on the way": lambda p, c: c(p.filter(odd)).skip(9).take(90).batch(8),
    "rolling": lambda p, c: c(p.filter(odd)).sharding_filter(4).shuffle(40).repeat(3).batch(8),
    "files shuffled": lambda p, c: (
        c(tp.list_files(p.stages[0].options["urls"]).shuffle(seed=2).read_parquet(["x"])).batch(8)
    ),
}  # fmt: skip


def resumed(first: Pipeline, k: int, then: Pipeline) -> list[str]:
    """The digests of one pipeline from the state of another after so many batches."""
    iterator = iter(first)
    for _ in range(k):
        next(iterator)
    then.load_state_dict(first.state_dict() or {})
    return digests(then)[0]


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", WAYS)
def test_batches_and_states_are_the_same_with_and_without(
    name: str, data: Path, kept: Path
) -> None:
    with_it, without = (partial(WAYS[name], rows(data), c) for c in (Pipeline.cache, lambda p: p))
    reference = digests(without(), 2)
    for _ in range(2):  # cold, then warm
        assert digests(with_it(), 2) == reference
        assert entries(kept)
    whole = len(reference[0])
    for saving, loading in ((with_it, without), (without, with_it)):
        for k in (whole // 2, whole):
            # A state at an epoch's end goes on with the next.
            assert resumed(saving(), k, loading()) in (reference[0][k:], reference[1])


def test_a_state_of_a_pipeline_that_tokenizes_after_the_shuffle_loads(data: Path) -> None:
    def tokens(pipe: Pipeline) -> Pipeline:
        return pipe.tokenize("bytes").select("input_ids")

    def make(first: bool) -> Pipeline:
        pipe = rows(data).filter(odd)
        pipe = (tokens(pipe).cache() if first else pipe).sharding_filter(12).shuffle(60, seed=5)
        return (pipe if first else tokens(pipe)).batch(8).pad_collate()

    want = digests(make(False))[0]
    for first in (True, False):
        assert resumed(make(first), 5, make(not first)) == want[5:]


def test_rows_are_made_once_by_ranks_and_workers_too(data: Path, tmp_path: Path) -> None:
    count = Counted(tmp_path / "log")
    alone = digests(batches(rows(data).map(count, schema=COUNTED)))[0]
    count.calls()
    ranks = [batches(count.of(rows(data))).distributed(rank=r, world_size=2) for r in (0, 1)]
    found = [digests(pipe)[0] for pipe in ranks]
    assert [d for step in zip(*found, strict=False) for d in step] == alone[: 2 * len(found[1])]
    assert count.calls() == list(range(ROWS))
    assert digests(tp.Loader(batches(count.of(rows(data))), num_workers=2))[0] == alone
    assert digests(batches(count.of(rows(data))), 2)[0] == alone
    other = count.of(rows(data)).shuffle(99, seed=8).batch(3).collate(format="arrow")
    assert sum(map(len, other)) == ROWS
    moved = data.rename(tmp_path / "elsewhere")
    assert len(list(count.of(rows(moved)))) == ROWS
    assert count.calls() == []
    cold = digests(batches(rows(moved).map(count).cache()))
    assert len(count.calls()) > ROWS  # of the first rows the schema was found
    assert digests(batches(rows(moved).map(count).cache())) == cold
    assert count.calls() == []


def test_threads_share_a_cold_cache(data: Path, tmp_path: Path) -> None:
    count = Counted(tmp_path / "log")
    found: list[Any] = []

    def read() -> None:
        found.append([row["x"] for row in count.of(rows(data))])

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
    monkeypatch.setattr("trainpipes.stages.cache.FILE_ROWS", 100)
    pq.write_table(pa.table({"x": range(1000), "text": ["a"] * 1000}), tmp_path / "big.parquet")
    count = Counted(tmp_path / "log")
    pipe = count.of(tp.read_parquet(tmp_path / "big.parquet").filter(odd))
    assert len(next(iter(pipe.shuffle(100, max_bytes=5000).batch(4)))) == 4
    assert len(count.calls()) < 500
    assert [row["x"] for row in pipe] == list(range(1, 1000, 2))
    assert len(entries(kept)) == 10


def test_a_column_that_is_null_in_one_block_only_joins_the_others(data: Path) -> None:
    def sparse(row: dict[str, Any]) -> dict[str, Any]:
        low = row["x"] < 60
        return {"x": row["x"], "y": None if low else "y", "z": [] if low else [1.5]}

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


@pytest.mark.parametrize("wanted", [[1, 3], []])
def test_views_are_kept_where_rows_below_were_dropped(tmp_path: Path, wanted: list[int]) -> None:
    texts = ["a", "b" * 20, None, "d" * 30]
    columns = {
        "text": pa.array(texts, pa.string_view()),
        "bytes": pa.array([each and each.encode() for each in texts], pa.binary_view()),
        "list": pa.array([[each] for each in texts], pa.list_(pa.string_view())),
        "struct": pa.array([{"t": each} for each in texts], pa.struct([("t", pa.string_view())])),
    }
    table = pa.table({"x": range(4)} | columns)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    pipe = tp.read_arrow(tmp_path / "a.arrow").filter(pc.field("x").isin(wanted))
    for _ in range(2):  # cold, then warm
        assert list(pipe.cache()) == list(pipe)


def test_rows_of_a_table_in_memory_are_known_by_what_they_hold(tmp_path: Path) -> None:
    count = Counted(tmp_path / "log")

    def pipe(texts: list[str]) -> Pipeline:
        return count.of(tp.from_arrow(pa.table({"x": range(3), "text": texts})))

    assert [row["n"] for _ in range(2) for row in pipe(["a", "bb", "c"])] == [1, 2, 1] * 2
    assert count.calls() == [0, 1, 2]
    assert [row["n"] for row in pipe(["a", "bbb", "c"])] == [1, 3, 1]


# What makes rows others


def raw(file: Any) -> pa.Table:
    return pa.table({"raw": [file.read()]})


def lengths(data: Path, make: Callable[[Pipeline], Pipeline]) -> int:
    return sum(row["n"] for row in make(rows(data)))


def test_a_changed_file_with_the_same_footer_is_read_again(data: Path, kept: Path) -> None:
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


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: tp.read_bytes(folder).select("bytes"),
        tp.read_text,
        partial(tp.read_files, fn=raw),
    ],
)
def test_files_of_another_folder_are_told_apart_by_what_is_read_of_them_or_their_path(
    read: Any, tmp_path: Path
) -> None:
    for folder, part in {"train": b"a", "valid": b"A"}.items():
        (tmp_path / folder).mkdir()
        for n in range(2):  # as tar, zip and layers of images keep names, sizes and whole seconds
            path = tmp_path / folder / f"{n}.txt"
            path.write_bytes(b"." * 2000 + part + b"." * 2000)
            os.utime(path, (10**9, 10**9))
    for _ in range(2):  # cold, then warm
        for folder, part in {"train": "a", "valid": "A"}.items():
            kept = read(tmp_path / folder).cache()
            assert [str(*row.values()).count(part) for row in kept] == [1, 1]


def test_files_that_rows_name_are_those_of_their_folder(tmp_path: Path) -> None:
    (tmp_path / "names.jsonl").write_text('{"image": "a.png"}')
    shades = {"day": 200, "night": 9}
    for folder, shade in shades.items():
        (tmp_path / folder).mkdir()
        Image.new("L", (4, 4), shade).save(tmp_path / folder / "a.png")
    names = tp.read_json(tmp_path / "names.jsonl")
    for _ in range(2):  # cold, then warm
        for folder, shade in shades.items():
            (row,) = names.decode_image("image", mode="L", folder=tmp_path / folder).cache()
            assert np.max(row["image"]) == shade


def test_stages_columns_and_versions_keep_rows_apart(data: Path, kept: Path) -> None:
    read = tp.list_files(data).read_parquet
    pipes = [
        read(["x"]).cache(),
        read(["text"]).cache(),
        read(["text"]).tokenize("bytes").cache(),
        read(["text"]).tokenize("bytes", max_length=5).cache(),
        read(["text"]).tokenize("bytes", max_length=5).cache(version="2"),
        read(["text"]).tokenize("bytes").map(len_of).cache(),
        read(["text"]).tokenize("bytes").map(len_of, version="2").cache(),
    ]
    for number, pipe in enumerate(pipes, start=1):
        assert [len(list(pipe)) for _ in range(2)] == [ROWS] * 2
        assert len(entries(kept)) == 15 * number


def len_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": len(row["input_ids"])}


def test_a_version_stands_for_the_function(data: Path, kept: Path) -> None:
    one, two = (lambda row: {"n": row["x"]}), (lambda row: {"n": -row["x"]})
    assert lengths(data, lambda p: p.map(one, version="1").cache()) > 0
    assert lengths(data, lambda p: p.map(two, version="1").cache()) > 0  # as one says that it is
    assert lengths(data, lambda p: p.map(two, version="2").cache()) < 0


# Rows that Python made


def test_what_python_made_comes_back_with_its_types(data: Path) -> None:
    plain = {"d": float("nan"), "e": (1, 2), "f": None, "g": [0.5, None], "h": b"x", "i": True}

    def made(row: dict[str, Any]) -> dict[str, Any]:
        n = row["x"] % 4
        arrays = {"a": np.arange(n, dtype=np.int16), "b": torch.ones(n), "c": np.ones((2, 2))}
        return arrays | plain

    for _ in range(2):  # cold, then warm
        table = next(iter(rows(data).map(made).cache().batch(8).collate(format="arrow")))
        assert table.schema.field("a").type == pa.list_(pa.int16())
        assert table.schema.field("b").type == pa.list_(pa.float32())
        assert table.column("a").to_pylist()[:5] == [[], [0], [0, 1], [0, 1, 2], []]
        assert table.column("c").to_pylist()[0] == [[1.0, 1.0], [1.0, 1.0]]
        assert str(table.select([*plain]).to_pylist()[0]) == str(plain | {"e": [1, 2]})


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


# Files that are not what they were; tests/cache/test_cache_damage.py damages them at random


def test_a_damaged_entry_is_made_again_and_said_once(data: Path, kept: Path) -> None:
    want = digests(batches(text(data).cache()).pad_collate())
    for path in entries(kept)[::3]:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:-1])
    with pytest.warns(UserWarning, match=r"was damaged: .* made again.*check the disk") as caught:
        assert digests(batches(text(data).cache()).pad_collate()) == want
    assert len(caught) == 1
    about = [kept_file.read(path, {"rows": path.parent.name + path.stem}) for path in entries(kept)]
    assert len(about) == 15
    assert all(table is not None for table in about)


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


def test_room_is_kept_under_max_bytes_where_others_write_without_it(data: Path) -> None:
    list(rows(data).map(doubled).cache())
    most = int(2.5 * tp.cache.info().block_bytes)
    tp.cache.clear()
    for version, limit in (("1", most), ("2", None), ("3", most)):
        list(rows(data).map(doubled, version=version).cache(max_bytes=limit))
    assert 0 < tp.cache.info().block_bytes <= most


def test_kept_rows_are_no_input_where_they_lie_within_it(tmp_path: Path) -> None:
    tp.from_arrow(pa.table({"x": range(20)})).write_arrow(tmp_path / "in")
    for place in ("in", "in/inner"):
        for _ in range(2):
            pipe = (
                tp.read_arrow(tmp_path / "in")
                .map(lambda row: {"x": 2 * row["x"]})
                .cache(tmp_path / place)
            )
            assert [row["x"] for row in pipe] == [2 * n for n in range(20)]


# Where it cannot be kept


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "file"}, r"cannot be kept in .*goes on without.*cache\(path="),
        ({"max_bytes": 100}, r"max_bytes must be at least the size of an entry, got 100"),
    ],
)
def test_what_cannot_be_kept_is_said_once_and_made_each_time(
    options: Any, said: str, data: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)
    (data.parent / "file").write_text("no folder")
    want = digests(batches(text(data)).pad_collate(), 2)
    with pytest.warns(UserWarning, match=said) as caught:
        assert digests(batches(text(data).cache(**options)).pad_collate(), 2) == want
    assert len(caught) == 1
    assert not entries(kept)


def test_a_full_disk_is_said_once_and_leaves_nothing_half_written(data: Path, kept: Path) -> None:
    want = 2 * sum(len(row["input_ids"]) for row in text(data))

    def child(say: Callable[[Any], None]) -> None:
        rows = text(data).cache()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # No file may grow beyond 1000 bytes, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with warnings.catch_warnings(record=True, action="always") as caught:
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
    "after a skip on the way": (lambda d: rows(d).filter(odd).skip(3).cache(), r"put it before skip\(\)"),
    **{
        f"after {step}, which gives others in every epoch": (
            lambda d, step=step, options=options: getattr(rows(d), step)(**options).cache(),
            rf"other rows in every epoch.*put cache\(\) before {step}\(",
        )
        for step, options in {
            "map": {"fn": lambda row, rng: row, "rng": True},
            "mask_tokens": {"mask_token_id": 9, "vocab_size": 9, "special_ids": [0]},
            "flip": {}, "random_crop": {"size": 5}, "image_transform": {"transform": len},
        }.items()
    },
    "twice": (lambda d: rows(d).cache().cache(), r"has one cache\(\)"),
    "above an iterable": (lambda d: tp.from_iterable(list).cache(), r"from_iterable.* leave the cache out"),
    "above a dataset": (lambda d: tp.from_dataset([1, 2]).cache(), r"from_dataset.* gives others"),
    "above tensors": (lambda d: tp.from_tensors([1, 2]).cache(), r"from_tensors.* gives others"),
    "above names": (lambda d: tp.list_files(d).cache(), r"list_files.* gives others"),
    "at a URL": (lambda d: rows(d).cache("s3://bucket/x"), r"a path on this machine.*s3://bucket/x"),
    "nowhere": (lambda d: rows(d).cache(""), "must be a path, got ''"),
    "in no room": (lambda d: rows(d).cache(max_bytes=0), r"\(max_bytes\) must be a number of bytes.*got 0"),
    "of a version that is a number": (
        lambda d: rows(d).cache(version=2),  # type: ignore[arg-type]
        "version.* must be text, got 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISPLACED)
def test_it_is_refused_where_it_cannot_stand(name: str, data: Path) -> None:
    make, said = MISPLACED[name]
    with pytest.raises(ConfigError, match=said):
        make(data)


def test_arrays_of_several_dimensions_come_in_any_order_as_they_were(data: Path) -> None:
    def made(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": row["x"], "image": np.full((3, 4, 5), row["x"] % 256, np.uint8)}

    for _ in range(2):  # cold, then warm
        for row in rows(data).map(made).cache().shuffle(10, seed=1):
            assert (row["image"] == row["x"] % 256).all()
        some = rows(data).filter(odd).map(made).cache()  # with holes
        assert all((row["image"] == row["x"] % 256).all() for row in some.shuffle(10))


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


def test_who_finds_an_entry_being_made_takes_others_first_and_waits_for_it_for_a_while(
    data: Path, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Counted(tmp_path / "log")
    pipe = count.of(rows(data))
    list(pipe)
    (path,) = (p for p in entries(kept) if pa.ipc.open_stream(p).read_all()["x"][0].as_py() == 0)
    tp.cache.clear()
    count.calls()
    with locked(path.with_suffix(".lock")):  # let go as by a process that is killed
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
    thread.join(20)
    assert found == list(range(ROWS))
    assert count.calls() == list(range(25))
    tp.cache.clear()
    monkeypatch.setattr("trainpipes.stages.cache.PATIENCE", 0.05)
    with locked(path.with_suffix(".lock")):
        assert len(list(count.of(rows(data)))) == ROWS


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
