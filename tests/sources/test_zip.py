"""zip: the columns of several sources side by side."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from trainpipes.testing import digest

ROWS = 150


def table(name: str, rows: int = ROWS) -> pa.Table:
    return pa.table({name: range(rows), f"{name}_text": [f"{name}{n}" for n in range(rows)]})


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., tp.Pipeline]:
    """Makes a pipeline of a folder of Parquet files of 150 rows, in row groups of so many."""

    def make(name: str, group: int, cuts: tuple[int, ...] = (0, 60, ROWS)) -> tp.Pipeline:
        folder = tmp_path / f"{name}-{group}-{len(cuts)}"
        folder.mkdir(exist_ok=True)
        for number in range(len(cuts) - 1):
            part = table(name).slice(cuts[number], cuts[number + 1] - cuts[number])
            pq.write_table(part, folder / f"{number}.parquet", row_group_size=group)
        return tp.list_files(folder).read_parquet()

    return make


def together(rows: Any, *names: str) -> bool:
    """Whether there are rows, and all columns of each have the same number."""
    found = [{int(row[name]) for name in names} for row in rows]
    return bool(found) and all(len(numbers) == 1 for numbers in found)


# What comes out


def test_row_k_stands_beside_row_k_wherever_blocks_end(files):
    a, b = files("a", 10), files("b", 7, (0, 1, 1, 99, ROWS))
    assert list(a.zip(b)) == [
        {"a": n, "a_text": f"a{n}", "b": n, "b_text": f"b{n}"} for n in range(ROWS)
    ]
    assert len(tp.zip(a, b).batch(32)) == 5
    for shards, buffer in ((1, 9), (4, 20), (6, 500)):
        pipe = b.zip(a).sharding_filter(shards).shuffle(buffer, seed=2)
        rows = [row for batch in pipe.batch(5) for row in batch]
        assert together(rows, "a", "b")
        assert sorted(row["a"] for row in rows) == list(range(ROWS))


def test_the_order_is_that_of_the_source_that_is_cut_most_coarsely(files):
    """Whichever comes first; sources that are read anywhere adapt to it."""
    coarse, fine, held = files("a", 30), files("b", 4), tp.from_arrow(table("c"))
    alone = [row["a"] for row in coarse.shuffle(20, seed=1)]
    for pipe in (coarse.zip(fine, held), held.zip(fine, coarse), fine.zip(coarse)):
        assert [row["a"] for row in pipe.shuffle(20, seed=1)] == alone
        assert together(pipe.shuffle(20, seed=1), "a", "b")


def test_columns_keep_their_types_and_come_in_the_order_of_the_sources(files):
    small = tp.from_arrow(
        pa.table({"c": pa.array([[n] for n in range(ROWS)], pa.list_(pa.int16()))})
    )
    batch = next(iter(files("a", 10).zip(small).batch(4).collate(format="arrow")))
    assert batch.schema.names == ["a", "a_text", "c"]
    assert batch.schema.field("c").type == pa.list_(pa.int16())
    batches = files("a", 10).select("a").zip(small).shuffle(30).batch(4).pad_collate()
    pairs = [pair for b in batches for pair in zip(b["a"].tolist(), b["c"].tolist(), strict=True)]
    assert sorted(pairs) == [(n, [n]) for n in range(ROWS)]


def test_each_source_has_stages_of_its_own(files, tmp_path):
    tp.write_memmap(tmp_path / "labels", {"label": np.arange(ROWS), "part": np.ones((ROWS, 3))})
    pipe = tp.zip(
        files("a", 10).tokenize("bytes", "a_text").rename({"input_ids": "ids"}),
        tp.from_memmap(tmp_path / "labels"),
        files("b", 7).drop_columns("b_text").map(lambda row: {"b": row["b"] + 0}),
    )
    rows = list(pipe.sharding_filter(4).shuffle(16, seed=3))
    assert all(bytes(row["ids"]) == f"a{row['label']}".encode() for row in rows)
    assert together(rows, "label", "b")
    batch = next(iter(pipe.select("label", "part", "b").batch(5).collate()))
    assert batch["part"].shape == (5, 3)
    assert batch["label"].tolist() == batch["b"].tolist() == list(range(5))


def test_tensors_stay_tensors_and_python_objects_python_objects():
    x, y = torch.arange(6).reshape(3, 2), torch.tensor([0, 1, 0])
    assert [tuple(map(torch.Tensor.tolist, row)) for row in tp.from_tensors(x).zip(tp.from_tensors(y))] == [
        ([0, 1], 0), ([2, 3], 1), ([4, 5], 0),
    ]  # fmt: skip
    named = tp.from_tensors(x=x).zip(tp.from_tensors(y=y))
    assert [type(value) for row in named for value in row.values()] == [torch.Tensor] * 6
    one, other = object(), object()
    objects = tp.from_dataset([{"x": one}, {"x": other}]).zip(tp.from_dataset([{"y": 1}, {"y": 2}]))
    assert list(objects) == [{"x": one, "y": 1}, {"x": other, "y": 2}]
    assert list(tp.zip(tp.from_dataset([(1, 2)]), tp.from_dataset([(3,)]))) == [(1, 2, 3)]


def test_rows_can_be_left_out_of_each_source(files):
    a, b = files("a", 10), files("b", 7)
    pipe = a.skip(12).take(100).zip(b.take(112).skip(12))
    assert [row["a"] for row in pipe] == list(range(12, 112))
    assert together(pipe.sharding_filter(2).shuffle(8), "a", "b")
    shifted = a.skip(1).zip(b.take(ROWS - 1))
    assert [row["a"] - row["b"] for row in shifted.shuffle(8)] == [1] * (ROWS - 1)
    held = tp.from_arrow(table("c")).skip(1).zip(tp.from_tensors(d=np.arange(ROWS - 1)))
    assert [row["c"] - row["d"] for row in held.shuffle(scope="global")] == [1] * (ROWS - 1)
    assert together(pipe.skip(3).take(5), "a", "b")
    assert [row["a"] for row in pipe.skip(3).take(2)] == [15, 16]


# Zips of zips, and the like


def test_a_zip_is_a_source_like_others(files):
    a, b, c = files("a", 10), files("b", 7), files("c", 40)
    said = str(a.zip(b).batch(4).explain())
    assert all(part in said for part in ("2, side by side", "15 of up to 10 rows", "1: rows"))
    nested = a.zip(b.zip(c.rename({"c_text": "d"})))
    assert together(nested.sharding_filter(2).shuffle(16), "a", "b", "c")
    assert nested.batch(1).explain().rows == ROWS
    itself = a.zip(a.rename({"a": "again", "a_text": "t"}))
    assert together(itself.shuffle(20), "a", "again")
    joined = tp.concat(a.zip(b), a.zip(b).take(10))
    assert together(joined.sharding_filter(2).shuffle(16), "a", "b")
    joined = tp.concat(a, a.take(20)).zip(tp.concat(b.take(50), b.skip(30)))
    assert [(row["a"], row["b"]) for row in joined] == list(
        zip([*range(ROWS), *range(20)], [*range(50), *range(30, ROWS)], strict=True)
    )
    mixed = tp.mix({"one": a.zip(b).shuffle(20), "two": a.zip(b).shuffle(9)}, output_column="whose")
    assert together(mixed.sharding_filter(2), "a", "b")
    shifted = a.skip(17).take(100).zip(tp.from_tensors(d=np.arange(ROWS)).skip(17).take(100))
    both = list(shifted.zip(c.take(100)).shuffle(10, seed=3))
    assert sorted(row["c"] for row in both) == list(range(100))
    assert all(row["a"] == row["d"] == row["c"] + 17 for row in both)


def test_a_cache_above_knows_both_sources(files, tmp_path):
    a, b = files("a", 10), files("b", 7)

    def make(*, times: int, column: str = "b_text") -> tp.Pipeline:
        rows = a.zip(b.skip(0)).tokenize("bytes", column).with_columns(scaled(times))
        return rows.cache(tmp_path / "kept").shuffle(20, seed=1)

    first = [digest(row) for row in make(times=1)]
    kept = set((tmp_path / "kept").rglob("*.arrow"))
    assert [digest(row) for row in make(times=1)] == first
    assert set((tmp_path / "kept").rglob("*.arrow")) == kept
    assert kept
    path = next((tmp_path / "b-7-3").glob("0*"))
    pq.write_table(pq.read_table(path).slice(0, 59), path)
    with pytest.raises(tp.DataError, match=r"150 rows, source 1, .*149"):
        list(make(times=1))
    pq.write_table(table("b").slice(0, 60).set_column(0, "b", pa.array([7] * 60)), path)
    assert sum(row["b"] == 7 for row in make(times=1)) == 60


def scaled(times: int) -> Callable[[Any], Any]:
    def scale(columns: Any) -> Any:
        return {"scaled": pc.multiply(columns["a"], times)}

    return scale


def test_empty_sources_make_an_empty_zip():
    none = tp.from_arrow(table("a", 0))
    assert list(none.zip(tp.from_arrow(table("b", 0)))) == []
    assert len(none.zip(tp.from_arrow(table("b", 3)).take(0)).batch(4)) == 0


# Who a row is, and where it stands


def test_a_row_is_who_it_is_in_the_first_source(files):
    a, b = files("a", 10), files("b", 7)
    alone = {row["a"] for row in a.split({"x": 0.5, "y": 0.5})["x"]}
    assert {row["a"] for row in a.zip(b).split({"x": 0.5, "y": 0.5})["x"]} == alone
    assert {row["a"] for row in a.skip(9).zip(b.skip(9)).split({"x": 0.5, "y": 0.5})["x"]} == {
        n for n in alone if n > 8
    }
    assert [row["index"] for row in a.zip(b).enumerate()] == list(range(ROWS))


def fails(row: dict[str, Any]) -> dict[str, Any]:
    if row["b"] == 99:
        raise ValueError("no")
    return row


def test_errors_name_the_file_and_row_of_the_source(files):
    a, b = files("a", 10), files("b", 7)
    zipped, where = a.zip(b.map(fails)), "b-7-3/1.parquet, row group 5, row 39"
    for pipe, said in (
        (zipped.sharding_filter(2).shuffle(20).batch(4), where),
        (tp.concat(a.zip(b), zipped), where),
        (a.take(98).zip(b.map(fails).skip(52)), where),
        (tp.mix({"m": zipped}), "source 'm', "),
        (tp.mix({"m": zipped}), where),
        (a.zip(b).map(fails), "a-10-3/1.parquet, row group 3, row 39"),
    ):
        with pytest.raises(ValueError, match="no") as caught:
            list(pipe)
        assert said in caught.value.__notes__[0]


# Where it runs


class Counting(tp.Source):
    """Rows in blocks of a size; which rows are read is kept."""

    name_: str
    size: int
    log: Any = None
    holds_data = True
    free = frozenset({"log"})

    def open(self) -> tp.RowSource:
        return CountedRows(self.name_, self.size, self.log)


class CountedRows(tp.RowSource):
    def __init__(self, name: str, size: int, log: list[tuple[int, int]]) -> None:
        self._name, self._size, self._log = name, size, log
        self.lengths = np.diff(np.append(np.arange(0, ROWS, size), ROWS))

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        self._log.append((block, stop - start))
        return table(self._name).slice(block * self._size + start, stop - start)

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": ROWS}


def test_each_row_is_read_once_and_a_resume_reads_little():
    logs: tuple[list[Any], list[Any]] = ([], [])
    sources = [
        Counting(name, size, log) for name, size, log in zip("ab", (10, 7), logs, strict=True)
    ]
    one, other = (tp.Pipeline([source]) for source in sources)
    pipe = one.zip(other).sharding_filter(2).shuffle(20, seed=1).batch(5)
    whole = [digest(item) for item in pipe]
    for log in logs:
        assert sum(rows for _, rows in log) <= ROWS + 2  # one looked at for its columns
        log.clear()
    again = one.zip(other).sharding_filter(2).shuffle(20, seed=1).batch(5)
    again.load_state_dict(again.state_at(27))
    assert [digest(item) for item in again] == whole[27:]
    for log in logs:
        assert sum(rows for _, rows in log) <= 2 * 40 + 2  # a window of each shard


def test_blocks_of_remote_files_that_are_cut_alike_are_fetched_as_by_each_alone(counted):
    rng = np.random.default_rng(1)
    for name, group in (("a", 400), ("b", 400), ("c", 390)):
        noise = pa.array(rng.bytes(32) for _ in range(8_000))
        sink = pa.BufferOutputStream()
        rows = table(name, 8_000).append_column(f"{name}_noise", noise)
        pq.write_table(rows, sink, row_group_size=group)
        counted.pipe_file(f"/d/{name}.parquet", sink.getvalue().to_pybytes())
    a, b, c = (tp.read_parquet(f"counted://d/{name}.parquet", index=False) for name in "abc")

    def fetched(pipe: tp.Pipeline, *names: str) -> int:
        pipe = pipe.sharding_filter(2).shuffle(1_000, seed=1)
        len(pipe)
        counted.fetched = 0
        assert together(pipe, *names)
        return counted.fetched

    alone = fetched(a, "a") + fetched(b, "b")
    assert fetched(a.zip(b), "a", "b") < 1.2 * alone  # not each block for both sides
    assert (
        alone < fetched(a.zip(c), "a", "c") < 2 * alone
    )  # of c, most blocks for both of their sides


# The record


def test_a_state_names_the_source_that_differs(files):
    state = files("a", 10).zip(files("b", 7)).batch(4).state_dict()
    with pytest.raises(tp.StateError, match="data/sources/1"):
        files("a", 10).zip(files("b", 8)).batch(4).load_state_dict(state or {})
    with pytest.raises(tp.StateError, match="stages/zip/sources/1"):
        files("a", 10).zip(files("b", 7).select("b")).batch(4).load_state_dict(state or {})
    with pytest.raises(tp.StateError, match="stages"):
        tp.concat(files("a", 10), files("b", 7)).batch(4).load_state_dict(state or {})


# What is refused


def test_other_counts_are_refused_before_the_first_row_and_both_are_named(files):
    a, b = files("a", 10), files("b", 7)
    for look in (len, lambda pipe: next(iter(pipe)), lambda pipe: pipe.explain()):
        with pytest.raises(
            tp.DataError, match=r"source 0, .*has 150 rows, source 2, .*149: .*take\(149\)"
        ):
            look(tp.zip(a, b, tp.from_arrow(table("c")).skip(1)).batch(2))
    with pytest.raises(tp.DataError, match=r"source 0, .*has 150 rows, source 1, .* 0: "):
        list(a.zip(tp.from_arrow(table("c", 0))))


def test_names_that_clash_are_refused_with_a_way_out(files):
    a, held = files("a", 10), tp.from_tensors(a=np.arange(ROWS))
    said = r"sources 0 and 1 both have a column 'a': .*rename\(\{'a': \.\.\.\}\).* drop_columns"
    with pytest.raises(tp.ConfigError, match=said):
        len(a.zip(a.select("a")))  # known before a row is read
    for pipe in (a.zip(held), held.zip(held), a.zip(a.map(dict)), a.map(dict).zip(a.map(dict))):
        with pytest.raises(tp.ConfigError, match=said):
            list(pipe.shuffle(9))
    assert together(a.zip(held.rename({"a": "b"})), "a", "b")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda rows: tp.zip(), "must be one pipeline or more, got"),
        (lambda rows: rows.zip([1]), "must be one pipeline or more, got"),
        (lambda rows: rows.zip(rows.shuffle(3)), r"shuffle\(3\) in source 1 .* put shuffle\(\) after zip"),
        (lambda rows: rows.zip(rows.filter(pc.field("x") > 1)), r"source 1 .*put filter\(\) after zip"),
        (lambda rows: rows.zip(rows.batch(2)), r"put batch\(\) after zip"),
        (lambda rows: rows.sharding_filter(2).zip(rows), r"put sharding_filter\(\) after"),
        (lambda rows: rows.zip(rows.cache("x")), r"put cache\(\) after zip"),
        (lambda rows: rows.distributed(rank=0, world_size=2).zip(rows), r"source 0 is distributed\(\)"),
        (lambda rows: list(rows.zip(tp.from_iterable(list))), "source 1, from_iterable.* is a stream"),
        (lambda rows: list(rows.zip(tp.mix({"a": rows}))), "source 1, mix.* is a stream"),
        (lambda rows: rows.sharding_filter(3).windows(2),
         r"sharding_filter\(3\) does not .* put sharding_filter\(\) after windows\(\)$"),
        (lambda _: tp.from_tensors(torch.eye(2).to_sparse()), r"dense tensors, such as x\.to_dense\(\)"),
        (lambda rows: tp.concat(rows, [1]), "must be one pipeline or more, got"),
        (lambda rows: tp.concat(rows.filter(pc.field("x") > 1)), "does not keep each row"),
        (lambda rows: tp.concat(rows.batch(2)), r"put batch\(\) after concat"),
        (lambda rows: list(tp.concat(rows, tp.from_iterable(list))), "source 1, .* is a stream"),
        (
            lambda rows: tp.concat(
                rows.mask_tokens(column="x", mask_token_id=1, special_ids=[], vocab_size=9)
            ),
            "in every epoch",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_one_of_several_is_refused(made, message):
    with pytest.raises(tp.ConfigError, match=message):
        made(tp.from_arrow(pa.table({"x": [1, 2]})))


def test_for_folds_an_error_gives_a_line_that_works():
    rows = tp.from_arrow(pa.table({"x": range(20)}))
    parts = rows.split(dict.fromkeys("abcde", 0.2))
    with pytest.raises(tp.ConfigError, match=r"put split\(\) after concat\(\)") as caught:
        tp.concat(*[parts[name] for name in "abcd"])
    line = re.search(r"rows\.enumerate.*!= 0\)", str(caught.value))[0]
    train = [row["x"] for row in eval(line, {"rows": rows}).shuffle(9, seed=1)]
    held_out = [row["x"] for row in eval(line.replace("!=", "=="), {"rows": rows})]
    assert len(train) == 16
    assert sorted(train + held_out) == [*range(20)]


def test_rows_without_columns_are_refused_beside_columns():
    rows = tp.from_arrow(pa.table({"x": [1, 2]}))
    for first, other, said in (
        (rows, tp.from_dataset([1, 2]), "source 0 has Arrow columns x, source 1 Python objects"),
        (rows, tp.from_tensors(torch.arange(2)), "source 0 has Arrow columns x, source 1 tensors"),
        (
            tp.from_dataset([1, 2]),
            tp.from_dataset([{"x": 1}] * 2),
            "a row that is no dict, but a int",
        ),
    ):
        with pytest.raises(tp.SchemaError, match=said):
            list(first.zip(other))
    objects = rows.map(dict).zip(tp.from_dataset([{"y": object()}] * 2))
    assert [row["x"] for row in objects] == [1, 2]


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_go_on_where_functions_are_called_to_read_a_window(threads):
    def pipe() -> tp.Pipeline:
        b = tp.from_tensors(b=torch.arange(301)).map(lambda row: dict(row), version="1")
        return tp.from_arrow(pa.table({"a": range(301)})).zip(b).shuffle(1000, seed=3).batch(4)

    expected = list(pipe())
    saved = pipe()
    batches = iter(saved)
    for _ in range(40):
        next(batches)
    loader = tp.Loader(pipe(), threads=threads)
    loader.load_state_dict(saved.state_dict())
    found: list[list[object]] = []
    thread = threading.Thread(target=lambda: found.append(list(loader)), daemon=True)
    thread.start()
    thread.join(30)
    assert found == [expected[40:]]
