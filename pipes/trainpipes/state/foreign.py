"""States of other libraries, given where one of trainpipes belongs: what each is, and what to write instead.

Told by their keys, so that nothing of those libraries is imported.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from trainpipes._internal.shown import cut, shown
from trainpipes.errors import StateError

__all__ = ["is_stateful_data_loaders", "refusal"]

#: Dicts and lists of a foreign state that are looked into for one of ours, and how far down.
MOST_LOOKED_INTO = 10_000
MOST_DEEP = 12
#: Elements of one list that are looked at; others are weights or logs.
MOST_LISTED = 64
#: Of our states in one checkpoint, how many are named.
MOST_NAMED = 3

#: What is written to load a state, the state itself left out.
LOAD = "load_state_dict({})"


@dataclass(frozen=True)
class Shape:
    """What one library saves.

    Args:
        keys: all of them are in it.
        what: it is, after "got".
        cure: who loads it, or where the position is instead.
    """

    keys: tuple[str, ...]
    what: str
    cure: str


_AS_IT_WAS = "load what state_dict() of this pipeline or loader gave, as it was"
_NOT_OURS = "nothing in it is of a trainpipes pipeline: load it where it was saved"

#: The first that fits counts.
SHAPES = (
    Shape(
        ("pytorch-lightning_version",),
        "a checkpoint of Lightning",
        "let Lightning load it: "
        "trainer.fit(model, datamodule=PipelineDataModule(train=pipe), ckpt_path=path)",
    ),
    Shape(
        ("global_step", "log_history"),
        "the trainer_state.json of a Hugging Face Trainer, which counts steps and has no position of data",
        "let the Trainer load its folder: trainpipes.integrations.transformers.Trainer(...)"
        ".train(resume_from_checkpoint=folder); or count: "
        "load_state_dict(pipe.state_at(batches_delivered_to_each_rank))",
    ),
    Shape(
        ("examples_iterable",),
        "the state of a datasets.IterableDataset",
        "load it into the data set that saved it: dataset.load_state_dict(state)",
    ),
    Shape(
        ("_snapshot", "_steps_since_snapshot"),
        "the state of a StatefulDataLoader (Accelerate keeps one as dl_state_dict.bin) over something else "
        "than a trainpipes pipeline",
        _NOT_OURS,
    ),
    Shape(
        ("fetcher_state", "_num_yielded"),
        "the state of a StatefulDataLoader (Accelerate keeps one as dl_state_dict.bin) over something else "
        "than a trainpipes pipeline",
        _NOT_OURS,
    ),
    Shape(
        ("root", "num_yielded"),
        "the state of a torchdata.nodes.Loader",
        "load it into the torchdata.nodes.Loader that saved it",
    ),
    Shape(
        ("epoch", "sample_in_epoch"),
        "the state of a StreamingDataset of MosaicML",
        "load it into the StreamingDataset that saved it: dataset.load_state_dict(state)",
    ),
    Shape(("pq_idx", "rg_idx"), "the position of nanochat's own loader", _NOT_OURS),
    Shape(("yielded",), "the state of a sampler of torchdata", _NOT_OURS),
    Shape(
        ("state", "param_groups"),
        "the state of an optimizer",
        "load it into that: optimizer.load_state_dict(state)",
    ),
)

_TORCHTITAN = Shape(("world_size",), "the state of torchtitan's ParallelAwareDataloader", _NOT_OURS)


def is_stateful_data_loaders(state: Any) -> bool:
    """Whether this has the keys of a ``StatefulDataLoader``'s state, whatever that ran."""
    return isinstance(state, Mapping) and ("_snapshot" in state or "fetcher_state" in state)


def refusal(state: Any, write: str = LOAD) -> StateError:
    """The error for what was given and is no state of ours: says what it is, where one of ours is in it, and
    what to write instead.

    Args:
        state: what was given.
        write: the call that takes it, with "{}" in the place of a state.
    """
    if not isinstance(state, Mapping):
        return StateError(
            f"a state is the dict that state_dict() gave, got {type(state).__name__}{_way_from(state)}"
        )
    shape = _shape(state)
    found = () if is_stateful_data_loaders(state) else _ours_within(state)
    inside = list(islice(dict.fromkeys(found), MOST_NAMED))
    if shape is None:
        keys = ", ".join(map(shown, list(state)[:4])) or "no keys"
        key = "m" if "trainpipes" in state else "trainpipes"
        what = f"the key {key!r} is missing (found {keys})"
    else:
        what = f"got {shape.what}"
    cures = [] if shape is None or (inside and shape.cure is _NOT_OURS) else [shape.cure]
    if inside:
        calls = " or ".join(write.format(path) for path in inside)
        cures.append(f"write {calls}, which trainpipes saved")
    return StateError(f"not a state of trainpipes: {what}; {'; or '.join(cures) or _AS_IT_WAS}")


def _way_from(given: Any) -> str:
    """What to write where something else than a dict was given."""
    if isinstance(given, str | bytes) and given.lstrip()[:1] in ("{", b"{"):
        return f"; parse it first: {LOAD.format('json.loads(text)')}"
    if isinstance(given, str | os.PathLike):
        return f"; read the file first: {LOAD.format('torch.load(path, weights_only=True)')}"
    if isinstance(given, Sequence) and given and all(isinstance(one, Mapping) for one in given):
        return f"; of the states of all ranks make one: {LOAD.format('trainpipes.merge_states(states)')}"
    if callable(getattr(given, "state_dict", None)):
        return f"; ask it for its state: {LOAD.format('it.state_dict()')}"
    return ""


def _shape(state: Mapping[Any, Any]) -> Shape | None:
    for shape in SHAPES:
        if all(key in state for key in shape.keys):
            return shape
    if "world_size" in state and any(str(key).startswith("dp_rank_") for key in state):
        return _TORCHTITAN
    return None


def _ours_within(state: Mapping[Any, Any]) -> Iterator[str]:
    """Where in a dict of dicts and lists states of ours are, as expressions, the outermost first. That of a
    StatefulDataLoader is one, whatever its workers' are."""
    waiting: deque[tuple[str, bool, int, Any]] = deque([("state", False, 0, state)])
    looked = 0
    while waiting and looked < MOST_LOOKED_INTO:
        path, ends, depth, value = waiting.popleft()
        looked += 1
        if isinstance(value, Mapping):
            if "trainpipes" in value and "m" in value:
                yield path
                continue
            ends = ends or is_stateful_data_loaders(value)
            below: Iterator[tuple[Any, Any]] = islice(value.items(), MOST_LOOKED_INTO)
        else:
            below = enumerate(islice(value, MOST_LISTED))
        if depth < MOST_DEEP:
            waiting += [
                (path if ends else f"{path}[{_key(key)}]", ends, depth + 1, one)
                for key, one in below
                if isinstance(one, Mapping | list | tuple)
            ]


def _key(key: Any) -> str:
    """A key as it is written."""
    if isinstance(key, str) and '"' not in key and "\\" not in key and key.isprintable():
        return f'"{cut(key)}"'
    return shown(key)
