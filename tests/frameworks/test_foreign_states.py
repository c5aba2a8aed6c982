"""What the frameworks themselves save is told apart, and where a state of ours is in it is named."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import lightning
import pytest
import torch
from accelerate import Accelerator
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import TrainerState

import trainpipes as tp


def pipeline() -> tp.Pipeline:
    return tp.from_dataset([{"x": float(i)} for i in range(40)]).shuffle(seed=0).batch(4).collate()


def refusal(state: Any) -> str:
    with pytest.raises(tp.StateError) as caught:
        tp.Loader(pipeline()).load_state_dict(state)
    return str(caught.value)


def xs(run: Any) -> list[list[float]]:
    return [batch["x"].tolist() for batch in run]


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(batch["x"][:, None].float()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_data_sets_state() -> None:
    stream = datasets.Dataset.from_dict({"x": list(range(9))}).to_iterable_dataset()
    next(iter(stream))
    told = refusal(stream.state_dict())
    assert "got the state of a datasets.IterableDataset; load it into the data set" in told


def test_a_trainers_state(tmp_path: Path) -> None:
    TrainerState(global_step=3, epoch=0.3).save_to_json(str(tmp_path / "trainer_state.json"))
    told = refusal(json.loads((tmp_path / "trainer_state.json").read_text()))
    assert "got the trainer_state.json of a Hugging Face Trainer" in told
    assert "resume_from_checkpoint=folder" in told


@pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:Lightning alone does not resume")
def test_lightnings_checkpoint_and_where_our_state_is_in_it(tmp_path: Path) -> None:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", enable_checkpointing=False, **quiet)
    loader = tp.Loader(pipeline())
    trainer.fit(Model(), loader)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    told = refusal(checkpoint)
    assert "got a checkpoint of Lightning; let Lightning load it" in told
    found = re.search(r"write load_state_dict\((state\[.*\])\), which trainpipes saved", told)
    assert found, told
    resumed = tp.Loader(pipeline())
    resumed.load_state_dict(eval(found[1], {"state": checkpoint}))
    assert xs(resumed) == xs(pipeline())[3:]


@pytest.mark.parametrize("of", ["rows", "pipeline"])
def test_what_accelerate_keeps_of_a_stateful_data_loader(of: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    if of == "rows":
        accelerator.dataloader_config.use_stateful_dataloader = True
        loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(40)), batch_size=4))
        list(islice(loader, 3))
        accelerator.save_state(str(tmp_path))
        state = torch.load(tmp_path / "dl_state_dict.bin", weights_only=False)
        assert "(Accelerate keeps one as dl_state_dict.bin) over something else" in refusal(state)
    else:
        stateful = StatefulDataLoader(pipeline(), batch_size=None)
        list(islice(stateful, 3))
        torch.save(stateful.state_dict(), tmp_path / "dl_state_dict.bin")
        resumed = tp.Loader(pipeline())
        resumed.load_state_dict(torch.load(tmp_path / "dl_state_dict.bin", weights_only=False))
        assert xs(resumed) == xs(pipeline())[3:]
