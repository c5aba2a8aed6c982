"""What other libraries do with a pipeline, as the stack says it. A test of the installed versions fails where
a name below is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch.utils.data import get_worker_info

from trainpipes._internal.callers import callers
from trainpipes._internal.messages import warn_once
from trainpipes.errors import ConfigError

#: Classes of Accelerate, and of the Trainer through it, into which ``prepare`` puts every ``DataLoader`` over
#: an ``IterableDataset``: they share out rows among the ranks, and say nothing to the data set.
SHARING = {
    "IterableDatasetShard": "each rank reads all rows and keeps its part",
    "DataLoaderDispatcher": "the first rank reads all rows and sends the others their part",
}
TRAINER = "transformers.trainer"
#: Where Lightning asks for an iterator to train on; and whether that is, in this thread, one of the data
#: module's, which keeps the position right.
LIGHTNING, FITS = ("lightning.pytorch", "pytorch_lightning"), "_FitLoop.setup_data"
of_data_module = ContextVar("of_data_module", default=False)
#: Where Ray prepares loaders, and iterates prepared loaders.
RAY = ("ray.train.torch.train_loop_utils", "ray.train.v2.torch.train_loop_utils")
PREPARES = (
    "prepare_data_loader",
    "_TorchAccelerator.prepare_data_loader",
    "_WrappedDataLoader.__iter__",
)


def in_trainer() -> str | None:
    """What to write instead, where the HF Trainer asks."""
    if all(module != TRAINER for module, _ in callers()):
        return None
    return (
        "in the HF Trainer write `from trainpipes.integrations.transformers import Trainer`, which takes "
        "this pipeline as it is, with nothing else to change"
    )


def shared_ranks(world_size: int, batching: Callable[[], Any]) -> tuple[int, int] | None:
    """Rank and world size to read by where a library shares out the rows again: 0 of 1. Else None."""
    sharing = _who_shares()
    if sharing is None:
        return None
    stage, shares = batching(), f"{sharing} shares out rows among {world_size} ranks by itself"
    if stage is not None:
        loader = (
            "write trainpipes.integrations.accelerate.loader(pipe, accelerator), not a DataLoader"
        )
        raise ConfigError(
            f"{shares}, and this pipeline makes batches ({stage}): {in_trainer() or loader}",
            stage=str(stage),
        )
    worker = get_worker_info()
    if worker is None or worker.id == 0:
        warn_once(
            f"{shares}, so that {SHARING[sharing]}. For each rank to read its own rows alone, let the "
            "pipeline make the batches, and use "
            "trainpipes.integrations.accelerate.loader(pipe, accelerator) or "
            "trainpipes.integrations.transformers.Trainer",
            key=sharing,
        )
    return 0, 1


def _who_shares() -> str | None:
    for module, function in callers():
        owner = function.partition(".")[0]
        if owner in SHARING and module.partition(".")[0] in ("accelerate", "transformers"):
            return owner
    return None


def warn_without_data_module() -> None:
    """Warn if Lightning trains without the data module that keeps the position."""
    if of_data_module.get() or not any(package in sys.modules for package in LIGHTNING):
        return
    for module, function in callers():
        if function == FITS and module.startswith(LIGHTNING):
            warn_once(
                "Lightning alone does not resume data exactly: it does not load the position at the "
                "end of an epoch, saves the position of one rank only, and without a len() that "
                "of the following batch, so that a resumed run repeats or misses batches. "
                "Write trainer.fit(model, datamodule="
                "trainpipes.integrations.lightning.PipelineDataModule(train=pipe))",
                key=FITS,
            )
            return


def refuse_prepared_by_ray() -> None:
    """Raise if Ray prepares a loader: it deals rows out again."""
    if not any(module in sys.modules for module in RAY):
        return
    if any(module in RAY and function in PREPARES for module, function in callers()):
        raise ConfigError(
            "a trainpipes.Loader reads the rows of its worker and no others, and Ray would take a batch "
            "ahead of its position, got ray.train.torch.prepare_data_loader(loader): leave that out, and "
            "write pipe.to(ray.train.torch.get_device()) to have batches on the device"
        )
