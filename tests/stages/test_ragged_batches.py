"""Batches of ragged columns, against what they are cell by cell."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from trainpipes.columns import byte_views, rectangles

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]
DTYPES = {
    "bool": torch.bool,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float32,
}
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]
sides = st.sampled_from(["left", "right"])
#: Rows of up to 12 bytes take another way than longer ones.
lengths = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=24)


def column(rows: list[list[Any]], kind: str, lists: Any, edges: list[int]) -> pa.ChunkedArray:
    """Rows as chunks that begin and end among other rows."""
    of_kind = pa.from_numpy_dtype(np.dtype(kind))
    chunks = []
    for start, stop in pairwise(edges):
        around = [np.array(row, kind) for row in ([1, 1, 1], *rows[start:stop], [1])]
        array = pa.array(around, lists(of_kind))
        chunks.append(array.slice(1, stop - start))
    return pa.chunked_array(chunks)


def padded(rows: list[list[Any]], width: int, value: Any, side: str, cut: str, dtype: Any) -> Any:
    found = torch.full((len(rows), width), value, dtype=dtype)
    for cells, row in zip(found, rows, strict=True):
        kept = row[max(0, len(row) - width) :] if cut == "left" else row[:width]
        place = slice(width - len(kept), None) if side == "left" else slice(len(kept))
        cells[place] = torch.tensor(kept, dtype=dtype)
    return found


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether dtype, shape and each bit are the same."""
    alike = found.dtype == expected.dtype and found.shape == expected.shape
    return alike and found.numpy().tobytes() == expected.numpy().tobytes()


@given(
    lengths,
    st.sampled_from(INTEGERS),
    st.sampled_from([*INTEGERS, *DTYPES]),
    st.sampled_from(LISTS),
    st.integers(1, 9),
    st.none() | st.integers(1, 12),
    st.none() | st.sampled_from([1, 4, 8]),
    sides,
    sides,
    st.booleans(),
    st.sampled_from([1 << 30, 64, 16]),
    st.sampled_from([1 << 20, 0]),
    st.data(),
)
def test_are_what_they_are_cell_by_cell(
    sizes: list[int], kind: str, other: str, lists: Any, size: int, most: int | None,
    multiple: int | None, side: Any, cut: Any, shuffled: bool, step: int, at_once: int,
    data: Any,
) -> None:  # fmt: skip
    rng = np.random.default_rng(len(sizes))
    rows = [rng.integers(0, 100, n).tolist() for n in sizes]
    labels = [rng.integers(0, 2, n).astype(other).tolist() for n in sizes[::-1]]
    cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=3))
    edges = sorted({0, len(rows), *cuts})
    table = pa.table(
        {
            "input_ids": column(rows, kind, lists, edges),
            "labels": column(labels, other, lists, edges),
            "row": pa.array(range(len(rows))),
        }
    )
    value = data.draw(st.integers(0, 100))
    pipe = tp.from_arrow(table)
    pipe = (pipe.shuffle(100, seed=1) if shuffled else pipe).batch(size)
    own = -100 if other in INTEGERS else {"bool": 1}.get(other, 0.1)
    padding = pipe.pad_collate(
        max_length=most, pad_to_multiple_of=multiple, padding_side=side, truncation_side=cut,
        columns={"input_ids": {"value": value}, "labels": {"value": own}},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for module in (byte_views, rectangles):  # what is large is cut into several buffers
            patch.setattr(module, "STEP", step)
        patch.setattr(rectangles, "AT_ONCE", at_once)
        found = list(tp.Loader(padding, threads=0))
    assert sum(len(batch["row"]) for batch in found) == len(rows)
    for batch in found:
        places = batch["row"].tolist()
        own_rows, own_labels = [rows[p] for p in places], [labels[p] for p in places]
        width, wide = (
            -(-(most or max(map(len, some))) // (multiple or 1)) * (multiple or 1)
            for some in (own_rows, own_labels)
        )
        limit = most or 1 << 20
        own_rows, own_labels = (
            [row[max(0, len(row) - limit) :] if cut == "left" else row[:limit] for row in some]
            for some in (own_rows, own_labels)
        )
        ones = [[1] * len(row) for row in own_rows]
        dtype = DTYPES.get(other, torch.int64)
        assert same(batch["input_ids"], padded(own_rows, width, value, side, cut, torch.int64))
        assert same(batch["attention_mask"], padded(ones, width, 0, side, cut, torch.int64))
        assert same(batch["labels"], padded(own_labels, wide, own, side, cut, dtype))
        for name in ("input_ids", "labels"):
            assert batch[name].is_contiguous()
            assert batch[name].untyped_storage().nbytes() == batch[name].nbytes


def test_rows_of_one_run_keep_no_window() -> None:
    rows = rectangles.RaggedRows(
        np.arange(100_000), np.array([0, 10]), np.array([5, 7]), 0, dtype="int64"
    )
    cut = rows.rectangles(np.array([1]), np.array([0, 1]))
    held = [value for value in vars(cut).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in held) < 1000


def test_rows_that_pads_make_large_are_padded_batch_by_batch() -> None:
    lengths = np.array([1, 100_000] * 100)
    rows = rectangles.RaggedRows(
        np.arange(100_000), np.zeros_like(lengths), lengths, 0, dtype="int64"
    )
    cut = rows.rectangles(None, np.arange(0, 201, 2))
    assert cut._cells is None
    assert [cells.shape for cells, _ in (cut[0], cut[99])] == [(2, 100_000)] * 2


def test_one_huge_row_is_padded_among_small_ones() -> None:
    huge = list(range(300_000))
    table = pa.table({"input_ids": pa.array([[1], huge, [], [2, 3]], pa.list_(pa.int32()))})
    batches = list(tp.from_arrow(table).batch(2).pad_collate())
    assert batches[0]["input_ids"].shape == (2, 300_000)
    assert batches[0]["input_ids"].tolist() == [[1, *[0] * 299_999], huge]
    assert batches[1]["input_ids"].tolist() == [[0, 0], [2, 3]]


@pytest.mark.parametrize("inner", [[None], [[1], None]])
def test_a_null_is_named_with_its_row(inner: Any) -> None:
    lists = [[1]] * 5 + ([inner] if inner == [None] else inner)
    table = pa.table({"input_ids": pa.array(lists, pa.list_(pa.int32()))})
    with pytest.raises(tp.DataError, match=r"'input_ids'.*(is null|holds a null)"):
        list(tp.from_arrow(table).batch(4).pad_collate())
