"""``set_epoch``: what frameworks call before each epoch, on pipelines and on ``Loader``."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from drawn import rows_of
from hundred_rows import epochs_of, given_by, loaded, of_unknown_length, pipeline, shuffled_rows

pytestmark = pytest.mark.usefixtures("no_processes_left")


EPOCHS = epochs_of(10)


class Run:
    """A pipeline and the loader that runs it.

    Args:
        pipe: the pipeline.
        kind: of loader; None for none.
        options: the loader's.
    """

    def __init__(self, pipe: tp.Pipeline, kind: Any, options: dict[str, Any]) -> None:
        self.pipe = pipe
        self.loader: Any = pipe if kind is None else kind(pipe, **options)
        #: What is told which epoch it is, and loads states.
        self.subject: Any = self.loader if kind is tp.Loader else pipe

    def epoch(self, number: int, count: int | None = None) -> list[list[int]]:
        self.subject.set_epoch(number)
        return given_by(self.loader, count)


def ways() -> list[Any]:
    found = [pytest.param(None, {}, id="in process")]
    for workers, persistent in ((0, False), (1, False), (2, False), (2, True)):
        options = {"num_workers": workers, "persistent_workers": persistent}
        name = f"{workers} workers" + ", persistent" * persistent
        for kind in (DataLoader, StatefulDataLoader, tp.Loader):
            own = options if kind is tp.Loader else {**options, "batch_size": None}
            few = {(1, False): DataLoader, (2, True): StatefulDataLoader}.get((workers, persistent))
            often = workers == 0 or (few is not None and kind in (few, tp.Loader))
            marks = [] if often else [pytest.mark.slow]
            found.append(pytest.param(kind, own, id=f"{kind.__name__}, {name}", marks=marks))
    return found


EVERY_WAY = pytest.mark.parametrize(("kind", "options"), ways())
#: Those that other loaders go through, too.
OURS = [way for way in ways() if way.values[0] in (None, tp.Loader)]


@EVERY_WAY
def test_set_epoch_starts_that_epoch(kind: Any, options: dict[str, Any]) -> None:
    run = Run(pipeline(), kind, options)
    for number in (0, 1, 3, 3, 0):  # those that would come next, and others
        assert run.epoch(number) == EPOCHS[number]
    assert given_by(run.loader) == EPOCHS[1]  # each is the next one by itself
    assert run.epoch(7, 4) == EPOCHS[7][:4]
    assert run.epoch(2) == EPOCHS[2]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        pytest.param(
            *way.values,
            named,
            id=f"{way.id}, {named}",
            marks=way.marks if named == 0 or (named == 2 and way in OURS) else pytest.mark.slow,
        )
        for way in ways()
        for named in (0, 1, 2, 5)
    ],
)
def test_the_first_call_after_a_load_names_the_loaded_epoch(
    kind: Any, options: dict[str, Any], named: int
) -> None:
    """And the caller's later numbers are counted from there."""
    run = Run(pipeline(), kind, options)
    if kind is tp.Loader or not options.get("persistent_workers"):  # which see no later load
        run.epoch(4, 2)
    run.subject.load_state_dict(pipeline().state_at(6, epoch=2))
    assert run.epoch(named) == EPOCHS[2][6:]
    assert run.epoch(named + 1) == EPOCHS[3]
    assert given_by(run.loader) == EPOCHS[4]
    assert run.epoch(named) == EPOCHS[2]


@pytest.mark.parametrize("run", [lambda pipe: pipe, tp.Loader], ids=["pipeline", "Loader"])
def test_a_loaded_position_is_never_given_up(run: Any) -> None:
    subject = loaded(run(pipeline()), pipeline().state_at(6, epoch=2))
    subject.set_epoch(5)
    subject.set_epoch(0)  # the last word before it starts
    assert rows_of(subject.peek()) == EPOCHS[2][6]
    assert given_by(subject) == EPOCHS[2][6:]
    subject.set_epoch(1)
    assert given_by(subject) == EPOCHS[3]
    subject.load_state_dict(pipeline().state_at(6, epoch=2))
    assert given_by(subject) == EPOCHS[2][6:]
    subject.set_epoch(3)  # nobody called the loaded epoch otherwise
    assert given_by(subject) == EPOCHS[3]


