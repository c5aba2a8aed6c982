"""Generators of (inputs, targets, state) on the device, as loops in the style of nanochat and nanoGPT take.

Such a loop has the next batch in hand when it saves. So the state that comes with a batch is the one before
it: resumed from there, that batch comes first. Where it is saved, write of_all_ranks(state) for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

import trainpipes as tp

NUM_SHARDS = 24  # best if every number of ranks divides it
Batches = Iterator[tuple[Tensor, Tensor, dict[str, Any]]]


def documents(
    files: str, tokenizer: Any, B: int, T: int, device: str, resume_state_dict: Any = None
) -> Batches:
    """Of texts, packed: nanochat's loader. No document is cut that fits into a row of T + 1."""
    rows = tp.list_files(files).read_parquet(columns=["text"]).sharding_filter(NUM_SHARDS)
    rows = rows.shuffle(buffer_size=40_960, seed=0).tokenize(tokenizer, add_eos=True).repeat()
    return run(rows.pack(T + 1).batch(B).pad_collate().to(device), resume_state_dict)


def tokens(file: str, B: int, T: int, device: str, resume_state_dict: Any = None) -> Batches:
    """Of a train.bin of token ids: nanoGPT's get_batch, with each token once an epoch."""
    rows = tp.from_memmap(file, dtype="uint16", length=T + 1).sharding_filter(NUM_SHARDS)
    rows = rows.shuffle(scope="global", seed=0).repeat()
    return run(rows.batch(B).collate().to(device), resume_state_dict)


def run(pipe: tp.Pipeline, resume_state_dict: Any) -> Batches:
    loader = tp.Loader(pipe)
    if resume_state_dict is not None:
        loader.load_state_dict(resume_state_dict)
    batches = iter(loader)
    while True:
        before = loader.state_dict()
        batch = next(batches)
        ids = batch["input_ids"]  # [B, T + 1]
        targets = batch.get("labels", ids)[:, 1:]
        # These loops leave -1 out of the loss, pack says -100.
        yield ids[:, :-1].contiguous(), targets.masked_fill(targets == -100, -1), before


def of_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """What the ranks' states say together, for any number of ranks. All ranks call it."""
    if not dist.is_initialized():
        return state
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return tp.merge_states(states)
