"""Damaged states: whatever is changed in one, it is refused when it is loaded, or changes nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest

import mutants
import trainpipes as tp
from every_stage import ENDLESS, FINITE
from mutants import Subject, mutant, of_pipeline, resealed, subjects

EVERY = {**FINITE, **ENDLESS}


def made(folder: Path, every: int = 1) -> list[Subject]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pin() has nothing to copy to
        return list(subjects(folder, every))


def refused(found: list[Subject], count: int, seed: int) -> int:
    """How many of so many damaged states are refused; the others give the very same items."""
    rng = random.Random(seed)
    number = 0
    for turn in range(count):
        subject, other = found[turn % len(found)], rng.choice(found)
        state = mutant(subject.state, [*subject.states, *other.states], rng)
        number += subject.refuses(rng.choice(subject.ways), state)
    return number


def test_a_damaged_state_is_refused_when_it_is_loaded_or_gives_the_very_same_items(
    folder: Path,
) -> None:
    assert refused(made(folder, 16), 40, seed=1) > 25


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_of_very_many_damaged_states_each_is_refused_or_gives_the_very_same_items(
    folder: Path,
) -> None:
    assert refused(made(folder), 100_000, seed=random.randrange(1 << 32)) > 80_000


#: As with ``python -O``, for the library alone: there are no compiled files of torch to start from.
WITHOUT_ASSERTIONS = """
import importlib.machinery, runpy, sys

compiled = []

class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        compiled.append(name)
        return compile(self.get_source(name), self.path, "exec", dont_inherit=True, optimize=1)

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = super().find_spec(name, path, target) if name.split(".")[0] == "trainpipes" else None
        if found is not None:
            found.loader = Loader(name, found.origin)
        return found

sys.meta_path.insert(0, Finder)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
assert len(compiled) > 100
"""


@pytest.mark.slow
def test_damaged_states_are_refused_where_python_leaves_out_assertions(tmp_path: Path) -> None:
    script = [WITHOUT_ASSERTIONS, mutants.__file__, str(tmp_path), "200"]
    command = [sys.executable, "-W", "ignore", "-c", *script]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, of, count, *_ = done.stdout.split()
    assert (of, count) == ("of", "200")
    assert int(refused) > 150


# One by one


def state_of(pipe: tp.Pipeline, taken: int = 5) -> dict[str, Any]:
    run = iter(pipe)
    for _ in range(taken):
        next(run)
    return run.state_dict()


@pytest.mark.parametrize("name", ["filter", "mix / tokens", "pack / concat"])
def test_no_character_of_a_state_can_be_another(folder: Path, name: str) -> None:
    subject = of_pipeline(name, EVERY[name](folder), 3)
    pipe = EVERY[name](folder)
    for key in [key for key, value in subject.state.items() if isinstance(value, str)]:
        text = subject.state[key]
        for place in range(len(text)):
            other = chr(ord(text[place]) ^ 1)
            with pytest.raises(tp.StateError):
                pipe.load_state_dict(
                    {**subject.state, key: text[:place] + other + text[place + 1 :]}
                )


@pytest.mark.parametrize("key", ["epoch", "batches", "num_shards"])
@pytest.mark.parametrize("by", [-1, 1, 4, 1 << 40])
def test_no_number_that_shards_have_in_common_can_be_another(
    folder: Path, key: str, by: int
) -> None:
    pipe = EVERY["filter"](folder)
    list(pipe)
    state = state_of(pipe, 0)
    assert state["epoch"] == 1
    with pytest.raises(tp.StateError):
        EVERY["filter"](folder).load_state_dict({**state, key: state[key] + by})


def test_cursors_of_two_shards_cannot_be_exchanged(folder: Path) -> None:
    state = state_of(EVERY["filter"](folder), 0)
    first, second = state["shard-0000"], state["shard-0001"]
    assert json.loads(first)["row"] == json.loads(second)["row"] == 0
    with pytest.raises(tp.StateError, match="shard-0000: must be a position"):
        EVERY["filter"](folder).load_state_dict(
            {**state, "shard-0000": second, "shard-0001": first}
        )


def test_a_cursor_of_another_pipeline_is_refused(folder: Path) -> None:
    state = state_of(EVERY["filter"](folder))
    other = state_of(EVERY["filter / batches"](folder))
    with pytest.raises(tp.StateError, match="shard-0002: must be a position"):
        EVERY["filter"](folder).load_state_dict({**state, "shard-0002": other["shard-0002"]})


@pytest.mark.parametrize("key", ["pipeline", "batch_sizes", "turn", "shard-0001"])
@pytest.mark.parametrize(
    "text", ["[0" + ",0" * 3_000_000, '{"below":' * 1_000_000, "1" * 6_000_000]
)
def test_a_text_of_megabytes_is_refused_without_being_parsed(
    folder: Path, key: str, text: str
) -> None:
    pipe = EVERY["filter"](folder)
    state = {**state_of(pipe), key: text}
    tracemalloc.start()
    try:
        with pytest.raises(tp.StateError) as caught:
            pipe.load_state_dict(state)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1024


def test_parts_of_runs_whose_batch_sizes_differ_are_not_merged(folder: Path) -> None:
    states = []
    for rank in (0, 1):
        pipe = EVERY["batch"](folder).distributed(rank=rank, world_size=2)
        states.append(state_of(pipe, 2))
    sizes = '{"epoch":0,"start":0,"sizes":[[0,9],[2,7]]}'
    with pytest.raises(tp.StateError, match="batch_sizes: state 1 and state 0 differ"):
        tp.merge_states([states[0], resealed({**states[1], "batch_sizes": sizes})])
