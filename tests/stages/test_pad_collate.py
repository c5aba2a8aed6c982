"""``pad_collate``: tensors that each batch would also give by itself."""

from __future__ import annotations

import math
import pickle
import re
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from tokenizer_fixtures import PAD, TEXTS, bpe, bracketed, run_of
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.stages.columns import Rename
from trainpipes.stages.pad_collate import PadCollate
from trainpipes.stages.tokenize import Tokenize

IDS = pa.list_(pa.int32())
#: What Keras calls the sides.
SIDES = {"pre": "left", "post": "right"}
ROWS: list[list[int]] = [[1, 2, 3], [4], [], [5, 6, 7, 8, 9], [10, 11]]


def collated(
    data: Any, bounds: list[int] | None = None, stage: PadCollate | None = None, **options: Any
) -> list[dict[str, Any]]:
    stage = PadCollate(**options) if stage is None else stage
    run = run_of(data, [0, len(data)] if bounds is None else bounds)
    done = stage.process(run)
    assert done.cursors is run.cursors
    assert done.items is not None
    return done.items


def one(rows: Any, kind: Any = IDS, name: str = "input_ids", **options: Any) -> Any:
    """The tensor of one column of one batch."""
    array = rows if isinstance(rows, pa.Array | pa.ChunkedArray) else pa.array(rows, kind)
    return collated(pa.table({name: array}), **options)[0][name]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return bool(found == expected)


def ragged(*rows: list[int]) -> Any:
    return pa.array(rows, IDS)


VECTORS = pa.list_(pa.list_(pa.float32(), 2))
THREE = {name: ragged(*ROWS[:3]) for name in ("input_ids", "labels", "free")}
LEFT = {"padding_side": "left", "truncation_side": "left", "max_length": 2, "value": -1}
FLOATS = {name: pa.array([0.5]) for name in "ab"}
MASKED = {"input_ids": [[1], [2, 3]], "labels": [[1], [2, 3]], "n": [1, 2]}
#: What a batch holds, the options, and some of its tensors, as lists; or their dtypes.
PADDED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "rows up to the longest": (
        {"input_ids": ragged(*ROWS[:3])}, {},
        {"input_ids": [[1, 2, 3], [4, 0, 0], [0, 0, 0]], "attention_mask": [[1, 1, 1], [1, 0, 0], [0, 0, 0]]},
    ),
    "nothing": ({"input_ids": ragged([], [])}, {}, {"input_ids": [[], []], "attention_mask": [[], []]}),
    "nothing to a multiple": ({"input_ids": ragged([])}, {"pad_to_multiple_of": 8}, {"input_ids": [[]]}),
    "nothing to a length": ({"input_ids": ragged([])}, {"max_length": 3}, {"input_ids": [[0, 0, 0]]}),
    "a value that spares what is masked": (
        {name: ragged([1], []) for name in ("input_ids", "labels", "token_type_ids", "other")}, {"value": 9},
        {"input_ids": [[1], [9]], "labels": [[1], [-100]], "token_type_ids": [[1], [0]], "other": [[1], [9]]},
    ),
    "a value of a column": (
        {"n": ragged([1], [])}, {"value": 9, "columns": {"n": {"value": 5}}}, {"n": [[1], [5]]},
    ),
    "options of a column before the common ones": (
        THREE,
        {"max_length": 1, "columns": {"labels": LEFT, "free": {"max_length": None, "pad_to_multiple_of": 4}}},
        {"input_ids": [[1], [4], [0]], "labels": [[2, 3], [-1, 4], [-1, -1]],
         "free": [[1, 2, 3, 0], [4, 0, 0, 0], [0, 0, 0, 0]]},
    ),
    "lists of vectors": (
        {"input_ids": pa.array([[[9, 9]], [[1, 2], [3, 4]], [[5, 6]], []], VECTORS).slice(1)},
        {"padding_side": "left"},
        {"input_ids": [[[1, 2], [3, 4]], [[0, 0], [5, 6]], [[0, 0], [0, 0]]],
         "attention_mask": [[1, 1], [0, 1], [0, 0]]},
    ),
    "dtypes that are given": (
        {"a": [[1], [2]], "b": [1, 2], "c": [[1.5], [2.5]], "d": [[1], [1]]},
        {"dtype": torch.int32, "columns": {
            "b": {"dtype": torch.int32}, "c": {"dtype": torch.float64}, "d": {"dtype": torch.float32}}},
        {"a": torch.int32, "b": torch.int32, "c": torch.float64, "d": torch.float32},
    ),
    "dtypes of columns besides that of all floats": (
        {**FLOATS, "n": [3]},
        {"dtype": torch.float16, "columns": {"b": {"dtype": torch.float64}, "n": {"dtype": torch.float32}}},
        {"a": torch.float16, "b": torch.float64, "n": torch.float32},
    ),
    "masks that the rows have": (
        {"input_ids": [[1, 2], [3]], "attention_mask": [[1, 0], [1]]}, {"value": 7},
        {"input_ids": [[1, 2], [3, 7]], "attention_mask": [[1, 0], [1, 0]]},
    ),
    "dicts of arrays": ([{"i": np.array([1, 2])}, {"i": [4]}], {}, {"i": [[1, 2], [4, 0]]}),
    "dicts of tensors": ([{"i": torch.tensor([1, 2])}, {"i": [4]}], {}, {"i": [[1, 2], [4, 0]]}),
    "dicts of tuples": ([{"i": (1, 2)}, {"i": [4]}], {}, {"i": [[1, 2], [4, 0]]}),
    "an empty list": ([{"a": []}, {"a": [1]}], {}, {"a": [[0], [1]]}),
    "empty lists": ([{"a": []}], {}, {"a": torch.int64}),
    "empty lists without a type": (
        {"input_ids": [[], []]}, {}, {"input_ids": torch.int64, "attention_mask": [[], []]},
    ),
    "empty large lists without a type": (
        {"a": pa.array([[], []], pa.large_list(pa.null()))}, {}, {"a": torch.int64},
    ),
    "an empty list beside floats": ([{"a": []}, {"a": np.ones(1, np.float32)}], {}, {"a": torch.float32}),
    "an empty array": ([{"a": np.ones(0, np.float32)}, {"a": []}], {}, {"a": torch.float32}),
}  # fmt: skip


