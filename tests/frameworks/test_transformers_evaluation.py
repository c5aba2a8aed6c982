"""Evaluation by the HF Trainer: every row once, the same on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest

from frameworks.evaluation_runs import evaluated
from frameworks.ranks import run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What was found on one rank, and on each of two."""
    folder = tmp_path_factory.mktemp("evaluated")
    alone = run(evaluated, 1, folder / "alone", folder / "output-1")
    return alone + run(evaluated, 2, folder / "two", folder / "output-2")


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        ("ragged", list(range(34))),
        ("workers", list(range(34))),
        ("filtered", [row for row in range(34) if (row + 1) % 5]),
        ("one batch", [0, 1, 2]),
        ("even", list(range(32))),
        ("batch by batch", list(range(34))),
    ],
)
def test_metrics_see_every_row_once(found: Any, case: str, rows: list[int]) -> None:
    alone, *both = [rank[case] for rank in found]
    for metrics in (alone, *both):
        assert sorted(metrics["eval_rows"]) == rows
        assert metrics["eval_rows"] == alone["eval_rows"]
        assert metrics.get("eval_sizes", 1) == 1, "as many labels, inputs, losses and predictions"
        assert metrics["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)


def test_several_evaluations_are_told_apart(found: Any) -> None:
    alone, *both = [rank["several"] for rank in found]
    for metrics in both:
        assert metrics["eval_a_loss"] == pytest.approx(found[0]["ragged"]["eval_loss"], rel=1e-5)
        assert metrics["eval_b_loss"] == pytest.approx(found[0]["filtered"]["eval_loss"], rel=1e-5)
    assert alone["eval_a_loss"] != alone["eval_b_loss"]


def test_predictions_come_in_the_order_of_the_rows(found: Any) -> None:
    for rank in found:
        assert rank["predicted"] == list(range(34))
        assert rank["shape"] == found[0]["shape"]
        assert rank["predicted loss"] == pytest.approx(found[0]["predicted loss"], rel=1e-5)
