"""``trainpipes.steps``: the same optimizer steps on any number of ranks, and what a loop asks of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainpipes as tp
from ranks import Meeting
from trainpipes.engine.iterating import lookahead
from trainpipes.loader.steps import take_steps

ROWS = 103
#: Of each rank the steps that it was given, each a list of batches.
Given = list[list[list[Any]]]


def keeps_most(n: int) -> bool:
    return n % 5 > 0


def numbers(num_shards: int = 8, rows: int = ROWS) -> tp.Pipeline:
    return tp.from_dataset(range(rows)).sharding_filter(num_shards).shuffle(20, seed=1)


def tokens(pipe: tp.Pipeline) -> tp.Pipeline:
    return pipe.map(lambda n: {"input_ids": list(range(n % 7 + 1))})


PIPELINES = {
    "counted": lambda: numbers().batch(3),
    "limits": lambda: numbers().batch(2).skip(4).take(30),
    "epochs": lambda: numbers().batch(3).repeat(2),
    "filtered": lambda: numbers().filter(keeps_most).batch(2),
    "filtered limits": lambda: numbers().filter(keeps_most).batch(1).skip(3).take(40),
    "packed": lambda: tokens(numbers()).pack(8).batch(1),
    "buckets": lambda: tokens(numbers()).bucket_by_length(2, buffer_size=8),
    "balanced": lambda: tokens(numbers()).batch(2).balance(4),
}


@contextmanager
def agreeing(ranks: int) -> Iterator[None]:
    meeting = Meeting(ranks)
    with pytest.MonkeyPatch.context() as patch:
        if ranks > 1:
            patch.setattr(lookahead, "agreement_over", lambda *topology: meeting.agree)
        yield


def loaders(
    pipe: tp.Pipeline, ranks: int, states: Sequence[dict[str, Any]] = (), **options: Any
) -> list[tp.Loader]:
    found = [tp.Loader(pipe.distributed(rank=r, world_size=ranks), **options) for r in range(ranks)]
    for loader in found:
        if states:
            loader.load_state_dict(tp.merge_states(states))
    return found


def passes(
    subjects: Sequence[tp.Loader], batches: int, most: int | None = None, uneven: bool = False
) -> Given:
    """The steps of a pass, or the first of them, on all ranks at once."""

    def steps_of(loader: tp.Loader) -> list[list[Any]]:
        return [list(s) for s in islice(tp.steps(loader, batches=batches, uneven=uneven), most)]

    with agreeing(len(subjects)), ThreadPoolExecutor(len(subjects)) as threads:
        return [answer.result(60) for answer in [threads.submit(steps_of, s) for s in subjects]]


def sequence(ranks: Given) -> list[list[str]]:
    """The batches of each step, whoever got them."""
    assert len({len(steps) for steps in ranks}) == 1
    return [sorted(str(b) for step in both for b in step) for both in zip(*ranks, strict=True)]


@pytest.mark.sample(8)
@pytest.mark.filterwarnings("ignore:.*do not divide num_shards")
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("batches", [4, 8])
def test_steps_are_the_same_on_any_number_of_ranks(name: str, batches: int) -> None:
    pipe = PIPELINES[name]()
    alone = sequence(passes(loaders(pipe, 1), batches))
    assert len(alone) > 1
    assert all(len(step) == batches for step in alone)
    for ranks in (2, 4, 8):
        if batches % ranks == 0:
            found = passes(loaders(pipe, ranks), batches)
            assert sequence(found) == alone
            assert all(len(step) == batches // ranks for steps in found for step in steps)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_run_goes_on_with_the_same_steps_on_other_ranks(name: str) -> None:
    pipe, batches = PIPELINES[name](), 4
    whole = sequence(passes(loaders(pipe, 1), batches))
    found, states = [], []
    for ranks, most in ((4, 1), (2, 1), (1, None)):
        subjects = loaders(pipe, ranks, states)
        found += sequence(passes(subjects, batches, most))
        with agreeing(ranks):
            states = [loader.state_dict() for loader in subjects]
    assert found == whole


@pytest.mark.filterwarnings("ignore:.*do not divide num_shards")
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 120),
    size=st.integers(1, 4),
    shards=st.sampled_from([1, 4, 6, 8]),
    batches=st.integers(1, 9),
    first=st.integers(1, 9),
    then=st.integers(1, 9),
    stop=st.integers(0, 5),
    endless=st.booleans(),
)
def test_ranks_that_do_not_divide_a_step_share_it_unevenly(
    rows: int, size: int, shards: int, batches: int, first: int, then: int, stop: int, endless: bool
) -> None:
    pipe = numbers(shards, rows)
    pipe = pipe.repeat().batch(size) if endless else pipe.batch(size)
    first, then, most = min(first, batches), min(then, batches), 6 if endless else None
    whole = sequence(passes(loaders(pipe, 1), batches, most))
    subjects = loaders(pipe, first)
    given = passes(subjects, batches, stop, uneven=True) if stop else [[]] * first
    assert sequence(given) == whole[:stop]
    assert all(len(s) in (batches // first, -(-batches // first)) for rank in given for s in rank)
    if not stop or len(whole) <= stop:
        return
    states = [loader.state_dict() for loader in subjects]
    assert len({state["batches"] for state in states}) == 1
    left = None if most is None else most - stop
    rest = passes(loaders(pipe, then, states), batches, left, uneven=True)
    assert sequence(rest) == whole[stop:]


@pytest.mark.filterwarnings("ignore:.*do not divide num_shards")
def test_uneven_steps_of_uncounted_rows_without_an_end() -> None:
    pipe = tokens(numbers(6)).repeat().pack(8).batch(1)
    whole = sequence(passes(loaders(pipe, 1), 8, 9))
    subjects = loaders(pipe, 5)
    found = sequence(passes(subjects, 8, 4, uneven=True))
    subjects = loaders(pipe, 3, [loader.state_dict() for loader in subjects])
    found += sequence(passes(subjects, 8, 5, uneven=True))
    assert found == whole


@pytest.mark.filterwarnings("ignore:.*do not divide num_shards")
@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": 2}, {"num_workers": 2}])
@pytest.mark.parametrize("name", ["counted", "packed"])
def test_threads_and_workers_give_the_same_steps(name: str, options: dict[str, Any]) -> None:
    pipe = numbers().batch(3) if name == "counted" else numbers().filter(keeps_most).batch(2)
    expected = passes(loaders(pipe, 1, threads=0), 4)
    assert passes(loaders(pipe, 1, **options), 4) == expected
    counted = numbers().batch(3)
    unevenly = [passes(loaders(counted, 3, **o), 4, uneven=True) for o in (options, {"threads": 0})]
    assert unevenly[0] == unevenly[1]


def test_each_state_resumes_with_the_step_that_follows() -> None:
    for name in ("counted", "filtered"):
        pipe = PIPELINES[name]()
        loader = tp.Loader(pipe)
        given, states = [], [loader.state_dict()]
        for _ in range(2):
            for step in tp.steps(loader, batches=4):
                given.append(list(step))
                states.append(loader.state_dict())
        for number, state in enumerate(states[:-1]):
            resumed = tp.Loader(pipe)
            resumed.load_state_dict(state)
            assert next(iter(tp.steps(resumed, batches=4))) == given[number]
            assert resumed.state_dict()["batches"] == states[number + 1]["batches"]


class Failing:
    """Fails once at a number."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self.number, self.error = number, error

    def __call__(self, n: int) -> int:
        if n == self.number:
            self.number = -1
            raise self.error
        return n


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("counted", "goes on"), ("counted", "resumes"), ("filtered", "resumes"),
        ("endless", "goes on"), ("endless", "resumes"), ("endless", "begins anew"),
        ("mix", "goes on"), ("mix", "begins anew"), ("mix", "other weights"),
    ],
)  # fmt: skip
def test_an_error_within_a_step_loses_none_of_it(
    name: str, after: str, error: type[BaseException]
) -> None:
    if name == "filtered" and error is KeyboardInterrupt:
        pytest.skip("it comes steps earlier, as batches are taken ahead")

    def pipe(number: int = -1) -> tp.Pipeline:
        failing, plain = Failing(number, error), tp.from_dataset(range(ROWS))
        if name == "mix":
            mix = tp.mix({"a": plain, "b": plain.map(abs)}, weights={"a": 1, "b": 1}, stop="repeat")
            return mix.map(failing, version="1").batch(1)
        rows = numbers().map(failing, version="1")
        if name == "filtered":
            return rows.filter(keeps_most).batch(1)
        return rows.filter(keeps_most).repeat().batch(1) if name == "endless" else rows.batch(1)

    whole = [list(s) for s in islice(tp.steps(tp.Loader(pipe()), batches=4), 8)]
    loader = tp.Loader(pipe(whole[3][2][0]), threads=0)
    steps = iter(tp.steps(loader, batches=4))
    found = [list(next(steps)) for _ in range(3)]
    before = loader.state_dict()
    with pytest.raises((tp.TrainpipesError, error)):
        next(steps)
    state = loader.state_dict()
    assert state == before
    assert state["batches"] == 12
    if after == "resumes":
        loader = tp.Loader(pipe())
        loader.load_state_dict(state)
    elif after == "other weights":
        loader.set_weights({"b": 2}, at_step=24)
    if after in ("resumes", "begins anew"):
        steps = iter(tp.steps(loader, batches=4))
    found += [list(step) for step in islice(steps, 3)]
    assert found == whole[:6]
    assert loader.state_dict()["batches"] == 24


