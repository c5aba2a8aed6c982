"""Samplers of torch, drawn from our seeds, not from global generators."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain, islice, zip_longest
from math import inf
from typing import Any

import numpy as np
import torch
from torch.utils import data

from trainpipes import samplers
from trainpipes._internal.callers import data_parallel
from trainpipes._internal.checks import IntArray
from trainpipes.columns.content import short_digest, tensor_digest
from trainpipes.errors import DataError
from trainpipes.order.permutation import random_key

#: Keys asked for at a time of a sampler that draws from the global generator.
FEW = 256

SEQUENCES = (Sequence, np.ndarray, torch.Tensor)
#: Those whose draws come from their ``generator`` alone.
WITH_GENERATOR = (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)
#: Torch's own that give a key at a time.
OF_ROWS = (*WITH_GENERATOR, data.SequentialSampler, data.DistributedSampler)

#: How samplers call the number of replicas, and which of these they are; also after an underscore.
REPLICAS = ("num_replicas", "world_size", "num_processes")
RANKS = ("rank", "process_index")
_END = object()


class TorchOrder:
    """The order of another's sampler: drawn whole at an epoch's first row."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._drawn: tuple[int, IntArray] | None = None

    def check(self, rows: int) -> None:
        """Its numbers are looked at when they are drawn."""

    def length(self, rows: int) -> int:
        return len(self._sampler) * replicas_of(self._sampler)

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
        named = {"sampler": type(self._sampler).__qualname__, "indices": self.length(0)}
        return {**named, **self._content}

    @cached_property
    def _content(self) -> dict[str, Any]:
        return content_of(self._sampler)


def content_of(sampler: Any) -> dict[str, Any]:
    """What a state knows a sampler by beside its class and length: nothing of one of an unknown class.
    States without it load, too: see ``state.format``.
    """
    options = _options(sampler)
    return {"content": {"by": "sampler", "of": options}} if options else {}


def _options(sampler: Any) -> dict[str, Any]:
    kind = type(sampler)
    if isinstance(sampler, samplers.RowSampler):  # any number of replicas can go on
        return {**sampler.fingerprint(), "rows": sampler.rows, "num_replicas": None}
    if kind in (list, tuple, range) or isinstance(sampler, np.ndarray | torch.Tensor):
        return {"keys": _digest(sampler)}
    if kind is data.BatchSampler:
        inner = {"sampler": type(sampler.sampler).__qualname__, **_options(sampler.sampler)}
        return {"batch_size": sampler.batch_size, "drop_last": sampler.drop_last, "of": inner}
    if kind is data.DistributedSampler:
        options = {name: getattr(sampler, name) for name in ("shuffle", "seed", "drop_last")}
        return {"rows": len(sampler.dataset), **options}
    if kind not in WITH_GENERATOR:
        return {}
    generator = sampler.generator
    options = {"seed": None if generator is None else generator.initial_seed()}
    if kind is data.SubsetRandomSampler:
        return {**options, "indices": _digest(sampler.indices)}
    options["replacement"] = sampler.replacement
    if kind is data.RandomSampler:
        return {**options, "rows": len(sampler.data_source)}
    return {**options, "weights": _digest(sampler.weights)}


def _digest(keys: Any) -> str:
    """Of numbers and texts by their values, of other keys by their classes."""
    if isinstance(keys, range):
        return repr(keys)
    if isinstance(keys, torch.Tensor):
        return tensor_digest(keys)[:16]
    with suppress(ValueError, TypeError, OverflowError):  # lists of several lengths
        if np.asarray(keys[:1]).dtype.kind in "iu":  # texts would all be as long as the longest
            numbers = np.asarray(keys)
            if numbers.dtype.kind in "iu":
                shape = list(numbers.shape)
                return f"{shape}:{short_digest(numbers.astype(np.int64).tobytes())}"
    return short_digest(json.dumps(keys, default=_plain, skipkeys=True).encode())


