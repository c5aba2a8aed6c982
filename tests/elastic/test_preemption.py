"""The script of docs/preemption.md: ranks leave after the same step, and go on with the next batch."""

from __future__ import annotations

import re
import signal
from itertools import islice
from pathlib import Path

import pytest
import torch

from elastic.test_docs_examples import EXAMPLES, TORCH_ABORTS, script
from elastic.test_docs_examples import rows as rows
from launch import Launch
from trainpipes.testing import digest

SCRIPT = EXAMPLES / "preemption.py"
STEPS = 12


def trained_on(said: str) -> dict[int, dict[int, str]]:
    """The digests of batches, by step and rank."""
    found: dict[int, dict[int, str]] = {}
    for step, rank, content in re.findall(r"step (\d+), rank (\d): ([0-9a-f]{16})", said):
        assert int(rank) not in found.setdefault(int(step), {})
        found[int(step)][int(rank)] = content
    return found


def in_turn(steps: dict[int, dict[int, str]]) -> list[str]:
    """The batches of all ranks as one sequence."""
    assert all(sorted(ranks) == [0, 1] for ranks in steps.values())
    return [steps[step][rank] for step in sorted(steps) for rank in (0, 1)]


def leaves(launch: Launch, send: str) -> None:
    """Send SIGTERM to one rank, or to torchrun, once some steps are done."""
    launch.wait_until(lambda: len(trained_on(launch.said())) >= 5)
    launcher = launch.launcher()
    if send == "torchrun":
        launcher.send_signal(signal.SIGTERM)
        assert launch.wait(60) != 0
    else:
        assert len(launcher.children()) == 2
        launcher.children()[-1].send_signal(signal.SIGTERM)
        assert launch.wait(60) == 0 or TORCH_ABORTS in launch.said(), launch.said()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("send", ["one rank", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_ranks_leave_together_and_go_on_with_the_next_batch(
    send: str, rows: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "run.pt"
    options = [str(rows), str(saved)]
    forks = send != "torchrun"  # which sends it to each rank's group of processes
    arguments = [*options, "10000", "2"]
    first = Launch(SCRIPT, 2, tmp_path / "first", *arguments, trains=True, forks=forks)
    leaves(first, send)
    before = trained_on(first.said())
    left = int(torch.load(saved, weights_only=True)["step"])
    assert sorted(before) == list(range(1, left + 1))
    assert len(re.findall(rf"rank . leaves after step {left} of 10000$", first.said(), re.M)) == 2
    assert "Error" not in first.said().split("Traceback (most recent call last)")[0]

    again = Launch(SCRIPT, 2, tmp_path / "again", *options, str(left + STEPS), trains=True)
    assert again.wait(120) == 0 or TORCH_ABORTS in again.said(), again.said()
    after = trained_on(again.said())
    assert sorted(after) == list(range(left + 1, left + STEPS + 1))
    whole = islice(script("preemption").pipeline(str(rows)), 2 * (left + STEPS))
    assert in_turn({**before, **after}) == [digest(batch) for batch in whole]
