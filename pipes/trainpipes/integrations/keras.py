"""A loader for ``model.fit`` of Keras 3 on torch, and a callback that saves weights and position together.

Keras takes a ``DataLoader`` and asks it for an iterator for each epoch, and for others besides: before it
trains, to learn the shapes of a batch; at an epoch's end, one that it may not use; and for each evaluation.
So a plain ``DataLoader`` over a pipeline loses its first epoch, or the rest of one that it should resume.
This loader tells by the call stack who asks: for shapes there is a batch to look at, an evaluation begins at
the pipeline's start, and the position is that of training alone.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from trainpipes.callers import callers
from trainpipes.checks import whole_number
from trainpipes.cursor import is_count
from trainpipes.errors import ConfigError, MissingExtraError, StateError
from trainpipes.extra import need
from trainpipes.loader import Loader
from trainpipes.pipeline import Pipeline
from trainpipes.shown import shown

need("keras", "trainpipes.integrations.keras")

try:
    import keras
except ImportError as error:
    raise MissingExtraError(
        f"Keras runs on TensorFlow unless it is told otherwise, and does not start here ({error}): set "
        "KERAS_BACKEND=torch in the environment, or os.environ before keras is imported for the first time"
    ) from error

__all__ = ["Backup", "KerasLoader", "loader"]

#: Files of a backup's folder, and the folder while it is being written.
WEIGHTS = "model.weights.h5"
POSITION = "trainpipes.json"
UNFINISHED = "unfinished"


def loader(pipe: Pipeline, *, steps_per_epoch: int | None = None, **options: Any) -> KerasLoader:
    """Data for ``model.fit``, ``evaluate`` and ``predict`` of Keras:

        data = trainpipes.integrations.keras.loader(pipe)
        model.fit(data, epochs=3, shuffle=False)

    Batches must be tuples ``(x, y)``, ``(x, y, sample_weight)`` or ``(x,)``: let a function make them after
    ``pad_collate()``, ``.map(pairs)``. An epoch of Keras is one of the pipeline, in another order each time.
    An evaluation begins at the pipeline's start, and does not move the training's position.

    Args:
        pipe: what to run.
        steps_per_epoch: batches in an epoch of Keras. Needed where those of the pipeline are not known
            (``.repeat()``, a filter, packed rows); the next epoch then goes on with the next batch. Left
            out, an epoch of Keras is one of the pipeline.
        options: options of ``trainpipes.Loader``.

    Raises:
        ConfigError: ``pipe`` is no pipeline, ``Loader`` has no such option, or Keras does not run on torch.
    """
    return KerasLoader(Loader(pipe, **options), Loader(pipe, **options), steps_per_epoch)


class _Origin(Dataset[Any]):
    """What ``.dataset`` of the loader is: it says where rows come from."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def __getitem__(self, index: Any) -> Any:
        raise ConfigError("a loader of trainpipes.integrations.keras gives batches, and no rows")


class _CountedOrigin(_Origin):
    """The same with a length, by which Keras knows that the loader has one."""

    def __init__(self, pipeline: Pipeline, length: int) -> None:
        super().__init__(pipeline)
        self.length = length

    def __len__(self) -> int:
        return self.length


