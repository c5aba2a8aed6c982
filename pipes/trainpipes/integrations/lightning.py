"""Pipelines in Lightning: a data module, and its loaders for training and for evaluation.

Lightning keeps the state of a single rank, loads it only within an epoch, and without ``len`` fetches a batch
ahead. A training loader keeps states by Lightning's numbers of batches: that of the last batch *trained on*
is known, however many were fetched ahead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from copy import copy
from types import MethodType
from typing import Any

from trainpipes._internal.checks import need, require, wrong
from trainpipes._internal.messages import warn_once
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.engine.iterating.iteration_state import iteration_of, plan_of
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError, StateError, shown
from trainpipes.integrations.callers import of_data_module
from trainpipes.loader import Loader
from trainpipes.loader.steps import take_steps
from trainpipes.look.lengths import batches_left, ends_apart, no_length
from trainpipes.state.merge import TIMEOUT

need("lightning", "trainpipes.integrations.lightning")

from lightning.fabric.utilities.data import sized_len  # noqa: E402
from lightning.pytorch import LightningDataModule, strategies  # noqa: E402
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402
from lightning.pytorch.utilities.combined_loader import CombinedLoader  # noqa: E402

__all__ = ["PipelineDataModule"]

#: Strategies whose ranks must take as many steps also in evaluation.
IN_STEP = (strategies.DeepSpeedStrategy, strategies.FSDPStrategy, strategies.ModelParallelStrategy)
#: States that are kept: Lightning fetches one batch ahead, and training on one more may fail.
KEPT = 4


def begun(loader: Loader) -> EpochIterator:
    """An iterator of a loader whose position the data module keeps."""
    token = of_data_module.set(True)
    try:
        return iter(loader)
    finally:
        of_data_module.reset(token)


class TrainingLoader:
    """What Lightning's training loop iterates: it notes the state after each batch that was trained on."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        #: Whether a batch was given or a state loaded.
        self.in_use = False
        self._trainer: Any = None
        #: This rank's state after a batch, by the batch's number, from 1.
        self._after: dict[int, dict[str, Any]] = {}
        #: Batches trained on, and the state, when this trainer first took an iterator: tuners go back to it.
        self._first: tuple[int, dict[str, Any]] | None = None
        self._begun = (0, 0)  # batches trained on and epochs, when Lightning last took an iterator
        self._ended = False  # whether the last iterator has come to its end
        self._nothing_left = False  # of the epoch that Lightning resumes
        #: The pass in which the epoch began, once it is known. One of several loaders begins passes anew
        #: until all have come to an end; after a resume it ends at once, if it had come to one before.
        self._pass: int | None = None
        self._ends_at_once = False

    def __len__(self) -> int:
        plan = plan_of(self.loader)
        if plan.grows:
            raise TypeError(f"this pipeline has no len() in training: {no_length(plan)}")
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Begins when Lightning takes the first batch, not when it asks for an iterator."""
        if self._ends_at_once:
            self._ends_at_once = False
            return
        batches = self._begin()
        for batch in batches:
            if self._after:
                number = max(self._after) + 1
                self._after[number] = batches.state_dict()
                self._after.pop(number - KEPT, None)
            yield batch
        self._ended = True

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the module's state has it. Lightning takes objects with this method for resumable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load Lightning's state of a ``Loader`` that was used without the module."""
        if state:
            self.resume(state, ())

    # What Lightning counts

    @property
    def _batches(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress

    @property
    def _place(self) -> tuple[int, int]:
        """Batches that were trained on, over all epochs and resumed runs, and the epoch."""
        epochs = self._trainer.fit_loop.epoch_progress
        return int(self._batches.total.processed), int(epochs.current.processed)

    @property
    def _at_end(self) -> bool:
        """Whether the last batch of an epoch was the last to be trained on."""
        current = self._batches.current
        return bool(self._batches.is_last_batch) and current.processed == current.ready > 0

    def follow(self, trainer: Any, global_batches: int | None, is_resumed: bool) -> None:
        """Go by a trainer's counts, from here on; its steps have so many batches over all ranks.
        ``is_resumed``: whether a state is loaded next."""
        if not is_resumed:
            self._settle()
        if trainer is not self._trainer:
            self._first = None
        if global_batches is not None:
            self._take_steps(trainer, global_batches)
        self._trainer, loop = trainer, trainer.fit_loop
        epochs = loop.epoch_progress.total
        # With ``max_steps`` Lightning would take one more batch for an epoch that had ended. One whose last
        # batch was the last before the checkpoint it counts as ended by itself, and goes on with the next.
        ended = self._batches.is_last_batch and epochs.processed == epochs.started
        self._nothing_left = bool(ended and loop.restarting and not loop.restarted_mid_epoch)

    def _take_steps(self, trainer: Any, global_batches: int) -> None:
        option, way = "accumulate_grad_batches", "leave the GradientAccumulationScheduler out"
        changes = any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks)
        rule = f"as global_batches={global_batches} sets it"
        require(not changes, option, rule, "one that changes", way)
        before, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
        is_read = isinstance(trainer.strategy, strategies.DeepSpeedStrategy)
        batches = take_steps(self.loader, global_batches, option, before, is_read)
        rule = f"divisible by the {batches} batches of a step on a rank"
        require(
            isinstance(limit, float) or limit % batches == 0, "limit_train_batches", rule, limit
        )
        trainer.accumulate_grad_batches = batches

    def resume(
        self, state: dict[str, Any], allow_changes: Collection[str], has_ended: bool = False
    ) -> None:
        self.loader.load_state_dict(state, allow_changes=allow_changes)
        self._after, self._first = {}, None
        self._ends_at_once = has_ended
        self._pass = int(state["epoch"]) - 1 if has_ended else None
        self.in_use = True

    def has_ended(self, state: dict[str, Any]) -> bool:
        """Whether a pass had ended in the epoch at hand, at a state of it."""
        begun = self._pass is not None and not (self._at_end or self._endless)
        return begun and state["epoch"] > self._pass

    def align(self) -> None:
        """Have Lightning count the batches taken before a resume as this number of ranks would have taken
        them, so that those left complete the epoch.
        """
        iteration, step = iteration_of(self.loader), self.loader._step
        position, world, current = iteration.upcoming(), iteration.ranks()[1], self._batches.current
        taken, per_rank = position.m, step // world
        left = batches_left(iteration.plan, taken, step, position.sizes)
        left = None if iteration.plan.grows else left
        ended = self._at_end and not taken and not self._endless
        known = (left is not None or step > 0) and (taken or self._at_end)
        if not (self._trainer.fit_loop.restarting and (known or ended)):
            return
        if left is not None:
            done = len(self) - (left // world if taken else 0)
        elif self._endless:  # where Lightning's epoch began is not known
            done = current.processed // per_rank * per_rank
        elif taken:
            done = taken // world
        else:  # the end of an epoch, which Lightning knows by its length alone
            done = 0
        more = done - current.processed
        for event in ("ready", "started", "processed", "completed"):
            setattr(current, event, getattr(current, event) + more)

    def full_state_dict(self, timeout: float) -> dict[str, Any]:
        """The state of the last batch trained on, for any number of ranks."""
        if self._trainer is None:
            return self.loader.full_state_dict(timeout=timeout)
        state = self._trained_on(self._place[0]) if self._after else self.loader.state_dict()
        if self._at_end and state["batches"] and not self._endless:
            return self.loader.pipeline.state_at(0, epoch=state["epoch"] + 1)
        return self.loader._whole(state, None, timeout)

    def _trained_on(self, batches: int) -> dict[str, Any]:
        """This rank's state after so many batches that were trained on."""
        if batches in (after := self._after):
            return after[batches]
        if self._first is not None and batches == self._first[0]:
            return self._first[1]
        raise StateError(
            f"the position after batch {batches}, the last that Lightning trained on, must be known, "
            f"got {min(after)} to {max(after)}; take batches by training_step(batch, batch_idx)"
        )

    @property
    def _endless(self) -> bool:
        return plan_of(self.loader).chain.endless

    def _begin(self) -> Any:
        trainer = self._trainer
        if trainer is None:
            self.in_use = True
            return begun(self.loader)
        place = trained, epoch = self._place
        if self._after and self._ended and self._begun[1] == epoch:
            self._ended = False  # the shorter of several loaders, once more in the same epoch
            return begun(self.loader)
        self._settle()
        if self._nothing_left and trainer.fit_loop.restarting:
            return ()
        if trainer.ckpt_path is not None and trained and not self.in_use:
            raise StateError(
                "the checkpoint has no position of this PipelineDataModule (or of one with another class "
                "name); call data.load_state_dict({'train': state}), or load the model without ckpt_path"
            )
        if trainer.overfit_batches > 0 and not iteration_of(self.loader).upcoming().m:
            iteration_of(self.loader).start_over()
        batches = begun(self.loader)
        self.in_use, self._ended, self._begun = True, False, place
        self._after = {trained: batches.state_dict()}
        self._pass = self._after[trained]["epoch"] if self._pass is None else self._pass
        self._first = self._first or (trained, self._after[trained])
        return batches

    def _settle(self) -> None:
        """Have the next iterator begin right: an epoch of which no batch was trained on begins once more."""
        if self._after:
            trained = self._place[0]
            if max(self._after) > trained and (self._endless or trained <= self._begun[0]):
                self.loader.load_state_dict(self._trained_on(trained))
            self._pass = None
        self._after = {}


def _length(loader: TrainingLoader) -> float:
    length = sized_len(loader)
    return math.inf if length is None else length


class EvaluationLoader:
    """What validates, tests or predicts: each pass from the pipeline's start."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        iteration_of(loader).source = None  # a pipeline that trains, too, is not moved on

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        iteration_of(self.loader).start_over()
        return begun(self.loader)

    def check(self, stage: str, limit: int | float, in_step: bool) -> None:
        """Warn if it would leave rows out. ``in_step``: whether ranks must take as many steps, as where a
        forward pass is a collective."""
        iteration, option = iteration_of(self.loader), f"PipelineDataModule({stage})"
        world, chain = iteration.ranks()[1], iteration.plan.chain
        whole = batches_left(iteration.plan)
        if stage != "predict" and limit and 0 < (whole or 0) < world:
            raise ConfigError(
                f"{option} must have a batch for each rank, since ranks wait for one another in log("
                f"sync_dist=True), got {whole} batches on {world} ranks; make smaller batches, or add rows"
            )
        if not (isinstance(limit, float) and limit == 1.0):  # all of them; 1 is a single batch
            return
        way = f"leave .repeat() out, or say Trainer(limit_{stage}_batches=...)"
        require(not chain.has_no_end, option, "a pipeline with an end", self.loader.pipeline, way)
        left = f"the last {(whole or 0) % world} of {whole} batches"
        if whole is None:
            left = "what some ranks have more than others"
        if in_step and ends_apart(iteration.plan, world):
            batches = "an unknown number of batches" if whole is None else f"{whole} batches"
            raise ConfigError(
                f"{option} must have as many batches on each rank, since forward passes of this strategy "
                f'are collectives, got {batches} on {world} ranks and tail="uneven"; write '
                '.sharding_filter(tail="even"), which leaves out the last few'
            )
        if not chain.uneven and not in_step and world > 1 and (whole is None or whole % world):
            way = 'for every row once write .sharding_filter(tail="uneven")'
            said = f"{option} leaves out {left} on {world} ranks: {way}"
            warn_once(said, key=(stage, self.loader.pipeline))


class PipelineDataModule(LightningDataModule):  # type: ignore[misc]
    """A data module of pipelines, whose position Lightning's checkpoints hold.

    A subclass may set ``self.train`` and the others in ``setup``. The state after the last batch trained on,
    for ``Loader.load_state_dict`` (or a list of them), is in ``checkpoint["PipelineDataModule"]["train"]``,
    or by a subclass's name. Every evaluation begins at the pipeline's start.

    Args:
        train: a pipeline that makes batches, or several in a list, a dict or a ``CombinedLoader``.
        val: the same to validate on.
        test: to test on.
        predict: to predict for.
        state_timeout: seconds that a rank waits for the others when a checkpoint is saved; only for pipelines
            that are not counted.
        allow_changes: options that may differ from the run that saved, as for ``Loader.load_state_dict``.
        global_batches: batches of an optimizer step over all ranks: sets the trainer's
            ``accumulate_grad_batches``, and each epoch has whole steps. A run is the same on any number of
            ranks that divides it.
        **options: of each ``Loader``: ``num_workers``, ``threads``, ``pin_memory`` and so on.

    Raises:
        ConfigError: an argument is no pipeline, ``Loader`` has no such option, other ranks read a pipeline
            than the strategy has replicas of the model, the ranks cannot share ``global_batches``, or ``val``
            or ``test`` has fewer batches than there are ranks.

    >>> import trainpipes as tp
    >>> from trainpipes.integrations.lightning import PipelineDataModule
    >>> data = PipelineDataModule(train=tp.from_dataset(range(10)).batch(2))
    >>> list(data.train_dataloader().iterables)
    [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        state_timeout: float = TIMEOUT,
        allow_changes: Collection[str] = (),
        global_batches: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.train, self.val, self.test, self.predict = train, val, test, predict
        self.state_timeout = state_timeout
        self.allow_changes = allow_changes
        self.global_batches = global_batches
        self.options = options
        #: A rank may have nothing to predict for.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self._loaders: dict[str, list[Any]] = {}
        self._made_of: dict[str, list[Any]] = {}
        self._to_load: Any = None
        is_plain = type(self).setup is LightningDataModule.setup
        for stage in ("train", "val", "test", "predict"):
            hook = f"{stage}_dataloader"
            if getattr(self, stage) is not None:
                self._combined(stage)
            elif is_plain:  # as if there were no such method here
                setattr(self, hook, MethodType(getattr(LightningDataModule, hook), self))

    def train_dataloader(self) -> CombinedLoader:
        combined = self._combined("train")
        if self.trainer is None:
            return combined
        # ``estimated_stepping_batches`` asks for loaders before Lightning has restored its counts.
        is_early = bool(self.trainer._checkpoint_connector._loaded_checkpoint)
        is_resumed = self._to_load is not None and not is_early
        for loader in combined.flattened:
            loader.follow(self.trainer, self.global_batches, is_resumed)
        if is_resumed:
            saved, self._to_load = self._to_load, None
            states = saved["train"] if isinstance(saved["train"], list) else [saved["train"]]
            ended = saved.get("ended", [False] * len(states))
            cycles = combined._mode == "max_size_cycle"
            rule = f"the {len(states)} pipelines whose positions are in the checkpoint"
            count = len(combined.flattened)
            require(count == len(states), "PipelineDataModule(train)", rule, count)
            for loader, state, has_ended in zip(combined.flattened, states, ended, strict=True):
                loader.resume(state, self.allow_changes, has_ended and cycles)
            # The loader that an epoch ends with.
            ending = min if combined._mode == "min_size" else max
            ending(combined.flattened, key=_length).align()
        return combined

    def _load_late(self, trainer: Any, module: Any) -> None:
        """Load the position if Lightning asked for the loaders before its counts were there."""
        if self._to_load is not None:
            trainer.fit_loop._combined_loader = None
            trainer.fit_loop.setup_data()

    def val_dataloader(self) -> Any:
        return [] if self.val is None else self._evaluated("val")

    def test_dataloader(self) -> CombinedLoader:
        return self._evaluated("test")

    def predict_dataloader(self) -> CombinedLoader:
        return self._evaluated("predict")

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch trained on, for any number of ranks. All ranks call it.

        Raises:
            StateError: batches are not counted, and not all ranks asked for it in time.
        """
        if self._to_load is not None:
            return dict(self._to_load)
        loaders = self._loaders.get("train", ())
        if not any(loader.in_use for loader in loaders):
            return {}
        try:
            states = [loader.full_state_dict(self.state_timeout) for loader in loaders]
        except StateError as error:
            if self.trainer is None or not self.trainer.interrupted:
                raise
            way = "resume from the last one that all ranks have saved"
            said = f"no checkpoint was saved on this exception, which not all ranks had ({error}); {way}"
            raise StateError(said) from error
        if isinstance(self.train, Record):
            return {"train": states[0]}
        ended = [one.has_ended(state) for one, state in zip(loaders, states, strict=True)]
        some = any(ended) and not all(ended)
        return {"train": states, "ended": ended} if some else {"train": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let training go on where the state was taken. What only evaluates leaves it as it is."""
        if self.trainer is None or self.trainer.state.fn in (None, TrainerFn.FITTING):
            if not isinstance(state_dict, dict) or "train" not in state_dict:
                rule = "{'train': state}, as its state_dict() or Lightning's checkpoint has it"
                raise StateError(f"the state must be {rule}, got {shown(state_dict)}")
            self._to_load = state_dict
            if self.trainer is not None:
                self.trainer.callbacks.append(LambdaCallback(on_train_start=self._load_late))

    def _evaluated(self, stage: str) -> CombinedLoader:
        combined = self._combined(stage)
        if self.trainer is not None:
            limit = getattr(self.trainer, f"limit_{stage}_batches")
            for loader in combined.flattened:
                loader.check(stage, limit, isinstance(self.trainer.strategy, IN_STEP))
        return combined

    def _combined(self, stage: str) -> CombinedLoader:
        """A stage's loaders for Lightning; the same ones each time."""
        stage_data, mode = (
            getattr(self, stage),
            "max_size_cycle" if stage == "train" else "sequential",
        )
        combined = (
            copy(stage_data)
            if isinstance(stage_data, CombinedLoader)
            else CombinedLoader(stage_data, mode)
        )
        pipelines, option = combined.flattened, f"PipelineDataModule({stage})"
        lasting = stage != "train" or combined._mode != "max_size" or len(pipelines) == 1
        rule, way = '"max_size_cycle" or "min_size" for training', "what has ended has no position"
        require(lasting, "CombinedLoader(mode)", rule, "max_size", f"in it, {way}")
        for pipeline in pipelines:
            if not isinstance(pipeline, Record):
                inner = getattr(pipeline, "pipeline", getattr(pipeline, "dataset", None))
                write = "trainpipes.from_dataset(dataset).batch(32)"
                write = "pipe, num_workers=..." if isinstance(inner, Record) else write
                rule = "a trainpipes Pipeline, or several in a list or dict"
                raise wrong(option, rule, pipeline, f"write PipelineDataModule({stage}={write})")
            pipeline._need_batches(option)
        loaders, made_of = self._loaders.get(stage, []), self._made_of.get(stage, [])
        # A Loader's own may be another, pinned one.
        if [*map(id, made_of)] != [*map(id, pipelines)]:
            kind = TrainingLoader if stage == "train" else EvaluationLoader
            self._loaders[stage] = loaders = [kind(Loader(p, **self.options)) for p in pipelines]
            self._made_of[stage] = [*pipelines]
        combined.flattened = list(loaders)
        for loader in loaders if self.trainer is not None else ():
            self._check_ranks(stage, loader.loader)
        return combined

    def _check_ranks(self, stage: str, loader: Loader) -> None:
        """Raise if others share the rows than the strategy's replicas of the model."""
        trainer, (rank, world) = self.trainer, iteration_of(loader).ranks()
        by_strategy = trainer.distributed_sampler_kwargs
        if by_strategy is None:  # a single device
            return
        replica, replicas = by_strategy["rank"], by_strategy["num_replicas"]
        has_parts, is_given = replicas < trainer.world_size, loader.pipeline._ranks is not None
        everywhere = stage != "train" and world == 1
        if (rank, world) == (replica, replicas) or (is_given and (everywhere or not has_parts)):
            return
        ranks = "rank=..., world_size=..."
        if has_parts and hasattr(trainer.strategy, "device_mesh"):
            ranks = 'mesh=self.trainer.strategy.device_mesh["data_parallel"]'
        raise ConfigError(
            f"PipelineDataModule({stage}) must be read by as many ranks as there are replicas of the "
            f"model, got rank {rank} of {world} where the strategy has replica {replica} of {replicas}; "
            f"write self.{stage} = pipe.distributed({ranks}) in setup()"
        )
