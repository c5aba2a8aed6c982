"""pack: what its rows hold, where they resume, and what it refuses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from trainpipes.columns.block import Block
from trainpipes.columns.run import Cursors, Run
from trainpipes.sources import read_arrow as arrow
from trainpipes.stages.batch import Batch as BatchStage
from trainpipes.stages.pack import Pack as PackStage

METHODS = ("best_fit", "first_fit", "concat")
EVERY = pytest.mark.parametrize("method", METHODS)


def ids_of(lengths: list[int]) -> list[list[int]]:
    """Documents whose ids say which token of which document they are."""
    return [[1 + 100 * d + k for k in range(n)] for d, n in enumerate(lengths)]


def table_of(lengths: list[int], **columns: Any) -> pa.Table:
    ids = pa.array(ids_of(lengths), pa.list_(pa.int32()))
    return pa.table({"input_ids": ids, **columns})


def source(lengths: list[int], **columns: Any) -> tp.Pipeline:
    return tp.from_arrow(table_of(lengths, **columns))


def segments(row: dict[str, Any]) -> list[list[int]]:
    """The documents of a packed row, as lists of ids."""
    last = max(row["segment_ids"])
    return [
        [i for i, s in zip(row["input_ids"], row["segment_ids"], strict=True) if s == number]
        for number in range(1, last + 1)
    ]


def check_row(row: dict[str, Any], length: int) -> None:
    """The columns of a row are what its segments say."""
    used = sum(s > 0 for s in row["segment_ids"])
    assert used > 0
    assert {len(values) for values in row.values()} == {length}
    parts = segments(row)
    assert [i for part in parts for i in part] == row["input_ids"][:used]
    numbers = [n for n, part in enumerate(parts, 1) for _ in part]
    assert row["segment_ids"] == numbers + [0] * (length - used)
    assert row["position_ids"][:used] == [k for part in parts for k in range(len(part))]
    assert row["labels"][:used] == [i if k else -100 for part in parts for k, i in enumerate(part)]
    assert row["input_ids"][used:] == [0] * (length - used)
    assert row["position_ids"][used:] == [0] * (length - used)
    assert row["labels"][used:] == [-100] * (length - used)


lengths = st.lists(st.integers(0, 30), max_size=60)
methods = st.sampled_from(METHODS)


@examples(150)
@given(
    lengths, methods, st.integers(1, 13), st.integers(1, 20),
    st.one_of(st.none(), st.integers(1, 4)), st.integers(1, 9),
)  # fmt: skip
def test_every_token_is_in_one_row_and_no_document_is_split_that_would_fit(
    lengths: list[int], method: Any, length: int, window: int, most: int | None, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow, "BLOCK_ROWS", block)
        pipe = source(lengths).pack(length, method=method, buffer_size=window, max_documents=most)
        rows = list(pipe)
    for row in rows:
        check_row(row, length)
        assert max(row["segment_ids"]) <= (most or length)
    found = [part for row in rows for part in segments(row)]
    tokens = Counter(i for part in found for i in part)
    assert tokens == Counter(i for ids in ids_of(lengths) for i in ids)
    if method != "concat":
        expected = [d[k : k + length] for d in ids_of(lengths) for k in range(0, len(d), length)]
        assert sorted(found) == sorted(expected)
    elif most is None:
        assert all(0 not in row["segment_ids"] for row in rows[:-1])


def cursor(pipe: tp.Pipeline, taken: int) -> dict[str, Any]:
    """The cursor of the only shard after so many items."""
    iterator = iter(tp.Pipeline(pipe.stages))
    for _ in range(taken):
        next(iterator)
    found: dict[str, Any] = json.loads(iterator.state_dict()["shard-0000"])
    del found["check"]
    return found


@pytest.mark.parametrize(
    ("lengths", "options", "expected"),
    [
        (
            [4, 4, 4, 4, 3, 3, 3, 3, 2],
            {"method": "first_fit", "buffer_size": 4},
            [(0, 0, 1), (0, 4, 0), (0, 4, 1), (0, 8, 0), (1, 0, 0)],
        ),
        ([3, 0, 20, 1, 2], {"method": "concat"}, [(0, 2, 5), (0, 2, 13), (0, 4, 0), (1, 0, 0)]),
    ],
)
def test_a_cursor_is_that_of_the_oldest_document_and_the_rows_or_tokens_used(
    lengths: list[int], options: Any, expected: list[Any]
) -> None:
    pipe = source(lengths).pack(8, **options)
    places = [cursor(pipe, k + 1) for k in range(len(expected))]
    assert [(p["below"]["window"], p["below"]["row"], p["row"]) for p in places] == expected
    assert [p["delivered"] for p in places] == [*range(1, len(expected) + 1)]


@EVERY
def test_positions_do_not_keep_what_is_passed(method: Any) -> None:
    class Below(Iterator[Run]):
        """Endless runs of 5 documents of 3 tokens, each with a state of its own."""

        number = 0

        def __next__(self) -> Run:
            self.number += 1
            table = table_of([3] * 5)
            base = {"epoch": 0, "window": self.number}
            return Run(Block(table, np.arange(5)), Cursors.counting(base, np.arange(6)))

    opened = PackStage(7, method=method, buffer_size=8).open(lambda state: Below(), {})
    batched = BatchStage(batch_size=3).open(lambda state: opened, {})
    runs = [opened, batched]
    for _ in range(100):
        assert max(len(next(source).cursors.bases) for source in runs) < 20


MIXED = [int(n) for n in np.random.Generator(np.random.Philox(3)).integers(0, 12, 40)]


def orders() -> dict[str, Any]:
    rows = source(MIXED).shuffle(16, seed=4)
    made = {m: rows.pack(10, method=m, buffer_size=16, seed=42) for m in METHODS}
    buckets = {
        "bucket_by_length": rows.bucket_by_length(3, buffer_size=20, num_buckets=3, seed=42),
        "bucket_by_length, tokens": rows.bucket_by_length(
            max_tokens=24, boundaries=[4, 8], buffer_size=20
        ),
    }
    found: dict[str, Any] = {
        m: [[[part[0] for part in segments(row)] for row in pipe] for _ in range(2)]
        for m, pipe in made.items()
    }
    for name, pipe in {**made, **buckets}.items():
        found[f"{name}, cursors"] = [cursor(pipe, k) for k in (0, 1, 4, 9)]
    for name, pipe in buckets.items():
        found[name] = [[[len(row["input_ids"]) for row in b] for b in pipe] for _ in range(2)]
    return found


def test_orders_are_those_that_earlier_versions_gave(golden: Any) -> None:
    golden("packed.json", orders())


@pytest.mark.parametrize("method", ["best_fit", "first_fit"])
def test_rows_of_a_window_are_mixed_anew_in_each_epoch_and_by_each_seed(method: Any) -> None:
    def order(seed: int, epochs: int) -> list[list[list[int]]]:
        pipe = source([7] * 30).shuffle(30).pack(8, method=method, buffer_size=30, seed=seed)
        return [[row["input_ids"] for row in pipe] for _ in range(epochs)]

    first, second = order(0, 2)
    assert first != second
    assert sorted(first) == sorted(second)
    assert order(1, 1) != [first]
    assert order(0, 2) == [first, second]


def test_a_row_has_its_documents_in_the_order_in_which_they_came() -> None:
    pipe = source([2, 6, 3, 5, 4, 4, 1, 7]).pack(16, buffer_size=8)
    for row in pipe:
        first = [part[0] for part in segments(row)]
        assert first == sorted(first)


# Columns


def test_labels_of_the_rows_are_packed_along() -> None:
    rows = tp.from_arrow(pa.table({"prompt": ["ab", "x"], "response": ["cde", "yz"]}))
    options: Any = {"concat": ["prompt", "response"], "labels": "response"}
    tokenized = rows.tokenize("bytes", add_eos=True, **options)
    (row,) = tokenized.pack(12, buffer_size=2)
    parts = [[97, 98, 99, 100, 101, 256], [120, 121, 122, 256]]
    assert segments(row) == parts
    assert row["labels"] == [-100, -100, 99, 100, 101, 256, -100, 121, 122, 256, -100, -100]
    assert row["input_ids"][10:] == [257, 257]  # the tokenizer's pad token


def test_other_columns_are_packed_where_they_are_named_and_left_out_where_not() -> None:
    weights = [[0.5] * 3, [2.0] * 2]
    rows = source([3, 2], weight=weights, name=["a", "b"])
    (row,) = rows.pack(6, along=["weight"])
    assert sorted(row) == ["input_ids", "labels", "position_ids", "segment_ids", "weight"]
    assert row["weight"] == [0.5, 0.5, 0.5, 2.0, 2.0, 0.0]
    (batch,) = rows.pack(6, along=["weight"]).batch(1).pad_collate()
    assert batch["weight"].dtype == torch.float32


def test_pad_collate_makes_tensors_and_says_where_sequences_start() -> None:
    rows = source([3, 2, 8, 5, 1, 4])
    batches = rows.pack(8, method="first_fit", buffer_size=6).batch(2)
    for batch, raw in zip(batches.pad_collate(), batches, strict=True):
        assert list(batch) == [
            "input_ids", "labels", "position_ids", "segment_ids", "cu_seqlens", "max_seqlen"
        ]  # fmt: skip
        for name in list(batch)[:4]:
            assert batch[name].dtype == torch.int64
            assert batch[name].tolist() == [row[name] for row in raw]
        sizes = []
        for row in raw:
            padded = 8 - sum(map(len, segments(row)))
            sizes += [*map(len, segments(row)), *([padded] if padded else [])]
        assert batch["cu_seqlens"].dtype == torch.int32
        assert batch["cu_seqlens"].tolist() == [0, *np.cumsum(sizes).tolist()]
        assert batch["max_seqlen"] == max(sizes)
    few = next(iter(rows.pack(8).batch(1).pad_collate(dtype=torch.int32)))
    assert {few[name].dtype for name in ("input_ids", "labels", "segment_ids")} == {torch.int32}
    bare = next(iter(rows.pack(8).select("input_ids").batch(1).pad_collate()))
    assert list(bare) == ["input_ids"]


# Options


@EVERY
@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_documents_longer_than_a_row_are_treated_as_asked(method: Any, overflow: Any) -> None:
    rows = list(source([3, 9, 4, 8]).pack(5, method=method, overflow=overflow))
    found = sorted(i for row in rows for part in segments(row) for i in part)
    kept = [ids for ids in ids_of([3, 9, 4, 8]) if overflow != "drop" or len(ids) <= 5]
    assert found == sorted(i for ids in kept for i in (ids if overflow == "split" else ids[:5]))


def test_a_document_that_is_too_long_is_refused_where_asked(tmp_path: Path) -> None:
    pq.write_table(table_of([3, 4, 9, 8]), tmp_path / "rows.parquet", row_group_size=2)
    pipe = tp.read_parquet(tmp_path).pack(5, overflow="raise")
    said = "at most 5 tokens, got one of 9; raise max_length"
    with pytest.raises(tp.DataError, match=said) as caught:
        list(pipe)
    error = caught.value
    place = str(tmp_path / "rows.parquet"), 1, 2
    assert (error.path, error.row_group, error.row) == place


def test_a_window_before_repeat_ends_with_the_epoch_and_after_it_does_not() -> None:
    rows = source([3, 3, 3])
    own = list(rows.pack(10, buffer_size=8).repeat(4).batch(1))
    assert len(own) == 4
    assert [len(segments(row)) for (row,) in own] == [3] * 4
    across = list(rows.repeat(4).pack(10, buffer_size=8))
    assert [len(segments(row)) for row in across] == [3] * 4
    assert sorted(len(segments(row)) for row in rows.repeat(4).pack(15)) == [2, 5, 5]
    joined = list(rows.repeat(4).pack(9, method="concat"))
    assert [0 in row["segment_ids"] for row in joined] == [False] * 4
    assert len(list(rows.repeat(4).pack(6, method="concat"))) == 6
    assert len(list(rows.pack(6, method="concat").repeat(4).batch(1))) == 8


def test_take_before_pack_counts_documents_and_after_it_rows() -> None:
    rows = source([4] * 20).shuffle(20)
    assert sum(len(segments(row)) for row in rows.take(7).pack(8)) == 7
    assert len(list(rows.pack(8, buffer_size=4).take(3))) == 3
    assert sum(len(segments(row)) for row in rows.skip(15).pack(8)) == 5


@EVERY
def test_documents_without_tokens_are_an_empty_epoch_and_refused_under_repeat(method: Any) -> None:
    assert list(source([]).pack(8, method=method)) == []
    assert list(source([0, 0, 0]).pack(8, method=method).batch(2)) == []
    for pipe in (
        source([0, 0]).repeat().pack(8, method=method),
        source([0, 0]).pack(8, method=method).repeat(),
        source([0, 0]).pack(8, method=method).repeat().batch(2),
        source([9, 9]).repeat().pack(8, method=method, overflow="drop").batch(1),
    ):
        with pytest.raises(tp.DataError, match="repeat"):
            next(iter(pipe))


# What is refused


@EVERY
def test_the_batch_size_of_packed_rows_can_change(method: Any) -> None:
    rows = source(MIXED * 3).sharding_filter(2).shuffle(30).pack(10, method=method, buffer_size=9)
    whole = Counter(tuple(row["input_ids"]) for batch in rows.batch(2) for row in batch)
    iterator = iter(first := rows.batch(2))
    taken = [tuple(row["input_ids"]) for _ in range(7) for row in next(iterator)]
    then = rows.batch(5)
    then.load_state_dict(first.state_dict(), allow_changes=["batch_size"])
    rest = [tuple(row["input_ids"]) for batch in then for row in batch]
    assert Counter(taken) + Counter(rest) == whole


LENGTHS = np.random.default_rng(3).integers(1, 25, 150).tolist()
DOCUMENTS = pa.table({"input_ids": [[d] * n for d, n in enumerate(LENGTHS)]})
ALLOWED = ["pack_length"]


def packed(
    length: int, *, shards: int = 4, times: int | None = 1, method: Any = "best_fit", size: int = 2
) -> tp.Pipeline:
    rows = tp.from_arrow(DOCUMENTS).sharding_filter(shards).shuffle(20, seed=1)
    pipe = rows.pack(length, method=method, buffer_size=8).batch(size)
    return pipe if times == 1 else pipe.repeat(times)


def drawn(source: Any, count: int | None = None) -> list[list[list[int]]]:
    return [[row["input_ids"] for row in batch] for batch in islice(iter(source), count)]


def loaded(state: dict[str, Any], length: int, **options: Any) -> tp.Pipeline:
    pipe = packed(length, **options)
    pipe.load_state_dict(json.loads(json.dumps(state)), allow_changes=ALLOWED)
    return pipe


def state_of_the_end(length: int = 32, **options: Any) -> dict[str, Any]:
    pipe = packed(length, **options)
    iterator = iter(pipe)
    assert drawn(iterator)
    return iterator.state_dict()


def second_epoch(length: int, **options: Any) -> list[list[list[int]]]:
    pipe = packed(length, **options)
    drawn(pipe)
    return drawn(pipe)


@EVERY
def test_the_next_epoch_after_an_epochs_end_has_the_new_length(method: Any) -> None:
    changed = loaded(state_of_the_end(method=method), 48, method=method)
    second = second_epoch(48, method=method)
    iterator = iter(changed)
    assert drawn(iterator, 5) == second[:5]
    pipe = packed(48, method=method)  # which resumes without allowing anything more
    pipe.load_state_dict(iterator.state_dict())
    assert drawn(pipe) == drawn(iterator) == second[5:]


def test_a_state_of_the_start_or_the_end_of_a_pass_takes_another_length_and_batch_size() -> None:
    start = packed(32).state_dict()
    assert start is not None
    assert drawn(loaded(start, 48)) == drawn(packed(48))
    pipe = packed(48, times=2)
    drawn(pipe)
    assert drawn(loaded(state_of_the_end(times=2), 48, times=2)) == drawn(pipe)
    both = packed(48, size=3)
    both.load_state_dict(state_of_the_end(), allow_changes=["batch_size", "pack_length"])
    assert drawn(both) == second_epoch(48, size=3)


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_one_shard_takes_it_between_two_epochs_of_a_pass(method: Any) -> None:
    options: dict[str, Any] = {"shards": 1, "times": 3, "method": method, "size": 1}
    count = len(drawn(packed(32, shards=1, method=method, size=1)))
    iterator = iter(packed(32, **options))
    drawn(iterator, count)
    found = drawn(loaded(iterator.state_dict(), 48, **options))
    second = second_epoch(48, shards=1, method=method, size=1)
    assert found[: len(second)] == second
    assert {len(row) for batch in found for row in batch} == {48}


def test_the_new_length_is_the_same_on_any_topology() -> None:
    state = state_of_the_end(times=2)
    whole = drawn(loaded(state, 48, times=2))
    loader = tp.Loader(packed(48, times=2), num_workers=2)
    loader.load_state_dict(state, allow_changes=ALLOWED)
    assert drawn(loader) == whole
    endless = packed(32, times=None).state_dict()
    assert endless is not None
    whole = drawn(loaded(endless, 48, times=None), 24)
    for world in (2, 4):
        parts = [
            drawn(_on(loaded(endless, 48, times=None), endless, rank, world), 24 // world)
            for rank in range(world)
        ]
        assert [parts[m % world][m // world] for m in range(24)] == whole


def _on(pipe: tp.Pipeline, state: dict[str, Any], rank: int, world: int) -> tp.Pipeline:
    own = pipe.distributed(rank=rank, world_size=world)
    own.load_state_dict(state, allow_changes=ALLOWED)
    return own


@pytest.mark.parametrize("times", [1, 2, None])
def test_within_an_epoch_it_is_refused_with_the_way_out(times: int | None) -> None:
    iterator = iter(packed(32, times=times))
    drawn(iterator, 6)
    state = iterator.state_dict()
    said = (
        r"pack/max_length: saved 32, now 48; it may change only between epochs, and shard-0000 is within "
        r"epoch 0 \(batches = 6\): load the state of an epoch's start or end, or continue with max_length=32"
    )
    with pytest.raises(tp.StateError, match=said):
        packed(48, times=times).load_state_dict(state, allow_changes=ALLOWED)
    again = packed(32, times=times)  # the same length is no change
    again.load_state_dict(state, allow_changes=ALLOWED)
    assert drawn(again, 3) == drawn(iterator, 3)


def test_only_what_is_allowed_changes() -> None:
    state = state_of_the_end()
    with pytest.raises(tp.StateError, match="stages/pack/max_length: saved 32, now 48"):
        packed(48).load_state_dict(state, allow_changes=["batch_size"])
    with pytest.raises(tp.StateError, match="stages/batch/batch_size: saved 2, now 3"):
        packed(48, size=3).load_state_dict(state, allow_changes=ALLOWED)
    with pytest.raises(tp.StateError, match="stages/pack/method"):
        packed(48, method="concat").load_state_dict(state, allow_changes=ALLOWED)


def test_a_stream_takes_it_at_the_start_and_at_the_end() -> None:
    def make(length: int) -> tp.Pipeline:
        rows = tp.from_iterable(DOCUMENTS.to_pylist, version="1").sharding_filter(2).shuffle(20)
        return rows.pack(length, buffer_size=8).batch(2)

    iterator = iter(make(32))
    drawn(iterator, 4)
    with pytest.raises(tp.StateError, match="it may change only between epochs"):
        make(48).load_state_dict(iterator.state_dict(), allow_changes=ALLOWED)
    drawn(iterator)
    pipe = make(48)
    pipe.load_state_dict(iterator.state_dict(), allow_changes=ALLOWED)
    fresh = make(48)
    drawn(fresh)
    assert drawn(pipe) == drawn(fresh)


LONG = [3, 9, 4, 8, 1, 7, 2, 2, 30, 5] * 12  # 4 of 10 are longer than 5, of 54 tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = pa.table({"input_ids": [[1] * n for n in LONG]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=50)
    return tmp_path


def dropping(folder: Path, method: Any, window: int = 16) -> tp.Pipeline:
    rows = tp.list_files(folder).read_parquet().sharding_filter(2).shuffle(20)
    return rows.pack(5, method=method, overflow="drop", buffer_size=window)


def said(pipe: tp.Pipeline) -> str | None:
    return dict(pipe.explain().lines).get("pack")


@EVERY
def test_each_is_counted_once_an_epoch(folder: Path, method: Any) -> None:
    pipe = dropping(folder, method)
    assert said(pipe) is None
    list(pipe)
    expected = "48 of 120 documents left out: longer than 5 tokens (648 tokens)"
    assert said(pipe) == expected
    list(pipe)
    assert said(pipe) == expected.replace("48 of 120", "96 of 240").replace("648", "1,296")
    long = tp.from_arrow(pa.table({"input_ids": [[1] * 9] * 40}))
    none = long.pack(5, method=method, overflow="drop", buffer_size=8)
    assert list(none) == []
    assert said(none) == "40 of 40 documents left out: longer than 5 tokens (360 tokens)"


def test_the_first_is_named_and_each_tenfold(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    list(tp.read_parquet(folder).pack(5, overflow="drop", buffer_size=2))
    texts = caplog.messages
    assert len(texts) == 3
    start = "pack(5, buffer_size=2, overflow='drop'): 1 of 2 documents left out: longer than 5"
    assert start in texts[0]
    assert texts[0].endswith(f"the last one has 9 at {folder}/rows.parquet, row group 0, row 1")
    assert "10 of 2" in texts[1]


def test_where_all_fit_nothing_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tp.read_parquet(folder).pack(30, overflow="drop")
    list(pipe)
    assert not caplog.records
    assert said(pipe) is None


def test_rows_that_are_packed_are_not_packed_again() -> None:
    packed = tp.from_arrow(pa.table({"input_ids": [[1, 2, 3], [4]]})).pack(8)
    both = tp.mix({"a": packed, "b": packed}, weights={"a": 1, "b": 1})
    for pipe in (packed.pack(16), both.pack(16)):
        with pytest.raises(tp.ConfigError, match=r"packed already: leave one pack\(\) out"):
            next(iter(pipe))
