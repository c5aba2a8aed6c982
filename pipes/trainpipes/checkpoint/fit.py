"""``fits``: whether a pipeline would take the states of a checkpoint, on so many ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainpipes.checkpoint.within import FoundState
from trainpipes.errors import StateError, TrainpipesError
from trainpipes.merge import merge_states
from trainpipes.pipeline import Pipeline
from trainpipes.runtime.planning.plan import Plan
from trainpipes.state import Position
from trainpipes.topology import Topology

__all__ = ["Fit", "fits"]


@dataclass(frozen=True)
class Fit:
    """Whether states of a checkpoint load.

    Args:
        where: they are.
        problem: why they do not; "" if they do.
        share: of the epoch that is done, 0 to 1; None where its length is not known.
    """

    where: tuple[str, ...]
    problem: str
    share: float | None = None


def fits(
    found: Sequence[FoundState],
    pipeline: Pipeline,
    *,
    world_size: int = 1,
    allow_changes: Collection[str] = (),
) -> list[Fit]:
    """Whether each state loads into a pipeline on every rank. States of several ranks of one step are one.

    Nothing moves by it: each rank has a pipeline of its own.

    Args:
        found: what ``read_states`` gave.
        pipeline: to load them into.
        world_size: ranks of the run to come.
        allow_changes: as ``Loader.load_state_dict`` takes it.
    """
    told = []
    for group in _groups(found):
        where = tuple(one.where for one in group)
        try:
            state = _whole(group)
            ranked = pipeline.distributed(rank=0, world_size=world_size)
            position = _load(ranked, state, world_size, allow_changes)
        except TrainpipesError as error:
            told.append(Fit(where, str(error)))
        else:
            told.append(Fit(where, "", _share(ranked._session.plan, position)))
    return told


def _load(
    pipeline: Pipeline, state: dict[str, Any], world_size: int, allow_changes: Collection[str]
) -> Position:
    """Load a state into the pipeline of the first rank, and see whether it has what the others need."""
    session = pipeline._session
    session.topology()
    pipeline.load_state_dict(state, allow_changes=allow_changes)
    position = session.upcoming()
    if not session.plan.counted:
        for rank in range(1, world_size):
            position.require(Topology(rank, world_size).shards(position.m, position.num_shards))
    return position


def _groups(found: Sequence[FoundState]) -> list[list[FoundState]]:
    """States of one step that are of several ranks together, any other alone."""
    groups: dict[Any, list[FoundState]] = {}
    for number, one in enumerate(found):
        groups.setdefault(_step(one) or number, []).append(one)
    return list(groups.values())


def _step(found: FoundState) -> tuple[Any, ...] | None:
    """What is common to the states of all ranks; None for one that is whole, or is none."""
    if found.problem or len(found.states) != 1:
        return None
    state = found.states[0]
    shards = sum(isinstance(key, str) and key.startswith("shard-") for key in state)
    if not shards or shards == state.get("num_shards"):
        return None
    return tuple(
        str(state.get(key)) for key in ("epoch", "m", "num_shards", "pipeline", "trainpipes")
    )


def _whole(group: Sequence[FoundState]) -> dict[str, Any]:
    """One state of a group's."""
    for one in group:
        if one.problem or not one.states:
            raise StateError(one.problem or "there is no state")
        if one.kept_by == "datasets":
            raise StateError(
                "this is the position of a pipe.to_hf() that further stages of Hugging Face "
                "datasets follow: load it with the trainer that saved it"
            )
    several = {
        id(state): state for one in group for state in one.states
    }  # one may be at two places
    states: list[Mapping[str, Any]] = list(several.values())
    if len(states) == 1:
        return dict(states[0])
    return merge_states(states)


def _share(plan: Plan, position: Position) -> float | None:
    counts = plan.resized(position.sizes).counts
    if not counts.known or plan.chain.endless or not counts.batches_in_pass:
        return None
    return min(1.0, position.m / int(counts.batches_in_pass))
