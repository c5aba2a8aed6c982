"""Loops with the interfaces of torchtitan, torchtune and nanochat, and what ranks do in them.

Each asks of its data loader what those of torchtitan 0.3.0, torchtune 0.6.1 and nanochat's base_train ask of
theirs, in the same order.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.functional import cross_entropy

from frameworks.example import example
from frameworks.steps import Steps

__all__ = ["LOOPS", "nanochat", "nanogpt", "titan_example", "torchtitan", "torchtune"]

B, T = 4, 32
SAVE_EVERY = 3


class Training:
    """Notes what is trained on. Where a file NAME.hold says a step, it waits after that one to be killed."""

    def __init__(self, folder: Path, name: str) -> None:
        dist.init_process_group("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.model = torch.nn.Embedding(258, 258)
        self.steps = Steps(folder / name, self.rank)
        hold = folder / f"{name}.hold"
        self.hold = int(hold.read_text()) if hold.exists() else None

    def step(
        self, epoch: int, step: int, ids: torch.Tensor, targets: torch.Tensor, ignored: int
    ) -> None:
        assert ids.shape == targets.shape
        loss = cross_entropy(self.model(ids).flatten(0, 1), targets.flatten(), ignore_index=ignored)
        dist.all_reduce(loss.detach())  # ranks take each step together
        self.steps.trained_on(epoch, step, {"input_ids": ids})
        if step == self.hold:
            time.sleep(600)


def write(path: Path, content: Any) -> None:
    torch.save(content, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


# torchtitan


class BaseDataLoader(ABC):
    """What torchtitan's class of this name asks of a data loader: a Config that builds it, and a state."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        dataset: str = ""
        dataset_path: str | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class NewBaseDataLoader(BaseDataLoader):
    """The class of main, since it reads by Grain: its Config names no data."""

    @dataclass(kw_only=True, slots=True)
    class Config: ...


def titan_example(main: bool = False) -> Any:
    """docs/examples/loops/for_torchtitan.py, over torchtitan itself where it is installed; or as on main."""
    loader = "torchtitan.components.data.loader" if main else "torchtitan.components.dataloader"
    try:
        import_module(loader)
    except ImportError:
        parts = loader.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
        base = NewBaseDataLoader if main else BaseDataLoader
        sys.modules[loader].BaseDataLoader = base  # type: ignore[attr-defined]
    return example("loops/for_torchtitan")


def torchtitan(folder: str, files: str, name: str, last: int, infinite: bool = True) -> None:
    """As torchtitan's Trainer: the loader in DCP beside the model, one state for each data-parallel rank."""
    training = Training(Path(folder), name)
    made = titan_example().PipelineDataLoader
    config = made.Config(files=files, num_shards=4, infinite=infinite)
    assert {"dataset", "dataset_path", "infinite"} <= {field.name for field in fields(config)}
    loader = made(
        config=config,
        dp_world_size=training.ranks,
        dp_rank=training.rank,
        tokenizer=SimpleNamespace(tokenizer="bytes", eos_id=256),
        seq_len=T,
        local_batch_size=B,
        snapshot_every_n_steps=SAVE_EVERY,
    )
    parts = {"dataloader": loader, "model": training.model}
    checkpoints = Path(folder) / "checkpoints"
    step = 0
    found = max(checkpoints.glob("step-*/.metadata"), default=None)
    if found is not None:
        dcp.load(parts, checkpoint_id=found.parent)
        step = int(found.parent.name.removeprefix("step-"))
    batches = iter(loader)
    while step < last:
        step += 1
        try:
            inputs, labels = next(batches)
        except StopIteration:
            break
        assert set(inputs) == {"input", "positions"}
        assert labels.numel() == inputs["positions"].numel() == B * T or not infinite
        training.step(0, step - 1, inputs["input"], labels, -100)
        if step % SAVE_EVERY == 0:
            dcp.save(parts, checkpoint_id=checkpoints / f"step-{step:05d}")


# torchtune


