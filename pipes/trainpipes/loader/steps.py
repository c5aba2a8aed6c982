"""Optimizer steps of a fixed number of batches over all ranks: the same steps on any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any

from trainpipes._internal.checks import flag, require, whole_number, wrong
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError
from trainpipes.loader import Loader
from trainpipes.order.layout import slots_before


class Step(list[Any]):
    """This rank's batches of an optimizer step, as ``steps`` gives them.

    Attributes:
        weight: factor of each batch's loss, so that the gradient that DDP or FSDP leaves, its mean
            over the ranks, is that of the mean loss of the step's batches: ranks / batches.
    """

    def __init__(self, batches: list[Any], weight: float, uneven: bool = False) -> None:
        super().__init__(batches)
        self.weight = weight
        self._is_uneven = uneven  # other ranks have another number of batches
        #: The number of the batch that a loop over this step has at hand; None outside of a loop.
        self._at: int | None = None

    def __iter__(self) -> Iterator[Any]:
        outer = self._at  # of a loop around this
        try:
            for self._at, batch in enumerate(super().__iter__()):
                yield batch
        finally:
            self._at = outer

    def is_last(self) -> bool:
        """Whether the batch at hand, in a loop over this step, is its last on this rank.

        Raises:
            ConfigError: no loop over this step is at work.
        """
        if self._at is None:
            raise ConfigError(
                "is_last() and no_sync() must be called in a loop over the step's batches, got a call "
                "outside of one; write for batch in step: with step.no_sync(model): ..."
            )
        return self._at == len(self) - 1

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """A context for the forward and the backward pass of the batch at hand: ranks exchange gradients
        for the step's last batch only.

        Args:
            model: a model in DDP or FSDP, of either kind; any other is left alone.

        Raises:
            ConfigError: no loop over this step is at work; or ranks in FSDP get different numbers of batches.
        """
        is_last = self.is_last()
        if self._is_uneven and _is_sharded(model):
            rule = "False with FSDP, whose ranks must take as many forward passes"
            raise wrong("steps(uneven)", rule, True, "write batches that the ranks divide")
        if hasattr(model, "set_requires_gradient_sync"):  # fully_shard
            return _exchanging(model, is_last)
        if is_last or not hasattr(model, "no_sync"):
            return nullcontext()
        context: AbstractContextManager[None] = model.no_sync()
        return context


def _is_sharded(model: Any) -> bool:
    """Whether it is in FSDP, of either kind."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    is_wrapped = fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel)
    return is_wrapped or hasattr(model, "set_requires_gradient_sync")


