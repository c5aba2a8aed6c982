"""Prompts in TRL's trainers that generate: in the order of TRL's sampler, and on after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trainpipes as tp
from frameworks.ranks import run
from frameworks.test_trl import killed_and_resumed, unbroken
from frameworks.trl_runs import other_prompts, prompt_rows
from trainpipes_recipes.prompts import prompts

pytest.importorskip("trl")


@pytest.mark.parametrize(
    ("count", "generations", "per_batch", "times"), [(24, 2, 2, 4), (23, 8, 3, 1), (7, 3, 1, 6)]
)
@pytest.mark.parametrize("world", [1, 2])
def test_the_order_is_that_of_trls_sampler(
    count: int, generations: int, per_batch: int, times: int, world: int
) -> None:
    from trl.trainer.utils import RepeatSampler

    from trainpipes.integrations.transformers.loaders import TrainingLoader

    rows = tp.from_dataset(prompt_rows(count)).sharding_filter(12, split="stride").shuffle(1)
    pipe = prompts(rows, batch_size=per_batch * generations, num_generations=generations)
    loaders = [
        TrainingLoader(tp.Loader(pipe.distributed(rank=rank, world_size=world)), list, times)
        for rank in range(world)
    ]
    found = [
        row["answer"] for step in zip(*loaders, strict=True) for batch in step for row in batch
    ]
    order = [row["answer"] for row in tp.from_dataset(prompt_rows(count))]
    wanted = RepeatSampler(order, generations, per_batch * world, times, shuffle=False)
    assert found == [order[n] for n in wanted]
    assert sum(map(len, loaders)) * per_batch * generations == len(wanted)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_prompts_go_on_after_a_kill(tmp_path: Path, kind: str) -> None:
    whole = unbroken(tmp_path, kind, 1, 28)  # of 24 steps in an epoch
    assert killed_and_resumed(tmp_path, kind, 1, 28, [4, 26]) == whole


def generated(path: Path, rank: int) -> list[Any]:
    return [json.loads(line) for line in Path(f"{path}-generated-{rank}").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "gradient_accumulation_steps": 2}])
def test_two_ranks_have_whole_groups_and_go_on(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = unbroken(tmp_path, "grpo", 2, 14, **options)
    ranks = [generated(tmp_path / "log", rank) for rank in (0, 1)]
    seen = []
    for one, other in zip(*ranks, strict=True):
        assert one[0] == other[0]
        for _, answers in (one, other):
            assert answers[::2] == answers[1::2]
            seen += answers[::2]
    assert len(set(seen[:24])) == min(24, len(seen))
    assert killed_and_resumed(tmp_path, "grpo", 2, 14, [4, 11], **options) == whole


def test_pipelines_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (said,) = run(other_prompts, 1, tmp_path / "ranks", str(tmp_path / "out"))
    for text, part in zip(said, [
        "train_dataset must make batches, got single rows; write train_dataset=tp.recipe(",
        "= 4 rows, each prompt 2 times side by side, got 4; write tp.recipe(",
        "got 8; write",
        "a list of rows with a \"prompt\", got ['input_ids', 'attention_mask', 'labels']",
        "eval_dataset must be a datasets.Dataset",
        "global_batches must be left out where generations are used for several steps",
        "trained",
    ], strict=True):  # fmt: skip
        assert part in text
