"""What ranks do in tests of vision_chat in the HF Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import trainpipes as tp
from frameworks.steps import Steps
from frameworks.transformers_runs import NotingTrainer, arguments, rank, told
from trainpipes_recipes import vision_chat
from visions import model_of, processor_of, talks

#: Checkpoints of Qwen2-VL name weights otherwise than the model: the Trainer of transformers 5.23 does not
#: find these again.
FAMILY = "idefics3"


def train(
    notes: Path, output: Path, packed: bool, resume: Any, stand_at: int | None
) -> dict[str, Any]:
    """Train a small random model; returns what it has come to, and the losses of the steps."""
    torch.set_num_threads(1)
    pipe = vision_chat(
        tp.from_dataset(talks(32)), processor_of(FAMILY), packed=packed, max_length=300,
        batch_size=1 if packed else 2, num_shards=4, seed=1,
    )  # fmt: skip
    given = arguments(
        output, max_steps=8, gradient_accumulation_steps=1, save_strategy="steps", save_steps=2,
        logging_strategy="steps", logging_steps=1,
    )  # fmt: skip
    trainer = NotingTrainer(model_of(FAMILY).float(), given, train_dataset=pipe)
    trainer.notes, trainer.stand_at = Steps(notes, rank()), stand_at
    trainer.train(resume_from_checkpoint=resume)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {**told(trainer), "losses": losses}