def _plain(key: Any) -> Any:
    if isinstance(key, bytes):
        return repr(key)
    return key.tolist() if hasattr(key, "tolist") else type(key).__qualname__


def reorders(sampler: Any) -> bool:
    """Whether a sampler may give another order every epoch."""
    if type(sampler) is data.BatchSampler:
        return reorders(sampler.sampler)
    if type(sampler) in (data.DistributedSampler, samplers.DistributedSampler):
        return bool(sampler.shuffle)
    in_order = data.SequentialSampler, samplers.SequentialSampler, *SEQUENCES
    return not isinstance(sampler, in_order)


def draws_globally(sampler: Any) -> bool:
    """Whether a sampler may draw from global generators: any but torch's own, ours and sequences."""
    if type(sampler) in (data.BatchSampler, samplers.BatchSampler):
        return draws_globally(sampler.sampler)
    known = type(sampler) in OF_ROWS or type(sampler).__module__.startswith("trainpipes.")
    return not known and not isinstance(sampler, SEQUENCES)


def replicas_of(sampler: Any) -> int:
    """Of how many replicas a sampler is one, or the one within it."""
    within = (replicas_of(held) for held in _within(sampler).values())
    return max(_own_replicas(sampler), *within, 1)


def _own_replicas(sampler: Any) -> int:
    if isinstance(sampler, samplers.DistributedSampler):
        return sampler.num_replicas or data_parallel()[1]
    counts = _numbers(sampler, REPLICAS).values()
    return next(iter(counts), 1) if _numbers(sampler, RANKS) else 1


def _numbers(sampler: Any, names: Sequence[str]) -> dict[str, int]:
    """The attributes of some names that are numbers."""
    held, every = getattr(sampler, "__dict__", {}), (own for n in names for own in (n, f"_{n}"))
    return {name: int(held[name]) for name in every if isinstance(held.get(name), int)}


def _within(sampler: Any) -> dict[str, Any]:
    """The sampler that another one draws from, by the attribute that holds it."""
    held = getattr(sampler, "__dict__", {})
    return {name: held[name] for name in ("sampler", "batch_sampler") if name in held}


def length_of(sampler: Any) -> int | None:
    """Keys that it gives in an epoch; None where it has no length, or that within it has none."""
    try:
        return len(sampler)
    except (NotImplementedError, TypeError):
        return None


def keys_of(sampler: Any, epoch: int) -> Iterator[Any]:
    """All that a sampler gives in an epoch, in turn of all replicas where it is of one. Torch's
    samplers draw from their own generators, others from global generators, seeded and then put back.
    """
    seed = int(random_key(0, "sampler", epoch)[0] >> np.uint64(1))
    replicas = replicas_of(sampler)
    if length_of(sampler) is None:
        of_each = [_drawn(sampler, epoch, rank, seed) for rank in range(replicas)]
        turns = zip_longest(*of_each, fillvalue=_END)
        return (key for key in chain.from_iterable(turns) if key is not _END)
    parts = [_keys(sampler, epoch, rank, seed) for rank in range(replicas)]
    if replicas == 1:
        return iter(parts[0])
    if _are_alike(parts):
        raise DataError(
            f"{type(sampler).__name__}: replicas of a sampler must give a part each, and its {replicas} "
            "gave the same keys, as where it cuts its part when it is made: give the sampler of all rows, as "
            "with rank=0 and world_size=1, for a pipeline shares rows out to ranks by itself"
        )
    return chain.from_iterable(zip(*parts, strict=True))


def _are_alike(parts: Sequence[list[Any]]) -> bool:
    first = parts[0]
    with suppress(RuntimeError, ValueError):  # keys of several numbers each
        return all(part == first for part in parts) and any(key != first[0] for key in first)
    return False


