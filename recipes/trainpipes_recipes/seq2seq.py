"""Fine-tuning of an encoder-decoder model: the prompt in, the response out, each padded by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from trainpipes import Pipeline, from_arrow
from trainpipes.stages.tokenized_by import TokenizedBy
from trainpipes_recipes.inputs import PAIRS, Input, shuffled

__all__ = ["seq2seq"]


def seq2seq(
    files: Any,
    tokenizer: Any,
    *,
    prompt: str | None = None,
    response: str | None = None,
    context: str | None = None,
    max_length: int = 512,
    batch_size: int = 32,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = False,
    hf_names: bool = False,
    keep_in_memory: bool = False,
    cache: bool | str = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for training an encoder-decoder model.

    Each is a dict of int64 tensors, B = ``batch_size``:

        input_ids    [B, L]   the prompt's tokens, end-of-text, then padding; L the longest prompt
        input_mask   [B, L]   1 where input_ids holds a token, 0 where it holds padding
        target_ids   [B, M]   the response's tokens, end-of-text, then padding; M the longest response

    With ``hf_names=True`` they are named "input_ids", "attention_mask" and "labels", and labels are padded
    with -100. Without it, leave the padding of ``target_ids`` out of the loss, by -100 or a mask: it is the
    tokenizer's pad token, which other text may hold too.

    Not for decoder-only models, which read prompt and response as one sequence: that is ``sft``.

    Args:
        files: files of any format that ``Input`` knows (Parquet, JSON lines, CSV, Arrow, ...): path, folder,
            glob, any fsspec URL, or a list of these; or a pipeline of rows.
        tokenizer: whatever ``tokenize`` takes: path of a ``tokenizer.json``, "bytes", an object.
        prompt: column of the encoder's input. Left out, it and ``response`` are the first of these that
            are there: prompt + response, prompt + completion, instruction + output, question + answer
            and a few more (``trainpipes_recipes.inputs.PAIRS``); the choice is logged.
        response: column of the decoder's output.
        context: column that is added to the prompt, after an empty line, where it holds text. Left out,
            "input" beside "instruction", as in Alpaca's rows; "" for none.
        max_length: the most tokens of a prompt, and of a response, end-of-text included. A text that is cut
            also ends with end-of-text: choose ``max_length`` so that few responses are cut.
        batch_size: rows in a batch.
        buffer_size: the fewest rows that the shuffle mixes with each other.
        seed: for the order of rows.
        num_shards: a multiple of every number of ranks that the run may have.
        drop_last: leave out the short batch at the end of an epoch.
        hf_names: name the tensors as transformers' encoder-decoder models take them: "input_ids",
            "attention_mask", and "labels" with -100 on padding.
        keep_in_memory: read both columns once and keep them in memory, not again in every epoch. The order
            of rows differs, since a table in memory has no row groups to shuffle, and a state loads only
            with the same value.
        cache: keep token ids on disk, so that later epochs and runs read them as fast as if the files
            held them: True for the folder of ``tp.cache``, or a folder. The first batch of the
            first run then waits until a whole buffer is tokenized. Batches and states are the same.
        storage_options: options of the file system, as fsspec takes them.
    """
    given = Input("seq2seq", files, storage_options)
    mask, target = ("attention_mask", "labels") if hf_names else ("input_mask", "target_ids")
    ready = given.tokenized(
        tokenizer, ["input_ids", target], named=[prompt, response, context],
        tokenize={"max_length": max_length, "add_eos": True},
    )  # fmt: skip
    if ready is None:
        prompt, response = given.find({"prompt": prompt, "response": response}, PAIRS)
        rows = given.prompted(prompt, context, [prompt, response])
    else:
        rows = ready
    if keep_in_memory:
        # Every rank reads all rows, and keeps them; what it trains on is dealt below.
        pieces = rows.distributed(rank=0, world_size=1).batch(8192).collate(format="arrow")
        rows = from_arrow(pa.concat_tables(pieces))
    if prompt is not None and response is not None:
        columns = {prompt: "input_ids", response: target}
        rows = rows.tokenize(tokenizer, columns, max_length=max_length, add_eos=True)
    elif keep_in_memory:
        rows = rows.then(TokenizedBy(tokenizer, ["input_ids", target]))
    if cache:  # else tokenizing waits until rows are dealt, wherever it is written
        rows = rows.cache(None if cache is True else cache)
    return (
        shuffled(rows, buffer_size, seed=seed, num_shards=num_shards)
        .batch(batch_size, drop_last=drop_last)
        .pad_collate(mask={"input_ids": mask})
    )
