"""``deduplicate``: of rows with equal values the first one of each shard and epoch."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from mutants import resealed
from resuming import check_resume
from trainpipes.state.cursor import sealed, unsealed

TABLE = pa.table(
    {"x": [n * n % 23 for n in range(90)], "s": [f"t{n % 11}" * (n % 3) for n in range(90)], "n": range(90)}
)  # fmt: skip


def rows(shards: int = 1) -> tp.Pipeline:
    return tp.from_arrow(TABLE).sharding_filter(shards)


CHAINS: dict[str, Callable[[], tp.Pipeline]] = {
    "endless": lambda: rows(2).shuffle(20).repeat().deduplicate("s").batch(4),
    "twice": lambda: rows(2).deduplicate("x").deduplicate("s").batch(2),
    "objects": lambda: rows(2).map(dict).deduplicate("s").shuffle(5).batch(4),
    "before packing": lambda: rows(2).deduplicate("s").tokenize("bytes", "s").pack(16).batch(2),
    "a mix": lambda: (
        tp.mix({"a": rows_alone().deduplicate("x"), "b": rows_alone()}, weights={"a": 1, "b": 2})
        .sharding_filter(2).deduplicate("n")
    ),
    "batches of a mix": lambda: (
        tp.mix({"a": rows_alone().deduplicate("x").batch(4)}, weights={"a": 1}).sharding_filter(2)
    ),
    "taken": lambda: rows().deduplicate("x").take(5),
}  # fmt: skip


def rows_alone() -> tp.Pipeline:
    return tp.from_arrow(TABLE).shuffle(30)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CHAINS)
def test_a_resume_goes_on_exactly(name: str) -> None:
    limit = 40 if name == "endless" else None
    check_resume(CHAINS[name], limit=limit, epochs=2, processes=0)


@given(st.data())
@examples(60)
def test_the_first_of_each_is_kept_as_a_set_would(data: st.DataObject) -> None:
    kinds = [st.integers(-3, 3), st.text("ab", max_size=3), st.booleans(), st.binary(max_size=2)]
    pair = st.tuples(data.draw(st.sampled_from(kinds)), st.text("xy", max_size=2))
    pairs = data.draw(st.lists(pair, min_size=1, max_size=60))
    first = {pair: n for n, pair in reversed([*enumerate(pairs)])}
    a, b = zip(*pairs, strict=True)
    table = tp.from_arrow(pa.table({"a": a, "b": b, "n": range(len(pairs))}))
    for pipe in (table, table.map(dict)):
        assert [row["n"] for row in pipe.deduplicate(["a", "b"])] == sorted(first.values())
    cut = data.draw(st.integers(0, len(first) - 1))
    loader, other = (tp.Loader(table.deduplicate(["a", "b"])) for _ in range(2))
    before = [row["n"] for row in islice(loader, cut)]
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert before + [row["n"] for row in other] == sorted(first.values())


def test_each_epoch_and_each_shard_keeps_its_own_first_rows() -> None:
    pipe = rows(3).shuffle(20).deduplicate("x")
    for _ in range(2):
        found = [row["x"] for row in pipe]
        assert max(found.count(x) for x in set(found)) <= 3
        assert set(found) == set(TABLE["x"].to_pylist())
    joined = list(rows(1).deduplicate("x").repeat(2))
    assert [row["n"] for row in joined] == 2 * [row["n"] for row in rows(1).deduplicate("x")]


def test_equal_hashes_of_one_kind_are_told_apart_by_the_other() -> None:
    """Many values, none of which is taken for another."""
    many = pa.table({"x": np.arange(40_000), "s": pa.array(range(40_000)).cast(pa.string())})
    for column in ("x", "s"):
        assert sum(1 for _ in tp.from_arrow(many).deduplicate(column).batch(1000)) == 40


def test_decimals_are_known_by_their_text_whatever_rows_come_with_them() -> None:
    texts = ["1.5"] * 2500 + ["2.25", "1.5", "1.50", "100", "1E-8", "1.05", "2.25"]
    keys = [{"k": Decimal(text), "n": n} for n, text in enumerate(texts)]
    kept = [row["n"] for row in tp.from_dataset(keys).deduplicate("k")]
    assert kept == [0, 2500, *range(2502, 2506)]
    table = pa.table({"k": pa.array([Decimal("1.50"), Decimal("2.25")])})  # as rows of a table are
    assert [*tp.from_arrow(table).sample(0.5, key="k", seed=1)] == [
        *tp.from_dataset(table.to_pylist()).sample(0.5, key="k", seed=1)
    ]
    for seed in range(8):
        sampled = [row["n"] for row in tp.from_dataset(keys).sample(0.5, key="k", seed=seed)]
        assert sum(n < 2500 for n in sampled) in (0, 2500)


def test_a_large_state_is_warned_of() -> None:
    many = tp.from_arrow(pa.table({"x": np.arange(60_000)}))
    loader = tp.Loader(many.deduplicate("x").batch(59_000))
    next(iter(loader))
    said = r"deduplicate\('x'\): its state has 1,2\d\d,\d\d\d bytes for a shard"
    with pytest.warns(UserWarning, match=said):
        loader.state_dict()


def of(**columns: Any) -> tp.Pipeline:
    return tp.from_arrow(pa.table(columns))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: list(rows().deduplicate("y")), "no column 'y'"),
        (lambda: list(of(x=[1, None]).deduplicate("x")), "column 'x' is null.*row 1"),
        (lambda: list(of(x=[[1], [2]]).deduplicate("x")), "column 'x' is list"),
        (lambda: rows().deduplicate([]), r"deduplicate\(columns\)"),
        (lambda: rows().batch(4).deduplicate("x").explain(), r"works on rows: put it before batch"),
        (lambda: rows().unique("x"), "did you mean|deduplicate"),
        (lambda: rows().drop_duplicates("x"), "deduplicate"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((tp.TrainpipesError, AttributeError), match=message):
        make()


@pytest.mark.parametrize("seen", ["?", "AAAA", 5, None])
def test_a_state_that_was_edited_is_refused(seen: Any) -> None:
    loader = tp.Loader(rows().deduplicate("x"))
    list(islice(loader, 5))
    state = loader.state_dict()
    text, _ = unsealed(state["shard-0000"])
    cursor = json.dumps({**json.loads(text), "seen": seen})
    edited = resealed({**state, "shard-0000": sealed(cursor, "0" * 8)})
    other = tp.Loader(rows().deduplicate("x"))

    def go_on() -> None:
        other.load_state_dict(edited)
        next(iter(other))

    with pytest.raises(tp.StateError):
        go_on()
