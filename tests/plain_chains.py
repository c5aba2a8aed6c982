"""What the stages of ``chains`` do, in plain Python over lists: stage by stage, of one shard.

A pass is a list of epochs, each a list of items. Where batches go on over the joint of two epochs, the pass
is one list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain as joined
from itertools import islice
from pathlib import Path
from typing import Any

import trainpipes as tp
from chains import Chain, Stage, build, first_number, marked, pieces, row, tp_plain

__all__ = ["Differs", "atoms", "bounds_of", "check_stages"]

#: Rows that are looked at where there is no end, and batches.
MOST_ROWS, MOST_BATCHES = 160, 12
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


def items_of(chain: Chain, folder: Path, passes: int, most: int) -> list[list[Any]]:
    """What the pipeline gives, pass by pass, in Python's own types."""
    pipe = build(chain, folder)
    return [[tp_plain(item) for item in islice(pipe, most)] for _ in range(passes)]


class Differs(AssertionError):
    """A stage gave something else than plain Python."""


def same(found: Any, wanted: Any, stage: Stage) -> None:
    if found != wanted:
        place = next(
            (n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
            min(len(found), len(wanted)),
        )
        near = slice(max(0, place - 1), place + 2)
        raise Differs(
            f"{stage}: {len(found)} items for {len(wanted)}, from item {place}: {found[near]} for {wanted[near]}"
        )


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


def chunks(items: Sequence[Any], size: int, drop: bool) -> list[Any]:
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
}  # fmt: skip
GROUPS = "batch", "batch tokens", "buckets"


def check_stages(chain: Chain, folder: Path) -> list[Epochs]:
    """Compare each stage of a chain of one shard with plain Python; what its passes give."""
    times = next((stage[1] for stage in chain.stages if stage[0] == "repeat"), 1)
    below_passes = 4 if times is None else 2 * times
    found, endless = check_source(chain.source, folder, below_passes)
    batched = chain.source[0] == "mix" and batches_of(chain.source)
    crosses = False  # whether batches go on over the joint of two epochs
    for number, stage in enumerate(chain.stages, 1):
        name, *given = stage
        prefix = Chain(chain.source, chain.stages[:number])
        repeats = ("repeat", times) in prefix.stages
        endless = endless or (name == "repeat" and times is None)
        batched = batched or name in GROUPS
        most = (MOST_BATCHES if batched else MOST_ROWS) if endless else 10**6
        passes = 1 if endless else 2 if repeats or times == 1 else below_passes
        given_now = items_of(prefix, folder, passes, most)
        if name == "repeat":
            found = repeated(found, times)
            for own, below in zip(given_now, found, strict=True):
                compare(own, flat(below), stage, endless)
            continue
        crosses = crosses or (name in (*GROUPS, "pack") and repeats and not crosses_not(prefix))
        after = []
        for own, below in zip(given_now, found, strict=False):
            below = [flat(below)] if crosses else below
            after.append(LAWS.get(name, exactly)(stage, own, below, endless))
        found = after
    return found


def crosses_not(prefix: Chain) -> bool:
    """Whether the batch stands before ``repeat``, so that a list of batches has those of one epoch."""
    names = [stage[0] for stage in prefix.stages]
    below = names[: names.index("repeat")]
    made = prefix.source[0] == "mix" and batches_of(prefix.source)
    return made or any(name in GROUPS for name in below)


def flat(epochs: Epochs) -> list[Any]:
    return [item for epoch in epochs for item in epoch]


def repeated(passes: list[Epochs], times: int | None) -> list[Epochs]:
    every = [epoch for one in passes for epoch in one]
    if times is None:
        return [every]
    return [every[n : n + times] for n in range(0, len(every), times)]


def exactly(stage: Stage, own: list[Any], below: Epochs, endless: bool) -> Epochs:
    """Law of a stage whose items follow from those below."""
    name, *given = stage
    if name == "map rng":
        compare(*([without_draws(item) for item in part] for part in (own, flat(below))), stage, endless)
        return divided(own, below)
    if name == "stateful":
        wanted = [list(changes(e)) if given[0] == "changes" else e for e in below]
    else:
        wanted = [list(PER_EPOCH[name](epoch, *given)) for epoch in below]
    compare(own, flat(wanted), stage, endless)
    return wanted


def without_draws(item: Any) -> Any:
    return {key: value for key, value in item.items() if key != "r"}


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
    "buckets": bucketed,
    "pack": packed,
}


# Sources


def batches_of(source: Stage) -> bool:
    """Whether a mix gives batches."""
    inner = source[1][0][1]
    names = {stage[0] for stage in inner.stages}
    return bool(names & {*GROUPS}) or (inner.source[0] == "mix" and batches_of(inner.source))


def check_source(source: Stage, folder: Path, passes: int) -> tuple[list[Epochs], bool]:
    """The passes that a source gives, each of one epoch, and whether it has no end."""
    kind, *given = source
    if kind == "concat":
        parts = [check_stages(chain, folder) for chain in given[0]]
        wanted = [item for part in parts for item in flat(part[0])]
    elif kind == "mix":
        return check_mix(source, folder, passes)
    else:
        first, count = given
        count = sum(count) if isinstance(count, tuple) else count
        wanted = [row(x) for x in range(first, first + count)]
    found = items_of(Chain(source), folder, passes, 10**6)
    for own in found:
        same(own, wanted, source)
    return [[own] for own in found], False


