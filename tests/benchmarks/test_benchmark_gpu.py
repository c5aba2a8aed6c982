"""benchmarks/gpu.py measures what it says; on the CPU, at a toy size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import main, measure, pinned_bound


class Moments:
    """A clock that stands still unless work is done: in whole units."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def finish(self) -> None:
        self.now = -1.0  # marks were taken before

    def between(self, first: float, last: float) -> float:
        return last - first


def batches(clock: Moments, waits: list[float]) -> Iterator[float]:
    for wait in waits:
        clock.now += wait
        yield wait


@pytest.mark.parametrize(("waits", "share", "longest"), [
    ([0.0] * 12, 0.0, 0.0), ([9.0] * 12, 0.9, 9.0), ([50.0] * 2 + [0.0] * 9 + [10.0], 0.5, 10.0)
], ids=["none", "always", "once, and much before it is measured"])  # fmt: skip
def test_the_share_is_that_of_the_time_between_steps(
    waits: list[float], share: float, longest: float
) -> None:
    clock = Moments()

    def step(_: float) -> None:
        clock.now += 1

    found = measure(batches(clock, waits), step, clock, steps=10, warm_up=2)
    assert (found.steps, found.share, found.longest) == (10, share, longest)


def test_pinned_bytes_are_rounded_as_torch_does() -> None:
    batch: dict[str, Any] = {"a": torch.zeros(1000).byte(), "b": torch.zeros(1024), "n": 3}
    assert pinned_bound(batch, 0) == 3 * (1024 + 4096)
    assert pinned_bound(batch, 2) == 7 * (1024 + 4096)


@pytest.mark.slow
@pytest.mark.usefixtures("torch_as_before")
def test_it_runs_and_a_late_source_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--device", "cpu", "--small", "--steps", "3", "--folder", str(tmp_path)]
    assert main([*small, "--delay", "0.05"]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d.]+)% \| ([\d.]+) \| 0 \|$", printed, re.M)
    assert [row[0] for row in rows] == [
        "the same batch", "pretokenised Parquet", "text, cached", "text, tokenized on the way",
    ]  # fmt: skip
    for _, tokens, share, longest in rows:
        assert int(tokens.replace(",", "")) > 0
        assert float(longest) >= 50
        assert float(share) > 1
    assert torch.__version__ in printed


@pytest.mark.parametrize(
    ("given", "said"),
    [(["--device", "cuda"], "sees no CUDA"), (["--device", "tpu"], "cuda or cpu")],
)
def test_a_device_that_cannot_be_timed_is_refused(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(given)
    assert said in capsys.readouterr().err
