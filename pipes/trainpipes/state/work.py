"""The state of a ``WorkQueue``:

    {
      "work_queue": 1,               version of this format
      "first_epoch": 0,              the epoch in which the queue began
      "num_shards": 24,              of the pipeline
      "num_classes": 24,             residue classes of places, a multiple of num_shards
      "pipeline": "{…}",             identity of the data and the stages, and a checksum
      "retired": "…",                rows that are in no later epoch, and what names them: JSON
      "work-0007": "{…}",            one for each class that the rank reads: JSON
      …
    }

Places are numbers of items in the global sequence of an epoch, over all ranks. Of each class, all up to
"read" is done but those that are "open"; "at" is where a loader begins to read it again, with the "cursor" of
its shard, number % num_shards, if the pipeline is uncounted. Each class is in the state of a single rank.
"""

from __future__ import annotations

import json
import zlib
from base64 import b85decode, b85encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Any, NamedTuple

import numpy as np

from trainpipes._internal.locks import cached_property
from trainpipes.errors import StateError, shown
from trainpipes.state.cursor import checksum, sealed, unsealed
from trainpipes.state.format import named_difference

FORMAT = 1
_EDITED = "the state was edited or is damaged: load it as it was saved"


class WorkKey(NamedTuple):
    """Names an item of a ``WorkQueue``, alike in every run.

    Attributes:
        epoch: from 0.
        place: number of the item in the epoch's global sequence, over all ranks; from 0. Numbers are
            left out where rows are filtered and a shard has ended.
    """

    epoch: int
    place: int


class ClassWork(NamedTuple):
    """One class: all its items up to ``read`` are done but the ``open`` ones.

    Args:
        at: where a loader begins to read it again.
        cursor: of the class's shard.
        since: where filters or a mix were changed within its epoch: places before it are those of others.
    """

    read: WorkKey
    open: tuple[WorkKey, ...]
    at: WorkKey
    cursor: dict[str, Any] | None = None
    since: WorkKey | None = None


@dataclass(frozen=True)
class WorkState:
    """The content of a queue's state; ``by`` is what names retired rows, as JSON, "" where it is unknown."""

    identity: str
    num_shards: int
    num_classes: int
    first_epoch: int
    classes: dict[int, ClassWork] = field(default_factory=dict)
    retired: frozenset[int] = frozenset()
    by: str = ""

    def __contains__(self, key: WorkKey) -> bool:
        """Whether an item is done."""
        work = self.classes[key[1] % self.num_classes]
        return key <= work.read and key not in self._open

    @cached_property
    def _open(self) -> set[WorkKey]:
        return {key for work in self.classes.values() for key in work.open}

    @cached_property
    def newest(self) -> WorkKey:
        """All after it is not done."""
        return max(work.read for work in self.classes.values())

    def in_classes(self, step: int) -> dict[int, ClassWork]:
        """The same by a multiple of ``num_classes``."""
        classes = {}
        for number in range(step):
            work = self.classes.get(number % self.num_classes)
            if work is not None:
                keys = tuple(key for key in work.open if key.place % step == number)
                classes[number] = work._replace(open=keys)
        return classes

    def of_rank(self, rank: int, world_size: int) -> dict[int, ClassWork]:
        """The classes of a rank; raises StateError if a class is missing."""
        step = gcd(self.num_classes, world_size)
        wanted = range(rank % step, self.num_classes, step)
        lacking = [number for number in wanted if number not in self.classes]
        if lacking:
            raise StateError(
                f"the state lacks {shown([*map(class_key, lacking)])}, which is work of this rank: merge the "
                "states of all ranks with trainpipes.merge_states([...]), or make one file of a folder of "
                "torch.distributed.checkpoint by its dcp_to_torch_save"
            )
        return {number: self.classes[number] for number in wanted}


def is_work(state: Any) -> bool:
    return isinstance(state, Mapping) and "work_queue" in state


def packed(numbers: Iterable[int]) -> str:
    """Ascending numbers below 2**64 as text: their differences, compressed.

    >>> unpacked(packed([5, 3, 2**64 - 1]))
    [3, 5, 18446744073709551615]
    """
    ordered = np.array(sorted(numbers), dtype=np.uint64)
    return _text(np.diff(ordered, prepend=np.uint64(0)).tobytes()) if len(ordered) else ""


def unpacked(text: str) -> list[int]:
    return np.cumsum(np.frombuffer(_data(text), dtype=np.uint64), dtype=np.uint64).tolist()  # type: ignore[no-any-return]


def _text(data: bytes) -> str:
    return b85encode(zlib.compress(data, 9)).decode("ascii")


def _data(text: str) -> bytes:
    return zlib.decompress(b85decode(text)) if text else b""


