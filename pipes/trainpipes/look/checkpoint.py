"""The states in checkpoints of any layout: found, summarized, and tried on a pipeline."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from trainpipes.engine.iterating.iteration_state import iteration_of
from trainpipes.errors import MissingFilesError, StateError, TrainpipesError
from trainpipes.errors.text import cut, shown
from trainpipes.look.checkpoint_files import INDEX, mentions_us, read_dcp, read_file
from trainpipes.order.layout import divisors
from trainpipes.order.topology import Topology
from trainpipes.pipeline.chain import Pipeline
from trainpipes.state.format import read, unrecognized_state_error
from trainpipes.state.merge import merge_states

#: Files of a folder, dicts and lists within a file, and characters of the keys that lead to one, at most.
MOST_FILES, MOST_LOOKED_INTO, MOST_KEYS = 20_000, 200_000, 2000
OF_STATEFUL = (
    "this is the state of a StatefulDataLoader: load it into a StatefulDataLoader with as many workers, or "
    "count batches: pipe.state_at(batches_delivered_to_each_rank, epoch=...)"
)
OF_DATASETS = "this is the position of a pipe.to_hf(): load it with the trainer that saved it"
#: Ends of names of files that hold no state: weights, data, code.
OTHERS = (
    ".safetensors", ".distcp", ".parquet", ".arrow", ".py", ".txt", ".md", ".log", ".lock", ".new",
)  # fmt: skip


@dataclass(frozen=True)
class FoundState:
    """A state in a checkpoint.

    Args:
        path: the file, or the folder of ``torch.distributed.checkpoint``.
        keys: where in it, as in Python: ``["loader"]``; "" for the whole file.
        state: for ``Loader.load_state_dict``; empty where there is a ``problem``.
        problem: why it cannot be read, or what else to load it into.
    """

    path: str
    keys: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def where(self) -> str:
        """File and keys in one text."""
        return f"{self.path} {self.keys}" if self.keys else self.path


@dataclass(frozen=True)
class StateSummary:
    """What a state says.

    Attributes:
        format: its version.
        epoch: from 0.
        batches: delivered in that epoch, over all ranks.
        rank: that saved it, and the number of ranks; None if the state is that of all ranks.
        num_shards: of the pipeline.
        world_sizes: numbers of ranks that share no shard; others may load it, and read more.
        stages: of the pipeline, by name.
    """

    format: int
    epoch: int
    batches: int
    rank: tuple[int, int] | None
    num_shards: int
    world_sizes: list[int]
    stages: list[str]


@dataclass(frozen=True)
class Fit:
    """Whether states of a checkpoint load.

    Args:
        where: file and keys of each.
        problem: why they do not; "" if they do.
        share: of the epoch that is done, 0 to 1; None where its length is unknown.
    """

    where: tuple[str, ...]
    problem: str
    share: float | None = None


def read_states(path: str | os.PathLike[str]) -> list[FoundState]:
    """The trainpipes states in a checkpoint, in the order in which they are stored.

    Reads files of ``torch.save`` and of JSON, with states under any keys; folders of
    ``torch.distributed.checkpoint``; and folders with such files, as transformers, TRL, Accelerate and
    Lightning write them. Runs no code that a file names, and reads no weights.

    Args:
        path: a file or a folder.

    Returns:
        At least one state; one that is damaged has a ``problem``.

    Raises:
        StateError: there is none, or the file is damaged or would run code.
        MissingFilesError: the path is not there.
        UnreadableError: it may not be read, or is neither file nor folder.
    """
    if "://" in str(path) or not os.fspath(path):
        raise MissingFilesError(
            f"path must be a file or folder of this machine, got {shown(str(path))}; copy the checkpoint here"
        )
    place = Path(path)
    if place.is_dir():
        return _in_folder(place)
    value = read_file(place)
    if found := list(_states_in(value, str(path))):
        return found
    what = f"it holds {shown(value, 60)}"
    what = str(unrecognized_state_error(value)) if isinstance(value, dict) else what
    raise StateError(
        f"{path} holds no state of trainpipes: {what}; save what loader.state_dict() gives",
        path=str(path),
    )


def summarize(found: FoundState) -> StateSummary:
    """What a state says about where a run stands.

    Raises:
        StateError: it is damaged, or holds no position.
    """
    if found.problem:
        raise StateError(found.problem)
    saved = read(found.state)
    position, shards = saved.position, saved.position.num_shards
    return StateSummary(
        format=int(found.state["trainpipes"]),
        epoch=position.pass_number,
        batches=position.m,
        rank=_rank(sorted(position.cursors), shards),
        num_shards=shards,
        world_sizes=divisors(shards),
        stages=[cut(str(one["stage"]), 60) for one in json.loads(saved.pipeline)["stages"]],
    )


def fits(
    found: Sequence[FoundState],
    pipeline: Pipeline,
    *,
    world_size: int = 1,
    allow_changes: Collection[str] = (),
) -> list[Fit]:
    """Whether each state loads into a pipeline on every rank; states of one step are tried together. The
    pipeline does not move.

    Args:
        found: what ``read_states`` gave.
        pipeline: to load them into.
        world_size: ranks of the run to come.
        allow_changes: as ``Loader.load_state_dict`` takes it.
    """
    groups: dict[Any, list[FoundState]] = {}
    for number, one in enumerate(found):
        groups.setdefault(_step(one) or number, []).append(one)
    tried = []
    for group in groups.values():
        problem, share = "", None
        try:
            share = _load(_whole(group), pipeline, world_size, allow_changes)
        except TrainpipesError as error:
            problem = str(error)
        tried.append(Fit(tuple(one.where for one in group), problem, share))
    return tried


def _in_folder(folder: Path) -> list[FoundState]:
    found: list[FoundState] = []
    files = list(_files(folder))
    for path in files:
        is_dcp = path.name == INDEX
        place = path.parent if is_dcp else path
        if is_dcp or mentions_us(path):
            try:
                value = read_dcp(place) if is_dcp else read_file(path)
                found += _states_in(value, str(place))
            except TrainpipesError as error:
                found.append(FoundState(str(place), problem=str(error)))
    if found:
        return found
    what = f"none of its {len(files):,} files holds one" if files else "it has no files"
    raise StateError(
        f"{folder} holds no state of trainpipes: {what}; give the folder of one checkpoint, or a file",
        path=str(folder),
    )


def _files(folder: Path) -> Iterator[Path]:
    found = list(islice(folder.rglob("*"), MOST_FILES + 1))
    if len(found) > MOST_FILES:
        raise StateError(
            f"{folder} has more than {MOST_FILES:,} files: give the folder of one checkpoint",
            path=str(folder),
        )
    for path in sorted(found):
        *above, name = path.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in (*above, name.removeprefix(INDEX)))
        if path.is_file() and not hidden and not name.endswith(OTHERS):
            yield path


def _states_in(value: Any, path: str) -> Iterator[FoundState]:
    """The states in a value, the outermost first."""
    seen: set[int] = set()
    coming = deque([("", value)])
    while coming and len(seen) < MOST_LOOKED_INTO:
        keys, one = coming.popleft()
        if (found := _found(one, path, keys)) is not None:
            yield found
        elif id(one) not in seen and len(keys) < MOST_KEYS:
            seen.add(id(one))
            for key, below in one.items() if isinstance(one, Mapping) else enumerate(one):
                if isinstance(below, Mapping | list | tuple):
                    name = json.dumps(key) if isinstance(key, str) else repr(key)[:80]
                    coming.append((f"{keys}[{name}]", below))


def _found(value: Any, path: str, keys: str) -> FoundState | None:
    names = value.keys() if isinstance(value, Mapping) else set()
    if {"trainpipes", "epoch", "num_shards"} <= names:  # in all formats
        return FoundState(path, keys, value)
    if names == {"trainpipes", "type"}:
        return FoundState(path, keys, problem=OF_DATASETS)
    below = _states_in(list(value.values()), path) if names & {"_snapshot", "fetcher_state"} else ()
    first = next(iter(below), None)
    return None if first is None else FoundState(path, keys, problem=first.problem or OF_STATEFUL)


def _rank(shards: list[int], S: int) -> tuple[int, int] | None:
    """Which rank of how many has these shards; None if that is no rank, or has all."""
    world = S // len(shards) if shards else 1
    is_rank = world > 1 and shards == list(range(shards[0], S, world))
    return (shards[0], world) if is_rank and S % len(shards) == 0 else None


def _step(found: FoundState) -> tuple[Any, ...] | None:
    """What the states of all ranks have in common; None for a whole one."""
    state = found.state
    shards = sum(isinstance(key, str) and key.startswith("shard-") for key in state)
    if not shards or shards == state.get("num_shards"):
        return None
    return tuple(str(state.get(key)) for key in ("epoch", "batches", "num_shards", "pipeline"))


def _whole(group: Sequence[FoundState]) -> dict[str, Any]:
    if problem := next((one.problem for one in group if one.problem), ""):
        raise StateError(problem)
    states = list({id(one.state): one.state for one in group}.values())  # one may be at two places
    return dict(states[0]) if len(states) == 1 else merge_states(states)


def _load(
    state: dict[str, Any], pipeline: Pipeline, world_size: int, allow_changes: Collection[str]
) -> float | None:
    iteration = iteration_of(pipeline.distributed(rank=0, world_size=world_size))
    iteration.topology()
    iteration.load(state, allow_changes)
    position, plan = iteration.upcoming(), iteration.plan
    if not plan.counted:
        for rank in range(1, world_size):
            position.require(Topology(rank, world_size).shards(position.m, position.num_shards))
    counts = plan.resized(position.sizes).counts
    if not counts.known or plan.chain.endless or not counts.batches_in_pass:
        return None
    return min(1.0, position.m / int(counts.batches_in_pass))
