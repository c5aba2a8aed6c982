"""What ranks do in tests of the HF Trainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

import trainpipes as tp
from frameworks.example import example
from frameworks.runs import Start, pipeline
from frameworks.runs import texts as all_texts
from trainpipes.integrations.transformers import PipelineTrainerMixin, Trainer
from trainpipes.testing import digest


def rows(count: int) -> tp.Pipeline:
    data = tp.from_dataset(all_texts(count)).sharding_filter(num_shards=4)
    return data.shuffle(buffer_size=32, seed=0).tokenize("bytes", max_length=24, labels="text")


def model() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=258, n_layer=1, n_head=2, n_embd=16, n_positions=64, bos_token_id=0,
        eos_token_id=257,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def arguments(output: Path, **given: Any) -> TrainingArguments:
    usual = {
        "output_dir": str(output), "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "logging_strategy": "no", "save_strategy": "no", "num_train_epochs": 3,
        "gradient_accumulation_steps": 5, "learning_rate": 1e-3,
    }  # fmt: skip
    return TrainingArguments(**{**usual, **given})


class Seeing(Trainer):
    """Notes the rows that it trains on."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.seen: list[str] = []

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        text = bytes(min(one, 255) for one in inputs["input_ids"].flatten().tolist())
        self.seen += re.findall(r"row \d+ ", text.decode("latin1"))
        return super().training_step(model, inputs, *rest)


def trainer(output: Path, pipe: Any, kind: Any = Trainer, **given: Any) -> Any:
    return kind(model(), arguments(output, **given), train_dataset=pipe)


def saves(start: Start) -> dict[str, Any]:
    """The arguments that save as a start says."""
    return {"save_strategy": "steps", "save_steps": start.every} if start.every else {}


class Noting:
    """A trainer that tells its start each batch."""

    start: Start

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        self.start.trained_on(0, self.state.global_step, inputs)
        return super().training_step(model, inputs, *rest, **more)

    def go(self, start: Start) -> dict[str, Any]:
        """Train as a start says."""
        self.start = start
        at = True if start.resume is True else start.checkpoint("checkpoint-{}")
        self.train(resume_from_checkpoint=str(at) if isinstance(at, Path) else at)
        return told(self)


class NotingTrainer(Noting, Trainer):
    pass


class OwnTrainer(Noting, PipelineTrainerMixin, transformers.Trainer):
    pass


class NotingPlainTrainer(Noting, transformers.Trainer):
    pass


class Stop(TrainerCallback):
    """Saves and ends after a step, as if it had been killed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = control.should_save = True


def train(start: Start) -> dict[str, Any]:
    """The adapter; its options are those of the arguments, and "global_batches" with "steps"."""
    given, more = dict(start.options), {}
    if "global_batches" in given:
        more = {
            "callbacks": [Stop(given.pop("steps"))],
            "global_batches": given.pop("global_batches"),
        }
        given |= {"gradient_accumulation_steps": 1, "lr_scheduler_type": "constant"}
        given |= {"num_train_epochs": 4} if start.kind == "counted" else {"max_steps": 100}
    args = arguments(start.saved, **saves(start), **given)
    trainer = NotingTrainer(model(), args, train_dataset=pipeline(start.kind), **more)
    return trainer.go(start)


def told(trainer: Any) -> dict[str, Any]:
    weights = {name: w.detach() for name, w in trainer.model.state_dict().items()}
    return {
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "max_steps": trainer.state.max_steps,
        "weights": digest(weights),
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


def collated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A data collator: texts as bytes, all of one length, as accelerate wants them that sends batches on."""
    ids = torch.tensor([list(row["text"].ljust(20).encode()) for row in rows])
    return {"input_ids": ids, "labels": ids}


def train_plain(start: Start) -> dict[str, Any]:
    """A plain Trainer over 48 rows, which it batches itself."""
    pipe = tp.from_dataset(all_texts(48)).sharding_filter(12).shuffle(buffer_size=16, seed=0)
    args = arguments(
        start.saved, num_train_epochs=2, gradient_accumulation_steps=1, per_device_train_batch_size=4,
        remove_unused_columns=False, **saves(start),
    )  # fmt: skip
    return NotingPlainTrainer(model(), args, train_dataset=pipe, data_collator=collated).go(start)


def script(given: list[str]) -> dict[str, Any]:
    """Run the script of the docs."""
    return told(example("hf_trainer").main(given))
