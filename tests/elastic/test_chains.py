"""A run that is stopped and resumed on other topologies, again and again, is the run that was never
stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import SMALL_GROUPS, build, examples, rows_of, specs
from oracle import Spec, Starved, numbered
from ranks import ENDED, Leg, Reads
from trainpipes.order.layout import divisors

pytestmark = pytest.mark.filterwarnings("ignore:.*do not divide num_shards")

#: Batches of an endless pass that are looked at.
ENOUGH = 150


@dataclass(frozen=True)
class Stretch:
    """One leg of a chain, as drawn.

    Args:
        ranks, workers, reads: its topology.
        steps: steps taken before it is stopped; None for a whole pass, to the last batch; -1 for a whole
            pass and the StopIteration after it.
        passes: whole passes before that, without a resume between.
        merged: whether ranks load one merged state even where each could load its own.
        saved_by: the rank whose state is the only one that is kept, of a counted pipeline.
    """

    ranks: int
    workers: int
    reads: Reads
    steps: int | None
    passes: int
    merged: bool
    saved_by: int


@st.composite
def stretches(draw: st.DrawFn, shards: int) -> Stretch:
    """A leg on a topology that fits so many shards, mostly."""
    reads = draw(st.sampled_from(["pipe", "loader", "loader", "workers"]))
    fitting = [ranks for ranks in divisors(shards) if ranks <= 6]
    ranks = draw(st.sampled_from(fitting * 3 + [*range(1, 10)])) if shards > 1 else 1
    workers = 1
    if reads == "loader":
        workers = draw(st.integers(1, 4))
    elif reads == "workers":
        fitting = [*divisors(max(1, shards // ranks))[:4], 3, 5]
        workers = draw(st.sampled_from(fitting if shards > 1 else [1]))
    steps = st.one_of(st.integers(0, 6), st.integers(0, 40), st.sampled_from([None, -1]))
    taken = draw(steps)
    passes = draw(st.sampled_from([0, 0, 0, 1])) if taken else 0
    return Stretch(
        ranks, workers, reads, taken, passes, draw(st.booleans()), draw(st.integers(0, 5))
    )


@st.composite
def chains(draw: st.DrawFn, counted: bool = False) -> tuple[Spec, list[Stretch], int]:
    """A pipeline, the legs of a run of it, and the pass with which that starts."""
    if counted:
        spec = replace(draw(specs(SMALL_GROUPS)), keep=None, keep_batch=None)
        spec = replace(spec, skip_passed=0, take_passed=None)
        assume(spec.known)
    else:
        spec = draw(specs(SMALL_GROUPS, stream=draw(st.sampled_from([False] * 5 + [True]))))
    legs = draw(st.lists(stretches(spec.shards), min_size=4, max_size=6))
    return spec, legs, draw(st.sampled_from([0, 0, 3]))


class TooFew(Exception):
    """A pass has less than one batch for each rank."""


class Expected:
    """The batches of each pass, by the oracle."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._passes: dict[int, dict[int, list[int]]] = {}
        self.endless = spec.repeat is not None and spec.times is None

    def batches(self, number: int) -> dict[int, list[int]]:
        """Those of a pass by their number m, holes left out."""
        if number not in self._passes:
            try:
                every = numbered(self._spec, number)
                found = list(islice(every, ENOUGH) if self.endless else every)
            except Starved:
                assume(False)
            self._passes[number] = dict(found)
        return self._passes[number]

    def steps(self, number: int, m: int, ranks: int) -> int:
        """Steps that are left of a pass for so many ranks: to its end, or its first hole."""
        batches = self.batches(number)
        if ranks == 1:
            return sum(at >= m for at in batches)
        hole = m
        while hole in batches:
            hole += 1
        return (hole - m) // ranks

    def step(self, number: int, m: int, ranks: int) -> dict[int, list[int]]:
        """The batches of one step from ``m`` on."""
        batches = self.batches(number)
        if ranks == 1:
            m = min(at for at in batches if at >= m)
        return {at: batches[at] for at in range(m, m + ranks)}


def ends_unevenly(spec: Spec) -> bool:
    return not spec.known and not (spec.repeat is not None and spec.times is None)


def rows(item: Any) -> list[int]:
    found = rows_of(item)
    return found if isinstance(found, list) else [found]


