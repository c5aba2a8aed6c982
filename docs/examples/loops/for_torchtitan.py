"""A pipeline as the data loader of torchtitan: release 0.3.0, and main since it reads by Grain (August 2026).

In the trainer's config, in place of its own loader:

    dataloader=PipelineDataLoader.Config(files="texts/*.parquet")

Texts are packed as the trainer's tokenizer cuts them. Main's ``TrainerBatch`` is the pair that 0.3.0 takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

try:
    from torchtitan.components.data.loader import BaseDataLoader  # main
except ImportError:
    from torchtitan.components.dataloader import BaseDataLoader  # 0.3.0

import trainpipes as tp


class PipelineDataLoader(BaseDataLoader):
    """Packed texts. The position is in torchtitan's checkpoint, for any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        files: str
        num_shards: int = 96  # best if every number of data-parallel ranks divides it
        buffer_size: int = 40_960
        seed: int = 0
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int | None = None,
        local_batch_size: int | None = None,
        max_context_length: int | None = None,  # main, in place of the two
        num_tokens_per_batch: int | None = None,
        **_: Any,
    ) -> None:
        length = seq_len or max_context_length
        batch_size = local_batch_size or num_tokens_per_batch // length
        rows = tp.list_files(config.files).read_parquet(columns=["text"])
        rows = rows.sharding_filter(config.num_shards)
        rows = rows.shuffle(config.buffer_size, seed=config.seed)
        rows = rows.tokenize(tokenizer.tokenizer, "text", add_eos=tokenizer.eos_id)
        if config.infinite:
            rows = rows.repeat()
        pipe = rows.pack(length + 1).batch(batch_size).pad_collate()
        self.loader = tp.Loader(pipe.distributed(rank=dp_rank, world_size=dp_world_size))

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for batch in self.loader:
            ids, positions = batch["input_ids"], batch["position_ids"]  # [B, length + 1]
            yield {"input": ids[:, :-1], "positions": positions[:, :-1]}, batch["labels"][:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.loader.load_state_dict(state_dict)
