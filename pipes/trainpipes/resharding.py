"""Other libraries that share out rows among the ranks by themselves.

Accelerate's ``prepare``, and the HF Trainer through it, puts every ``DataLoader`` over an ``IterableDataset``
into one of two classes. In one, each rank reads the whole data set and keeps its part of it. In the other,
the first rank reads and sends the others theirs. A pipeline that gave each rank its own rows there would
have them shared out twice: rows of the other ranks would never be seen. Neither class says a word to
the data set; what can be known is who asks, which is on the stack. The loaders of ``integrations`` are put
into neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from trainpipes.callers import callers
from trainpipes.errors import ConfigError
from trainpipes.warn_once import warn_once

__all__ = ["in_trainer", "reading_ranks"]

#: Who shares out rows, and what comes of it.
_SHARING = {
    "IterableDatasetShard": "each rank reads all rows and keeps its part",
    "DataLoaderDispatcher": "the first rank reads all rows and sends the others their part",
}
_PACKAGES = ("accelerate", "transformers")
#: What to write instead.
LOADER = (
    "write trainpipes.integrations.accelerate.loader(pipe, accelerator), not a DataLoader"
)
TRAINER = (
    "in the HF Trainer write `from trainpipes.integrations.transformers import Trainer`, which takes this "
    "pipeline as it is, with nothing else to change"
)


def reading_ranks(ranks: tuple[int, int], batching: Callable[[], Any]) -> tuple[int, int]:
    """Rank and world size for a pipeline to read by: those given, or 0 of 1 where a library that asks for
    its rows, here on the stack, shares them out again.

    Args:
        ranks: of this process.
        batching: gives the stage that makes batches, if one does.

    Raises:
        ConfigError: batches would be shared out as if they were rows.
    """
    sharing = None if ranks[1] == 1 else _who_asks()
    if sharing is None:
        return ranks
    stage = batching()
    if stage is not None:
        raise ConfigError(
            f"{sharing} shares out rows among {ranks[1]} ranks by itself, and this pipeline makes batches "
            f"({stage}): {in_trainer() or LOADER}",
            stage=str(stage),
        )
    worker = get_worker_info()
    if worker is not None and worker.id > 0:
        return 0, 1
    warn_once(
        f"{sharing} shares out rows among {ranks[1]} ranks by itself, so that {_SHARING[sharing]}. For each "
        "rank to read its own rows alone, let the pipeline make the batches, and use "
        "trainpipes.integrations.accelerate.loader(pipe, accelerator) or trainpipes.integrations.transformers.Trainer",
        key=sharing,
    )
    return 0, 1


def in_trainer() -> str | None:
    """What to write instead, where the HF Trainer is on the stack."""
    return TRAINER if any(module == "transformers.trainer" for module, _ in callers()) else None


def _who_asks() -> str | None:
    """The name of the class on the stack that shares out rows."""
    for module, function in callers():
        owner = function.partition(".")[0]
        if owner in _SHARING and module.partition(".")[0] in _PACKAGES:
            return owner
    return None
