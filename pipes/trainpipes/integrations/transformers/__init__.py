"""Pipelines in the Trainer of Hugging Face's transformers.

Overrides only public methods; ``EpochLength`` relies on how the Trainer uses its number of batches.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from trainpipes._internal.callers import data_parallel
from trainpipes._internal.checks import need, require, wrong
from trainpipes._internal.messages import warn_once
from trainpipes.engine.iterating.iteration_state import IterationState, iteration_of, plan_of
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError, DataChangedError, StateError
from trainpipes.loader import Loader
from trainpipes.loader.steps import take_steps
from trainpipes.look.lengths import estimated_length, no_length
from trainpipes.pipeline.chain import Pipeline
from trainpipes.stages.device import Pin, To

need("transformers", "trainpipes.integrations.transformers", oldest="5.3")
need("accelerate", "trainpipes.integrations.transformers")

import transformers  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint, has_length  # noqa: E402
from transformers.utils import logging  # noqa: E402

from trainpipes.integrations.transformers import loaders  # noqa: E402

Base: Any = object  # a Trainer, whose types are not there without transformers

__all__ = ["PipelineTrainerMixin", "Trainer"]

log = logging.get_logger(__name__)


class PipelineTrainerMixin(Base):
    """Makes a ``transformers.Trainer`` take pipelines that make batches, and resume them exactly.

        class MyTrainer(PipelineTrainerMixin, transformers.Seq2SeqTrainer): ...

        MyTrainer(model, args, train_dataset=pipe, eval_dataset=other).train()

    List it before the Trainer. Batches of a pipeline are dicts of tensors; other datasets are left to the
    Trainer. Arguments on workers and pinned memory hold; ``data_collator``, batch sizes and
    ``dataloader_drop_last`` have no effect.

    Each checkpoint has the position in "trainpipes.json". ``resume_from_checkpoint`` goes on with the next
    batch, on any number of ranks. A checkpoint without a position that fits is refused;
    ``ignore_data_skip=True`` loads its weights, and starts the data at an epoch's beginning.

    Args:
        allow_changes: options that may differ from the pipeline that was saved, as for
            ``Loader.load_state_dict``.
        global_batches: batches of an optimizer step over all ranks: sets ``gradient_accumulation_steps``, and
            each epoch has whole steps. A run is the same on any number of ranks that divides it.
        *arguments: of the Trainer.
        **options: of the Trainer.

    Raises:
        ConfigError: at the start, if arguments contradict the pipeline.
        StateError: on a resume, if the checkpoint has no position that fits.
    """

    _resumes_from: str | None = None
    _global_batches: int | None = None
    #: Whether the pipeline says how many rows a step has, in place of ``per_device_train_batch_size``.
    _sizes_steps = True
    #: While it trains.
    _training: loaders.TrainingLoader | None = None
    #: While it evaluates.
    _evaluation: loaders.EvaluationLoader | None = None

    def __init__(
        self,
        *arguments: Any,
        global_batches: int | None = None,
        allow_changes: Collection[str] = (),
        **options: Any,
    ) -> None:
        bound = inspect.signature(super().__init__).bind_partial(*arguments, **options)
        _check_given({**bound.arguments, **bound.kwargs}, self._sizes_steps)
        #: Loaders of what was evaluated on, whose data is looked at once.
        self._evaluated = WeakKeyDictionary[IterationState, Loader]()
        super().__init__(*arguments, **options)
        self._notes = loaders.NotePosition()
        self.callback_handler.callbacks.insert(0, self._notes)  # others read the epoch
        self._allow_changes = allow_changes
        self._global_batches = global_batches
        if global_batches is not None:
            pipe = self.train_dataset
            way = "leave global_batches out, or give train_dataset=pipe"
            require(_makes_batches(pipe), "train_dataset", "a pipeline of batches", pipe, way)
            self._take_steps(Loader(pipe))

    # Training

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        """As the Trainer says; a pipeline goes on with the batch that would have come."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        skips = self.args.ignore_data_skip
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            self._resumes_from = os.fspath(resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint, *arguments, **options)
        finally:
            self.args.ignore_data_skip = skips
            self._resumes_from = self._training = self._notes.loader = None

    def get_train_dataloader(self) -> Any:
        """A loader of batches where the pipeline makes them; else that of the Trainer."""
        if not _makes_batches(self.train_dataset):
            return super().get_train_dataloader()
        self._check(self.train_dataset)
        loader = self._loader(self.train_dataset, self.args.dataloader_persistent_workers)
        self._take_steps(loader)
        return loaders.TrainingLoader(loader, self._accepted, self._times())

    def _take_steps(self, loader: Loader) -> None:
        if self._global_batches is not None:
            args, option = self.args, "gradient_accumulation_steps"
            before, is_read = args.gradient_accumulation_steps, self.is_deepspeed_enabled
            args.gradient_accumulation_steps = take_steps(
                loader, self._global_batches, option, before, is_read
            )

    def _times(self) -> int:
        """How often training takes each batch, in turn."""
        return 1

    def _loader(self, pipe: Pipeline, persistent: bool = False) -> Loader:
        args, device = self.args, self.args.device
        if device.type != "cpu" and not any(isinstance(stage, To) for stage in pipe.stages):
            pinned = any(isinstance(stage, Pin) for stage in pipe.stages)
            place = iteration_of(pipe).place_at_hand
            pipe = (pipe.pin() if args.dataloader_pin_memory and not pinned else pipe).to(device)
            iteration_of(pipe).stand_at(place)
        workers = args.dataloader_num_workers
        return Loader(
            pipe,
            num_workers=workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=persistent and workers > 0,
            multiprocessing_context=args.dataloader_multiprocessing_context if workers else None,
        )

    def _check_ranks(self, pipe: Record) -> None:
        rule = "1 for a pipeline: DeepSpeed splits sequences by a loader of its own, without a position"
        parts, way = self.get_sp_size(), "use cp_size=, or give a datasets.Dataset"
        require(parts == 1, "sp_size", rule, parts, way)
        if pipe._ranks is not None:
            return
        world = data_parallel()[1]
        if world > 1 and self.args.world_size == 1:
            raise ConfigError(
                f"{world} ranks read this pipeline, and the Trainer takes each process for the only one: "
                "pass TrainingArguments(use_cpu=True) on CPUs; where each is to train a model of its own, "
                "on all rows, pass pipe.distributed(rank=0, world_size=1)"
            )
        if self.get_tp_size() * self.get_cp_size() > 1:
            raise ConfigError(
                "ranks that hold parts of one model must read the same batches, got a pipeline that gives "
                'each its own: write pipe.distributed(mesh=mesh["dp"])'
            )

    def _check(self, pipe: Record) -> None:
        args, chain = self.args, plan_of(pipe).chain
        self._check_ranks(pipe)
        rule = f"off where the pipeline makes the batches ({chain.batch})"
        split = args.accelerator_config.split_batches
        require(not args.auto_find_batch_size, "auto_find_batch_size", rule, True, "leave it out")
        require(not split, "split_batches", rule, True, "leave it out")
        if chain.uneven and pipe._data_parallel()[1] > 1:
            rule = 'tail="even" for training, which ends at one step on all ranks'
            way = "an evaluation needs no tail either"
            raise wrong("sharding_filter(tail)", rule, "uneven", way)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As the Trainer says. On another number of ranks, training ends after as many epochs, or
        ``max_steps``.
        """
        if not isinstance(dataloader, loaders.TrainingLoader):
            return super().set_initial_training_values(args, dataloader)
        self._resume(dataloader)
        values = super().set_initial_training_values(args, dataloader)
        epochs, updates, *others, batches, max_steps = values
        if dataloader.left is not None:
            max_steps, epochs = dataloader.steps_and_epochs(
                max_steps, updates, args.gradient_accumulation_steps, args.max_steps <= 0
            )
        elif dataloader.step >= max_steps:
            epochs = 0
        length = loaders.EpochLength(batches)
        length.loader, dataloader.length = dataloader, batches
        return epochs, updates, *others, length, max_steps

    def _resume(self, loader: loaders.TrainingLoader) -> None:
        folder = None if self._resumes_from is None else Path(self._resumes_from)
        try:
            loader.start(folder, self._allow_changes)
        except (StateError, DataChangedError) as error:
            begins = (
                "the data begins at the start of an epoch, or where pipe.load_state_dict(...) says"
            )
            if not self.args.ignore_data_skip:
                error.add_note(
                    f"allow_changes is an option of the Trainer, too; with ignore_data_skip=True {begins}"
                )
                raise
            log.warning("%s; %s", error, begins)
            loader.start(folder, goes_on=False)
        if folder is not None:
            self.args.ignore_data_skip = True  # nothing is left to skip
        self._training = self._notes.loader = loader

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """As the Trainer says; where batches have no labels, the error gives the way out."""
        try:
            return super().compute_loss(model, inputs, *arguments, **options)
        except ValueError as error:
            if "loss" in str(error) and not any("label" in name for name in inputs):
                raise ConfigError(
                    f"the model gives a loss where a batch has labels, and this one has {list(inputs)}: "
                    "write tokenize(..., labels=True) in the pipeline, or .rename({'label': 'labels'}) where "
                    "they have another name"
                ) from error
            raise

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer says; the position first: where the Trainer's files are, the folder is whole."""
        loader, step = self._training, self.state.global_step
        if loader is not None and _internal_call and output_dir is not None:
            position = loader.position(step, float(self.args.ddp_timeout))
            if self.args.should_save:
                folder = Path(output_dir)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / loaders.FILE).write_text(json.dumps(position))
        super().save_model(output_dir, _internal_call=_internal_call)

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Every row once where the pipeline makes batches; else as the Trainer does."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        if not _makes_batches(dataset):
            return super().get_eval_dataloader(eval_dataset)
        self._check_ranks(dataset)
        kept = iteration_of(
            dataset
        )  # not the pipeline, whose equals may be of files as they are later
        loader = self._evaluated.get(kept)
        if loader is None:
            persistent = self.args.dataloader_persistent_workers
            loader = self._loader(loaders.every_row(dataset), persistent)
            self._evaluated[kept] = loader
        return loaders.EvaluationLoader(loader, self.accelerator, self._accepted)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        if _makes_batches(test_dataset):
            return self.get_eval_dataloader(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer says; each batch's mean loss counts by its rows, on any number of ranks."""
        if not isinstance(dataloader, loaders.EvaluationLoader):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        averages = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        self.gather_function = dataloader.gatherer(self.args.eval_batch_size)
        self._evaluation = dataloader
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = averages
            self.gather_function = self.accelerator.gather_for_metrics
            self._evaluation = None

    # Both

    def num_examples(self, dataloader: Any) -> int:
        """Rows of an epoch over all ranks."""
        if isinstance(dataloader, loaders.EvaluationLoader) and dataloader.rows is not None:
            return int(dataloader.rows)
        if not isinstance(dataloader, loaders.EvaluationLoader | loaders.TrainingLoader):
            return int(super().num_examples(dataloader))
        plan = plan_of(dataloader.loader)
        rows = plan.counts.batches_in_pass * loaders.rows_of_batches(plan)
        most = math.inf if plan.chain.batch is None else plan.inputs.epoch_rows or 0
        return int(min(rows, most * (plan.chain.times or 1)))

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of an optimizer step over all ranks."""
        total = int(super().get_total_train_batch_size(args))
        if self._sizes_steps and _makes_batches(self.train_dataset):
            size = loaders.rows_of_batches(plan_of(self.train_dataset))
            total = total // int(args.train_batch_size) * size
        return total

    def _accepted(self, batch: Any) -> Any:
        """A batch without columns that the model does not take, as ``remove_unused_columns`` says."""
        way = "end the pipeline with .pad_collate(), or with .collate(data_collator)"
        require(isinstance(batch, Mapping), "a batch", "a dict of tensors", batch, way)
        if not self.args.remove_unused_columns:
            return batch
        model = self.accelerator.unwrap_model(self.model)
        model = getattr(model, "get_base_model", lambda: model)()  # of PEFT
        names, labels = {*_named_by(model.forward)}, {*self.label_names}
        if not names & (batch.keys() - labels):
            return batch  # of forward(**batch), or of an error that says what it lacks
        return {name: value for name, value in batch.items() if name in names | labels}


def _named_by(forward: Any) -> Iterator[str]:
    """The names that a function takes, also those of typed ``**kwargs``: ``cu_seq_lens_q`` and the like."""
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for kind in getattr(parameter.annotation, "__args__", ()):
                yield from getattr(kind, "__annotations__", ())
        else:
            yield name


class Trainer(PipelineTrainerMixin, transformers.Trainer):
    """A ``transformers.Trainer`` that takes pipelines which make batches. See ``PipelineTrainerMixin``."""


def _makes_batches(dataset: Any) -> bool:
    return isinstance(dataset, Record) and dataset._batching() is not None


def _check_given(arguments: dict[str, Any], sizes_steps: bool) -> None:
    """Raise for arguments that would fail later, or have no effect."""
    usual = transformers.TrainingArguments
    args = arguments.get("args") or usual  # whose defaults it would take
    size = args.per_device_train_batch_size
    for name in ("train_dataset", "eval_dataset"):
        dataset = arguments.get(name)
        for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
            pipe: Any = (
                part.pipeline if isinstance(part, Loader) else getattr(part, "dataset", None)
            )
            if isinstance(pipe, Record):
                way = f"write {name}=pipe, and dataloader_num_workers= in the arguments"
                raise wrong(name, "the pipeline itself", part, way)
            if isinstance(part, Record) and arguments.get("data_collator") is None:
                way = f"end it with .batch({size}).pad_collate(), or pass a data_collator to the Trainer"
                part._need_batches(name, way)
    # A trainer of TRL is given something to look at in place of its pipeline.
    pipe = getattr(arguments.get("train_dataset"), "pipeline", arguments.get("train_dataset"))
    if not _makes_batches(pipe):
        return
    plan = plan_of(pipe)
    if args.max_steps <= 0 and (plan.grows or not has_length(pipe)):
        about = ""
        with suppress(TypeError):
            length = estimated_length(plan, *pipe._data_parallel())
            steps = args.num_train_epochs * -(-length // args.gradient_accumulation_steps)
            about = f"; {args.num_train_epochs:g} epochs are about {round(steps)}"
        raise ConfigError(
            "num_train_epochs needs the number of steps in an epoch, for the learning rate: pass "
            f"max_steps=...{about} ({no_length(plan)})"
        )
    if sizes_steps and size not in (plan.chain.batch_size, usual.per_device_train_batch_size):
        warn_once(
            f"per_device_train_batch_size={size} has no effect: the pipeline makes the batches "
            f"({pipe._batching()}). Leave it out",
        )
