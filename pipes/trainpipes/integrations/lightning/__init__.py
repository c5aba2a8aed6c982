"""Pipelines in Lightning: a data module.

Lightning keeps the state of a single rank, loads it only within an epoch, and without ``len`` fetches a batch
ahead.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from types import MethodType
from typing import Any

from trainpipes._internal.checks import need, require, wrong
from trainpipes.engine.record import Record
from trainpipes.errors import StateError, shown
from trainpipes.loader import Loader
from trainpipes.state.merge import TIMEOUT

need("lightning", "trainpipes.integrations.lightning")

from lightning.pytorch import LightningDataModule  # noqa: E402
from lightning.pytorch.strategies import (  # noqa: E402
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402
from lightning.pytorch.utilities.combined_loader import CombinedLoader  # noqa: E402

from trainpipes.integrations.lightning.loaders import (  # noqa: E402
    EvaluationLoader,
    TrainingLoader,
)

__all__ = ["PipelineDataModule"]

#: Strategies whose ranks must take as many steps also in evaluation.
IN_STEP = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)


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
        ConfigError: an argument is no pipeline, ``Loader`` has no such option, or the ranks cannot share
            ``global_batches``.

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
        #: A rank may have nothing left to validate.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self._loaders: dict[str, list[Any]] = {}
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
        for loader in combined.flattened:
            loader.follow(self.trainer, self.global_batches)
        if self._to_load is not None:
            states, self._to_load = self._to_load, None
            states = states if isinstance(states, list) else [states]
            rule = f"the {len(states)} pipelines whose positions are in the checkpoint"
            count = len(combined.flattened)
            require(count == len(states), "PipelineDataModule(train)", rule, count)
            for loader, state in zip(combined.flattened, states, strict=True):
                loader.resume(state, self.allow_changes)
            if count == 1:
                combined.flattened[0].align()
        return combined

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
            return {"train": self._to_load}
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
        return {"train": states[0] if isinstance(self.train, Record) else states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let training go on where the state was taken. What only evaluates leaves it as it is."""
        if self.trainer is None or self.trainer.state.fn in (None, TrainerFn.FITTING):
            if not isinstance(state_dict, dict) or "train" not in state_dict:
                rule = "{'train': state}, as its state_dict() or Lightning's checkpoint has it"
                raise StateError(f"the state must be {rule}, got {shown(state_dict)}")
            self._to_load = state_dict["train"]

    def _evaluated(self, stage: str) -> CombinedLoader:
        combined = self._combined(stage)
        limit = getattr(self.trainer, f"limit_{stage}_batches", None)
        if isinstance(limit, float) and limit == 1.0:  # all of them; 1 is a single batch
            for loader in combined.flattened:
                loader.check(stage, isinstance(self.trainer.strategy, IN_STEP))
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
        loaders = self._loaders.get(stage, [])
        if [id(loader.loader.pipeline) for loader in loaders] != list(map(id, pipelines)):
            kind = TrainingLoader if stage == "train" else EvaluationLoader
            self._loaders[stage] = loaders = [kind(Loader(p, **self.options)) for p in pipelines]
        combined.flattened = list(loaders)
        return combined
