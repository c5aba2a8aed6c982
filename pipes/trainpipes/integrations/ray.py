"""Ray Train: a loader for each worker, and its position in Ray's checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainpipes._internal.checks import need, require
from trainpipes.errors import ConfigError, StateError
from trainpipes.loader import Loader
from trainpipes.pipeline.chain import Pipeline

need("ray", "trainpipes.integrations.ray")

import ray.train  # noqa: E402

__all__ = ["load", "loader", "save"]

#: The position's file in a checkpoint.
FILE = "trainpipes.json"


def loader(pipe: Pipeline, **options: Any) -> Loader:
    """A ``Loader`` of the rows of this worker of Ray Train:

        def train_loop_per_worker(config):
            data = trainpipes.integrations.ray.loader(pipe)
            trainpipes.integrations.ray.load(data, ray.train.get_checkpoint())
            for batch in data:
                ...

    In place of ``ray.train.torch.prepare_data_loader``, ``pipe.to(ray.train.torch.get_device())`` brings
    batches to the device.

    Args:
        pipe: the pipeline.
        options: of ``trainpipes.Loader``.

    Raises:
        ConfigError: this process is no worker of Ray Train, or ``pipe`` is no pipeline.
    """
    try:
        context = ray.train.get_context()
        rank, workers = context.get_world_rank(), context.get_world_size()
    except (RuntimeError, AttributeError):
        rank = workers = None
    if rank is None or workers is None:
        caller = "trainpipes.integrations.ray.loader(pipe) must be called in train_loop_per_worker"
        raise ConfigError(f"{caller}, by each worker; elsewhere write trainpipes.Loader(pipe)")
    if isinstance(pipe, Pipeline) and pipe._ranks is None and not dist.is_initialized():
        pipe = pipe.distributed(rank=rank, world_size=workers)  # of a trainer that is not torch's
    return Loader(pipe, **options)


def save(loader: Loader, folder: str | os.PathLike[str], *, name: str = FILE) -> None:
    """Write the position of all workers into a folder that becomes a checkpoint:

        trainpipes.integrations.ray.save(data, folder)
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint if rank == 0 else None)

    All workers call it after the same step, each with its own folder.

    Args:
        loader: the ``Loader``.
        folder: an existing folder.
        name: name of the file; another for each loader of a checkpoint.

    Raises:
        ConfigError: ``loader`` is no ``Loader``.
        StateError: batches are not counted, and not all workers asked for the position in time.
    """
    require(isinstance(loader, Loader), "save(loader)", "a trainpipes.Loader", loader)
    (Path(folder) / name).write_text(json.dumps(loader.full_state_dict()))


def load(
    loader: Loader,
    checkpoint: ray.train.Checkpoint | None,
    *,
    allow_changes: Collection[str] = (),
    name: str = FILE,
) -> bool:
    """Let a loader go on where a checkpoint was saved, on any number of workers.

    Args:
        loader: a ``Loader`` of the pipeline that was saved.
        checkpoint: the result of ``ray.train.get_checkpoint()``; None, at the start of a run, changes
            nothing.
        allow_changes: options that may differ from the pipeline that was saved, as for
            ``Loader.load_state_dict``.
        name: name of the file, as in ``save``.

    Returns:
        Whether there was a checkpoint.

    Raises:
        StateError: the checkpoint has no position, or that of another pipeline.
    """
    if checkpoint is None:
        return False
    good = isinstance(checkpoint, ray.train.Checkpoint)
    way = "for a folder write ray.train.Checkpoint.from_directory(folder)"
    require(good, "load(checkpoint)", "what ray.train.get_checkpoint() gives", checkpoint, way)
    path = f"{checkpoint.path}/{name}"
    try:
        with checkpoint.filesystem.open_input_stream(path) as file:
            state = json.loads(file.read())
    except FileNotFoundError as error:
        way = "trainpipes.integrations.ray.save(loader, folder) on all workers before the report"
        reported = f"{checkpoint.path} has no {name}: call {way}; to begin anew, leave load() out"
        raise StateError(reported, path=path) from error
    except ValueError as error:
        reported = f"{path} is damaged ({error}): resume from another checkpoint"
        raise StateError(reported, path=path) from error
    loader.load_state_dict(state, allow_changes=allow_changes)
    return True
