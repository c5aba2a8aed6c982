from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainpipes import Pipeline
from trainpipes_recipes.inputs import PAIRS, Input, OnError, documented

__all__ = ["sft"]


@documented
def sft(
    files: Any,
    tokenizer: Any,
    *,
    prompt: str | None = None,
    response: str | None = None,
    context: str | None = None,
    train: bool = True,
    on_error: OnError | None = None,
    max_length: int = 1024,
    packed: bool = False,
    batch_size: int = 8,
    balance: int | None = None,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    cache: bool | str = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for supervised fine-tuning of a causal language model.

    Each is a dict of int64 tensors ``[B, L]``, B = ``batch_size``, L its longest row:

        input_ids        the prompt's tokens, then the response's, then end-of-text, then padding
        attention_mask   1 on tokens, 0 on padding
        labels           input_ids on the response and its end-of-text, -100 elsewhere, also on the
                         end-of-text of a row that was cut

    Labels are not shifted: compare the logits at position t with the label at t + 1. A response
    follows its prompt as it is, without a space of its own. A row that is too long loses its end.
    For conversations of several turns use ``chat``.

    Args:
        prompt: column of the model's input; by default it and ``response`` are the first pair of
            ``trainpipes_recipes.inputs.PAIRS``: prompt + response, instruction + output, ...
        response: column of the text in the loss.
        context: column added to the prompt, after an empty line, where it holds text; by default
            "input" or "context" beside "instruction"; "" for none.
        on_error: for rows without a target, whose prompt alone fills ``max_length``: None warns
            once; "raise", "keep"; or "skip", which also leaves out rows whose text is null, logs
            how many, and makes the number of batches unknown.
        max_length: the most tokens of a row, end-of-text included.
        drop_last: to train, leave out the short batch at the end of an epoch, unless ``packed``.
    """
    data = Input("sft", files, storage_options)
    rows = data.tokenized(
        tokenizer, ["input_ids", "labels"], named=[prompt, response, context],
        shaping={"context": context}, on_error=on_error,
        tokenize={"max_length": max_length, "add_eos": True, "labels": ...},
    )  # fmt: skip
    if rows is None:
        prompt, response = data.find({"prompt": prompt, "response": response}, PAIRS)
        data.warn_of_joint(prompt, response)
        rows = data.prompted(prompt, context, [prompt, response]).tokenize(
            tokenizer, concat=[prompt, response], max_length=max_length, add_eos=True, labels=response,
            on_error=on_error,
        )  # fmt: skip
    rows = data.arrange(rows, train, buffer_size, seed, num_shards, cache)
    length = max_length if packed else None
    return data.batches(
        rows, batch_size, drop_last=train and drop_last, packed=length, seed=seed,
        balance=balance, train=train,
    )  # fmt: skip
