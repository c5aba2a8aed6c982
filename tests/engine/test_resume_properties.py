"""A run that is stopped and resumed anywhere, any number of times, gives what one run gives.

Pipelines, stop points, workers and ways to run are drawn by Hypothesis. Every state goes through JSON,
some through ``torch.save``, and each resume starts from fresh objects.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from drawn import SMALL_GROUPS, Keep, build, examples, rows_of, specs, write_parquet
from oracle import Spec, Starved, sequence
from trainpipes.testing import digest

AFTER = 12  # items looked at after the last resume
Make = Callable[[], tp.Pipeline]


class Run:
    """A way to run a pipeline, from its start or from a state.

    Args:
        make: makes a fresh pipeline.
        state: what ``state`` of an earlier run gave; None for the start.
        workers: worker processes.
        context: how they are started.
    """

    empty_pass_after_resume = False  # may one pass be empty, right after a resume?

    def __init__(
        self, make: Make, state: Any = None, workers: int = 0, context: str = "fork"
    ) -> None:
        self.pipe = make()
        self.options: dict[str, Any] = {"num_workers": workers}
        if workers:
            self.options["multiprocessing_context"] = context
        self.workers = workers
        self.passes: Iterator[Any] | None = None
        self.resumed = state is not None
        self.open(state)

    def open(self, state: Any) -> None:
        raise NotImplementedError

    def start_pass(self) -> Iterator[Any]:
        raise NotImplementedError

    def state(self) -> Any:
        raise NotImplementedError

    def give(self, count: int) -> list[str]:
        """Digests of the next items, over as many passes as it takes; fewer if passes are empty."""
        given: list[str] = []
        since_start = 1
        while len(given) < count:
            if self.passes is None:
                if since_start == 0 and not (self.empty_pass_after_resume and self.resumed):
                    break
                self.resumed = self.resumed and since_start != 0
                since_start = 0
                self.passes = self.start_pass()
            item = next(self.passes, None)
            if item is None:
                self.passes = None
                continue
            since_start += 1
            given.append(digest(item))
            self.count(item)
        return given

    def count(self, item: Any) -> None:
        """Take note of an item that was given."""


class InProcess(Run):
    """``iter(pipe)``."""

    def open(self, state: Any) -> None:
        if state is not None:
            self.pipe.load_state_dict(state)

    def start_pass(self) -> Iterator[Any]:
        return iter(self.pipe)

    def state(self) -> Any:
        return self.pipe.state_dict()


class OfLoader(Run):
    """``trainpipes.Loader``."""

    def make_loader(self) -> Any:
        return tp.Loader(self.pipe, **self.options)

    def open(self, state: Any) -> None:
        self.loader = self.make_loader()
        if state is not None:
            self.loader.load_state_dict(state)

    def start_pass(self) -> Iterator[Any]:
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()


class OfStatefulDataLoader(OfLoader):
    """torchdata's loader, as it is."""

    empty_pass_after_resume = True

    def make_loader(self) -> Any:
        return StatefulDataLoader(self.pipe, batch_size=None, **self.options)


class OfDataLoader(Run):
    """torch's loader, which has no state: started from the ``state_at`` of where it stood."""

    empty_pass_after_resume = True

    def open(self, state: Any) -> None:
        self.epoch, self.taken = (0, 0) if state is None else state
        self.pipe.load_state_dict(self.pipe.state_at(self.taken, epoch=self.epoch))
        self.loader: Any = DataLoader(self.pipe, batch_size=None, **self.options)
        self.started = False
        try:
            self.length: int | None = len(self.pipe)
        except TypeError:  # it has no end
            self.length = None

    def start_pass(self) -> Iterator[Any]:
        if self.started:
            self.epoch, self.taken = self.epoch + 1, 0
        self.started = True
        return iter(self.loader)

    def count(self, item: Any) -> None:
        if self.taken == self.length:  # without workers, an ended pass goes on with the next
            self.epoch, self.taken = self.epoch + 1, 0
        self.taken += 1

    def state(self) -> Any:
        return [self.epoch, self.taken]