def run_leg(
    pipe: tp.Pipeline,
    expected: Expected,
    stretch: Stretch,
    states: list[dict[str, Any]],
    position: tuple[int, int],
) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    """Run one leg from a position and compare every step; the states and the position after it."""
    leg = Leg(pipe, stretch.ranks, stretch.workers, stretch.reads, states)
    try:
        for _ in range(stretch.passes):
            position = run_pass(leg, expected, stretch, position, 3 if expected.endless else -1)
            if not expected.endless or stretch.reads == "workers":
                position = position[0] + 1, 0  # else it goes on where it stands
        position = run_pass(leg, expected, stretch, position, stretch.steps)
        return leg.states(), position
    except tp.DataError as error:  # repeat() of a filter that lets nothing through
        assume("let no row of" not in str(error))
        raise
    finally:
        leg.close()


def run_pass(
    leg: Leg, expected: Expected, stretch: Stretch, position: tuple[int, int], asked: int | None
) -> tuple[int, int]:
    """Run so many steps of the next pass; the position after them."""
    ranks = stretch.ranks
    number, m = position
    left = expected.steps(number, m, ranks)
    if left == 0 and expected.steps(number + (m > 0), 0, ranks) == 0:
        raise TooFew
    leg.begin()
    if left == 0 and m > 0 and asked != 0:
        number, m = number + 1, 0
        left = expected.steps(number, m, ranks)
    most = min(left, 20) if expected.endless else left
    for _ in range(most if asked in (None, -1) else min(asked, left)):
        right = expected.step(number, m, ranks)
        m = min(right)
        given = leg.step()
        order = sorted(range(ranks), key=lambda rank: (rank - m) % ranks)
        assert [given[rank] for rank in order if given[rank] is ENDED] == []
        assert {m + i: rows(given[rank]) for i, rank in enumerate(order)} == right
        m += ranks
    if asked == -1 and not expected.endless:
        assert leg.step() == [ENDED] * ranks
    return number, m


def check_chain(spec: Spec, chain: list[Stretch], start: int, alone: bool = False) -> None:
    """Run a chain of legs against the oracle.

    Args:
        alone: whether all ranks of a leg load the state of one rank of the leg before, and nothing else.
    """
    expected = Expected(spec)
    states: list[dict[str, Any]] | None = None
    assume(expected.steps(start, 0, 1) > 0)
    whole: dict[str, Any] = build(spec).state_at(0, epoch=start)
    position = start, 0
    last_topology = None
    for stretch in chain:
        pipe = build(spec)
        if stretch.reads == "workers" and ends_unevenly(spec):
            stretch = replace(stretch, reads="loader")
        own = states is not None and last_topology == stretch.ranks
        own = own and not stretch.merged and not alone
        loaded = states if own else [whole] * stretch.ranks
        try:
            given, position = run_leg(pipe, expected, stretch, loaded, position)
        except TooFew:
            continue
        if alone:
            each = len(given) // stretch.ranks  # a DataLoader's workers
            first = stretch.saved_by % stretch.ranks * each
            given = given[first : first + each]
        whole = json.loads(json.dumps(given[0] if len(given) == 1 else tp.merge_states(given)))
        assert not alone or "shard-0000" not in whole
        states = given if stretch.reads != "workers" else None
        last_topology = stretch.ranks
        found = whole["epoch"], whole["batches"]
        number, m = position
        if found != position:  # after a pass's last step a state is that of the next one's start
            assert found == (number + 1, 0)
            assert expected.steps(number, m, stretch.ranks) == 0
        position = found
        if expected.endless and found[1] > ENOUGH - 24:  # 4 steps of 6 ranks may be asked for
            return


@pytest.mark.timeout(1800)
@examples(150, often=9)
@given(chains())
def test_a_chain_of_resumes_gives_the_sequence_of_a_run_that_was_never_stopped(
    chain: tuple[Spec, list[Stretch], int],
) -> None:
    check_chain(*chain)


@pytest.mark.timeout(1800)
@examples(150, often=9)
@given(chains(counted=True))
def test_of_a_counted_run_any_one_ranks_state_goes_on_on_all_ranks_of_any_topology(
    chain: tuple[Spec, list[Stretch], int],
) -> None:
    check_chain(*chain, alone=True)
