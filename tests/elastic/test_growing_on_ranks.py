"""Ranks that read a folder to which files come agree on the files of each epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trainpipes as tp
from elastic.grow_on_ranks import NAMES, ROWS, SAVED, growing, write
from launch import Launch

SCRIPT = Path(__file__).parent / "grow_on_ranks.py"


def rows(folder: Path, leg: str, epoch: int, ranks: int) -> list[Any]:
    """The batches of all ranks, in the order of steps."""
    files = [folder / f"rows-{leg}-{epoch}-{rank}.json" for rank in range(ranks)]
    each = [json.loads(file.read_text()) for file in files]
    assert len({len(one) for one in each}) == 1, "ranks took different numbers of steps"
    return [batch for step in zip(*each, strict=True) for batch in step]


def test_ranks_have_the_same_files_and_a_killed_run_goes_on_with_them(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        write(tmp_path / name, 0)
    first = Launch(SCRIPT, 2, tmp_path / "first", str(tmp_path), "0", str(SAVED[0] + 1))
    first.kill_when(lambda: len(list(tmp_path.glob("saved-*.json"))) == 2)
    rests = {name: check_first(tmp_path / name, first) for name in NAMES}
    for rank in range(2):
        assert "no file matches" in (tmp_path / f"told-{rank}.json").read_text()
    second = Launch(SCRIPT, 4, tmp_path / "second", str(tmp_path), "1", "2")
    assert second.wait(120) == 0, second.said()
    for name, rest in rests.items():
        check_second(tmp_path / name, rest)


def check_first(folder: Path, run: Launch) -> list[Any]:
    """Ranks had the same files in each epoch; what is left of the last one."""
    for epoch in range(SAVED[0]):
        got = [x for batch in rows(folder, "0", epoch, 2) for x in batch]
        assert len(got) == len(set(got))
        files = max(got) // ROWS + 1
        assert epoch < files <= epoch + 2, run.said()
        if folder.name == "counted":
            assert sorted(got) == list(range(ROWS * files))
    alone = tp.Loader(growing(folder))
    alone.load_state_dict(json.loads((folder / "state.json").read_text()))
    return [[row["x"] for row in batch] for batch in alone]


def check_second(folder: Path, rest: list[Any]) -> None:
    """Four ranks went on with the files of the epoch, and began the next one with more."""
    found = rows(folder, "1", SAVED[0], 4)
    assert found
    assert found == rest[: len(found)]
    before = rows(folder, "0", SAVED[0], 2)
    got = [x for batch in before + found for x in batch]
    assert len(got) == len(set(got))
    there = max(x for batch in before + rest for x in batch) // ROWS
    assert max(x for batch in rows(folder, "1", SAVED[0] + 1, 4) for x in batch) // ROWS > there


def test_ranks_read_the_version_of_a_table_that_rank_0_has_opened(tmp_path: Path) -> None:
    run = Launch(SCRIPT.with_name("version_on_ranks.py"), 2, tmp_path / "logs", str(tmp_path))
    assert run.wait(120) == 0, run.said()
    ranks = [json.loads((tmp_path / f"rows-{rank}.json").read_text()) for rank in range(2)]
    first, second, fresh = (sorted(a + b) for a, b in zip(*ranks, strict=True))
    assert first == second == list(range(40))
    assert fresh == list(range(80))
