"""Samplers of torch, drawn from our seeds, not from global generators."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils import data

from trainpipes import samplers
from trainpipes._internal.checks import IntArray
from trainpipes.errors import DataError
from trainpipes.order.permutation import random_key

#: Keys asked for at a time of a sampler that draws from the global generator.
FEW = 256

SEQUENCES = (Sequence, np.ndarray, torch.Tensor)
#: Those whose draws come from their ``generator`` alone.
WITH_GENERATOR = (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)
#: Torch's own that give a key at a time.
OF_ROWS = (*WITH_GENERATOR, data.SequentialSampler, data.DistributedSampler)


class TorchOrder:
    """The order of another's sampler: drawn whole at an epoch's first row."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._drawn: tuple[int, IntArray] | None = None

    def check(self, rows: int) -> None:
        """Its numbers are looked at when they are drawn."""

    def length(self, rows: int) -> int:
        whole = isinstance(self._sampler, data.DistributedSampler)
        return len(self._sampler) * (self._sampler.num_replicas if whole else 1)

    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        drawn = self._drawn
        if drawn is None or drawn[0] != epoch:
            drawn = self._drawn = (epoch, self._numbers(epoch, rows))
        return drawn[1][start:stop]

    def _numbers(self, epoch: int, rows: int) -> IntArray:
        keys = list(keys_of(self._sampler, epoch))
        try:
            numbers = np.asarray(keys)
        except ValueError:  # lists of several lengths
            numbers = np.empty((len(keys), 0))
        gives = f"shuffle(sampler={type(self._sampler).__name__}): the sampler gives"
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            way = "from_dataset(dataset, sampler=...) takes any key that the dataset knows"
            raise DataError(f"{gives} {keys[0]!r}, which is no row number; {way}")
        outside = (numbers < 0) | (numbers >= rows)
        if outside.any():
            there = f"and there are {rows:,} rows: make it for this dataset"
            raise DataError(f"{gives} row {numbers[outside][0]}, {there}")
        return numbers.astype(np.int64)

    def fingerprint(self) -> dict[str, Any]:
        return {"sampler": type(self._sampler).__qualname__, "indices": self.length(0)}


def reorders(sampler: Any) -> bool:
    """Whether a sampler may give another order every epoch."""
    if type(sampler) is data.BatchSampler:
        return reorders(sampler.sampler)
    if type(sampler) in (data.DistributedSampler, samplers.DistributedSampler):
        return bool(sampler.shuffle)
    in_order = data.SequentialSampler, samplers.SequentialSampler, *SEQUENCES
    return not isinstance(sampler, in_order)


def draws_globally(sampler: Any) -> bool:
    """Whether a sampler may draw from torch's global generator: any but torch's own, ours and sequences."""
    if type(sampler) in (data.BatchSampler, samplers.BatchSampler):
        return draws_globally(sampler.sampler)
    known = type(sampler) in OF_ROWS or type(sampler).__module__.startswith("trainpipes.")
    return not known and not isinstance(sampler, SEQUENCES)


def keys_of(sampler: Any, epoch: int) -> Iterator[Any]:
    """All that a sampler gives in an epoch, for all replicas of a ``DistributedSampler``. Torch's
    samplers draw from their own generators, others from the global generator, seeded and then put
    back.
    """
    seed = int(random_key(0, "sampler", epoch)[0] >> np.uint64(1))
    if isinstance(sampler, data.DistributedSampler):
        return _of_replicas(sampler, epoch)
    globally = draws_globally(sampler) or not hasattr(sampler, "__len__")
    drawn = _drawn(sampler, seed) if globally else iter(_seeded(sampler, seed))
    if not hasattr(sampler, "__len__"):
        return drawn
    count, name = len(sampler), type(sampler).__name__
    keys = list(islice(drawn, count + 1))
    if len(keys) != count:
        gave = f"{len(keys):,}" if len(keys) < count else "more"
        said = f"{name}: its length is {count:,}, and it gave {gave} in epoch {epoch}"
        raise DataError(f"{said}: both must agree in every epoch")
    return iter(keys)


def _of_replicas(sampler: Any, epoch: int) -> Iterator[Any]:
    parts = []
    for rank in range(sampler.num_replicas):
        part = copy.copy(sampler)
        part.rank = rank
        part.set_epoch(epoch)
        parts.append(list(part))
    return (key for turn in zip(*parts, strict=True) for key in turn)


def _drawn(sampler: Any, seed: int) -> Iterator[Any]:
    """Keys of a sampler, with torch's global generator and its own one seeded; a few keys at a time,
    after which the global generator is put back.
    """
    generator = getattr(sampler, "generator", None)
    generator = generator if isinstance(generator, torch.Generator) else torch.Generator()
    before, iterator, state = generator.get_state(), None, None
    try:
        while True:
            with torch.random.fork_rng(devices=[]):
                if iterator is None or state is None:
                    torch.manual_seed(seed)
                    generator.manual_seed(seed ^ generator.initial_seed())
                    iterator = chain(
                        sampler
                    )  # islice() calls iter() again, at which some begin anew
                else:
                    torch.set_rng_state(state)
                keys = list(islice(iterator, FEW))
                state = torch.get_rng_state()
            if not keys:
                return
            yield from keys
    finally:
        generator.set_state(before)


def _seeded(sampler: Any, seed: int) -> Any:
    """A copy of torch's sampler with a generator of its own; any other as it is."""
    if type(sampler) is data.BatchSampler:
        inner = _seeded(sampler.sampler, seed)
        return data.BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    if type(sampler) not in WITH_GENERATOR:
        return sampler
    seeded, generator = copy.copy(sampler), sampler.generator
    seed = seed if generator is None else seed ^ generator.initial_seed()
    seeded.generator = torch.Generator().manual_seed(seed)
    return seeded
