"""Rows of a pipeline in TRL's trainers: killed, they go on with the batch that would have come."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from frameworks.ranks import Ranks, run
from frameworks.steps import digests_by_step
from frameworks.trl_runs import (
    batches,
    evaluated,
    other_batches,
    refusals,
    script,
    train,
    undealt,
    write_samples,
)

pytest.importorskip("trl")


def by_step(log: Path) -> list[dict[int, list[str]]]:
    return [
        {step: digests for (_, step), digests in found.items()} for found in digests_by_step(log)
    ]


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
            # Of rows, each rank saves its position last; of batches, the trainer's state is.
            names = "trainer_state.json" if kind.startswith("recipe") else "trainpipes/rank-*.pt"
            files = 1 if kind.startswith("recipe") else ranks
            running.kill_when(
                lambda checkpoint=checkpoint, log=log, names=names, files=files, last=stand - 1: (
                    len(list(checkpoint.glob(names))) == files
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


def test_on_two_ranks_sft_goes_on_in_the_first_epoch_at_its_end_and_in_the_second(
    tmp_path: Path,
) -> None:
    whole = unbroken(tmp_path, "text", 2, 17)
    assert [len(rank) for rank in whole] == [17, 17]
    # 41 rows: about 10 batches of each rank an epoch
    assert killed_and_resumed(tmp_path, "text", 2, 17, [5, 10, 14]) == whole


def test_packed_by_trl_with_workers_sft_goes_on_as_well(tmp_path: Path) -> None:
    options = {"packing": True, "dataloader_num_workers": 2}
    options["dataloader_multiprocessing_context"] = "fork"  # TRL's own functions do not pickle
    whole = unbroken(tmp_path, "messages", 1, 17, **options)
    assert killed_and_resumed(tmp_path, "messages", 1, 17, [5, 14], **options) == whole


def test_rows_in_our_dpo_trainer_go_on_in_the_first_and_in_the_second_epoch(tmp_path: Path) -> None:
    whole = unbroken(tmp_path, "preference", 1, 29)
    assert killed_and_resumed(tmp_path, "preference", 1, 29, [4, 25]) == whole


@pytest.mark.parametrize("recipe", ["chat", "preference"])
def test_batches_of_recipes_go_on(tmp_path: Path, recipe: str) -> None:
    whole = unbroken(tmp_path, f"recipe {recipe}", 1, 29)
    assert killed_and_resumed(tmp_path, f"recipe {recipe}", 1, 29, [4, 25]) == whole


def test_batches_of_the_sft_recipe_go_on_from_two_ranks_on_one(tmp_path: Path) -> None:
    one = unbroken(tmp_path / "one", "recipe sft", 1, 34)[0]
    two = unbroken(tmp_path / "two", "recipe sft", 2, 15)
    # 20 batches an epoch: 10 steps of two ranks
    in_order = [content for digests in one.values() for content in digests]
    taken = [
        digests[0]
        for steps in zip(*(rank.values() for rank in two), strict=True)
        for digests in steps
    ]
    assert taken == in_order[: len(taken)]
    arguments = str(tmp_path / "out"), str(tmp_path / "log"), "recipe sft", 15, False, 14
    running = Ranks(_train, 2, tmp_path / "ranks", arguments, {})
    saved = tmp_path / "out" / "checkpoint-12" / "trainer_state.json"
    running.kill_when(
        lambda: saved.exists() and all(13 in rank for rank in by_step(tmp_path / "log"))
    )
    resumed = str(tmp_path / "out"), str(tmp_path / "after"), "recipe sft", 20, True
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
    packing, skipping = alone["said"]  # and rows are evaluated on
    assert "several ranks may have different numbers of batches" in ranks[1]["said"][2]
    assert "packing=True is for rows that TRL prepares" in packing
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


def test_where_no_position_can_be_kept_or_found_that_is_said(tmp_path: Path) -> None:
    (said,) = run(refusals, 1, tmp_path / "ranks", str(tmp_path / "out"))
    check(said, [
        "max_steps has to be specified",
        "train_dataset must be the pipeline itself",
        'save_strategy="epoch": rows that the trainer prepares have no epochs that end',
        "put .shuffle(buffer_size) into the pipeline",
        "trained",
        "dataloader_num_workers: saved 0, now 1",
        "stages: saved from_dataset -> sharding_filter -> shuffle -> repeat, now",
        "trained",
        "ranks: saved 2, now 1",
        "is of step 2, and belongs to another checkpoint",
        "is damaged (",
        "is damaged (",
        "is damaged (",
        "has no position of this pipeline's rows",
    ])  # fmt: skip


def check(said: list[str], wanted: list[str]) -> None:
    assert [
        text if part not in text else part for part, text in zip(wanted, said, strict=True)
    ] == wanted


def test_rows_that_are_not_dealt_to_the_ranks_are_refused(tmp_path: Path) -> None:
    for said in run(undealt, 2, tmp_path / "ranks", str(tmp_path / "out")):
        assert "add .sharding_filter() to the pipeline" in said


def test_batches_of_another_kind_are_refused(tmp_path: Path) -> None:
    (said,) = run(other_batches, 1, tmp_path / "ranks", str(tmp_path / "out"))
    check(said, [
        "SFTTrainer trains on batches with 'input_ids', such as those of the recipes sft, chat and pretrain",
        "DPOTrainer trains on batches with 'chosen_input_ids', such as those of the recipe preference",
        "write train_dataset=pipe",
        "SFTTrainer trains on batches with 'labels', such as those of the recipes sft, chat and pretrain",
    ])  # fmt: skip