def _bits(keys: Sequence[WorkKey], step: int) -> list[list[Any]]:
    """Keys of a class: of each epoch the first place, and a bit for each that may follow."""
    runs = []
    for epoch in sorted({key.epoch for key in keys}):
        places = np.array([key.place for key in keys if key.epoch == epoch], dtype=np.int64)
        first = int(places.min())
        flags = np.zeros((int(places.max()) - first) // step + 1, dtype=bool)
        flags[(places - first) // step] = True
        runs.append([epoch, first, _text(np.packbits(flags).tobytes())])
    return runs


def _keys(runs: Any, step: int) -> tuple[WorkKey, ...]:
    keys = []
    for epoch, first, text in runs:
        flags = np.unpackbits(np.frombuffer(_data(text), dtype=np.uint8))
        keys += [WorkKey(epoch, first + step * int(n)) for n in np.flatnonzero(flags)]
    return tuple(keys)


def class_key(number: int) -> str:
    return f"work-{number:04d}"


def render_work(work: WorkState) -> dict[str, Any]:
    common = {
        "work_queue": FORMAT, "first_epoch": work.first_epoch, "num_shards": work.num_shards,
        "num_classes": work.num_classes,
    }  # fmt: skip
    tag = checksum(work.identity, *common.values())
    retired = packed(work.retired)
    if retired and work.by:
        retired += f" {work.by}"  # no letter of a packed text is a space
    state = {**common, "pipeline": sealed(work.identity, tag), "retired": retired}
    for number, class_work in sorted(work.classes.items()):
        entry: dict[str, Any] = {
            "read": class_work.read, "open": _bits(class_work.open, work.num_classes), "at": class_work.at,
        }  # fmt: skip
        if class_work.cursor is not None:
            entry["cursor"] = class_work.cursor
        if class_work.since is not None:
            entry["since"] = class_work.since
        text, key = json.dumps(entry, separators=(",", ":")), class_key(number)
        state[key] = sealed(text, checksum(text, key, tag))
    return state


def read_work(state: Any) -> WorkState:
    """A state of a queue, checked as far as possible without its pipeline."""
    if not is_work(state):
        got = "that of a loader" if isinstance(state, Mapping) and "trainpipes" in state else None
        got = got or (shown([*state][:4]) if isinstance(state, Mapping) else type(state).__name__)
        raise StateError(f"a state must be what WorkQueue.state_dict() gave, got {got}")
    version = state["work_queue"]
    if type(version) is not int or version != FORMAT:
        raise StateError(
            f"work_queue: the state's format must be {FORMAT}, got {shown(version)}; load it with the "
            "trainpipes that wrote it"
        )
    names = ("work_queue", "first_epoch", "num_shards", "num_classes")
    common = [state.get(name) for name in names]
    pipeline, retired = state.get("pipeline"), state.get("retired")
    identity, check = unsealed(pipeline) if isinstance(pipeline, str) else ("", None)
    if check is None or check != checksum(identity, *common) or not isinstance(retired, str):
        raise StateError(f"pipeline: its checksum does not fit {', '.join(names)}; {_EDITED}")
    _, first, shards, step = (int(number) for number in common if number is not None)
    classes = {}
    for key, value in state.items():
        if not key.startswith("work-"):
            continue
        text, seal = unsealed(value) if isinstance(value, str) else ("", None)
        if seal is None or seal != checksum(text, key, check):
            raise StateError(
                f"{key}: must be as state_dict() wrote it, got {shown(value)}; {_EDITED}"
            )
        entry = json.loads(text)
        read, at = WorkKey(*entry["read"]), WorkKey(*entry["at"])
        since = WorkKey(*entry["since"]) if "since" in entry else None
        keys, number = _keys(entry["open"], step), int(key.removeprefix("work-"))
        classes[number] = ClassWork(read, keys, at, entry.get("cursor"), since)
    numbers, _, by = retired.partition(" ")
    try:
        rows = frozenset(unpacked(numbers))
        json.loads(by or "null")
    except (ValueError, zlib.error):
        raise StateError(f"retired: damaged; {_EDITED}") from None
    return WorkState(identity, shards, step, first, classes, rows, by)


def merge_work(states: Collection[Any]) -> dict[str, Any]:
    """The states of the queues of all ranks in a single state."""
    parts = []
    for number, state in enumerate(states):
        try:
            parts.append(read_work(state))
        except StateError as error:
            raise StateError(f"state {number}: {error}") from None
    first, step = parts[0], lcm(*(part.num_classes for part in parts))
    classes: dict[int, ClassWork] = {}
    for number, part in enumerate(parts):
        difference = named_difference(json.loads(first.identity), json.loads(part.identity))
        if difference is not None:
            path, old, new = difference
            raise StateError(
                f"{path}: state 0 has {shown(old)}, state {number} has {shown(new)}; merge states of one run"
            )
        if part.first_epoch != first.first_epoch:
            raise StateError(
                f"first_epoch: state 0 has {first.first_epoch}, state {number} has {part.first_epoch}; merge "
                "states of one run"
            )
        part_classes = part.in_classes(step)
        twice = sorted(classes.keys() & part_classes.keys())
        if twice:
            raise StateError(
                f"{class_key(twice[0])}: state {number} has it, and one before it; merge one state of "
                "each rank"
            )
        classes |= part_classes
    lacking = [number for number in range(step) if number not in classes]
    if lacking:
        raise StateError(
            f"{shown([*map(class_key, lacking)])} are missing: merge the states of all ranks"
        )
    retired = frozenset().union(*(part.retired for part in parts))
    names = {part.by for part in parts if part.by}
    if len(names) > 1:
        got = " and ".join(repr(json.loads(name)) for name in sorted(names))
        raise StateError(
            f"WorkQueue(by): retired rows must be named alike in all states, got {got}; merge states of one "
            "run"
        )
    return render_work(
        WorkState(
            first.identity, first.num_shards, step, first.first_epoch, classes, retired, *names
        )
    )
