"""The HF Trainer over pipelines that make batches: killed and resumed, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frameworks.ranks import Ranks, run
from frameworks.steps import by_step
from frameworks.transformers_runs import (
    batches_in_a_plain_trainer,
    each_by_itself,
    resumed_from,
    script,
    train,
    train_plain,
)

#: For each kind of pipeline: optimizer steps of the first epoch on 2 ranks, and what to train with.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "counted": (3, {"num_train_epochs": 3, "gradient_accumulation_steps": 5}),
    "filtered": (3, {"max_steps": 8, "gradient_accumulation_steps": 3}),
    "packed": (3, {"max_steps": 8, "gradient_accumulation_steps": 2, "dataloader_num_workers": 2}),
    "endless": (3, {"max_steps": 8, "gradient_accumulation_steps": 3}),
}


def sequence(notes: Path) -> list[str]:
    """The digests in the order of the one sequence: ranks take turns."""
    ranks = [[one for step in sorted(rank) for one in rank[step]] for rank in by_step(notes)]
    return [one for turn in zip(*ranks, strict=True) for one in turn]


def since(ranks: list[dict[int, list[str]]], step: int) -> list[dict[int, list[str]]]:
    return [{at: found for at, found in rank.items() if at >= step} for rank in ranks]


def killed_before(
    step: int, expected: list[dict[int, list[str]]], folder: Path, *arguments: Any
) -> None:
    """Train on 2 ranks up to a step, and kill them."""
    notes, *rest, given = arguments
    ranks = Ranks(train, 2, folder, notes, *rest, step, given)
    last = [len(rank[step - 1]) for rank in expected]
    ranks.kill_when(lambda: [len(rank.get(step - 1, [])) for rank in by_step(notes)] == last)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_resumed_exactly(kind: str, tmp_path: Path) -> None:
    first_epoch, given = KINDS[kind]
    saves = {**given, "save_strategy": "steps", "save_steps": 1}
    output = tmp_path / "output"
    told = run(train, 2, tmp_path / "whole", tmp_path / "notes", kind, output, None, None, saves)
    expected = by_step(tmp_path / "notes")
    assert told[0] == told[1]

    # Killed in its first epoch, and in the second: after a checkpoint, and a step more.
    some = {**given, "save_strategy": "steps", "save_steps": 2}
    killed = tmp_path / "killed"
    first, second, third = (tmp_path / f"notes-{part}" for part in (1, 2, 3))
    killed_before(3, expected, tmp_path / "kill-1", first, kind, killed, None, some)
    killed_before(5, expected, tmp_path / "kill-2", second, kind, killed, True, some)
    ended = run(train, 2, tmp_path / "end", third, kind, killed, True, None, some)
    assert by_step(first) == [{at: rank[at] for at in range(3)} for rank in expected]
    assert by_step(second) == [{at: rank[at] for at in range(2, 5)} for rank in expected]
    assert by_step(third) == since(expected, 4)
    assert ended == told

    # At an epoch's very end, and at its start.
    steps = [first_epoch, first_epoch + 1]
    resumed = run(resumed_from, 2, tmp_path / "ends", tmp_path / "at", kind, output, steps, given)
    for place, step in enumerate(steps):
        assert by_step(tmp_path / "at" / str(step)) == since(expected, step)
        assert [rank[place] for rank in resumed] == told


@pytest.mark.parametrize("kind", ["counted", "endless"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_the_sequence(
    kind: str, before: int, after: int, tmp_path: Path
) -> None:
    given = {"gradient_accumulation_steps": 2}
    given |= {"num_train_epochs": 2} if kind == "counted" else {"max_steps": 15}
    saves = {**given, "save_strategy": "steps", "save_steps": 4}
    output = tmp_path / "output"
    told = run(
        train, before, tmp_path / "whole", tmp_path / "notes", kind, output, None, None, saves
    )[0]
    whole = sequence(tmp_path / "notes")
    taken = 4 * 2 * before  # batches of all ranks at the first checkpoint
    resumed = run(resumed_from, after, tmp_path / "on", tmp_path / "at", kind, output, [4], given)
    got = sequence(tmp_path / "at" / "4")
    both = min(len(got), len(whole) - taken)
    assert got[:both] == whole[taken:][:both]
    assert both > len(whole) // 3
    if kind == "counted":  # 24 batches an epoch: as many epochs, in other steps
        assert got == whole[taken:]
        assert resumed[0][0]["epoch"] == told["epoch"] == 2
        assert resumed[0][0]["steps"] == 4 + -(-(24 - taken) // after // 2) + 24 // after // 2
    else:
        assert resumed[0][0]["steps"] == told["steps"] == 15


def test_rows_in_a_plain_trainer_come_once_an_epoch(tmp_path: Path) -> None:
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        told = run(train_plain, ranks, folder / "a", folder / "notes", folder / "output", None)
        found = by_step(folder / "notes")
        steps = 12 // ranks
        assert told[0]["steps"] == 2 * steps
        epochs = [
            [one for rank in found for step in of for one in rank[step]]
            for of in (range(steps), range(steps, 2 * steps))
        ]
        assert len(set(epochs[0])) == len(set(epochs[1])) == 12, "each batch once"
        assert set(epochs[0]) != set(epochs[1]), "in another order"
        saved = folder / "output" / f"checkpoint-{8 if ranks == 2 else 16}"
        again = run(train_plain, ranks, folder / "b", folder / "more", folder / "new", str(saved))
        assert by_step(folder / "more") == since(found, int(saved.name[11:]))
        assert again == told


def test_batches_in_a_plain_trainer_are_refused_on_two_ranks(tmp_path: Path) -> None:
    for text in run(batches_in_a_plain_trainer, 2, tmp_path / "ranks", tmp_path / "output"):
        assert "from trainpipes.integrations.transformers import Trainer" in text


def test_ranks_that_would_each_train_a_model_of_their_own_are_refused(tmp_path: Path) -> None:
    for said in run(each_by_itself, 2, tmp_path / "ranks", tmp_path / "output"):
        assert len(said) == 2
        for text in said:
            assert "2 ranks read this pipeline" in text
            assert "use_cpu=True" in text


def test_the_example_is_resumed(tmp_path: Path) -> None:
    for name, rows in (("rows", 120), ("valid", 10)):
        table = pa.table({"text": [f"{name} {i} " + "x" * (i % 7) for i in range(rows)]})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=20)
    given = ["--files", str(tmp_path / "rows.parquet"), "--valid", str(tmp_path / "valid.parquet")]

    def command(output: str, *more: str) -> list[str]:
        return [*given, "--output", str(tmp_path / output), *more]

    whole = run(script, 2, tmp_path / "a", command("whole"))
    assert whole[0]["steps"] == 16
    assert whole[0]["weights"] == whole[1]["weights"], "one model"
    run(script, 2, tmp_path / "b", command("some", "--epochs", "1", "--save-steps", "4"))
    ended = run(script, 2, tmp_path / "c", command("some"))
    assert ended[0]["steps"] == 16
    assert ended[0]["epoch"] == 2
    assert ended[0]["weights"] == ended[1]["weights"]
