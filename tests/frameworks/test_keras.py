"""Keras 3 on torch: ``model.fit`` on a pipeline, resumed by ``Backup``."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
from trainpipes.integrations.keras import Backup, KerasLoader, loader
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


def endless() -> tp.Pipeline:
    return tp.from_arrow(ROWS).shuffle(seed=0).repeat().batch(4).pad_collate().map(pairs)


def filtered() -> tp.Pipeline:
    return tp.from_arrow(ROWS).shuffle(seed=0).filter(even).batch(3).pad_collate().map(pairs)


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


def model(interrupt_after: int = 1000) -> Noting:
    keras.utils.set_random_seed(0)
    made = Noting(interrupt_after)
    made.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return made


class Epochs(keras.callbacks.Callback):
    """Notes the epochs that Keras counts."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begun.append(epoch)


def fit(made: Noting, data: KerasLoader, *callbacks: Any, epochs: int = 3, **options: Any) -> Any:
    return made.fit(
        data, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **options
    )


def test_every_epoch_of_keras_is_one_of_the_pipeline_from_the_first_batch_on() -> None:
    made = model()
    fit(made, loader(counted()))
    pipe = counted()
    assert made.trained == [rows(batch) for _ in range(3) for batch in pipe]
    assert made.trained[:8] != made.trained[8:16]


@pytest.mark.parametrize("pipe", [endless, filtered])
def test_with_steps_per_epoch_each_epoch_goes_on_where_the_one_before_ended(
    pipe: Callable[[], tp.Pipeline],
) -> None:
    made = model()
    fit(made, loader(pipe(), steps_per_epoch=5))
    passes = pipe()
    expected: list[list[int]] = []
    while len(expected) < 15:
        for batch in passes:
            expected.append(rows(batch))
            if len(expected) == 15:
                break
    assert made.trained == expected


@functools.cache
def uninterrupted(pipe: Callable[[], tp.Pipeline], steps: int | None) -> Noting:
    whole = model()
    fit(whole, loader(pipe(), steps_per_epoch=steps), validation_data=loader(counted()))
    return whole


@pytest.mark.parametrize(
    ("pipe", "steps", "save_freq", "stop", "saved"),
    [
        (counted, None, "epoch", 11, 8),
        (counted, None, 2, 11, 10),
        (counted, None, 2, 8, 8),
        (counted, None, 7, 8, 7),
        (counted, 5, 2, 11, 10),
        (endless, 5, 3, 9, 9),
        (endless, 5, "epoch", 9, 5),
        (filtered, 5, 2, 4, 4),
    ],
)
def test_an_interrupted_run_goes_on_with_the_batch_and_the_weights_it_would_have_had(
    tmp_path: Path,
    pipe: Callable[[], tp.Pipeline],
    steps: int | None,
    save_freq: str | int,
    stop: int,
    saved: int,
) -> None:
    whole, held_out = uninterrupted(pipe, steps), loader(counted())
    killed, data = model(stop), loader(pipe(), steps_per_epoch=steps)
    backup = Backup(data, tmp_path, save_freq=save_freq)
    with pytest.raises(KeyboardInterrupt):
        fit(killed, data, backup, validation_data=held_out)
    resumed, data, epochs = model(), loader(pipe(), steps_per_epoch=steps), Epochs()
    backup = Backup(data, tmp_path, save_freq=save_freq)
    fit(resumed, data, backup, epochs, validation_data=held_out)

    assert killed.trained == whole.trained[:stop]
    assert resumed.trained == whole.trained[saved:]
    assert epochs.begun == list(range(saved // len(data), 3))
    for one, other in zip(whole.weights, resumed.weights, strict=True):
        assert torch.equal(one.value, other.value)
    assert len(list(tmp_path.iterdir())) == 1


def test_evaluations_begin_at_the_start_and_leave_training_where_it_stands() -> None:
    made, data = model(), loader(counted())

    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                self.model.evaluate(data, verbose=0)

    fit(made, data, Evaluate(), epochs=2)
    pipe = counted()
    passes = [[rows(batch) for batch in pipe] for _ in range(2)]
    assert made.trained == passes[0] + passes[1]
    assert made.tested == passes[0] * 2
    assert made.predict(loader(counted()), verbose=0).shape == (32, 1)


def test_a_run_that_is_done_is_prolonged_by_more_epochs(tmp_path: Path) -> None:
    whole = model()
    fit(whole, loader(counted()), epochs=3)
    for epochs, trained in ((2, 16), (2, 0), (3, 8)):
        made, data = model(), loader(counted())
        fit(made, data, Backup(data, tmp_path), epochs=epochs)
        assert len(made.trained) == trained
    assert made.trained == whole.trained[16:]


def test_what_keras_cannot_take_is_refused_in_one_sentence(tmp_path: Path) -> None:
    def refused(data: KerasLoader, *callbacks: Any, **options: Any) -> str:
        with pytest.raises((tp.ConfigError, tp.StateError)) as caught:
            fit(model(), data, *callbacks, **options)
        return str(caught.value)

    dicts = tp.from_arrow(ROWS).batch(4).pad_collate()
    assert "return (batch['x'], batch['y'])" in refused(loader(dicts))
    assert "write loader(pipe, steps_per_epoch=n)" in refused(loader(filtered()))
    assert "write loader(pipe, steps_per_epoch=n)" in refused(loader(endless()))
    data = loader(counted())
    assert "write loader(pipe, steps_per_epoch=3)" in refused(
        data, Backup(data, tmp_path), steps_per_epoch=3
    )
    with pytest.raises(tp.ConfigError, match=r"loader\(steps_per_epoch\).*got 0"):
        loader(counted(), steps_per_epoch=0)
    with pytest.raises(tp.ConfigError, match=r"Backup\(save_freq\).*got 'day'"):
        Backup(data, tmp_path, save_freq="day")
    with pytest.raises(tp.ConfigError, match=r"as trainpipes.integrations.keras.loader\(pipe\)"):
        Backup(counted(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(tp.ConfigError, match="takes a trainpipes Pipeline"):
        loader([1, 2])  # type: ignore[arg-type]

    fit(model(), data, Backup(data, tmp_path), epochs=1)
    (saved,) = tmp_path.glob("*/trainpipes.json")
    other = loader(tp.from_arrow(ROWS).shuffle(seed=1).batch(4).pad_collate().map(pairs))
    assert "stages/shuffle/seed: saved 0, now 1" in refused(other, Backup(other, tmp_path))
    content = json.loads(saved.read_text())
    for damaged in ("", "[]", json.dumps({**content, "batch": -1})):
        saved.write_text(damaged)
        assert "give Backup() another folder" in refused(data, Backup(data, tmp_path))


def test_a_keras_that_cannot_start_is_told_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trainpipes.integrations.keras as module

    def imported() -> None:
        spec = importlib.util.spec_from_file_location("again", module.__file__)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))

    with monkeypatch.context() as patch:
        patch.setattr(keras.backend, "backend", lambda: "jax")
        with pytest.raises(tp.ConfigError, match="got the backend 'jax': set KERAS_BACKEND=torch"):
            loader(counted())
    (tmp_path / "keras.py").write_text("import tensorflow_that_is_missing")
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(tp.MissingExtraError, match="set KERAS_BACKEND=torch in the environment"):
        imported()
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(tp.MissingExtraError, match="not installed: pip install keras"):
        imported()


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
        return (
            sorted(found.items())
            if (found := next(iter(digests_by_step(tmp_path / name)), {}))
            else []
        )

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
