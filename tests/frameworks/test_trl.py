"""Batches of recipes in TRL's trainers: killed, they go on with the batch that would have come."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from frameworks.ranks import Ranks, run
from frameworks.steps import by_step
from frameworks.trl_runs import batches, evaluated, other_batches, script, train, write_samples

pytest.importorskip("trl")


def killed_and_resumed(
    folder: Path, kind: str, ranks: int, steps: int, stand_at: list[int], **options: Any
) -> list[dict[int, list[str]]]:
    """The batches of a run that is killed at these steps, each time some after a checkpoint."""
    found: list[dict[int, list[str]]] = [{} for _ in range(ranks)]
    resume = False
    for number, stand in enumerate([*stand_at, None]):
        log = folder / f"log-{number}"
        arguments = str(folder / "out"), str(log), kind, steps, resume, stand
        running = Ranks(_train, ranks, folder / f"ranks-{number}", arguments, options)
        if stand is None:
            running.wait()
        else:
            checkpoint = folder / "out" / f"checkpoint-{stand // 3 * 3}"
            running.kill_when(
                lambda checkpoint=checkpoint, log=log, last=stand - 1: (
                    (checkpoint / "trainer_state.json").exists()
                    and [last in one for one in by_step(log)] == [True] * ranks
                )
            )
        for rank, taken in enumerate(by_step(log)):
            found[rank] = {**found[rank], **taken}
        resume = True
    return found


def _train(arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    return train(*arguments, **options)


def unbroken(folder: Path, kind: str, ranks: int, steps: int, **options: Any) -> Any:
    arguments = str(folder / "whole"), str(folder / "log"), kind, steps
    run(_train, ranks, folder / "ranks", arguments, {**options, "save_strategy": "no"})
    return by_step(folder / "log")


@pytest.mark.parametrize("recipe", ["chat", "packed sft", "preference"])
def test_batches_of_recipes_go_on(tmp_path: Path, recipe: str) -> None:
    whole = unbroken(tmp_path, recipe, 1, 24)  # of 20 batches in an epoch
    assert killed_and_resumed(tmp_path, recipe, 1, 24, [4, 22]) == whole


def test_batches_of_the_sft_recipe_go_on_from_two_ranks_on_one(tmp_path: Path) -> None:
    one = unbroken(tmp_path / "one", "sft", 1, 34)[0]
    two = unbroken(tmp_path / "two", "sft", 2, 15)
    # 20 batches an epoch: 10 steps of two ranks
    in_order = [content for digests in one.values() for content in digests]
    taken = [
        digests[0]
        for steps in zip(*(rank.values() for rank in two), strict=True)
        for digests in steps
    ]
    assert taken == in_order[: len(taken)]
    arguments = str(tmp_path / "out"), str(tmp_path / "log"), "sft", 15, False, 14
    running = Ranks(_train, 2, tmp_path / "ranks", arguments, {})
    saved = tmp_path / "out" / "checkpoint-12" / "trainer_state.json"
    running.kill_when(
        lambda: saved.exists() and all(13 in rank for rank in by_step(tmp_path / "log"))
    )
    resumed = str(tmp_path / "out"), str(tmp_path / "after"), "sft", 20, True
    run(_train, 1, tmp_path / "rank", resumed, {})
    (after,) = by_step(tmp_path / "after")
    assert [digests[0] for digests in after.values()] == in_order[24 : 24 + 8]


def test_the_docs_script_goes_on_after_a_kill(tmp_path: Path) -> None:
    run(write_samples, 1, tmp_path / "writing", str(tmp_path))
    arguments = ["--files", f"{tmp_path}/pairs.jsonl", "--tokenizer", f"{tmp_path}/tokenizer"]
    arguments += ["--save-steps", "3", "--batch-size", "4", "--epochs"]
    options = [*arguments, "2", "--output"]
    whole = run(script, 2, tmp_path / "a", [*options, f"{tmp_path}/whole"])[0]
    assert [step for step, _ in whole] == list(range(1, 15))
    out = tmp_path / "out"
    running = Ranks(script, 2, tmp_path / "b", [*options, str(out)])
    running.kill_when(lambda: is_whole(out / "checkpoint-6"))
    for checkpoint in out.glob("checkpoint-*"):  # that it was killed in
        if not is_whole(checkpoint):
            shutil.rmtree(checkpoint)
    assert run(script, 2, tmp_path / "c", [*options, str(out)])[0] == whole


def is_whole(checkpoint: Path) -> bool:
    """Whether the trainer has come to the end of the file that it writes last, and not in one go."""
    path = checkpoint / "trainer_state.json"
    return path.exists() and path.read_text().endswith("}\n")


def test_an_evaluation_on_batches_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    (alone,) = run(evaluated, 1, tmp_path / "one", str(tmp_path / "out-1"))
    ranks = run(evaluated, 2, tmp_path / "two", str(tmp_path / "out-2"))
    for rank in ranks:
        for name in ("sft", "preference"):
            assert rank[name] == pytest.approx(alone[name], rel=1e-5)
            assert len(set(map(round, rank[name]))) == 1
            assert len(rank[name]) == 3
    packing, skipping = alone["said"]
    assert "packing must be off for a pipeline that makes batches" in packing
    assert "packed=True of the recipes sft and chat" in packing
    assert "skip_prepare_dataset" in skipping


def test_batches_of_preferences_are_as_trl_makes_them_of_their_ids() -> None:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    from trainpipes.integrations.trl import preference_batch

    batch = next(iter(batches("preference")))
    rows = []
    for number in range(2):
        row = {}
        for side in ("chosen", "rejected"):
            length = int(batch[f"{side}_attention_mask"][number].sum())
            ids = batch[f"{side}_input_ids"][number, :length]
            answer = batch[f"{side}_labels"][number, :length] != -100
            row |= {"prompt_ids": ids[~answer].tolist(), f"{side}_ids": ids[answer].tolist()}
        rows.append(row)
    wanted, found = DataCollatorForPreference(pad_token_id=0)(rows), preference_batch(batch)
    found["input_ids"] *= found["attention_mask"]
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def check(said: list[str], wanted: list[str]) -> None:
    assert [
        text if part not in text else part for part, text in zip(wanted, said, strict=True)
    ] == wanted


def test_batches_of_another_kind_are_refused(tmp_path: Path) -> None:
    (said,) = run(other_batches, 1, tmp_path / "ranks", str(tmp_path / "out"))
    check(said, [
        "a batch of SFTTrainer must be one with input_ids, labels, as the recipe sft makes it",
        "a batch of DPOTrainer must be one with chosen_input_ids, rejected_input_ids, chosen_labels",
        "write train_dataset=pipe",
        "a batch of SFTTrainer must be one with labels, as the recipe sft makes it",
        "train_dataset must make batches, got single rows; write train_dataset=tp.recipe('sft',",
        "train_dataset must be the pipeline itself",
        "eval_dataset must make batches, got single rows; write eval_dataset=tp.recipe('sft',",
    ])  # fmt: skip
