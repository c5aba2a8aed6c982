from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trainpipes import Pipeline
from trainpipes_recipes.inputs import TEXTS, Input, OnError, balanced, documented

__all__ = ["pretrain"]


@documented
def pretrain(
    files: Any,
    tokenizer: Any,
    *,
    text: str | None = None,
    train: bool = True,
    on_error: OnError | None = None,
    add_eos: bool | str | int = True,
    max_length: int = 2048,
    method: Literal["concat", "first_fit", "best_fit"] = "best_fit",
    pack_buffer_size: int = 1024,
    batch_size: int = 8,
    balance: int | None = None,
    epochs: int | None = None,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    cache: bool | str = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for pretraining a causal language model on plain text.

    Without ``epochs``, training has no end. Each is a dict of int64 tensors ``[B, L]``, B =
    ``batch_size``, L = ``max_length``:

        input_ids        documents, each with its end-of-text, in turn; a little padding
        labels           input_ids, -100 on the first token of each document and on padding
        position_ids     from 0 in each document
        segment_ids      1, 2, ... on the documents of a row, 0 on padding

    and ``cu_seqlens`` (int32 ``[sequences + 1]``) and ``max_seqlen`` (int): attend within a
    document only (docs/tokens.md). Labels are not shifted: compare the logits at position t with
    the label at t + 1.

    The number of batches is not known before an epoch's end: count steps, or ask
    ``Loader(pipe).estimate_len()`` with ``epochs=1``. Each document comes once an epoch; in each
    shard, documents of at most a row go on into the next. Each shard's last row of all is not
    full: use fewer shards for a few hundred documents.

    Args:
        text: column of the documents; by default the first of text, content, document and body.
        add_eos: ends each document: True for the tokenizer's end token, a token, or its id; False
            for none.
        max_length: L, tokens of a row.
        method: how documents share rows: see ``pack``.
        pack_buffer_size: documents packed together.
        epochs: to train, epochs that a pass gives; None for no end.
    """
    data = Input("pretrain", files, storage_options)
    rows = data.tokenized(
        tokenizer, ["input_ids"], named=[text], on_error=on_error,
        tokenize={"add_eos": add_eos, "max_length": None, "labels": None},
    )  # fmt: skip
    if rows is None:
        (text,) = data.find({"text": text}, TEXTS)
        rows = data.rows([text]).tokenize(tokenizer, text, add_eos=add_eos, on_error=on_error)
    rows = data.arrange(rows, train, buffer_size, seed, num_shards, cache)
    rows = rows.repeat(epochs if train else 1)
    rows = rows.pack(max_length, method=method, buffer_size=pack_buffer_size, seed=seed)
    return balanced(rows.batch(batch_size), balance, train).pad_collate()
