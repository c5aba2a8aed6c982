"""What chains give, in plain Python over lists: of one shard stage by stage, of several as often as it is to
come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from chains import Chain, Stage, build, row, tp_plain
from plain_stages import (
    GROUPS,
    LAWS,
    PER_EPOCH,
    Differs,
    Epochs,
    atoms,
    bag,
    compare,
    divided,
    exactly,
    flat,
    same,
    windows,
    without,
)

__all__ = ["bounds_of", "check_stages"]

#: Rows that are looked at where there is no end, and batches.
MOST_ROWS, MOST_BATCHES = 160, 12
#: Stages that leave out rows, and which is not told from the row alone.
LEAVES_OUT = {"deduplicate", "take", "skip", "filter batch", "sample"}
#: After these a shuffle has a buffer in each shard.
MAKE = {*GROUPS, "shuffle", "shuffle all", "flat_map", "deduplicate", "stateful", "pack"}


def items_of(chain: Chain, folder: Path, passes: int, most: int) -> list[list[Any]]:
    """What the pipeline gives, pass by pass, in Python's own types."""
    pipe = build(chain, folder)
    return [[tp_plain(item) for item in islice(pipe, most)] for _ in range(passes)]


def check_stages(chain: Chain, folder: Path) -> list[Epochs]:
    """Compare each stage of a chain of one shard with plain Python; what its passes give."""
    times = next((stage[1] for stage in chain.stages if stage[0] == "repeat"), 1)
    below_passes = 4 if times is None else 2 * times
    found, endless = check_source(chain.source, folder, below_passes)
    batched = chain.source[0] == "mix" and batches_of(chain.source)
    crosses = False  # whether batches go on over the joint of two epochs
    for number, stage in enumerate(chain.stages, 1):
        name = stage[0]
        prefix = Chain(chain.source, chain.stages[:number])
        repeats = ("repeat", times) in prefix.stages
        endless = endless or (name == "repeat" and times is None)
        batched = batched or name in GROUPS
        most = (MOST_BATCHES if batched else MOST_ROWS) if endless else 10**6
        passes = 1 if endless else 2 if repeats or times == 1 else below_passes
        given_now = items_of(prefix, folder, passes, most)
        if name == "repeat":
            found = repeated(found, times)
            names = [before for before, *_ in prefix.stages]
            if "buckets" in names:
                # Their turns are numbered over all epochs of a pass: each epoch has an order of its own.
                if not LEAVES_OUT & {*names[names.index("buckets") :]}:
                    for own, below in zip(given_now, found, strict=True):
                        same_rows(own, below)
                return found
            for own, below in zip(given_now, found, strict=True):
                compare(own, flat(below), stage, endless)
            if chain.source[0] == "mix" and "max_epochs" in dict(chain.source[2]):
                return found  # what a source that has left was owed goes on into the next epoch of a pass
            continue
        crosses = crosses or (name in (*GROUPS, "pack") and repeats and not crosses_not(prefix))
        names = {stage[0] for stage in chain.stages[: number - 1]}
        again = chain.source[0] == "mix" or names & MAKE
        after = []
        for own, below in zip(given_now, found, strict=False):
            below = [flat(below)] if crosses else below
            if name == "shuffle" and again and not crosses:
                windows(stage, own, below, endless)
            after.append(LAWS.get(name, exactly)(stage, own, below, endless))
        found = after
    return found


def crosses_not(prefix: Chain) -> bool:
    """Whether the batch stands before ``repeat``, so that a list of batches has those of one epoch."""
    names = [stage[0] for stage in prefix.stages]
    below = names[: names.index("repeat")]
    made = prefix.source[0] == "mix" and batches_of(prefix.source)
    return made or any(name in GROUPS for name in below)


def repeated(passes: list[Epochs], times: int | None) -> list[Epochs]:
    every = [epoch for one in passes for epoch in one]
    if times is None:
        return [every]
    return [every[n : n + times] for n in range(0, len(every), times)]


def same_rows(own: list[Any], below: Epochs) -> None:
    """Epochs have the same rows in any order; the last one may be cut off."""
    for epoch, wanted in zip(divided(own, below), below, strict=True):
        given, due = bag(atoms(epoch)), bag(atoms(wanted))
        if given - due or (len(epoch) == len(wanted) and due - given):
            raise Differs(
                f"an epoch of a repeat has {given - due} too often, and lacks {due - given}"
            )


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
    for number, own in enumerate(found):
        by_source: dict[str, list[Any]] = {name: [] for name in weights}
        for item in own:
            name = whose[atoms(item)[0][0] // 1000]
            if isinstance(item, dict) and item.get("from", name) != name:
                raise Differs(f"{source}: {item} is of {name}")
            by_source[name].append(without(item, "from"))
        if "max_epochs" not in dict(options):
            check_shares(source, [(whose[atoms(item)[0][0] // 1000], item) for item in own])
        sizes = {name: len(flat(sources[name][0])) for name in weights}
        if number == 0:
            for name, items in by_source.items():
                wanted = flat([flat(epochs) for epochs in sources[name]])
                same(items[: len(wanted)], wanted[: len(items)], ("source", name))
        if not number and not endless:
            done = [len(by_source[name]) >= sizes[name] for name in weights]
            if not (all(done) if stop == "all_exhausted" else any(done)):
                raise Differs(f"{source}: ended after {by_source} of {sizes}")
            if any(len(by_source[n]) > sizes[n] for n in weights) and stop == "first_exhausted":
                raise Differs(f"{source}: a row came twice")
    return [[own] for own in found], endless


def check_shares(source: Stage, drawn: list[tuple[str, Any]]) -> None:
    """No source is a whole item off its share, or the longest row's tokens."""
    options = dict(source[2])
    weights = options["weights"]
    total, given, longest = sum(weights.values()), dict.fromkeys(weights, 0), 1
    by_tokens = "weight_by" in options
    if by_tokens and batches_of(source):
        return
    for name, item in drawn:
        units = max(1, len(item["ids"])) if by_tokens else 1
        given[name], longest = given[name] + units, max(longest, units)
        for one, count in given.items():
            off = abs(count * total - weights[one] * sum(given.values()))
            if off > longest * total or (not by_tokens and off == total):
                raise Differs(f"{source}: {one} gave {count} of {sum(given.values())}")


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
        elif name in LEAVES_OUT or given == ["changes"] or (name in GROUPS and given[1] is True):
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
