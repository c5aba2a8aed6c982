"""truncate, add_labels, skip, enumerate, flat_map: what they give, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import SubsetRandomSampler

import trainpipes as tp
from drawn import examples

IDS = [[1, 2, 3, 4, 5], [], [6], [7, 8]]


def ids(**columns: Any) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"input_ids": pa.array(IDS, pa.list_(pa.int32())), **columns}))


# truncate


@examples(60)
@given(
    st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=20),
    st.integers(0, 10), st.sampled_from(["left", "right"]),
)  # fmt: skip
def test_lists_are_cut_as_slices_are(rows: list[list[int]], length: int, side: Any) -> None:
    table = pa.table({"input_ids": pa.array(rows, pa.list_(pa.int64())), "n": range(len(rows))})
    found = list(tp.from_arrow(table).truncate(length, truncation_side=side)) if rows else []
    cut = [row[:length] if side == "right" else row[max(0, len(row) - length) :] for row in rows]
    assert [row["input_ids"] for row in found] == cut
    assert [row["n"] for row in found] == list(range(len(rows)))


def test_the_usual_columns_are_cut_together_and_others_where_they_are_named() -> None:
    rows = ids(labels=[[0] * len(i) for i in IDS], other=[[0.5] * len(i) for i in IDS])
    first = next(iter(rows.truncate(2)))
    assert first == {"input_ids": [1, 2], "labels": [0, 0], "other": [0.5] * 5}
    first = next(iter(rows.truncate(2, columns="other")))
    assert (len(first["input_ids"]), first["other"]) == (5, [0.5, 0.5])


@pytest.mark.parametrize("nullable", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.field("item", pa.int64(), False)),
        pa.list_view(pa.int64()), pa.large_list_view(pa.int64()),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_are_cut_go_with_rows_that_are_not(kind: pa.DataType, nullable: bool) -> None:
    given_ids = [[1] * 3] * 20_000 + [[1] * 9] * 20_000
    schema = pa.schema([pa.field("input_ids", kind, nullable)])
    rows = tp.from_arrow(pa.table([pa.array(given_ids, kind)], schema=schema)).truncate(4)
    (batch,) = rows.batch(40_000).collate(format="arrow")
    assert batch["input_ids"].to_pylist() == [row[:4] for row in given_ids]


# add_labels


def test_labels_are_the_ids_where_asked() -> None:
    rows = ids(mask=[[0, 1, 1, 0, 1], [], [0], [1, 1]])
    labels = [row["labels"] for row in rows.add_labels(where="mask", ignore=[3, 8])]
    assert labels == [[-100, 2, -100, -100, 5], [], [-100], [7, -100]]
    assert [row["labels"] for row in rows.add_labels()] == IDS
    batch = next(iter(rows.add_labels().batch(2).pad_collate()))
    assert batch["labels"].tolist() == [[1, 2, 3, 4, 5], [-100] * 5]


def test_padding_is_no_label() -> None:
    masks = [[1, 1, 1, 0, 0], [], [0], [1, 1]]
    labels = [row["labels"] for row in ids(attention_mask=masks).add_labels()]
    assert labels == [[1, 2, 3, -100, -100], [], [-100], IDS[3]]
    with pytest.raises(tp.DataError, match="got 1 where 'input_ids' has 2"):
        list(ids(attention_mask=[[1] * 5, [], [1], [1]]).add_labels())


def test_a_mask_of_another_length_names_its_row(tmp_path: Path) -> None:
    table = pa.table({"input_ids": IDS, "mask": [[1] * 5, [], [1], [1]]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    with pytest.raises(tp.DataError, match="got 1 where 'input_ids' has 2") as caught:
        list(tp.list_files(tmp_path).read_parquet().add_labels(where="mask"))
    assert (caught.value.row_group, caught.value.row) == (1, 3)


# skip


@pytest.mark.parametrize("over", [0, 1, 5])
@pytest.mark.parametrize("drawn", [False, True], ids=["rows", "a sampler"])
def test_more_rows_are_skipped_than_there_are(drawn: bool, over: int) -> None:
    sampler = SubsetRandomSampler(range(10)) if drawn else None
    loader = tp.Loader(tp.from_dataset(range(10), sampler).skip(10 + over))
    assert len(loader) == 0
    assert list(loader) == []


# enumerate


def test_numbers_are_those_of_file_order_wherever_rows_come(tmp_path: Path) -> None:
    for number, start in enumerate((0, 30, 50)):
        table = pa.table({"x": range(start, (30, 50, 90)[number])})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=7)
    rows = tp.list_files(tmp_path).read_parquet()
    assert list(rows.enumerate()) == [{"x": n, "index": n} for n in range(90)]
    mixed = rows.enumerate(output_column="n").sharding_filter(4).shuffle(20).batch(4)
    for _ in range(2):
        found = [row for batch in mixed for row in batch]
        assert sorted(row["n"] for row in found) == list(range(90))
        assert all(row["n"] == row["x"] for row in found)
    later = rows.skip(4).take(9).enumerate(10)
    assert list(later) == [{"x": n + 4, "index": n + 10} for n in range(9)]


def test_rows_without_names_come_as_pairs() -> None:
    assert list(tp.from_tensors(torch.tensor([5, 6])).enumerate()) == [
        (0, (torch.tensor(5),)),
        (1, (torch.tensor(6),)),
    ]
    assert list(tp.from_dataset(["a", "b"]).enumerate(1)) == [(1, "a"), (2, "b")]
    assert list(tp.from_iterable(lambda: "ab").enumerate().batch(2)) == [[(0, "a"), (1, "b")]]
    assert list(tp.from_tensors(x=torch.tensor([5])).enumerate()) == [{"x": 5, "index": 0}]


def test_what_would_give_other_numbers_is_refused_below() -> None:
    flat = ids().flat_map(lambda row: [row])
    for below in (ids().shuffle(3), ids().batch(2), ids().filter(bool), flat, ids().sample(0.5)):
        with pytest.raises(tp.ConfigError, match=r"rows in file order: put it before .*\(\)"):
            below.enumerate()
    for stage in (lambda: flat.sample(0.5), lambda: ids().batch(2).flat_map(list)):
        with pytest.raises(tp.ConfigError, match=r"put it before (flat_map|batch)\(\)"):
            stage()


# flat_map


def several(row: dict[str, Any]) -> Iterator[dict[str, int]]:
    return ({"x": row["x"], "k": k} for k in range(row["x"] % 5 * 100))


def test_rows_are_those_of_a_plain_loop_in_its_order() -> None:
    rows = tp.from_arrow(pa.table({"x": range(23)}))
    expected = [made for x in range(23) for made in several({"x": x})]
    assert list(rows.flat_map(several)) == expected
    endless = tp.from_dataset([7]).flat_map(count).batch(4)
    assert list(islice(endless, 2)) == [[7, 8, 9, 10], [11, 12, 13, 14]]
    assert list(rows.repeat(2).flat_map(several).batch(7)) == [
        (expected * 2)[k : k + 7] for k in range(0, 2 * len(expected), 7)
    ]
    shared = rows.sharding_filter(4).shuffle(9).flat_map(several)
    assert sorted((r["x"], r["k"]) for r in shared) == [(r["x"], r["k"]) for r in expected]


def test_a_resume_goes_on_within_one_rows_rows() -> None:
    calls = []

    def long(row: int) -> Iterator[int]:
        calls.append(row)
        return iter(range(row * 1000, row * 1000 + 900))

    def make() -> tp.Pipeline:
        return tp.from_dataset([1, 2, 3]).flat_map(long, version="1")

    iterator = iter(make())
    list(islice(iterator, 1300))
    state = json.loads(json.dumps(iterator.state_dict()))
    assert json.loads(state["shard-0000"])["row"] == 400
    calls.clear()
    pipe = make()
    pipe.load_state_dict(state)
    assert list(pipe) == [*range(2400, 2900), *range(3000, 3900)]
    assert calls == [2, 3]


def test_one_that_gives_fewer_than_a_state_says_is_refused() -> None:
    pipe = tp.from_dataset([5]).flat_map(range, version="1")
    iterator = iter(pipe)
    list(islice(iterator, 4))
    fewer = tp.from_dataset([5]).flat_map(lambda n: range(n - 2), version="1")
    fewer.load_state_dict(iterator.state_dict())
    said = "after 4 rows made of one row, of which the function now makes 3"
    with pytest.raises(tp.StateError, match=said):
        next(iter(fewer))


@pytest.mark.parametrize("bad", ["text", {"a": 1}, None, 5])
def test_what_is_no_series_of_rows_is_refused_with_its_row(bad: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(9)}), tmp_path / "x.parquet", row_group_size=4)
    rows = tp.list_files(tmp_path).read_parquet()
    pipe = rows.flat_map(lambda row: bad if row["x"] == 6 else [row])
    with pytest.raises(tp.DataError, match="the function returns rows") as caught:
        list(pipe)
    assert (caught.value.row_group, caught.value.row) == (1, 6)


def test_a_function_that_fails_names_the_row() -> None:
    def fails(row: int) -> Iterator[int]:
        yield row
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        list(tp.from_dataset([3, 4]).flat_map(fails))
    assert "row 0" in caught.value.__notes__[0]
    with pytest.raises(tp.DataError, match="a row is None"):
        list(tp.from_dataset([3]).flat_map(lambda row: [None]))


@dataclass(frozen=True)
class Frozen(Exception):
    """An error that takes no attributes."""

    code: int


def test_an_error_that_takes_no_attributes_is_raised_as_it_is() -> None:
    def fails(row: int) -> int:
        raise Frozen(row)

    for pipe in (tp.from_dataset([3]).map(fails), tp.from_dataset([3]).filter(fails)):
        with pytest.raises(Frozen) as caught:
            list(pipe)
        assert caught.value.code == 3


def test_an_answer_of_a_predicate_that_is_neither_true_nor_false_names_the_row() -> None:
    with pytest.raises(ValueError, match="ambiguous") as caught:
        list(tp.from_dataset([3, 4]).filter(lambda row: np.arange(row - 2) < 9))
    assert "row 1" in caught.value.__notes__[0]


# All


CHAINS = {
    "batch": (lambda pipe: pipe.batch(32), 32),
    "take": (lambda pipe: pipe.take(900), 8),
    "flat_map": (lambda pipe: pipe.flat_map(lambda row: [row]), 9),
    "map": (lambda pipe: pipe.batch(32).map(list), 32),
}


@pytest.mark.parametrize("name", CHAINS)
def test_items_that_were_given_are_not_held(name: str) -> None:
    alive = most = 0

    class Image:
        def __init__(self, number: int) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    chain, bound = CHAINS[name]
    for item in chain(tp.from_dataset(range(1000)).map(Image)):
        del item
    assert 0 < most <= bound
    assert not alive
