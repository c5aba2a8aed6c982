"""Who asks for rows: read from the stack. A test of the installed versions fails where a name below is
gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from trainpipes._internal.messages import warn_once
from trainpipes.errors import ConfigError

#: Classes of Accelerate, and of the Trainer through it, into which ``prepare`` puts every ``DataLoader`` over
#: an ``IterableDataset``: they share out rows among the ranks, and say nothing to the data set.
SHARING = {
    "IterableDatasetShard": "each rank reads all rows and keeps its part",
    "DataLoaderDispatcher": "the first rank reads all rows and sends the others their part",
}
TRAINER = "transformers.trainer"
#: Where Lightning asks for an iterator to train on, and our modules that keep the position right.
LIGHTNING, FITS = ("lightning.pytorch", "pytorch_lightning"), "_FitLoop.setup_data"
OURS = "trainpipes.integrations.lightning"
#: Where Ray prepares loaders, and iterates what it has prepared.
RAY = ("ray.train.torch.train_loop_utils", "ray.train.v2.torch.train_loop_utils")
PREPARES = (
    "prepare_data_loader",
    "_TorchAccelerator.prepare_data_loader",
    "_WrappedDataLoader.__iter__",
)

#: Where from_iterable and samplers call a user's code, which gives the rows or keys of an epoch.
ITERABLES = ("trainpipes.sources.memory.from_iterable", "trainpipes.sources.memory.from_dataset")
READS = ("IterableStream.open", "IterableReader.read", "SamplerStream.open")


def callers() -> Iterator[tuple[str, str]]:
    """Module and qualified name of each function on the stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        frame = frame.f_back


def batched_outside() -> bool:
    """Whether the DataLoader that asks makes batches by itself."""
    frame = sys._getframe(2)
    return frame.f_code.co_name == "__init__" and bool(frame.f_locals.get("auto_collation", False))


def in_trainer() -> str | None:
    """What to write instead, where the HF Trainer asks."""
    if all(module != TRAINER for module, _ in callers()):
        return None
    return (
        "in the HF Trainer write `from trainpipes.integrations.transformers import Trainer`, which takes "
        "this pipeline as it is, with nothing else to change"
    )


def reading_ranks(ranks: tuple[int, int], batching: Callable[[], Any]) -> tuple[int, int]:
    """Rank and world size to read by; 0 of 1 where a library shares out the rows again."""
    sharing = None if ranks[1] == 1 else _who_shares()
    if sharing is None:
        return ranks
    stage, shares = batching(), f"{sharing} shares out rows among {ranks[1]} ranks by itself"
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
    if not any(package in sys.modules for package in LIGHTNING):
        return
    for module, function in callers():
        if module.startswith(OURS):
            return
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


def refuse_in_an_iterable() -> None:
    """Raise if the rows of ``from_iterable`` or the keys of a sampler are made of a pass that starts now: the
    state would not hold its epoch."""
    if any(module in ITERABLES and function in READS for module, function in callers()):
        raise ConfigError(
            "from_iterable() and samplers must not iterate a pipeline, which after a resume would begin in "
            "epoch 0 again and which reads only this rank's rows: use the pipeline itself, as in "
            "pipe.map(fn) or pipe.flat_map(fn), or a tp.RowStream that keeps its state_dict (docs/extend.md)"
        )
