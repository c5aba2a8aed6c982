"""The checkpoint format:

    {
      "trainpipes": 2,               version of this format
      "epoch": 2,                    the pass over the data, from 0
      "batches": 1234,               batches of that pass taken, over all ranks
      "num_shards": 24,
      "pipeline": "{…}",             identity of the data and the stages: JSON
      "batch_sizes": "",             batch sizes in an epoch in which they changed: JSON
      "shard-0007": "{…}",           one cursor a shard, of an uncounted pipeline only: JSON
      …
    }

The state of a *counted* pipeline (``Plan.counted``) has no cursors, and is whole on every rank. In all
others a rank's state has the cursors of its own shards.

A flat dict of integers and strings passes through JSON, ``torch.load`` with ``weights_only=True``
and ``torch.distributed.checkpoint``. Each cursor ends with a checksum of its own, "pipeline" with
that of all that is not a cursor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainpipes._internal.checks import pip_install
from trainpipes.errors import StateError, cut, shown
from trainpipes.order.layout import slots_before
from trainpipes.state import cursor
from trainpipes.state.cursor import MOST as MOST_COUNTED

_CURES = {
    "data": "load the state with the files or rows it was saved with, or start a new run",
    "order": "; as names and row counts are the same, load_state_dict(state, allow_changes=['data']) goes on",
    "stages": "build the pipeline as it was when the state was saved, or start a new run",
}
#: Options that may change, by their paths, and their names in ``allow_changes``.
_MAY_CHANGE = {
    "stages/batch/batch_size": "batch_size",
    "stages/filter/predicate": "filter",
    "stages/pack/max_length": "pack_length",
    "data/version": "version",
}
#: Characters of each of two values that differ.
MOST = 200

#: The name of a file by its number, of the source below which others it is found by these keys.
FileName = Callable[[int, Sequence[str]], str]


def check_identity(saved: str, present: str, file_name: FileName = lambda *_: "") -> None:
    """Raise StateError with the first difference of two pipelines."""
    if saved == present:
        return
    before, now = json.loads(saved), json.loads(present)
    stages = [s["stage"] for s in before["stages"]], [s["stage"] for s in now["stages"]]
    if stages[0] != stages[1]:
        chains = [cut(" -> ".join(names), 300) for names in stages]
        raise StateError(
            f"stages: saved {chains[0]}, now {chains[1]}; a state belongs to the pipeline that "
            f"saved it: {_CURES['stages']}"
        )
    difference = named_difference(before, now)
    if difference is None:  # the same in another spelling
        return
    path, old, new = difference
    which, same_order = other_file(before, now, path, file_name)
    cure = _CURES.get(path.split("/")[0], _CURES["stages"]) + same_order * _CURES["order"]
    if path.endswith("/engine") and old == "gigatoken":
        install = pip_install("gigatoken")
        cure = f'leave engine="tokenizers" out, with gigatoken installed: {install}'
    elif path.endswith("/engine") and new == "gigatoken":
        cure = 'write tokenize(..., engine="tokenizers")'
    if path in _MAY_CHANGE and old is not None is not new:
        cure = f"load_state_dict(state, allow_changes=['{_MAY_CHANGE[path]}']) goes on with {said(new)}"
    if stages[1][:1] == ["mix"] and path.startswith(("data/sources", "stages/mix/")):
        cure += "; what is mixed, and how, may change with load_state_dict(state, allow_changes=['mix'])"
    raise StateError(f"{cut(path)}: saved {said(old)}, now {said(new)}{which}; {cure}")


def other_file(before: Any, now: Any, path: str, file_name: FileName) -> tuple[str, bool]:
    """Which file differs, or which few of many that share a digest, where there are as many files; and
    whether all have the names and rows that they had.
    """
    keys = path.split("/")
    try:
        while "digests" not in before:
            key, *keys = keys
            at: Any = int(key) if isinstance(before, list) else key
            before, now = before[at], now[at]
        parts = [
            part["content"]["of"] if "of" in keys else part["digests"] for part in (before, now)
        ]
        count, pairs = before["files"], list(zip(*parts, strict=True))
        group = next(n for n, (old, new) in enumerate(pairs) if old != new)
    except (KeyError, IndexError, TypeError, ValueError, StopIteration):
        return "", False
    first, last = count * group // len(pairs), count * (group + 1) // len(pairs) - 1
    which = f"file {first + 1}" if first == last else f"one of the files {first + 1} to {last + 1}"
    sources = path.split("/")[1 : -len(keys)]
    names = dict.fromkeys(file_name(n, sources[1::2]) for n in (first, last))
    named = f": {' to '.join(names)}" if all(names) else ""
    same_order = before.get("order") == now.get("order")
    return f" ({which} of {count} is not the saved one{named})", same_order


def named_difference(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """``first_difference`` of two identities, with the stage's name in the path."""
    difference = first_difference(before, now)
    if difference is None:
        return None
    parts = difference[0].split("/")
    if parts[0] == "stages" and len(parts) > 1 and int(parts[1]) < len(before["stages"]):
        parts[1] = before["stages"][int(parts[1])]["stage"]
    return "/".join(parts), difference[1], difference[2]


