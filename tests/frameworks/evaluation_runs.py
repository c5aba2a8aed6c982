"""What ranks do in tests of evaluation by the HF Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import trainpipes as tp
from frameworks.transformers_runs import arguments, model
from trainpipes.integrations.transformers import Trainer


def numbered(rows: int) -> tp.Pipeline:
    """Rows whose first token is their number, of different lengths, in their order."""
    made = [{"text": chr(i + 1) + "ab" * (i % 4)} for i in range(rows)]
    pipe = tp.from_dataset(made).sharding_filter(12, split="stride")
    return pipe.tokenize("bytes", labels="text").batch(4).pad_collate()


def filtered(rows: int) -> tp.Pipeline:
    """The same without every fifth row: how many there are is known at the end only."""
    made = [{"text": chr(i + 1) + "ab" * (i % 4)} for i in range(rows)]
    pipe = tp.from_dataset(made).sharding_filter(12, split="stride").filter(kept)
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
        ("filtered", filtered(34), 0),
        ("one batch", numbered(3), 0),
        ("even", numbered(32), 0),
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
        model(), arguments(output), eval_dataset={"a": numbered(34), "b": filtered(34)}
    )
    found["several"] = trainer.evaluate()
    predicted = trainer.predict(numbered(34))
    found["predicted"] = [int(row[0]) - 1 for row in predicted.label_ids]
    found["shape"] = list(np.shape(predicted.predictions))
    found["predicted loss"] = predicted.metrics["test_loss"]
    return found
