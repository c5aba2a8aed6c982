"""What a state says of rows in memory: all of them count, and how they lie in memory does not."""

from __future__ import annotations

import datetime
import decimal
import json
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from trainpipes import StateError
from trainpipes.columns import content

N = 300


def columns(draw: random.Random) -> dict[str, Callable[[], pa.Array]]:
    """What makes columns with nulls, by their kind."""

    def of(make: Any, type: pa.DataType | None = None) -> pa.Array:
        return pa.array([None if draw.random() < 0.2 else make() for _ in range(N)], type)

    def number() -> int:
        return draw.randrange(100)

    def word() -> str:
        return "é" * draw.randrange(6)

    day = datetime.datetime(2024, 1, 1)
    return {
        "int": lambda: of(number),
        "bool": lambda: of(lambda: draw.random() < 0.5),
        "half": lambda: of(lambda: np.float16(draw.random())),
        "float": lambda: of(lambda: draw.choice([0.5, -0.0, float("inf")])),
        "time": lambda: of(lambda: day + datetime.timedelta(number())),
        "decimal": lambda: of(lambda: decimal.Decimal(number())),
        "fixed bytes": lambda: of(lambda: bytes([number(), 1]), pa.binary(2)),
        "text": lambda: of(word),
        "large text": lambda: of(word, pa.large_string()),
        "text view": lambda: of(lambda: word() * 9, pa.string_view()),
        "bytes": lambda: of(lambda: word().encode()),
        "coded": lambda: of(word).dictionary_encode(),
        "list": lambda: of(lambda: [draw.choice([None, number()]) for _ in range(number() % 4)]),
        "large list": lambda: of(lambda: [word()] * (number() % 3), pa.large_list(pa.string())),
        "list view": lambda: of(lambda: [number()], pa.list_view(pa.int64())),
        "fixed list": lambda: of(lambda: [number(), None], pa.list_(pa.int16(), 2)),
        "struct": lambda: of(lambda: {"a": number(), "b": [word()]}),
        "map": lambda: of(lambda: [("k", number())], pa.map_(pa.string(), pa.int64())),
    }


KINDS = list(columns(random.Random(0)))


def column(kind: str) -> pa.Array:
    return columns(random.Random(kind))[kind]()


def fingerprint(pipe: tp.Pipeline) -> dict[str, Any]:
    state = pipe.state_dict()
    assert state is not None
    found: dict[str, Any] = json.loads(state["pipeline"])["data"]
    return found