def check_mix(source: Stage, folder: Path, passes: int) -> tuple[list[Epochs], bool]:
    """A mix has each source's items in their order, and by their shares at any time."""
    _, chains, options = source
    weights, stop = dict(options)["weights"], dict(options)["stop"]
    endless = stop == "repeat"
    sources: dict[str, list[Epochs]] = {}
    whose: dict[int, str] = {}
    for name, chain in chains:
        check_stages(chain, folder)
        sources[name] = [[one] for one in items_of(chain, folder, 3, 10**6)]
        whose |= dict.fromkeys(firsts(chain), name)
    most = (MOST_BATCHES if batches_of(source) else MOST_ROWS) if endless else 10**6
    found = items_of(Chain(source), folder, 1 if endless else passes, most)
    total = sum(weights.values())
    for number, own in enumerate(found):
        by_source: dict[str, list[Any]] = {name: [] for name in weights}
        for drawn, item in enumerate(own, 1):
            atom = atoms(item)[0]
            by_source[whose[atom[0] // 1000]].append(item)
            for name, items in by_source.items():
                if abs(len(items) * total - weights[name] * drawn) >= total:
                    raise Differs(f"{source}: {name} gave {len(items)} of {drawn}")
        sizes = {name: len(flat(sources[name][0])) for name in weights}
        for name, items in by_source.items():
            if number == 0:
                wanted = flat([flat(epochs) for epochs in sources[name]])
                same(items[: len(wanted)], wanted[: len(items)], ("source", name))
        if not number and not endless:
            done = [len(by_source[name]) >= sizes[name] for name in weights]
            ends = all(done) if stop == "all_exhausted" else any(done)
            if not ends:
                raise Differs(f"{source}: ended after {by_source} of {sizes}")
            over = [len(by_source[n]) > sizes[n] for n in weights]
            if any(over) and stop == "first_exhausted":
                raise Differs(f"{source}: a row came twice")
    return [[own] for own in found], endless


def firsts(chain: Chain) -> list[int]:
    """The thousands of a chain's rows."""
    kind, *given = chain.source
    if kind == "concat":
        return [n for one in given[0] for n in firsts(one)]
    if kind == "mix":
        return [n for _, one in given[0] for n in firsts(one)]
    return [given[0] // 1000]


# Rows of an epoch on any number of shards


def bounds_of(chain: Chain) -> tuple[Counter[Any] | None, Counter[Any] | None, int]:
    """How often each row comes in a pass, at least and at most, and how many may be left out in all.

    None where that cannot be told.
    """
    low, high, slack = rows_of_source(chain.source)
    rolls, times, batched = False, 1, chain.source[0] == "mix" and batches_of(chain.source)
    for name, *given in chain.stages:
        if name in ("flat_map", "filter", "filter columns", "pack"):
            low, high = (
                None if one is None else after_stage(name, given, one) for one in (low, high)
            )
        elif name == "repeat" and given[0] is not None:
            (times,) = given
            rolls = not batched
            low, high = (None if one is None else times_of(one, times) for one in (low, high))
        elif name == "batch" and given[1] and not batched and low is not None and not packs(chain):
            slack += chain.shards * (given[0] - 1) * (1 if rolls else 4)
        elif name in ("deduplicate", "take", "skip", "filter batch") or (name, given) == (
            "stateful",
            ["changes"],
        ):
            low = None
        elif name in GROUPS and given[1] is True:
            low = None
        batched = batched or name in GROUPS
    return low, high, slack


def packs(chain: Chain) -> bool:
    return any(stage[0] == "pack" for stage in chain.stages)


def times_of(rows: Counter[Any], times: int) -> Counter[Any]:
    return Counter({one: times * count for one, count in rows.items()})


def after_stage(name: str, given: Sequence[Any], rows: Counter[Any]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for (x, p), count in rows.items():
        one = {**row(x), "p": p}
        if name == "pack":
            found.update({x + 1: count * len(one["ids"])})
        else:
            for item in PER_EPOCH[name]([one], *given):
                found[item["x"], item["p"]] += count
    return found


def rows_of_source(source: Stage) -> tuple[Counter[Any] | None, Counter[Any] | None, int]:
    kind, *given = source
    if kind == "mix":
        bounds = [bounds_of(chain) for _, chain in given[0]]
        options = dict(given[1])
        lows, highs, slacks = zip(*bounds, strict=True)
        low = joint(lows) if options["stop"] == "all_exhausted" else None
        high = joint(highs) if options["stop"] == "first_exhausted" else None
        return low, high, sum(slacks)
    if kind == "concat":
        lows, highs, slacks = zip(*(bounds_of(chain) for chain in given[0]), strict=True)
        return joint(lows), joint(highs), 0
    count = sum(given[1]) if isinstance(given[1], tuple) else given[1]
    rows = Counter((x, 0) for x in range(given[0], given[0] + count))
    return rows, rows, 0


def joint(parts: Sequence[Counter[Any] | None]) -> Counter[Any] | None:
    """All of them together; of lower bounds those that are known."""
    if any(part is None for part in parts):
        return None
    return sum((part for part in parts if part is not None), Counter())