class KerasLoader(DataLoader[Any]):
    """What ``loader`` makes. A ``DataLoader`` for Keras to know it; nothing of its own iteration is used.

    Args:
        training: gives the batches that are trained on.
        evaluation: gives those of evaluations.
        steps_per_epoch: as ``loader`` takes it.

    Attributes:
        loader: the ``trainpipes.Loader`` that trains.
    """

    def __init__(
        self, training: Loader, evaluation: Loader, steps_per_epoch: int | None = None
    ) -> None:
        if keras.backend.backend() != "torch":
            raise ConfigError(
                "trainpipes.integrations.keras is for Keras on torch, got the backend "
                f"{keras.backend.backend()!r}: set KERAS_BACKEND=torch before keras is imported"
            )
        if steps_per_epoch is not None:
            whole_number(steps_per_epoch, 1, "loader(steps_per_epoch)", "batches of an epoch")
        pipeline = training.pipeline
        try:
            length = steps_per_epoch or len(training)
        except TypeError:
            length = None
        origin = _Origin(pipeline) if length is None else _CountedOrigin(pipeline, length)
        super().__init__(origin, batch_size=None)
        self.loader = training
        self.steps_per_epoch = steps_per_epoch
        self._length = length
        self._evaluation = evaluation
        self._batches: Iterator[Any] | None = None  # that goes on in the next epoch
        self._steps: int | None = None  # of the epoch that a state was taken in, what is left

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        asks = (
            _who_asks()
        )  # when the first batch is taken: Keras asks for iterators that it does not use
        if asks == "_symbolic_build":
            yield _checked(self.loader.peek())
            return
        if self._length is None and (asks == "fit" or self.loader._session.plan.chain.endless):
            raise ConfigError(
                "Keras counts the batches of an epoch before it begins, and of this pipeline they are not "
                f"known ({self.loader.pipeline._no_length()}): write loader(pipe, steps_per_epoch=n)"
            )
        batches = self._evaluated() if asks in ("evaluate", "predict") else self._trained()
        for batch in batches:
            yield _checked(batch)

    def _evaluated(self) -> Iterator[Any]:
        """The batches of an evaluation."""
        self._evaluation.load_state_dict(self._evaluation.pipeline.state_at(0))
        return islice(self._evaluation, self.steps_per_epoch)

    def _trained(self) -> Iterator[Any]:
        """The batches of an epoch to train on."""
        steps, self._steps = self._steps, None
        if self.steps_per_epoch is None:
            yield from self.loader
            return
        for _ in range(self.steps_per_epoch if steps is None else steps):
            yield self._next()

    def _next(self) -> Any:
        """The next batch, over the ends of the pipeline's epochs."""
        if self._batches is not None:
            for batch in self._batches:
                return batch
        self._batches = iter(self.loader)
        return next(self._batches)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(self.loader.pipeline._no_length())
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was trained on, as ``Loader.whole_state`` says, for a callback
        of your own: at a batch's end or an epoch's."""
        return self.loader.whole_state()

    def load_state_dict(
        self, state: dict[str, Any], *, allow_changes: Collection[str] = ()
    ) -> None:
        """Let training go on where ``state`` was taken, as ``Loader.load_state_dict`` says."""
        self.loader.load_state_dict(state, allow_changes=allow_changes)
        self._batches = self._steps = None


def _who_asks() -> str:
    """The innermost of Keras' methods on the stack that take batches, by its name; "" for others."""
    for module, function in callers():
        name = function.rpartition(".")[2]
        if module.startswith("keras.") and name in (
            "_symbolic_build",
            "evaluate",
            "predict",
            "fit",
        ):
            return name
    return ""


def _checked(batch: Any) -> Any:
    if isinstance(batch, tuple) and 1 <= len(batch) <= 3:
        return batch
    example = "(batch,)"
    if isinstance(batch, dict) and len(batch) > 1:
        first, *_, last = batch
        example = f"(batch[{first!r}], batch[{last!r}])"
    raise ConfigError(
        "Keras takes batches that are tuples, (x, y), (x, y, sample_weight) or (x,), got "
        f"{shown(list(batch) if isinstance(batch, dict) else type(batch).__name__)}: end the pipeline with "
        f".pad_collate().map(pairs), where `def pairs(batch): return {example}`"
    )


