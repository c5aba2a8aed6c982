"""What makes a Trainer take pipelines that make batches: its own hooks, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
from transformers.utils import logging

from trainpipes.errors import ConfigError, StateError
from trainpipes.integrations.transformers import checkpoint_file
from trainpipes.integrations.transformers.evaluation import EvaluationLoader, every_row
from trainpipes.integrations.transformers.training_run import TrainingRun
from trainpipes.loader import Loader
from trainpipes.pipeline import Pipeline
from trainpipes.stages.pin import Pin
from trainpipes.stages.to import To

if TYPE_CHECKING:  # a Trainer, whose types are not there without transformers
    from typing import Any as Base
else:
    Base = object

__all__ = ["HOOKS", "PipelineTrainerMixin", "check_datasets"]

#: Methods of the Trainer that are built upon; earlier versions lack some.
HOOKS = (
    "_get_output_dir",
    "_init_training_state",
    "_inner_training_loop",
    "_run_epoch",
    "_save_checkpoint",
    "_validate_args",
    "evaluation_loop",
    "get_batch_samples",
    "get_eval_dataloader",
    "get_test_dataloader",
    "get_total_train_batch_size",
    "get_train_dataloader",
    "num_examples",
    "set_initial_training_values",
)

log = logging.get_logger(__name__)


class PipelineTrainerMixin(Base):
    """Makes a ``transformers.Trainer`` take pipelines that make batches, and resume them exactly.

        class MyTrainer(PipelineTrainerMixin, transformers.Seq2SeqTrainer): ...

        MyTrainer(model, args, train_dataset=pipe, eval_dataset=other).train()

    List it before the Trainer. ``train_dataset``, ``eval_dataset`` and the datasets of ``evaluate`` and
    ``predict`` may be pipelines that make batches, dicts of tensors; others are left to the Trainer. The
    pipeline makes the batches: ``data_collator``, ``per_device_train_batch_size``,
    ``per_device_eval_batch_size`` and ``dataloader_drop_last`` are not used. ``dataloader_num_workers``,
    ``dataloader_prefetch_factor``, ``dataloader_persistent_workers``, ``dataloader_pin_memory`` and
    ``dataloader_multiprocessing_context`` are.

    Each checkpoint has a file "trainpipes.json" with the position in the data. ``resume_from_checkpoint``
    goes on with the batch that would have come, on any number of ranks that divides ``num_shards``. No batch
    is read only to skip it, whatever ``ignore_data_skip`` says.

    Raises:
        ConfigError: at the start, if arguments contradict the pipeline.
        StateError: on a resume, if the checkpoint has no position, or one that does not fit.
    """

    _run: TrainingRun | None = None
    _resumes_from: str | None = None

    # Training

    def _validate_args(self) -> None:
        pipe, args = self.train_dataset, self.args
        check_datasets(train_dataset=pipe, eval_dataset=self.eval_dataset)
        if _makes_batches(pipe) and args.max_steps <= 0 and not has_length(pipe):
            raise ConfigError(_no_epochs(pipe, args))
        super()._validate_args()

    def get_train_dataloader(self) -> Any:
        """A ``trainpipes.Loader`` where the pipeline makes batches; else what the Trainer gives."""
        if not _makes_batches(self.train_dataset):
            return super().get_train_dataloader()
        return self._loader(self.train_dataset, self.args.dataloader_persistent_workers)

    def _loader(self, pipe: Pipeline, persistent: bool = False) -> Loader:
        args, device = self.args, self.args.device
        if device.type != "cpu" and not any(isinstance(stage, To) for stage in pipe.stages):
            pinned = any(isinstance(stage, Pin) for stage in pipe.stages)
            pipe = (pipe.pin() if args.dataloader_pin_memory and not pinned else pipe).to(device)
        workers = args.dataloader_num_workers
        return Loader(
            pipe,
            num_workers=workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=persistent and workers > 0,
            multiprocessing_context=args.dataloader_multiprocessing_context if workers else None,
        )

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        kept = self.args.ignore_data_skip
        self._resumes_from = resume_from_checkpoint
        try:
            return super()._inner_training_loop(
                batch_size=batch_size,
                args=args,
                resume_from_checkpoint=resume_from_checkpoint,
                trial=trial,
                ignore_keys_for_eval=ignore_keys_for_eval,
            )
        finally:
            self.args.ignore_data_skip = kept
            self._run = self._resumes_from = None

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As the Trainer says, from where the run starts in its data: on another number of ranks it ends
        after as many epochs, or after ``max_steps``."""
        self._run = None
        if not isinstance(dataloader, Loader):
            return super().set_initial_training_values(args, dataloader)
        self._check(dataloader.pipeline)
        run = self._run = self._begin(dataloader)
        epochs, updates, examples, samples, size, batches, max_steps = (
            super().set_initial_training_values(args, dataloader)
        )
        if run.left is not None:
            max_steps, epochs = run.steps_and_epochs(
                max_steps, updates, args.gradient_accumulation_steps, args.max_steps <= 0
            )
        elif run.step >= max_steps:
            epochs = run.epoch
        return epochs, updates, examples, samples, size, batches, max_steps

    def _check(self, pipe: Pipeline) -> None:
        """Raise where arguments contradict a pipeline."""
        chain, (_, world) = pipe._session.plan.chain, pipe._data_parallel()
        if world > 1 and self.args.world_size == 1 and pipe._ranks is None:
            raise ConfigError(
                f"{world} ranks read this pipeline, and the Trainer takes each process for the only one: "
                "each would train a model of its own, and all would write into one folder. On CPUs pass "
                "TrainingArguments(use_cpu=True); where each process is to train by itself, on all rows, "
                "pass pipe.distributed(rank=0, world_size=1)"
            )
        if self.args.auto_find_batch_size:
            raise ConfigError(
                f"auto_find_batch_size tries smaller batches, and this pipeline makes them ({chain.batch}): "
                "leave it out, and choose the batch size in the pipeline"
            )
        if self.args.accelerator_config.split_batches:
            raise ConfigError(
                "accelerator_config: split_batches=True cuts each batch among the ranks, and each rank reads "
                f"batches of its own from this pipeline ({chain.batch}): leave it out"
            )
        if self.get_tp_size() * self.get_cp_size() * self.get_sp_size() > 1 and pipe._ranks is None:
            raise ConfigError(
                "ranks that hold parts of one model read the same batches (tensor, context or sequence "
                "parallel), and this pipeline would give each its own: say which ranks are data parallel, "
                'with pipe.distributed(mesh=mesh["dp"])'
            )
        if chain.ragged and world > 1:
            raise ConfigError(
                f'sharding_filter(tail="ragged") ends at different steps on {world} ranks, and training '
                "would wait for ever: leave tail out for training; an evaluation needs no tail either"
            )

    def _begin(self, loader: Loader) -> TrainingRun:
        """The run, from the position in the checkpoint, if it is resumed from one."""
        folder = self._resumes_from
        saved = None if folder is None else checkpoint_file.read(Path(folder))
        if saved is not None:
            self.args.ignore_data_skip = True
        elif folder is not None and not self.args.ignore_data_skip:
            raise StateError(
                f"{folder} has no {checkpoint_file.FILE}, the position in the data: it was saved by another "
                "Trainer than that of trainpipes.integrations.transformers. To go on with its weights pass "
                "ignore_data_skip=True: the data then begins at the start of an epoch, or where "
                "pipe.load_state_dict(...) says",
                path=folder,
            )
        elif folder is not None:
            log.warning(
                f"{folder} has no {checkpoint_file.FILE}, the position in the data; since "
                "ignore_data_skip=True, the data begins at the start of an epoch, or where "
                "pipe.load_state_dict(...) says"
            )
        step, epoch = (0, 0) if folder is None else checkpoint_file.trained(Path(folder))
        run = TrainingRun(loader, saved, step, epoch)
        if run.left == 0:
            batches, (_, world) = (
                loader._session.plan.counts.batches_in_pass,
                loader._session.ranks(),
            )
            raise ConfigError(
                f"an epoch has a batch for each rank, or more, and this one has {int(batches)} for {world} "
                f"rank{'s' * (world > 1)}: add rows, or make smaller batches"
            )
        return run

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epoch, skipped = super()._init_training_state(*args, **kwargs)
        run = self._run
        if run is None:
            return epoch, skipped
        if self._resumes_from is not None and not run.resumed:
            run.call_first(epoch)
        return run.epoch, 0

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is not None:
            kwargs["steps_in_epoch"] = self._run.begin(kwargs["epoch"], kwargs["steps_in_epoch"])
        return super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As the Trainer says, and knows of the epoch's end."""
        run = self._run
        if run is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        run.before(self.state.global_step)
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        run.took(len(batches), num_batches)
        return [self._accepted(batch) for batch in batches], items

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._run is not None:  # first: once the Trainer's files are there, the folder is whole
            step = self.state.global_step
            position = self._run.position(step, float(self.args.ddp_timeout))
            if self.args.should_save:
                folder = Path(self._get_output_dir(trial=trial))
                checkpoint_file.write(folder / f"{PREFIX_CHECKPOINT_DIR}-{step}", position)
        super()._save_checkpoint(model, trial)

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Every row once where the pipeline makes batches; else what the Trainer gives."""
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        found = self.eval_dataset[found] if isinstance(found, str) else found
        if not _makes_batches(found):
            return super().get_eval_dataloader(eval_dataset)
        return EvaluationLoader(self._loader(every_row(found)), self.accelerator, self._accepted)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Every row once where the pipeline makes batches; else what the Trainer gives."""
        if not _makes_batches(test_dataset):
            return super().get_test_dataloader(test_dataset)
        return EvaluationLoader(
            self._loader(every_row(test_dataset)), self.accelerator, self._accepted
        )

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer says. A batch's loss is the mean of its own tokens and weighs as much as it has
        rows, so that the loss of all is the same on any number of ranks."""
        if not isinstance(dataloader, EvaluationLoader):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        kept = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        self.gather_function = dataloader.gatherer(self.args.eval_batch_size)
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = kept
            self.gather_function = self.accelerator.gather_for_metrics

    # Both

    def num_examples(self, dataloader: Any) -> int:
        """Rows of an epoch over all ranks."""
        if isinstance(dataloader, EvaluationLoader):
            found, dataloader = dataloader.rows, dataloader.loader
            if found is not None:
                return int(found)
        if not isinstance(dataloader, Loader):
            return int(super().num_examples(dataloader))
        plan = dataloader._session.plan
        rows = plan.counts.batches_in_pass * _rows_of_batch(dataloader.pipeline)
        return int(min(rows, (plan.inputs.epoch_rows or 0) * (plan.chain.times or 1)))

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of an optimizer step over all ranks."""
        found = int(super().get_total_train_batch_size(args))
        if not _makes_batches(self.train_dataset):
            return found
        return found // int(self._train_batch_size) * _rows_of_batch(self.train_dataset)

    def _accepted(self, batch: Any) -> Any:
        """A batch without what the model does not take, as ``remove_unused_columns`` says."""
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"a batch is a dict of tensors for the model, and the pipeline gives {type(batch).__name__}: "
                "end it with .pad_collate(), or with .collate(data_collator)"
            )
        if not self.args.remove_unused_columns:
            return batch
        names = inspect.signature(self.accelerator.unwrap_model(self.model).forward).parameters
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in names.values()):
            return batch
        taken = {*names, *self.label_names}
        return {name: value for name, value in batch.items() if name in taken}


