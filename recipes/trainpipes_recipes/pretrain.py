"""Pretraining of a causal language model: plain text, packed into rows of one length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trainpipes import Pipeline
from trainpipes_recipes.inputs import TEXTS, Input, OnError

__all__ = ["pretrain"]


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
    epochs: int | None = None,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    cache: bool | str = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for pretraining of a causal language model on plain text.

    To train there is no end unless ``epochs`` says so. Each is a dict of int64 tensors ``[B, L]``,
    B = ``batch_size``, L = ``max_length``:

        input_ids        documents, each with its end-of-text, one after the other; a little padding
        labels           input_ids, -100 on the first token of each document and on padding
        position_ids     from 0 in each document
        segment_ids      1, 2, … on the documents of a row, 0 on padding

    and ``cu_seqlens`` (int32 ``[sequences + 1]``) and ``max_seqlen`` (int) for attention over sequences of
    variable length. Attend within a document only: docs/tokens.md shows how. Labels are not
    shifted: compare the logits at position t with the label at t + 1.

    Documents longer than a row are cut into several; with ``method`` "best_fit" and "first_fit" no others
    are cut. How many batches an epoch has is not known before its end: count steps, or ask
    ``Loader(pipe).estimate_len()`` with ``epochs=1``.

    Not for a few hundred documents with 24 shards: each shard packs its own, and its last row is not full.

    Args:
        files: a path, folder, glob, URL, or a list of them, in any format; or a pipeline of rows.
        tokenizer: whatever ``tokenize`` takes: a name on the Hugging Face hub, a path, "bytes", an object.
        text: column of the documents. Left out, the first of text, content, document and body that is there.
        train: False to evaluate: every row once, in file order; the pass ends after them.
        on_error: for rows whose text is null: "skip" leaves them out, and the log counts them; else the
            first is an error.
        add_eos: ends each document: True for the tokenizer's end token, or a token, or its id; False adds
            none.
        max_length: L, tokens of a row.
        method: how documents share rows: see ``pack``.
        pack_buffer_size: documents that are packed together.
        batch_size: rows in a batch.
        epochs: to train, epochs that one pass gives; None for no end.
        buffer_size: the fewest documents that the shuffle mixes with each other.
        seed: for the order of rows.
        num_shards: a multiple of every number of ranks that the run may have.
        cache: keep token ids on disk: True for the folder of ``tp.cache``, or a folder. Same batches.
        storage_options: of the file system, as fsspec takes them.
    """
    given = Input("pretrain", files, storage_options)
    rows = given.tokenized(
        tokenizer, ["input_ids"], named=[text], on_error=on_error, tokenize={"add_eos": add_eos}
    )
    if rows is None:
        (text,) = given.find({"text": text}, TEXTS)
        rows = given.rows([text]).tokenize(tokenizer, text, add_eos=add_eos, on_error=on_error)
    rows = given.arrange(
        rows, train=train, buffer_size=buffer_size, seed=seed, num_shards=num_shards, cache=cache
    )
    return (
        rows.repeat(epochs if train else 1)
        .pack(max_length, method=method, buffer_size=pack_buffer_size, seed=seed)
        .batch(batch_size)
        .pad_collate()
    )
