"""TRL's trainers on pipelines that make batches, such as those of the recipes ``sft``, ``chat``,
``preference`` and ``prompts``.

TRL looks at a row before it asks for batches: it is shown a row of its own format.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad

from trainpipes._internal.checks import need, require, wrong
from trainpipes.engine.record import Record
from trainpipes.integrations.transformers import PipelineTrainerMixin
from trainpipes.integrations.transformers.loaders import gathered

need("trl", "trainpipes.integrations.trl")
need("datasets", "trainpipes.integrations.trl")

import trl  # noqa: E402
from accelerate.utils import gather_object  # noqa: E402
from datasets import Dataset, IterableDataset  # noqa: E402

from trainpipes.writers.hf_dataset import pipeline_of  # noqa: E402

__all__ = [
    "DPOTrainer", "GRPOTrainer", "PipelineDatasetsMixin", "PromptsMixin", "RLOOTrainer", "RewardTrainer",
    "SFTTrainer", "preference_batch",
]  # fmt: skip

#: Arguments that a pipeline of batches has itself, and their replacements.
PACKS = "let the pipeline pack: packed=True of the recipes sft and chat, or .pack(...)"
CONTRADICTING = {
    "packing": PACKS,
    "eval_packing": PACKS,
    "padding_free": PACKS,
    "pad_to_multiple_of": "give None, and let the pipeline pad: .pad_collate(pad_to_multiple_of=...)",
    "formatting_func": "let the pipeline make the text of rows: .map(...) before a recipe",
    "precompute_ref_log_probs": "give ref_model=, or rows of text and a datasets.Dataset",
}


@contextmanager
def _gathering_by(accelerator: Any, gather: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``accelerator.gather`` be another function, for TRL's metrics."""
    accelerator.gather = gather
    try:
        yield
    finally:
        del accelerator.gather


def _pipeline(dataset: Any) -> Record | None:
    """What a dataset of one row stands for."""
    return getattr(dataset, "pipeline", None) if isinstance(dataset, IterableDataset) else None


class PipelineDatasetsMixin(PipelineTrainerMixin):
    """Makes a trainer of TRL take pipelines as ``train_dataset`` and ``eval_dataset``, and resume them
    exactly, as ``PipelineTrainerMixin`` says. Datasets are left to TRL.

    Raises:
        ConfigError: a pipeline gives single rows, or arguments contradict it.
        StateError: on a resume, if the checkpoint has no position that fits.
    """

    #: A row in the trainer's own format.
    shown_row: ClassVar[dict[str, Any]]
    #: A recipe that makes its batches.
    recipe: ClassVar[str]

    def __init__(
        self,
        model: Any,
        *arguments: Any,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **options: Any,
    ) -> None:
        if isinstance(train_dataset, IterableDataset) and pipeline_of(train_dataset) is not None:
            way = f"write train_dataset=pipe, with batches as the recipe {self.recipe} makes them"
            raise wrong("train_dataset", "the pipeline itself", "one of pipe.to_hf()", way)
        given = [options.get("args"), *arguments]
        only = any(getattr(one, "assistant_only_loss", False) for one in given)
        if isinstance(train_dataset, Record) and only:
            rule, way = (
                "off for a pipeline that makes batches",
                "the recipe chat labels these alone",
            )
            raise wrong("assistant_only_loss", rule, True, way)
        options |= {"eval_dataset": self._shown("eval_dataset", eval_dataset)}
        self.formatting_func = options.get("formatting_func")
        trainer: Any = super()
        train = self._shown("train_dataset", train_dataset)
        trainer.__init__(model, *arguments, train_dataset=train, **options)
        if _pipeline(self.train_dataset) is not None:
            raise wrong("dataset_kwargs", "without skip_prepare_dataset", True, "leave it out")

    def _shown(self, name: str, dataset: Any) -> Any:
        """What TRL looks at in place of a pipeline, or of each in a dict."""
        if isinstance(dataset, dict):
            return {key: self._shown(name, part) for key, part in dataset.items()}
        if not isinstance(dataset, Record):
            return dataset
        way = f"write {name}=tp.recipe({self.recipe!r}, pipe, tokenizer)"
        dataset._need_batches(name, way)
        shown = Dataset.from_list([self.shown_row]).to_iterable_dataset()
        shown.pipeline = dataset
        return shown

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        """The pipeline itself; of datasets, TRL's rows."""
        dataset = self._shown("dataset", dataset)
        pipeline = _pipeline(dataset)
        if pipeline is None:
            trainer: Any = super()
            return trainer._prepare_dataset(dataset, processing_class, args, *rest)
        for name, way in CONTRADICTING.items():
            # DPOTrainer has turned padding_free off itself, and said so.
            value = getattr(self, name, getattr(args, name, False))
            require(not value, name, "off for a pipeline that makes batches", value, way)
        return pipeline

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """As TRL says; in an evaluation on several ranks, its metrics are of each batch, as on one."""
        evaluation, known = self._evaluation, hasattr(self, "_metrics")  # of most trainers
        if evaluation is None or not known or self.accelerator.num_processes == 1:
            return super().compute_loss(model, inputs, *arguments, **options)
        metrics, of_batch = self._metrics["eval"], defaultdict[str, list[Any]](list)
        self._metrics["eval"] = of_batch
        try:
            with _gathering_by(self.accelerator, lambda values: values):  # no rows that fill in
                found = super().compute_loss(model, inputs, *arguments, **options)
        finally:
            self._metrics["eval"] = metrics
        for rank in gather_object([None if evaluation.fills_in() else of_batch]):
            for name, values in (rank or {}).items():
                metrics[name] += values
        return found

    def _need(self, names: tuple[str, ...], batch: Any) -> None:
        present = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        lacking = [name for name in names if name not in present]
        rule = f"one with {', '.join(lacking)}, as the recipe {self.recipe} makes it"
        require(not lacking, f"a batch of {type(self).__name__}", rule, present)


