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

import trainpipes as tp
from frameworks.example import example
from frameworks.steps import Steps
from trainpipes.integrations.lightning import PipelineDataModule

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

ROWS = [{"text": f"row {i} " + "x" * (i % 9), "row": i} for i in range(96)]


def keep(row: dict[str, Any]) -> bool:
    return len(row["text"]) % 4 > 0


def pipeline(kind: str) -> tp.Pipeline:
    """12 batches an epoch, where they are counted."""
    rows = tp.from_dataset(ROWS).sharding_filter(num_shards=4).shuffle(buffer_size=40, seed=0)
    if kind == "packed":
        return rows.tokenize("bytes", "text").pack(64).batch(2).pad_collate().repeat()
    if kind == "filtered":
        rows = rows.filter(keep)
    batches = rows.tokenize("bytes", "text").batch(8).pad_collate()
    if kind == "short":
        return batches.take(5)
    return batches.repeat() if kind == "repeated" else batches


def held_out(**options: Any) -> tp.Pipeline:
    """To evaluate on: 17 rows with their numbers, in 5 batches."""
    rows = tp.from_dataset(ROWS[:17]).sharding_filter(num_shards=4, **options)
    return rows.shuffle(seed=1).tokenize("bytes", "text").batch(4).pad_collate()


class Model(LightningModule):
    """Notes what it is trained on.

    Args:
        notes: where; nowhere for None.
        fails: batch on which training fails, and the ranks on which it does.
    """

    def __init__(
        self, notes: Path | None = None, fails: tuple[int, Sequence[int]] | None = None
    ) -> None:
        super().__init__()
        self.weights = torch.nn.Embedding(258, 1)
        self.notes, self.fails = notes, fails
        self.evaluated: list[list[int]] = []

    def on_fit_start(self) -> None:
        self.steps = None if self.notes is None else Steps(self.notes, self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = self.trainer.fit_loop.total_batch_idx
        if self.fails is not None and number == self.fails[0] and self.global_rank in self.fails[1]:
            raise RuntimeError("a bad batch")
        if "input_ids" not in batch:  # of several pipelines
            ids = [part["input_ids"].flatten() for _, part in sorted(batch.items())]
            batch = {"input_ids": torch.cat(ids)}
        if self.steps is not None:
            self.steps.trained_on(self.trainer.current_epoch, number, batch)
        return self.weights(batch["input_ids"]).mean()

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
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": bool(callbacks), "max_epochs": 3, **ranks(), **options},
    )


def ranks() -> dict[str, Any]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return {"devices": world, "strategy": "ddp" if world > 1 else "auto"}


def after_steps(folder: Path, every: int = 1) -> ModelCheckpoint:
    """Checkpoints within epochs: step-1.ckpt and so on, and last.ckpt."""
    return ModelCheckpoint(
        folder / "checkpoints",
        filename="step-{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=every,
        save_top_k=-1,
        save_last=True,
    )


def after_epochs(folder: Path) -> ModelCheckpoint:
    """Checkpoints at the ends of epochs, as Lightning saves where nothing is said: end-6.ckpt and so on."""
    return ModelCheckpoint(
        folder / "checkpoints", filename="end-{step}", auto_insert_metric_name=False, save_top_k=-1
    )


def fit(
    folder: Path,
    kind: str | tp.Pipeline | dict[str, str],
    *,
    saves: Sequence[Callable[[Path], Any]] = (),
    checkpoint: str | None = None,
    validates: bool = False,
    data: dict[str, Any] | None = None,
    fails: tuple[int, Sequence[int]] | None = None,
    **options: Any,
) -> Trainer:
    """Train, and note each batch in the folder.

    Args:
        folder: of this run.
        kind: of pipeline, or of several by name.
        saves: make the callbacks that save.
        checkpoint: to go on from.
        validates: whether it does.
        data: options of the data module.
        fails: as the model takes it.
        options: of the trainer.
    """
    named = kind if isinstance(kind, dict) else {"": kind}
    pipes = {name: pipeline(one) if isinstance(one, str) else one for name, one in named.items()}
    module = PipelineDataModule(
        pipes if isinstance(kind, dict) else pipes[""],
        held_out(tail="uneven") if validates else None,
        **(data or {}),
    )
    trainer = make_trainer(folder, [save(folder) for save in saves], **options)
    model = EvaluatedModel(folder, fails) if validates else Model(folder, fails)
    trainer.fit(model, datamodule=module, ckpt_path=checkpoint)
    return trainer


def fits(runs: Sequence[tuple[Path, str, dict[str, Any]]]) -> None:
    """Several runs, one after the other."""
    for folder, kind, options in runs:
        fit(folder, kind, **options)


def fails_on(folder: Path, kind: str, failing: Sequence[int], timeout: float) -> str:
    """What a rank is told whose training failed at the fifth batch, on ranks that fail, with a checkpoint on
    exceptions."""
    try:
        fit(
            folder,
            kind,
            saves=[lambda at: OnExceptionCheckpoint(at / "checkpoints")],
            data={"state_timeout": timeout},
            fails=(4, failing),
            **({"max_steps": 18, "max_epochs": -1} if kind in ("repeated", "packed") else {}),
        )
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


class Notes(Callback):
    """Notes what a script is trained on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        number = trainer.fit_loop.total_batch_idx
        Steps(self.folder, trainer.global_rank).trained_on(trainer.current_epoch, number, batch)


def script(notes: Path, arguments: Sequence[str]) -> None:
    """The script of the docs."""
    warnings.filterwarnings("ignore", ".*does not have many workers")
    example("lightning_fit").main(list(arguments), [Notes(notes)])
