"""``BatchSampler``: lists of another sampler's indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from trainpipes._internal.checks import flag, whole_number
from trainpipes.errors import ConfigError
from trainpipes.samplers.row_sampler import RowSampler

__all__ = ["BatchSampler"]


class BatchSampler(Sampler[list[int]]):
    """Batches of another sampler's indices, as lists.

    In a pipeline (``from_dataset(dataset, batch_sampler=...)``) it is
    ``.shuffle(sampler=sampler).batch(...)``.

    Args:
        sampler: gives the indices.
        batch_size: of each batch.
        drop_last: leave out a short last one.
    """

    def __init__(self, sampler: RowSampler, batch_size: int, drop_last: bool = False) -> None:
        if not isinstance(sampler, RowSampler):
            raise ConfigError(
                f"BatchSampler(sampler) takes one of trainpipes.samplers, got {type(sampler).__name__}; "
                "torch's BatchSampler takes torch's"
            )
        self.sampler = sampler
        self.batch_size = whole_number(batch_size, 1, "BatchSampler(batch_size)", "rows in a batch")
        self.drop_last = flag(drop_last, "BatchSampler(drop_last)")

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` be epoch ``epoch``."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        rows = len(self.sampler)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return _Batches(self)

    def __repr__(self) -> str:
        last = ", drop_last=True" if self.drop_last else ""
        return f"BatchSampler({self.sampler!r}, {self.batch_size}{last})"


class _Batches(Iterator[list[int]]):
    """The batches of one epoch."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._draws: Any = iter(sampler.sampler)
        self._size, self._drop_last = sampler.batch_size, sampler.drop_last

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> list[int]:
        batch: list[int] = []
        for index in self._draws:
            batch.append(index)
            if len(batch) == self._size:
                return batch
        if not batch or self._drop_last:
            raise StopIteration
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts."""
        state: dict[str, Any] = self._draws.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken."""
        self._draws.load_state_dict(state)
