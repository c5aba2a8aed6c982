"""A loader that Accelerate takes for one of its own: ``prepare`` keeps it, ``save_state`` saves it.

``accelerator.prepare`` rebuilds every DataLoader from its data set, and passes over what is none. It keeps
what says that it was prepared before. So that is what this loader says; each rank reads its own
rows. ``save_state`` asks each loader that it keeps for its state if that has ``use_stateful_dataloader``, on
all ranks, and all of them write the same file: the state is that of all ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from torch.utils.data import DataLoader, Dataset

from trainpipes.errors import ConfigError, MissingExtraError
from trainpipes.extra import need
from trainpipes.integrations.filled_rows import filled, rows_in
from trainpipes.loader import Loader
from trainpipes.pipeline import Pipeline
from trainpipes.runtime.iterating.pass_iterator import PassIterator

need("accelerate", "trainpipes.integrations.accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate import __version__ as version  # noqa: E402
from accelerate.data_loader import DataLoaderStateMixin  # noqa: E402
from accelerate.state import GradientState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DataLoaderConfiguration,
    compare_versions,
    gather_object,
    send_to_device,
)

__all__ = ["AccelerateLoader", "loader"]

if compare_versions("accelerate", "<", "0.34"):
    raise MissingExtraError(
        "trainpipes.integrations.accelerate needs accelerate 0.34 or later, whose save_state() asks a "
        f"loader for its position, got {version}: pip install --upgrade accelerate"
    )


def loader(
    pipe: Pipeline, *, allow_changes: Collection[str] = (), **options: Any
) -> AccelerateLoader:
    """A loader for ``accelerator.prepare``:

        loader = trainpipes.integrations.accelerate.loader(pipe)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    ``accelerator.save_state`` saves its position, and ``load_state`` restores it, on any number of processes.
    Batches come on the accelerator's device; at the last batch of an epoch, accumulated gradients are
    applied.

    Each process reads its own rows, as in ``trainpipes.Loader``. With ``sharding_filter(tail="ragged")``,
    for evaluation, the last step is filled up with repeated rows, and ``gather_for_metrics`` drops these: it
    gives every row once.

    Args:
        pipe: what to run.
        allow_changes: what may differ from the pipeline that was saved, as ``Loader.load_state_dict`` takes
            it.
        options: options of ``trainpipes.Loader``.

    Raises:
        ConfigError: ``pipe`` is no pipeline, or ``Loader`` has no such option.
    """
    return AccelerateLoader(Loader(pipe, **options), allow_changes)


class _Origin(Dataset[Any]):
    """What ``.dataset`` of the loader is: it says where rows come from, and gives none.

    Args:
        pipeline: that is read.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse()


class _EvenBatches:
    """What ``.batch_sampler`` of the loader is, for ``accelerator.join_uneven_inputs``, which sets
    ``even_batches`` for a while. Those who would take batches by it are told what to write."""

    def __init__(self) -> None:
        self.even_batches = True

    def __iter__(self) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise ConfigError(
        "a loader of trainpipes.integrations.accelerate is iterated itself, got a DataLoader that "
        "skip_first_batches(loader, n) or prepare_data_loader(loader) made of it: write "
        "loader = accelerator.prepare(loader), and after accelerator.load_state(folder) iterate that, "
        "which goes on where it was saved"
    )


