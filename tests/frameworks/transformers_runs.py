"""What ranks do in tests of the HF Trainer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import trainpipes as tp
from frameworks.example import example
from frameworks.steps import Steps
from trainpipes.integrations.transformers import PipelineTrainerMixin, Trainer
from trainpipes.testing import digest

#: Rows of a batch.
BATCH = 2
ROWS = 48


def texts(rows: int = ROWS) -> list[dict[str, str]]:
    return [{"text": f"row {i} " + "ab" * (i % 5)} for i in range(rows)]


def rows(count: int = ROWS, filtered: bool = False) -> tp.Pipeline:
    dealt = tp.from_dataset(texts(count)).sharding_filter(num_shards=12)
    mixed = dealt.shuffle(buffer_size=32, seed=0)
    kept = mixed.filter(is_odd) if filtered else mixed
    return kept.tokenize("bytes", max_length=24, labels="text")


def is_odd(row: dict[str, Any]) -> bool:
    return len(row["text"]) % 4 != 2


def pipeline(kind: str) -> tp.Pipeline:
    """A pipeline that makes batches: "counted", "filtered", "packed", or "endless" (and filtered)."""
    if kind == "packed":
        return rows().pack(40).batch(BATCH).pad_collate()
    found = rows(filtered=kind != "counted").batch(BATCH).pad_collate()
    return found.repeat() if kind == "endless" else found


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


class Noting:
    """Notes each batch that is trained on; stands still before a step."""

    notes: Steps
    stand_at: int | None = None

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        if self.state.global_step == self.stand_at:
            time.sleep(1000)
        self.notes.trained_on(int(self.state.epoch or 0), self.state.global_step, inputs)
        return super().training_step(model, inputs, *rest)


class NotingTrainer(Noting, Trainer):
    pass


class OwnTrainer(Noting, PipelineTrainerMixin, transformers.Trainer):
    pass


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def train(
    notes: Path, kind: str, output: Path, resume: Any, stand_at: int | None, given: dict[str, Any]
) -> dict[str, Any]:
    """Train, from a checkpoint or from the start."""
    trainer = NotingTrainer(model(), arguments(output, **given), train_dataset=pipeline(kind))
    trainer.notes, trainer.stand_at = Steps(notes, rank()), stand_at
    trainer.train(resume_from_checkpoint=resume)
    return told(trainer)


def resumed_from(
    folder: Path, kind: str, output: Path, steps: list[int], given: dict[str, Any]
) -> list[dict[str, Any]]:
    """Train on from each of several checkpoints."""
    at = [(step, str(output / f"checkpoint-{step}")) for step in steps]
    return [train(folder / str(n), kind, folder / "new", path, None, given) for n, path in at]


def told(trainer: Any) -> dict[str, Any]:
    weights = {name: w.detach() for name, w in trainer.model.state_dict().items()}
    return {
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "max_steps": trainer.state.max_steps,
        "weights": digest(weights),
    }


class NotingPlainTrainer(Noting, transformers.Trainer):
    pass


def collated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A data collator: texts as bytes, all of one length, as accelerate wants them that sends batches on."""
    ids = torch.tensor([list(row["text"].ljust(20).encode()) for row in rows])
    return {"input_ids": ids, "labels": ids}


def train_plain(notes: Path, output: Path, resume: Any) -> dict[str, Any]:
    """A plain Trainer over rows, which it batches itself."""
    pipe = tp.from_dataset(texts()).sharding_filter(12).shuffle(buffer_size=16, seed=0)
    given = arguments(
        output, num_train_epochs=2, gradient_accumulation_steps=1, per_device_train_batch_size=4,
        remove_unused_columns=False, save_strategy="steps", save_steps=4,
    )  # fmt: skip
    trainer = NotingPlainTrainer(model(), given, train_dataset=pipe, data_collator=collated)
    trainer.notes = Steps(notes, rank())
    trainer.train(resume_from_checkpoint=resume)
    return told(trainer)


def each_by_itself(output: Path) -> list[str]:
    """What is said on CPUs without ``use_cpu``, where the Trainer takes each process for the only one."""
    from trl import SFTConfig

    from frameworks.trl_runs import tokenizer
    from trainpipes.integrations.trl import SFTTrainer

    usual: dict[str, Any] = {
        "max_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(output), **usual)
    trl_args = SFTConfig(output_dir=str(output), gradient_checkpointing=False, bf16=False, **usual)
    said = []
    for trainer in (
        Trainer(model(), args, train_dataset=pipeline("counted")),
        SFTTrainer(
            model(), trl_args, train_dataset=pipeline("counted"), processing_class=tokenizer(),
        ),
    ):  # fmt: skip
        try:
            trainer.train()
        except tp.ConfigError as error:
            said.append(str(error))
    alone = Trainer(
        model(), args, train_dataset=pipeline("counted").distributed(rank=0, world_size=1)
    )
    alone.train()
    return said


def batches_in_a_plain_trainer(output: Path) -> str:
    plain = transformers.Trainer(model(), arguments(output), train_dataset=pipeline("counted"))
    try:
        plain.train()
    except tp.ConfigError as error:
        return str(error)
    return "trained"


def script(given: list[str]) -> dict[str, Any]:
    """Run the script of the docs."""
    return told(example("hf_trainer").main(given))