def test_an_epoch_ends_with_its_last_whole_step_and_the_next_one_begins_anew() -> None:
    loader = tp.Loader(tp.from_dataset(range(10)).batch(1))
    steps = tp.steps(loader, batches=4)
    assert len(steps) == 2
    for epoch in range(3):
        assert loader.state_dict()["epoch"] == epoch
        assert [len(step) for step in steps] == [4, 4]
    assert loader.state_dict()["batches"] == 0


def test_the_number_of_batches_changes_while_it_runs() -> None:
    loader = tp.Loader(tp.from_dataset(range(20)).batch(1))
    found = []
    for batches in (2, 3, 4):
        for step in tp.steps(loader, batches=batches):
            found.append([n for (n,) in step])
            break
        loader.load_state_dict(loader.state_dict())
    rest = [[n for (n,) in step] for step in tp.steps(loader, batches=4)]
    assert found + rest == [
        [0, 1], [2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16],
    ]  # fmt: skip


def test_how_many_are_left_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="trainpipes"):
        list(tp.steps(tp.Loader(tp.from_dataset(range(10)).batch(1)), batches=4))
    assert "2 of 10 batches (20.0%) are left out: each step has 4" in caplog.text
    caplog.clear()
    list(tp.steps(tp.Loader(numbers().filter(keeps_most).batch(2)), batches=8))
    assert "are left out besides" in caplog.text or "batches (" in caplog.text
    assert "steps end where the first shard does" in caplog.text