def first_difference(saved: Any, present: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Path of the first leaf in which two values of JSON types differ, and both.

    >>> first_difference({"a": [1, 2]}, {"a": [1, 3]})
    ('a/1', 2, 3)
    """
    if isinstance(saved, dict) and isinstance(present, dict):
        for key in [*saved, *(k for k in present if k not in saved)]:
            below = f"{path}/{key}" if path else str(key)
            old, new = saved.get(key), present.get(key)
            difference = None if _known_otherwise(old, new) else first_difference(old, new, below)
            if difference:
                return difference
        return None
    if isinstance(saved, list) and isinstance(present, list):
        for number in range(max(len(saved), len(present))):
            old, new = (v[number] if number < len(v) else None for v in (saved, present))
            difference = first_difference(old, new, f"{path}/{number}")
            if difference:
                return difference
        return None
    return None if saved == present and type(saved) is type(present) else (path, saved, present)


def _known_otherwise(saved: Any, present: Any) -> bool:
    """Whether these are digests of content by other means, as of another URL, or one side has none of a
    file or sampler: none to compare.
    """
    by = [
        side["by"]
        for side in (saved, present)
        if isinstance(side, dict) and {*side} == {"by", "of"}
    ]
    return len({*by}) == 2 or (len(by) == 1 and None in (saved, present))


def take_over(saved: Any, present: Any) -> None:
    """Put the files' present content into a saved identity, where their names and rows are the same."""
    if isinstance(saved, dict) and isinstance(present, dict):
        if "order" in saved and saved["order"] == present.get("order"):
            saved.update({key: present.get(key) for key in ("bytes", "digests", "content")})
        for key in saved.keys() & present.keys():
            take_over(saved[key], present[key])
    elif isinstance(saved, list) and isinstance(present, list):
        for old, new in zip(saved, present, strict=False):
            take_over(old, new)


def said(value: Any) -> str:
    try:
        return cut(json.dumps(cut(value, MOST) if isinstance(value, str) else value), MOST)
    except (RecursionError, ValueError):
        return shown(value)


#: Of format 1, rows came in another order: windows were equal.
FORMAT = 2

#: Passes over the data: fewer than this. What ``set_epoch`` takes is below the half of it.
MOST_PASSES = 1 << 41

_COMMON = ("trainpipes", "epoch", "batches", "num_shards", "pipeline", "batch_sizes")
_EDITED = "the state is cut short or was edited: load it as it was saved"


@dataclass(frozen=True)
class BatchSizes:
    """Changes of the batch size within an epoch.

    Args:
        start: number of that epoch's first batch in its pass.
        sizes: first batch of each size, by its number in the epoch, and the size.
    """

    epoch: int
    start: int
    sizes: tuple[tuple[int, int], ...]

    @staticmethod
    def parse(text: str) -> BatchSizes | None:
        """Read a state that ``render`` wrote, if its checksum fits."""
        if not text:
            return None
        fields = json.loads(text)
        sizes = tuple((number, size) for number, size in fields["sizes"])
        return BatchSizes(fields["epoch"], fields["start"], sizes)

    def render(self) -> str:
        fields = {"epoch": self.epoch, "start": self.start, "sizes": self.sizes}
        return json.dumps(fields, separators=(",", ":"))


class NewWeights(NamedTuple):
    """Weights of a mix from a batch of the pass on; see ``Loader.set_weights``.

    Args:
        batch: its number, over all ranks.
        weights: of all sources, by name; texts are fractions.
    """

    batch: int
    weights: dict[str, int | float | str]


#: The key of these in what a state says of a mix.
NEW_WEIGHTS = "set_weights"
#: Those of a pass, by their batches.
Reweighed = tuple[NewWeights, ...]


def carried(reweighed: Reweighed) -> Reweighed:
    """The weights that hold in later passes."""
    return tuple(NewWeights(0, last.weights) for last in reweighed[-1:])


@dataclass
class Position:
    """Where a run stands, as a state tells it.

    Args:
        pass_number: of the pass that an ``iter()`` gives, an epoch or several; "epoch" in a state.
        m: batches of the pass taken, over all ranks.
        cursors: of the shards that the state knows; unused where the pipeline is counted.
        extra: keys that only a kind of loader has.
        sizes: changes of the batch size in the current epoch.
        reweighed: changes of a mix's weights in the pass; a state has them in "pipeline".
    """

    pass_number: int
    m: int
    num_shards: int
    cursors: dict[int, dict[str, Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    sizes: BatchSizes | None = None
    reweighed: Reweighed = ()

    def require_all_workers(self) -> None:
        """Raise StateError if it is that of one of several DataLoader workers."""
        turn = json.loads(self.extra.get("turn", "{}"))
        if turn.get("num_workers", 1) > 1:
            raise StateError(
                f"turn: this is the state of a single worker, number {turn['worker']} of "
                f"{turn['num_workers']} of a StatefulDataLoader: load the whole state of that into a "
                "StatefulDataLoader with as many workers"
            )

    def require(self, shards: Collection[int]) -> None:
        """Raise StateError unless the cursors of these shards are here."""
        lacking = [s for s in shards if s not in self.cursors]
        lacking = [s for s in lacking if slots_before(self.m, s, self.num_shards) > 0]
        if lacking:
            raise StateError(
                f"this rank or worker reads shards {shown(sorted(shards))}, and the state has no "
                f"position for shards {shown(sorted(lacking))}: merge the states of all ranks "
                "and workers with trainpipes.merge_states([...]) and load that, or what "
                "loader.full_state_dict() or torch.distributed.checkpoint saved"
            )


@dataclass(frozen=True)
class Saved:
    """A state, and the text of its key "pipeline" without checksum."""

    position: Position
    pipeline: str

    @property
    def reweighed(self) -> Reweighed:
        """The weights of a mix in the position."""
        if NEW_WEIGHTS not in self.pipeline:
            return ()
        mix = json.loads(self.pipeline)["stages"][0]
        return tuple(NewWeights(batch, weights) for batch, weights in mix.get(NEW_WEIGHTS, ()))


def fitting(
    saved: Saved, identity: str, num_shards: int, file_name: FileName = lambda *_: ""
) -> Position:
    """The position of a state, checked against the pipeline that loads it."""
    position = saved.position
    check_identity(saved.pipeline, identity, file_name)
    if position.num_shards != num_shards:
        raise StateError(
            f"num_shards: saved {position.num_shards}, now {num_shards}; "
            f"use .sharding_filter(num_shards={position.num_shards})"
        )
    return position


def read(state: Any) -> Saved:
    """A state, checked as far as possible without its pipeline."""
    if not isinstance(state, Mapping) or "trainpipes" not in state:
        raise unrecognized_state_error(state)
    odd = [key for key in state if not isinstance(key, str)]
    if odd:
        raise StateError(
            f"a state's keys are strings, got {shown(odd[0])}; load it as it was saved"
        )
    version = state["trainpipes"]
    if type(version) is not int or version != FORMAT:
        if type(version) is not int and getattr(version, "ndim", 0) == 0 and version == FORMAT:
            kind = f"its numbers are integers, got a {type(version).__name__}"
            raise StateError(f"trainpipes: the state was changed, {kind}: load it as it was saved")
        why = ", in which rows come in another order" if shown(version) == "1" else ""
        raise StateError(
            f"trainpipes: the state's format must be {FORMAT}, got {shown(version)}{why}; "
            "load it with the trainpipes that wrote it, or start a new run"
        )
    epoch, m = _integer(state, "epoch", MOST_PASSES), _integer(state, "batches", MOST_COUNTED)
    num_shards = _integer(state, "num_shards", MOST_COUNTED, 1)
    sizes, turn = (_text(state, key, "") for key in ("batch_sizes", "turn"))
    pipeline, check = cursor.unsealed(_text(state, "pipeline"))
    if check is None:
        raise StateError("pipeline: damaged (it has no checksum); load the state as it was saved")
    tag = check[:8]
    if check != tag + cursor.checksum(pipeline, tag, epoch, m, num_shards, sizes, turn):
        raise StateError(
            f"pipeline: its checksum does not fit the other keys (epoch {epoch}, batches = {m}, num_shards "
            f"= {num_shards}, batch_sizes, turn). The state was edited or is damaged, or ranks saved it at "
            "different steps: load it as it was saved, and save on all ranks after the same step"
        )
    cursors, extra = {}, {}
    for key, value in state.items():
        if key.startswith("shard-"):
            cursors[cursor.shard_of(key, num_shards)] = cursor.read_cursor(
                key, value, epoch, m, num_shards, tag
            )
        elif key not in _COMMON:
            extra[key] = value
    position = Position(epoch, m, num_shards, cursors, extra, BatchSizes.parse(sizes))
    return Saved(position, pipeline)


def unrecognized_state_error(state: Any) -> StateError:
    """The error for what is no state: says what it is, and what to load."""
    if not isinstance(state, Mapping):
        rule = f"a state must be the dict that state_dict() gave, got {type(state).__name__}"
        if isinstance(state, str | os.PathLike):
            return StateError(f"{rule}; load what torch.load(path, weights_only=True) gives")
        return StateError(f"{rule}; of the states of all ranks make one with merge_states(states)")
    if "_snapshot" in state or "fetcher_state" in state:
        kind = "the state of a StatefulDataLoader"
        cure = (
            "load it into a StatefulDataLoader with as many workers, or count batches: "
            "load_state_dict(pipe.state_at(batches_delivered_to_each_rank, epoch=...))"
        )
    elif {"root", "num_yielded"} <= state.keys():
        kind = "the state of a torchdata.nodes.Loader"
        cure = "load it into the torchdata.nodes.Loader that saved it"
    elif "work_queue" in state:
        kind, cure = "the state of a WorkQueue", "load it into a WorkQueue of the same pipeline"
    else:
        key = "batches" if "trainpipes" in state else "trainpipes"
        keys = ", ".join(map(shown, list(state)[:4])) or "empty"
        kind = f"a dict without the key {key!r} ({keys})"
        inside = [
            key for key, inner in state.items() if isinstance(inner, Mapping) and "batches" in inner
        ]
        cure = (
            f"load state[{shown(inside[0])}], which is in it"
            if inside
            else "load what state_dict() of this pipeline or loader gave, as it was"
        )
    return StateError(f"a state must be one of trainpipes, got {kind}; {cure}")


def render(
    position: Position, identity: str, texts: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """The state of a position; ``texts`` are its cursors, already sealed."""
    tag = cursor.checksum(identity)
    if texts is None:
        cursors, epoch = position.cursors, position.pass_number
        texts = {s: cursor.cursor_text(at, s, tag, epoch) for s, at in cursors.items()}
    # Always there: torch.distributed.checkpoint loads the keys that a fresh state has.
    sizes = "" if position.sizes is None else position.sizes.render()
    turn = position.extra.get("turn", "")
    common = tag, position.pass_number, position.m, position.num_shards, sizes, turn
    state: dict[str, Any] = {
        "trainpipes": FORMAT,
        "epoch": position.pass_number,
        "batches": position.m,
        "num_shards": position.num_shards,
        "pipeline": cursor.sealed(identity, tag + cursor.checksum(identity, *common)),
        "batch_sizes": sizes,
    }
    state.update((cursor.shard_key(shard), texts[shard]) for shard in sorted(texts))
    state.update(position.extra)
    return state


def _integer(state: Mapping[str, Any], key: str, most: int, least: int = 0) -> int:
    value = state.get(key)
    if type(value) is int and least <= value < most:
        return value
    raise StateError(f"{key}: must be an integer of {least} or more, got {shown(value)}; {_EDITED}")


def _text(state: Mapping[str, Any], key: str, default: Any = None) -> str:
    value = state.get(key, default)
    if isinstance(value, str):
        return value
    raise StateError(f"{key}: must be a string, got {shown(value)}; {_EDITED}")
