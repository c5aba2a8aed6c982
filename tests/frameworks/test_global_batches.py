"""Optimizer steps of trainers by ``global_batches``: on 4, then 2 ranks, then one those of one on one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("lightning")

from accelerate import Accelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler

import trainpipes as tp
from frameworks import accelerate_runs, lightning_runs, transformers_runs
from frameworks import global_batches_runs as runs
from frameworks.ranks import run
from frameworks.steps import by_step
from trainpipes.integrations.accelerate import loader

#: Steps after which the number of ranks changes; the last one is in a later epoch.
STOPS = (2, 7, 16)


def trained(
    by: Any, folder: Path, kind: str, ranks: tuple[int, ...]
) -> tuple[dict[int, list[str]], Any]:
    """The batches of each step, whoever had them, of a run on so many ranks in turn; its last weights."""
    found: dict[int, list[str]] = {}
    start, said = 0, {}
    for world, stop in zip(ranks, STOPS, strict=True):
        notes = folder / f"notes-{start}"
        said, *others = run(
            by, world, folder / f"ranks-{start}", folder / "saved", notes, kind, start, stop
        )
        assert all(other == pytest.approx(said) for other in others)
        steps = by_step(notes)
        for step in range(start, stop):
            each = [rank[step] for rank in steps]
            assert all(len(batches) == runs.BATCHES // world for batches in each)
            found[step] = sorted(chain.from_iterable(each))
        start = stop
    return found, said


@pytest.mark.parametrize("kind", ["counted", "filtered"])
@pytest.mark.parametrize("by", [runs.accelerate, runs.trainer, runs.lightning])
def test_a_run_on_4_2_and_1_ranks_takes_the_steps_of_one_on_one(
    by: Any, kind: str, tmp_path: Path
) -> None:
    alone, weights = trained(by, tmp_path / "alone", kind, (1, 1, 1))
    assert sorted(alone) == list(range(STOPS[-1]))
    found, same = trained(by, tmp_path / "moved", kind, (4, 2, 1))
    assert found == alone
    assert same == pytest.approx(weights, rel=1e-5)


def of_ranks(pipe: tp.Pipeline, world: int) -> tp.Pipeline:
    return pipe.distributed(rank=0, world_size=world)


def test_accelerate_says_what_fits(tmp_path: Path) -> None:
    pipe = accelerate_runs.pipeline("counted")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    with pytest.raises(
        tp.ConfigError, match="gradient_accumulation_steps must be 4 for global_bat"
    ):
        loader(pipe, accelerator, global_batches=4)
    with pytest.raises(tp.ConfigError, match="global_batches must be an integer of 1 or more"):
        loader(pipe, accelerator, global_batches=0)
    with pytest.raises(tp.ConfigError, match="global_batches must be divisible by 3 ranks, got 4"):
        loader(of_ranks(pipe, 3), accelerator, global_batches=4)
    made = loader(pipe, accelerator, global_batches=3)
    assert accelerator.gradient_accumulation_steps == 3
    assert len(made) == len(pipe) // 3 * 3 == len(list(made))


def test_a_trainer_says_what_fits(tmp_path: Path) -> None:
    pipe = transformers_runs.pipeline("counted")

    def trainer(dataset: Any, **given: Any) -> Any:
        arguments = transformers_runs.arguments(tmp_path, **given)
        return transformers_runs.NotingTrainer(
            transformers_runs.model(), arguments, train_dataset=dataset, global_batches=4
        )

    with pytest.raises(
        tp.ConfigError, match="gradient_accumulation_steps must be 4 for global_bat"
    ):
        trainer(pipe)
    with pytest.raises(tp.ConfigError, match="train_dataset must be a pipeline of batches"):
        trainer([{"input_ids": [1]}], gradient_accumulation_steps=1)
    with pytest.raises(tp.ConfigError, match="global_batches must be divisible by 3 ranks, got 4"):
        trainer(of_ranks(pipe, 3), gradient_accumulation_steps=1)
    assert trainer(pipe, gradient_accumulation_steps=1).args.gradient_accumulation_steps == 4


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:::lightning")
def test_lightning_says_what_fits(tmp_path: Path) -> None:
    pipe = lightning_runs.pipeline("counted")

    def fit(pipe: tp.Pipeline = pipe, callbacks: Any = (), **options: Any) -> Any:
        made = lightning_runs.make_trainer(tmp_path, callbacks, max_epochs=1, **options)
        data = lightning_runs.PipelineDataModule(train=pipe, global_batches=4)
        made.fit(lightning_runs.Model(), datamodule=data)
        return made

    with pytest.raises(
        tp.ConfigError, match="accumulate_grad_batches must be 4 for global_batches"
    ):
        fit(accumulate_grad_batches=3)
    with pytest.raises(tp.ConfigError, match="limit_train_batches must be divisible by the 4"):
        fit(limit_train_batches=6)
    with pytest.raises(tp.ConfigError, match="leave the GradientAccumulationScheduler out"):
        fit(callbacks=[GradientAccumulationScheduler({0: 2})])
    with pytest.raises(tp.ConfigError, match="global_batches must be divisible by 3 ranks, got 4"):
        fit(of_ranks(pipe, 3))
    made = fit()
    assert (made.accumulate_grad_batches, made.global_step) == (4, len(pipe) // 4)