@contextmanager
def _exchanging(model: Any, exchanges: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(exchanges)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class _StepIterator(Iterator[Step]):
    """The steps of a pass. After an error or Ctrl-C within a step, the next call has what was taken of it."""

    def __init__(self, loader: Loader, batches: int, rank: int, world: int) -> None:
        self._items: EpochIterator = loader._begin_pass(batches, holds=True)
        self._batches, self._rank, self._world = batches, rank, world
        #: The first batch of the next step, over all ranks; None until it is asked for.
        self._first: int | None = None
        #: Batches of the step at hand, and what gave them: another one goes on where a state stands.
        self._taken: list[Any] = []
        self._giver: object = None

    def __next__(self) -> Step:
        items = self._items
        first = items.last_item()[1] + 1 if self._first is None else self._first
        self._first, end = first, first + self._batches
        per_rank = slots_before(end, self._rank, self._world)
        per_rank -= slots_before(first, self._rank, self._world)
        if items._current is not self._giver:
            self._taken.clear()
        try:
            self._taken.extend(islice(items, per_rank - len(self._taken)))
        finally:
            self._giver = items._current
        if not self._taken:
            raise StopIteration
        with suppress(Exception):  # of rows of other ranks, which the next step raises
            items._hold()
        is_uneven = self._batches % self._world > 0
        step = Step(self._taken, self._world / self._batches, is_uneven)
        self._first, self._taken = end, []
        return step


class Steps:
    """What ``steps`` returns. Each ``iter()`` gives the steps of the loader's next pass.

    Attributes:
        loader: the ``Loader``, whose state is that after the last step given.
        batches: batches of a step, over all ranks.
    """

    def __init__(self, loader: Loader, batches: int, uneven: bool = False) -> None:
        way = "write steps(trainpipes.Loader(pipe), batches=...)"
        require(isinstance(loader, Loader), "steps(loader)", "a Loader", loader, way)
        self.loader = loader
        self.batches = whole_number(batches, 1, "steps(batches)", "batches of a step of all ranks")
        self.uneven = flag(uneven, "steps(uneven)")
        self._ranks()

    def _ranks(self) -> tuple[int, int]:
        return sharing(self.loader, self.batches, "steps(batches)", self.uneven)

    def __iter__(self) -> Iterator[Step]:
        return _StepIterator(self.loader, self.batches, *self._ranks())

    def __bool__(self) -> bool:
        return True  # their number may not be known

    def __len__(self) -> int:
        from trainpipes.look.lengths import batches_left, no_length

        left = batches_left(self._plan)
        if left is None:
            raise TypeError(f"these steps have no len(): {no_length(self._plan)}")
        return left // self.batches

    def estimate_len(self) -> int:
        """Estimate ``len()``, as ``Loader.estimate_len`` does; for learning rate schedules.

        Raises:
            TypeError: the pipeline has no end, or its rows cannot be counted.
        """
        from trainpipes.look.lengths import estimated_length

        return estimated_length(self._plan, 0, 1) // self.batches

    @property
    def _plan(self) -> Plan:
        return self.loader._iteration.plan

    def __repr__(self) -> str:
        return f"steps({self.loader!r}, batches={self.batches}, uneven={self.uneven})"


def sharing(
    loader: Loader, batches: int, option: str, uneven: bool | None = None
) -> tuple[int, int]:
    """This rank and how many there are; raises ConfigError where they cannot share steps of so many batches.

    Args:
        uneven: whether ranks may take different numbers of them; None where no option allows it.
    """
    rank, world = loader._iteration.ranks()
    plan = loader._iteration.plan
    if plan.chain.uneven and (world > 1 or not plan.chain.endless):
        raise ConfigError(
            'sharding_filter(tail) must be "even" for steps, which are whole on all ranks, got "uneven"; '
            "leave tail out"
        )
    if batches % world == 0:
        return rank, world
    if not uneven or batches < world:
        fitting = [
            number for number in (batches // world * world, -(-batches // world) * world) if number
        ]
        way = f"write {' or '.join(map(str, fitting))}, or train on "
        way += ", ".join(str(n) for n in range(1, batches + 1) if batches % n == 0) + " ranks"
        if uneven is False and batches > world:
            few = batches // world
            way += f", or write uneven=True, which gives ranks {few} or {few + 1} each"
        rule = f"at least the number of ranks, {world}" if uneven else f"divisible by {world} ranks"
        raise wrong(option, rule, batches, way)
    if plan.counts.ends_unevenly:
        from trainpipes.look.lengths import no_length

        raise ConfigError(
            f"steps(uneven) needs batches that are counted, or that have no end, got {batches} of "
            f"{world} ranks: {no_length(plan)}; add .repeat(), or write batches that {world} divides"
        )
    return rank, world


def take_steps(
    loader: Loader, global_batches: Any, option: str, accumulated: int, is_read: bool = False
) -> int:
    """Let all passes of a loader have whole steps of so many batches over all ranks, as a trainer takes them.

    Args:
        option: of the trainer, which says how many batches a rank accumulates.
        accumulated: its value; 1 if it was left out.
        is_read: whether DeepSpeed has read it, so that it must be given.

    Returns:
        What the option is to be.
    """
    batches = whole_number(global_batches, 1, "global_batches", "batches of a step of all ranks")
    world = sharing(loader, batches, "global_batches")[1]
    per_rank = batches // world
    rule = f"{per_rank} for global_batches={batches} on {world} ranks"
    way = "write that number, which DeepSpeed reads first" if is_read else "leave it out"
    good = accumulated == per_rank or (accumulated == 1 and not is_read)
    require(good, option, rule, accumulated, way)
    loader._step = batches
    return per_rank


def steps(loader: Loader, *, batches: int, uneven: bool = False) -> Steps:
    """Give this rank's batches by optimizer steps that are the same on any number of ranks.

    A step has ``batches`` batches over all ranks: the next ones of the pipeline's sequence. Of 8, each of 8
    ranks gets one, each of 4 two, and a single one all. So a run that goes on with another number of ranks
    stays the same run: the same batches in each step, and the same losses within rounding:

        for step in trainpipes.steps(loader, batches=8):
            for batch in step:
                with step.no_sync(model):
                    loss = compute_loss(model, batch) * step.weight
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            save({"loader": loader.full_state_dict(), ...})

    The state is the loader's, after the last step given. A pass ends with its last whole step; where batches
    are not counted, with the last one before a shard has none left, on one rank, too. Steps begin where the
    loader stands: after a change of ``batches`` in a run, with the batch that is due.

    All batches of a step are held at once.

    Args:
        loader: a ``Loader``, on all ranks.
        batches: batches of a step over all ranks; a multiple of the number of ranks.
        uneven: whether ranks that do not divide ``batches`` are given different numbers of them. Only where
            batches are counted, or have no end; and not in FSDP, whose forward passes are collectives.

    Returns:
        Iterable of ``Step``: each a list of batches with ``weight`` and ``no_sync``. ``len()`` is the number
        of steps of a pass, where it is known.

    Raises:
        ConfigError: the ranks cannot share ``batches``, or the tail is uneven.

    >>> import trainpipes as tp
    >>> loader = tp.Loader(tp.from_dataset(range(10)).batch(1))
    >>> list(tp.steps(loader, batches=4))
    [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]
    """
    return Steps(loader, batches, uneven)
