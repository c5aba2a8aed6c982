"""What a newcomer types by the habit of another library is answered with what to write here."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

import trainpipes as tp
from trainpipes._internal.messages import ELSEWHERE as NAMES
from trainpipes._internal.messages import OF_LOADERS
from trainpipes.interfaces.options import ELSEWHERE

DOCS = Path(__file__).parents[2] / "docs"
ERRORS, RESUME = DOCS / "errors.md", DOCS / "resume.md"

pytestmark = pytest.mark.filterwarnings("error:the loop before was left")


def rows(count: int = 100) -> tp.Pipeline:
    return tp.from_tensors(x=range(count))


@pytest.mark.parametrize(("ask", "answer"), [
    (lambda: tp.Loader(rows(), batch_size=4), "pipe.batch(batch_size)"),
    (lambda: tp.Loader(rows(), shuffle=True), "pipe.shuffle(buffer_size, seed=0)"),
    (lambda: tp.Loader(rows(), num_wokers=2), "did you mean 'num_workers'?"),
    (lambda: rows().shuffle(bufer_size=4), "did you mean 'buffer_size'?"),
    (lambda: tp.from_csv("x.csv"), "did you mean 'read_csv'?"),
    (lambda: tp.load_json("x.json"), "did you mean 'read_json'?"),
    (lambda: rows()[0], "got pipe[0]: peek() is the next item"),
    (lambda: rows().head(), "a pipeline has no 'head' (here that is .take(n))"),
    (lambda: rows().columns, "here that is .explain(), which has columns"),
    (lambda: rows().num_rows, "here that is .explain(), which has rows"),
    (lambda: rows().collect(), "here that is list(pipe)"),
    (lambda: rows().shufle(), "did you mean 'shuffle'?"),
    (lambda: rows().pin_memory(), "here that is .pin()"),
    (lambda: rows().bucket(), "did you mean 'bucket_by_length'?"),
    (lambda: tp.mix([rows(), rows()], [0.7, 0.3]), 'such as mix({"a": a, "b": b}, weights='),
    (lambda: rows() + 1, "concat"),
    (lambda: tp.from_dataset("a.jsonl"), "read_parquet(path), read_json(path) and the like"),
    (lambda: tp.from_iterable("a.jsonl"), "read_parquet(path), read_json(path) and the like"),
    (lambda: tp.from_iterable({"x": [1, 2]}), "from_arrow(pa.table(data)) gives its rows"),
    (lambda: tp.from_iterable(pa.table({"x": [1]})), "from_arrow(pa.table(data)) gives its rows"),  # type: ignore[arg-type]
    (lambda: tp.from_arrow("a.arrow"), "read_parquet(path), read_json(path) and the like"),
    (lambda: tp.Loader("a.parquet"), "read_parquet(path), read_json(path) and the like"),
    (lambda: tp.Loader(rows(), 32), "got 32 after the pipeline: the pipeline makes the batches"),  # type: ignore[misc]
    (lambda: rows().then(tp.Stage), "write then(Stage(...))"),  # type: ignore[arg-type]
    (lambda: tp.show(rows()), "its own show() shows what comes next"),
    (lambda: rows().stats(0, labels=5), "stats(labels) must be a column name or several"),  # type: ignore[arg-type]
    (lambda: tp.from_hf("imdb"), 'datasets.load_dataset(name, split="train") gives one'),
    (lambda: tp.from_dataset([1], sampler="random"), "must be an iterable of indices, got 'random'"),
    (lambda: tp.interleave_datasets, "here that is tp.mix"),
    (lambda: tp.load_dataset, 'tp.from_hf(load_dataset(name)["train"])'),
    (lambda: rows().with_format, ".batch(n).collate(format=...)"),
    (lambda: rows().shuffled_flatmap, ".flat_map(...).shuffle(...)"),
    (lambda: rows().train_test_split, "here that is .split"),
])  # fmt: skip
def test_one_sentence_says_what_to_write(ask: Callable[[], Any], answer: str) -> None:
    with pytest.raises((TypeError, AttributeError, tp.ConfigError)) as caught:
        ask()
    assert answer in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_of_other_loaders_are_none_of_ours() -> None:
    assert not set(ELSEWHERE["Loader"]) & set(inspect.signature(tp.Loader).parameters)


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


@pytest.mark.parametrize(("shuffled", "counted", "workers"), [
    (False, True, None), (False, True, 0), (False, True, 2), (False, False, 0), (False, False, 2),
    (True, False, 0), (True, False, 2),
])  # fmt: skip
def test_it_is_told_once_whether_the_same_items_come(
    shuffled: bool, counted: bool, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = rows().shuffle(13) if shuffled else rows()
    pipe = pipe.batch(10) if counted else pipe.filter(lambda row: True).batch(4)
    loader = pipe if workers is None else tp.Loader(pipe, num_workers=workers)
    (told,) = warned(monkeypatch, loader, loader, loader)
    assert "left within epoch 0" in told
    assert ("skipped" if shuffled else "the same items come") in told
    assert shuffled or "Loader(pipe, epoch=0)" in told


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
        run = make()  # and next(iter()) in each step
        assert len(warned(monkeypatch, (run, 1), (run, 1), (run, 1))) == 1


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


@pytest.mark.parametrize("pipe", [
    rows().shuffle(12).batch(10).repeat(),  # goes on where it stands
    rows().batch(10).repeat(),
    rows().take(20).batch(10),  # there was no more
])  # fmt: skip
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


def test_what_is_named_in_their_place_is_there() -> None:
    for here in NAMES.values():
        for place, name in re.findall(r"(tp)?\.(\w+)", here):
            if name not in ("Table", "from_pandas", "table"):
                assert hasattr(tp if place else tp.Pipeline, name), here


@pytest.mark.parametrize(("name", "said"), [
    ("sampler", r"another one in every epoch by itself; loader.set_epoch\(n\)"),
    ("dataset", "loader.pipeline; for the number of rows"),
    ("batch_size", r"an option of .batch\(\)"),
    ("save", r"state_dict\(\) and load_state_dict"),
    ("nonsense", "'nonsense'$"),
])  # fmt: skip
def test_attributes_of_a_data_loader_lead_to_ours(name: str, said: str) -> None:
    loader = tp.Loader(rows().batch(2))
    assert not hasattr(loader, name)  # as frameworks ask
    with pytest.raises(AttributeError, match=said) as caught:
        getattr(loader, name)
    assert str(caught.value).startswith(f"'Loader' object has no attribute '{name}'")


def test_what_is_named_in_place_of_a_loaders_is_there() -> None:
    loader = tp.Loader(rows().batch(2))
    assert not [name for name in OF_LOADERS if hasattr(loader, name)]
    for here in OF_LOADERS.values():
        for name in re.findall(r"loader\.(\w+)", here):
            assert hasattr(loader, name), here


class Fixed:
    """A decoder of a reader's own, without a repr."""

    def __call__(self, file: Any) -> Any:
        raise NotImplementedError


