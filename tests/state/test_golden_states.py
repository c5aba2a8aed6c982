"""States that were saved once, of every kind of pipeline: what follows is what followed then.

``TRAINPIPES_WRITE_GOLDEN=1 pytest tests/state/test_golden_states.py`` writes all of them anew, as this
version saves them; what followed those that are there must follow the new ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import trainpipes as tp
from golden_pipelines import CHANGED, COUNTED, FOLDER, UNCOUNTED, Make
from ranks import ENDED, Leg
from trainpipes.testing import digest

STATES = FOLDER / "states.json"
WRITE = "TRAINPIPES_WRITE_GOLDEN"
ABOUT = (
    "States of the pipelines in golden_pipelines.py: those of all ranks after some steps, and digests of the "
    "micro-batches that follow."
)
#: Batches that follow a state, of which there is a digest.
NEXT = 8
MAKES: dict[str, Make] = {**COUNTED, **UNCOUNTED}


def digests(items: Iterator[Any], count: int | None = None) -> list[str]:
    return [digest(item)[:8] for item in islice(items, count)]


def saved(pipe: tp.Pipeline, ranks: int, epoch: int, steps: int) -> dict[str, Any]:
    """The states of all ranks after some steps of a pass, and what follows."""
    leg = Leg(pipe, ranks, states=[pipe.state_at(0, epoch=epoch)] * ranks)
    leg.begin()
    for _ in range(steps):
        assert ENDED not in leg.step()
    states = leg.states()
    leg.close()
    return {"states": states, "next": following(pipe, tp.merge_states(states))}


def following(
    pipe: tp.Pipeline, state: dict[str, Any], count: int = NEXT, **options: Any
) -> list[str]:
    pipe.load_state_dict(state, **options)
    return digests(iter(pipe), count)


def runs(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """What is kept of a pipeline."""
    pipe = MAKES[name](folder)
    plan = pipe._iteration.plan
    yield saved(pipe, 1, 0, 3)
    epoch = 0 if plan.chain.endless else 1
    ranks = 1 if plan.chain.num_shards == 1 else 2
    yield saved(MAKES[name](folder), ranks, epoch, 2)


def changed(name: str) -> dict[str, Any]:
    """What is kept of a pipeline whose batch size changed: a state before, and one after."""
    make = CHANGED[name]
    before = iter(make(5))
    list(islice(before, 3))
    first = before.state_dict()
    pipe = make(4)
    pipe.load_state_dict(first, allow_changes=["batch_size"])
    run = iter(pipe)
    found = digests(run, 3)
    second = run.state_dict()
    return {"before": first, "after": second, "next": found + digests(run, NEXT)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What stands in the file; written first, if it is to be."""
    before: dict[str, Any] = json.loads(STATES.read_text()) if STATES.exists() else {}
    if not os.environ.get(WRITE):
        return before
    pipelines = {name: list(runs(name, tmp_path_factory.mktemp("golden"))) for name in MAKES}
    sizes = {name: changed(name) for name in CHANGED}
    for name, kept in before.get("pipelines", {}).items():
        assert [run["next"] for run in kept] == [run["next"] for run in pipelines[name]], name
    for name, kept in before.get("changed", {}).items():
        assert kept["next"] == sizes[name]["next"], name
    found = {"about": ABOUT, "pipelines": pipelines, "changed": sizes}
    STATES.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    return found


def test_there_are_states_of_every_kind_of_pipeline(kept: dict[str, Any]) -> None:
    assert kept["pipelines"].keys() == MAKES.keys()
    assert kept["changed"].keys() == CHANGED.keys()
    every = [run for runs in kept["pipelines"].values() for run in runs]
    assert all(len(run["next"]) > 3 for run in every)
    assert sum(len(run["states"]) > 1 for run in every) > 40


@pytest.mark.parametrize("name", MAKES)
def test_a_state_goes_on_as_it_did(name: str, kept: dict[str, Any], tmp_path: Path) -> None:
    """The state of any rank of a counted pipeline is whole; others need those of all."""
    for run in kept["pipelines"][name]:
        whole = tp.merge_states(run["states"])
        assert following(MAKES[name](tmp_path), whole) == run["next"]
        loader = tp.Loader(MAKES[name](tmp_path), threads=0)
        loader.load_state_dict(whole)
        assert loader.state_dict() == whole
        assert digest(next(iter(loader)))[:8] == run["next"][0]
        bare = {key: value for key, value in whole.items() if "shard-" not in key}
        if name in COUNTED:
            assert all(state == bare for state in run["states"])
        else:
            with pytest.raises(tp.StateError, match="has no position for shards"):
                loader.load_state_dict(bare)


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", MAKES)
def test_states_go_on_on_other_numbers_of_ranks(
    name: str, kept: dict[str, Any], tmp_path: Path
) -> None:
    pipe = MAKES[name](tmp_path)
    for ranks, run in zip((2, 4), kept["pipelines"][name], strict=True):
        if pipe._iteration.plan.chain.num_shards % ranks == 0:
            check_ranks(pipe, [tp.merge_states(run["states"])] * ranks, run["next"])
        if len(run["states"]) == 2:
            check_ranks(pipe, run["states"], run["next"])


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", COUNTED)
def test_a_counted_pipeline_gives_the_same_from_any_batch_on(name: str, tmp_path: Path) -> None:
    pipe = COUNTED[name](tmp_path)
    shards = pipe._iteration.plan.chain.num_shards
    for epoch, m, sizes in ((0, 7, (4,)), (1, 1, (1, 3))):
        whole = following(pipe, pipe.state_at(0, epoch=epoch), count=24)[m:]
        for ranks in sizes:
            if whole and shards % ranks == 0:
                check_ranks(pipe, [pipe.state_at(m, epoch=epoch)] * ranks, whole)


def check_ranks(pipe: tp.Pipeline, states: list[dict[str, Any]], expected: list[str]) -> None:
    """Load a state in each rank: together they go on as expected, up to where they end together."""
    ranks, m = len(states), states[0]["batches"]
    leg = Leg(pipe, ranks, states=states)
    whole = states[0] if states[0] == states[-1] else tp.merge_states(states)
    assert tp.merge_states(leg.states()) == whole  # saved right after it was loaded
    leg.begin()
    found: list[str] = []
    for _ in range(len(expected) // ranks):
        step = leg.step()
        if ENDED in step:
            break
        found += [digest(step[(m + turn) % ranks])[:8] for turn in range(ranks)]
    leg.close()
    assert found == expected[: len(found)]
    assert found or len(expected) < NEXT


@pytest.mark.parametrize("name", CHANGED)
def test_a_state_goes_on_with_another_batch_size(name: str, kept: dict[str, Any]) -> None:
    run = kept["changed"][name]
    allowed = {"allow_changes": ["batch_size"]}
    assert following(CHANGED[name](4), run["before"], **allowed) == run["next"][:NEXT]
    assert following(CHANGED[name](4), run["after"]) == run["next"][3:]
