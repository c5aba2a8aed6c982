"""batch by tokens: what batches hold, where they resume, and what is refused."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from trainpipes.sources import read_arrow as arrow
from trainpipes.stages.batch import Batch, cut


def table_of(lengths: list[int]) -> pa.Table:
    ids = pa.array([list(range(n)) for n in lengths], pa.list_(pa.int32()))
    return pa.table({"input_ids": ids, "row": pa.array(range(len(lengths)), pa.int64())})


def source(lengths: list[int]) -> tp.Pipeline:
    return tp.from_arrow(table_of(lengths))


def plain_cut(lengths: list[int], budget: int, most: int | None) -> list[list[int]]:
    """Batches of rows, row by row."""
    batches: list[list[int]] = []
    batch: list[int] = []
    for row, length in enumerate(lengths):
        longest = max([length, *(lengths[k] for k in batch)])
        if batch and (longest * (len(batch) + 1) > budget or len(batch) == most):
            batches.append(batch)
            batch = []
        batch.append(row)
    return [*batches, batch] if batch else batches


lengths = st.lists(st.integers(0, 12), max_size=80)
most = st.one_of(st.none(), st.integers(1, 5))


@examples(150)
@given(lengths, st.integers(12, 60), most, st.integers(1, 9))
def test_micro_batches_are_those_of_a_plain_loop_however_rows_come(
    lengths: list[int], budget: int, most: int | None, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow, "BLOCK_ROWS", block)
        pipe = source(lengths).batch(max_tokens=budget, max_rows=most)
        found = [[row["row"] for row in batch] for batch in pipe]
    assert found == plain_cut(lengths, budget, most)


@given(st.lists(st.integers(0, 300), max_size=300), most)
def test_a_budget_is_kept_in_long_micro_batches_too(lengths: list[int], most: int | None) -> None:
    found = cut(np.array(lengths, dtype=np.int64), 250, most).tolist()
    expected = plain_cut(lengths, 250, most)
    assert found == [0, *np.cumsum([len(batch) for batch in expected]).tolist()]


def test_no_tensor_has_more_cells_than_the_budget() -> None:
    rng = np.random.default_rng(0)
    rows = source(rng.integers(1, 40, 500).tolist()).shuffle(100)
    pipe = rows.batch(max_tokens=256).pad_collate()
    sizes = [batch["input_ids"].numel() for batch in pipe]
    assert max(sizes) <= 256
    assert np.median(sizes) > 200


def test_rows_may_say_themselves_how_long_they_are() -> None:
    sizes, rows = [3, 2, 7, 1, 1], range(5)
    lists = [[1] * size for size in sizes]
    both = [[{"n": n, "row": k} for n, k in zip(own, rows, strict=True)] for own in (sizes, lists)]
    tables: list[tp.Pipeline] = [
        *(tp.from_arrow(pa.Table.from_pylist(own)) for own in both),
        *map(tp.from_dataset, both),
        tp.from_tensors(n=torch.tensor(sizes), row=torch.arange(5)),
    ]
    for table in tables:
        batches = table.batch(max_tokens=7, column="n")
        assert [[int(row["row"]) for row in batch] for batch in batches] == [[0, 1], [2], [3, 4]]
    even = tp.from_tensors(n=torch.zeros(5, 3)).batch(max_tokens=7, column="n")
    assert [len(batch) for batch in even] == [2, 2, 1]


@pytest.mark.parametrize(
    ("stage", "expected"),
    [("batch", [[0, 1], [2], [3, 4]]), ("bucket_by_length", [[0, 1, 3], [2], [4]])],
)
def test_a_row_over_the_budget_is_refused_or_alone(stage: str, expected: list[Any]) -> None:
    cut = getattr(source([3, 3, 20, 3, 3]), stage)
    said = "no row may be longer than max_tokens, got one of 20"
    with pytest.raises(tp.DataError, match=said) as caught:
        list(cut(max_tokens=9))
    assert caught.value.row == 2
    alone = cut(max_tokens=9, overflow="alone")
    assert sorted([row["row"] for row in batch] for batch in alone) == expected


def test_drop_last_leaves_out_the_last_one_if_another_row_might_have_joined_it() -> None:
    def sizes(lengths: list[int]) -> list[int]:
        return [len(batch) for batch in source(lengths).batch(max_tokens=6, drop_last=True)]

    assert sizes([3, 3, 3]) == [2]
    assert sizes([3, 3, 3, 3]) == [2, 2]
    assert sizes([3, 3, 6]) == [2, 1]


def test_a_batch_of_rows_is_known_in_states_as_it_was() -> None:
    assert Batch(batch_size=8).identity() == {"stage": "batch", "batch_size": 8, "drop_last": False}
    counted = Batch(max_tokens=64).identity()
    assert counted == {"stage": "batch", "drop_last": False, "max_tokens": 64}


def test_a_state_of_tokens_does_not_go_on_with_rows() -> None:
    by_tokens, by_rows = source([3] * 20).batch(max_tokens=9), source([3] * 20).batch(4)
    for first, then in ((by_tokens, by_rows), (by_rows, by_tokens)):
        for allowed in ((), ("batch_size",)):
            with pytest.raises(tp.StateError, match="stages/batch"):
                then.load_state_dict(first.state_dict(), allow_changes=allowed)


def test_rows_without_tokens_fill_batches_too() -> None:
    """A row takes at least one cell: of empty ones any number would fit, and an endless pass has many."""
    rows = tp.from_dataset([{"input_ids": [1, 2]}] * 5 + [{"input_ids": []}] * 5).sharding_filter(2)
    found = [
        [len(row["input_ids"]) for row in batch]
        for batch in islice(rows.repeat().batch(max_tokens=4), 4)
    ]
    assert found == [[2, 2], [0] * 4, [2, 2], [0] * 4]
    assert [len(batch) for batch in rows.batch(max_tokens=4)] == [2, 4, 2, 1, 1]