class AccelerateLoader(DataLoaderStateMixin, DataLoader[Any]):
    """What ``loader`` makes.

    A ``DataLoader`` for what asks for one; nothing of its own iteration is used.

    Args:
        loader: which runs the pipeline.
        allow_changes: as ``loader`` takes it.

    Attributes:
        loader: the ``trainpipes.Loader``.
        end_of_dataloader: whether the batch at hand is the last one of its epoch.
        remainder: rows of the last step, all ranks together, that ``gather_for_metrics`` keeps; 0 for all.
    """

    #: Has ``save_state`` and ``load_state`` ask for a state.
    use_stateful_dataloader = True
    #: Has ``DataLoaderStateMixin`` count no rows.
    _drop_last = True

    def __init__(self, loader: Loader, allow_changes: Collection[str] = ()) -> None:
        self._even = _EvenBatches()
        super().__init__(_Origin(loader.pipeline), batch_sampler=self._even)
        self.loader = loader
        self.allow_changes = allow_changes
        self._device: Any = None  # None to leave batches where they are
        self._settings: DataLoaderConfiguration | None = None

    @property
    def gradient_state(self) -> GradientState:
        return GradientState()

    # What Accelerator asks

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Asked by ``Accelerator.prepare_data_loader``, which keeps what says True. It hands its settings to
        those loaders alone that it makes itself, so they are looked up where the question is asked."""
        asking = sys._getframe(1).f_locals
        accelerator = asking.get("self")
        if isinstance(accelerator, Accelerator):
            self._follow(accelerator, asking.get("device_placement"))
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """``Accelerator.prepare`` sets it."""

    def _follow(self, accelerator: Accelerator, device_placement: bool | None) -> None:
        """Take over an accelerator's settings, if they fit."""
        settings = accelerator.dataloader_config
        if settings.split_batches and accelerator.num_processes > 1:
            raise ConfigError(
                "with split_batches=True the batch size is that of all processes together, and a pipeline's "
                "is that of one: leave split_batches out, and for batches of n rows write "
                f".batch(n // {accelerator.num_processes})"
            )
        self._check_ranks(accelerator)
        placed = accelerator.device_placement if device_placement is None else device_placement
        self._device = accelerator.device if placed else None
        self._settings = settings
        self._even.even_batches = settings.even_batches

    def _check_ranks(self, accelerator: Accelerator) -> None:
        """Raise unless the processes that the accelerator tells apart are those that read the pipeline."""
        world = self.loader._session.ranks()[1]
        parallel = getattr(accelerator, "parallelism_config", None)  # of late
        processes = accelerator.num_processes
        if parallel is not None and parallel.non_data_parallel_size > 1:
            replicas = parallel.data_parallel_size
            mesh = 'mesh=accelerator.torch_device_mesh["dp"]'
            if world != replicas:
                raise ConfigError(
                    "processes that hold parts of one model replica must read the same batches, got a "
                    f"pipeline that is read by {world} ranks, and {replicas} replicas: write "
                    f"loader(pipe.distributed({mesh if replicas > 1 else 'rank=0, world_size=1'}))"
                )
        elif world != processes and self.loader.pipeline._ranks is None:
            raise ConfigError(
                "as many ranks read a pipeline as there are processes of the accelerator, got "
                f"WORLD_SIZE={world} in the environment and num_processes={processes}: make the Accelerator "
                "first, on CPUs as Accelerator(cpu=True), or say pipe.distributed(rank=..., world_size=...)"
            )

    # Iteration

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._settings is None:
            raise ConfigError(
                "a loader of trainpipes.integrations.accelerate must be prepared before it is iterated, or "
                "its position would not be saved: write loader = accelerator.prepare(loader)"
            )
        batches = iter(self.loader)
        return self._tracked(batches, self._steps_of_all(batches))

    def _tracked(self, batches: PassIterator, steps: int | None) -> Iterator[Any]:
        """Batches on the device, while Accelerate knows that this loader is at work, and how far."""
        self.begin()
        self.remainder = 0
        try:
            if steps is None:
                for batch in batches:
                    placed = self._placed(batch)
                    self.end_of_dataloader = batches.is_last()
                    yield placed
            elif steps:
                batch = None
                for _ in range(steps - 1):
                    batch = next(batches)
                    yield self._placed(batch)
                self.end_of_dataloader = True
                yield self._placed(self._last_step(next(batches, None), batch))
        finally:
            self.end()

    def _placed(self, batch: Any) -> Any:
        if self._device is None or self._settings is None:
            return batch
        return send_to_device(batch, self._device, non_blocking=self._settings.non_blocking)

    def _steps_of_all(self, batches: PassIterator) -> int | None:
        """How many steps all ranks take in this pass, if one may have to be filled up."""
        session = self.loader._session
        plan, (_, world) = session.plan, session.ranks()
        if not (plan.chain.ragged and world > 1 and self._even.even_batches):
            return None
        if not plan.counts.known or plan.chain.endless:
            raise ConfigError(
                'sharding_filter(tail="ragged") on several ranks needs batches that are counted in advance, '
                f"for gather_for_metrics() to give every row once, got a pipeline without: "
                f"{self.loader.pipeline._no_length()}. Leave out what drops rows or cuts batches by their "
                'length, or use tail="even", which leaves out the last few; or let ranks end apart, with '
                "Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False)), and call "
                "accelerator.reduce() once, after the loop"
            )
        left = int(plan.counts.batches_in_pass) - int(batches.state_dict()["m"])
        return math.ceil(left / world)

    def _last_step(self, batch: Any, before: Any) -> Any:
        """The last batch of this rank, with as many rows as each other rank's. Called by all ranks.

        Args:
            batch: None where the others have one and this rank has not.
            before: the batch before that, if there was one.
        """
        own = 0 if batch is None else rows_in(batch)
        everyone: list[tuple[int, bool]] = gather_object([(own, batch is None and before is None)])
        rows = [number for number, _ in everyone]
        most, total = max(rows), sum(rows)
        if any(lacking for _, lacking in everyone):  # fewer batches than ranks
            shown = None if batch is None else send_to_device(batch, "cpu")
            before = next(found for found in gather_object([shown]) if found is not None)
        if rows != [max(0, min(most, total - most * rank)) for rank in range(len(rows))]:
            raise ConfigError(
                "gather_for_metrics() keeps the first rows of the last step, and here repeated rows would "
                f"come before others (rows of each rank: {rows}); resume an evaluation on the same number "
                "of processes, or start it anew"
            )
        self.remainder = 0 if total == most * len(rows) else total
        return filled(before if batch is None else batch, most)

    # Where it stands

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks, as ``Loader.whole_state`` says: where batches are not counted, all ranks
        ask for it after the same step."""
        return self.loader.whole_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken, as ``Loader.load_state_dict`` says."""
        self.loader.load_state_dict(state, allow_changes=self.allow_changes)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is. You need not: each iteration is the next epoch by itself."""
        self.loader.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0. After ``load_state``, begin the loop over epochs with it."""
        return int(self.loader.state_dict()["epoch"])

    def peek(self) -> Any:
        """The first batch of the next iteration, without starting one."""
        return self.loader.peek()

    def __len__(self) -> int:
        session = self.loader._session
        plan, (_, world) = session.plan, session.ranks()
        if plan.chain.ragged and plan.counts.known and self._even.even_batches:
            return math.ceil(plan.counts.batches_in_pass / world)
        return len(self.loader)

    def estimate_len(self) -> int:
        """An estimate of ``len()``, where a filter makes that unknown. See ``Pipeline.estimate_len``."""
        return self.loader.estimate_len()
