"""Evaluation by the HF Trainer: every row once, the same on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainpipes as tp
from frameworks.ranks import run
from frameworks.transformers_runs import arguments, model
from trainpipes.integrations.transformers import Trainer


def numbered(rows: int, filtered: bool = False) -> tp.Pipeline:
    """Rows whose first token is their number, of different lengths, in their order; or without every fifth
    one, so that how many there are is known at the end only."""
    data = [{"text": chr(i + 1) + "ab" * (i % 4)} for i in range(rows)]
    pipe = tp.from_dataset(data).sharding_filter(12, split="stride")
    pipe = pipe.filter(kept) if filtered else pipe
    return pipe.tokenize("bytes", labels="text").batch(4).pad_collate()


def kept(row: dict[str, Any]) -> bool:
    return ord(row["text"][0]) % 5 > 0


def first_tokens(predicted: Any) -> dict[str, Any]:
    """Which rows were counted, in which order, and how many of each there are of all that is gathered."""
    labels, inputs = predicted.label_ids, predicted.inputs
    sizes = {len(labels), len(inputs), len(predicted.losses), len(predicted.predictions)}
    return {"rows": [int(row[0]) - 1 for row in inputs], "sizes": len(sizes)}


class Batchwise:
    """Metrics that are computed batch by batch."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, predicted: Any, compute_result: bool) -> dict[str, Any]:
        labels = predicted.label_ids
        self.rows += [int(row[0]) - 1 for row in labels.tolist()]
        found = {"rows": self.rows}
        if compute_result:
            self.rows = []
        return found


def evaluated(output: Path) -> dict[str, Any]:
    """Evaluations of several kinds."""
    found: dict[str, Any] = {}
    for name, pipe, workers in (
        ("ragged", numbered(34), 0),
        ("workers", numbered(34), 2),
        ("filtered", numbered(34, filtered=True), 0),
        ("one batch", numbered(3), 0),
        ("even", numbered(32), 0),
        ("shared", numbered(34).distributed(rank=0, world_size=1), 0),
    ):
        given = arguments(
            output, include_for_metrics=["inputs", "loss"], dataloader_num_workers=workers
        )
        trainer = Trainer(model(), given, eval_dataset=pipe, compute_metrics=first_tokens)
        trainer.evaluate()
        found[name] = trainer.evaluate()  # the second one gives the same rows
    batchwise = arguments(output, batch_eval_metrics=True)
    trainer = Trainer(model(), batchwise, eval_dataset=numbered(34), compute_metrics=Batchwise())
    found["batch by batch"] = trainer.evaluate()
    trainer = Trainer(
        model(),
        arguments(output),
        eval_dataset={"a": numbered(34), "b": numbered(34, filtered=True)},
    )
    found["several"] = trainer.evaluate()
    predicted = trainer.predict(numbered(34))
    found["predicted"] = [int(row[0]) - 1 for row in predicted.label_ids]
    shared = trainer.predict(numbered(34).distributed(rank=0, world_size=1))
    found["shared predicted"] = [int(row[0]) - 1 for row in shared.label_ids]
    found["shape"] = list(np.shape(predicted.predictions))
    found["predicted loss"] = predicted.metrics["test_loss"]
    return found


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
        ("shared", list(range(34))),
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
        assert rank["predicted"] == rank["shared predicted"] == list(range(34))
        assert rank["shape"] == found[0]["shape"]
        assert rank["predicted loss"] == pytest.approx(found[0]["predicted loss"], rel=1e-5)
