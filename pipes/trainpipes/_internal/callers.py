"""Who asks for rows, read from the stack, and what to write in place of objects that have epochs, an order
or a position of their own. A test of the installed versions fails where a name below is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

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


def is_pipeline(value: Any) -> bool:
    return hasattr(value, "stages") and hasattr(value, "then")


def is_hf_stream(value: Any) -> bool:
    """Whether it is a ``datasets.IterableDataset``."""
    return all(hasattr(value, name) for name in ("features", "iter", "num_shards", "state_dict"))


def instead(value: Any) -> str:
    """What to write instead of a pipeline, a loader, a node or a stream where rows or keys are taken that
    have no position of their own; "" for all others.

    >>> from torch.utils.data import DataLoader
    >>> instead(DataLoader([1, 2]))
    'a DataLoader has an order of its own: write from_dataset(loader.dataset), then .shuffle() and .batch()'
    >>> instead([1, 2])
    ''
    """
    kind = type(value)
    ours = kind.__module__.startswith("trainpipes.")
    if is_pipeline(value):
        return "a pipeline has epochs and a state of its own: use it itself, as in pipe.map(fn)"
    if ours and is_pipeline(getattr(value, "pipeline", None)):
        return "a Loader has epochs and a state of its own: write loader.pipeline"
    if ours and isinstance(value, Iterator) and hasattr(value, "state_dict"):
        passes = "of trainpipes.nodes" if hasattr(value, "stage") else "over a pipeline"
        return f"an iterator {passes} has a position of its own: use a pipeline itself"
    if isinstance(value, DataLoader) or kind.__name__ == "StatefulDataLoader":
        return _of_loader(kind.__name__, value.dataset)
    if is_hf_stream(value):
        return (
            "a datasets.IterableDataset has epochs and a state of its own: write from_hf(dataset)"
        )
    if _is_node(value):
        return f"{kind.__name__} has a state of its own: write from_torchdata(node)"
    if _is_node(getattr(value, "root", None)):
        return (
            f"a {kind.__name__} of nodes has a state of its own: write from_torchdata(loader.root)"
        )
    return ""


def _of_loader(name: str, dataset: Any) -> str:
    if is_pipeline(dataset):
        return f"a {name} over a pipeline has a position of its own: write loader.dataset"
    if is_hf_stream(dataset):
        return f"a {name} has a position of its own: write from_hf(loader.dataset)"
    if isinstance(dataset, IterableDataset):
        way = "from_iterable(loader.dataset), then .batch()"
    else:
        way = "from_dataset(loader.dataset), then .shuffle() and .batch()"
    return f"a {name} has an order of its own: write {way}"


def _is_node(value: Any) -> bool:
    names = {f"{one.__module__}.{one.__qualname__}" for one in type(value).__mro__}
    return "torchdata.nodes.base_node.BaseNode" in names
