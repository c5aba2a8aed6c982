"""What the comparison of resumes says of what libraries gave."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from interpreters import python

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.elastic import RUNS, run, tally, write_rows


def part(*ranks: list[list[int]], after: list[list[list[int]]] | None = None) -> list[Any]:
    rest = after or [[] for _ in ranks]
    return [{"before": rank, "after": left} for rank, left in zip(ranks, rest, strict=True)]


@pytest.mark.parametrize(
    ("resumed", "said"),
    [
        ([[[4, 5], [6, 7]]], "each row once, the same batches"),
        ([[[4], [6]], [[5], [7]]], "each row once, the same steps"),
        ([[[6, 7], [4, 5]]], "each row once, in another order"),
        ([[[4, 5], [4, 5]]], "2 lost, 2 repeated"),
        ([[[3, 4], [5, 6], [7]]], "0 lost, 1 repeated"),
        ([[[3, 4], [5, 6]]], "1 lost, 1 repeated"),
    ],
)
def test_rows_after_a_resume_are_compared_with_those_of_the_run_that_went_on(
    resumed: list[list[list[int]]], said: str
) -> None:
    first = part([[0, 1], [2, 3]], after=[[[4, 5], [6, 7]]])
    assert str(tally([first, part(*resumed)])) == said


def test_an_error_of_a_rank_is_what_the_cell_says() -> None:
    assert str(tally([[{"before": [], "after": [], "error": "IndexError"}]])) == "IndexError"


@pytest.mark.slow
def test_trainpipes_gives_the_same_batches_to_three_ranks(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows")
    found = run(Path(python()[0]), "trainpipes", tmp_path, RUNS["2 to 3 ranks"])
    assert str(found) == "each row once, the same batches"
