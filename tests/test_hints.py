"""What a newcomer types by the habit of another library is answered with what to write here."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

import trainpipes as tp
from trainpipes.loader import ELSEWHERE

pytestmark = pytest.mark.filterwarnings("error:the loop before was left")


def rows(count: int = 100) -> tp.Pipeline:
    return tp.from_tensors(x=range(count))


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda: tp.Loader(rows(), batch_size=4), "pipe.batch(batch_size)"),
        (lambda: tp.Loader(rows(), shuffle=True), "pipe.shuffle(buffer_size, seed=0)"),
        (lambda: tp.Loader(rows(), num_wokers=2), "did you mean 'num_workers'?"),
        (lambda: rows().shuffle(bufer_size=4), "did you mean 'buffer_size'?"),
        (lambda: tp.from_csv("x.csv"), "did you mean 'read_csv'?"),
        (lambda: tp.load_json("x.json"), "did you mean 'read_json'?"),
        (lambda: rows()[0], "got pipe[0]: peek() is the next item"),
        (lambda: rows().head(), "a pipeline has no 'head'"),
        (lambda: rows().shufle(), "did you mean 'shuffle'?"),
        (lambda: rows().pin_memory(), "did you mean 'pin'?"),
        (lambda: rows().bucket(), "did you mean 'bucket_by_length'?"),
        (lambda: tp.mix([rows(), rows()], [0.7, 0.3]), 'such as mix({"a": a, "b": b}, weights='),
        (lambda: rows() + 1, "concat"),
    ],
)
def test_one_sentence_says_what_to_write(ask: Callable[[], Any], answer: str) -> None:
    with pytest.raises((TypeError, AttributeError, tp.ConfigError)) as caught:
        ask()
    assert answer in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_of_other_loaders_are_none_of_ours() -> None:
    assert not set(ELSEWHERE) & set(inspect.signature(tp.Loader).parameters)


def test_two_pipelines_are_added_as_their_rows() -> None:
    assert len(list(rows(3) + rows(4))) == 7


def test_a_loader_shows_its_options_and_its_pipeline() -> None:
    shown = repr(tp.Loader(rows().batch(4), num_workers=2))
    assert shown == "Loader(num_workers=2) over\n  from_tensors(x=int64[100])\n    .batch(4)"


def notes(pipe: tp.Pipeline) -> str:
    return " ".join(pipe.explain().notes)


def test_shuffled_files_are_no_shuffled_rows(tmp_path: Any) -> None:
    for n in range(3):
        rows(5).skip(n).write_parquet(tmp_path / str(n))
    files = tp.list_files(str(tmp_path / "*/*.parquet"))
    assert "changes the order of files only" in notes(files.shuffle(10).read_parquet())
    assert "changes the order of files" not in notes(files.read_parquet().shuffle(10))


def test_rows_that_are_made_of_a_shuffled_one_stay_together() -> None:
    texts = tp.from_dataset(["a b", "c d"])
    assert "stay together" in notes(texts.shuffle(4).flat_map(str.split))
    assert "stay together" not in notes(texts.flat_map(str.split))


def leave(loader: Any, count: int = 2) -> None:
    for number, _ in enumerate(loader, 1):
        if number == count:
            break


def warned(monkeypatch: pytest.MonkeyPatch, *loops: Any) -> list[str]:
    """What loops that are left one after the other are told, but for Python's own warning of a fork."""
    monkeypatch.setattr("trainpipes._internal.messages._warned", set())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for loop in loops:
            leave(*loop) if isinstance(loop, tuple) else leave(loop)
    return [str(one.message) for one in told if issubclass(one.category, UserWarning)]


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_a_loop_that_was_left_is_told_of_by_the_next_one(workers: int | None) -> None:
    pipe = rows().shuffle(10, seed=workers or 9).batch(10)  # once a process for each pipeline
    loader = pipe if workers is None else tp.Loader(pipe.take(9), num_workers=workers)
    leave(loader)
    with pytest.warns(UserWarning, match="left within epoch 0.*: the rest of epoch 0 is") as told:
        leave(loader)
    assert told[0].filename == __file__


