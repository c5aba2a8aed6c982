"""docs/examples/keras_fit.py: ``model.fit`` of Keras 3 on torch, killed and resumed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

os.environ["KERAS_BACKEND"] = "torch"  # before it is imported
pytest.importorskip("keras")

import keras
import torch

import trainpipes as tp
from frameworks.example import example
from frameworks.runs import Start, check_resumes
from trainpipes.testing import digest

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)  # of Keras itself

ROWS = pa.table({"x": [[float(i), 2.0 * i] for i in range(32)], "y": [float(i) for i in range(32)]})


def pairs(batch: dict[str, Any]) -> tuple[Any, Any]:
    return batch["x"], batch["y"]


def even(row: dict[str, Any]) -> bool:
    return bool(row["y"] % 2 == 0)


def counted() -> tp.Pipeline:
    return tp.from_arrow(ROWS).shuffle(seed=0).batch(4).pad_collate().map(pairs)


def filtered() -> tp.Pipeline:
    rows = tp.from_arrow(ROWS).shuffle(seed=0).filter(even).repeat()
    return rows.batch(3).pad_collate().map(pairs)


#: For each kind: the pipeline that trains, and batches of an epoch of Keras.
KINDS: dict[str, tuple[Callable[[], tp.Pipeline], int]] = {
    "all": (lambda: counted().repeat(), 8),
    "filtered": (filtered, 5),
}


def rows(batch: Any) -> list[int]:
    return batch[1].flatten().int().tolist()


class Noting(keras.Sequential):
    """A model that tells its start what it is trained on, and notes what it is evaluated on."""

    def __init__(self, start: Start, step: int):
        super().__init__([keras.layers.Dense(1)])
        self.start, self.step = start, step
        self.tested: list[list[int]] = []

    def train_step(self, data: Any) -> Any:
        self.start.trained_on(0, self.step, {"input_ids": data[1]})
        self.step += 1
        return super().train_step(data)

    def test_step(self, data: Any) -> Any:
        self.tested.append(rows(data))
        return super().test_step(data)


def fit(start: Start) -> Noting:
    """Train as the script does."""
    script, (made, steps) = example("keras_fit"), KINDS[start.kind]
    script.SAVE_EVERY = start.every or 1000
    keras.utils.set_random_seed(0)
    model = Noting(start.begin(), start.step())
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    script.fit(model, script.Batches(made(), steps), script.Batches(counted(), 8), start.saved)
    return model


def train(start: Start) -> list[str]:
    """The adapter: the weights that it has come to."""
    return [digest(weights.value.detach()) for weights in fit(start).weights]


@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_begin_anew_in_every_epoch(kind: str, tmp_path: Path) -> None:
    model = fit(Start(tmp_path, tmp_path / "saved", kind))
    assert model.tested == [rows(batch) for batch in counted()] * 3


@pytest.mark.parametrize(("kind", "holds"), [("all", (8, 11)), ("filtered", (4,))])
def test_a_killed_run_goes_on_with_the_batch_and_the_weights_it_would_have_had(
    tmp_path: Path, kind: str, holds: tuple[int, ...]
) -> None:
    made, steps = KINDS[kind]
    expected = [[digest(y) for _, y in islice(made(), 3 * steps)]]
    found = check_resumes(
        train, tmp_path, kind, ranks=1, every=2, holds=holds, expected=expected, ends=True
    )
    assert len(list(found["part-0"].saved.iterdir())) == 1


class Stop(keras.callbacks.Callback):
    """Interrupts after so many batches."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_the_script_of_the_docs_goes_on(tmp_path: Path) -> None:
    texts = pa.table({"text": [f"row {i} " + "x" * (i % 9) for i in range(48)]})
    pq.write_table(texts, tmp_path / "rows.parquet", row_group_size=20)
    pq.write_table(texts.slice(0, 10), tmp_path / "held-out.parquet")
    files = [
        "--files",
        str(tmp_path / "rows.parquet"),
        "--held-out",
        str(tmp_path / "held-out.parquet"),
    ]
    script, run = example("keras_fit"), [*files, "--folder", str(tmp_path / "run")]
    whole = script.main([*files, "--folder", str(tmp_path / "whole")])
    with suppress(KeyboardInterrupt):
        script.main(run, [Stop(17)])  # of 36 in three epochs
    (saved,) = (tmp_path / "run").glob("step-*")
    assert saved.name == "step-00000015"
    resumed = script.main(run)
    for one, other in zip(whole.weights, resumed.weights, strict=True):
        assert torch.equal(one.value, other.value)
