"""Stages that keep something between rows: what they give, and that they resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import trainpipes as tp
from every_chain import Sessions
from resuming import check_resume
from trainpipes.errors import ConfigError, DataError
from trainpipes.state.cursor import decoded, encoded
from trainpipes.testing import ResumeError


class Unseen(tp.StatefulStage):
    """Rows whose value was not there before."""

    state_every = 4

    def start(self) -> None:
        self.seen: set[int] = set()

    def process(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if row["x"] not in self.seen:
            self.seen.add(row["x"])
            yield row

    def state_dict(self) -> Any:
        return {"seen": sorted(self.seen)}

    def load_state_dict(self, state: Any) -> None:
        self.seen = set(state["seen"])


class Sliding(tp.StatefulStage):
    """The last values at each row."""

    size: int = 3
    state_every = 5

    def start(self) -> None:
        self.last = np.zeros(0, dtype=np.int64)

    def process(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.last = np.append(self.last, row["x"])[-self.size :]
        return [{"values": self.last.tolist()}]

    def state_dict(self) -> Any:
        return self.last

    def load_state_dict(self, state: Any) -> None:
        self.last = state


class Held(tp.StatefulStage):
    """Numbered rows, of which three are held back."""

    def start(self) -> None:
        self.held: list[Any] = []
        self.number = 0

    def process(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.held.append(row)
        self.number += 1
        if len(self.held) > 3:
            yield {**self.held.pop(0), "number": self.number}

    def finish(self) -> Iterator[dict[str, Any]]:
        for row in self.held:
            yield {**row, "number": self.number}

    def state_dict(self) -> Any:
        return {"held": self.held, "number": self.number}

    def load_state_dict(self, state: Any) -> None:
        self.held, self.number = state["held"], state["number"]


def rows(values: Any) -> tp.Pipeline:
    return tp.from_dataset([{"x": int(value)} for value in values])


def test_gives_what_plain_python_gives() -> None:
    values = [3, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    assert [row["x"] for row in rows(values).then(Unseen())] == list(dict.fromkeys(values))
    wanted = [values[max(0, n - 2) : n + 1] for n in range(len(values))]
    assert [row["values"] for row in rows(values).then(Sliding())] == wanted
    assert list(rows(range(10)).then(Sessions())) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_each_epoch_and_shard_starts_anew() -> None:
    pipe = rows([1, 1, 2, 2]).then(Unseen())
    assert [[row["x"] for row in pipe] for _ in range(2)] == [[1, 2], [1, 2]]
    assert list(rows(range(5)).repeat(2).then(Sessions())) == [[0, 1, 2, 3], [4]] * 2
    dealt = rows([7] * 8).sharding_filter(4).then(Unseen())
    assert [row["x"] for row in dealt] == [7] * 4


@pytest.mark.parametrize("stage", [Unseen(), Sliding(2), Sessions(), Held()], ids=str)
@pytest.mark.parametrize(("count", "times"), [(0, 1), (1, 1), (3, 2), (23, 2)])
def test_resumes_at_every_item(stage: tp.Stage, count: int, times: int) -> None:
    pipe = rows(np.arange(count) * 7 % 11).sharding_filter(2).shuffle(5)
    if count:
        pipe = pipe.repeat(times)
    check_resume(pipe.then(stage).batch(2), epochs=2, processes=0)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_move_whole_to_other_ranks(world: int) -> None:
    pipe = rows(np.arange(64) % 5).sharding_filter(4).repeat().then(Sliding()).batch(2)
    alone = iter(pipe.distributed(rank=0, world_size=1))
    for _ in range(8):
        next(alone)
    state = alone.state_dict()
    rest = [str(next(alone)) for _ in range(40)]
    found: list[list[str]] = []
    for rank in range(world):
        own = tp.Loader(pipe.distributed(rank=rank, world_size=world), num_workers=world % 4)
        own.load_state_dict(state)
        found.append([str(batch) for batch in islice(own, 40 // world)])
    assert [batch for turn in zip(*found, strict=True) for batch in turn] == rest


class ForgetsAField(Held):
    def load_state_dict(self, state: Any) -> None:
        self.held = state["held"]


class DropsHeldRows(Held):
    def load_state_dict(self, state: Any) -> None:
        self.number = state["number"]


class SavesTheStart(Held):
    def state_dict(self) -> Any:
        return {"held": [], "number": 0}


class LosesLaterRows(Held):
    """Its state holds no more than some rows."""

    def state_dict(self) -> Any:
        return {"held": self.held, "number": min(self.number, 20)}


class KeepsAFirstState(Held):
    """A state of the epoch before is given in a later one."""

    states: ClassVar[dict[int, Any]] = {}

    def state_dict(self) -> Any:
        return self.states.setdefault(self.number, {"held": [*self.held], "number": self.number})


BROKEN = (ForgetsAField, DropsHeldRows, SavesTheStart, LosesLaterRows, KeepsAFirstState)


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("shards", [1, 4])
def test_an_incomplete_state_is_found(kind: type[Held], shards: int) -> None:
    """Also where no shard has so many rows that a run would ask for its state."""
    assert kind.state_every > 100
    KeepsAFirstState.states.clear()
    dealt = rows(range(100)).sharding_filter(shards).shuffle(20)
    with pytest.raises(ResumeError, match=r"look at .*\(\): state_dict\(\) returns all"):
        check_resume(dealt.then(kind()).batch(2), processes=0, points=40)


def test_refuses_what_no_state_holds() -> None:
    class Counts(tp.StatefulStage):
        def start(self) -> None:
            self.number = 0

        def process(self, row: Any) -> list[Any]:
            return [row]

    with pytest.raises(ConfigError, match=r"counts.* keeps 'number' between rows"):
        list(rows([1]).then(Counts()))

    class Holds(Unseen):
        def state_dict(self) -> Any:
            return {"seen": self.seen}

    with pytest.raises(DataError, match=r"state\['seen'\] is a set; sorted"):
        list(rows([1]).then(Holds()))
    with pytest.raises(ConfigError, match="must define both"):
        type("Half", (tp.StatefulStage,), {"state_dict": lambda self: 1})
    with pytest.raises(ConfigError, match="state_every must be"):
        type("Never", (tp.StatefulStage,), {"state_every": 0})


class Looks(tp.StatefulStage):
    state_every = 4

    @cached_property
    def known(self) -> set[int]:
        return {1, 2}

    def process(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"x": row["x"] in self.known}


def test_what_is_made_once_is_not_kept_between_rows() -> None:
    assert sum(row["x"] for row in rows(range(20)).then(Looks())) == 2


@pytest.mark.parametrize("found", [None, "text", {"x": 1}, 3])
def test_refuses_what_is_no_rows(found: Any) -> None:
    class Odd(tp.StatefulStage):
        def process(self, row: Any) -> Any:
            return found

    with pytest.raises(DataError, match=r"process\(\) returns rows, .* return \[row\]"):
        list(rows([1]).then(Odd()))


def test_an_error_names_the_row() -> None:
    class Fails(tp.StatefulStage):
        def process(self, row: Any) -> Any:
            yield {"y": 1 // row["x"]}

    with pytest.raises(ZeroDivisionError) as raised:
        list(rows([2, 1, 0]).then(Fails()))
    assert "row 2" in "".join(raised.value.__notes__)


def test_is_frozen_but_at_work() -> None:
    with pytest.raises(FrozenInstanceError):
        Unseen().seen = set()

    class Sets(Sliding):
        def start(self) -> None:
            self.size = 4  # type: ignore[misc]

    with pytest.raises(FrozenInstanceError):
        list(rows([1]).then(Sets()))


def test_states_come_back_as_they_were() -> None:
    value = {"a": [1, 2.5, None, True], "b": (1, b"x"), "c": float("inf"), "d": np.float32(2)}
    assert decoded(encoded(value)) == value
    assert type(decoded(encoded(value))["d"]) is np.float32
    array = np.arange(6).reshape(2, 3)
    assert np.array_equal(decoded(encoded(array)), array)
    assert torch.equal(decoded(encoded(torch.ones(2))), torch.ones(2))
    for half in (torch.tensor([[1.5, -2.0]]).bfloat16(), torch.ones(2, 0, dtype=torch.bfloat16)):
        again = decoded(json.loads(json.dumps(encoded(half))))
        assert (again.dtype, again.tolist()) == (half.dtype, half.tolist())
    turned = torch.tensor([1 + 2j]).conj()
    assert torch.equal(decoded(encoded(turned)), turned)
    with pytest.raises(TypeError, match="key 1"):
        encoded({1: 2})


# Rows that are held back


class Delay(tp.StatefulStage):
    """Gives each row some rows later."""

    rows: int = 3
    copies: bool = False
    state_every = 4

    def start(self) -> None:
        self.held: list[Any] = []

    def process(self, row: Any) -> Iterator[Any]:
        self.held.append({**row} if self.copies else row)
        if len(self.held) > self.rows:
            yield self.held.pop(0)

    def finish(self) -> list[Any]:
        return self.held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held = state


def drawn(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "drawn": int(rng.integers(1 << 30))}


@pytest.mark.parametrize("delay", [1, 3, 11])
def test_rows_that_are_held_back_keep_their_numbers_and_draws(delay: int) -> None:
    pipe = rows(range(20)).then(Delay(delay)).batch(2)
    for number in range(10):
        found = tp.locate(pipe, number, epoch=0)
        assert [row["x"] for row in found.batch] == [place.row for place in found.places]
    plain = list(rows(range(20)).map(drawn, rng=True))
    late = list(rows(range(20)).then(Delay(delay)).map(drawn, rng=True))
    assert [row["x"] for row in late] == [row["x"] for row in plain]
    assert len({row["drawn"] for row in late}) == 20


@pytest.mark.parametrize("copies", [False, True])
def test_held_rows_resume_with_their_numbers(copies: bool) -> None:
    def make() -> tp.Pipeline:
        pipe = rows(range(40)).sharding_filter(2).shuffle(9).repeat(2).then(Delay(5, copies))
        return pipe.map(drawn, rng=True).shuffle(6).batch(2)

    check_resume(make, epochs=2, processes=0)


def test_rows_of_a_mix_that_are_held_back_keep_their_epochs() -> None:
    sources = {"few": rows(range(5)).shuffle(5), "many": rows(range(100, 200))}
    mixed = tp.mix(sources, weights={"few": 1, "many": 1}, stop="repeat").then(Delay(7))
    found = [row["x"] for row in islice(mixed.shuffle(16), 200) if row["x"] < 5]
    for start in range(0, len(found) - 5, 5):
        assert sorted(found[start : start + 5]) == [*range(5)]
    check_resume(mixed.shuffle(16), limit=60, epochs=1, processes=0)


def test_locate_says_what_it_cannot_know() -> None:
    pipe = rows(range(20)).then(Sliding()).batch(2)
    said = str(tp.locate(pipe, 3, epoch=0))
    assert (
        "sliding() may have made rows of several: each is named by the one that it came with"
        in said
    )
    assert "each is named" not in str(tp.locate(rows(range(20)).batch(2), 3, epoch=0))


class BeginsAnew:
    """What is its own iterator, from 0 after each ``iter()``."""

    def __iter__(self) -> BeginsAnew:
        self.given = 0
        return self

    def __next__(self) -> int:
        if self.given == 600:
            raise StopIteration
        self.given += 1
        return self.given - 1


class GivesMany(tp.StatefulStage):
    def process(self, row: int) -> BeginsAnew:
        return BeginsAnew()

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_rows_and_results_may_be_their_own_iterator() -> None:
    assert list(islice(tp.from_dataset([1, 2]).then(GivesMany()), 1300)) == [*range(600)] * 2
    pipe = tp.from_iterable(BeginsAnew)
    assert [list(islice(pipe, 700)) for _ in range(2)] == [[*range(600)]] * 2
    pipe.load_state_dict(pipe.state_at(590))
    assert list(islice(pipe, 20)) == [*range(590, 600)]
