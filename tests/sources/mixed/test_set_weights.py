"""Shares of a mix change within a pass, at one batch over all ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from launch import Launch

OLD, NEW = {"a": 1, "b": 1, "c": 2}, {"a": 1, "b": 5, "c": 0}


def rows(name: str, count: int = 300) -> tp.Pipeline:
    ids = [[1] * (1 + n % 7) for n in range(count)]
    table = pa.table({"who": [f"{name}{n}" for n in range(count)], "input_ids": ids})
    return tp.from_arrow(table).shuffle(20, seed=1)


def sources() -> dict[str, tp.Pipeline]:
    return {"a": rows("a"), "b": rows("b", 90), "c": rows("c", 500)}


def mixed(weights: dict[str, float] = OLD, **options: Any) -> tp.Pipeline:
    return tp.mix(sources(), weights=weights, **{"stop": "repeat", **options}).sharding_filter(4)


def batched(weights: dict[str, float] = OLD, **options: Any) -> tp.Pipeline:
    return mixed(weights, **options).batch(5)


def of_batches(weights: dict[str, float] = OLD) -> tp.Pipeline:
    inner = {name: pipe.batch(3) for name, pipe in sources().items()}
    return tp.mix(inner, weights=weights, stop="repeat").sharding_filter(4)


def nested(weights: dict[str, float] = OLD) -> tp.Pipeline:
    inner = sources()
    inner["a"] = tp.mix({"x": rows("x"), "y": rows("y")}, weights={"x": 1, "y": 2}, stop="repeat")
    return tp.mix(inner, weights=weights, stop="repeat").sharding_filter(4).batch(5)


CHAINS: dict[str, Callable[..., tp.Pipeline]] = {
    "rows": batched,
    "tokens": lambda w=OLD: batched(w, weight_by="tokens"),
    "one shard": lambda w=OLD: tp.mix(sources(), weights=w, stop="repeat").batch(5),
    "token budgets": lambda w=OLD: mixed(w).batch(max_tokens=30),
    "functions": lambda w=OLD: mixed(w).map(lambda row: row, version="1").batch(5),
    "batches": of_batches,
    "nested": nested,
    "limits": lambda w=OLD: batched(w, max_epochs={"b": 1}),
    "an end": lambda w=OLD: batched(w, stop="all_exhausted"),
    "first end": lambda w=OLD: batched(w, stop="first_exhausted"),
    "repeated": lambda w=OLD: batched(w, stop="first_exhausted").repeat(),
    "groups": lambda w=OLD: batched(w).batch(2),
    "names": lambda w=OLD: batched(w, output_column="of"),
    "unbatched": mixed,
}


def names(item: Any) -> Any:
    return [names(one) for one in item] if isinstance(item, list) else item["who"]


def taken(iterator: Any, count: int) -> list[Any]:
    return [names(item) for item in islice(iterator, count)]


def as_read(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


def by_states(make: Callable[..., tp.Pipeline], at: int, count: int) -> list[Any]:
    """The batches of a run that was stopped at a batch, and went on in the mix of the new weights."""
    iterator = iter(make())
    before = taken(iterator, at)
    pipe = make(NEW)
    pipe.load_state_dict(as_read(iterator.state_dict()), allow_changes=["mix"])
    return before + taken(iter(pipe), count - at)


def resumed(pipe: tp.Pipeline, state: dict[str, Any], **options: Any) -> tp.Loader:
    loader = tp.Loader(pipe, **options)
    loader.load_state_dict(as_read(state))
    return loader


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CHAINS)
def test_a_change_is_what_a_state_loaded_into_the_new_mix_gives(name: str) -> None:
    make = CHAINS[name]
    whole = by_states(make, 13, 40)
    for called in (0, 13):
        loader = tp.Loader(make())
        batches = iter(loader)
        found = taken(batches, called)
        assert loader.set_weights({"b": 5, "c": 0}, at_step=13) == 13
        states = {called: loader.state_dict()}
        for number in range(called + 1, 15):
            found += taken(batches, 1)
            states[number] = loader.state_dict()
        assert found + taken(batches, 26) == whole, called
        for number in {called, 12, 13, 14} & states.keys():  # before the batch, at it and after it
            again = taken(iter(resumed(make(), states[number])), 6)
            assert again == whole[number : number + 6], (called, number)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["rows", "tokens", "repeated"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_of_any_number_go_on_alike(name: str, workers: int) -> None:
    make = CHAINS[name]
    whole = by_states(make, 14, 48)
    for world in (2, 4):
        found: list[list[Any]] = []
        states = []
        for rank in range(world):
            loader = tp.Loader(make().distributed(rank=rank, world_size=world), num_workers=workers)
            batches = iter(loader)
            found.append(taken(batches, 8 // world))
            loader.set_weights({"b": 5, "c": 0}, at_step=14)
            found[-1] += taken(batches, 16 // world)
            states.append(loader.state_dict())
        turns = [found[m % world][m // world] for m in range(24)]
        assert turns == whole[:24]
        merged = tp.merge_states(states)
        again = taken(iter(resumed(make(), merged, num_workers=2 - workers)), 24)
        assert again == whole[24:]


def test_states_from_before_the_batch_go_on_on_other_ranks() -> None:
    whole = by_states(batched, 13, 60)
    loader = tp.Loader(batched())
    batches = iter(loader)
    next(batches)
    loader.set_weights({"b": 5, "c": 0}, at_step=13)
    for taken_before in range(1, 15):
        if taken_before not in (1, 12, 13, 14):
            next(batches)
            continue
        state = loader.state_dict()
        for world in (2, 4):
            parts = [
                taken(iter(resumed(batched().distributed(rank=r, world_size=world), state)), 6)
                for r in range(world)
            ]
            first = [(r - taken_before) % world for r in range(world)]
            turns = [parts[first.index(n % world)][n // world] for n in range(6 * world)]
            assert turns == whole[taken_before : taken_before + 6 * world]
        next(batches)


def test_each_source_has_its_share_before_and_after() -> None:
    loader = tp.Loader(batched())  # 1, 1 and 2 of 4
    batches = iter(loader)
    counts = Counter(name[0] for batch in taken(batches, 16) for name in batch)
    assert counts == {"a": 20, "b": 20, "c": 40}
    loader.set_weights({"a": 2, "c": 7}, at_step=32)  # 2, 1 and 7 of 10: b keeps its weight
    counts = Counter(name[0] for batch in taken(batches, 16) for name in batch)
    assert counts == {"a": 20, "b": 20, "c": 40}  # until then
    counts = Counter(name[0] for batch in taken(batches, 16) for name in batch)
    assert counts == {"a": 16, "b": 8, "c": 56}


def test_shares_by_tokens_change_too() -> None:
    def tokens(batches: Any, count: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for row in (row for batch in islice(batches, count) for row in batch):
            found[row["who"][0]] += len(row["input_ids"])
        return found

    loader = tp.Loader(batched({"a": 1, "b": 1, "c": 1}, weight_by="tokens"))
    batches = iter(loader)
    before = tokens(batches, 40)
    loader.set_weights({"a": 0, "c": 3}, at_step=40)
    after = tokens(batches, 40)
    longest = 4 * 7  # of each shard
    assert max(before.values()) - min(before.values()) <= 2 * longest
    assert set(after) == {"b", "c"}
    assert abs(after["c"] - 3 * after["b"]) <= 4 * longest


def test_without_a_batch_it_is_the_next_multiple_of_64() -> None:
    loader = tp.Loader(batched())
    batches = iter(loader)
    assert loader.set_weights({"b": 2}) == 0
    for step in (64, 64, 128):
        next(batches)
        assert loader.set_weights({"b": 3}) == step
        list(islice(batches, 62 if step == 64 else 0))
    assert [pair[0] for pair in noted(loader)] == [64, 128]  # those of before are no more needed


def noted(loader: tp.Loader) -> list[Any]:
    mix = json.loads(loader.state_dict()["pipeline"].rpartition(',"check"')[0] + "}")["stages"][0]
    found: list[Any] = mix.get("set_weights", [])
    return found


def test_several_changes_hold_each_from_its_batch_on() -> None:
    loader = tp.Loader(batched({"a": 1, "b": 0, "c": 0}))
    loader.set_weights({"b": 1}, at_step=30)
    loader.set_weights({"b": 1, "a": 0}, at_step=20)
    loader.set_weights({"c": 1, "a": 0}, at_step=10)
    loader.set_weights({"c": 1, "a": 0, "b": 0}, at_step=30)  # in place of the first
    batches = iter(loader)
    found = ["".join(name[0] for batch in taken(batches, 10) for name in batch) for _ in range(4)]
    assert [sorted(set(names)) for names in found] == [["a"], ["c"], ["b"], ["c"]]
    state = loader.state_dict()
    loader.set_weights({"a": 1})
    assert noted(loader) == [[30, {"a": 0, "b": 0, "c": 1}], [64, {"a": 1, "b": 0, "c": 1}]]
    again = [name[0] for batch in taken(iter(resumed(batched({"a": 1, "b": 0, "c": 0}), state)), 9)
             for name in batch]  # fmt: skip
    assert set(again) == {"c"}


@pytest.mark.parametrize("workers", [0, 2])
def test_later_epochs_have_the_last_weights(workers: int) -> None:
    def make(weights: dict[str, float] = OLD) -> tp.Pipeline:
        return batched(weights, stop="first_exhausted")

    second = tp.Loader(make(NEW))
    list(second)
    wanted = [names(batch) for batch in second]
    loader = tp.Loader(make(), num_workers=workers, persistent_workers=workers > 0)
    batches = iter(loader)
    taken(batches, 3)
    loader.set_weights({"b": 5, "c": 0}, at_step=5000)  # the epoch ends before
    assert len(taken(batches, 1000)) < 100
    states = [loader.state_dict()]
    batches = iter(loader)
    found = taken(batches, 4)
    states.append(loader.state_dict())
    assert found + taken(batches, 1000) == wanted
    assert taken(iter(resumed(make(), states[0])), 1000) == wanted
    assert taken(iter(resumed(make(), states[1])), 1000) == wanted[4:]
    third = taken(iter(loader), 1000)
    assert third != wanted
    assert third == [names(batch) for batch in at_epoch(make(NEW), 2)]


def at_epoch(pipe: tp.Pipeline, epoch: int) -> tp.Loader:
    return tp.Loader(pipe, epoch=epoch)


def test_a_change_between_two_epochs_is_one_of_the_next() -> None:
    loader = tp.Loader(batched(stop="first_exhausted"))
    list(loader)
    assert loader.set_weights({"b": 5, "c": 0}) == 0
    state = loader.state_dict()
    wanted = [names(batch) for batch in at_epoch(batched(NEW, stop="first_exhausted"), 1)]
    assert taken(iter(loader), 1000) == wanted
    assert taken(iter(resumed(batched(stop="first_exhausted"), state)), 1000) == wanted


def test_a_change_at_the_last_batch_does_not_begin_the_next_epoch() -> None:
    loader = tp.Loader(batched(stop="first_exhausted"))
    count = len(list(tp.Loader(batched(stop="first_exhausted"))))
    seen = 0
    for seen, _ in enumerate(loader, 1):
        if seen == count:
            loader.set_weights({"b": 5}, at_step=count)
    assert seen == count


def test_a_loop_that_was_left_goes_on_with_the_new_weights() -> None:
    whole = by_states(batched, 13, 30)
    loader = tp.Loader(batched())
    found = []
    for batch in loader:
        found.append(names(batch))
        if len(found) == 6:
            break
    del batch
    loader.set_weights({"b": 5, "c": 0}, at_step=13)
    state = loader.state_dict()
    assert taken(iter(resumed(batched(), state)), 24) == whole[6:]
    assert found + taken(iter(loader), 24) == whole


def test_windows_of_balance_end_before_the_new_shares_begin() -> None:
    def make(weights: dict[str, float] = OLD) -> tp.Pipeline:
        return mixed(weights).batch(2).balance(window=4)

    whole = by_states(make, 32, 80)
    loader = tp.Loader(make())
    batches = iter(loader)
    found = taken(batches, 5)
    with pytest.raises(
        tp.ConfigError, match=r"at_step\) must be a multiple of 16 \(4 x 4 shards\)"
    ):
        loader.set_weights({"b": 5, "c": 0}, at_step=31)
    loader.set_weights({"b": 5, "c": 0}, at_step=32)
    state = loader.state_dict()
    assert found + taken(batches, 75) == whole
    assert taken(iter(resumed(make(), state)), 75) == whole[5:]
    assert loader.set_weights({"b": 5}) == 128


def test_rows_read_ahead_are_made_again() -> None:
    for workers in (0, 2):
        loader = tp.Loader(batched({"a": 1, "b": 0, "c": 0}), num_workers=workers)
        batches = iter(loader)
        taken(batches, 9)
        loader.set_weights({"a": 0, "b": 1}, at_step=9)
        assert {name[0] for name in taken(batches, 1)[0]} == {"b"}


def test_one_may_ask_for_the_last_batch_meanwhile() -> None:
    loader = tp.Loader(batched(stop="all_exhausted"))
    batches = iter(loader)
    next(batches)
    assert not batches.is_last()  # holds the next one
    loader.set_weights({"b": 5, "c": 0}, at_step=13)
    assert not batches.is_last()
    wanted = by_states(CHAINS["an end"], 13, 1000)
    found = []
    for batch in batches:
        found.append(names(batch))
        assert batches.is_last() == (len(found) == len(wanted) - 1)
    assert found == wanted[1:]


@pytest.mark.parametrize("name", ["rows", "an end"])
def test_optimizer_steps_go_on_with_the_new_shares(name: str) -> None:
    whole = by_states(CHAINS[name], 14, 40)
    loader = tp.Loader(CHAINS[name]())
    steps = iter(tp.steps(loader, batches=4))
    found = [names(batch) for step in islice(steps, 2) for batch in step]
    loader.set_weights({"b": 5, "c": 0}, at_step=14)  # within a step
    found += [names(batch) for step in islice(steps, 8) for batch in step]
    assert found == whole


def test_the_same_mix_keeps_a_change_and_another_one_replaces_it() -> None:
    loader = tp.Loader(batched())
    batches = iter(loader)
    taken(batches, 9)
    loader.set_weights({"b": 5, "c": 0}, at_step=13)
    state = loader.state_dict()
    wanted = taken(batches, 20)
    same = tp.Loader(batched())
    same.load_state_dict(state, allow_changes=["mix"])
    assert taken(iter(same), 20) == wanted
    other = tp.Loader(batched({"a": 0, "b": 0, "c": 1}))
    with pytest.raises(
        tp.StateError, match=r"stages/mix/weights/a: saved 1, now 0.*allow_changes=\['mix'\]"
    ):
        other.load_state_dict(state)
    other.load_state_dict(state, allow_changes=["mix"])
    assert {name[0] for batch in taken(iter(other), 20) for name in batch} == {"c"}
    assert noted(other) == []


def test_ranks_that_name_other_weights_do_not_merge() -> None:
    states = []
    for rank, weight in enumerate((2, 3)):
        loader = tp.Loader(batched().distributed(rank=rank, world_size=2))
        loader.set_weights({"b": weight}, at_step=8)
        states.append(loader.state_dict())
    said = r"stages/mix/set_weights/0/1/b: state 0 has 2, state 1 has 3; merge states of one run"
    with pytest.raises(tp.StateError, match=said):
        tp.merge_states(states)


def test_fractions_and_decimals_are_read_as_they_were_given() -> None:
    loader = tp.Loader(batched())
    loader.set_weights({"a": Fraction(1, 3), "b": 0.1}, at_step=0)
    assert noted(loader) == [[0, {"a": "1/3", "b": 0.1, "c": 2}]]
    loader = resumed(batched(), loader.state_dict())
    loader.set_weights({"c": 3}, at_step=0)
    assert noted(loader) == [[0, {"a": "1/3", "b": 0.1, "c": 3}]]


def keep(row: dict[str, Any]) -> bool:
    return True


@pytest.mark.parametrize(
    ("pipe", "weights", "at_step", "said"),
    [
        (rows("a").batch(5), {"a": 1}, None, r"starts with mix\(\), got one that starts with from_arrow"),
        (batched(), {"d": 1}, None, r"some of the sources \(a, b, c\), got 'd'"),
        (batched(), {}, None, r"some of the sources \(a, b, c\), got \{\}"),
        (batched(), [1, 2], None, r"some of the sources \(a, b, c\), got \[1, 2\]"),
        (batched(), {"a": -1}, None, r"set_weights\(weights\): 'a' must be a number of 0 or more, got -1"),
        (batched(), {"a": "x"}, None, r"set_weights\(weights\): 'a' must be a number of 0 or more, got 'x'"),
        (batched(), dict.fromkeys("abc", 0), None, "more than 0 for one source at least"),
        (batched(), {"a": 2}, -1, r"at_step\) must be .*, got -1"),
        (batched(), {"a": 2}, 2.5, r"at_step\) must be .*, got 2.5"),
        (batched(max_epochs={"b": 1}), {"a": 0, "c": 0}, None, "None with stop=\"repeat\""),
        (tp.mix(sources()).batch(5), {"a": 2}, None, r"mix\(weights\) must be given.*got none"),
        (
            tp.mix(sources(), schedule=[(0, OLD), (100, NEW)], stop="repeat").batch(5),
            {"a": 2}, None, "and no schedule.*got schedule=",
        ),
        (nested(), {"x": 2}, None, r"some of the sources \(a, b, c\), got 'x'"),
        (mixed().pack(8).batch(5), {"a": 2}, None, r"pack\(8\) must stand in the sources of mix\(\)"),
        (mixed().shuffle(9).batch(5), {"a": 2}, None, r"shuffle\(9\) must stand in the sources"),
        (mixed().filter(keep).batch(5), {"a": 2}, None, r"filter\(.*\) must stand in the sources"),
        (mixed().bucket_by_length(5), {"a": 2}, None, r"bucket_by_length\(5\) must stand in the sources"),
        (
            mixed(stop="all_exhausted").repeat().batch(5), {"a": 2}, None,
            r"repeat\(\) must stand after batch\(\)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    pipe: tp.Pipeline, weights: Any, at_step: Any, said: str
) -> None:
    loader = tp.Loader(pipe)
    batches = iter(loader)
    before = next(batches)
    state = loader.state_dict()
    with pytest.raises(tp.ConfigError, match=said):
        loader.set_weights(weights, at_step=at_step)
    assert loader.state_dict() == state
    assert before is not None


def test_a_batch_that_was_given_is_refused() -> None:
    loader = tp.Loader(batched().distributed(rank=0, world_size=2))
    batches = iter(loader)
    taken(batches, 5)
    with pytest.raises(
        tp.ConfigError, match=r"yet to come, 10 or more, got 9; leave it out for the next"
    ):
        loader.set_weights({"b": 3}, at_step=9)
    loader.set_weights({"b": 3}, at_step=10)


def test_ranks_without_torch_distributed_must_name_the_batch() -> None:
    loader = tp.Loader(batched().distributed(rank=0, world_size=2))
    with pytest.raises(tp.TopologyError, match=r"is not initialized: .* or give at_step"):
        loader.set_weights({"b": 3})


@pytest.mark.usefixtures("failed_workers_let_go")
def test_workers_refuse_a_state_if_later_epochs_would_have_other_shares() -> None:
    pipe = batched(stop="first_exhausted")
    loader = tp.Loader(pipe)
    loader.set_weights({"b": 3}, at_step=0)
    pipe.load_state_dict(loader.state_dict())
    plain = StatefulDataLoader(pipe, batch_size=None, num_workers=1)
    batches = iter(plain)
    next(batches)
    state = plain.state_dict()
    del batches, plain
    again = StatefulDataLoader(batched(stop="first_exhausted"), batch_size=None, num_workers=1)
    again.load_state_dict(state)
    said = ""
    try:
        next(iter(again))
    except tp.StateError as error:
        said = str(error)
    assert "load it into trainpipes.Loader" in said


SCRIPT = Path(__file__).parent / "weights_on_ranks.py"


def test_ranks_agree_on_the_batch_and_train_on_one_sequence(tmp_path: Path) -> None:
    run = Launch(SCRIPT, 2, tmp_path, str(tmp_path))
    assert run.wait(100) == 0, run.said()
    told = [json.loads((tmp_path / f"weights-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["step"] for one in told] == [64, 64]
    whole = by_states(batched, 64, 160)
    assert [told[m % 2]["batches"][m // 2] for m in range(160)] == whole
    assert all("must be the same on all ranks" in one["error"] for one in told)
    ending = by_states(CHAINS["an end"], 64, 10_000)
    steps = len(told[0]["ending"])
    assert [told[m % 2]["ending"][m // 2] for m in range(2 * steps)] == ending[: 2 * steps]
    assert 0 <= len(ending) - 2 * steps < 8


def test_explain_says_which_weights_have_been_set() -> None:
    loader = tp.Loader(batched())
    assert "weights" not in dict(loader.explain().lines)
    loader.set_weights({"b": 5, "c": 0}, at_step=13)
    words = "set_weights(): from batch 13 of the pass on a=1, b=5, c=0"
    assert dict(loader.explain().lines)["weights"] == words
    batches = iter(loader)
    taken(batches, 14)
    assert dict(loader.explain().lines)["weights"] == words
    again = resumed(batched(), loader.state_dict())
    assert dict(again.explain().lines)["weights"] == words
