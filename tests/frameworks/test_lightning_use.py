"""Lightning on one rank: what its options do to pipelines, and what is said where something is wrong."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

import trainpipes as tp
from frameworks.lightning_runs import (
    EvaluatedModel,
    Model,
    after_epochs,
    after_steps,
    fit,
    held_out,
    make_trainer,
    pipeline,
    trained,
)
from frameworks.runs import Start, growing, number
from frameworks.runs import pipeline as sized
from trainpipes._internal import messages as warn_once
from trainpipes.integrations import lightning as lightning_module
from trainpipes.integrations.lightning import PipelineDataModule

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*checkpoints exists and is not empty"),
    # Here only the model and the data go on.
    pytest.mark.filterwarnings(
        "ignore:.*callbacks used to create the checkpoint need to be provided"
    ),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("counted", {"validates": True, "val_check_interval": 5}),
        ("counted", {"limit_train_batches": 4}),
        ("counted", {"limit_train_batches": 0.5, "accumulate_grad_batches": 4}),
        ("counted", {"max_steps": 30, "max_epochs": -1}),
        ("counted", {"data": {"num_workers": 2}, "max_epochs": 2}),
        ("filtered", {"validates": True}),
        ("filtered", {"max_steps": 30, "max_epochs": -1, "accumulate_grad_batches": 2}),
        ("filtered", {"limit_train_batches": 4}),
        ("repeated", {"limit_train_batches": 5}),
        ("packed repeated", {"limit_train_batches": 5, "data": {"num_workers": 2}}),
        ("packed repeated", {"max_steps": 14, "max_epochs": -1, "validates": True, "val_check_interval": 5,
                             "check_val_every_n_epoch": None}),
        ({"a": "counted", "b": "short"}, {"accumulate_grad_batches": 3}),
        ({"a": "filtered", "b": "short"}, {"max_epochs": 1}),
    ],
)  # fmt: skip
def test_every_checkpoint_goes_on_with_what_would_have_come(
    tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    whole = tmp_path / "whole"
    fit(whole, kind, saves=[after_steps, after_epochs], **options)
    expected = trained(whole)
    paths = sorted(
        (whole / "checkpoints").glob("*-*.ckpt"), key=lambda path: path.stat().st_mtime_ns
    )
    for path in {*paths[::5], *(whole / "checkpoints").glob("end-*.ckpt")}:
        resumed = tmp_path / path.stem
        fit(resumed, kind, checkpoint=path, **options)
        if (resumed / "steps-00.txt").read_text():
            got = trained(resumed)
            assert got == expected[-len(got) :], path.stem
            done = torch.load(path, weights_only=True)["loops"]["fit_loop"][
                "epoch_loop.batch_progress"
            ]
            assert len(got) == len(expected) - done["total"]["processed"], path.stem


@pytest.mark.parametrize("kind", ["counted", "filtered"])
def test_each_step_has_the_batches_that_it_would_have_had(tmp_path: Path, kind: str) -> None:
    # 5 does not divide an epoch's batches: its last step has fewer.
    whole, options = tmp_path / "whole", {"accumulate_grad_batches": 5, "max_epochs": 2}
    fit(whole, kind, saves=[after_steps], **options)
    (expected,) = Start(whole, whole).notes()
    paths = list((whole / "checkpoints").glob("step-*.ckpt"))
    assert len(paths) == 6
    for path in paths:
        step, resumed = int(path.stem.removeprefix("step-")), tmp_path / path.stem
        fit(resumed, kind, checkpoint=path, **options)
        (found,) = Start(resumed, resumed).notes()
        assert found == {at: made for at, made in expected.items() if at[1] >= step}, path.stem


@pytest.mark.parametrize("kind", ["counted", "filtered", "packed repeated"])
def test_what_is_saved_when_fit_is_over_goes_on_with_more_steps(tmp_path: Path, kind: str) -> None:
    whole = fit(tmp_path / "whole", kind, max_steps=30, max_epochs=-1)
    for steps in (5, 12, 20):
        ended = fit(tmp_path / f"ended-{steps}", kind, max_steps=steps, max_epochs=-1)
        ended.save_checkpoint(tmp_path / "final.ckpt")
        resumed = tmp_path / f"resumed-{steps}"
        fit(resumed, kind, checkpoint=tmp_path / "final.ckpt", max_steps=30, max_epochs=-1)
        assert trained(resumed) == trained(tmp_path / "whole")[steps:]
    assert whole.global_step == 30


def test_fit_after_fit_goes_on_in_the_next_epoch(tmp_path: Path) -> None:
    fit(tmp_path / "whole", "filtered", max_epochs=3)
    data = PipelineDataModule(pipeline("filtered"))
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(Model(tmp_path / "parts"), datamodule=data)
    make_trainer(tmp_path, max_epochs=2).fit(Model(tmp_path / "more"), datamodule=data)
    assert trained(tmp_path / "parts") + trained(tmp_path / "more") == trained(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["counted", "filtered"])
def test_loaders_that_are_reloaded_every_epoch_are_the_same(tmp_path: Path, kind: str) -> None:
    options = {"reload_dataloaders_every_n_epochs": 1}
    fit(tmp_path / "once", kind)
    fit(tmp_path / "reloaded", kind, saves=[after_steps, after_epochs], **options)
    expected = trained(tmp_path / "once")
    assert trained(tmp_path / "reloaded") == expected
    for step in (epoch_end(tmp_path / "reloaded"), 5):
        path = tmp_path / f"reloaded/checkpoints/step-{step}.ckpt"
        fit(tmp_path / f"from-{step}", kind, checkpoint=path, **options)
        assert trained(tmp_path / f"from-{step}") == expected[step:]


def epoch_end(folder: Path) -> int:
    """The step with which the first epoch of a run ended."""
    return min(number(path) for path in (folder / "checkpoints").glob("end-*.ckpt"))


def estimating(model: Model) -> Any:
    """An optimizer, as for a schedule over all steps: Lightning asks for the loaders at once."""
    assert model.trainer.estimated_stepping_batches
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["counted", "filtered"])
def test_a_schedule_over_all_steps_changes_nothing(
    tmp_path: Path, kind: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "configure_optimizers", estimating)
    # FSDP and DeepSpeed restore the model, too, after optimizers are made.
    monkeypatch.setattr(SingleDeviceStrategy, "restore_checkpoint_after_setup", late)
    whole, options = tmp_path / "whole", {"max_steps": 30, "max_epochs": 9}
    fit(whole, kind, saves=[after_steps, after_epochs], **options)
    expected, end = trained(whole), epoch_end(whole)
    for name in ("step-5", f"step-{end}", f"end-{end}", "step-17"):
        resumed = tmp_path / name
        fit(resumed, kind, checkpoint=whole / f"checkpoints/{name}.ckpt", **options)
        assert trained(resumed) == expected[int(name.split("-")[1]) :], name


@pytest.mark.parametrize("estimates", [False, True])
@pytest.mark.parametrize(("mode", "batches"), [(None, 24), ("max_size_cycle", 24), ("min_size", 8)])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_other_ranks_complete_the_epoch_and_validate_at_its_end(
    tmp_path: Path, before: int, after: int, mode: Any, batches: int, estimates: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if estimates:
        monkeypatch.setattr(Model, "configure_optimizers", estimating)

    def run(name: str, world: int, **options: Any) -> tuple[Counter[str], int]:
        pipes = {
            size: sized("counted", size).distributed(rank=0, world_size=world) for size in (12, 4)
        }
        given = pipes[4] if mode is None else CombinedLoader(pipes, mode)
        options |= {"validates": True, "num_sanity_val_steps": 0, "max_epochs": 2}
        trainer = fit(tmp_path / name, given, **options)
        (lines,) = Start(tmp_path / name, tmp_path).lines()
        return Counter(epoch for epoch, *_ in lines), len(trainer.lightning_module.evaluated)

    of_epoch = batches // before
    assert run("first", before, saves=[after_steps]) == ({"0": of_epoch, "1": of_epoch}, 10)
    for step, evaluated in ((2, 10), (of_epoch, 5)):
        path = tmp_path / f"first/checkpoints/step-{step}.ckpt"
        left = {"0": (batches - step * before) // after, "1": batches // after}
        assert run(f"{step}", after, checkpoint=path) == (+Counter(left), evaluated)


@pytest.mark.parametrize(("kind", "steps"), [("counted", 3), ("counted", 13), ("filtered", 7)])
def test_after_a_search_for_the_learning_rate_training_begins_at_the_start(
    tmp_path: Path, kind: str, steps: int
) -> None:
    fit(tmp_path / "whole", kind, max_epochs=2)
    finder = LearningRateFinder(
        num_training_steps=steps, early_stop_threshold=None, update_attr=False
    )
    trainer, run = make_trainer(tmp_path, [finder], max_epochs=2), tmp_path / "run"
    trainer.fit(Model(Start(run, run).begin()), datamodule=PipelineDataModule(pipeline(kind)))
    assert trained(run)[steps:] == trained(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:pin")  # there is no accelerator
def test_loaders_that_pin_are_the_same_when_they_are_asked_for_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
    options["data"] = {"pin_memory": True}
    fit(tmp_path / "whole", "counted", saves=[after_steps], **options)
    path = tmp_path / "whole/checkpoints/step-5.ckpt"
    fit(tmp_path / "from", "counted", checkpoint=path, **options)
    assert trained(tmp_path / "from") == trained(tmp_path / "whole")[5:]
    finder = LearningRateFinder(num_training_steps=3, early_stop_threshold=None, update_attr=False)
    trainer, run = make_trainer(tmp_path, [finder], max_epochs=3), tmp_path / "run"
    data = PipelineDataModule(pipeline("counted"), pin_memory=True)
    trainer.fit(Model(Start(run, run).begin()), datamodule=data)
    assert trained(run)[3:] == trained(tmp_path / "whole")


def test_overfitting_is_on_the_same_batches_in_every_epoch(tmp_path: Path) -> None:
    fit(tmp_path / "few", "counted", overfit_batches=3, max_epochs=4)
    fit(tmp_path / "whole", "counted", max_epochs=1)
    assert trained(tmp_path / "few") == trained(tmp_path / "whole")[:3] * 4


class Both(PipelineDataModule):
    """Trains and validates on one pipeline, which it makes in ``setup``."""

    def setup(self, stage: str) -> None:
        self.train = self.val = pipeline("counted")


def test_an_evaluation_does_not_move_a_pipeline_on_that_trains_too(tmp_path: Path) -> None:
    fit(tmp_path / "alone", "counted", max_epochs=1)
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(EvaluatedModel(tmp_path / "both"), datamodule=Both())
    assert trained(tmp_path / "both") == trained(tmp_path / "alone")


def test_the_position_in_a_checkpoint_is_a_loaders_state(tmp_path: Path) -> None:
    fit(tmp_path, "counted", saves=[after_steps], max_steps=4, max_epochs=-1)
    checkpoint = torch.load(tmp_path / "checkpoints/step-4.ckpt", weights_only=True)
    loader = tp.Loader(pipeline("counted"))
    loader.load_state_dict(checkpoint["PipelineDataModule"]["train"])
    assert len(list(loader)) == 8
    with pytest.raises(tp.StateError):
        loader.load_state_dict(checkpoint)


def test_evaluation_leaves_the_position_in_training_alone(tmp_path: Path) -> None:
    fit(tmp_path / "whole", "counted", max_epochs=2)
    data = PipelineDataModule(pipeline("counted"), held_out())
    model, trainer = EvaluatedModel(tmp_path / "run"), make_trainer(tmp_path, max_epochs=1)
    trainer.validate(model, datamodule=data, verbose=False)
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = PipelineDataModule(pipeline("counted"), held_out())
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.validate(
        EvaluatedModel(), datamodule=again, ckpt_path=str(tmp_path / "one.ckpt"), verbose=False
    )
    trainer.fit(EvaluatedModel(tmp_path / "anew"), datamodule=again)
    assert trained(tmp_path / "anew") == trained(tmp_path / "whole")


def test_a_combined_loader_of_pipelines_keeps_its_mode(tmp_path: Path) -> None:
    both = {"a": pipeline("counted"), "b": pipeline("short")}
    with pytest.raises(tp.ConfigError, match='must be "max_size_cycle"'):
        PipelineDataModule(CombinedLoader(both, "max_size"))
    for mode, batches in (("min_size", 5), ("max_size_cycle", 12)):
        data = PipelineDataModule(CombinedLoader(both, mode))
        trainer = make_trainer(tmp_path, max_epochs=1)
        trainer.fit(Model(tmp_path / mode), datamodule=data)
        assert trainer.global_step == batches


def test_the_batch_size_may_change(tmp_path: Path) -> None:
    def make(size: int) -> tp.Pipeline:
        return tp.from_dataset(range(96)).map(as_ids).batch(size).collate()

    trainer = fit(tmp_path / "first", make(4), max_steps=5, max_epochs=-1)
    trainer.save_checkpoint(tmp_path / "five.ckpt")
    told = {"checkpoint": tmp_path / "five.ckpt", "max_steps": 7, "max_epochs": -1}
    with pytest.raises(tp.StateError, match="batch_size: saved 4, now 8"):
        fit(tmp_path / "refused", make(8), **told)
    fit(tmp_path / "larger", make(8), data={"allow_changes": ["batch_size"]}, **told)
    assert len(trained(tmp_path / "larger")) == 2


def test_all_of_a_folder_that_grows_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trains = tmp_path / "days", Model.training_step

    def step(self: Model, batch: Any, number: int) -> Any:
        if self.trainer.global_step == 3:
            growing(folder, 1)
        return trains(self, batch, number)

    monkeypatch.setattr(Model, "training_step", step)
    fit(tmp_path, growing(folder, 0), saves=[after_steps], max_epochs=3)
    expected = trained(tmp_path)
    assert len(expected) == 5 + 10 + 10
    for at in (4, 5, 12):
        path = tmp_path / f"checkpoints/step-{at}.ckpt"
        fit(tmp_path / f"{at}", growing(folder, 1), checkpoint=path, max_epochs=3)
        assert trained(tmp_path / f"{at}") == expected[at:]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("before", "after", "step"), [(2, 8, 24), (4, 8, 5), (8, 2, 6), (8, 4, 3)])
def test_all_that_is_left_comes_in_batches_of_another_size(
    tmp_path: Path, before: int, after: int, step: int, epochs: int
) -> None:
    fit(tmp_path, sized("counted", before), saves=[after_steps], max_epochs=epochs)
    path = tmp_path / f"checkpoints/step-{step}.ckpt"
    loader = tp.Loader(sized("counted", after))
    position = torch.load(path, weights_only=True)["PipelineDataModule"]["train"]
    loader.load_state_dict(position, allow_changes=["batch_size"])
    left = len(list(loader)) + (epochs - 1) * len(loader)
    told = {"checkpoint": path, "max_epochs": epochs, "data": {"allow_changes": ["batch_size"]}}
    resumed = fit(tmp_path / "resumed", sized("counted", after), **told)
    assert len(trained(tmp_path / "resumed")) == left
    assert (resumed.global_step, resumed.current_epoch) == (step + left, epochs)


def as_ids(row: int) -> dict[str, Any]:
    return {"input_ids": torch.tensor([row])}


def test_a_loader_without_the_module_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in (tp.Loader(pipeline("counted")), pipeline("packed repeated")):
        monkeypatch.setattr(warn_once, "_warned", set())
        with pytest.warns(UserWarning, match=r"datamodule=.*PipelineDataModule\(train=pipe\)"):
            make_trainer(tmp_path, max_steps=2).fit(Model(), given)


def test_a_checkpoint_without_the_position_is_refused(tmp_path: Path) -> None:
    class Other(PipelineDataModule):
        pass

    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.fit(Model(), datamodule=Other(pipeline("counted")))
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(tp.StateError, match="has no position of this PipelineDataModule"):
        fit(tmp_path / "run", "counted", checkpoint=tmp_path / "other.ckpt")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"train": tp.Loader(pipeline("counted"))}, r"write PipelineDataModule\(train=pipe, num_workers="),
        ({"train": DataLoader(pipeline("counted"), batch_size=None)}, r"write .*\(train=pipe, num_workers="),
        ({"val": list(range(3))}, r"trainpipes.from_dataset\(dataset\)"),
        ({"train": pipeline("counted"), "num_workers": -1}, "Loader"),
        ({"val": tp.from_dataset([{"x": 1}])}, r"\(val\) must make batches, got single rows; .*\.batch\("),
    ],
)  # fmt: skip
def test_what_is_no_pipeline_is_refused_with_what_to_write(given: Any, told: str) -> None:
    with pytest.raises(tp.ConfigError, match=told):
        PipelineDataModule(**given)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_data_loader_that_batches_again_is_refused(tmp_path: Path) -> None:
    loader = DataLoader(pipeline("counted"), batch_size=32)
    with pytest.raises((tp.ConfigError, RuntimeError)) as caught:
        make_trainer(tmp_path).fit(Model(), loader)
    error: BaseException | None = caught.value
    while isinstance(error, RuntimeError):  # Lightning fails once more as it ends
        error = error.__context__
    assert isinstance(error, tp.ConfigError)
    assert "pass batch_size=None" in str(error)


def validate(folder: Path, pipe: tp.Pipeline, **options: Any) -> None:
    data = PipelineDataModule(val=pipe)
    make_trainer(folder, **options).validate(EvaluatedModel(), datamodule=data, verbose=False)


def test_evaluation_that_would_leave_rows_out_is_warned_of_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warn_once, "_warned", set())
    with pytest.warns(UserWarning, match="leaves out the last 1 of 5 batches on 2 ranks"):
        validate(tmp_path, held_out().distributed(rank=0, world_size=2))
    monkeypatch.setattr(lightning_module, "IN_STEP", (SingleDeviceStrategy,))  # as FSDP, on a CPU
    with pytest.raises(tp.ConfigError, match='got 5 batches on 2 ranks and tail="uneven"'):
        validate(tmp_path, held_out(tail="uneven").distributed(rank=0, world_size=2))
    with pytest.raises(
        tp.ConfigError, match=r"\.repeat\(\) out, or say Trainer\(limit_val_batches"
    ):
        validate(tmp_path, held_out().repeat())
    validate(tmp_path, held_out().repeat(), limit_val_batches=1)
    rows = tp.from_dataset([{"input_ids": torch.tensor([n]), "row": n} for n in range(4)])
    taken = tp.mix({"a": rows}, stop="repeat").batch(2).take(5).collate()
    validate(tmp_path, taken)


def test_fewer_batches_than_ranks_are_refused_where_ranks_would_wait(tmp_path: Path) -> None:
    for tail in ("even", "uneven"):
        pipe = held_out(tail=tail).take(1).distributed(rank=0, world_size=2)
        for limit in (1.0, 2):
            with pytest.raises(
                tp.ConfigError, match=r"a batch for each rank.* got 1 batches on 2 ranks"
            ):
                validate(tmp_path, pipe, limit_val_batches=limit)
    validate(tmp_path, pipe, limit_val_batches=0)
    trainer = make_trainer(tmp_path)
    assert len(trainer.predict(EvaluatedModel(), datamodule=PipelineDataModule(predict=pipe))) == 1


@pytest.mark.parametrize(
    ("world", "options", "told"),
    [
        (1, {"accumulate_grad_batches": 3}, "accumulate_grad_batches must be 4 for global_batches"),
        (1, {"limit_train_batches": 6}, "limit_train_batches must be divisible by the 4"),
        (1, {"callbacks": [GradientAccumulationScheduler({0: 2})]},
         "leave the GradientAccumulationScheduler out"),
        (3, {}, "global_batches must be divisible by 3 ranks, got 4"),
        (1, {}, None),
    ],
)  # fmt: skip
def test_global_batches_and_the_trainer_must_fit(
    world: int, options: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    pipe = pipeline("counted").distributed(rank=0, world_size=world)
    trainer = make_trainer(tmp_path, max_epochs=1, **options)
    with nullcontext() if told is None else pytest.raises(tp.ConfigError, match=told):
        trainer.fit(Model(), datamodule=PipelineDataModule(train=pipe, global_batches=4))
        assert (trainer.accumulate_grad_batches, trainer.global_step) == (4, 12 // 4)


@pytest.mark.parametrize("state", [None, {}, [], "x", {"val": 1}])
def test_what_is_no_state_of_the_module_is_refused(state: Any) -> None:
    with pytest.raises(tp.StateError, match=r"must be \{'train': state\}"):
        PipelineDataModule(pipeline("counted")).load_state_dict(state)