def as_saved(state: Any, binary: bool = False) -> Any:
    """A state as it comes back from a checkpoint."""
    if not binary:
        return json.loads(json.dumps(state))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def has_sequence(spec: Spec) -> bool:
    """Whether the laws give this pipeline a sequence: no shard of an endless one starves."""
    try:
        sequence(spec, 0, 400)
    except Starved:
        return False
    return True


def resumed_at(
    kind: type[Run], make: Make, stops: list[int], workers: list[int], context: str = "fork"
) -> list[str]:
    """What a run gives that is stopped and resumed after each of ``stops``."""
    state = None
    given: list[str] = []
    for number, (stop, count) in enumerate(zip([*stops, AFTER], workers, strict=True)):
        run = kind(make, state, count, context)
        given += run.give(stop)
        state = as_saved(run.state(), binary=number % 3 == 2)
    return given


def uninterrupted(make: Make, count: int) -> list[str]:
    """What one run gives. Pipelines of which a pass is empty are passed over: where such a pass ends
    cannot be told from its items."""
    given = InProcess(make).give(count)
    assume(len(given) == count)
    return given


def check(
    kind: type[Run],
    spec: Spec,
    stops: list[int],
    workers: list[int] | None = None,
    finish: str | None = None,
) -> None:
    """A run that is stopped and resumed gives what an uninterrupted one gives."""
    assume(has_sequence(spec))
    make = maker(spec, finish)
    whole = uninterrupted(make, sum(stops) + AFTER)
    assert resumed_at(kind, make, stops, workers or [0] * (len(stops) + 1)) == whole, kind.__doc__


def test_a_pipeline_without_rows_resumes_to_nothing() -> None:
    for spec in (Spec((), buffer_size=3), Spec((0, 0)), Spec((5,), batch_size=8, drop_last=True)):
        make = maker(spec, None)
        for kind in (InProcess, OfLoader, OfStatefulDataLoader):
            assert resumed_at(kind, make, [0, 3], [0, 0, 0]) == []


STOPS = st.lists(st.integers(0, 24), min_size=1, max_size=4)


@examples(400, often=10)
@given(
    st.sampled_from([False, False, False, True]).flatmap(
        lambda stream: specs(SMALL_GROUPS, stream=stream)
    ),
    STOPS,
    st.sampled_from([None, "collate", "pad"]),
)
def test_iterating_a_pipeline_resumes_exactly(
    spec: Spec, stops: list[int], finish: str | None
) -> None:
    check(InProcess, spec, stops, finish=finish)


@examples(30)
@given(specs(SMALL_GROUPS), STOPS)
def test_iterating_parquet_files_resumes_exactly(spec: Spec, stops: list[int]) -> None:
    assume(has_sequence(spec))
    with TemporaryDirectory() as folder:
        half = len(spec.groups) // 2
        write_parquet(Path(folder), [spec.groups[:half], spec.groups[half:]])

        def make() -> tp.Pipeline:
            return build(spec, tp.list_files(folder).read_parquet())

        whole = uninterrupted(make, sum(stops) + AFTER)
        assert resumed_at(InProcess, make, stops, [0] * (len(stops) + 1)) == whole


@examples(60, often=5)
@given(specs(SMALL_GROUPS), STOPS)
def test_ways_to_run_without_workers_resume_exactly(spec: Spec, stops: list[int]) -> None:
    for kind in (OfLoader, OfStatefulDataLoader, OfDataLoader):
        if kind is not OfDataLoader or has_passes_by_number(spec):
            check(kind, spec, stops)


@examples(100)
@given(specs(SMALL_GROUPS), st.integers(0, 40), st.integers(0, 2))
def test_a_state_by_number_is_the_state_of_the_run(spec: Spec, taken: int, epoch: int) -> None:
    assume(has_sequence(spec))
    finite = spec.repeat is None or spec.times is not None
    epoch = epoch if finite else 0
    pipe = build(spec)
    for _ in range(epoch):
        assume(sum(1 for _ in pipe) > 0)
    run = iter(pipe)
    assume(sum(1 for _ in islice(run, taken)) == taken)
    fresh = build(spec)
    fresh.load_state_dict(as_saved(fresh.state_at(taken, epoch=epoch)))
    rest = [rows_of(item) for item in islice(run, AFTER)]
    if not rest and taken:  # at the end of a pass: the next one
        rest = [rows_of(item) for item in islice(pipe, AFTER)]
    assert [rows_of(item) for item in islice(fresh, AFTER)] == rest