def check_datasets(**given: Any) -> None:
    """Raise if a loader is given in place of its pipeline."""
    for name, dataset in given.items():
        several = dataset.values() if isinstance(dataset, dict) else [dataset]
        for one in several:
            pipe = one.pipeline if isinstance(one, Loader) else getattr(one, "dataset", None)
            if isinstance(pipe, Pipeline):
                raise ConfigError(
                    f"{name} is the pipeline itself, of which the trainer makes a loader, got a "
                    f"{type(one).__name__}: write {name}=pipe, and say workers by dataloader_num_workers= in "
                    "the arguments"
                )


def _makes_batches(dataset: Any) -> bool:
    return isinstance(dataset, Pipeline) and dataset._batching() is not None


def _rows_of_batch(pipe: Pipeline) -> int:
    return pipe._session.plan.chain.batch_size


def _no_epochs(pipe: Pipeline, args: Any) -> str:
    """Why epochs can't be counted in steps, and about how many those would be."""
    try:
        len(pipe)
    except TypeError as error:
        why = str(error)
    told = "pass max_steps=..."
    try:
        steps = -(-pipe.estimate_len() // args.gradient_accumulation_steps)
        told += (
            f"; {args.num_train_epochs:g} epochs are about {round(args.num_train_epochs * steps)}"
        )
    except TypeError:
        pass
    return f"num_train_epochs needs the number of steps in an epoch, for the learning rate: {told} ({why})"
