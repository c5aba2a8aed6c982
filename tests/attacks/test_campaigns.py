"""Campaigns: what they find is counted and said, and the docs have the table of a run that found nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attacks import __main__ as campaigns
from attacks.rounds import Round


def test_what_a_campaign_finds_is_counted_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds(folder: Path, draw: random.Random) -> Iterator[Round]:
        assert folder.is_dir()
        yield lambda: iter(["exact", "named", "two rows of three"])
        yield lambda: iter([str(1 / 0)])
        yield lambda: iter(["exact"])

    monkeypatch.setitem(campaigns.ATTACKS, "here", ("a test", finds))
    came, wrong = campaigns.run("here", 1, 60)
    assert came == {"exact": 2, "named": 1, "wrong": 2}
    assert wrong[0] == "round 0: two rows of three"
    assert "ZeroDivisionError" in wrong[1]
    assert campaigns.line("here", came) == "| a test | 5 | 2 | 1 | 2 |\n"
    assert campaigns.run("here", 1, 0)[0] == {"exact": 1, "named": 1, "wrong": 1}


def test_the_docs_have_a_row_for_each_campaign_and_nothing_wrong() -> None:
    (table,) = campaigns.TABLE.findall(campaigns.PAGE.read_text())
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [about for about, _ in campaigns.ATTACKS.values()]
    assert all(int(row[1].replace(",", "")) > 0 and row[4] == "0" for row in rows)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_half_an_hour_of_campaigns_finds_nothing() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.attacks", "--minutes", "30"]
    done = subprocess.run(command, cwd=campaigns.TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