@pytest.mark.sample(4)
@EVERY_WAY
def test_a_state_of_an_epochs_end_is_called_what_the_next_epoch_is(
    kind: Any, options: dict[str, Any]
) -> None:
    """Whether what is loaded has something left is known only once it starts."""
    expected = [sorted(epoch) for epoch in epochs_of(4, of_unknown_length)]
    ended = tp.Loader(of_unknown_length())
    for _ in ended:
        state = ended.state_dict()
    run = Run(of_unknown_length(), kind, options)
    run.subject.load_state_dict(state)
    for number in (1, 2, 3):
        assert sorted(run.epoch(number)) == expected[number]


@pytest.mark.parametrize(
    ("workers", "persistent"),
    [(0, False), (2, True), pytest.param(2, False, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("taken", [5, None])
def test_what_a_stateful_data_loader_loads_is_named_too(
    workers: int, persistent: bool, taken: int | None
) -> None:
    """It tells its iterators what was loaded after ``set_epoch`` was called."""
    options = {"batch_size": None, "num_workers": workers, "persistent_workers": persistent}
    first = Run(pipeline(), StatefulDataLoader, options)
    first.epoch(1, taken)
    run = Run(pipeline(), StatefulDataLoader, options)
    run.loader.load_state_dict(first.loader.state_dict())
    number = 0
    if taken == 5:
        assert run.epoch(number) == EPOCHS[1][5:]
        number = 1
    assert run.epoch(number) == EPOCHS[2]
    assert run.epoch(number + 1) == EPOCHS[3]


@pytest.mark.parametrize(("workers", "place"), [(0, "before"), (2, "after")])
def test_an_endless_pipeline_goes_on_whatever_epoch_it_is_told(workers: int, place: str) -> None:
    rows = shuffled_rows()
    pipe = rows.repeat().batch(8) if place == "before" else rows.batch(8).repeat()
    loader = tp.Loader(pipe, num_workers=workers)
    expected, found = given_by(pipe, 20), []
    for number in (0, 5, 5, 1):
        loader.set_epoch(number)
        found += given_by(loader, 5)
    assert found == expected


def test_passes_of_a_finite_repeat_are_what_is_counted() -> None:
    pipe = pipeline().repeat(2)
    pipe.set_epoch(1)
    assert given_by(pipe) == EPOCHS[2] + EPOCHS[3]


def test_set_epoch_of_a_pipeline_leaves_its_loaders_and_iterators_alone() -> None:
    pipe = pipeline()
    loader = tp.Loader(pipe)
    running = iter(pipe)
    found = given_by(running, 3)
    pipe.set_epoch(6)
    assert found + given_by(running) == EPOCHS[0]
    assert given_by(loader) == EPOCHS[0]
    loader.set_epoch(4)
    assert [given_by(loader), given_by(pipe)] == [EPOCHS[4], EPOCHS[6]]


@pytest.mark.parametrize("epoch", [-1, 1.0, "1", None, True, 10**30])
@pytest.mark.parametrize("run", [lambda pipe: pipe, tp.Loader], ids=["pipeline", "Loader"])
def test_what_is_no_epoch_is_refused(run: Any, epoch: Any) -> None:
    subject = run(pipeline())
    with pytest.raises(
        tp.ConfigError,
        match=r"set_epoch\(epoch\) must be an integer of .* \(the number of an epoch\)",
    ):
        subject.set_epoch(epoch)
    assert given_by(subject) == EPOCHS[0]


@pytest.mark.parametrize("make", [pipeline, of_unknown_length])
def test_any_number_that_is_taken_is_one_that_a_state_may_have(make: Any) -> None:
    for epoch in (2**31, 2**40 - 1):
        pipe, again = make(), make()
        pipe.set_epoch(epoch)
        run = iter(pipe)
        given_by(run, 3)
        again.load_state_dict(pipe.state_dict())
        assert given_by(run) == given_by(again)
        make().load_state_dict(pipe.state_dict())  # of the epoch's end


def test_an_epoch_before_the_first_one_is_refused() -> None:
    pipe = pipeline()
    pipe.load_state_dict(pipe.state_at(6))
    pipe.set_epoch(3)
    given_by(pipe)
    with pytest.raises(tp.ConfigError, match="epoch 3 is the first one, got 2"):
        pipe.set_epoch(2)
    pipe.set_epoch(3)
    assert given_by(pipe) == EPOCHS[0]
