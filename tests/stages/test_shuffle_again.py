"""``shuffle`` after other shuffles, mixes, packed rows and batches, and ``batch`` over batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from resuming import check_resume, goes_on_exactly

Make = Callable[[tp.Pipeline], tp.Pipeline]

ROWS = pa.table({"x": range(137), "ids": [[n] * (n % 7 + 1) for n in range(137)]})


def rows(shards: int = 3) -> tp.Pipeline:
    return tp.from_arrow(ROWS).sharding_filter(shards)


def pieces(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"x": row["x"], "piece": n} for n in range(row["x"] % 4)]


def odd(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 2)


def whole(batch: Any) -> Any:
    return batch


def mix() -> tp.Pipeline:
    two = {"a": tp.from_arrow(ROWS).shuffle(9), "b": tp.from_arrow(ROWS.slice(30))}
    return tp.mix(two, weights={"a": 2, "b": 1}).sharding_filter(3)


#: By name: what stands below a shuffle, and above it.
CHAINS: dict[str, tuple[Callable[[], tp.Pipeline], Make]] = {
    "rows": (lambda: rows().shuffle(20, seed=1), lambda p: p),
    "rows, then batches": (lambda: rows().shuffle(20, seed=1).map(dict), lambda p: p.batch(4)),
    "pieces": (lambda: rows().flat_map(pieces), lambda p: p.batch(4)),
    "kept rows": (lambda: rows().shuffle(9).filter(odd), lambda p: p.filter(odd).batch(3)),
    "packed rows": (
        lambda: rows().shuffle(9).pack(16, column="ids"), lambda p: p.batch(2).pad_collate()
    ),
    "a mix": (mix, lambda p: p.batch(4)),
    "a stream": (lambda: tp.from_iterable(lambda: range(77)).shuffle(9), lambda p: p.batch(3)),
    "drawn rows": (lambda: rows().shuffle(scope="global"), lambda p: p.batch(4)),
    "batches": (lambda: rows().shuffle(20).batch(4), lambda p: p),
    "buckets": (lambda: rows().bucket_by_length(4, column="ids", buffer_size=20), lambda p: p),
    "tensors": (lambda: rows().batch(4).pad_collate(), lambda p: p),
    "mapped batches": (lambda: rows().batch(4).map(whole), lambda p: p.map(whole)),
    "epochs of rows": (lambda: rows().shuffle(9).repeat(2), lambda p: p.batch(4)),
    "epochs of batches": (lambda: rows().shuffle(9).batch(4).repeat(2), lambda p: p),
    "groups of batches": (lambda: rows().batch(2).batch(3), lambda p: p.batch(2)),
}  # fmt: skip


def words(item: Any) -> str:
    """An item as text."""
    if isinstance(item, dict):
        return str({name: words(one) for name, one in item.items()})
    return str([words(one) for one in item]) if isinstance(item, list) else str(item)


#: Each chain with two sizes, the smallest and one above all rows in turn.
SIZES = [(name, size) for n, name in enumerate(CHAINS) for size in (6, (1, 1000)[n % 2])]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_all_items_come_once_in_another_order_every_epoch(name: str, size: int) -> None:
    make, _ = CHAINS[name]
    below, shuffled = make(), make().shuffle(size, seed=5)
    for _ in range(2):
        before, after = [*map(words, below)], [*map(words, shuffled)]
        assert Counter(before) == Counter(after)
        assert (before == after) == (size == 1)
    again = make().shuffle(size, seed=5)
    assert [*map(words, again)] != after or size == 1
    assert [*map(words, again)] == after


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CHAINS)
def test_a_resume_goes_on_exactly(name: str) -> None:
    make, above = CHAINS[name]
    goes_on_exactly(lambda: above(make().shuffle(6, seed=2)))


def test_an_endless_chain_goes_on_exactly() -> None:
    pipe = rows().shuffle(9).shuffle(5).repeat().batch(4)
    check_resume(pipe, limit=16, epochs=2, points=4, processes=0)


def test_buffers_of_one_shard_grow_and_hold_what_comes_one_after_the_other() -> None:
    found = list(tp.from_dataset(range(9000)).flat_map(lambda n: [n]).shuffle(3200, seed=4))
    start = 0
    for size in (256, 256, 400, 800, 1600, 3200, 2488):
        part = found[start : start + size]
        assert sorted(part) == [*range(start, start + size)] != part
        start += size
    assert start == len(found)


@pytest.mark.parametrize("size", [10, 100, 256])
def test_the_first_batches_of_each_shard_move_too(size: int) -> None:
    orders = []
    for seed in range(40):
        pipe = tp.from_dataset(range(600)).sharding_filter(2).batch(1).shuffle(size, seed=seed)
        batches = list(islice(pipe, 20))
        assert sorted(batches[0:20:2]) == [[n] for n in range(10)] or size > 10
        orders.append([batch[0] for batch in batches[:6]])
    firsts = [{order[place] for order in orders} for place in range(6)]
    assert min(map(len, firsts)) > 5


def test_orders_are_those_that_earlier_versions_gave(golden: Any) -> None:
    pipes = {
        "rows": tp.from_dataset(range(40)).flat_map(lambda n: [n]).shuffle(16, seed=42),
        "four shards": tp.from_dataset(range(60)).sharding_filter(4).shuffle(9).shuffle(8, seed=42),
        "batches": tp.from_dataset(range(60)).sharding_filter(2).batch(3).shuffle(5, seed=42),
    }
    golden("shuffled_again.json", {name: [list(pipe), list(pipe)] for name, pipe in pipes.items()})


def test_an_epoch_has_one_order_whatever_stands_above_repeat() -> None:
    def twice() -> tp.Pipeline:
        return tp.from_dataset(range(60)).map(int).shuffle(9).shuffle(32, seed=2)

    pipe = twice()
    wanted = [row for _ in range(3) for row in pipe]
    assert list(twice().repeat(3)) == wanted
    assert [row for batch in twice().repeat(3).batch(7) for row in batch] == wanted
    check_resume(twice().repeat(3).batch(7).shuffle(5), epochs=1, processes=0)


def test_two_shuffles_of_one_seed_do_not_draw_the_same() -> None:
    def shuffled(rows: Any) -> tp.Pipeline:
        return tp.from_dataset(rows).flat_map(lambda n: [n]).shuffle(1024, seed=3)

    once = list(shuffled(range(64)))
    twice = list(shuffled(once).shuffle(1024, seed=3))
    assert twice != once != sorted(once) == sorted(twice)


def test_rows_are_mixed_further_than_by_one_shuffle() -> None:
    """How far rows are from their places, on average: a third of what is mixed together."""
    one = tp.from_iterable(lambda: range(20_000)).shuffle(500)
    orders = [list(pipe) for pipe in (one, one.map(int).shuffle(6000))]
    few, many = (np.abs(np.array(order) - np.arange(20_000)).mean() for order in orders)
    assert few < 500
    assert many > 1200


def test_explain_says_how_many_are_mixed_and_counts_their_memory() -> None:
    said = rows().shuffle(9).batch(4).shuffle(6).explain()
    assert "shuffle(6): so many of a shard are mixed then" in str(said)
    assert (said.window_bytes or 0) > (rows().shuffle(9).batch(4).explain().window_bytes or 0)
    assert "shuffle(6): so many of a shard" in str(rows().flat_map(pieces).shuffle(6).explain())


@pytest.mark.parametrize("shards", [1, 3])
def test_a_batch_size_changes_within_an_epoch_where_that_can_be(shards: int) -> None:
    def pipe(size: int) -> tp.Pipeline:
        return rows(shards).shuffle(20).shuffle(9).batch(size)

    first = tp.Loader(pipe(4))
    given = [row["x"] for batch in islice(first, 6) for row in batch]
    loader = tp.Loader(pipe(8))
    if shards > 1:
        for allowed in ([], ["batch_size"]):  # without it, it is not advised
            with pytest.raises(tp.StateError, match="cannot change within an epoch"):
                loader.load_state_dict(first.state_dict(), allow_changes=allowed)
        return
    loader.load_state_dict(first.state_dict(), allow_changes=["batch_size"])
    given += [row["x"] for batch in loader for row in batch]
    assert given == [row["x"] for batch in pipe(4) for row in batch]


# Batches of batches


@pytest.mark.parametrize(("shards", "drop_last"), [(1, True), (3, False), (3, True)])
def test_batches_come_in_lists(shards: int, drop_last: bool) -> None:
    plain = [words(batch) for batch in rows(shards).shuffle(9).batch(4)]
    groups = list(rows(shards).shuffle(9).batch(4).batch(5, drop_last=drop_last))
    found = [words(batch) for group in groups for batch in group]
    sizes = Counter(len(group) for group in groups)
    if drop_last:
        assert set(sizes) == {5}
        assert not Counter(found) - Counter(plain)
        assert len(plain) - len(found) <= 4 * shards
    else:
        assert sorted(found) == sorted(plain)
        assert sum(count for size, count in sizes.items() if size < 5) <= shards
    if shards == 1:
        assert found == plain[: len(found)]


def test_collated_batches_come_in_lists() -> None:
    groups = list(rows(1).batch(4).pad_collate().batch(3))
    assert [len(group) for group in groups] == [3] * 11 + [2]
    assert [batch["ids"].shape[0] for batch in groups[0]] == [4, 4, 4]
    for pipe in (
        rows().batch(4).pad_collate().batch(3),
        rows().batch(max_tokens=40, column="ids").pad_collate().batch(3),
        rows().batch(4).filter(lambda batch: odd(batch[0])).batch(2),
    ):
        check_resume(pipe, epochs=2, points=4, processes=0)


# take and skip of batches


def test_what_is_taken_is_not_what_later_stages_leave() -> None:
    def batches(*starts: int) -> list[list[int]]:
        return [[*range(n, n + 4)] for n in starts]

    def even(batch: list[int]) -> bool:
        return batch[0] % 8 == 0

    taken = tp.from_dataset(range(100)).batch(4).take(10)
    assert list(taken.filter(even)) == batches(0, 8, 16, 24, 32)
    assert list(taken.skip(6).filter(even)) == batches(24, 32)
    assert sorted(taken.shuffle(4)) == batches(*range(0, 40, 4))
    assert list(taken.batch(6)) == [batches(*range(0, 24, 4)), batches(*range(24, 40, 4))]
    for pipe in (taken.filter(even), taken.shuffle(4), taken.batch(6)):
        check_resume(pipe, epochs=2, points=4, processes=0)


@given(
    st.integers(0, 60), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans(),
    st.sampled_from(["once", "epochs", "shuffled", "again"]),
)  # fmt: skip
@examples(60)
@pytest.mark.filterwarnings("ignore:an epoch of this pipeline gives nothing")
def test_how_many_lists_of_batches_there_are_is_known_in_advance(
    n: int, shards: int, size: int, many: int, drop: bool, drop_lists: bool, kind: str
) -> None:
    pipe = tp.from_dataset(range(n)).sharding_filter(shards).shuffle(9).batch(size, drop_last=drop)
    pipe = pipe.shuffle(3) if kind == "shuffled" else pipe
    pipe = pipe.batch(many, drop_last=drop_lists)
    again = {"epochs": lambda p: p.repeat(3), "again": lambda p: p.batch(2)}
    pipe = again.get(kind, lambda p: p)(pipe)
    found = list(pipe)
    assert len(pipe) == len(found)
    if not drop and not drop_lists and kind in ("once", "shuffled"):
        assert sorted(row for lists in found for batch in lists for row in batch) == [*range(n)]
