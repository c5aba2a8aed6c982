"""``draw``: the rows that a sampler chooses, in its order."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, Sampler

from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, DataError
from trainpipes.kinds.made_once import made_once
from trainpipes.kinds.options import identify
from trainpipes.kinds.stage_kinds import OrderStage
from trainpipes.samplers import BatchSampler, RowSampler
from trainpipes.stages.torch_samplers import keys_of, reorders

__all__ = ["Draw"]


class Draw(OrderStage):
    """Reads rows by number, in the order of a sampler, which is the same for any ``num_shards``.

    In: rows of a source that can be read by row number: ``from_dataset``, ``from_arrow``,
    ``from_tensors``, ``from_memmap``. Out: the rows that the sampler gives for each epoch. Cursor: a
    position; a resume makes up to 65,536 row numbers again. Costs 8 bytes for each of these, the sampler's
    own work (30 ns a row for a random order), and the reading of single rows. Each consumer reads its
    own rows only.

    ``draw`` orders the rows, so a chain has no ``shuffle`` beside it. Stages that drop rows come after it.

    Args:
        sampler: one of ``trainpipes.samplers``, or one of your own (``RowSampler``); or a torch sampler
            that has a length and gives row numbers. A torch sampler draws an epoch's numbers all at once,
            when the epoch's first row is read, with another seed each epoch; a ``DistributedSampler``
            stands for the order over all its replicas.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset(["a", "b", "c"])
    >>> list(rows.draw(tp.samplers.WeightedRandomSampler([0, 1, 1], num_samples=5)))
    ['b', 'c', 'b', 'b', 'b']
    """

    sampler: Any

    def check(self) -> None:
        sampler = self.sampler
        if isinstance(sampler, BatchSampler) or (
            isinstance(sampler, Sampler) and hasattr(sampler, "batch_size")
        ):
            raise ConfigError(
                f"draw(sampler) takes a sampler of rows, got {type(sampler).__name__}: give its sampler "
                "here, and .batch(batch_size) after it"
            )
        if not isinstance(sampler, RowSampler) and not (
            isinstance(sampler, Iterable) and isinstance(sampler, Sized)
        ):
            raise ConfigError(
                "draw(sampler) takes one of trainpipes.samplers, or one of torch's that has a length, got "
                f"{sampler!r}"
            )

    @made_once
    def order(self) -> RowSampler | TorchOrder:
        """The order of all rows."""
        return self.sampler if isinstance(self.sampler, RowSampler) else TorchOrder(self.sampler)

    @property
    def reorders(self) -> bool:  # type: ignore[override]
        return reorders(self.sampler)

    @property
    def runs_user_code(self) -> bool:
        return not type(self.sampler).__module__.startswith(("trainpipes.", "torch."))

    @property
    def resolved_options(self) -> dict[str, Any]:
        return {"sampler": self.order}

    def identity(self) -> dict[str, Any]:
        return {"stage": self.name, "sampler": identify(self.order)}


class TorchOrder:
    """The order of a sampler that is not ours: drawn whole at an epoch's first row.

    Args:
        sampler: has a length, the same in every epoch.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._drawn: tuple[int, IntArray] | None = None

    def check(self, rows: int) -> None:
        """Its numbers are looked at when they are drawn."""

    def length(self, rows: int) -> int:
        parts = self._sampler.num_replicas if isinstance(self._sampler, DistributedSampler) else 1
        return len(self._sampler) * parts

    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        drawn = self._drawn
        if drawn is None or drawn[0] != epoch:
            drawn = self._drawn = (epoch, self._numbers(epoch, rows))
        return drawn[1][start:stop]

    def _numbers(self, epoch: int, rows: int) -> IntArray:
        keys = list(keys_of(self._sampler, epoch))
        found = np.asarray(keys)
        name = type(self._sampler).__name__
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise DataError(
                f"draw({name}): the sampler gives {keys[0]!r}, which is no row number; from_dataset(dataset, "
                "sampler=...) takes any key that the dataset knows"
            )
        outside = (found < 0) | (found >= rows)
        if outside.any():
            raise DataError(
                f"draw({name}): the sampler gives row {found[outside][0]}, and there are {rows:,} rows: make "
                "it for this dataset"
            )
        return found.astype(np.int64)

    def fingerprint(self) -> dict[str, Any]:
        return {"sampler": type(self._sampler).__qualname__, "indices": self.length(0)}
