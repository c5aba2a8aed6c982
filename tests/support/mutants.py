"""Damaged states: one thing in a state is changed, and what becomes of it is looked at.

python mutants.py FOLDER COUNT      the same from outside, where assertions are left out
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from torchdata.nodes import IterableWrapper

import trainpipes as tp
from every_stage import ENDLESS, FINITE, odd
from ranks import in_worker
from trainpipes import nodes
from trainpipes.errors import shown
from trainpipes.state.cursor import checksum, sealed, unsealed
from trainpipes.testing import digest

__all__ = ["Subject", "Wrong", "mutant", "resealed", "subjects"]

#: Stages whose cursors are more than where a source stands.
WITH_OWN_STATES = (
    "shuffle", "filter", "pack", "bucket", "mix", "repeat", "skip", "take", "flat_map", "deduplicate",
)  # fmt: skip
#: What stands in the place of something else.
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 1.0, 1.5, -0.0, math.nan, math.inf, 1 << 31, 1 << 62, 1 << 63, 10**30,
    "", "0", "x", "\ud800", "{}", "[]", "[" * 3000, '{"below":' * 3000, [], [1], {}, {"a": 1},
    [[[[[[[[[[]]]]]]]]]], {"epoch": 0, "window": 0, "row": 0},
)  # fmt: skip
#: Those that JSON has none of.
FOREIGN: tuple[Any, ...] = (b"{}", (1, 2), {1, 2}, object(), 1j, bytearray(9), range(3))
#: Numbers as JSON may say them.
NUMBERS = (
    "1e400", "-1e400", "NaN", "1e2", "1.0", "9" * 5000, "-1", "01", "0x1", "true", "null", '"1"',
)  # fmt: skip


Way = Callable[[Any], Iterator[Any]]


@cache
def large() -> tuple[Any, ...]:
    """40 MB that each fork would copy."""
    texts = ("x" * 10_000_000, "[" * 10_000_000, "[0" + ",0" * 3_000_000)
    return (10**5000, *texts, list(range(300_000)))


class Wrong(Exception):
    """A damaged state was taken, or refused in another way than by a short StateError."""


def resealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state that was edited, with checksums that fit."""
    pipeline, _ = unsealed(state["pipeline"])
    tag = checksum(pipeline)
    keys = ("epoch", "batches", "num_shards", "batch_sizes", "turn")
    common = [state.get(key, "") for key in keys]
    texts = {"pipeline": sealed(pipeline, tag + checksum(pipeline, tag, *common))}
    for key in state:
        if key.startswith("shard-"):
            text, _ = unsealed(state[key])
            texts[key] = sealed(text, checksum(text, key, tag, state["epoch"]))
    return {**state, **texts}


def mutant(
    state: Mapping[str, Any], others: Sequence[Mapping[str, Any]], rng: random.Random
) -> Any:
    """A state in which one thing is another.

    Args:
        state: the state; it is left as it is.
        others: states of other steps, epochs and pipelines, whose values it may get.
        rng: draws.
    """
    changed = dict(state)
    key = rng.choice(list(changed))
    shards = [key for key in changed if isinstance(key, str) and key.startswith("shard-")]
    if shards and rng.random() < 0.4:
        key = rng.choice(shards)
    value = changed[key]
    kind = rng.random()
    if kind < 0.03:
        del changed[key]
    elif kind < 0.06:
        changed[rng.choice([None, 3, (1,), "shard-", "shard-x", "shard-00001", "x", ""])] = value
    elif kind < 0.08:
        changed[rng.choice([None, 3, f"{key}x", key[:-1]])] = changed.pop(key)
    elif kind < 0.15 and len(shards) > 1:
        one, other = rng.sample(shards, 2)
        changed[one], changed[other] = changed[other], changed[one]
    elif kind < 0.22:
        other = rng.choice(others)
        same = [k for k in other if k in changed]
        # Of more, a whole state may be made: where there are no shards, of m and the checksum.
        for k in rng.sample(same, rng.randint(1, 2) if shards else 1):
            changed[k] = other[k]
    elif kind < 0.32 or not isinstance(value, str):
        pick = rng.random()
        changed[key] = rng.choice(large() if pick < 0.03 else FOREIGN if pick < 0.15 else VALUES)
        if type(value) is int and pick > 0.6:
            changed[key] = value + rng.choice([-1, 1, 2, 24, 1 << 20])
    elif kind < 0.6:
        changed[key] = _other_text(value, rng)
    else:
        try:
            inner = json.loads(value)
        except ValueError:
            changed[key] = _other_text(value, rng)
        else:
            changed[key] = json.dumps(_other_json(inner, rng), separators=(",", ":"))
    return changed