def of_table(table: pa.Table) -> str:
    found = fingerprint(tp.from_arrow(table))["content"]
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_slices_and_garbage_below_nulls_make_no_difference(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, draw = column(kind), random.Random(1)
    copied = pa.array(whole.to_pylist(), whole.type)
    for piece in (1 << 16, 64):
        monkeypatch.setattr(content, "PIECE_ROWS", piece)
        found = {of_table(pa.table({"c": one})) for one in (whole, copied)}
        for _ in range(4):
            edges = sorted([0, N, *(draw.randrange(N + 1) for _ in range(3))])
            chunks = [
                pa.concat_arrays([whole.slice(0, 5), whole.slice(a, b - a)]).slice(5)
                if draw.random() < 0.5
                else copied.slice(a, b - a)
                for a, b in pairwise(edges)
            ]
            found.add(of_table(pa.table({"c": pa.chunked_array(chunks, whole.type)})))
        assert len(found) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_any_row_and_the_order_count(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "PIECE_ROWS", 64)
    whole = column(kind)
    values = whole.to_pylist()
    found = {of_table(pa.table({"c": whole})), of_table(pa.table({"d": whole}))}
    draw, tried = random.Random(2), 0
    for row in (1, 70, 150, 298):
        other = next(n for n in range(N) if values[n] != values[row])
        changed = [*values]
        changed[row] = values[other]
        found.add(of_table(pa.table({"c": pa.array(changed, whole.type)})))
        swapped = [*changed]
        swapped[other] = values[row]
        found.add(of_table(pa.table({"c": pa.array(swapped, whole.type)})))
        tried += 2
    draw.shuffle(values)
    found.add(of_table(pa.table({"c": pa.array(values, whole.type)})))
    found.add(of_table(pa.table({"c": whole.slice(1)})))
    assert len(found) == tried + 4


def test_what_lies_below_a_null_is_no_part_of_it() -> None:
    offsets, text = pa.py_buffer(np.array([0, 1, 3], np.int32)), pa.py_buffer(b"abc")
    odd = pa.Array.from_buffers(pa.string(), 2, [pa.py_buffer(b"\x01"), offsets, text])
    plain = pa.array(["a", None])
    assert odd.equals(plain)
    assert of_table(pa.table({"c": odd})) == of_table(pa.table({"c": plain}))


@given(st.lists(st.lists(st.text(max_size=3) | st.none(), max_size=3) | st.none(), max_size=20))
def test_tables_differ_where_their_rows_do(values: list[Any]) -> None:
    kind = pa.list_(pa.string())
    one = content.table_digest(pa.table({"c": pa.array(values, kind)}))
    for row, value in enumerate(values):
        other = [*values]
        other[row] = [*(value or []), "x"]
        assert content.table_digest(pa.table({"c": pa.array(other, kind)})) != one


TENSORS = {
    "long": torch.arange(5000),
    "rows": torch.arange(3000.0).reshape(1000, 3),
    "bfloat16": torch.arange(1000).bfloat16(),
    "bool": torch.arange(1000) % 3 == 0,
    "complex": torch.arange(100).to(torch.complex64),
    "deep": torch.arange(2000).reshape(50, 4, 10),
    "turned": torch.arange(2000).reshape(20, 100).t(),
}


@pytest.mark.parametrize("piece", [8 << 20, 128])
@pytest.mark.parametrize("name", TENSORS)
def test_every_number_of_a_tensor_counts_and_strides_do_not(
    name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "PIECE_BYTES", piece)

    def of(tensor: torch.Tensor) -> str:
        found = fingerprint(tp.from_tensors(x=tensor))["content"]
        assert isinstance(found, str)
        return found

    tensor = TENSORS[name].clone()  # whose digest nobody knows yet
    want = of(tensor)
    assert of(tensor.contiguous().clone()) == want
    wide = torch.stack([tensor, tensor], dim=-1)
    assert of(wide[..., 1]) == want
    for row in (1, len(tensor) // 3, len(tensor) - 2):
        other = tensor.clone()
        other[row] = (other[row] == 0).to(other.dtype)
        assert of(other) != want
    assert of(tensor.roll(1, 0)) != want


def test_a_tensor_that_was_changed_in_place_is_another() -> None:
    tensor = torch.zeros(100)
    before = fingerprint(tp.from_tensors(tensor))["content"]
    tensor[33] = 1
    assert fingerprint(tp.from_tensors(tensor))["content"] != before


def test_rows_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table, tensor, calls = pa.table({"x": range(100)}), torch.arange(100), []
    inner = content._joined

    def counted(about: str, *rest: Any) -> str:
        calls.append(about)
        return inner(about, *rest)

    monkeypatch.setattr(content, "_joined", counted)
    for seed in range(3):
        for pipe in (tp.from_arrow(table), tp.from_tensors(tensor)):
            run = iter(pipe.shuffle(10, seed=seed).batch(5))
            for _ in range(3):
                next(run)
                run.state_dict()
    assert len(calls) == 2


def test_another_row_between_those_once_sampled_is_refused() -> None:
    for make in (lambda x: tp.from_arrow(pa.table({"x": x})), lambda x: tp.from_tensors(x=x)):
        numbers = np.arange(100)
        state = make(numbers).batch(5).state_at(3)
        numbers = numbers.copy()
        numbers[33] = 0
        with pytest.raises(StateError, match="data/content: saved"):
            make(numbers).batch(5).load_state_dict(state)


def test_what_is_noted_of_a_table_beside_its_rows_is_no_part_of_a_state() -> None:
    rows = {"x": [{"a": n} for n in range(6)], "y": [[n] for n in range(6)]}
    table = pa.table(rows)
    inner = pa.struct([pa.field("a", pa.int64(), metadata={"k": "v"})])
    schema = pa.schema(
        [pa.field("x", inner, metadata={"unit": "m"}), table.schema.field("y")],
        metadata={"creator": "x"},
    )
    noted = pa.table(rows, schema=schema)
    assert str(noted.schema) != str(table.schema)
    state = tp.from_arrow(noted).batch(2).state_at(1)
    pipe = tp.from_arrow(table).batch(2)
    pipe.load_state_dict(state)
    assert len(list(pipe)) == 2
    renamed = tp.from_arrow(table.rename_columns(["x", "z"])).batch(2)
    with pytest.raises(StateError):
        renamed.load_state_dict(state)
