"""Accelerate, with the loader that is made for it, and with plain DataLoaders of rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import chain, islice
from math import ceil
from pathlib import Path
from typing import Any, Literal

import pytest

from frameworks.example import example
from frameworks.ranks import Ranks
from frameworks.runs import (
    ROWS,
    Start,
    check_global_batches,
    check_resumes,
    finish,
    pipeline,
    plain,
    weights_of,
)
from trainpipes.testing import digest

pytest.importorskip("accelerate")

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import (
    DataLoaderConfiguration,
    gather_object,
)
from torch.utils.data import DataLoader

import trainpipes as tp
from trainpipes.integrations.accelerate import loader


class Model(torch.nn.Module):
    """Scores bytes by themselves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Embedding(258, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.scores(input_ids).square().mean()


def train(start: Start) -> dict[str, Any]:
    """The adapter; its options are "accumulate", "batch_size", "epochs" and "steps", and the loader's."""
    usual = {"accumulate": 1, "batch_size": 4, "epochs": 9, "steps": 1000}
    given = {name: start.options.get(name, value) for name, value in usual.items()}
    more = {name: value for name, value in start.options.items() if name not in usual}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=given["accumulate"])
    torch.manual_seed(0)
    model: Any = Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader(pipeline(start.kind, given["batch_size"]), accelerator, **more)
    model, optimizer = accelerator.prepare(model, optimizer)
    step = start.step()
    if step:
        accelerator.load_state(str(start.checkpoint()))
    while batches.epoch < given["epochs"] and step < given["steps"]:
        epoch = batches.epoch
        for batch in batches:
            start.trained_on(epoch, step, batch)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["input_ids"]))
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if accelerator.sync_gradients and start.every and step % start.every == 0:
                accelerator.save_state(str(start.saved / f"step-{step}"))
            if step == given["steps"]:
                break
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return {"steps": step, "weights": weights_of(model)}