def _other_text(text: str, rng: random.Random) -> str:
    at = rng.randint(0, max(0, len(text) - 1))
    kind = rng.randint(0, 7)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + text[at + 1 :]
    if kind == 2:
        return text[:at] + rng.choice('{}[]",:0123456789 \n\0e-é') + text[at:]
    if kind == 3:
        flipped = chr(ord(text[at]) ^ (1 << rng.randint(0, 6))) if text else "x"
        return text[:at] + flipped + text[at + 1 :]
    if kind == 4:
        digits = [n for n, c in enumerate(text) if c.isdigit()] or [0]
        at = rng.choice(digits)
        return text[:at] + rng.choice([*NUMBERS, *"0123456789"]) + text[at + 1 :]
    if kind == 5:
        return text + rng.choice([text, "}", " ", "\n", ',"a":1}'])
    if kind == 6:
        deep = rng.choice(["[" * 100_000, '{"below":' * 100_000, "0" * 6000])
        return text[:at] + deep + text[at:]
    return text[at:]


def _other_json(value: Any, rng: random.Random) -> Any:
    """JSON in which one thing is another."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.25:
            new = rng.choice(["a", "check", "ended", "below", "stream", "gone"])
            return {**value, new: rng.choice(VALUES)}
        if kind < 0.35:
            other = rng.choice(list(value))
            return {**value, key: value[other], other: value[key]}
        return {**value, key: _other_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.2:
            return value[:at] + value[at + 1 :]
        if kind < 0.3:
            return [*value, value[at]]
        return [*value[:at], _other_json(value[at], rng), *value[at + 1 :]]
    if type(value) is int and rng.random() < 0.6:
        return value + rng.choice([-1, 1, 2, -2, 10, 1000, 1 << 40])
    return rng.choice(VALUES)


class Subject:
    """A pipeline with a state, and the ways in which that may be loaded.

    Args:
        name: for messages.
        pipe: the pipeline.
        state: the state.
        states: others of the pipeline.
    """

    def __init__(
        self, name: str, pipe: tp.Pipeline, state: dict[str, Any], states: Sequence[dict[str, Any]]
    ) -> None:
        self.name = name
        self.state = state
        self.states = states
        self._pipe = tp.Pipeline(pipe.stages)
        self._loader = tp.Loader(tp.Pipeline(pipe.stages))
        self._node: Any = node_of(pipe)
        self.rest = self._items(self.ways[0](state))

    @property
    def ways(self) -> list[Way]:
        """First one that takes the state as it is."""
        return [self._pipeline, self._changed, self._in_loader, self._in_node, self._merged]

    def _pipeline(self, state: Any) -> Iterator[Any]:
        self._pipe.load_state_dict(state)
        return iter(self._pipe)

    def _changed(self, state: Any) -> Iterator[Any]:
        self._pipe.load_state_dict(state, allow_changes=["batch_size", "mix", "pack_length"])
        return iter(self._pipe)

    def _in_loader(self, state: Any) -> Iterator[Any]:
        self._loader.load_state_dict(state)
        return iter(self._loader)

    def _in_node(self, state: Any) -> Iterator[Any]:
        self._node.reset(state)
        return iter(lambda: next(self._node), object())

    def _merged(self, state: Any) -> Iterator[Any]:
        return self._pipeline(tp.merge_states([state]))

    def _items(self, run: Iterator[Any], most: int = 5) -> list[str]:
        return [digest(item) for item in islice(run, most)]

    def _damage(self, state: Any) -> str:
        both = {k: (self.state.get(k), state.get(k)) for k in [*self.state, *state]}
        return shown([(k, *pair) for k, pair in both.items() if pair[0] != pair[1]], 2000)

    def refuses(self, way: Way, state: Any) -> bool:
        """Whether a state is refused, in the right way; one that is taken gives what the undamaged one does.

        Args:
            way: to load it.
            state: the state.

        Raises:
            Wrong: it is not refused as it should be, or not at all.
        """
        try:
            run = way(state)
        except tp.StateError as error:
            if len(str(error).encode("utf-8", "replace")) > 1024:
                raise Wrong(f"{self.name}: a message of {len(str(error))}: {error}") from error
            return True
        except Exception as error:
            raise Wrong(f"{self.name}: {self._damage(state)}: {error!r:.300}") from error
        try:
            found = self._items(run)
        except Exception as error:
            said = f"{error!r:.300} at a next()"
            raise Wrong(f"{self.name}: {self._damage(state)}: {said}") from error
        if found != self.rest:
            raise Wrong(f"{self.name}: {self._damage(state)} was taken, and gave other items")
        return False


class InNode(Subject):
    """A chain above a node of torchdata."""

    def __init__(self, name: str, node: Any, taken: int) -> None:
        self.name = name
        self._node = node
        node.reset()
        self.states = [node.state_dict()]
        for _ in range(taken):
            next(node)
            self.states.append(node.state_dict())
        self.state = self.states[-2]
        self.rest = self._items(self.ways[0](self.state))

    @property
    def ways(self) -> list[Way]:
        return [self._in_node]


class InWorker(Subject):
    """A pipeline in a worker of a StatefulDataLoader."""

    def __init__(self, name: str, pipe: tp.Pipeline, taken: int) -> None:
        self._seed = 1000
        states = []
        with in_worker(1, 2, self._seed, pipe):
            run = iter(pipe)
            for _ in range(taken):
                next(run)
                states.append(run.state_dict())
        super().__init__(name, pipe, states[-2], states)

    @property
    def ways(self) -> list[Way]:
        return [self._worker]

    def _worker(self, state: Any) -> Iterator[Any]:
        self._seed += 1000
        with in_worker(1, 2, self._seed, self._pipe):
            run = iter(self._pipe)
            run.load_state_dict(state)
            return iter([next(run), next(run)])


def node_of(pipe: tp.Pipeline) -> Any:
    """The stages of a pipeline as nodes, the last one."""
    node = None
    for stage in pipe.stages:
        kind = getattr(nodes, type(stage).__name__)
        node = kind(**stage.options) if node is None else kind(node, **stage.options)
    return node


def of_pipeline(name: str, pipe: tp.Pipeline, taken: int) -> Subject:
    """A pipeline after some items."""
    run = iter(pipe)
    states = [run.state_dict()]
    for _ in islice(run, taken + 4):
        states.append(run.state_dict())
    return Subject(name, pipe, states[min(taken, len(states) - 1)], states)


def subjects(folder: Path, every: int = 1) -> Iterator[Subject]:
    """A state of every kind; of the pipelines whose states are made alike, one of so many."""
    for number, (name, make) in enumerate({**FINITE, **ENDLESS}.items()):
        if number % every and not name.startswith(WITH_OWN_STATES):
            continue
        yield of_pipeline(name, make(folder), (3, 1, 6, 0, 4)[number % 5])
    for name in ("batch", "repeat", "repeat / across", "from_iterable"):
        pipe = {**FINITE, **ENDLESS}[name](folder)
        state, stages = pipe.state_at(5), pipe.stages
        pipe = tp.Pipeline([s._replaced(batch_size=3) if s.name == "batch" else s for s in stages])
        pipe.load_state_dict(state, allow_changes=["batch_size"])
        yield of_pipeline(f"{name}, another batch size", pipe, 3)
    for name in ("batch", "filter", "mix", "pack / concat"):
        yield InWorker(f"{name}, in a worker", {**FINITE, **ENDLESS}[name](folder), 4)
    for number in (0, 1, 9):
        rows = IterableWrapper([{"x": n} for n in range(40)])
        node = nodes.Filter(nodes.Shuffle(rows, 5), odd) if number else rows
        yield InNode(f"a node, {number}", nodes.Batch(node, 2), 2 + number % 4)


def main(folder: Path, count: int) -> None:
    rng = random.Random(7)
    refused = 0
    found = list(subjects(folder, 12))
    for number in range(count):
        subject = found[number % len(found)]
        other = found[rng.randrange(len(found))]
        state = mutant(subject.state, subject.states + other.states, rng)
        refused += subject.refuses(rng.choice(subject.ways), state)
    print(f"{refused} of {count} refused")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
