"""States of ours in the checkpoints that frameworks write: found, told, and loaded."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import TrainingArguments

import trainpipes as tp
from trainpipes.integrations.accelerate import loader as accelerate_loader
from trainpipes.integrations.lightning import PipelineDataModule
from trainpipes.integrations.transformers import Trainer
from trainpipes.look.checkpoint import fits, read_states, summarize


def rows() -> tp.Pipeline:
    return tp.from_dataset([{"x": float(i), "labels": float(i)} for i in range(40)]).shuffle(seed=0)


def pipeline() -> tp.Pipeline:
    return rows().batch(4).collate()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x[:, None].float())[:, 0] - labels).abs().mean()}


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), max_steps=3, save_steps=3, report_to=[], use_cpu=True,
        disable_tqdm=True, **options,
    )  # fmt: skip


def test_the_trainers_checkpoint(tmp_path: Path) -> None:
    Trainer(Net(), arguments(tmp_path), train_dataset=pipeline()).train()
    for path in (tmp_path, tmp_path / "checkpoint-3"):
        (found,) = read_states(path)
        assert found.path == str(tmp_path / "checkpoint-3" / "trainpipes.json")
        assert found.keys == '["loader"]'
        assert summarize(found).batches == 3
        assert fits([found], pipeline()) == 0.3


def test_what_accelerate_saves(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerate_loader(pipeline(), accelerator)
    list(islice(prepared, 3))
    accelerator.save_state(str(tmp_path))
    (found,) = read_states(tmp_path)
    assert summarize(found).batches == 3
    assert fits([found], pipeline()) == 0.3


def test_a_stateful_data_loader_that_accelerate_keeps(tmp_path: Path) -> None:
    stateful = StatefulDataLoader(pipeline(), batch_size=None)
    list(islice(stateful, 3))
    torch.save(stateful.state_dict(), tmp_path / "dl_state_dict.bin")
    with pytest.raises(tp.StateError, match="load it into a StatefulDataLoader"):
        read_states(tmp_path)


@pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*LeafSpec:FutureWarning")
def test_lightnings_checkpoint(tmp_path: Path) -> None:
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", enable_checkpointing=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), datamodule=PipelineDataModule(train=pipeline()))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    (found,) = read_states(tmp_path / "last.ckpt")
    assert found.keys == '["PipelineDataModule"]["train"]'
    assert summarize(found).batches == 3
    assert fits([found], pipeline()) == 0.3
