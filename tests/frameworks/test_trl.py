"""Rows of a pipeline in TRL's trainers: killed, they go on with the batch that would have come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frameworks.ranks import Ranks, run
from frameworks.steps import digests_by_step
from frameworks.trl_runs import refusals, train

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
            saved = folder / "out" / f"checkpoint-{stand // 3 * 3}" / "trainpipes"
            last = stand - 1
            running.kill_when(
                lambda saved=saved, log=log, last=last: (
                    len(list(saved.glob("rank-*.pt"))) == ranks
                    and [last in one for one in by_step(log)] == [True] * ranks
                )
            )
        for rank, batches in enumerate(by_step(log)):
            found[rank] = {**found[rank], **batches}
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
    options = {"packing": True, "packing_strategy": "wrapped", "dataloader_num_workers": 2}
    options["dataloader_multiprocessing_context"] = "fork"  # TRL's own functions do not pickle
    whole = unbroken(tmp_path, "messages", 1, 17, **options)
    assert killed_and_resumed(tmp_path, "messages", 1, 17, [5, 14], **options) == whole


def test_dpo_goes_on_in_its_first_and_its_second_epoch(tmp_path: Path) -> None:
    whole = unbroken(tmp_path, "preference", 1, 29)
    assert killed_and_resumed(tmp_path, "preference", 1, 29, [4, 25]) == whole


def test_where_no_position_can_be_kept_or_found_that_is_said(tmp_path: Path) -> None:
    (said,) = run(refusals, 1, tmp_path / "ranks", str(tmp_path / "out"))
    wanted = [
        "max_steps has to be specified",
        "write pipe.repeat().to_hf(), and say max_steps",
        "the dataset ended at step 2 of 3",
        "train_dataset=pipe.repeat().to_hf(), got Dataset",
        "pass it as callbacks=[PositionCallback()]",
        "trained",
        "say PositionCallback(checkpoint=folder)",
        "trained",
        "dataloader_num_workers: saved 0, now 1",
        "stages: saved from_dataset -> sharding_filter -> shuffle -> repeat, now",
    ]
    assert [
        text if part not in text else part for part, text in zip(wanted, said, strict=True)
    ] == wanted