def test_lengths() -> None:
    pipe = numbers().batch(3)
    found = {len(tp.steps(loader, batches=8)) for n in (1, 2, 4) for loader in loaders(pipe, n)}
    assert found == {len(pipe) // 8}
    with pytest.raises(TypeError, match="these steps have no len"):
        len(tp.steps(tp.Loader(PIPELINES["filtered"]()), batches=8))
    filtered = tp.Loader(PIPELINES["filtered"]())
    steps = tp.steps(filtered, batches=8)
    assert steps.estimate_len() == 5
    assert all([filtered, steps, filtered.pipeline])  # a length that is not known makes none false


class Synced:
    """A model that notes which passes are told to leave gradients where they are."""

    def __init__(self) -> None:
        self.off = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.off = True
        yield
        self.off = False


class Sharded:
    """The same of a model of ``fully_shard``."""

    def __init__(self) -> None:
        self.off = False

    def set_requires_gradient_sync(self, requires: bool) -> None:
        self.off = not requires


@pytest.mark.parametrize("kind", [Synced, Sharded])
def test_ranks_exchange_gradients_for_the_last_batch_of_a_step(kind: Any) -> None:
    model, found = kind(), []
    for step in tp.steps(tp.Loader(tp.from_dataset(range(6)).batch(1)), batches=3):
        for batch in step:
            with step.no_sync(model):
                found.append((batch[0], model.off, step.is_last()))
            assert not model.off
    assert found == [(n, n % 3 < 2, n % 3 == 2) for n in range(6)]


def test_ranks_of_fsdp_take_as_many_batches() -> None:
    for batches, ranks in ((4, 2), (5, 2)):
        loader = tp.Loader(numbers().batch(1).distributed(rank=0, world_size=ranks))
        step = next(iter(tp.steps(loader, batches=batches, uneven=True)))
        for _ in step:
            step.no_sync(Synced())
            refused = pytest.raises(
                tp.ConfigError, match=r"steps\(uneven\) must be False with FSDP"
            )
            with refused if batches % ranks else nullcontext():
                step.no_sync(Sharded())


def test_a_loop_within_the_loop_over_a_step_moves_nothing() -> None:
    step = next(iter(tp.steps(tp.Loader(tp.from_dataset(range(6)).batch(1)), batches=3)))
    found = []
    for _ in step:
        assert sum(len(batch) for batch in step) == 3
        assert next(iter(step)) == [0]
        found.append(step.is_last())
        if len(found) == 3:
            break
    assert found == [False, False, True]
    with pytest.raises(tp.ConfigError, match="in a loop over the step's batches"):
        step.is_last()


def test_a_model_on_one_device_is_left_alone() -> None:
    model = torch.nn.Linear(1, 1)
    step = next(iter(tp.steps(tp.Loader(tp.from_dataset(range(6)).batch(1)), batches=3)))
    assert step.weight == 1 / 3
    for _ in step:
        with step.no_sync(model):
            pass
    with pytest.raises(tp.ConfigError, match="in a loop over the step's batches"):
        step.no_sync(model)
    with pytest.raises(tp.ConfigError, match="in a loop over the step's batches"):
        step.is_last()


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        (3, {"batches": 8}, "divisible by 3 ranks, got 8; write 6 or 9, or train on 1, 2, 4, 8 ranks, or"),
        (3, {"batches": 8}, "uneven=True, which gives ranks 2 or 3 each"),
        (4, {"batches": 2}, "divisible by 4 ranks, got 2; write 4, or train on 1, 2 ranks"),
        (4, {"batches": 2, "uneven": True}, "at least the number of ranks, 4, got 2; write 4"),
        (1, {"batches": 0}, "an integer of 1 or more"),
        (1, {"batches": 2.0}, "an integer of 1 or more"),
        (1, {"batches": 2, "uneven": "yes"}, "True or False"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(ranks: int, options: dict[str, Any], words: str) -> None:
    loader = tp.Loader(numbers().batch(1).distributed(rank=0, world_size=ranks))
    with pytest.raises(tp.ConfigError) as refused:
        tp.steps(loader, **options)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_has_no_steps_is_refused() -> None:
    other: Any = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(tp.ConfigError, match=r"a Loader, got .*; write steps\(trainpipes.Loader"):
        tp.steps(other, batches=2)
    pipe: Any = numbers().batch(1)
    with pytest.raises(tp.ConfigError, match=r"write steps\(trainpipes.Loader\(pipe\)"):
        tp.steps(pipe, batches=2)
    pipe = tp.from_dataset(range(9)).sharding_filter(4, tail="uneven").batch(1)
    with pytest.raises(tp.ConfigError, match=r'sharding_filter\(tail\) must be "even"'):
        tp.steps(tp.Loader(pipe.distributed(rank=0, world_size=2)), batches=2)
    with pytest.raises(tp.ConfigError, match=r'sharding_filter\(tail\) must be "even"'):
        tp.steps(tp.Loader(pipe), batches=2)  # its last step would have one
    endless = tp.steps(tp.Loader(pipe.repeat()), batches=2)
    assert [len(step) for step in islice(endless, 6)] == [2] * 6
    pipe = numbers().filter(keeps_most).batch(1).distributed(rank=0, world_size=3)
    with pytest.raises(tp.ConfigError, match=r"steps\(uneven\) needs batches that are counted"):
        tp.steps(tp.Loader(pipe), batches=8, uneven=True)


@pytest.mark.parametrize("pipe", [numbers(1).batch(40), numbers(1).filter(keeps_most).batch(40)])
def test_an_epoch_without_a_whole_step_is_warned_of(
    pipe: tp.Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    loader = tp.Loader(pipe)
    if pipe._iteration.plan.counts.known:
        with pytest.warns(UserWarning, match="its 3 batches are fewer than the 8 of a step"):
            assert not list(tp.steps(loader, batches=8))
    else:
        assert not list(tp.steps(loader, batches=8))
        assert "of 3 batches (100.0%) are left out: steps end" in caplog.text
    assert loader.state_dict()["epoch"] == 1


def test_a_trainers_option_is_left_out_or_right() -> None:
    loader = tp.Loader(numbers().batch(1).distributed(rank=0, world_size=2))
    for accumulated, is_read in ((1, False), (4, False), (4, True)):
        assert take_steps(loader, 8, "option", accumulated, is_read) == 4
    with pytest.raises(tp.ConfigError, match=r"option must be 4 .*, got 3; leave it out"):
        take_steps(loader, 8, "option", 3)
    with pytest.raises(tp.ConfigError, match=r"got 1; write that number, which DeepSpeed reads"):
        take_steps(loader, 8, "option", 1, is_read=True)