def test_an_object_is_shown_by_its_class(tmp_path: Any) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    read = tp.list_files(tmp_path, suffix=".bin").read_files(Fixed())
    assert "read_files(Fixed())" in repr(read)


def test_a_mix_without_an_end_has_no_short_batches() -> None:
    sources = {"a": rows(50), "b": rows(30)}
    assert "short" not in notes(tp.mix(sources, stop="repeat").sharding_filter(4).batch(8))
    assert "short" in notes(tp.mix(sources).sharding_filter(4).batch(8))


def test_a_mix_that_waits_for_a_source_without_an_end_says_so() -> None:
    sources = {"few": tp.from_dataset([1, 2]), "all": tp.from_iterable(count)}
    mixed = iter(tp.mix(sources, weights={"few": 1, "all": 1}))
    with pytest.warns(UserWarning, match="'all' has not ended while 'few' was read 100 times"):
        assert len(list(islice(mixed, 500))) == 500


def test_a_source_that_is_only_longer_is_not_warned_of() -> None:
    sources = {"few": rows(2), "many": rows(500)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(tp.mix(sources, weights={"few": 1, "many": 1}))) >= 999


def test_docs_have_what_torch_says_of_a_shuffled_loader() -> None:
    with pytest.raises(ValueError, match="expected unspecified shuffle option") as caught:
        DataLoader(rows(), batch_size=None, shuffle=True)
    assert str(caught.value).partition(", but")[0] in ERRORS.read_text()


def test_a_state_counts_turns_of_shards_that_have_ended() -> None:
    """As docs/resume.md says of ``m``."""
    pipe = tp.from_dataset(range(4000)).filter(late).sharding_filter(24).batch(16)
    loader = tp.Loader(pipe)
    batches = list(loader)
    assert loader.state_dict()["batches"] > len(batches)
    assert "a shard that has ended still takes its turns" in RESUME.read_text()


def late(row: int) -> bool:
    return row > 1000 or row % 3 == 0