@pytest.mark.parametrize("name", PADDED)
def test_a_batch_is_padded(name: str) -> None:
    data, options, expected = PADDED[name]
    (batch,) = collated(pa.table(data) if isinstance(data, dict) else data, **options)
    for column, wanted in expected.items():
        assert (
            batch[column].dtype if isinstance(wanted, torch.dtype) else batch[column].tolist()
        ) == wanted


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, "input_ids attention_mask labels n"),
        ({"mask": False}, "input_ids labels n"),
        ({"mask": {"labels": "m"}}, "input_ids labels m n"),
        ({"columns": {"labels": {"mask": "m"}}}, "input_ids attention_mask labels m n"),
        ({"columns": {"input_ids": {"mask": "m"}}}, "input_ids m labels n"),
        ({"columns": {"input_ids": {"mask": False}}}, "input_ids labels n"),
    ],
)
def test_masks_come_after_their_columns(options: dict[str, Any], names: str) -> None:
    assert " ".join(collated(pa.table(MASKED), **options)[0]) == names


def test_infinite_and_largest_floats_are_held() -> None:
    values = [[math.inf, -math.inf, math.nan, 0.1], [float(np.finfo(np.float32).max)]]
    found = collated(pa.table({"x": values}))[0]["x"]
    wanted = torch.tensor([values[0], values[1] + 3 * [0.0]], dtype=torch.float32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


LONG = pa.list_(pa.list_(pa.int64()))
#: What is refused: the batch, the options, the error, and what it says.
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ({"input_ids": [[1]]}, {"value": 0.5}, ConfigError, r"padded with 0.5, which int64 cannot hold; give"),
    ({"x": [[0.5]]}, {"dtype": torch.float16, "value": 1e6}, ConfigError, r"with 1000000.0, which float16"),
    ({"labels": [[1]]}, {"dtype": torch.uint8}, ConfigError, "'labels' is padded with -100, which uint8"),
    ({"x": pa.array([2**63], pa.uint64())}, {}, DataError, "which int64 cannot hold"),
    ({"x": [[0.5], [2.0, -1e300]]}, {}, DataError, r"'x' holds -1e\+300, which float32 cannot hold; pass"),
    ({"x": [1e39]}, {"dtype": torch.float32}, DataError, "holds 1e.39, which float32 cannot hold"),
    ({"x": [[70_000]]}, {"columns": {"x": {"dtype": torch.float16}}}, DataError, "70000, which float16"),
    ({"x": [[1.5]]}, {"columns": {"x": {"dtype": torch.int64}}}, SchemaError, "int64 would cut off"),
    ({"x": [[1, 0], [2]]}, {"columns": {"x": {"dtype": torch.bool}}}, DataError, "holds 2, which bool"),
    ({"x": pa.array([[[1], [2, 3]]], LONG)}, {}, SchemaError, r"lists of lists.*leave it out with select"),
    (MASKED, {"mask": {"ids": "m"}}, SchemaError, "no column 'ids'"),
    (MASKED, {"mask": {"labels": "n"}}, SchemaError, "have a column 'n' already"),
    (MASKED, {"mask": {"labels": "m", "input_ids": "m"}}, ConfigError, r"another name for each mask, got"),
    (MASKED, {"mask": {"labels": 1}}, ConfigError, "a dict of columns and their masks"),
    (MASKED, {"mask": True}, ConfigError, "False, or a dict.*got True"),
    ({"input_ids": [1, 2]}, {"mask": {"input_ids": "m"}}, SchemaError, r"has no lists to pad.*mask 'm'"),
    ({"labels": [[1]]}, {"columns": {"label": {}}}, SchemaError, "no column 'label' .did you mean 'labels'"),
    ({}, {"columns": {"x": {"valu": 1}}}, ConfigError, r"no option 'valu' \(did you mean 'value'\?\) for"),
    ({}, {"columns": {"x": 3}}, ConfigError, "dict of column names and dicts of options, got {'x': 3}"),
    ({}, {"columns": {"x": {"padding_side": "up"}}}, ConfigError, r"columns\['x'\]\)\(padding_side\) must"),
    ({}, {"columns": {"x": {"mask": 1}}}, ConfigError, "a name for the mask, or False, got 1"),
    ([{"a": 1}, {"b": 1}], {}, SchemaError, r"got keys \['b'\] where the first row .* has \['a'\]"),
    ([{"a": 1}, 7], {}, SchemaError, r"got int; make dicts with map\(\), or use collate\(\)"),
    ([7, {"a": 1}], {}, SchemaError, "got int"),
    *(
        ({}, {"dtype": dtype}, ConfigError, r"pad_collate\(dtype\)")
        for dtype in (None, float, "int64", np.float32, torch.bool, torch.complex64, torch.bfloat16)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("data", "options", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_is_refused(
    data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        collated(pa.table(data) if isinstance(data, dict) else data, **options)


class TestPadding:
    @given(
        st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=6),
        st.sampled_from(["pre", "post"]),
        st.sampled_from(["pre", "post"]),
        st.none() | st.integers(1, 7),
        st.none() | st.integers(1, 3),
        st.sampled_from([pa.list_(pa.int32()), pa.large_list(pa.int64()), "rows"]),
    )
    def test_agrees_with_keras_for_every_micro_batch_of_a_run(
        self, batches: list[list[int]], padding: Any, truncating: Any, max_length: int | None,
        multiple: int | None, kind: Any,
    ) -> None:  # fmt: skip
        rows = [list(range(1, n + 1)) for batch in batches for n in batch]
        bounds = np.cumsum([0, *map(len, batches)]).tolist()
        data: Any = [{"input_ids": row} for row in rows]
        if kind != "rows":
            data = pa.table({"input_ids": pa.array([[99], *rows], kind).slice(1)})
        sides = {"padding_side": SIDES[padding], "truncation_side": SIDES[truncating]}
        items = collated(data, bounds, max_length=max_length, pad_to_multiple_of=multiple, **sides)
        for item, (start, stop) in zip(items, pairwise(bounds), strict=True):
            part = rows[start:stop]
            if max_length is not None:
                part = [r[:max_length] if truncating == "post" else r[-max_length:] for r in part]
            width = max_length or max(map(len, part))
            width = -(-width // (multiple or 1)) * (multiple or 1)
            expected = tp.pad_sequences(part, width, "int64", padding)
            assert item["input_ids"].tolist() == expected.tolist()
            assert item["attention_mask"].tolist() == (expected > 0).astype(int).tolist()

    def test_equals_transformers(self) -> None:
        transformers = pytest.importorskip("transformers")
        for side in ("right", "left"):
            fast = transformers.PreTrainedTokenizerFast(
                tokenizer_object=bracketed(), pad_token="<pad>", padding_side=side
            )
            options = {"padding": True, "truncation": True, "max_length": 12}
            expected = fast(TEXTS, return_tensors="pt", **options)
            pipe = tp.from_arrow(pa.table({"text": TEXTS})).tokenize(fast, max_length=12)
            (batch,) = pipe.batch(len(TEXTS)).pad_collate()
            assert same(batch["input_ids"], expected["input_ids"])
            assert same(batch["attention_mask"], expected["attention_mask"])


class TestPadValue:
    def test_is_the_tokenizers_pad_token_for_its_ids(self) -> None:
        rows = pa.table({"text": ["a longer text", "x"], "scores": [[1], [2, 3]]})
        pipe = tp.from_arrow(rows).tokenize(bpe(), labels=True).batch(2).pad_collate()
        (batch,) = pipe
        assert batch["input_ids"][1, -1] == PAD
        assert batch["labels"][1, -1] == -100
        assert batch["scores"][0].tolist() == [1, 0]

    def test_follows_a_rename(self) -> None:
        rows = tp.from_arrow(pa.table({"text": ["abc", "x"]})).tokenize("bytes")
        (batch,) = rows.rename({"input_ids": "bytes"}).batch(2).pad_collate()
        assert batch["bytes"].tolist() == [[97, 98, 99], [120, 257, 257]]
        assert "attention_mask" not in batch

    def test_is_forgotten_with_the_tokenizer(self) -> None:
        stage = PadCollate()
        stage = stage._resolve([Tokenize(tokenizer="bytes"), Rename(names={"a": "b"})])
        assert one([[1], []], stage=stage).tolist() == [[1], [257]]
        stage = stage._resolve([])
        assert one([[1], []], stage=stage).tolist() == [[1], [0]]

    def test_is_to_be_given_where_a_function_tokenizes(self) -> None:
        def words(texts: list[str]) -> list[list[int]]:
            return [[len(word) for word in text.split()] for text in texts]

        texts = tp.from_arrow(pa.table({"text": ["a few words", "one"]}))
        rows = texts.tokenize(words, labels=True)
        said = r"words .*, a function, .*: give pad_collate\(value="
        with pytest.raises(ConfigError, match=said) as caught:
            list(rows.batch(2).pad_collate())
        assert "'input_ids'" in str(caught.value)
        (batch,) = rows.batch(2).pad_collate(value=7)
        assert batch["input_ids"].tolist() == [[1, 3, 5], [3, 7, 7]]
        assert batch["labels"].tolist() == [[1, 3, 5], [3, -100, -100]]
        own = rows.batch(2).pad_collate(columns={"input_ids": {"value": 8}})
        assert next(iter(own))["input_ids"][1].tolist() == [3, 8, 8]
        with pytest.raises(ConfigError, match=r", a function, .*: give pack\(pad_token_id="):
            rows.pack(8)
        packed = rows.pack(8, pad_token_id=9).batch(1).pad_collate(pad_to_multiple_of=10)
        assert next(iter(packed))["input_ids"][0, 4:].tolist() == [9] * 4


@pytest.mark.parametrize("shape", [(0, 4), (0, 2, 3), (2, 0)])
def test_arrays_without_a_cell_in_all_rows(shape: tuple[int, ...]) -> None:
    """As of boxes, where no picture of the first rows has one. Arrow divided by their number."""
    rows = [{"x": np.zeros(shape, np.float32), "n": n} for n in range(3)]
    for pipe in (tp.from_dataset(rows), tp.from_dataset(rows).map(dict).select("n", "x")):
        (batch,) = pipe.batch(3).pad_collate()
        assert batch["n"].tolist() == [0, 1, 2]
        assert np.shape(batch["x"]) == (3, *shape)
    rows.append({"x": np.ones((1, *shape[1:]), np.float32), "n": 3})
    if shape[1]:
        (batch,) = tp.from_dataset(rows).batch(4).pad_collate(lengths={"x": "boxes"})
        assert batch["boxes"].tolist() == [0, 0, 0, 1]
        assert batch["x"].shape == (4, 1, *shape[1:])


class TestDtypes:
    @pytest.mark.parametrize(
        ("kind", "found"),
        [
            (pa.int8(), torch.int64),
            (pa.uint64(), torch.int64),
            (pa.float16(), torch.float16),
            (pa.float32(), torch.float32),
            (pa.float64(), torch.float32),
            (pa.bool_(), torch.bool),
        ],
    )
    def test_of_ragged_columns(self, kind: Any, found: torch.dtype) -> None:
        rows = pa.array([[1, 0], [1]]).cast(pa.list_(kind if kind != pa.bool_() else pa.int8()))
        tensor = one(rows.cast(pa.list_(kind)))
        assert tensor.dtype == found
        assert tensor.to(torch.float64).tolist() == [[1, 0], [1, 0]]

    @pytest.mark.parametrize(
        ("values", "kind", "found"),
        [
            ([1, 2], pa.int16(), torch.int64),
            ([1, 2], pa.dictionary(pa.int8(), pa.int32()), torch.int64),
            ([1.5, 2], pa.dictionary(pa.int8(), pa.float32()), torch.float32),
            ([1.5, 2], pa.float32(), torch.float32),
            ([1.5, 2], pa.float64(), torch.float64),
            ([True, False], pa.bool_(), torch.bool),
            ([[1, 2], [3, 4]], pa.list_(pa.uint8(), 2), torch.uint8),
            ([[[1.0, 2]], [[3, 4]]], pa.list_(pa.list_(pa.float32(), 2), 1), torch.float32),
        ],
    )
    def test_of_even_columns(self, values: Any, kind: Any, found: torch.dtype) -> None:
        spare = pa.array([values[0], *values], kind)
        tensor = one(spare.slice(1))
        assert same(tensor, torch.tensor(values, dtype=found))
        assert same(one(pa.chunked_array([spare.slice(1, 1), spare.slice(2)])), tensor)

    def test_of_tensor_columns(self) -> None:
        array = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
        assert same(one(pa.FixedShapeTensorArray.from_numpy_ndarray(array)), torch.tensor(array))

    @pytest.mark.parametrize("as_rows", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    def test_a_float_dtype_is_of_floats_and_no_ids(self, dtype: torch.dtype, as_rows: bool) -> None:
        columns = {
            "input_ids": pa.array([[1, 2], [3]], IDS),
            "label": [1, 0],
            "score": [0.5, 1.5],
            "weights": [[0.5], [1.5, 2.5]],
            "vector": pa.array([[0.5, 1.5], [2.5, 3.5]], pa.list_(pa.float64(), 2)),
            "flags": [[True], [False, True]],
        }
        rows = pa.table(columns)
        batch = collated(rows.to_pylist() if as_rows else rows, dtype=dtype)[0]
        whole = ["input_ids", "attention_mask", "label"]
        assert [batch[name].dtype for name in whole] == [torch.int64] * 3
        assert {batch[name].dtype for name in ("score", "weights", "vector")} == {dtype}
        assert batch["flags"].dtype == torch.bool
        assert batch["score"].tolist() == [0.5, 1.5]
        assert batch["weights"].tolist() == [[0.5, 0.0], [1.5, 2.5]]

    def test_of_rows_that_are_tensors_may_be_given_too(self) -> None:
        given = (torch.arange(4.0).double(), torch.arange(4), torch.arange(4))
        rows = TensorRows(given, ("x", "n", "small"))
        columns = {"small": {"dtype": torch.int8}}
        batch = collated(rows, dtype=torch.float32, columns=columns)[0]
        found = [batch[name].dtype for name in ("x", "n", "small")]
        assert found == [torch.float32, torch.int64, torch.int8]
        large = TensorRows((torch.tensor([1, 300]),), ("small",))
        with pytest.raises(DataError, match="holds 300, which int8 cannot hold"):
            collated(large, columns=columns)
        with pytest.raises(SchemaError, match="no column 'smal'"):
            collated(large, columns={"smal": {"value": 1}})
        with pytest.raises(SchemaError, match=r"has no lists to pad.*mask 'm'"):
            collated(large, mask={"small": "m"})

    def test_anything_else_is_a_list_of_objects(self) -> None:
        when = datetime(2024, 1, 1)
        columns = {
            "text": ["a", None],
            "when": [when, when],
            "words": [["x"], []],
            "some": [{"n": 1}, {"n": 2}],
            "kind": pa.array(["u", "v"]).dictionary_encode(),
            "raw": [b"1", b"2"],
        }
        rows = pa.table(columns)
        assert collated(rows, [0, 1, 2])[1] == {name: [rows[name][1].as_py()] for name in columns}


class TestTensors:
    ROWS = pa.table({"input_ids": pa.array(ROWS * 2, IDS), "n": range(10)})

    def test_are_contiguous_writable_and_nobody_elses(self) -> None:
        items = collated(self.ROWS, [0, 3, 4, 10])
        before = pickle.dumps([{k: t.tolist() for k, t in item.items()} for item in items])
        tensors = [tensor for item in items for tensor in item.values()]
        for tensor in tensors:
            assert tensor.is_contiguous()
            kept = tensor.clone()
            tensor.fill_(-7)
            assert sum(bool((t == -7).any()) for t in tensors) == min(1, tensor.numel())
            tensor.copy_(kept)
        assert pickle.dumps([{k: t.tolist() for k, t in item.items()} for item in items]) == before
        assert self.ROWS.column("n").to_pylist() == list(range(10))

    @given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans())
    def test_do_not_depend_on_the_run_they_came_in(self, cuts: list[int], as_rows: bool) -> None:
        data: Any = self.ROWS.to_pylist() if as_rows else self.ROWS
        bounds = np.cumsum([0, *cuts])
        bounds = [*bounds[bounds < 10].tolist(), 10]
        whole = collated(data, bounds)
        for item, (start, stop) in zip(whole, pairwise(bounds), strict=True):
            part = data[start:stop] if as_rows else data.slice(start, stop - start)
            assert same(collated(part)[0], item)

    def test_come_of_columns_in_several_chunks(self) -> None:
        parts = [self.ROWS.slice(0, 2), self.ROWS.slice(5, 4), self.ROWS.slice(3, 1)]
        whole = pa.concat_tables(parts)
        assert whole.column("n").num_chunks == 3
        expected = collated(pa.table({k: whole.column(k).to_pylist() for k in whole.column_names}))
        assert same(collated(whole)[0], expected[0])


class TestRowsThatAreDicts:
    def test_give_what_a_table_gives(self) -> None:
        rows = [
            {"input_ids": row, "f": [k / 2] * k, "n": k, "x": k / 3, "t": str(k), "v": [k > 1]}
            for k, row in enumerate(ROWS)
        ]
        table = pa.Table.from_pylist(rows)
        assert same(collated(rows, [0, 2, 5])[1], collated(table, [0, 2, 5])[1])

    @pytest.mark.parametrize(
        ("values", "found"),
        [
            ([1, np.int32(2)], torch.tensor([1, 2])),
            ([1.5, 2], torch.tensor([1.5, 2], dtype=torch.float64)),
            ([np.float32(1), np.float32(2)], torch.tensor([1.0, 2])),
            ([True, np.True_], torch.tensor([True, True])),
            ([torch.tensor(1), torch.tensor(2)], torch.tensor([1, 2])),
            ([torch.ones(2, 2), torch.ones(2, 2)], torch.ones(2, 2, 2)),
            (
                [torch.ones(1, dtype=torch.bfloat16), torch.ones(2)],
                torch.tensor([[1.0, 0], [1, 1]]),
            ),
            (
                [np.ones((1, 2)), np.ones((2, 2))],
                torch.tensor([[[1.0, 1], [0, 0]], [[1, 1], [1, 1]]], dtype=torch.float64),
            ),
            (
                [np.array([2**62 + 5], np.uint64), np.array([], np.float32), np.array([-3, 1])],
                torch.tensor([[2**62 + 5, 0], [0, 0], [-3, 1]]),
            ),
            ([np.array([2**62 + 5], np.uint64), np.array([3])], torch.tensor([[2**62 + 5], [3]])),
            ([np.uint64(2**62 + 5), np.int64(3)], torch.tensor([2**62 + 5, 3])),
            ([[], [np.uint64(2**62 + 5)], [3]], torch.tensor([[0], [2**62 + 5], [3]])),
            ([[np.uint64(2**62 + 5), -3], [1, 2]], torch.tensor([[2**62 + 5, -3], [1, 2]])),
            ([["a"], [2**70]], [["a"], [2**70]]),
            (["a", None], ["a", None]),
            ([["a"], None], [["a"], None]),
            ([None, None], [None, None]),
        ],
    )
    def test_are_judged_by_their_values(self, values: Any, found: Any) -> None:
        assert same(collated([{"a": value} for value in values])[0]["a"], found)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
    def test_keep_dtypes_that_numpy_has_not(self, dtype: torch.dtype) -> None:
        x = torch.arange(4.0)
        rows = tp.from_tensors(number=x.to(dtype), even=x.reshape(4, 1, 1).to(dtype))
        made = rows.map(
            lambda row: row | {"list": row["number"].repeat(1 + int(row["number"]) % 2)}
        )
        chosen = made.select(["list", "number", "even"])
        for pipe in (made.batch(4), chosen.batch(4), made.batch(4).map(list)):
            batch = next(iter(pipe.pad_collate(value=7)))
            assert {values.dtype for values in batch.values()} == {dtype}
            assert torch.equal(batch["number"].float(), x)
            assert torch.equal(batch["even"].float(), x.reshape(4, 1, 1))
            assert batch["list"].tolist() == [[0, 7], [1, 1], [2, 7], [3, 3]]
        for options in ({"dtype": torch.float32}, {"columns": {"list": {"dtype": torch.float32}}}):
            batch = next(iter(made.batch(4).pad_collate(**options)))
            assert batch["list"].dtype == torch.float32
        if dtype == torch.float8_e4m3fn:
            with pytest.raises(ConfigError, match=r"padded with 500, which .*float8_e4m3fn"):
                next(iter(made.batch(4).pad_collate(value=500)))

    @pytest.mark.parametrize(
        ("values", "error", "row", "message"),
        [
            ([[7], [5, 2**64 - 1]], DataError, 1, "holds 18446744073709551615, which int64 cannot"),
            ([[7], [5, 2**70]], DataError, 1, "holds 1180591620717411303424, which int64 cannot"),
            ([0.5, -(2**70)], DataError, 1, "holds -1180591620717411303424, which int64 cannot"),
            ([1, None], DataError, 1, r"'a' is null.*\.filter\(pc.field\('a'\).is_valid\(\)\)"),
            ([[1], None], DataError, 1, "'a' is null"),
            ([[1], [2, None]], DataError, 1, "holds a null within a list"),
            ([[1], 2], DataError, 1, r"is 2 where the row before it is \[1\]"),
            ([[[1], [2, 3]], [[1]]], SchemaError, 0, "holds lists of lists"),
            ([[[1, 2]], [[1, 2]]], SchemaError, 0, "holds lists of lists"),
            (
                [np.array([3]), np.array([5, 2**63], np.uint64)],
                DataError,
                1,
                "'a' holds 9223372036854775808, which int64 cannot hold.*map()",
            ),
            ([np.ones((2, 1)), np.ones((2, 2))], DataError, 1, r"shape \[2, 2\] .* has \[2, 1\]"),
        ],
    )
    def test_must_be_of_one_kind(
        self, values: Any, error: type[Exception], row: int, message: str
    ) -> None:
        data = [{"a": value} for value in values]
        with pytest.raises(error, match=message) as caught:
            PadCollate().process(run_of([{"a": 0}, *data], [0, 1, 3], first=20))
        if error is DataError:
            assert caught.value._trainpipes[1] == 21 + row  # type: ignore[attr-defined]


class TestNulls:
    @pytest.mark.parametrize(
        ("values", "kind", "message"),
        [
            ([1, None], pa.int64(), r"'c' is null.*\.filter\(pc.field\('c'\).is_valid\(\)\)"),
            ([[1], None], IDS, "'c' is null"),
            ([[1], [1, None]], IDS, "holds a null within a list of numbers"),
            ([[1, 2], None], pa.list_(pa.int64(), 2), "'c' is null"),
            ([[1, 2], [1, None]], pa.list_(pa.int64(), 2), "holds a null within"),
            ([[[1, 2]], [[1, None]]], pa.list_(pa.list_(pa.int64(), 2)), "holds a null within"),
            ([[[1, 2]], [None]], pa.list_(pa.list_(pa.int64(), 2)), "holds a null within"),
        ],
    )
    def test_have_no_place_in_a_tensor(self, values: Any, kind: Any, message: str) -> None:
        array = pa.array([values[1], values[0], values[0], values[1]], kind).slice(1)
        with pytest.raises(DataError, match=message) as caught:
            PadCollate().process(run_of(pa.table({"c": array}), [0, 1, 3], first=5))
        assert caught.value._trainpipes[1] == 7  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [pa.list_view(pa.int32()), pa.large_list_view(pa.int32())])
def test_views_of_lists_are_padded_as_lists_are(kind: Any) -> None:
    views = pa.array(ROWS, kind).take(pa.array([4, 0, 3, 0])).slice(1)
    assert torch.equal(one(views), one([ROWS[0], ROWS[3], ROWS[0]]))


def test_tensor_rows_are_sliced() -> None:
    features = torch.arange(6.0).reshape(3, 2)
    rows = TensorRows((features, torch.tensor([1, 2, 3])), ("x", "y"))
    items = collated(rows, [0, 2, 3])
    assert same(items[0], {"x": features[:2], "y": torch.tensor([1, 2])})
    items[0]["x"].fill_(-1)
    assert features[0].tolist() == [0, 1]


class TestWhereItStands:
    def test_micro_batches_of_another_node_are_lists_of_rows(self) -> None:
        batches = [[{"input_ids": [1]}, {"input_ids": [2, 3]}], [{"input_ids": [4]}]]
        items = PadCollate().process(run_of(batches)).items
        assert items is not None
        assert items[0]["input_ids"].tolist() == [[1, 0], [2, 3]]
        assert items[1]["input_ids"].tolist() == [[4]]

    def test_rows_that_nobody_batched_are_refused(self) -> None:
        for rows in (pa.table({"a": [1]}), [{"a": 1}]):
            with pytest.raises(ConfigError, match=r"put \.batch\(n\) before it"):
                PadCollate().process(run_of(rows))

    def test_its_identity_says_what_the_tokenizer_says_of_padding(self) -> None:
        stage = PadCollate()
        assert "value" not in stage.identity()
        stage = stage._resolve([Tokenize(tokenizer=bpe())])
        assert stage.identity()["value"] == PAD
        assert stage.identity()["padding_side"] == "right"


def test_ids_of_two_tokenizes_are_padded_each_as_its_tokenizer_says() -> None:
    table = pa.table({"a": ["x", "xyz"], "b": ["x", "xyz"]})
    named = tp.from_arrow(table).tokenize("bytes", {"a": "first"}).rename({"first": "one"})
    both = named.tokenize(lambda texts: [[7] * len(text) for text in texts], {"b": "two"})
    with pytest.raises(tp.ConfigError, match=r"column .two. is padded with .*give pad_collate"):
        list(both.batch(2).pad_collate())
    (batch,) = both.batch(2).pad_collate(columns={"two": {"value": 9}})
    assert batch["one"].tolist() == [[120, 257, 257], [120, 121, 122]]
    assert batch["two"].tolist() == [[7, 9, 9], [7, 7, 7]]


def test_a_tokenizer_that_is_given_says_how_its_ids_are_padded() -> None:
    rows = tp.from_arrow(pa.table({"input_ids": [[1, 2], [3]], "other": [[1, 2], [3]]}))
    (batch,) = rows.batch(2).pad_collate(tokenizer=bpe())
    assert batch["input_ids"].tolist() == [[1, 2], [3, PAD]]
    assert batch["other"].tolist() == [[1, 2], [3, 0]]
    given = PadCollate(tokenizer=bpe())._resolve([])
    assert given.identity() == PadCollate(padding_side="right", value=PAD).identity()
    packed = rows.select("input_ids").pack(4, tokenizer=bpe())
    assert [row["input_ids"] for row in packed] == [[1, 2, 3, PAD]]
    with pytest.raises(ConfigError, match="no tokenizer nowhere"):
        rows.pack(4, tokenizer="nowhere/tokenizer.json")


@pytest.mark.parametrize(
    ("column", "options"),
    [
        (pa.array([2**63 + 5, 1], pa.uint64()), {}),
        (pa.array([2**63 + 5, 1], pa.uint64()), {"dtype": torch.uint64}),
        (pa.array([[2**63 + 5], [1]], pa.list_(pa.uint64())), {}),
        (pa.array([[70_000], [1]]), {"dtype": torch.int16}),
        (pa.array([70_000, 1]), {"columns": {"x": {"dtype": torch.int16}}}),
        (pa.array([[1e300], [1.0]]), {"dtype": torch.float16}),
    ],
)
def test_what_is_advised_for_a_number_that_does_not_fit_holds_it(
    column: pa.Array, options: dict[str, Any]
) -> None:
    rows = tp.from_arrow(pa.table({"x": column})).batch(2)
    with pytest.raises(tp.DataError, match="cannot hold; pass columns=") as caught:
        list(rows.pad_collate(**options))
    advised = re.search(r"columns=(\{.*\}\})", str(caught.value).partition("cannot hold")[2])
    assert advised is not None
    (batch,) = rows.pad_collate(**{**options, "columns": eval(advised[1], {"torch": torch})})
    assert batch["x"].reshape(-1).tolist() == [
        row[0] if isinstance(row, list) else row for row in column.to_pylist()
    ]


def test_arrays_of_one_length_are_padded_as_those_of_several_where_that_is_said() -> None:
    def shapes(pipe: tp.Pipeline, **options: Any) -> list[Any]:
        return [(tuple(b["x"].shape), b["x"].dtype) for b in pipe.pad_collate(**options)]

    rows = tp.from_dataset([{"x": np.ones((n, 2))} for n in (3, 3, 3, 4)]).batch(2)
    assert (
        shapes(rows, columns={"x": {"pad_to_multiple_of": 8}}) == [((2, 8, 2), torch.float32)] * 2
    )
    assert shapes(rows, columns={"x": {"max_length": 2}}) == [((2, 2, 2), torch.float32)] * 2
    sounds = tp.from_dataset([{"audio": np.zeros(n, np.float32)} for n in (1600, 1600, 1600, 800)])
    spectrograms = sounds.log_mel(time_first=True, output_column="x").batch(2)
    assert shapes(spectrograms) == [((2, 10, 80), torch.float32)] * 2
    assert shapes(spectrograms, max_length=6) == [((2, 6, 80), torch.float32)] * 2
    assert shapes(spectrograms, pad_to_multiple_of=8) == [((2, 16, 80), torch.float32)] * 2


@pytest.mark.parametrize(
    "options", [{}, {"lengths": {"x": "n"}}, {"columns": {"x": {"max_length": 6}}}]
)
def test_arrays_may_be_shorter_after_the_first_rows(options: dict[str, Any]) -> None:
    rows = [{"x": np.ones((min(10, 310 - n), 4), np.float32)} for n in range(308)]
    batches = list(tp.from_dataset(rows).batch(4).pad_collate(**options))
    most = 6 if "columns" in options else 10
    assert {tuple(b["x"].shape[1:]) for b in batches[:70]} == {(most, 4)}
    assert batches[-1]["x"].shape == (4, 6, 4)
    assert batches[-1]["x"][:, :, 0].sum(1).tolist() == [6, 5, 4, 3]


def test_arrays_keep_their_dtype_in_all_batches_where_each_is_known_alone() -> None:
    rows = [{"x": np.ones((n, 2), np.int8)} for n in (3, 3, 3, 4)]
    for pipe in (
        tp.from_dataset(rows).batch(2).map(list),
        tp.from_dataset([*rows[:2] * 128, *rows[2:]]).batch(2),
    ):
        shapes = [(b["x"].shape[1], b["x"].dtype) for b in pipe.pad_collate(max_length=2)]
        assert {*shapes} == {(3, torch.int8), (4, torch.int8)}


def test_fixed_size_lists_are_padded_and_cut_where_a_column_is_named() -> None:
    table = pa.table({"x": pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int32(), 3))})
    rows = tp.from_arrow(table).batch(2)
    assert rows.pad_collate(max_length=2).peek()["x"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert rows.pad_collate(columns={"x": {"max_length": 2}}).peek()["x"].tolist() == [
        [1, 2],
        [4, 5],
    ]
    padded = rows.pad_collate(columns={"x": {"pad_to_multiple_of": 4, "value": 9}}).peek()
    assert padded["x"].tolist() == [[1, 2, 3, 9], [4, 5, 6, 9]]
    tensors = tp.from_tensors(x=torch.ones(4, 3)).batch(2)
    with pytest.raises(
        SchemaError, match="'x' holds tensors of one shape, which are neither padded"
    ):
        tensors.pad_collate(columns={"x": {"max_length": 2}}).peek()
    assert tensors.pad_collate(columns={"x": {"dtype": torch.float64}}).peek()["x"].shape == (2, 3)
