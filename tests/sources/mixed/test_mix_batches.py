"""Mixes whose sources make batches: each batch has rows of one source."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from resuming import check_resume

LONG = pa.table({"x": range(100, 153), "ids": [[n] * (n % 5 + 1) for n in range(53)]})
PAIRS = pa.table({"y": range(31), "score": [n / 2 for n in range(31)]})


def rows() -> tp.Pipeline:
    return tp.from_arrow(LONG)


def two_tasks(**options: Any) -> tp.Pipeline:
    texts = rows().shuffle(20).batch(4).pad_collate()
    pairs = tp.from_arrow(PAIRS).batch(3).collate()
    return tp.mix({"texts": texts, "pairs": pairs}, **options)


def whole(batch: Any) -> Any:
    return batch


def small(row: dict[str, Any]) -> bool:
    return bool(row["x"] < 140)


CHAINS: dict[str, Callable[[], tp.Pipeline]] = {
    "tasks": lambda: two_tasks(output_column="task").sharding_filter(3),
    "tasks, epoch after epoch": lambda: two_tasks().sharding_filter(4).repeat(2),
    "tasks by weights": lambda: two_tasks(
        weights={"texts": 1, "pairs": 5}, stop="repeat"
    ).sharding_filter(2),
    "the first of them": lambda: two_tasks().sharding_filter(2).take(7),
    "all but the first": lambda: two_tasks().sharding_filter(2).skip(7),
    "shuffled": lambda: two_tasks().sharding_filter(2).shuffle(5),
    "steps of an optimizer": lambda: two_tasks().sharding_filter(2).batch(4),
    "rows collated above": lambda: tp.mix(
        {"a": rows().shuffle(9).batch(4), "b": rows().skip(9).batch(7)}, output_column="part"
    ).sharding_filter(3).pad_collate(),
    "by tokens": lambda: tp.mix(
        {"a": rows().batch(max_tokens=16, column="ids").pad_collate(),
         "b": rows().shuffle(9).batch(2).pad_collate()},
        weights={"a": 2, "b": 1}, weight_by="tokens", column="ids",
    ).sharding_filter(2),
    "dropped rows": lambda: tp.mix(
        {"a": rows().filter(small).batch(4), "b": rows().batch(5, drop_last=True)},
        weights={"a": 1, "b": 1},
    ).sharding_filter(2),
    "batches by length": lambda: tp.mix(
        {"a": rows().bucket_by_length(4, column="ids", buffer_size=16).collate(list),
         "b": rows().batch(2).map(whole).batch(2)},
        weights={"a": 1, "b": 1},
    ).sharding_filter(2),
    "a mix of mixes": lambda: tp.mix(
        {"tasks": two_tasks(), "more": rows().batch(9).pad_collate()},
        weights={"tasks": 2, "more": 1}, output_column="outer",
    ).sharding_filter(3),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CHAINS)
def test_a_resume_goes_on_exactly(name):
    limit = 60 if name == "tasks by weights" else None
    check_resume(CHAINS[name], points=5, limit=limit, epochs=2, processes=0)


def words(batch: Any) -> Any:
    if isinstance(batch, dict):
        return str({name: getattr(v, "tolist", lambda v=v: v)() for name, v in batch.items()})
    return [words(one) for one in batch] if isinstance(batch, list) else str(batch)


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:.*do not divide num_shards")
@pytest.mark.parametrize("name", ["tasks", "rows collated above", "dropped rows", "a mix of mixes"])
def test_ranks_workers_and_threads_give_the_same_batches(name):
    wanted = [words(batch) for batch in CHAINS[name]()]
    for options in ({"num_workers": 2}, {"threads": 2}, {"threads": 0}):
        loader = tp.Loader(CHAINS[name](), **options)
        assert [words(batch) for batch in loader] == wanted
    wanted = [words(batch) for batch in islice(CHAINS[name]().repeat(), 60)]
    for ranks in (3, 4):
        pipes = [CHAINS[name]().repeat() for _ in range(ranks)]
        parts = [iter(p.distributed(rank=r, world_size=ranks)) for r, p in enumerate(pipes)]
        assert [words(next(parts[n % ranks])) for n in range(60)] == wanted


def test_each_batch_has_rows_of_one_source_in_that_source_s_order():
    texts = rows().shuffle(20).batch(4).pad_collate()
    wanted = {"texts": [b["x"].tolist() for b in texts],
              "pairs": [b["y"].tolist() for b in tp.from_arrow(PAIRS).batch(3).collate()]}  # fmt: skip
    found: dict[str, list[Any]] = {"texts": [], "pairs": []}
    for batch in two_tasks(output_column="task"):
        found[batch["task"]].append(batch["x" if batch["task"] == "texts" else "y"].tolist())
    for name, batches in wanted.items():
        assert found[name][: len(batches)] == batches
    assert [*map(len, found.values())] == [14, 11]  # shares by batches: each once


def test_a_source_has_its_share_of_the_batches_to_within_one():
    weights = {"texts": 5, "pairs": 2}
    pipe = two_tasks(weights=weights, stop="repeat", output_column="task")
    count, found = 0, iter(pipe)
    for n in range(1, 200):
        count += next(found)["task"] == "pairs"
        assert abs(count - n * Fraction(2, 7)) < 1


def test_shares_of_tokens_are_those_of_the_rows_without_padding():
    parts = {"a": rows().batch(4).pad_collate(), "b": rows().batch(16).pad_collate()}
    pipe = tp.mix(parts, weights={"a": 1, "b": 1}, weight_by="tokens", column="ids", stop="repeat")
    mixing = pipe.stats(200).mixture
    assert mixing is not None
    assert mixing.unit == "tokens"
    assert mixing.shares == pytest.approx({"a": 0.5, "b": 0.5}, abs=0.02)
    by_batches = tp.mix(parts, weights={"a": 1, "b": 1}, stop="repeat").stats(100).mixture
    assert by_batches is not None
    assert by_batches.unit == "batches"
    assert by_batches.amounts == {"a": 50, "b": 50}


@given(st.data())
@examples(30)
def test_any_of_them_against_plain_lists(data):
    """Each source's batches come in its order, the last pass cut where the mix ends."""
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    batch = data.draw(st.lists(st.integers(1, 6), min_size=len(sizes), max_size=len(sizes)))
    drop = data.draw(st.booleans())
    drop = drop and all(size >= b for size, b in zip(sizes, batch, strict=True))
    collated = data.draw(st.booleans())

    def source(n: int) -> tp.Pipeline:
        pipe = tp.from_arrow(pa.table({"x": range(100 * n, 100 * n + sizes[n])}))
        pipe = pipe.batch(batch[n], drop_last=drop)
        return pipe.pad_collate() if collated else pipe

    def make() -> tp.Pipeline:
        return tp.mix({f"s{n}": source(n) for n in range(len(sizes))})

    items = [*make()]
    values = [b["x"].tolist() if collated else [row["x"] for row in b] for b in items]
    passes = []
    for n in range(len(sizes)):
        lists = [v["x"].tolist() if collated else [row["x"] for row in v] for v in source(n)]
        own = [v for v in values if v[0] // 100 == n]
        passes.append(len(own) / len(lists))
        assert own == (lists * len(own))[: len(own)]
    assert min(passes) >= 1  # each was read once
    cut = data.draw(st.integers(0, len(items) - 1))
    loader = tp.Loader(make())
    seen = iter(loader)
    before = [next(seen) for _ in range(cut)]
    state = json.loads(json.dumps(loader.state_dict()))
    other = tp.Loader(make())
    other.load_state_dict(state)
    assert [words(b) for b in [*before, *other]] == [words(b) for b in items]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tp.mix({"a": rows().batch(2), "b": rows()}),
         r"'a' gives batches of rows and 'b' rows: batch\(\) and collate in all sources, or in none"),
        (lambda: tp.mix({"a": rows().batch(2), "b": rows().batch(2).collate()}),
         "'a' gives batches of rows and 'b' finished batches"),
        (lambda: list(tp.mix({"a": rows().batch(2), "b": tp.from_arrow(PAIRS).batch(2)})),
         "rows of all sources have the same columns, and 'a' has column 'x' as int64, 'b' no"),
        (lambda: list(tp.mix({"a": rows().batch(2).collate(list)}, output_column="task")),
         r"output_column='task' needs batches that are dicts without it, got"),
        (lambda: list(tp.mix({"a": rows().batch(2).pad_collate()}, output_column="x")),
         r"needs batches that are dicts without it, got one with the keys \['x', 'ids'\]"),
        (lambda: list(two_tasks().bucket_by_length(4)),
         r"makes the batches: leave out bucket_by_length\(4\)"),
        (lambda: list(two_tasks().pack(4)), r"pack\(4\) works on rows: put it into each source"),
        (lambda: list(tp.mix({"a": rows().batch(max_tokens=9, column="ids")})),
         "takes the sources' numbers of batches, and how many batches 'a' has is not known"),
        (lambda: two_tasks().write_parquet("out"), "call it before batch"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(tp.TrainpipesError, match=message):
        make()


@pytest.mark.parametrize(
    "above",
    [lambda p: p, lambda p: p.batch(1), lambda p: p.batch(2).collate(list), lambda p: p.shuffle(2).batch(2),
     lambda p: p.batch(2).pad_collate()],
)  # fmt: skip
def test_a_bad_row_is_named_with_its_source(above):
    good, bad = tp.from_arrow(LONG.select(["ids"])), pa.table({"ids": [[1], [2], None, [4]]})
    sources = {"good": above(good), "bad": above(tp.from_arrow(bad))}
    mix = tp.mix(sources, weights={"good": 1, "bad": 1}, weight_by="tokens", column="ids")
    for pipe in (mix, tp.mix({"outer": mix}, weights={"outer": 1})):
        with pytest.raises(tp.DataError, match=r"column 'ids'.* null.*row 2") as caught:
            list(pipe)
        assert caught.value.row == 2
        assert str(caught.value.source).endswith("bad")


def test_tokens_of_a_mix_of_finished_batches_are_not_counted():
    inner = tp.mix({"a": rows().batch(2).pad_collate()})
    with pytest.raises(tp.ConfigError, match=r"'b' is a mix of finished batches.*name its sources"):
        tp.mix({"b": inner}, weights={"b": 1}, weight_by="tokens", column="ids")