class SFTTrainer(PipelineDatasetsMixin, trl.SFTTrainer):
    """A ``trl.SFTTrainer`` that takes pipelines. See ``PipelineDatasetsMixin``.

    Batches are those of the recipes ``sft``, ``chat`` and ``pretrain``: ``input_ids``, ``labels``, and
    ``attention_mask``, or ``position_ids`` of packed rows.
    """

    shown_row: ClassVar[dict[str, Any]] = {"input_ids": [0, 0], "labels": [0, 0]}
    recipe: ClassVar[str] = "sft"
    _total_train_tokens: Any

    def _accepted(self, batch: Any) -> Any:
        self._need(("input_ids", "labels"), batch)
        if "segment_ids" in batch:  # packed: transformers has other names for what else is there
            names = ("input_ids", "labels", "position_ids", "segment_ids")
            self._need(names, batch)
            return {name: batch[name] for name in names}
        return super()._accepted(batch)

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """As TRL says, which would count the tokens of a single packed row of each batch."""
        segments, before = inputs.pop("segment_ids", None), self._total_train_tokens
        loss = super().compute_loss(model, inputs, *arguments, **options)
        if segments is not None and self.model.training:
            tokens = self.accelerator.gather_for_metrics((segments > 0).sum()).sum().item()
            self._total_train_tokens = before + tokens // self._tp_size
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss


