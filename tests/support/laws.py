"""The elastic law, for any pipeline: ranks together give the sequence of one, and a run that was saved on
some ranks goes on on others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import count

import trainpipes as tp
from ranks import ENDED, Leg, Reads
from trainpipes.order.layout import divisors
from trainpipes.testing import digest

__all__ = ["Whole", "assert_ranks_agree", "assert_resumes_elsewhere", "world_sizes"]

#: Items of an endless pipeline that are compared.
ENOUGH = 26


class Whole:
    """What one rank gives in one pass: digests by number m, holes left out."""

    def __init__(self, pipe: tp.Pipeline) -> None:
        self.plan = pipe._iteration.plan
        self.items: dict[int, str] = {}
        m = -1
        iterator = iter(pipe)
        for item in iterator:
            state = iterator.state_dict()
            m = state["batches"] - 1 if state["batches"] else m + 1
            self.items[m] = digest(item)
            if self.plan.chain.endless and len(self.items) == ENOUGH:
                break

    @property
    def start(self) -> int:
        """The number of the first item: not 0 where ``skip`` counts items as they come."""
        return min(self.items, default=0)

    def steps(self, ranks: int, first: int = 0) -> int:
        """Steps that so many ranks take from ``first`` to the end."""
        first = max(first, self.start)
        if ranks == 1:
            return sum(m >= first for m in self.items)
        hole = next(m for m in count(first) if m not in self.items)
        return (hole - first) // ranks


whole_of = lru_cache(maxsize=1)(Whole)


def world_sizes(pipe: tp.Pipeline) -> list[int]:
    """1 to 4 ranks, as far as they divide the shards."""
    return [ranks for ranks in divisors(pipe._iteration.plan.chain.num_shards) if ranks <= 4]


def given_by(leg: Leg, whole: Whole, first: int, steps: int | None) -> Iterator[tuple[int, str]]:
    """Numbers and digests of so many steps of a leg from ``first`` on; to the end if None."""
    leg.begin()
    m = max(first, whole.start)
    for _ in range(steps if steps is not None else whole.steps(leg.ranks, first)):
        items = leg.step()
        assert ENDED not in items
        if leg.ranks == 1:  # holes are passed over
            m = min(at for at in whole.items if at >= m)
        for rank, item in enumerate(items):
            yield m + (rank - m) % leg.ranks, digest(item)
        m += leg.ranks
    if steps is None and not whole.plan.chain.endless:
        assert leg.step() == [ENDED] * leg.ranks


def reads_of(whole: Whole, ranks: int) -> list[tuple[Reads, int]]:
    """Ways in which a rank may read, and numbers of workers."""
    ways: list[tuple[Reads, int]] = [("pipe", 1), ("loader", 2)]
    shards = whole.plan.chain.num_shards // ranks
    if not whole.plan.counts.ends_unevenly and shards % 2 == 0:
        ways.append(("workers", 2))
    return ways


def sizes_of(pipe: tp.Pipeline, turn: int | None, count: int = 1) -> list[int]:
    """Numbers of ranks that are tried: some of them in turn, or all."""
    sizes = world_sizes(pipe)
    if turn is None:
        return sizes
    return list(dict.fromkeys(sizes[(turn + 2 * more) % len(sizes)] for more in range(count)))


def assert_ranks_agree(pipe: tp.Pipeline, turn: int | None = None) -> None:
    """Ranks together give the sequence of one, however they read.

    Args:
        turn: which number of ranks, in one way; each number in each way if left out.
    """
    whole = whole_of(pipe)
    for ranks in sizes_of(pipe, turn):
        end = whole.steps(ranks) * ranks if ranks > 1 else None
        expected = {m: item for m, item in whole.items.items() if end is None or m < end}
        ways = reads_of(whole, ranks)
        for reads, workers in ways if turn is None else [ways[ranks % len(ways)]]:
            leg = Leg(pipe, ranks, workers, reads)
            assert dict(given_by(leg, whole, 0, None)) == expected, f"{ranks} ranks, {reads}"
            leg.close()


def assert_resumes_elsewhere(pipe: tp.Pipeline, turn: int | None = None, count: int = 1) -> int:
    """A run that was saved on some ranks goes on on others: how often it did.

    Args:
        turn: the first of ``count`` numbers of ranks, saved in the middle or after one step in turn; each
            at both if left out.
    """
    whole = whole_of(pipe)
    sizes, resumed = world_sizes(pipe), 0
    for place, ranks in enumerate(sizes_of(pipe, turn, count)):
        number = sizes.index(ranks)
        steps = whole.steps(ranks)
        places = [steps // 2, min(1, steps)]
        for stop in places if turn is None else [places[(turn // len(sizes) + place) % 2]]:
            others = sizes[(number + 1 + stop) % len(sizes)]
            reads, workers = reads_of(whole, ranks)[stop % 2]
            first = Leg(pipe, ranks, workers, reads)
            taken = dict(given_by(first, whole, 0, stop))
            state = json.loads(json.dumps(tp.merge_states(first.states())))
            first.close()
            m = state["batches"]
            if state["epoch"] or whole.steps(others, m) == 0:  # nothing is left of the pass
                continue
            reads, workers = reads_of(whole, others)[number % 2]
            then = Leg(pipe, others, workers, reads, [state] * others)
            rest = dict(given_by(then, whole, m, None))
            then.close()
            assert not set(taken) & set(rest)
            end = max(rest, default=m) + 1
            expected = {at: item for at, item in whole.items.items() if at < end}
            assert taken | rest == expected, f"{ranks} ranks, then {others}"
            resumed += 1
    return resumed
