"""Batches for replica groups of torchft, which fail and come back while the others train on.

torchft counts the batches that went into the weights (``Manager.batches_committed``), over all groups, and
gives a group that comes back this count together with the weights. So the count is where all groups stand in
the sequence of micro-batches: in each step those that take part take the next ones, whatever their number.
A step that is not committed counts nothing, and its micro-batches are dealt out again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

from trainpipes.checks import whole_number
from trainpipes.errors import ConfigError, StateError, TopologyError
from trainpipes.extra import need
from trainpipes.loader import Loader
from trainpipes.pipeline import Pipeline
from trainpipes.shown import shown

need("torchft", "trainpipes.integrations.torchft")

__all__ = ["ReplicaLoader"]

#: The name under which the position travels beside the weights.
KEY = "trainpipes"


class ReplicaLoader:
    """The micro-batches of this process for each step, in a run whose replica groups come and go:

        data = ReplicaLoader(pipe, manager, groups=range(1, 5))
        while manager.current_step() < steps:
            optimizer.zero_grad()  # of torchft: asks which groups take part
            for batch in data.micro_batches():
                loss(model(batch)).backward()
            optimizer.step()  # of torchft: commits the step, or not

    Each micro-batch of the sequence is trained on in exactly one step, whichever groups leave and come back:
    the groups that are there share all batches. Within a group, ranks are those of ``torch.distributed``, or
    of ``pipe.distributed(...)``.

    Args:
        pipe: an endless pipeline with a ``sharding_filter``, whose batches are counted.
        manager: made with ``use_async_quorum=False``. A group that comes back gets the position with the
            weights: your ``load_state_dict`` and ``state_dict`` need not hold it.
        groups: the numbers of groups that may take part. Each number times the ranks of a group must divide
            ``num_shards``.
        per_step: micro-batches of each rank in a step, whose gradients are accumulated.
        options: options of ``trainpipes.Loader``.

    Attributes:
        number: m of the last micro-batch given, counted over all groups from the run's start.

    Raises:
        ConfigError: the pipeline ends or is not counted, or an option is invalid.
        TopologyError: a number of groups does not fit ``num_shards``.
    """

    def __init__(
        self,
        pipe: Pipeline,
        manager: Any,
        *,
        groups: Collection[int],
        per_step: int = 1,
        **options: Any,
    ) -> None:
        if not hasattr(manager, "batches_committed"):
            raise ConfigError(
                f"ReplicaLoader(manager) takes a torchft.Manager, got {shown(manager)}"
            )
        whole_number(per_step, 1, "ReplicaLoader(per_step)", "micro-batches of a rank in a step")
        session = Loader(pipe, **options)._session  # which checks both
        plan = session.plan
        if not plan.chain.endless:
            raise ConfigError(
                "replica groups do not end an epoch together, got a pipeline that ends: add .repeat() "
                "after .batch(), and count steps"
            )
        if not plan.counted:
            raise ConfigError(
                "ReplicaLoader needs counted batches, whose rows follow from the batch's number, got a "
                "pipeline with a filter, packing or a mix: do that once, into files (docs/prepare.md), "
                "and read those"
            )
        self._rank, self._ranks = session.ranks()
        self._shards = plan.chain.num_shards
        self._check_groups(groups)
        self._pipe = pipe
        self._manager = manager
        self._per_step = per_step
        self._options = options
        self._first = 0  # the micro-batch at which nothing was committed yet
        #: The micro-batch, rank and ranks that the iterator is ready for.
        self._ready: tuple[int, int, int] | None = None
        self._batches: Iterator[Any] = iter(())
        self.number: int | None = None
        manager.register_state_dict_fn(KEY, self.load_state_dict, self.state_dict)

    def _check_groups(self, groups: Collection[int]) -> None:
        if not isinstance(groups, Collection) or not groups:
            raise ConfigError(
                "ReplicaLoader(groups) is the numbers of groups that may take part, such as range(1, 5), got "
                f"{shown(groups)}"
            )
        for count in groups:
            whole_number(count, 1, "ReplicaLoader(groups)", "groups that take part")
        if any(self._shards % (count * self._ranks) for count in groups):
            least = math.lcm(*(count * self._ranks for count in groups))
            of = f" of {self._ranks} ranks" if self._ranks > 1 else ""
            raise TopologyError(
                f"each number of groups{of} that may take part has to divide num_shards = {self._shards}, "
                f"got groups={shown(groups)}: write .sharding_filter(num_shards={least}), or a multiple of it"
            )

    @property
    def _position(self) -> int:
        """The first micro-batch that no step has committed."""
        return self._first + self._committed() * self._per_step * self._ranks

    def _committed(self) -> int:
        return int(self._manager.batches_committed())

    def micro_batches(self) -> Iterator[Any]:
        """This process's micro-batches of the step that the manager has begun: ``per_step`` of them. Waits
        until it is known which groups take part. Called once for each attempt at a step.

        Raises:
            ConfigError: no step was begun, or the manager would lose batches.
            TopologyError: as many groups take part as do not divide ``num_shards``.
        """
        manager = self._manager
        group, groups = manager.participating_rank(), int(manager.num_participants())
        if not groups:
            raise ConfigError(
                "the manager says which groups take part once a step is begun, and none was: call "
                "zero_grad() of torchft's Optimizer, or manager.start_quorum(), before micro_batches()"
            )
        if group is not None and not manager.is_participating():
            raise ConfigError(
                "a group that gets its weights within a step would lose its batch, got a Manager with "
                "use_async_quorum=True: write Manager(use_async_quorum=False)"
            )
        if self._shards % (groups * self._ranks):
            raise TopologyError(
                f"{groups} groups of {self._ranks} ranks take part, which do not divide num_shards = "
                f"{self._shards}: say all numbers of groups that may take part, "
                "ReplicaLoader(groups=range(1, most + 1))"
            )
        ranks = groups * self._ranks
        # A spare, whose gradients do not count, looks at the batches of the first group.
        own = self._position + (group or 0) * self._ranks + self._rank
        return self._of_step(own, ranks)

    def _of_step(self, number: int, ranks: int) -> Iterator[Any]:
        wanted = number, number % ranks, ranks
        if self._ready != wanted:
            # Other groups than before, or an attempt that was not committed.
            pipe = self._pipe.distributed(rank=number % ranks, world_size=ranks)
            loader = Loader(pipe, **self._options)
            loader.load_state_dict(self._state(number))
            self._batches = iter(loader)
        self._ready = None
        for _ in range(self._per_step):
            batch = next(self._batches)
            self.number, number = number, number + ranks
            self._ready = number, number % ranks, ranks
            yield batch

    def _state(self, number: int) -> dict[str, Any]:
        """The state in which all micro-batches before one were taken."""
        return self._pipe.distributed(rank=0, world_size=1).state_at(number)

    def state_dict(self) -> dict[str, Any]:
        """Where all groups stand after the last step that was committed. In a checkpoint of your own, save it
        beside ``manager.state_dict()``."""
        return {"batches_committed": self._committed(), "loader": self._state(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another group stands, or a checkpoint was saved, with any number of groups. A
        ``Loader``'s state begins the sequence where that run stood.

        Raises:
            StateError: it does not fit the pipeline.
        """
        if isinstance(state, dict) and "trainpipes" in state:
            state = {"batches_committed": 0, "loader": state}
        if not isinstance(state, dict) or set(state) != {"batches_committed", "loader"}:
            raise StateError(
                "not what ReplicaLoader.state_dict() gave: got "
                f"{shown(list(state) if isinstance(state, dict) else state)}"
            )
        loader = Loader(self._pipe.distributed(rank=0, world_size=1))
        loader.load_state_dict(state["loader"])
        committed = int(state["batches_committed"]) * self._per_step * self._ranks
        self._first = int(state["loader"]["m"]) - committed
        self._ready = None
