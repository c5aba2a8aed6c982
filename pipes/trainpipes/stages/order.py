from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from torch.utils.data import Sampler

from trainpipes._internal import checks
from trainpipes.columns.run import Cursors, Run, innermost
from trainpipes.interfaces import stage_kinds
from trainpipes.interfaces.held import Held, in_epochs, opened
from trainpipes.interfaces.options import identify, instead
from trainpipes.interfaces.stage import made_once
from trainpipes.samplers import BatchSampler, RandomSampler, RowSampler
from trainpipes.samplers.torch_samplers import TorchOrder, draws_globally, reorders

#: Parts of a buffer that the first ones hold, so that the first item does not wait for a whole buffer.
GROWTH = (16, 16, 8, 4, 2)
#: Items of a buffer that are not worth waiting less for: the first ones would hardly move.
LEAST_ITEMS = 256
#: Items of a run that a buffer gives.
RUN_ITEMS = 1024


class Shuffle(stage_kinds.ShuffleStage):
    """Shuffle the order of row groups, and rows within buffers.

    A new order every epoch, the same for the same seed in any process and on any number of ranks. A
    buffer holds up to twice ``buffer_size`` rows for each part of the data that is open.

    After another shuffle, ``mix``, ``pack``, ``flat_map`` or ``batch``, it shuffles their items: each
    shard has a buffer of ``buffer_size`` rows or batches, all of the same epoch, and gives it in a random
    order before it fills the next buffer. The first buffers of an epoch are smaller, if they
    have more than 256 items. Of each source of a mix
    a row comes before any of that source's next epoch.

    ``scope="global"`` and ``sampler`` need a source that can be read by row number: ``from_dataset``,
    ``from_arrow``, ``from_tensors``, ``from_memmap``, ``from_hf`` of a ``Dataset``, ``read_numpy``,
    and local, uncompressed files of ``read_arrow`` and ``read_webdataset``.

    Args:
        buffer_size: the fewest rows that each batch is drawn from.
        seed: for the order. Global seeds are neither read nor changed.
        max_bytes: the most memory for the pipeline in a process, estimated from file footers;
            large rows make buffers smaller. 1 GiB if left out. It shapes the order, so a resume
            needs the same value.
        scope: "buffer", or "global" for a permutation of all rows, without a buffer.
        sampler: chooses the rows of each epoch and their order: one of ``trainpipes.samplers``, one
            of your own (``RowSampler``), or a torch sampler that has a length and gives row
            numbers. A torch sampler draws with another seed each epoch; a ``DistributedSampler``
            stands for the order over all its replicas.

    >>> import trainpipes as tp
    >>> pipe = tp.from_iterable(lambda: range(6)).shuffle(6, seed=0)
    >>> list(pipe), list(pipe)
    ([5, 0, 4, 2, 1, 3], [5, 0, 1, 2, 4, 3])
    """

    buffer_size: checks.Count = 40_960
    _: KW_ONLY
    seed: checks.Seed = 0
    max_bytes: checks.Count = 1 << 30
    scope: Literal["buffer", "global"] = "buffer"
    sampler: Any = None

    def check(self) -> None:
        sampler = self.sampler
        plain = (self.buffer_size, self.max_bytes) == (40_960, 1 << 30)
        rule = '"buffer" where buffer_size or max_bytes is given'
        self._require(plain or self.scope == "buffer", "scope", rule)
        if sampler is None:
            return
        alone = plain and self.scope == "buffer" and not self.seed
        self._require(alone, "sampler", "given without buffer_size, max_bytes, scope and seed")
        of_torch = isinstance(sampler, Sampler) and hasattr(sampler, "batch_size")
        rows = not of_torch and not isinstance(sampler, BatchSampler)
        way = "give its sampler here, and .batch(batch_size) after it"
        self._require(rows, "sampler", "a sampler of rows", way)
        good = isinstance(sampler, Sized) and isinstance(sampler, Iterable)
        rule = "one of trainpipes.samplers, or one of torch's that has a length"
        way = instead(sampler)
        self._require((good and not way) or isinstance(sampler, RowSampler), "sampler", rule, way)

    @made_once
    def order(self) -> RowSampler | TorchOrder | None:
        """The order of all rows; None where they are shuffled within a buffer."""
        if self.sampler is None:
            return RandomSampler(seed=self.seed) if self.scope == "global" else None
        return self.sampler if isinstance(self.sampler, RowSampler) else TorchOrder(self.sampler)

    #: How many shuffles come before this stage, where it shuffles items of other stages.
    _again: ClassVar[int | None] = None

    def _traits(self) -> dict[str, Any]:
        return {"reorders": self.sampler is None or reorders(self.sampler)}

    def open(self, below: stage_kinds.OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        number, epoch, (at, used) = at.get("buffer", 0), innermost(at)["epoch"], opened(at)
        held = Held(self, below(at), alone=True)
        return self._shuffled(held, used, number, epoch)

    def _shuffled(self, held: Held, used: int, number: int, epoch: int) -> Iterator[Run]:
        while held.fill(1):
            if held.epoch != epoch:  # its first buffers are small, too
                epoch, number = held.epoch, 0
            part = self.buffer_size // dict(enumerate(GROWTH)).get(number, 1)
            size = min(self.buffer_size, max(LEAST_ITEMS, part))
            held.fill(size)
            run, count = held.waiting(), min(size, held.rows)
            stands, salt = run.cursors.place(count)["epoch"], f"shuffle {self._again}"
            numbers = number, number + 1 if stands == epoch else 0
            order, cursors = held.window(count, count, used, salt, True, numbers)
            order = in_epochs(run.part(0, count), order, self)
            for first in range(used, count, RUN_ITEMS):
                stop = min(first + RUN_ITEMS, count)
                yield run.moved(order[first:stop], cursors(first, stop))
            used, number, epoch = 0, numbers[1], stands

    @property
    def _runs_user_code(self) -> bool:
        return self.sampler is not None and draws_globally(self.sampler)

    def identity(self) -> dict[str, Any]:
        if self.sampler is not None:
            return {"stage": self.name, "sampler": identify(self.order)}
        identity = super().identity()
        if self.order is not None:
            del identity["buffer_size"], identity["max_bytes"]
        return identity


class ShardingFilter(stage_kinds.ShardStage):
    """Deal the batches of an epoch to logical shards, and these to ranks and workers.

    Batch m of the one global sequence belongs to shard ``m % num_shards``; rank r of R takes every
    m with ``m % R == r``. The sequence is the same on any number of ranks, and a state of
    R ranks resumes on another number. Ranks that do not divide ``num_shards`` share shards, and read more.

    Args:
        num_shards: S, the number of logical shards. Many world sizes divide 24, 48, 96, 240 and
            960.
        split: "spans" cuts the epoch into contiguous ranges, read side by side; "stride" deals
            batches in file order, and every consumer reads all rows: for evaluation.
        tail: "even" ends an epoch at the same step on all ranks, and leaves out the last few
            batches; "uneven" delivers all, so that ranks may end a step or more apart: for
            evaluation without collectives in the loop. A state saved at such an end needs the same
            number of ranks.

    >>> import trainpipes as tp
    >>> pipe = tp.from_dataset(list(range(8))).sharding_filter(num_shards=2).batch(2)
    >>> [list(pipe.distributed(rank=rank, world_size=2)) for rank in range(2)]
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    """

    free = frozenset({"tail"})

    num_shards: Annotated[int, checks.Ge(1, 2**20)] = 24
    _: KW_ONLY
    split: Literal["spans", "stride"] = "spans"
    tail: Literal["even", "uneven"] = "even"

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "balance": "rows"}  # which states have had from the start


