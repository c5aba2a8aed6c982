"""What ranks do in tests of Lightning."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

import trainpipes as tp
from frameworks.example import example
from frameworks.runs import Start, rank, texts, weights_of
from frameworks.runs import pipeline as batches
from trainpipes.integrations.lightning import PipelineDataModule

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def pipeline(kind: str) -> tp.Pipeline:
    """12 batches an epoch, where they are counted; "short" has 5."""
    return batches("counted", 8).take(5) if kind == "short" else batches(kind, 8)


def held_out(**options: Any) -> tp.Pipeline:
    """To evaluate on: 17 rows with their numbers, in 5 batches."""
    rows = tp.from_dataset(texts(17)).sharding_filter(num_shards=4, **options)
    return rows.shuffle(seed=1).tokenize("bytes", "text").batch(4).pad_collate()


class Model(LightningModule):
    """Tells its start what it is trained on.

    Args:
        start: or its folder; None for none.
        fails: batch on which training fails, and the ranks on which it does.
    """

    def __init__(
        self, start: Start | Path | None = None, fails: tuple[int, Sequence[int]] | None = None
    ) -> None:
        super().__init__()
        self.weights = torch.nn.Embedding(258, 1)
        self.start = Start(start, start) if isinstance(start, Path) else start
        self.fails = fails
        self.evaluated: list[list[int]] = []

    def on_fit_start(self) -> None:
        if self.start is not None:
            self.start.begin()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = self.trainer.fit_loop.total_batch_idx
        if self.fails is not None and number == self.fails[0] and self.global_rank in self.fails[1]:
            raise RuntimeError("a bad batch")
        if "input_ids" not in batch:  # of several pipelines
            ids = [part["input_ids"].flatten() for _, part in sorted(batch.items())]
            batch = {"input_ids": torch.cat(ids)}
        if self.start is not None:
            self.start.trained_on(self.trainer.current_epoch, self.trainer.global_step, batch)
        return self.weights(batch["input_ids"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EvaluatedModel(Model):
    """Notes what it is evaluated on, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows = batch["row"].tolist()
        self.evaluated.append(rows)
        for name, value in (("rows", len(rows)), ("total", sum(rows))):
            self.log(name, float(value), on_epoch=True, reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch["row"].tolist()

    test_step = validation_step


def make_trainer(folder: Path, callbacks: Sequence[Any] = (), **options: Any) -> Trainer:
    """A trainer of all ranks, with nothing to say."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    usual: dict[str, Any] = {
        "enable_checkpointing": bool(callbacks), "max_epochs": 3,
        "strategy": "ddp" if world > 1 else "auto",
    }  # fmt: skip
    return Trainer(
        accelerator="cpu", devices=world, logger=False,
        default_root_dir=folder, callbacks=list(callbacks), enable_progress_bar=False,
        enable_model_summary=False, **{**usual, **options},
    )  # fmt: skip


def after_steps(folder: Path, every: int = 1) -> ModelCheckpoint:
    """Checkpoints within epochs: step-1.ckpt and so on."""
    return ModelCheckpoint(
        folder, filename="step-{step}", auto_insert_metric_name=False, every_n_train_steps=every,
        save_top_k=-1,
    )  # fmt: skip


def after_epochs(folder: Path) -> ModelCheckpoint:
    """Checkpoints at the ends of epochs, as Lightning saves where nothing is said: end-6.ckpt and so on."""
    return ModelCheckpoint(
        folder, filename="end-{step}", auto_insert_metric_name=False, save_top_k=-1
    )


def fit(
    start: Start | Path,
    kind: str | tp.Pipeline | dict[str, str],
    *,
    saves: Sequence[Callable[[Path], Any]] = (),
    checkpoint: Path | None = None,
    validates: bool = False,
    data: dict[str, Any] | None = None,
    fails: tuple[int, Sequence[int]] | None = None,
    **options: Any,
) -> Trainer:
    """Train, and note each batch.

    Args:
        start: of this run, or its folder, which then holds its checkpoints, too.
        kind: of pipeline, or of several by name.
        saves: make the callbacks that save.
        checkpoint: to go on from.
        validates: whether it does.
        data: options of the data module.
        fails: as the model takes it.
        options: of the trainer.
    """
    start = Start(start, start / "checkpoints") if isinstance(start, Path) else start
    named = kind if isinstance(kind, dict) else {"": kind}
    pipes = {name: pipeline(one) if isinstance(one, str) else one for name, one in named.items()}
    module = PipelineDataModule(
        pipes if isinstance(kind, dict) else pipes[""],
        held_out(tail="uneven") if validates else None,
        **(data or {}),
    )
    trainer = make_trainer(start.folder, [save(start.saved) for save in saves], **options)
    model = EvaluatedModel(start, fails) if validates else Model(start, fails)
    trainer.fit(model, datamodule=module, ckpt_path=checkpoint)
    return trainer


def trained(folder: Path, of_rank: int = 0) -> list[str]:
    """The digests of what a rank trained on, in order."""
    return [content for *_, content, _ in Start(folder, folder).lines()[of_rank]]


def limits(kind: str) -> dict[str, Any]:
    """How long a run on 2 ranks is: three epochs, or as many steps."""
    return {"max_steps": 18, "max_epochs": -1} if "repeated" in kind else {"max_epochs": 3}


def train(start: Start) -> dict[str, Any]:
    """The adapter; its options are those of ``fit``, or "global_batches" and "steps"."""
    given = dict(start.options) or limits(start.kind)
    if "global_batches" in given:
        given = {"data": {"global_batches": given["global_batches"]}, "max_steps": given["steps"]}
        given["max_epochs"] = -1
    saves: list[Any] = (
        [lambda at: after_steps(at, start.every), after_epochs] if start.every else []
    )
    torch.manual_seed(0)
    at = start.checkpoint("step-{}.ckpt")
    trainer = fit(start, start.kind, saves=saves, checkpoint=at, **given)
    return {"steps": trainer.global_step, "weights": weights_of(trainer.lightning_module)}


def fails_on(folder: Path, kind: str, failing: Sequence[int], timeout: float) -> str:
    """What a rank is told whose training failed at the fifth batch, on ranks that fail, with a checkpoint on
    exceptions."""
    saves = [OnExceptionCheckpoint]
    data = {"state_timeout": timeout}
    try:
        fit(folder, kind, saves=saves, data=data, fails=(4, failing), **limits(kind))
    except (RuntimeError, tp.StateError) as error:
        before = error.__context__ if isinstance(error, tp.StateError) else None
        while before is not None and before.__context__ is not None:
            before = before.__context__
        return f"{type(error).__name__}: {error} | {before}"
    return "trained"


def evaluations(folder: Path, options: dict[str, Any]) -> list[Any]:
    """Which rows a rank validated, tested and predicted for, and what was logged over all ranks."""
    told: list[Any] = []
    module = PipelineDataModule(
        pipeline("counted"), held_out(**options), held_out(**options), held_out(**options)
    )
    model = EvaluatedModel()
    trainer = make_trainer(folder, max_epochs=2)
    trainer.fit(model, datamodule=module)
    seen = model.evaluated
    per_pass = (len(seen) - 2) // 2  # a sanity check takes two batches
    told.append([seen[:2] == seen[2:4], seen[2 : 2 + per_pass] == seen[2 + per_pass :]])
    model.evaluated = []
    told.append([trainer.validate(model, datamodule=module, verbose=False)[0], model.evaluated])
    model.evaluated = []
    told.append([trainer.test(model, datamodule=module, verbose=False)[0], model.evaluated])
    told.append(trainer.predict(model, datamodule=module))
    return told


class Parted(EvaluatedModel):
    """A model in parts: pairs of ranks share one."""

    def configure_model(self) -> None:
        assert self.device_mesh.size() == 4


class InParts(PipelineDataModule):
    """Reads, from ``setup`` on, as many ranks' rows as there are models."""

    def setup(self, stage: str) -> None:
        mesh = self.trainer.strategy.device_mesh["data_parallel"]
        self.train = pipeline("counted").distributed(mesh=mesh)
        self.val = held_out().distributed(rank=0, world_size=1)  # all of it everywhere


def in_parts(folder: Path) -> list[Any]:
    """What ranks that share a model were told, and what they were trained and evaluated on."""
    told: list[Any] = []
    pipe = pipeline("counted")
    given = (
        PipelineDataModule(pipe),
        PipelineDataModule(val=pipe),
        InParts(),
        PipelineDataModule(pipe.distributed(rank=0, world_size=1)),
    )
    for number, module in enumerate(given):
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
        options: dict[str, Any] = {"max_epochs": 1, "num_sanity_val_steps": 0, "strategy": strategy}
        trainer, model = make_trainer(folder, **options), Parted(folder / f"{number}")
        try:
            (trainer.validate if module.val is pipe else trainer.fit)(model, datamodule=module)
        except tp.ConfigError as error:
            told.append(str(error))
        else:
            told.append([trained(folder / f"{number}", rank()), model.evaluated])
    return told


class Notes(Callback):
    """Notes what a script is trained on."""

    def __init__(self, start: Start) -> None:
        self.start = start.begin()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        number = trainer.fit_loop.total_batch_idx
        self.start.trained_on(trainer.current_epoch, number, batch)


def script(start: Start, arguments: Sequence[str]) -> None:
    """The script of the docs."""
    warnings.filterwarnings("ignore", ".*does not have many workers")
    example("lightning_fit").main(list(arguments), [Notes(start)])
