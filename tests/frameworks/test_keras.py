"""docs/examples/keras_fit.py: ``model.fit`` of Keras 3 on torch, killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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
from frameworks.steps import digests_by_step
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
    "counted": (lambda: counted().repeat(), 8),
    "filtered": (filtered, 5),
}


def rows(batch: Any) -> list[int]:
    return batch[1].flatten().int().tolist()


class Noting(keras.Sequential):
    """A model that notes what it is trained on."""

    def __init__(self, interrupt_after: int = 1000):
        super().__init__([keras.layers.Dense(1)])
        self.trained: list[list[int]] = []
        self.tested: list[list[int]] = []
        self.interrupt_after = interrupt_after

    def train_step(self, data: Any) -> Any:
        if len(self.trained) == self.interrupt_after:
            raise KeyboardInterrupt
        self.trained.append(rows(data))
        return super().train_step(data)

    def test_step(self, data: Any) -> Any:
        self.tested.append(rows(data))
        return super().test_step(data)


def fit(folder: Path, kind: str, interrupt_after: int = 1000) -> Noting:
    """Train as the script does, until it is interrupted or done."""
    script, (made, steps) = example("keras_fit"), KINDS[kind]
    script.SAVE_EVERY = 2
    keras.utils.set_random_seed(0)
    model = Noting(interrupt_after)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    with suppress(KeyboardInterrupt):
        script.fit(model, script.Batches(made(), steps), script.Batches(counted(), 8), folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_every_epoch_goes_on_where_the_one_before_ended_and_evaluations_begin_anew(
    kind: str, tmp_path: Path
) -> None:
    model = fit(tmp_path, kind)
    made, steps = KINDS[kind]
    assert model.trained == [rows(batch) for batch in islice(made(), 3 * steps)]
    assert model.tested == [rows(batch) for batch in counted()] * 3


@pytest.mark.parametrize(
    ("kind", "stop"),
    [("counted", 3), ("counted", 8), ("counted", 11), ("filtered", 4), ("filtered", 11)],
)
def test_an_interrupted_run_goes_on_with_the_batch_and_the_weights_it_would_have_had(
    tmp_path: Path, kind: str, stop: int
) -> None:
    whole = fit(tmp_path / "whole", kind)
    killed, resumed = fit(tmp_path / "run", kind, stop), fit(tmp_path / "run", kind)
    assert killed.trained == whole.trained[:stop]
    assert resumed.trained == whole.trained[stop // 2 * 2 :]
    for one, other in zip(whole.weights, resumed.weights, strict=True):
        assert torch.equal(one.value, other.value)
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_a_backup_of_other_data_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, "counted", 4)
    with pytest.raises(tp.StateError, match="stages: saved"):
        fit(tmp_path, "filtered")


@pytest.mark.timeout(200)
def test_the_script_of_the_docs_is_killed_and_goes_on(tmp_path: Path) -> None:
    texts = pa.table({"text": [f"row {i} " + "x" * (i % 9) for i in range(48)]})
    pq.write_table(texts, tmp_path / "rows.parquet", row_group_size=20)
    pq.write_table(texts.slice(0, 10), tmp_path / "held-out.parquet")

    def started(name: str) -> subprocess.Popen[bytes]:
        files = [str(tmp_path / f"{which}.parquet") for which in ("rows", "held-out")]
        arguments = ["--files", files[0], "--held-out", files[1], "--folder", str(tmp_path / "run")]
        code = "import sys; from frameworks.keras_runs import script; script(*sys.argv[1:])"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code, str(tmp_path / name), *arguments]
        return subprocess.Popen(command, env=environment)

    def trained(name: str) -> list[tuple[tuple[int, int], list[str]]]:
        return sorted(next(iter(digests_by_step(tmp_path / name)), {}).items())

    killed = started("killed")
    while killed.poll() is None and len(trained("killed")) < 17:
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert started("resumed").wait() == 0

    pipe = example("keras_fit").pipeline(str(tmp_path / "rows.parquet"))
    expected = [(epoch, digest(x)) for epoch in range(3) for x, _ in pipe]
    before, after = (
        [(epoch, content) for (epoch, _), (content,) in trained(name)]
        for name in ("killed", "resumed")
    )
    assert len(set(expected)) == 36
    assert before == expected[: len(before)]
    assert after == expected[36 - len(after) :]
    assert 36 - len(before) <= len(after) < 36 - 10
