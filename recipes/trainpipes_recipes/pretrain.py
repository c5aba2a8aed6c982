"""Pretraining of a causal language model: plain text, packed into rows of one length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trainpipes import Pipeline
from trainpipes_recipes.inputs import TEXTS, Input, shuffled

__all__ = ["pretrain"]


def pretrain(
    files: Any,
    tokenizer: Any,
    *,
    text: str | None = None,
    eos: bool | str | int = True,
    max_length: int = 2048,
    method: Literal["concat", "first_fit", "best_fit"] = "best_fit",
    window: int = 1024,
    batch_size: int = 8,
    epochs: int | None = None,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    cache: bool | str = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for pretraining of a causal language model on plain text.

    There is no end unless ``epochs`` says so. Each is a dict of int64 tensors ``[B, L]``,
    B = ``batch_size``, L = ``max_length``:

        input_ids        documents, each with its end-of-text, one after the other; a little padding
        labels           input_ids, -100 on the first token of each document and on padding
        position_ids     from 0 in each document
        segment_ids      1, 2, … on the documents of a row, 0 on padding

    and ``cu_seqlens`` (int32 ``[sequences + 1]``) and ``max_seqlen`` (int) for attention over sequences of
    variable length. Attend within a document only: docs/packing.md shows how. Labels are not
    shifted: compare the logits at position t with the label at t + 1.

    Documents longer than a row are cut into several; with ``method`` "best_fit" and "first_fit" no others
    are cut. How many batches an epoch has is not known before its end: count steps, or ask
    ``estimate_len()`` with ``epochs=1``.

    Not for a few hundred documents with 24 shards: each shard packs its own, and its last row is not full.

    Args:
        files: files of any format that ``Input`` knows (Parquet, JSON lines, CSV, Arrow, ...): path, folder,
            glob, any fsspec URL, or a list of these; or a pipeline of rows.
        tokenizer: whatever ``tokenize`` takes: path of a ``tokenizer.json``, "bytes", an object.
        text: column of the documents. Left out, the first of text, content, document and body that is there.
        eos: ends each document: True for the tokenizer's end token, or a token, or its id; False adds none.
        max_length: L, tokens of a row.
        method: how documents share rows: see ``pack``.
        window: documents that are packed together.
        batch_size: rows in a batch.
        epochs: epochs that one pass gives; None for no end.
        buffer_size: the fewest documents that the shuffle mixes with each other.
        seed: for the order of rows.
        num_shards: a multiple of every number of ranks that the run may have.
        cache: keep token ids on disk, so that later epochs and runs read them as fast as if the files
            held them: True for the folder of ``tp.cache``, or a folder. The first batch of the
            first run then waits until a whole buffer is tokenized. Batches and states are the same.
        storage_options: options of the file system, as fsspec takes them.
    """
    given = Input("pretrain", files, storage_options)
    rows = given.tokenized(tokenizer, ["input_ids"], named=[text], tokenize={"add_eos": eos})
    if rows is None:
        (text,) = given.find({"text": text}, TEXTS)
        rows = given.rows([text]).tokenize(tokenizer, text, add_eos=eos)
    if cache:  # else tokenizing waits until rows are dealt, wherever it is written
        rows = rows.cache(None if cache is True else cache)
    return (
        shuffled(rows, buffer_size, seed=seed, num_shards=num_shards)
        .repeat(epochs)
        .pack(max_length, method=method, buffer_size=window, seed=seed)
        .batch(batch_size)
        .pad_collate()
    )
