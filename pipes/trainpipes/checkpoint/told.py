"""``tell``: what a state says of where a run stands, in a few facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainpipes.checkpoint.within import FoundState
from trainpipes.errors import StateError
from trainpipes.identity import read_identity
from trainpipes.merge import merge_states
from trainpipes.order import divisors, slots_before
from trainpipes.shown import cut
from trainpipes.state import Position, Saved, read

__all__ = ["Told", "tell"]

#: The option that says most of a stage.
TELLING = {
    "sharding_filter": "num_shards", "shuffle": "buffer_size", "tokenize": "max_length",
    "batch": "batch_size", "pack": "length", "bucket_by_length": "batch_size", "take": "count",
    "skip": "count", "repeat": "times", "sample": "fraction",
}  # fmt: skip
#: Stages that make an epoch longer or shorter than its rows, also where a pipeline is counted.
LENGTHENING = {"take", "skip", "repeat", "draw"}


#: More than these are not even counted through.
MOST_SHARDS = 1 << 24


@dataclass(frozen=True)
class Told:
    """What a state says.

    Args:
        format: version of the format.
        epoch: the pass over the data, from 0.
        batches: batches of that pass that were delivered, over all ranks: m.
        epoch_batches: batches in an epoch, over all ranks; None if the state does not say.
        rank: the rank that saved it, and the number of ranks; None if the state is that of all ranks.
        rank_batches: batches that this rank has delivered.
        workers: workers of the StatefulDataLoader that saved it; 0 for none.
        num_shards: S.
        world_sizes: numbers of ranks that may load it.
        needs_others: whether ranks of another number need the states of all ranks merged.
        stages: of the pipeline, in short.
        files: of the data; None where they are in none.
        rows: of the data; None where they are not counted.
    """

    format: int
    epoch: int
    batches: int
    epoch_batches: int | None
    rank: tuple[int, int] | None
    rank_batches: int | None
    workers: int
    num_shards: int
    world_sizes: list[int]
    needs_others: bool
    stages: list[str]
    files: int | None
    rows: int | None

    @property
    def share(self) -> float | None:
        """Of the epoch that is done, 0 to 1; None where that is not known."""
        return None if not self.epoch_batches else min(1.0, self.batches / self.epoch_batches)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        rank = None if self.rank is None else {"rank": self.rank[0], "world_size": self.rank[1]}
        return {**asdict(self), "rank": rank, "share": self.share}


def tell(found: FoundState) -> Told:
    """What a state says.

    Raises:
        StateError: it is damaged, or holds no position.
    """
    if found.problem or not found.states:
        raise StateError(found.problem or "there is no state")
    parts = [read(state) for state in found.states]
    most = max(part.position.num_shards for part in parts)
    if most > MOST_SHARDS:
        raise StateError(
            f"num_shards: {most:,} shards are more than any run has ranks; the state was edited or is "
            "damaged: load it as it was saved"
        )
    workers = _workers(parts)
    saved = parts[0]
    if workers > 1 and found.kept_by == "StatefulDataLoader":
        saved = read(merge_states(found.states))
    position = saved.position
    identity, _ = read_identity(saved.pipeline)
    rank = _rank(position)
    data = identity["data"]
    return Told(
        format=int(found.states[0]["trainpipes"]),
        epoch=position.epoch,
        batches=max(part.position.m for part in parts) if workers > 1 else position.m,
        epoch_batches=_epoch_batches(position, identity),
        rank=rank,
        rank_batches=None if rank is None else slots_before(position.m, *rank),
        workers=workers if workers > 1 else 0,
        num_shards=position.num_shards,
        world_sizes=divisors(position.num_shards),
        needs_others=rank is not None,
        stages=[_in_short(stage) for stage in identity["stages"]],
        files=_count(data, "files"),
        rows=_count(data, "rows"),
    )


def _workers(parts: list[Saved]) -> int:
    turns = [json.loads(part.position.extra.get("turn", "{}")) for part in parts]
    return max(int(turn.get("num_workers", 1)) for turn in turns)


def _rank(position: Position) -> tuple[int, int] | None:
    """The rank whose shards these are, and of how many; None for all shards, or none."""
    shards, S = sorted(position.cursors), position.num_shards
    if not shards or len(shards) == S:
        return None
    for world in divisors(S):
        if len(shards) * world == S and shards == list(range(shards[0], S, world)):
            return shards[0], world
    return None


def _epoch_batches(position: Position, identity: Mapping[str, Any]) -> int | None:
    """Batches of an epoch, where all that shapes them is a batch size; None for others."""
    stages = identity["stages"]
    names = [stage["stage"] for stage in stages]
    rows = identity["data"].get("rows")
    if position.cursors or position.sizes is not None or not position.m or LENGTHENING & {*names}:
        return None
    if not isinstance(rows, int) or isinstance(rows, bool) or names.count("batch") > 1:
        return None
    if "batch_sampler" in stages[0] or "sampler" in stages[0]:
        return None
    batch = next((stage for stage in stages if stage["stage"] == "batch"), None)
    size = 1 if batch is None else batch.get("batch_size")
    if not isinstance(size, int) or size < 1:
        return None
    found = rows // size if batch is not None and batch.get("drop_last") else -(-rows // size)
    return found if found >= position.m else None


def _in_short(stage: Mapping[str, Any]) -> str:
    """A stage as its name and the option that says most."""
    name = cut(str(stage["stage"]), 60)
    value = stage.get(TELLING.get(name, ""))
    if value is None and stage.get("max_tokens") is not None:
        return f"{name}(max_tokens={stage['max_tokens']})"
    if value is None and name == "shuffle":
        value = stage.get("scope")
    if name == "mix" and isinstance(stage.get("sources"), Mapping):
        value = ", ".join(map(str, stage["sources"]))
    return name if value is None else f"{name}({cut(str(value), 60)})"


def _count(data: Mapping[str, Any], name: str) -> int | None:
    """Files or rows of the data, also where it has several sources."""
    value = data.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    sources = data.get("sources")
    several = list(sources.values()) if isinstance(sources, Mapping) else sources
    if not isinstance(several, list) or not all(isinstance(one, Mapping) for one in several):
        return None
    counts = [_count(one, name) for one in several]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
