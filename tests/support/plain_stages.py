"""What each stage of ``chains`` does, in plain Python over lists, of one shard.

A pass is a list of epochs, each a list of items. Where batches go on over the joint of two epochs, the pass
is one list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain as joined
from itertools import islice
from typing import Any

from chains import Stage, first_number, marked, pieces, row

__all__ = [
    "GROUPS", "LAWS", "PER_EPOCH", "Differs", "Epochs", "atoms", "bag", "chunks", "compare", "deduplicated",
    "divided", "exactly", "fitting", "flat", "same", "windows", "without",
]  # fmt: skip

Epochs = list[list[Any]]


def atoms(item: Any) -> list[Any]:
    """What an item is made of: rows by ``x`` and ``p``, or the tokens of packed rows."""
    if isinstance(item, list):
        return [atom for one in item for atom in atoms(one)]
    if "input_ids" in item:
        ids = item["input_ids"]
        lists = ids if isinstance(ids[0], list) else [ids]
        return [token for tokens in lists for token in tokens if token]
    if isinstance(item["x"], list):
        return list(zip(item["x"], item["p"], strict=True))
    return [(item["x"], item["p"])]


class Differs(AssertionError):
    """A stage gave something else than plain Python."""


def same(found: Any, wanted: Any, stage: Stage) -> None:
    if found != wanted:
        place = next(
            (n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
            min(len(found), len(wanted)),
        )
        near = slice(max(0, place - 1), place + 2)
        said = f"{stage}: {len(found)} items for {len(wanted)}, from item {place}"
        raise Differs(f"{said}: {found[near]} for {wanted[near]}")


def bag(items: Sequence[Any]) -> Counter[Any]:
    return Counter(map(str, items))


# Stages whose items follow from those below


def deduplicated(items: Sequence[Any], columns: Sequence[str]) -> list[Any]:
    seen: dict[Any, Any] = {}
    for item in items:
        seen.setdefault(tuple(item[name] for name in columns), item)
    return list(seen.values())


def changes(items: Sequence[Any]) -> Iterator[Any]:
    last = -1
    for item in items:
        if last < item["g"] or item["g"] < last - 12:
            last = item["g"]
            yield item


def chunks(items: Sequence[Any], size: int, drop: bool = False) -> list[Any]:
    found = [list(items[n : n + size]) for n in range(0, len(items), size)]
    return [one for one in found if len(one) == size or not drop]


def fitting(items: Sequence[Any], most: int, column: str, open_too: bool) -> list[Any]:
    """Batches of as many rows as fit, in order."""
    found: list[Any] = []
    longest = 0
    for item in items:
        length = len(item[column])
        longest = max(longest, length)
        if not found or longest * (len(found[-1]) + 1) > most:
            found.append([])
            longest = length
        found[-1].append(item)
    return found if open_too else found[:-1]


def ids_first(x: int) -> list[int]:
    return row(x)["ids"]


PER_EPOCH: dict[str, Callable[..., Any]] = {
    "map": lambda items: map(marked, items),
    "map_batches": lambda items: map(marked, items),
    "filter": lambda items, k: [item for item in items if item["x"] % k != 1],
    "filter columns": lambda items, k: [item for item in items if item["g"] > k],
    "flat_map": lambda items: joined.from_iterable(map(pieces, items)),
    "deduplicate": lambda items, *columns: deduplicated(items, columns),
    "select": lambda items: [{n: v for n, v in i.items() if n in ("x", "p", "g", "ids")} for i in items],
    "take": lambda items, n: items[:n],
    "skip": lambda items, n: items[n:],
    "map batch": lambda items: items,
    "filter batch": lambda items, k: [item for item in items if first_number(item) % k != 1],
    "sharding_filter": lambda items, *_: items,
    "cache": lambda items: items,
}  # fmt: skip
GROUPS = "batch", "batch tokens", "buckets"


def flat(epochs: Epochs) -> list[Any]:
    return [item for epoch in epochs for item in epoch]


def exactly(stage: Stage, own: list[Any], below: Epochs, endless: bool) -> Epochs:
    """Law of a stage whose items follow from those below."""
    name, *given = stage
    if name == "map rng":
        found, wanted = ([without(item, "r") for item in part] for part in (own, flat(below)))
        compare(found, wanted, stage, endless)
        return divided(own, below)
    if name == "stateful":
        wanted = [list(changes(e)) if given[0] == "changes" else e for e in below]
    else:
        wanted = [list(PER_EPOCH[name](epoch, *given)) for epoch in below]
    compare(own, flat(wanted), stage, endless)
    return wanted


def without(item: Any, name: str) -> Any:
    """A row without one column."""
    if not isinstance(item, dict):
        return item
    return {key: value for key, value in item.items() if key != name}


def compare(own: list[Any], wanted: list[Any], stage: Stage, endless: bool) -> None:
    if endless:
        least = min(len(own), len(wanted))
        own, wanted = own[:least], wanted[:least]
    same(own, wanted, stage)


def batches(stage: Stage, own: list[Any], below: Epochs, endless: bool) -> Epochs:
    if stage[0] == "batch":
        wanted = [chunks(epoch, stage[1], stage[2] or endless) for epoch in below]
    else:
        wanted = [fitting(epoch, *stage[1:], not endless) for epoch in below]
    compare(own, flat(wanted), stage, endless)
    return wanted


def tensors(stage: Stage, own: list[Any], below: Epochs, endless: bool) -> Epochs:
    """Collated batches hold the rows of those below."""
    compare([atoms(item) for item in own], [atoms(item) for item in flat(below)], stage, endless)
    return divided(own, below)


def divided(own: list[Any], below: Epochs) -> Epochs:
    """Items as epochs of as many as there are below."""
    rest = iter(own)
    return [list(islice(rest, len(epoch))) for epoch in below]


def shuffled(stage: Stage, own: list[Any], below: Epochs, endless: bool) -> Epochs:
    """All items of an epoch once; where not all are looked at, none too often."""
    found = divided(own, below)
    for mine, others in zip(found, below, strict=True):
        if endless:
            too_often = bag(mine[: max(0, len(others) - stage[1])]) - bag(others)
            if too_often:
                raise Differs(f"{stage}: too often {too_often}")
        elif bag(mine) != bag(others):
            raise Differs(
                f"{stage}: lost {bag(others) - bag(mine)}, more {bag(mine) - bag(others)}"
            )
    if not endless and len(own) != sum(map(len, below)):
        raise Differs(f"{stage}: {len(own)} items for {sum(map(len, below))}")
    return found


def sampled(stage: Stage, own: list[Any], below: Epochs, endless: bool) -> Epochs:
    """Some of the items, in their order; the same in each epoch."""
    found, rest = [], iter(own)
    following = next(rest, None)
    for epoch in below:
        kept = []
        for item in epoch:
            if item == following:
                kept.append(item)
                following = next(rest, None)
        found.append(kept)
    if following is not None and not endless:
        raise Differs(f"{stage}: {following} is not of those below, or out of order")
    return found


def windows(stage: Stage, own: list[Any], below: Epochs, endless: bool) -> None:
    """A shuffle after others mixes items of an epoch that come one after the other, fewer of the first."""
    start, last = 0, sum(map(len, below))
    for epoch in below:
        number, rest = 0, epoch
        while rest:
            growth = dict(enumerate((16, 16, 8, 4, 2))) if stage[1] > 256 else {}
            size = max(1, stage[1] // growth.get(number, 1))
            mixed, rest = rest[:size], rest[size:]
            is_cut = start + len(mixed) == last and len(mixed) < size
            if endless and (is_cut or start + len(mixed) > len(own)):
                return
            if bag(own[start : start + len(mixed)]) != bag(mixed):
                raise Differs(f"{stage}: buffer {number} of an epoch holds other items")
            start, number = start + len(mixed), number + 1


def bucketed(stage: Stage, own: list[Any], below: Epochs, endless: bool) -> Epochs:
    _, size, drop, *_ = stage
    if any(not 0 < len(batch) <= size or (drop and len(batch) < size) for batch in own):
        raise Differs(f"{stage}: batches of {Counter(map(len, own))}")
    rows = flat(own)[: max(0, len(flat(below)) - stage[3] - size)] if endless else flat(own)
    too_often = bag(rows) - bag(flat(below))
    lost = bag(flat(below)) - bag(flat(own))
    if too_often or (not endless and lost.total() >= (size if drop else 1)):
        raise Differs(f"{stage}: lost {lost}, more {too_often}")
    return [own]


def packed(stage: Stage, own: list[Any], below: Epochs, endless: bool) -> Epochs:
    _, size, method, buffer = stage
    documents = [item["ids"] for item in flat(below)]
    if endless:
        own = own[: max(0, sum(map(len, documents[: -buffer - 8])) // size - 8)]
    if any(len(item["input_ids"]) != size for item in own):
        raise Differs(f"{stage}: rows of other lengths")
    tokens = [token for item in own for token in item["input_ids"] if token]
    wanted = [token for document in documents for token in document]
    if method == "concat":
        compare(tokens, wanted, stage, endless)
    too_often, lost = Counter(tokens) - Counter(wanted), Counter(wanted) - Counter(tokens)
    if too_often or (lost and not endless):
        raise Differs(f"{stage}: tokens lost {lost}, more {too_often}")
    for item in own if method != "concat" else []:
        for token, count in Counter(t for t in item["input_ids"] if t).items():
            length = len(ids_first(token - 1))
            if length <= size and count % length:
                raise Differs(f"{stage}: a document of {length} tokens was cut: {item}")
    return [own]


LAWS: dict[str, Callable[..., Epochs]] = {
    "batch": batches,
    "batch tokens": batches,
    "pad_collate": tensors,
    "collate": tensors,
    "shuffle": shuffled,
    "shuffle all": shuffled,
    "sample": sampled,
    "buckets": bucketed,
    "pack": packed,
}
