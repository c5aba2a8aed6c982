"""The checkpoint format: what a state holds, and whether it fits the pipeline that loads it.

    {
      "trainpipes": 1,               version of this format
      "epoch": 2,                    the pass over the data, from 0
      "m": 1234,                     micro-batches of that pass taken, over all ranks
      "num_shards": 24,
      "pipeline": "{…}",             what the data and the stages were: JSON
      "batch_sizes": "",             sizes in an epoch in which that of batches was changed: JSON
      "shard-0007": "{…}",           one cursor a shard: JSON
      …
    }

Only integers and strings in one flat dict: it passes through JSON, ``torch.load`` with
``weights_only=True`` and ``torch.distributed.checkpoint`` as it is, and each shard is a key that
can be moved to another rank.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainpipes.errors import StateError
from trainpipes.order import slots_before

__all__ = [
    "FORMAT",
    "Position",
    "BatchSizes",
    "check_cursor",
    "first_difference",
    "named_difference",
    "parse",
    "read_identity",
    "render",
    "render_sizes",
    "shard_key",
]

FORMAT = 1

_CURES = {
    "data": "load the state with the files it was saved with, or start a new run",
    "stages": "build the pipeline as it was when the state was saved, or start a new run",
}


def shard_key(shard: int) -> str:
    """The key of a shard's cursor.

    >>> shard_key(7)
    'shard-0007'
    """
    return f"shard-{shard:04d}"


@dataclass(frozen=True)
class BatchSizes:
    """Changes of the size of micro-batches within an epoch.

    Args:
        epoch: in which they happened.
        start: number of that epoch's first micro-batch in its pass.
        sizes: number in the epoch from which on, and size; the first from 0 on.
    """

    epoch: int
    start: int
    sizes: tuple[tuple[int, int], ...]

    @staticmethod
    def parse(text: Any) -> BatchSizes:
        """What ``render_sizes`` wrote.

        Raises:
            StateError: it is damaged.
        """
        try:
            found = json.loads(text)
            sizes = tuple((int(number), int(size)) for number, size in found["sizes"])
            assert sizes
            assert all(size > 0 for _, size in sizes)
            return BatchSizes(int(found["epoch"]), int(found["start"]), sizes)
        except (TypeError, ValueError, KeyError, AssertionError) as error:
            raise StateError(
                f"batch_sizes: damaged, got {text!r}; load the state as it was saved"
            ) from error


def render_sizes(sizes: BatchSizes) -> str:
    """Batch sizes as JSON."""
    found = {"epoch": sizes.epoch, "start": sizes.start, "sizes": sizes.sizes}
    return json.dumps(found, separators=(",", ":"))


@dataclass
class Position:
    """Where a run stands, as a state tells it.

    Args:
        epoch: the pass over the data.
        m: micro-batches of that pass taken, over all ranks.
        num_shards: S.
        cursors: cursor of each shard that the state knows.
        extra: keys of one loader's own, kept as they are.
        sizes: changes of the batch size in the epoch at hand.
    """

    epoch: int
    m: int
    num_shards: int
    cursors: dict[int, dict[str, Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    sizes: BatchSizes | None = None

    def missing(self, shards: Collection[int]) -> list[int]:
        """Shards whose cursor is not here, though they have delivered something."""
        return [
            s
            for s in shards
            if s not in self.cursors and slots_before(self.m, s, self.num_shards) > 0
        ]


def parse(state: Any, identity: str, num_shards: int) -> Position:
    """A state as a position, checked against the pipeline that is to load it.

    Args:
        state: what ``state_dict()`` gave.
        identity: the pipeline's own ``"pipeline"`` text.
        num_shards: the pipeline's.

    Raises:
        StateError: it is no state, is damaged, is of a newer format, or of another pipeline.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a state is the dict that state_dict() gave, got {type(state).__name__}")
    if "trainpipes" not in state:
        keys = ", ".join(map(repr, list(state)[:4])) or "no keys"
        raise StateError(
            f"not a state of trainpipes: the key 'trainpipes' is missing (found {keys}); "
            "load what state_dict() of this pipeline or loader gave, as it was"
        )
    version = state["trainpipes"]
    if not isinstance(version, int) or version < 1:
        raise StateError(f"trainpipes: the format version is a number from 1, got {version!r}")
    if version > FORMAT:
        raise StateError(
            f"trainpipes: saved in format {version}, this version reads up to {FORMAT}; "
            "install the trainpipes that wrote it, or a newer one"
        )
    epoch = _integer(state, "epoch")
    m = _integer(state, "m")
    _check_identity(_text(state, "pipeline"), identity)
    saved_shards = _integer(state, "num_shards")
    if saved_shards != num_shards:
        raise StateError(
            f"num_shards: saved {saved_shards}, now {num_shards}; "
            f"use .sharding_filter(num_shards={saved_shards})"
        )
    cursors = {}
    extra = {}
    for key, value in state.items():
        if key.startswith("shard-"):
            shard = _shard_number(key, num_shards)
            cursors[shard] = check_cursor(key, value, shard, m, num_shards)
        elif key not in ("trainpipes", "epoch", "m", "num_shards", "pipeline"):
            extra[key] = value
    changed = extra.pop("batch_sizes", "")
    sizes = BatchSizes.parse(changed) if changed else None
    return Position(epoch, m, num_shards, cursors, extra, sizes)