class Backup(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves weights, optimizer and position, and goes on from the newest backup when ``fit`` begins.

    The batch after a resume is the one that would have come, also within an epoch. A backup is whole, or not
    there. It is a folder ``step-N`` with ``model.weights.h5`` and ``trainpipes.json``; the backup before it
    is removed. Callbacks that count (``EarlyStopping``) begin anew, as do the epoch's means in the log.

    Args:
        data: what ``fit`` trains on.
        folder: a folder for the backups of this run only; made if it is not there.
        save_freq: "epoch", or a number of batches. A backup that is due at the last batch of an epoch is
            made after its validation.
        allow_changes: what may differ from the pipeline that was saved, as ``Loader.load_state_dict`` says.

    Raises:
        ConfigError: ``data`` was not made by ``loader``, or another option is invalid.
    """

    def __init__(
        self,
        data: KerasLoader,
        folder: str | os.PathLike[str],
        *,
        save_freq: str | int = "epoch",
        allow_changes: Collection[str] = (),
    ) -> None:
        super().__init__()
        if not isinstance(data, KerasLoader):
            raise ConfigError(
                "Backup(data) takes what fit() trains on, as trainpipes.integrations.keras.loader(pipe) "
                f"makes it, got {shown(type(data).__name__)}"
            )
        if save_freq != "epoch":
            whole_number(save_freq, 1, "Backup(save_freq)", 'batches, or "epoch"')
        self.data = data
        self.folder = Path(folder)
        self.save_freq = save_freq
        self.allow_changes = allow_changes
        self._epoch = 0  # that fit() is in
        self._done = 0  # batches of it that were trained on
        self._step = 0  # batches that were trained on since the run's start
        self._saved = 0  # the step of the last backup
        self._resumed: int | None = None  # the epoch to begin with
        self._quiet: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the newest backup, if there is one."""
        steps = self.params.get("steps")
        if steps != len(self.data):
            raise ConfigError(
                f"fit() is to take {steps} batches an epoch, and its data has {len(self.data)}: leave "
                f"steps_per_epoch out of fit(), and write loader(pipe, steps_per_epoch={steps})"
            )
        self._epoch = self._done = self._step = self._saved = 0
        self._resumed = None
        found = sorted(self.folder.glob("step-*"), key=lambda path: (len(path.name), path.name))
        if not found:
            return
        saved = _read(found[-1] / POSITION)
        self.data.load_state_dict(saved["loader"], allow_changes=self.allow_changes)
        if saved["batch"]:
            self.data._steps = steps - saved["batch"]
        self.model.load_weights(str(found[-1] / WEIGHTS))
        self._epoch, self._done = saved["epoch"], saved["batch"]
        self._step = self._saved = saved["step"]
        self._resumed = self.model._initial_epoch = saved["epoch"]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count from here."""
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._epoch, self._done = epoch, 0
            return
        self.model._initial_epoch = None  # it was for this call of fit()
        if epoch != resumed:
            raise StateError(
                f"the backup is of epoch {resumed}, and fit() begins with {epoch}: write "
                f"fit(initial_epoch={resumed})"
            )
        if self._done:  # Keras would warn that the epoch is shorter than others
            self._quiet = warnings.catch_warnings()
            self._quiet.__enter__()
            warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save, where it is time to."""
        self._done += 1
        self._step += 1
        if self.save_freq != "epoch" and self._done < len(self.data):
            self._save_if_due(self._epoch, self._done)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, where it is time to."""
        if self._quiet is not None:
            self._quiet.__exit__(None, None, None)
            self._quiet = None
        if not self.model.stop_training or self._done >= len(self.data):
            self._save_if_due(epoch + 1, 0)

    def _save_if_due(self, epoch: int, batch: int) -> None:
        if self.save_freq != "epoch" and self._step - self._saved < int(self.save_freq):
            return
        self._saved = self._step
        position = {"step": self._step, "epoch": epoch, "batch": batch}
        content = json.dumps({**position, "loader": self.data.state_dict()})
        if self.data.loader._session.ranks()[0]:
            return  # rank 0 saves for all
        before = list(self.folder.glob("step-*"))
        unfinished = self.folder / UNFINISHED
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self.model.save_weights(str(unfinished / WEIGHTS))
        (unfinished / POSITION).write_text(content)
        for name in (WEIGHTS, POSITION):
            with (unfinished / name).open("rb") as file:
                os.fsync(file.fileno())
        done = self.folder / f"step-{self._step:08}"
        unfinished.rename(done)
        for path in before:
            if path != done:
                shutil.rmtree(path)


def _read(path: Path) -> dict[str, Any]:
    """The position in a backup.

    Raises:
        StateError: it is not there, or damaged.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StateError(
            f"{path} cannot be read ({error}): give Backup() another folder", path=str(path)
        ) from error
    counts = ("step", "epoch", "batch")
    if not isinstance(found, dict) or not all(is_count(found.get(name)) for name in counts):
        raise StateError(
            f"{path} was not written by Backup, or is damaged: give Backup() another folder",
            path=str(path),
        )
    return found