class FullFinetuneRecipe:
    """What a recipe of torchtune does with its data."""

    def setup(self, cfg: dict[str, Any], training: Training, checkpoint: Path) -> None:
        self.cfg, self.training, self.checkpoint = cfg, training, checkpoint
        self.dp_rank, self.dp_size = training.rank, training.ranks
        self.epochs_run = self.global_step = 0
        if checkpoint.exists():
            self._update_recipe_state(torch.load(checkpoint, weights_only=True))
        self._dataloader = self._setup_data(
            cfg_dataset=cfg["dataset"],
            shuffle=cfg["shuffle"],
            batch_size=cfg["batch_size"],
            collate_fn="torchtune.data.padded_collate_sft",
        )
        self._steps_per_epoch = len(self._dataloader)

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        self.epochs_run, self.global_step = ckpt_dict["epochs_run"], ckpt_dict["global_step"]

    def _setup_data(self, **_: Any) -> Any:
        raise NotImplementedError

    def save_checkpoint(self) -> None:
        progress = {
            "epochs_run": self.epochs_run,
            "total_epochs": self.cfg["epochs"],
            "global_step": self.global_step,
            "dataloader": self._dataloader.state_dict(),
        }
        if self.training.rank == 0:
            write(self.checkpoint, progress)

    def train(self) -> None:
        for epoch in range(self.epochs_run, self.cfg["epochs"]):
            self._dataloader.sampler.set_epoch(epoch)
            for batch in self._dataloader:
                labels = batch.pop("labels")
                assert set(batch) == {"tokens"}
                shifted = torch.hstack((labels[..., 1:], torch.full((len(labels), 1), -100)))
                self.training.step(epoch, self.global_step, batch["tokens"], shifted, -100)
                self.global_step += 1
                if self.global_step % SAVE_EVERY == 0:
                    self.save_checkpoint()
            self.epochs_run += 1
            self.save_checkpoint()


def torchtune(folder: str, files: str, name: str, epochs: int) -> None:
    """As a recipe of torchtune, and saved in the middle of epochs, too."""
    mixin = example("loops/for_torchtune").FromPipeline
    recipe = type("Recipe", (mixin, FullFinetuneRecipe), {})()
    dataset = {"files": files, "tokenizer": "bytes"}
    cfg = {"dataset": dataset, "shuffle": True, "batch_size": B, "epochs": epochs}
    recipe.setup(cfg, Training(Path(folder), name), Path(folder) / "recipe_state.pt")
    recipe.train()


# nanochat and nanoGPT


def _generator(folder: str, name: str, last: int, make: Any) -> None:
    """As nanochat's base_train: the next batch is fetched before the step is over and before it is saved."""
    adapter = example("loops/for_nanochat")
    adapter.NUM_SHARDS = 4  # each packs windows of a thousand documents
    training = Training(Path(folder), name)
    meta = Path(folder) / "meta.json"
    saved = json.loads(meta.read_text()) if meta.exists() else None
    step = 0 if saved is None else saved["step"]
    loader = make(adapter, None if saved is None else saved["dataloader_state_dict"])
    x, y, state = next(loader)
    while step < last:
        if step and step % SAVE_EVERY == 0 and (saved is None or step != saved["step"]):
            content = {"step": step, "dataloader_state_dict": adapter.of_all_ranks(state)}
            if training.rank == 0:
                meta.with_suffix(".new").write_text(json.dumps(content))
                os.replace(meta.with_suffix(".new"), meta)
        assert x.shape == y.shape == (B, T)
        training.step(0, step, x, y, -1)
        x, y, state = next(loader)
        step += 1


def nanochat(folder: str, files: str, name: str, last: int) -> None:
    _generator(
        folder,
        name,
        last,
        lambda adapter, state: adapter.documents(files, "bytes", B, T, "cpu", state),
    )


def nanogpt(folder: str, files: str, name: str, last: int) -> None:
    def make(adapter: Any, state: Any) -> Any:
        return adapter.tokens(files, B, T, "cpu", state)

    _generator(folder, name, last, make)


LOOPS = {loop.__name__: loop for loop in (torchtitan, torchtune, nanochat, nanogpt)}