#: For each kind: batches of an optimizer step, of which the last in an epoch has fewer where epochs end;
#: steps in which the run is killed, in its first epoch and in its second; checkpoints at the end of an epoch
#: and at the start of one.
KINDS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "counted": (5, (3, 5), (3, 4)),
    "filtered": (3, (3, 7), (4, 5)),
    "packed": (3, (3, 5), ()),
    "rows repeated": (2, (3, 7), ()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    accumulate, holds, at = KINDS[kind]
    endless = kind == "rows repeated"
    options: dict[str, Any] = {"steps": 12} if endless else {"epochs": 2}
    found = check_resumes(
        train, tmp_path, kind, every=2, holds=holds, at=at, moved=(2, *at),
        back=(1,) if kind == "packed" else (1, 5),
        expected=plain(pipeline(kind)), ends=not endless, accumulate=accumulate, **options,
    )  # fmt: skip
    for name in ("whole", "alone") if not endless else ():
        for notes in found[name].notes():
            for epoch in (0, 1):  # what is left makes a step of its own
                steps = [len(batches) for (of, _), batches in sorted(notes.items()) if of == epoch]
                assert steps[:-1] == [accumulate] * (len(steps) - 1)
                assert 0 < steps[-1] <= accumulate


def test_global_batches_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    check_global_batches(train, tmp_path, ["counted", "filtered"])


@pytest.mark.ranks(1)
def test_a_first_step_after_a_resume_is_whole_where_accumulation_has_changed(
    tmp_path: Path,
) -> None:
    for accumulate, first, synced in ((2, 0, [2, 4, 6]), (4, 6, [10, 14, 18, 22, 24])):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        batches, model = loader(pipeline("counted"), accelerator), accelerator.prepare(Model())
        if first:
            accelerator.load_state(str(tmp_path))
        found = []
        for number, _ in enumerate(batches, start=first + 1):
            with accelerator.accumulate(model):
                found += [number] if accelerator.sync_gradients else []
            if not first and number == 6:
                accelerator.save_state(str(tmp_path))
                break
        assert found == synced
        accelerator.free_memory()


def numbered(
    rows: int, tail: Literal["even", "uneven"] = "even", batch_size: int = 4
) -> tp.Pipeline:
    table = pa.table({"row": list(range(rows)), "name": [f"row {i}" for i in range(rows)]})
    dealt = tp.from_arrow(table).sharding_filter(4, tail=tail)
    return dealt.batch(batch_size).collate(format="torch")


def ragged(rows: int) -> tp.Pipeline:
    table = pa.table({"items": [[n] * (n % 3 + 1) for n in range(rows)]})
    dealt = tp.from_arrow(table).sharding_filter(4, tail="uneven")
    return dealt.batch(2).collate(ragged="offsets")


def check_metrics(
    accelerator: Accelerator, batches: Any, rows: int, steps: int, epoch: int
) -> None:
    """An epoch of an evaluation gives each row once, as many of them to all ranks."""
    found, names, sizes = [], [], []
    for batch in batches:
        sizes.append(len(batch["row"]))
        found += accelerator.gather_for_metrics(batch["row"]).tolist()
        names += accelerator.gather_for_metrics(batch["name"], use_gather_object=True)
        state = batches.state_dict()
    assert sorted(found) == list(range(rows)), f"{rows} rows"
    assert names == [f"row {row}" for row in found]
    assert len(batches) == len(sizes) == steps
    assert (state["epoch"], state["batches"]) == (epoch + 1, 0)
    first, second = gather_object([sizes])
    assert first == second, "ranks gather as many rows"


#: Of an evaluation: rows, batch size and workers.
EVALUATED = [(rows, 4, 0) for rows in (101, 96, 100, 7, 4, 3, 1)]
EVALUATED += [(101, 4, 2), (9, 1, 0), (5, 100, 0)]


@pytest.mark.ranks(2)
def test_metrics_have_every_row_once_and_training_around_an_evaluation_is_as_it_was() -> None:
    for rows, batch_size, workers in EVALUATED:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model: Any = torch.nn.Linear(1, 1)
        batches = loader(numbered(20, batch_size=2), accelerator)
        valid = loader(numbered(rows, "uneven", batch_size), accelerator, num_workers=workers)
        valid, model, batches = accelerator.prepare(valid, model, batches)
        synced, epoch = [], 0
        for number, _ in enumerate(batches, start=1):
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
            if number in (2, 5):  # half way through an epoch, and at its end
                check_metrics(accelerator, valid, rows, ceil(ceil(rows / batch_size) / 2), epoch)
                epoch += 1
        assert epoch == 2
        assert synced == [False, True, False, True, True]
        assert not accelerator.gradient_state.in_dataloader
        accelerator.free_memory()


@pytest.mark.ranks(2)
def test_without_even_batches_ranks_end_apart() -> None:
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    batches = loader(numbered(18, "uneven"), accelerator)
    sizes = [[4, 4, 2], [4, 4]][accelerator.process_index]
    assert [len(batch["row"]) for batch in batches] == sizes
    assert len(batches) == len(sizes)
    accelerator.even_batches = True
    assert [len(batch["row"]) for batch in batches] == [4, 4, 2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 8)])
def test_the_last_step_is_filled_up_where_the_batch_size_has_changed(
    before: int, after: int
) -> None:
    accelerator = Accelerator(cpu=True)
    first = loader(numbered(90, "uneven", before), accelerator)
    list(islice(first, 3))
    state, pipe = first.state_dict(), numbered(90, "uneven", after)
    alone = tp.Loader(pipe.distributed(rank=0, world_size=1))
    alone.load_state_dict(state, allow_changes=["batch_size"])
    rows = [row for batch in alone for row in batch["row"].tolist()]
    batches = loader(pipe, accelerator, allow_changes=["batch_size"])
    batches.load_state_dict(state)
    found = []
    for batch in batches:
        found += accelerator.gather_for_metrics(batch["row"]).tolist()
    assert found == rows


def test_an_uneven_pipeline_without_an_end_has_no_length() -> None:
    with pytest.raises(TypeError, match="has no end"):
        len(loader(numbered(18, "uneven").repeat(), Accelerator(cpu=True)))


@pytest.mark.ranks(2)
def test_an_evaluation_does_not_drop_the_wrong_rows() -> None:
    """It goes on on two ranks where one has stopped at an odd batch."""
    accelerator = Accelerator(cpu=True)
    valid = loader(numbered(38, "uneven"), accelerator)
    valid.load_state_dict(numbered(38, "uneven").distributed(rank=0, world_size=1).state_at(5))
    with pytest.raises(tp.ConfigError, match="start it anew"):
        check_metrics(accelerator, valid, 38, 5, 0)