@st.composite
def plans(draw: st.DrawFn, most_workers: int = 2) -> tuple[Spec, list[int], list[int]]:
    """A pipeline for runs with workers, stop points, and the workers of each part."""
    spec = draw(specs(SMALL_GROUPS))
    spec = replace(spec, num_shards=draw(st.sampled_from([2, 4, 6, 24])))
    spec = replace(spec, skip_passed=0, take_passed=None)
    stops = draw(st.lists(st.integers(0, 20), min_size=1, max_size=2))
    workers = draw(st.lists(st.integers(0, most_workers), min_size=3, max_size=3))
    return spec, stops, workers[: len(stops) + 1]


@examples(60, often=2, shrink=False)
@given(plans(most_workers=3))
def test_a_loader_resumes_exactly_with_any_number_of_workers(
    plan: tuple[Spec, list[int], list[int]],
) -> None:
    spec, stops, workers = plan
    check(OfLoader, spec, stops, workers, "pad" if spec.seed % 2 else None)


@examples(25, often=1, shrink=False)
@given(plans(), st.integers(1, 2))
def test_a_stateful_data_loader_resumes_exactly(
    plan: tuple[Spec, list[int], list[int]], workers: int
) -> None:
    spec, stops, _ = plan
    assume(has_sequence(spec))
    make = maker(spec, None)
    whole = uninterrupted(make, sum(stops) + AFTER)
    if not in_turn(spec, workers):  # then it keeps to an order of its own
        whole = OfStatefulDataLoader(make, None, workers).give(sum(stops) + AFTER)
    count = [workers] * (len(stops) + 1)
    assert resumed_at(OfStatefulDataLoader, make, stops, count) == whole


@examples(40, often=2, shrink=False)
@given(plans())
def test_a_data_loader_started_from_a_state_goes_on_exactly(
    plan: tuple[Spec, list[int], list[int]],
) -> None:
    spec, stops, workers = plan
    assume(has_passes_by_number(spec))
    assume(all(in_turn(spec, count) for count in workers))
    check(OfDataLoader, spec, stops, workers)


@pytest.mark.parametrize(
    "kind", [OfLoader, OfStatefulDataLoader, pytest.param(OfDataLoader, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_are_not_forked_from_here_resume_exactly(kind: type[Run], method: str) -> None:
    spec = Spec((90, 30, 0, 77), num_shards=4, buffer_size=20, seed=5, batch_size=8)
    make = maker(spec, "collate")
    whole = InProcess(make).give(30 + AFTER)
    same = kind is OfStatefulDataLoader  # which resumes with as many workers only
    assert resumed_at(kind, make, [30], [1, 1 if same else 2], method) == whole


def test_every_stop_of_two_epochs_resumes_exactly_with_workers() -> None:
    spec = Spec((40, 30), num_shards=4, buffer_size=12, seed=1, batch_size=9, keep=Keep(7, 2))
    make = maker(spec, None)
    whole = InProcess(make).give(24 + AFTER)
    states = [InProcess(make).state()]
    run = OfLoader(make, None, 2)
    given_so_far = []
    for _ in range(24):
        given_so_far += run.give(1)
        states.append(as_saved(run.state()))
    assert given_so_far == whole[:24]
    for taken, state in enumerate(states):
        assert InProcess(make, state).give(AFTER) == whole[taken : taken + AFTER]


def maker(spec: Spec, finish: str | None) -> Make:
    """Makes the pipeline of a spec, its batches collated or not."""

    def make() -> tp.Pipeline:
        if spec.batch_size is None or finish is None or spec.repeat == "after":
            return build(spec)
        if finish == "pad":
            return build(spec).pad_collate()
        return build(spec, tensors=True)

    return make


def in_turn(spec: Spec, workers: int) -> bool:
    """Whether plain loaders, which ask workers in strict turn, keep to the one sequence."""
    endless = spec.repeat is not None and spec.times is None
    return spec.known or endless or workers < 2


def has_passes_by_number(spec: Spec) -> bool:
    """Whether a pass always ends where its arithmetic says."""
    return spec.known or (spec.repeat is not None and spec.times is None)