@pytest.mark.parametrize("dataloader", [False, True])
def test_an_empty_epoch_is_told_of_at_the_line_that_asks_for_it(dataloader: bool) -> None:
    pipe = rows().filter([["x", "<", 0]]).shuffle(7, seed=int(dataloader)).batch(2).collate()
    with pytest.warns(UserWarning, match="gives nothing") as told:
        list(DataLoader(pipe, batch_size=None) if dataloader else pipe)
    assert told[0].filename == __file__


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_without_a_shuffle_it_is_told_that_the_same_items_come(
    workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = rows().batch(10)
    loader = pipe if workers is None else tp.Loader(pipe, num_workers=workers)
    (told,) = warned(monkeypatch, loader, loader, loader)
    assert "left within epoch 0" in told
    assert "the same items come" in told
    assert "Loader(pipe, epoch=0)" in told


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_it_is_told_too_where_the_number_of_items_is_not_known(
    workers: int, shuffled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = rows().shuffle(13) if shuffled else rows()
    loader = tp.Loader(files.filter(lambda row: True).batch(4), num_workers=workers)
    (told,) = warned(monkeypatch, loader, loader)
    assert ("skipped" if shuffled else "the same items come") in told


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_first_look_at_one_item_is_no_loop_that_was_left(
    shuffled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = (rows().shuffle(10) if shuffled else rows()).batch(10)
    for make in (
        lambda: tp.Loader(pipe),
        lambda: pipe.take(9),
        lambda: tp.Loader(pipe.filter(bool)),
    ):
        run = make()
        assert warned(monkeypatch, (run, 1), (run, 99)) == []
        assert len(warned(monkeypatch, (run, 1), (run, 1))) == 1  # the first one was a whole one
        run = make()
        assert (
            len(warned(monkeypatch, (run, 1), (run, 1), (run, 1))) == 1
        )  # next(iter()) in each step


def test_a_look_after_a_resume_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = rows().batch(10)
    loader = tp.Loader(pipe)
    loader.load_state_dict(pipe.state_at(3))
    assert len(warned(monkeypatch, (loader, 1), loader)) == 1


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("how", ["state", "epoch"])
def test_who_says_where_to_begin_is_not_told(how: str, shuffled: bool) -> None:
    pipe = rows().shuffle(15, seed=len(how)) if shuffled else rows().skip(len(how))
    loader = tp.Loader(pipe.batch(10))
    leave(loader)
    if how == "state":
        loader.load_state_dict(loader.state_dict())
    else:
        loader.set_epoch(1)
    leave(loader)  # warnings are errors here


@pytest.mark.parametrize("pipe", [rows().batch(11), rows().shuffle(16).batch(10)])
def test_who_evaluates_the_same_first_batches_is_not_told(pipe: tp.Pipeline) -> None:
    loader = tp.Loader(pipe, epoch=0)
    for _ in range(3):
        leave(loader)
        leave(tp.Loader(pipe))  # nor is who makes a new one each time


def test_who_looks_with_peek_leaves_nothing() -> None:
    loader = tp.Loader(rows().shuffle(16).batch(10))
    loader.peek()
    loader.show()
    leave(loader)


@pytest.mark.parametrize(
    "pipe",
    [
        rows().shuffle(12).batch(10).repeat(),  # goes on where it stands
        rows().batch(10).repeat(),
        rows().take(20).batch(10),  # there was no more
    ],
)
def test_nothing_is_said_where_nothing_is_lost_or_known(pipe: tp.Pipeline) -> None:
    loader = tp.Loader(pipe)
    leave(loader)
    leave(loader)


def test_an_epoch_that_was_counted_to_its_end_was_not_left() -> None:
    loader = tp.Loader(rows().shuffle(14).batch(10))
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    del batches
    leave(loader)
