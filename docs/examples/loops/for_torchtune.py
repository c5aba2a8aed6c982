"""A pipeline in a recipe of torchtune. Put the mixin before the recipe's class:

    class Recipe(FromPipeline, FullFinetuneRecipeDistributed):
        pass

and name the files and the tokenizer in the config's ``dataset``: {files: ..., tokenizer: ...}.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

import trainpipes as tp


class TuneLoader:
    """What recipes ask of a StatefulDataLoader and its sampler."""

    def __init__(self, pipe: tp.Pipeline) -> None:
        self.loader = tp.Loader(pipe)
        self.sampler = self.loader  # recipes call dataloader.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.loader:  # recipes shift the labels themselves
            yield {"tokens": batch["input_ids"], "labels": batch["labels"]}

    def state_dict(self) -> dict[str, Any]:
        return self.loader.full_state_dict()  # all ranks ask for it, rank 0 writes it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


class FromPipeline:
    """Gives a recipe its data, and what it saves of them under "dataloader" back to it."""

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        super()._update_recipe_state(ckpt_dict)
        self._data_state = ckpt_dict["dataloader"]

    def _setup_data(
        self,
        cfg_dataset: Any,
        shuffle: bool,
        batch_size: int,
        collate_fn: str,
        dataloader_state_dict: dict[str, Any] | None = None,
    ) -> TuneLoader:
        rows = tp.list_files(cfg_dataset["files"]).read_parquet(columns=["prompt", "response"])
        rows = rows.sharding_filter(num_shards=24)
        if shuffle:
            rows = rows.shuffle(buffer_size=40_960, seed=0)
        rows = rows.tokenize(
            cfg_dataset["tokenizer"], concat=["prompt", "response"], add_eos=True, labels="response"
        )
        pipe = rows.batch(batch_size, drop_last=True).pad_collate()
        if hasattr(self, "dp_rank"):  # recipes for one device have none
            pipe = pipe.distributed(rank=self.dp_rank, world_size=self.dp_size)
        loader = TuneLoader(pipe)
        state = dataloader_state_dict or getattr(self, "_data_state", None)
        if state:
            loader.load_state_dict(state)
        return loader