@pytest.mark.ranks(2)
def test_all_ranks_write_the_same_bytes(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    for kind in ("counted", "filtered", "packed"):
        batches = loader(pipeline(kind), accelerator)
        list(zip(batches, range(3), strict=False))
        path = tmp_path / str(accelerator.process_index) / kind / "state.bin"
        path.parent.mkdir(parents=True)
        torch.save(batches.state_dict(), path)
        first, second = gather_object([path.read_bytes()])
        assert first == second


def configured(pipe: Any, **settings: Any) -> Any:
    config = DataLoaderConfiguration(**settings)
    return Accelerator(cpu=True, dataloader_config=config).prepare(pipe)


def dispatched(pipe: tp.Pipeline, dispatch: bool | None) -> None:
    list(configured(DataLoader(pipe, batch_size=None), dispatch_batches=dispatch))


WRITE = "loader(pipe, accelerator)"
#: What is done with a pipeline and an accelerator, and what is said.
BAD_USES: list[tuple[Callable[[tp.Pipeline, Accelerator], Any], list[str]]] = [
    (lambda pipe, _: dispatched(pipe, None),
     ["DataLoaderDispatcher shares out rows among 2 ranks", "batch(4)", WRITE]),
    (lambda pipe, _: dispatched(pipe, True), ["DataLoaderDispatcher shares out rows among 2 ranks", WRITE]),
    (lambda pipe, _: dispatched(pipe, False), ["IterableDatasetShard shares out rows among 2 ranks", WRITE]),
    (lambda pipe, _: list(prepare_data_loader(DataLoader(pipe, batch_size=None), put_on_device=True)),
     ["DataLoaderDispatcher shares out rows", WRITE]),
    (lambda pipe, by: list(by.skip_first_batches(loader(pipe, by), 2)),
     ["skip_first_batches()", "leave these out"]),
    (lambda pipe, by: list(prepare_data_loader(loader(pipe, by))),
     ["prepare_data_loader()", "leave these out"]),
    (lambda pipe, _: loader(pipe, 2), ["must be an accelerate.Accelerator, got 2; write loader(pipe, acc"]),
    (lambda pipe, _: loader(pipe, Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))), [".batch(n // 2)"]),
    (lambda _, by: list(loader(numbered(40, "uneven").filter(lambda batch: True), by)),
     ["counted in advance", "even_batches=False"]),
    (lambda _, by: list(loader(numbered(40, "uneven").map(lambda batch: {"name": "x"}), by)),
     ["pad_collate()"]),
    (lambda _, by: list(loader(ragged(7), by)), ["on each rank for collate(ragged=", "got [2, 1]; let"]),
    (lambda _, by: loader(tp.from_dataset([{"x": 1}]), by), ["got single rows", ".batch(32).pad_collate()"]),
]  # fmt: skip


@pytest.mark.ranks(2)
def test_bad_uses_are_told_what_to_write() -> None:
    accelerator = Accelerator(cpu=True)
    for use, parts in BAD_USES:
        with pytest.raises((tp.ConfigError, tp.StateError)) as told:
            use(pipeline("counted"), accelerator)
        assert all(part in str(told.value) for part in parts), str(told.value)
    assert [len(batch["items_offsets"]) for batch in loader(ragged(8), accelerator)] == [2, 2]


@pytest.mark.ranks(2)
def test_prepare_leaves_it_as_it_is_and_another_number_of_loaders_is_refused(
    tmp_path: Path,
) -> None:
    accelerator = Accelerator(cpu=True)
    ours = loader(pipeline("counted"), accelerator)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler: Any = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scheduler, again, model, optimizer = accelerator.prepare(scheduler, ours, model, optimizer)
    assert again is accelerator.prepare(ours) is ours
    taken = loader(pipeline("counted").take(7), accelerator)
    assert [len(ours), len(taken), ours.loader.estimate_len()] == [12, 3, 12]
    first, second = [[digest(batch["input_ids"]) for batch in ours] for _ in range(2)]
    ours.set_epoch(0)
    assert [digest(batch["input_ids"]) for batch in ours] == first != second
    for _ in ours:
        break
    assert (accelerator.gradient_state.in_dataloader, ours.epoch) == (False, 1)
    accelerator.save_state(str(tmp_path / "saved"))
    accelerator.wait_for_everyone()  # the first rank writes the states of objects
    other = Accelerator(cpu=True)
    loader(pipeline("counted"), other)
    with pytest.raises(RuntimeError, match="does not match the number of registered objects"):
        other.load_state(str(tmp_path / "saved"))


