"""Ranks that look ahead, to agree where an epoch ends, hear of an error when its batch is due."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from elastic.errors_on_ranks import uneven
from launch import Launch

SCRIPT = Path(__file__).parent / "errors_on_ranks.py"


def test_a_batch_that_fails_is_raised_at_its_step_and_no_rank_waits(tmp_path: Path) -> None:
    sequence = [[row["x"] for row in batch] for batch in islice(uneven(), 100)]
    cases = [(step, workers, sequence[2 * step + 1][-1]) for step in (6, 29) for workers in (0, 2)]
    named = [f"{workers},{failing}" for _, workers, failing in cases]
    run = Launch(SCRIPT, 2, tmp_path, str(tmp_path), *named)
    assert run.wait(100) == 0, run.said()
    for case, (step, _, failing) in zip(named, cases, strict=True):
        first, second = (
            json.loads((tmp_path / f"errors-{case}-{rank}.json").read_text()) for rank in (0, 1)
        )
        assert first["got"] == sequence[: 2 * step + 1 : 2]
        assert second["got"] == sequence[1 : 2 * step : 2]
        assert all(f"cannot take row {failing}" in text for text in second["told"])
        assert first["told"] == sequence[2 * step + 2 : 2 * step + 6 : 2]
        assert second["state"]["batches"] == 2 * step  # the batch that failed was not given


def test_one_rank_alone_may_ask_whether_a_batch_was_the_last(tmp_path: Path) -> None:
    script = Path(__file__).parent / "lone_questions_on_ranks.py"
    run = Launch(script, 2, tmp_path, str(tmp_path))
    assert run.wait(100) == 0, run.said()
    first, second = (json.loads((tmp_path / f"asked-{rank}.json").read_text()) for rank in (0, 1))
    sequence = [[row["x"] for row in batch] for batch in uneven()]
    for way in ("plain", "placed"):
        steps = len(second[way])
        assert first[way] == sequence[: 2 * steps : 2]
        assert second[way] == sequence[1 : 2 * steps : 2]
        assert first[f"{way} answers"] == [False] * (steps - 1) + [True]
        left = len(sequence) - 2 * steps
        assert left > 0
        assert f"epoch 0: {left} of {len(sequence)} batches" in run.said()
        assert first[f"{way} made"] < 300  # the first batch waits for two, not for sixteen
