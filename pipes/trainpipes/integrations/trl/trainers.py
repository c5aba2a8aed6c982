"""TRL's trainers on pipelines: on those that make batches, as the recipes ``sft``, ``chat`` and
``preference`` do, and on rows that TRL is to tokenize.

TRL looks at a row of its dataset, and prepares it by stages of ``datasets``, before its ``Trainer`` asks for
batches. In place of a pipeline that makes batches it is shown one row of its own format, and is given the
pipeline where it would prepare rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from trainpipes.errors import ConfigError
from trainpipes.extra import need
from trainpipes.integrations.transformers import PipelineTrainerMixin
from trainpipes.integrations.transformers import check_datasets
from trainpipes.integrations.trl.position import PositionCallback
from trainpipes.integrations.trl.preference_batch import preference_batch
from trainpipes.pipeline import Pipeline
from trainpipes.topology import data_parallel

need("trl", "trainpipes.integrations.trl")

import trl  # noqa: E402
from datasets import Dataset, IterableDataset  # noqa: E402

__all__ = ["DPOTrainer", "PipelineDatasetsMixin", "SFTTrainer"]

#: Arguments that say what a pipeline of batches says itself, and what to write in their place.
CONTRADICTING = {
    "packing": "let the pipeline pack: .pack(...), or packed=True of the recipe",
    "eval_packing": "let the pipeline pack: .pack(...), or packed=True of the recipe",
    "precompute_ref_log_probs": "give ref_model=, or rows of text and a datasets.Dataset",
}


class _Shown(IterableDataset):
    """A dataset of one row, to be looked at in place of a pipeline."""

    def __init__(self, row: dict[str, Any], pipeline: Pipeline) -> None:
        super().__init__(Dataset.from_list([row]).to_iterable_dataset()._ex_iterable)
        self.pipeline = pipeline


class PipelineDatasetsMixin(PipelineTrainerMixin):
    """Makes a trainer of TRL take pipelines as ``train_dataset`` and ``eval_dataset``, and resume them
    exactly.

    A pipeline that makes batches is used as in ``PipelineTrainerMixin``; the trainer does not tokenize, cut
    or pack. The rows of a pipeline without batches are prepared by the trainer: they repeat without end,
    ``PositionCallback`` keeps their position, and ``max_steps`` is needed. Datasets are left to TRL.

    Raises:
        ConfigError: arguments contradict the pipeline, or several ranks would evaluate on rows.
    """

    #: A row in the trainer's own format.
    shown_row: ClassVar[dict[str, Any]]

    def __init__(
        self,
        model: Any,
        *arguments: Any,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Any = None,
        **options: Any,
    ) -> None:
        check_datasets(train_dataset=train_dataset, eval_dataset=eval_dataset)
        if isinstance(train_dataset, Pipeline) and train_dataset._batching() is None:
            callbacks = [*(callbacks or ()), PositionCallback()]
            if not train_dataset._session.plan.chain.endless:
                train_dataset = train_dataset.repeat()
        if isinstance(eval_dataset, dict):
            eval_dataset = {name: self._for_trl(one) for name, one in eval_dataset.items()}
        trainer: Any = super()
        trainer.__init__(
            model,
            *arguments,
            train_dataset=self._for_trl(train_dataset, True),
            eval_dataset=self._for_trl(eval_dataset),
            callbacks=callbacks,
            **options,
        )
        if isinstance(self.train_dataset, _Shown):
            raise ConfigError(
                "dataset_kwargs={'skip_prepare_dataset': True} is for datasets, got a pipeline, of which "
                "nothing is prepared: leave it out"
            )

    def _for_trl(self, dataset: Any, training: bool = False) -> Any:
        """A dataset that TRL can look at."""
        if not isinstance(dataset, Pipeline):
            return dataset
        if dataset._batching() is not None:
            return _Shown(self.shown_row, dataset)
        if not training and data_parallel()[1] > 1:
            raise ConfigError(
                "eval_dataset: several ranks may have different numbers of batches of a pipeline of rows, "
                "and would wait for each other: give one that makes batches, such as that of a recipe"
            )
        return dataset.to_hf()

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        """The pipeline itself, where it makes batches; else what TRL makes of rows."""
        dataset = self._for_trl(dataset)
        if not isinstance(dataset, _Shown):
            trainer: Any = super()
            return trainer._prepare_dataset(dataset, processing_class, args, *rest)
        for name, cure in CONTRADICTING.items():
            if getattr(args, name, False):
                raise ConfigError(
                    f"{name}={getattr(args, name)!r} is for rows that TRL prepares, got a pipeline that "
                    f"makes batches: {cure}"
                )
        return dataset.pipeline


class SFTTrainer(PipelineDatasetsMixin, trl.SFTTrainer):
    """A ``trl.SFTTrainer`` that takes pipelines. See ``PipelineDatasetsMixin``.

    Batches are those of the recipes ``sft``, ``chat`` and ``pretrain``: ``input_ids``, ``labels``, and
    ``attention_mask``, or of packed rows ``position_ids``, by which models of transformers keep documents
    apart.
    """

    shown_row: ClassVar[dict[str, Any]] = {"input_ids": [0, 0], "labels": [0, 0]}

    def _accepted(self, batch: Any) -> Any:
        _need_column(self, "input_ids", batch, "the recipes sft, chat and pretrain")
        batch = super()._accepted(batch)
        if "segment_ids" in batch:  # packed: transformers has other names for what else is there
            batch = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
        return batch


class DPOTrainer(PipelineDatasetsMixin, trl.DPOTrainer):
    """A ``trl.DPOTrainer`` that takes pipelines. See ``PipelineDatasetsMixin``.

    Batches are those of the recipe ``preference``.
    """

    shown_row: ClassVar[dict[str, Any]] = {"prompt": "", "chosen": "", "rejected": ""}

    def _accepted(self, batch: Any) -> Any:
        if "completion_mask" not in batch:  # not rows that TRL has prepared
            _need_column(self, "chosen_input_ids", batch, "the recipe preference")
        return batch

    def _prepare_inputs(self, inputs: Any) -> Any:
        if "chosen_input_ids" in inputs:
            inputs = preference_batch(inputs)
        return super()._prepare_inputs(inputs)


def _need_column(trainer: Any, name: str, batch: Any, makers: str) -> None:
    """Raise where a batch is not of this trainer's kind."""
    if not isinstance(batch, Mapping) or name not in batch:
        found = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ConfigError(
            f"{type(trainer).__name__} trains on batches with {name!r}, such as those of {makers}, got "
            f"{found}"
        )
