"""TRL's trainers on pipelines: on those that make batches, as the recipes ``sft``, ``chat`` and
``preference`` do, and on rows that TRL is to tokenize.

TRL looks at a row of its dataset, and prepares it by stages of ``datasets``, before its ``Trainer`` asks for
batches. In place of a pipeline that makes batches it is shown one row of its own format, and is given the
pipeline where it would prepare rows.

Rows go through stages of TRL's own, which drop, cut and pack them. So their position is that of the whole
dataset, as a ``StatefulDataLoader`` keeps it: each rank writes its own into the checkpoint's folder.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad

from trainpipes._internal.extra import need
from trainpipes.engine.topology import data_parallel
from trainpipes.errors import ConfigError, StateError
from trainpipes.integrations.transformers import PipelineTrainerMixin, check_datasets
from trainpipes.integrations.transformers.training import trained
from trainpipes.pipeline import Pipeline

need("trl", "trainpipes.integrations.trl")
need("datasets", "trainpipes.integrations.trl")

import trl  # noqa: E402
from accelerate.data_loader import DataLoaderShard, IterableDatasetShard  # noqa: E402
from datasets import Dataset, IterableDataset  # noqa: E402

from trainpipes.integrations.datasets import pipeline_of  # noqa: E402

__all__ = ["DPOTrainer", "PipelineDatasetsMixin", "SFTTrainer", "preference_batch"]

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
    ``max_steps`` is needed, and a resume takes as many ranks and workers as there were. Datasets are left to
    TRL.

    Raises:
        ConfigError: arguments contradict the pipeline, or several ranks would evaluate on rows.
        StateError: on a resume, if the checkpoint has no position, or one that does not fit.
    """

    #: A row in the trainer's own format.
    shown_row: ClassVar[dict[str, Any]]
    #: The loader of rows that TRL prepares, once it trains on them.
    _rows: Any = None

    def __init__(
        self,
        model: Any,
        *arguments: Any,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **options: Any,
    ) -> None:
        check_datasets(train_dataset=train_dataset, eval_dataset=eval_dataset)
        if isinstance(train_dataset, IterableDataset) and pipeline_of(train_dataset) is not None:
            raise ConfigError(
                "train_dataset must be the pipeline itself, got one of pipe.to_hf(), of which no position "
                "would be kept: write train_dataset=pipe, and what datasets does to rows as stages of it"
            )
        if isinstance(train_dataset, Pipeline) and train_dataset._batching() is None:
            _check_rows(options.get("args") or (arguments[0] if arguments else None))
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

    def get_train_dataloader(self) -> Any:
        """A loader of rows that keeps its position; else as ``PipelineTrainerMixin`` gives it."""
        pipe = pipeline_of(self.train_dataset)
        if pipe is None:
            return super().get_train_dataloader()
        self._check_ranks(pipe)
        config = self.accelerator.dataloader_config
        config.use_stateful_dataloader = True
        try:
            loader = super().get_train_dataloader()
        finally:
            config.use_stateful_dataloader = False
        if not isinstance(loader, DataLoaderShard) or isinstance(
            loader.dataset, IterableDatasetShard
        ):
            raise ConfigError(
                "each rank reads its own rows of this pipeline, and here one would read those of all: add "
                ".sharding_filter() to the pipeline, and leave split_batches and dispatch_batches out"
            )
        if self._resumes_from is not None:
            loader.load_state_dict(self._saved_rows(Path(self._resumes_from), loader.num_workers))
            self.args.ignore_data_skip = True  # nothing is left to skip
        self._rows = loader
        return loader

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer says. In a checkpoint the position in the data comes first."""
        if self._rows is not None and _internal_call and output_dir is not None:
            path = self._rows_file(Path(output_dir))
            path.parent.mkdir(parents=True, exist_ok=True)
            # Accelerate keeps it as it was after the batch that it gave last, though it has fetched another.
            saved = {"step": self.state.global_step, "num_workers": self._rows.num_workers}
            beside = path.with_suffix(".new")
            torch.save({**saved, "loader": self._rows.state_dict()}, beside)
            os.replace(beside, path)
        super().save_model(output_dir, _internal_call=_internal_call)

    def _rows_file(self, folder: Path) -> Path:
        rank, ranks = self.args.process_index, self.args.world_size
        return folder / "trainpipes" / f"rank-{rank:05}-of-{ranks:05}.pt"

    def _saved_rows(self, folder: Path, workers: int) -> Any:
        """The position of this rank's rows in a checkpoint.

        Raises:
            StateError: there is none, or it is of another checkpoint, of other ranks or workers.
        """
        path = self._rows_file(folder)
        try:
            saved = torch.load(path, weights_only=True)
            step, saved_workers, state = saved["step"], saved["num_workers"], saved["loader"]
        except FileNotFoundError:
            others = sorted(path.parent.glob("rank-*.pt"))
            if not others:
                raise StateError(
                    f"{folder} has no position of this pipeline's rows: resume from a checkpoint that was "
                    "saved with one, or start a new run"
                ) from None
            ranks = int(others[0].stem.rpartition("-")[2])
            raise StateError(
                f"ranks: saved {ranks}, now {self.args.world_size}; each rank's rows, which the trainer "
                "drops, cuts or packs, have a position of their own: resume on as many ranks"
            ) from None
        except (
            RuntimeError,
            EOFError,
            OSError,
            pickle.UnpicklingError,
            TypeError,
            KeyError,
        ) as error:
            raise StateError(
                f"{path} is damaged ({error or type(error).__name__}): resume from an earlier checkpoint"
            ) from error
        if step != trained(folder)[0]:
            raise StateError(
                f"{path} is of step {step}, and belongs to another checkpoint: resume from one as it was "
                "saved"
            )
        if saved_workers != workers:
            raise StateError(
                f"dataloader_num_workers: saved {saved_workers}, now {workers}; rows that the trainer "
                "prepares have a position in each worker: set it as it was"
            )
        return state


class SFTTrainer(PipelineDatasetsMixin, trl.SFTTrainer):
    """A ``trl.SFTTrainer`` that takes pipelines. See ``PipelineDatasetsMixin``.

    Batches are those of the recipes ``sft``, ``chat`` and ``pretrain``: ``input_ids``, ``labels``, and
    ``attention_mask``, or of packed rows ``position_ids``, by which models of transformers keep documents
    apart.
    """

    shown_row: ClassVar[dict[str, Any]] = {"input_ids": [0, 0], "labels": [0, 0]}

    def _accepted(self, batch: Any) -> Any:
        for name in ("input_ids", "labels"):
            _need_column(self, name, batch, "the recipes sft, chat and pretrain")
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


def _check_rows(args: Any) -> None:
    """Raise where arguments do not go with rows that repeat without end."""
    for name in ("save_strategy", "eval_strategy"):
        if getattr(args, name, "no") == "epoch":
            raise ConfigError(
                f'{name}="epoch": rows that the trainer prepares have no epochs that end: say "steps", and '
                "how many"
            )
    if getattr(args, "shuffle_dataset", False):
        raise ConfigError(
            "shuffle_dataset=True draws from a buffer that no state holds: leave it out, and put "
            ".shuffle(buffer_size) into the pipeline"
        )


SIDES = ("chosen", "rejected")


def preference_batch(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The chosen responses and after them the rejected ones, padded to one length L:

        input_ids        [2 B, L]
        attention_mask   [2 B, L]  1 where there is a token
        completion_mask  [2 B, L]  1 on the response and its end

    Args:
        batch: ``chosen_input_ids``, ``chosen_attention_mask``, ``chosen_labels``, of B rows, and the same of
            ``rejected``.

    >>> sides = {"chosen": 3, "rejected": 2}
    >>> names = ["input_ids", "attention_mask", "labels"]
    >>> one = {f"{s}_{n}": torch.ones(1, sides[s], dtype=torch.int64) for s in sides for n in names}
    >>> preference_batch(one)["attention_mask"].tolist()
    [[1, 1, 1], [1, 1, 0]]
    """
    length = max(batch[f"{side}_input_ids"].shape[1] for side in SIDES)

    def both(name: str, filler: int) -> torch.Tensor:
        parts = [batch[f"{side}_{name}"] for side in SIDES]
        return torch.cat([pad(part, (0, length - part.shape[1]), value=filler) for part in parts])

    return {
        "input_ids": both("input_ids", 0),
        "attention_mask": both("attention_mask", 0),
        "completion_mask": (both("labels", -100) != -100).long(),
    }
