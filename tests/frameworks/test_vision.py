"""Batches of vision_chat are those of TRL's collator; a killed run of the HF Trainer has the same losses."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from frameworks.runs import Start, check_resumes

pytest.importorskip("trl")
Image = pytest.importorskip("PIL.Image")

from frameworks.transformers_runs import NotingTrainer, arguments, saves  # noqa: E402
from trainpipes_recipes import vision_chat  # noqa: E402
from visions import FAMILIES, model_of, processor_of, talks  # noqa: E402

#: Checkpoints of Qwen2-VL name weights otherwise than the model: the Trainer of transformers 5.23 does not
#: find these again.
FAMILY = "idefics3"


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_and_all_else_are_those_of_the_collator(family: str) -> None:
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    rows, processor = talks(10), processor_of(family)
    collate = DataCollatorForVisionLanguageModeling(processor, assistant_only_loss=True)
    (batch,) = vision_chat(
        tp.from_arrow(pa.Table.from_pylist(rows)), processor, batch_size=10, num_shards=1,
        train=False,
    )  # fmt: skip
    own: list[dict[str, Any]] = []
    for row in rows:
        pictures = [Image.open(io.BytesIO(one["bytes"])).convert("RGB") for one in row["images"]]
        own.append({"messages": row["messages"], "images": pictures})
    expected = dict(collate(own))
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(batch[name], torch.as_tensor(value)), name


def train(start: Start) -> dict[str, Any]:
    """The adapter: a small random model."""
    torch.set_num_threads(1)
    packed = start.kind == "packed"
    pipe = vision_chat(
        tp.from_dataset(talks(32)), processor_of(FAMILY), packed=packed, max_length=300,
        batch_size=1 if packed else 2, num_shards=4, seed=1,
    )  # fmt: skip
    args = arguments(
        start.saved, max_steps=8, gradient_accumulation_steps=1, logging_strategy="steps",
        logging_steps=1, **saves(start),
    )  # fmt: skip
    return NotingTrainer(model_of(FAMILY).float(), args, train_dataset=pipe).go(start)


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_a_killed_run_of_the_trainer_goes_on_with_the_same_losses(
    kind: str, tmp_path: Path
) -> None:
    found = check_resumes(train, tmp_path, kind, ranks=1, every=2, holds=(5,))
    assert len(found["whole"].outcome()["losses"]) == 8
