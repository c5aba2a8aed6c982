from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal

import numpy as np
from torch.utils.data import Sampler

from trainpipes._internal.checks import Count, Ge, Natural, Seed, require, wrong
from trainpipes.columns.run import Cursors, Run, RunSource, innermost
from trainpipes.kinds.empty_epoch_guard import EmptyEpochGuard, kept_nothing
from trainpipes.kinds.options import identify
from trainpipes.kinds.stage import made_once
from trainpipes.kinds.stage_kinds import (
    OpenBelow,
    RegroupStage,
    RepeatStage,
    ShardStage,
    ShuffleStage,
)
from trainpipes.samplers import BatchSampler, RandomSampler, RowSampler
from trainpipes.stages.torch_samplers import TorchOrder, draws_globally, reorders


class Shuffle(ShuffleStage):
    """Shuffle the order of row groups, and rows within buffers.

    A new order every epoch, the same for the same seed in any process and on any number of ranks. A
    buffer holds up to twice ``buffer_size`` rows for each part of the data that is open.

    ``scope="global"`` and ``sampler`` need a source that can be read by row number:
    ``from_dataset``, ``from_arrow``, ``from_tensors``, ``from_memmap``.

    Args:
        buffer_size: the fewest rows that each batch is drawn from.
        seed: for the order. Global seeds are neither read nor changed.
        max_bytes: the most memory for the pipeline in one process, estimated from file footers;
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

    buffer_size: Count = 40_960
    _: KW_ONLY
    seed: Seed = 0
    max_bytes: Count = 1 << 30
    scope: Literal["buffer", "global"] = "buffer"
    sampler: Any = None

    def check(self) -> None:
        if self.sampler is not None:
            self._check_sampler()
        whole = self.scope == "global" or self.sampler is not None
        if whole and (self.buffer_size, self.max_bytes) != (40_960, 1 << 30):
            option = 'shuffle(scope="global")' if self.sampler is None else "shuffle(sampler=...)"
            given = (self.buffer_size, self.max_bytes)
            raise wrong(option, "without buffer_size and max_bytes", given)

    def _check_sampler(self) -> None:
        sampler = self.sampler
        if self.scope == "global" or self.seed:
            given = (self.scope, self.seed)
            raise wrong("shuffle(sampler=...)", "without scope and seed", given)
        if isinstance(sampler, BatchSampler) or (
            isinstance(sampler, Sampler) and hasattr(sampler, "batch_size")
        ):
            way = "give its sampler here, and .batch(batch_size) after it"
            raise wrong("shuffle(sampler)", "a sampler of rows", sampler, way)
        good = isinstance(sampler, RowSampler | Sized) and isinstance(
            sampler, RowSampler | Iterable
        )
        rule = "one of trainpipes.samplers, or one of torch's that has a length"
        require(good, "shuffle(sampler)", rule, sampler)

    @made_once
    def order(self) -> RowSampler | TorchOrder | None:
        """The order of all rows; None where they are shuffled within a buffer."""
        if self.sampler is not None:
            ours = isinstance(self.sampler, RowSampler)
            return self.sampler if ours else TorchOrder(self.sampler)
        return RandomSampler(seed=self.seed) if self.scope == "global" else None

    @property
    def reorders(self) -> bool:  # type: ignore[override]
        return self.sampler is None or reorders(self.sampler)

    @property
    def runs_user_code(self) -> bool:
        return self.sampler is not None and draws_globally(self.sampler)

    def identity(self) -> dict[str, Any]:
        if self.sampler is not None:
            return {"stage": self.name, "sampler": identify(self.order)}
        identity = super().identity()
        if self.order is not None:
            del identity["buffer_size"], identity["max_bytes"]
        return identity


class ShardingFilter(ShardStage):
    """Deal the batches of an epoch to logical shards, and these to ranks and workers.

    Batch m of the one global sequence belongs to shard ``m % num_shards``; rank r of R takes every
    m with ``m % R == r``. The sequence is the same on any number of ranks that divides
    ``num_shards``, and a state saved on one resumes on another.

    Args:
        num_shards: S, the number of logical shards. Many world sizes divide 24, 48, 96, 240 and
            960.
        split: "spans" cuts the epoch into contiguous ranges, read side by side; "stride" deals
            batches in file order, and every consumer reads all rows: for evaluation.
        balance: "rows" cuts ranges of equal numbers of rows, "bytes" of about equal size by the
            files' footers, for batches that are not counted in advance.
        tail: "even" ends an epoch at the same step on all ranks, and leaves out the last few
            batches; "ragged" delivers all, so that ranks may end a step or more apart: for
            evaluation without collectives in the loop. A state saved at such an end needs the same
            number of ranks.

    >>> import trainpipes as tp
    >>> pipe = tp.from_dataset(list(range(8))).sharding_filter(num_shards=2).batch(2)
    >>> [list(pipe.distributed(rank=rank, world_size=2)) for rank in range(2)]
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    """

    free = frozenset({"tail"})

    num_shards: Annotated[int, Ge(1, 2**20)] = 24
    _: KW_ONLY
    split: Literal["spans", "stride"] = "spans"
    balance: Literal["rows", "bytes"] = "rows"
    tail: Literal["even", "ragged"] = "even"


class Repeat(RepeatStage):
    """Start the next epoch where one ends, each in its own order.

    With ``.repeat().batch()``, a batch may hold rows of two epochs, and none is short; with
    ``.batch().repeat()``, each epoch ends with its own last batch. An endless pipeline that is
    iterated again goes on where it stands.

    Args:
        times: epochs that one ``iter()`` gives; None for no end.

    Raises:
        DataError: the stages before it give nothing in a whole epoch.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(3)).repeat(2).batch(2))
    [[0, 1], [2, 0], [1, 2]]
    >>> list(tp.from_iterable(lambda: range(3)).batch(2).repeat(2))
    [[0, 1], [2], [0, 1], [2]]
    """

    times: Count | None = None


class _Counted(RegroupStage):
    asks_inputs = True

    count: Natural

    def open(self, below: OpenBelow, at: dict[str, Any]) -> RunSource:
        return _Counter(self, below, at)


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

    role = "take"


class Skip(_Counted):
    """Leave out the first ``count`` items of each epoch, counted as ``take`` counts them.

    Args:
        count: items.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(4)).skip(2))
    [2, 3]
    """

    role = "skip"


class _Counter:
    def __init__(self, stage: _Counted, below: OpenBelow, at: dict[str, Any]) -> None:
        own, take = "below" in at, stage.role == "take"
        self._state: dict[str, Any] = at["below"] if own else at  # below, before the run at hand
        self._passed: int = at["passed"] if own else 0  # items of the epoch before that run
        self._skip: int = at["row"] if own else 0  # items of that run already used
        self._below = below(self._state)
        self._low: int = 0 if take else stage.count
        self._high: int | None = stage.count if take else None
        self._rolls = stage.plan_inputs.chain.rolling  # into the next epoch
        self._epoch = innermost(self._state)["epoch"]
        self._guard = EmptyEpochGuard(gave=self._passed > 0 or self._skip > 0)

    def next_run(self) -> Run:
        while True:
            enough = self._high is not None and self._passed + self._skip >= self._high
            if enough and not self._rolls:
                raise StopIteration
            run = self._below.next_run()
            epoch = innermost(run.cursors.state(0))["epoch"]
            if epoch != self._epoch:
                if self._guard.next_epoch():
                    raise kept_nothing("take() or skip()")
                self._passed = 0
                self._state = run.cursors.state(0)
            self._epoch = epoch
            first = max(self._skip, self._low - self._passed)
            last = len(run) if self._high is None else min(len(run), self._high - self._passed)
            base = {"below": self._state, "passed": self._passed}
            self._passed += len(run)
            self._state = run.cursors.state(len(run))
            self._skip = max(0, self._skip - len(run))
            if first < last:
                self._guard.gave()
                kept = run.pick(np.arange(first, last, dtype=np.int64))
                rows = np.arange(first, last + 1, dtype=np.int64)
                return Run(kept.block, Cursors.counting(base, rows), kept.bounds, kept.items)