def _keys(sampler: Any, epoch: int, rank: int, seed: int) -> list[Any]:
    if draws_globally(sampler):
        drawn = _drawn(sampler, epoch, rank, seed)
    else:
        drawn = iter(_seeded(_placed(sampler, epoch, rank), seed))
    count, name = len(sampler), type(sampler).__name__
    keys = list(islice(drawn, count + 1))
    if len(keys) != count:
        gave = f"{len(keys):,}" if len(keys) < count else "more"
        said = f"{name}: its length is {count:,}, and it gave {gave} in epoch {epoch}"
        raise DataError(f"{said}: both must agree in every epoch")
    return keys


def _placed(sampler: Any, epoch: int, rank: int) -> Any:
    """A copy that stands at an epoch and is of a replica, as is the one within it; a sampler that knows
    neither itself.
    """
    placed = {name: _placed(held, epoch, rank) for name, held in _within(sampler).items()}
    changes = {name: held for name, held in placed.items() if held is not vars(sampler)[name]}
    if (replicas := _own_replicas(sampler)) > 1:
        changes |= {"num_replicas": replicas, "rank": rank}
        changes |= dict.fromkeys(_numbers(sampler, RANKS), rank)
    if not changes and not hasattr(sampler, "set_epoch"):
        return sampler
    copied = copy.copy(sampler)
    vars(copied).update(changes)
    if hasattr(copied, "set_epoch"):
        copied.set_epoch(epoch)
    return copied


def _drawn(sampler: Any, epoch: int, rank: int, seed: int) -> Iterator[Any]:
    """Keys of a sampler, with global generators and its own ones seeded; a few keys at a time, after
    which the global generators are put back.
    """
    own = {generator: generator.get_state() for generator in _generators(sampler)}
    draws, iterator = OwnDraws(seed), None
    try:
        while True:
            with draws.within():
                if iterator is None:
                    for generator in own:
                        generator.manual_seed(seed ^ generator.initial_seed())
                    # islice() calls iter() again, at which some begin anew
                    iterator = chain(_placed(sampler, epoch, rank))
                keys = list(islice(iterator, FEW))
            if not keys:
                return
            yield from keys
    finally:
        for generator, state in own.items():
            generator.set_state(state)


class OwnDraws:
    """Global generators as some code alone has them: seeded before its first call, and then as its last call
    left them. Outside of its calls they are as if there had been none.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: tuple[Any, ...] | None = None
        #: Calls in which nothing was drawn; less than any where something was.
        self._idle = 0.0

    @contextmanager
    def within(self, most_idle: float = inf) -> Iterator[None]:
        """A call. Code that draws nothing in its first ``most_idle`` ones is left alone from then on."""
        if self._idle >= most_idle:
            yield
            return
        outside = _states()
        if self._inside is None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
            # Not torch.manual_seed, which seeds the devices' generators, too.
            torch.default_generator.manual_seed(self._seed)
            self._inside = _states()
        else:
            _put_back(self._inside)
        before = self._inside
        try:
            yield
        finally:
            self._inside = _states()
            self._idle = self._idle + 1 if _alike(before, self._inside) else -inf
            _put_back(outside)


def seeds_of(sampler: Any) -> list[int]:
    """The seeds of a sampler, or of a stage that has one, and of those within."""
    generators = [generator.initial_seed() for generator in _generators(sampler)]
    numbers = (getattr(held, "seed", None) for held in _nested(sampler))
    return generators + [int(n) for n in numbers if isinstance(n, int | np.integer)]


def _generators(sampler: Any) -> list[torch.Generator]:
    found = (getattr(held, "generator", None) for held in _nested(sampler))
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _nested(sampler: Any) -> list[Any]:
    """A sampler after those within it."""
    return [*chain.from_iterable(map(_nested, _within(sampler).values())), sampler]


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _alike(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    numpys = zip(before[1], after[1], strict=True)
    same = before[0] == after[0] and all(np.array_equal(one, other) for one, other in numpys)
    return same and torch.equal(before[2], after[2])


def _put_back(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


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
