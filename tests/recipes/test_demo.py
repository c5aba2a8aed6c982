"""The demo: killed runs equal the one left alone, and a comparison that would see it if not."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from interpreters import python
from trained import TRAINER
from trainpipes_recipes import demo
from trainpipes_recipes.demo import Step, differences, read_log
from trainpipes_recipes.samples import function_pairs, write_functions

LOG = [Step(n, f"hash-{n}", 5.0 - n / 100) for n in range(1, 101)]


def renumbered(steps: list[Step]) -> list[Step]:
    return [step._replace(number=n) for n, step in enumerate(steps, start=1)]


MOVED = [*LOG[:3], LOG[7], *LOG[4:7], LOG[3], *LOG[8:]]
NEARLY = math.nextafter(LOG[9].loss, 9)


@pytest.mark.parametrize(("other", "first"), [
    ([], 1),
    (renumbered(LOG[:40] + LOG[41:]), 41),
    (LOG[:-1], 100),
    ([*LOG, LOG[0]], 101),
    (renumbered(LOG[:41] + LOG[40:]), 42),
    ([*LOG[:40], LOG[40]._replace(batch="other"), *LOG[41:]], 41),
    (renumbered(MOVED), 4),
    (MOVED, 4),
    ([*LOG[:9], LOG[9]._replace(loss=NEARLY), *LOG[10:]], 10),
])  # fmt: skip
def test_what_differs_is_seen(other: list[Step], first: int) -> None:
    assert differences(LOG, other)[0] == first


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    one, other = (json.dumps(Step(2, batch, 2.5)) for batch in "ab")
    log.write_text(f"{one}\n{other[:20]}\n\n{other}\n")
    assert read_log(log) == [Step(2, "b", 2.5)]


def test_the_standard_library_makes_a_corpus(tmp_path: Path) -> None:
    pairs = list(function_pairs(every=24))
    assert len(pairs) > 100  # of 3.13, which has fewer modules; 3.11 has more than 150
    prompt, response = random.Random(0).choice(pairs)
    assert prompt.startswith(("def ", "async def "))
    assert response
    paths = write_functions(pairs, tmp_path)
    footers = [pq.read_metadata(path) for path in paths]
    assert sum(footer.num_rows for footer in footers) == len(pairs)
    assert len({footer.num_rows for footer in footers}) == len(paths)
    assert len({footer.row_group(0).num_rows for footer in footers}) == len(paths)


@pytest.mark.parametrize(
    "kills", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["a kill", "as it is"]
)
def test_a_small_demo_ends_well(
    kills: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 24
    if kills == 1:  # each trainer from an interpreter that has torch
        steps = 20  # killed after 17, between two checkpoints
        monkeypatch.setattr(demo, "PYTHON", python(*TRAINER))
        monkeypatch.setattr(demo, "KILLS", demo.KILLS[1:])
        train, small = demo.train, {"batch-size": 8, "max-length": 64}
        monkeypatch.setattr(demo, "train", lambda f, o, *how: train(f, {**o, **small}, *how))
    assert demo.main(["--output", str(tmp_path), "--steps", str(steps), "--every", "24"]) == 0
    said = capsys.readouterr().out
    assert said.count("killed with SIGKILL") == kills
    assert f"All {steps} batches are the same, bit for bit" in said
    log = read_log(tmp_path / "interrupted" / "log.jsonl")
    assert [step.number for step in log] == list(range(1, steps + 1))


def test_the_demo_fails_when_a_batch_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(folder: Path, _: Any, workers: int = 0, until: int | None = None) -> list[Step]:
        if until is not None:
            return LOG[:30]
        return LOG if folder.name == "uninterrupted" else renumbered(LOG[:40] + LOG[41:])

    monkeypatch.setattr(demo, "train", train)
    assert demo.main(["--output", str(tmp_path), "--steps", "100", "--every", "90"]) == 1
    said = capsys.readouterr().out
    assert "  99 batches, 60 lost, repeated or changed (first at 41)" in said
    assert "FAILED" in said
    assert "All" not in said


@pytest.mark.parametrize("options", [["--steps", "3"], ["--every", "0"]])
def test_a_demo_without_a_kill_is_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--output", str(tmp_path), *options])
    assert "--steps must be 4 or more, --every 1 or more" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
