"""Batches of vision_chat are those of TRL's collator; a killed run of the HF Trainer has the same losses."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from frameworks.ranks import Ranks, run
from frameworks.steps import digests_by_step

pytest.importorskip("trl")
Image = pytest.importorskip("PIL.Image")

from frameworks.vision_runs import train  # noqa: E402
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


@pytest.mark.parametrize("packed", [False, True])
def test_a_killed_run_of_the_trainer_goes_on_with_the_same_losses(
    packed: bool, tmp_path: Path
) -> None:
    (whole,) = run(
        train, 1, tmp_path / "whole", tmp_path / "a", tmp_path / "out", packed, None, None
    )
    killed = tmp_path / "killed"
    running = Ranks(train, 1, tmp_path / "kill", tmp_path / "b", killed, packed, None, 5)
    running.kill_when(lambda: any((0, 4) in rank or (1, 4) in rank for rank in notes(tmp_path)))
    (resumed,) = run(train, 1, tmp_path / "end", tmp_path / "c", killed, packed, True, None)
    assert len(whole["losses"]) == 8
    assert resumed == whole


def notes(folder: Path) -> list[dict[tuple[int, int], list[str]]]:
    return digests_by_step(folder / "b")
