"""Batches of vision_chat are those of TRL's collator."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pytest
import torch

import trainpipes as tp

pytest.importorskip("trl")
Image = pytest.importorskip("PIL.Image")

from trainpipes_recipes import vision_chat  # noqa: E402
from visions import FAMILIES, processor_of, talks  # noqa: E402


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
