"""States of ours in the checkpoints that frameworks write: found, told, and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from frameworks.lightning_runs import Model, make_trainer
from frameworks.transformers_runs import arguments, model
from trainpipes.integrations.accelerate import loader as accelerate_loader
from trainpipes.integrations.lightning import PipelineDataModule
from trainpipes.integrations.transformers import Trainer
from trainpipes.look.checkpoint import read_states, summarize


def pipeline() -> tp.Pipeline:
    rows = [{"input_ids": [n], "labels": [n]} for n in range(40)]
    return tp.from_dataset(rows).shuffle(seed=0).batch(4).pad_collate()


def batches_left(state: Mapping[str, Any]) -> int:
    """How many of its ten batches a pipeline gives from the state on."""
    assert summarize(state)["batches"] == 3
    loader = tp.Loader(pipeline())
    loader.load_state_dict(dict(state))
    return len(list(loader))


def test_the_trainers_checkpoint(tmp_path: Path) -> None:
    given = arguments(tmp_path, max_steps=3, save_strategy="steps", save_steps=3)
    given.gradient_accumulation_steps = 1
    Trainer(model(), given, train_dataset=pipeline()).train()
    for path in (tmp_path, tmp_path / "checkpoint-3"):
        ((where, found),) = read_states(path).items()
        assert where == f'{tmp_path / "checkpoint-3" / "trainpipes.json"} ["loader"]'
        assert batches_left(found) == 7


def test_what_accelerate_saves(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerate_loader(pipeline(), accelerator)
    list(islice(prepared, 3))
    accelerator.save_state(str(tmp_path))
    (found,) = read_states(tmp_path).values()
    assert batches_left(found) == 7


def test_a_stateful_data_loader_that_accelerate_keeps(tmp_path: Path) -> None:
    stateful = StatefulDataLoader(pipeline(), batch_size=None)
    list(islice(stateful, 3))
    torch.save(stateful.state_dict(), tmp_path / "dl_state_dict.bin")
    with pytest.raises(tp.StateError, match="load it into a StatefulDataLoader"):
        read_states(tmp_path)


@pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*LeafSpec:FutureWarning")
def test_lightnings_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.fit(Model(), datamodule=PipelineDataModule(train=pipeline()))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    ((where, found),) = read_states(tmp_path / "last.ckpt").items()
    assert where.endswith('last.ckpt ["PipelineDataModule"]["train"]')
    assert batches_left(found) == 7
