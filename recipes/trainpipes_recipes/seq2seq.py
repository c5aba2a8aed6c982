from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainpipes import Pipeline
from trainpipes_recipes.inputs import PAIRS, Input, OnError, documented

__all__ = ["seq2seq"]


@documented
def seq2seq(
    files: Any,
    tokenizer: Any,
    *,
    prompt: str | None = None,
    response: str | None = None,
    context: str | None = None,
    train: bool = True,
    on_error: OnError | None = None,
    max_length: int = 512,
    batch_size: int = 32,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    cache: bool | str = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for training an encoder-decoder model.

    Each is a dict of int64 tensors, B = ``batch_size``, named as in transformers:

        input_ids        [B, L]   the prompt's tokens, end-of-text, then padding; L the longest prompt
        attention_mask   [B, L]   1 on tokens, 0 on padding
        labels           [B, M]   the response's tokens, end-of-text, then -100; M the longest response

    Rows are not packed: encoder-decoder models take no mask by which a response sees its own prompt
    only.

    Args:
        prompt: column of the encoder's input; by default it and ``response`` are the first pair of
            ``trainpipes_recipes.inputs.PAIRS``: prompt + response, instruction + output, ...
        response: column of the decoder's output.
        context: column added to the prompt, after an empty line, where it holds text; by default
            "input" or "context" beside "instruction"; "" for none.
        max_length: the most tokens of a prompt, and of a response, end-of-text included, which cut
            texts keep.
    """
    data = Input("seq2seq", files, storage_options)
    rows = data.tokenized(
        tokenizer, ["input_ids", "labels"], named=[prompt, response, context],
        shaping={"context": context}, on_error=on_error,
        tokenize={"max_length": max_length, "add_eos": True, "labels": None},
    )  # fmt: skip
    if rows is None:
        prompt, response = data.find({"prompt": prompt, "response": response}, PAIRS)
        rows = data.prompted(prompt, context, [prompt, response]).tokenize(
            tokenizer, {prompt: "input_ids", response: "labels"}, max_length=max_length, add_eos=True,
            on_error=on_error,
        )  # fmt: skip
    rows = data.arrange(rows, train, buffer_size, seed, num_shards, cache)
    batches = rows.batch(batch_size, drop_last=train and drop_last)
    return batches.pad_collate(padding_side="right", mask={"input_ids": "attention_mask"})