def test_another_batch_size_goes_on_if_allowed(tmp_path: Path) -> None:
    def resumed(name: str, **more: Any) -> Start:
        given = {"batch_size": 2, "epochs": 1, **more}
        return Start(tmp_path / name, tmp_path / "saved", resume=3, options=given)

    first = Start(tmp_path / "first", tmp_path / "saved", every=3, options={"epochs": 1})
    allowed = resumed("allowed", allow_changes=("batch_size",))
    finish(train, 2, first, allowed)
    assert [len(rank) for rank in allowed.notes()] == [(ROWS - 3 * 2 * 4) // 2 // 2] * 2
    with pytest.raises(AssertionError, match="stages/batch/batch_size: saved 4, now 2"):
        finish(train, 2, resumed("refused"))


def script(start: Start, *arguments: str) -> None:
    """Run the script of the docs, noting what it trains on."""
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as accelerate launch --cpu says
    module = example("accelerate_loop")
    start.begin()

    class Noting(module.NextByte):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                start.trained_on(0, 0, {"input_ids": input_ids})
                time.sleep(0.01)
            return super().forward(input_ids, attention_mask)

    module.NextByte = Noting
    module.main(list(arguments))


def test_the_script_of_the_docs_is_killed_and_goes_on_on_other_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    for name, rows in (("train", 160), ("valid", 37)):
        texts = [f"{name} {row} " + "and more " * (row % 7) for row in range(rows)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet", row_group_size=20)
    dealt = tp.list_files(tmp_path / "train.parquet").read_parquet().sharding_filter(24)
    pipe = dealt.shuffle(10_000, seed=0).tokenize("bytes").batch(4).pad_collate(max_length=64)
    expected = list(chain.from_iterable(plain(pipe, 2)))
    saved = tmp_path / "run"
    given = [f"--{name}={tmp_path / name}.parquet" for name in ("train", "valid")]

    def trained(name: str, ranks: int, kill_at: int | None = None) -> list[str]:
        """The digests in their order, up to the last checkpoint of a run that is killed."""
        start, folder = Start(tmp_path / name, saved), tmp_path / f"{name} ranks"
        running = Ranks(script, ranks, folder, start, *given, f"--folder={saved}")
        if kill_at is None:
            running.wait()
            assert "of 37 rows" in (folder / "rank-0.txt").read_text()
        else:
            running.kill_when(lambda: (saved / f"step-{kill_at:08}").exists())
        return [d for turn in zip(*(of[0, 0] for of in start.notes()), strict=False) for d in turn]

    def position() -> int:
        last = sorted(saved.glob("step-*"))[-1]
        state = torch.load(last / "custom_checkpoint_0.pkl", weights_only=True)
        return int(40 * state["epoch"] + state["batches"])

    first, m = trained("first", 2, kill_at=3), position()
    assert 24 <= m < 40, "in epoch 0"
    assert first[:m] == expected[:m]
    second, then = trained("second", 2, kill_at=7), position()
    assert 56 <= then < 80, "in epoch 1"
    assert second[: then - m] == expected[m:then]
    assert trained("third", 1) == expected[then:]


def test_batches_are_filled_up_with_their_own_rows() -> None:
    from trainpipes.integrations.accelerate import _filled, _rows_in

    pair = [torch.arange(2), torch.arange(4).reshape(2, 2)]
    assert [part.tolist() for part in _filled(pair, 3)] == [[0, 1, 0], [[0, 1], [2, 3], [0, 1]]]
    assert _filled([{"x": 1}, {"x": 2}], 5) == [{"x": 1}, {"x": 2}, {"x": 1}, {"x": 2}, {"x": 1}]
    batch = {"x": torch.arange(2), "names": ["a", "b"], "scale": torch.tensor(3.0), "of": ("y", 1)}
    assert _rows_in(batch) == 2
    more = _filled(batch, 4)
    assert (more["x"].tolist(), more["names"]) == ([0, 1, 0, 1], ["a", "b", "a", "b"])
    assert (more["scale"], more["of"]) == (batch["scale"], ("y", 1))
    with pytest.raises(tp.ConfigError, match=r"lists of rows, got \{'x'"):
        _rows_in({"x": torch.tensor(1.0)})
