"""Ranks that read a folder to which files come agree on the files of each epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trainpipes as tp
from elastic.grow_on_ranks import ROWS, SAVED, growing, write
from launch import Launch

SCRIPT = Path(__file__).parent / "grow_on_ranks.py"


def rows(out: Path, leg: str, epoch: int, ranks: int) -> list[Any]:
    """The batches of all ranks, in the order of steps."""
    each = [json.loads((out / f"rows-{leg}-{epoch}-{r}.json").read_text()) for r in range(ranks)]
    assert len({len(one) for one in each}) == 1, "ranks took different numbers of steps"
    return [batch for step in zip(*each, strict=True) for batch in step]


@pytest.mark.parametrize("name", ["counted", "filtered"])
def test_ranks_have_the_same_files_and_a_killed_run_goes_on_with_them(
    tmp_path: Path, name: str
) -> None:
    folder, out = tmp_path / "data", tmp_path / name
    folder.mkdir()
    out.mkdir()
    write(folder, 0)
    first = Launch(SCRIPT, 2, tmp_path / "first", str(folder), str(out), "0", "4")
    first.kill_when((out / "state.json").exists)
    for epoch in range(SAVED[0]):
        got = [x for batch in rows(out, "0", epoch, 2) for x in batch]
        assert len(got) == len(set(got))
        files = max(got) // ROWS + 1
        assert epoch < files <= epoch + 2, first.said()
        if name == "counted":
            assert sorted(got) == list(range(ROWS * files))
    state = json.loads((out / "state.json").read_text())
    alone = tp.Loader(growing(folder, name == "filtered"))
    alone.load_state_dict(state)
    rest = [[row["x"] for row in batch] for batch in alone]
    second = Launch(SCRIPT, 4, tmp_path / "second", str(folder), str(out), "1", "2")
    assert second.wait(120) == 0, second.said()
    found = rows(out, "1", SAVED[0], 4)
    assert found
    assert found == rest[: len(found)]
    before = rows(out, "0", SAVED[0], 2)
    got = [x for batch in before + found for x in batch]
    assert len(got) == len(set(got))
    there = max(x for batch in before + rest for x in batch) // ROWS
    assert max(x for batch in rows(out, "1", SAVED[0] + 1, 4) for x in batch) // ROWS > there


def test_what_rank_0_cannot_list_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    run = Launch(SCRIPT, 2, tmp_path / "run", str(tmp_path / "data"), str(tmp_path), "0", "1")
    assert run.wait(100) != 0
    assert "no file matches" in run.said()