class _PairsMixin(PipelineDatasetsMixin):
    """Takes batches of the recipe ``preference``."""

    recipe: ClassVar[str] = "preference"

    def _accepted(self, batch: Any) -> Any:
        self._need(("chosen_input_ids", "rejected_input_ids", "chosen_labels"), batch)
        return batch

    def _prepare_inputs(self, inputs: Any) -> Any:
        if "chosen_input_ids" in inputs:
            inputs = self._of_pairs(preference_batch(inputs))
        return super()._prepare_inputs(inputs)

    def _of_pairs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """As TRL says, which would gather as many rows of each rank, where the last batch has fewer."""
        gather, rows = self.accelerator.gather, inputs["input_ids"].shape[:1]
        sizes, several = [0], self.accelerator.num_processes > 1
        if several and self._training is not None and self.model.training:
            sizes = gather(torch.tensor(rows, device=self.accelerator.device)).tolist()
        if len({*sizes}) == 1:
            return super().compute_loss(model, inputs, *arguments, **options)

        def of_each(value: torch.Tensor) -> Any:
            if value.dim() == 0:
                return gather(value)
            return gathered(gather, value, [size * len(value) // rows[0] for size in sizes])

        with _gathering_by(self.accelerator, of_each):
            return super().compute_loss(model, inputs, *arguments, **options)


class DPOTrainer(_PairsMixin, trl.DPOTrainer):
    """A ``trl.DPOTrainer`` that takes pipelines. See ``PipelineDatasetsMixin``.

    Batches are those of the recipe ``preference``.
    """

    shown_row: ClassVar[dict[str, Any]] = {"prompt": "", "chosen": "", "rejected": ""}


class RewardTrainer(_PairsMixin, trl.RewardTrainer):
    """A ``trl.RewardTrainer`` that takes pipelines. See ``PipelineDatasetsMixin``.

    Batches are those of the recipe ``preference``.
    """

    shown_row: ClassVar[dict[str, Any]] = {"chosen_ids": [0], "rejected_ids": [0]}

    def _of_pairs(self, batch: dict[str, Any]) -> dict[str, Any]:
        # The model finds the last token of a row by the id of padding.
        padded = batch["attention_mask"] == 0
        batch["input_ids"].masked_fill_(padded, self.processing_class.pad_token_id)
        del batch["completion_mask"]
        return batch


class PromptsMixin(PipelineTrainerMixin):
    """Makes a trainer of TRL that generates take pipelines of prompts as ``train_dataset``, and resume them
    exactly, as ``PipelineTrainerMixin`` says: also between two steps that use the same generations.

    A batch is a list of rows with a "prompt", as the recipe ``prompts`` makes without a tokenizer. It is
    the rows that a rank generates for at a time: ``per_device_train_batch_size * steps_per_generation`` rows,
    each prompt ``num_generations`` times. The order is that of TRL's ``RepeatSampler``.

    Raises:
        ConfigError: batches are of another kind or size, or an evaluation is to be on a pipeline.
        StateError: on a resume, if the checkpoint has no position that fits.
    """

    _sizes_steps = False

    def __init__(self, *arguments: Any, train_dataset: Any = None, **options: Any) -> None:
        held_out = options.get("eval_dataset")
        for part in held_out.values() if isinstance(held_out, dict) else [held_out]:
            if isinstance(part, Record):
                raise wrong(
                    "eval_dataset",
                    "a datasets.Dataset",
                    part,
                    "write Dataset.from_list(list(rows))",
                )
        shown: Any = train_dataset
        if isinstance(train_dataset, Record):
            way = 'write train_dataset=tp.recipe("prompts", pipe, batch_size=..., num_generations=...)'
            train_dataset._need_batches("train_dataset", way)
            shown = Dataset.from_list([{"prompt": ""}])
            shown.pipeline = train_dataset
        if options.get("global_batches") is not None:
            rule = "left out where generations are used for several steps"
            way = "give steps_per_generation and per_device_train_batch_size"
            raise wrong("global_batches", rule, options["global_batches"], way)
        trainer: Any = super()
        trainer.__init__(*arguments, train_dataset=shown, **options)
        if isinstance(train_dataset, Record):
            self.train_dataset = train_dataset

    def _times(self) -> int:
        return int(self.num_iterations * self.args.steps_per_generation)

    def _resume(self, loader: Any) -> None:
        super()._resume(loader)
        self._step = loader.given  # of the steps that use the same generations

    def _accepted(self, batch: Any) -> Any:
        rows = self.args.per_device_train_batch_size * self.args.steps_per_generation
        count = self.num_generations
        way = f'write tp.recipe("prompts", pipe, batch_size={rows}, num_generations={count})'
        good = isinstance(batch, list) and all(
            isinstance(r, Mapping) and "prompt" in r for r in batch
        )
        got = list(batch) if isinstance(batch, Mapping) else batch
        rule = 'a list of rows with a "prompt"'
        require(good, "a batch", rule, got, f"{way}, without a tokenizer")
        groups = [batch[n : n + count] for n in range(0, len(batch), count)]
        whole = all(
            len(g) == count and all(r["prompt"] == g[0]["prompt"] for r in g) for g in groups
        )
        rule = f"per_device_train_batch_size * steps_per_generation = {rows} rows, each prompt {count} times"
        way += ", where the number of rows is a multiple of num_generations"
        require(len(batch) == rows and whole, "a batch", f"{rule} side by side", len(batch), way)
        return batch


class GRPOTrainer(PromptsMixin, trl.GRPOTrainer):
    """A ``trl.GRPOTrainer`` that takes pipelines of prompts. See ``PromptsMixin``."""


class RLOOTrainer(PromptsMixin, trl.RLOOTrainer):
    """A ``trl.RLOOTrainer`` that takes pipelines of prompts. See ``PromptsMixin``."""


SIDES = ("chosen", "rejected")


def preference_batch(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The chosen responses, then the rejected responses, padded to length L: ``input_ids``,
    ``attention_mask`` (1 where there is a token) and ``completion_mask`` (1 on the response and its end),
    each ``[2 B, L]``.

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
