"""``shuffle``: another order every epoch, within a buffer of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import KW_ONLY
from typing import Any, Literal

from torch.utils.data import Sampler

from trainpipes._internal.checks import Count, Seed, require, wrong
from trainpipes.kinds.options import identify
from trainpipes.kinds.stage import made_once
from trainpipes.kinds.stage_kinds import OrderStage
from trainpipes.samplers import BatchSampler, RandomSampler, RowSampler
from trainpipes.stages.torch_samplers import TorchOrder, reorders


class Shuffle(OrderStage):
    """Shuffles the order of row groups, and rows within windows.

    In: rows. Out: the same rows in another order, a new one every epoch, the same for the same
    seed in any process and on any topology. Cursor: the window and the row within it: no rows, no
    random state; a resume reads that window again. Costs memory for a window of
    ``buffer_size`` to ``2 * buffer_size`` rows for each open span, and about 60 ns a row for the permutation.

    Every batch is drawn from at least ``buffer_size`` rows, or from all where there are
    fewer. A file of one huge row group is shuffled within windows of consecutive rows.

    With ``scope="global"`` the order is a true permutation of all rows, for sources that can be read by
    row number: ``from_dataset``, ``from_arrow``, ``from_tensors``, ``from_memmap``. It holds no rows, only
    up to 65,536 row numbers of 8 bytes, and costs about 30 ns a row. Rows are then read one by one, which
    is slow on a spinning disk. The order is the same for any ``num_shards``.

    With ``sampler`` the sampler chooses the rows of each epoch and their order, for the same sources and at
    the same cost, besides the sampler's own work.

    Args:
        buffer_size: the fewest rows that are mixed with each other.
        seed: for the order. Global seeds are neither read nor changed.
        max_bytes: the most memory for the pipeline in one process, estimated from the file footers: two
            thirds for windows, the rest for what is read and made ahead. Where rows are large it makes
            windows smaller than ``buffer_size``. 1 GiB if left out. It shapes the order, so a resume needs
            the same value.
        scope: "buffer", or "global" for all rows at once, without a buffer.
        sampler: one of ``trainpipes.samplers``, or one of your own (``RowSampler``); or a torch sampler
            that has a length and gives row numbers. A torch sampler draws an epoch's numbers all at once,
            when the epoch's first row is read, with another seed each epoch; a ``DistributedSampler``
            stands for the order over all its replicas.

    >>> import trainpipes as tp
    >>> pipe = tp.from_iterable(lambda: range(6)).shuffle(6, seed=0)
    >>> list(pipe), list(pipe)
    ([5, 0, 4, 2, 1, 3], [5, 0, 1, 2, 4, 3])
    >>> rows = tp.from_dataset(["a", "b", "c"])
    >>> list(rows.shuffle(sampler=tp.samplers.WeightedRandomSampler([0, 1, 1], num_samples=5)))
    ['b', 'c', 'b', 'b', 'b']
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
        return not type(self.sampler).__module__.startswith(("trainpipes.", "torch.", "builtins"))

    @property
    def resolved_options(self) -> dict[str, Any]:
        if self.order is None:
            return self.options
        own = {} if self.sampler is None else {"seed": None, "scope": None, "sampler": self.order}
        return {**self.options, "buffer_size": None, "max_bytes": None, **own}

    def identity(self) -> dict[str, Any]:
        if self.sampler is not None:
            return {"stage": self.name, "sampler": identify(self.order)}
        identity = super().identity()
        if self.order is not None:
            del identity["buffer_size"], identity["max_bytes"]
        return identity