class Repeat(stage_kinds.RepeatStage):
    """Start the next epoch where an epoch ends, each in its own order.

    With ``.repeat().batch()``, a batch may hold rows of two epochs, and none is short; with
    ``.batch().repeat()``, each epoch ends with its own last batch. An endless pipeline that is
    iterated again goes on where it stands.

    Args:
        times: epochs that an ``iter()`` gives; None for no end.

    Raises:
        DataError: the stages before it give nothing in a whole epoch.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(3)).repeat(2).batch(2))
    [[0, 1], [2, 0], [1, 2]]
    >>> list(tp.from_iterable(lambda: range(3)).batch(2).repeat(2))
    [[0, 1], [2], [0, 1], [2]]
    """

    times: checks.Count | None = None


class _Counted(stage_kinds.CountingStage, asks_inputs=True):
    """``take`` and ``skip`` by counting items, where the plan cannot leave out blocks."""

    count: checks.Natural

    def open(self, below: stage_kinds.OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        # Below, the state before the run at hand; items of the epoch before it, and of it, used up.
        state, passed, skip = at, 0, 0
        if "below" in at:
            state, passed, skip = at["below"], at["passed"], at["row"]
        low, high = (self.count, checks.LARGEST) if self.skips else (0, self.count)
        rolls = self._inputs.chain.rolling  # into the next epoch
        epoch = innermost(state)["epoch"]
        runs = below(state)
        while (rolls or passed + skip < high) and (run := next(runs, None)) is not None:
            its_epoch = run.cursors.place(0)["epoch"]
            if its_epoch != epoch:
                epoch, passed, state = its_epoch, 0, run.cursors.state(0)
                yield run.part(0, 0)  # many such epochs without an item are an error
            first, last = max(skip, low - passed), min(len(run), high - passed)
            base = {"below": state, "passed": passed}
            passed, state = passed + len(run), run.cursors.state(len(run))
            skip = max(0, skip - len(run))
            if first < last:
                counted = run.pick(np.arange(first, last, dtype=np.int64))
                rows = np.arange(first, last + 1, dtype=np.int64)
                yield Run(
                    counted.block, Cursors.counting(base, rows), counted.bounds, counted.items
                )
                del counted, run  # their memory is free for the next run


class Take(_Counted):
    """Give the first ``count`` items of each epoch.

    Directly after the source rows are counted in file order; after ``batch``, batches over all
    ranks.

    Args:
        count: items.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(9)).take(2))
    [0, 1]
    """


class Skip(_Counted):
    """Leave out the first ``count`` items of each epoch, counted as ``take`` counts them.

    Args:
        count: items.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(4)).skip(2))
    [2, 3]
    """

    skips = True