def render(position: Position, identity: str, texts: Mapping[int, str]) -> dict[str, Any]:
    """The state of a position; ``texts`` are the cursors, already as JSON."""
    state: dict[str, Any] = {
        "trainpipes": FORMAT,
        "epoch": position.epoch,
        "m": position.m,
        "num_shards": position.num_shards,
        "pipeline": identity,
        # Always there: torch.distributed.checkpoint loads the keys that a fresh state has.
        "batch_sizes": "" if position.sizes is None else render_sizes(position.sizes),
    }
    state.update((shard_key(shard), texts[shard]) for shard in sorted(texts))
    state.update(position.extra)
    return state


def first_difference(saved: Any, present: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Path of the first leaf in which two values of JSON types differ, and both values.

    >>> first_difference({"a": [1, 2]}, {"a": [1, 3]})
    ('a/1', 2, 3)
    """
    if isinstance(saved, dict) and isinstance(present, dict):
        for key in [*saved, *(k for k in present if k not in saved)]:
            below = f"{path}/{key}" if path else str(key)
            found = first_difference(saved.get(key), present.get(key), below)
            if found:
                return found
        return None
    if isinstance(saved, list) and isinstance(present, list):
        for number in range(max(len(saved), len(present))):
            old, new = (v[number] if number < len(v) else None for v in (saved, present))
            found = first_difference(old, new, f"{path}/{number}")
            if found:
                return found
        return None
    return None if saved == present and type(saved) is type(present) else (path, saved, present)


def _check_identity(saved: str, present: str) -> None:
    if saved == present:
        return
    before, now = read_identity(saved), read_identity(present)
    stages = [s["stage"] for s in before["stages"]], [s["stage"] for s in now["stages"]]
    if stages[0] != stages[1]:
        chains = [" -> ".join(names) for names in stages]
        raise StateError(
            f"stages: saved {chains[0]}, now {chains[1]}; a state belongs to the pipeline that "
            f"saved it: {_CURES['stages']}"
        )
    found = named_difference(before, now)
    if found is None:  # the same in another spelling
        return
    path, old, new = found
    cure = _CURES.get(path.split("/")[0], _CURES["stages"])
    if stages[1][:1] == ["mix"] and path.startswith(("data/sources", "stages/mix/")):
        cure += "; what is mixed, and how, may change with load_state_dict(state, allow_changes=['mix'])"
    raise StateError(f"{path}: saved {json.dumps(old)}, now {json.dumps(new)}; {cure}")


def named_difference(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """``first_difference`` of two pipelines' identities, with the stage's name in the path."""
    found = first_difference(before, now)
    if found is None:
        return None
    parts = found[0].split("/")
    if parts[0] == "stages" and len(parts) > 1 and int(parts[1]) < len(before["stages"]):
        parts[1] = before["stages"][int(parts[1])]["stage"]
    return "/".join(parts), found[1], found[2]


def read_identity(text: str) -> dict[str, Any]:
    """The data and the stages that a state's ``"pipeline"`` tells.

    Raises:
        StateError: it is damaged.
    """
    try:
        identity = json.loads(text)
        names = [stage["stage"] for stage in identity["stages"]]
        assert isinstance(identity, dict)
        assert all(isinstance(name, str) for name in names)
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise StateError(f"pipeline: damaged ({error}); load the state as it was saved") from error
    return identity


def _integer(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateError(
            f"{key}: must be an integer of 0 or more, got {value!r}; the state is cut short or "
            "was edited: load it as it was saved"
        )
    return value


def _text(state: Mapping[str, Any], key: str) -> str:
    value = state.get(key)
    if not isinstance(value, str):
        raise StateError(
            f"{key}: must be a string, got {value!r}; the state is cut short or was edited: "
            "load it as it was saved"
        )
    return value


def _shard_number(key: str, num_shards: int) -> int:
    try:
        shard = int(key.removeprefix("shard-"))
    except ValueError:
        shard = -1
    if not 0 <= shard < num_shards:
        raise StateError(f"{key}: no such shard among {num_shards}; load the state as it was saved")
    return shard


def check_cursor(key: str, value: Any, shard: int, m: int, num_shards: int) -> dict[str, Any]:
    """A shard's cursor, if it is one and fits ``m``.

    Raises:
        StateError: it is damaged, or of another step.
    """
    try:
        cursor = json.loads(value)
        delivered, at = cursor["delivered"], cursor["at"]
        good = isinstance(delivered, int) and isinstance(at, int) and _has_place(cursor)
    except (TypeError, ValueError, KeyError):
        good = False
    if not good:
        raise StateError(
            f"{key}: must be a cursor as state_dict() wrote it, got {value!r}; "
            "the state is damaged: load it as it was saved"
        )
    owed = slots_before(m, shard, num_shards)
    if delivered != owed and not (cursor.get("ended") and delivered < owed):
        raise StateError(
            f"{key}/delivered: {delivered} micro-batches, but m = {m} means {owed}; the state was "
            "edited, or ranks saved it at different steps: save on all ranks after the same step"
        )
    assert isinstance(cursor, dict)
    return cursor


def _has_place(cursor: dict[str, Any]) -> bool:
    while "below" in cursor:
        cursor = cursor["below"]
    return all(
        isinstance(cursor[key], int) and cursor[key] >= 0 for key in ("epoch", "window", "row")
    )
