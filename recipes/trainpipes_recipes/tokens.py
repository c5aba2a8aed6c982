from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from trainpipes import BatchStage, ConfigError, Pipeline, from_memmap
from trainpipes_recipes.inputs import TOKENS, Input, OnError, documented

__all__ = ["tokens"]


@documented
def tokens(
    files: Any,
    *,
    dtype: str | None = None,
    column: str | None = None,
    train: bool = True,
    on_error: OnError | None = None,
    max_length: int = 2048,
    method: Literal["concat", "first_fit", "best_fit"] = "best_fit",
    pack_buffer_size: int = 1024,
    pad_token_id: int = 0,
    batch_size: int = 8,
    epochs: int | None = None,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for pretraining a causal language model on text that is tokenized already.

    With ``dtype``, files hold token ids alone, as nanoGPT's ``train.bin``. They are mapped into
    memory and cut into rows of ``max_length``, which are all shuffled together. Each batch is a
    dict of int64 tensors ``[B, L]``, B = ``batch_size``, L = ``max_length``:

        input_ids        ids as they stand in the file, across the ends of documents
        labels           the same

    Without ``dtype``, rows are documents with a column of lists of ids, which hold their end tokens,
    and batches are as in ``pretrain``, with the rows' own "labels" if there are any. Labels are not
    shifted: compare the logits at position t with the label at t + 1. Without ``epochs``, training
    has no end.

    Args:
        files: with ``dtype``, a file or a list of files. Else files of any format (Parquet, JSON
            lines, a folder that ``write_memmap`` wrote, ...): path, folder, glob, URL, or a list of
            these; or a pipeline of rows.
        dtype: type of the ids in files of nothing else: "uint16", "uint32", or another NumPy
            integer.
        column: column of the lists of ids; by default the first of input_ids, tokens, token_ids and
            ids.
        on_error: for packed rows without a target: see ``pack``.
        max_length: L, tokens of a row.
        method: how documents share rows: see ``pack``.
        pack_buffer_size: documents packed together.
        pad_token_id: pads rows of documents.
        epochs: to train, epochs that one pass gives; None for no end.
        drop_last: to train, leave out a short last batch where rows are not packed.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"tokens": [5, 6, 7, 1]}, {"tokens": [8, 1]}])
    >>> batch = tokens(rows, max_length=8, batch_size=1, epochs=1, num_shards=1).peek()
    >>> batch["input_ids"], batch["segment_ids"]
    (tensor([[5, 6, 7, 1, 8, 1, 0, 0]]), tensor([[1, 1, 1, 1, 2, 2, 0, 0]]))
    """
    epochs = epochs if train else 1
    if dtype is not None:
        if column is not None or isinstance(files, Pipeline):
            other = "a pipeline" if column is None else f"column={column!r}"
            got = f"got dtype={dtype!r} and {other}: leave out one of them"
            raise ConfigError(f"tokens(dtype) is for files that hold nothing but ids, {got}")
        rows = from_memmap(files, dtype=dtype, length=max_length)
        if train:
            rows = rows.sharding_filter(num_shards).shuffle(scope="global", seed=seed)
        else:
            rows = rows.sharding_filter(num_shards, split="stride", tail="uneven")
        batches = rows.repeat(epochs).batch(batch_size, drop_last=train and drop_last)
        return batches.collate().then(WithLabels())
    paths = files if isinstance(files, list | tuple) else [files]
    if any(str(path).endswith(".bin") for path in paths):
        why = "a .bin file holds nothing but ids, and does not say of which kind"
        way = "add dtype='uint16', or the one it was written with"
        raise ConfigError(f"tokens({files!r}): {why}: {way}")
    data = Input("tokens", files, storage_options)
    (column,) = data.find({"column": column}, TOKENS)
    others = [name for name in ("labels", "attention_mask") if name in data.columns]
    rows = data.rows([column, *others])
    rows = data.arrange(rows, train, buffer_size, seed, num_shards).repeat(epochs)
    packed = rows.pack(
        max_length, method=method, column=column, buffer_size=pack_buffer_size,
        pad_token_id=pad_token_id, seed=seed, on_error=on_error,
    )  # fmt: skip
    return packed.batch(batch_size).pad_collate()


class WithLabels(BatchStage):
    """A batch whose labels are its ids."""

    thread_safe = True

    def apply(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "labels": batch["input_ids"].clone()}
