"""A small pipeline of each recipe. Tests of resuming and of elasticity go through all of them, and fail for
a recipe that is not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers

import trainpipes as tp
from every_stage import pictures
from recipes.chats import small_tokenizer
from trainpipes_recipes import (
    chat,
    classification,
    images,
    masked_lm,
    preference,
    pretrain,
    seq2seq,
    sft,
    tokens,
)

Make = Callable[[Path], tp.Pipeline]

#: Options of all.
SMALL: dict[str, Any] = {"batch_size": 4, "buffer_size": 16, "num_shards": 12, "seed": 3}


def pairs() -> Iterator[dict[str, Any]]:
    """Made rows: questions and answers of several lengths."""
    for k in range(97):
        yield {"prompt": f"{k} + {k} =" + " hm" * (k % 5), "response": f" {2 * k}" * (k % 4)}


@cache
def text_files(folder: Path) -> str:
    rows = pa.Table.from_pylist(list(pairs()))
    rows = rows.append_column("text", rows["prompt"])
    for number, (start, stop) in enumerate([(0, 40), (40, 41), (41, 97)]):
        part = rows.slice(start, stop - start)
        pq.write_table(part, folder / f"text-{number}.parquet", row_group_size=13)
    return str(folder / "text-*.parquet")


@cache
def token_file(folder: Path) -> str:
    np.arange(1000, dtype=np.uint16).tofile(folder / "train.bin")
    return str(folder / "train.bin")


def chats() -> tp.Pipeline:
    """Made conversations in ShareGPT's layout, of one to three turns; every ninth has no response."""
    told = []
    for k, row in enumerate(pairs()):
        turn = [{"from": "human", "value": row["prompt"]}, {"from": "gpt", "value": f"= {2 * k}"}]
        told.append({"conversations": turn[: 1 + (k % 9 > 0)] + turn * (k % 3 if k % 9 else 0)})
    return tp.from_arrow(pa.Table.from_pylist(told))


def preferences() -> tp.Pipeline:
    rows = [
        {**row, "chosen": f" {k}!", "rejected": " no" * (1 + k % 4)}
        for k, row in enumerate(pairs())
    ]
    return tp.from_dataset(rows)


@cache
def words() -> Tokenizer:
    """A tokenizer of pieces of words, with a mask token."""
    digits = [str(digit) for digit in range(10)]
    known = ["[MASK]", "[UNK]", "+", "=", "hm", *digits, *(f"##{digit}" for digit in digits)]
    pieces = {piece: n for n, piece in enumerate(known)}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[MASK]"])
    return tokenizer


def token_rows() -> tp.Pipeline:
    return tp.from_dataset(
        [{"input_ids": list(range(k % 11)), "labels": [7] * (k % 11)} for k in range(97)]
    )


def small_pictures() -> tp.Pipeline:
    pixels = np.random.default_rng(5).integers(0, 256, (97, 3, 9, 9), dtype=np.uint8)
    return tp.from_tensors(image=pixels, label=np.arange(97) % 7)


EVERY: dict[str, Make] = {
    "images": lambda f: images(pictures(f), size=8, **SMALL),
    "images / rows": lambda f: images(small_pictures(), size=8, padding=1, **SMALL),
    "classification": lambda f: classification(
        text_files(f), "bytes", label="response", num_buckets=8, **SMALL
    ),
    "classification / rows": lambda f: classification(
        tp.from_dataset(list(pairs())),
        "bytes",
        text="prompt",
        label="response",
        num_buckets=None,
        **SMALL,
    ),
    "sft": lambda f: sft(text_files(f), "bytes", **SMALL),
    "sft / rows": lambda f: sft(tp.from_dataset(list(pairs())), "bytes", **SMALL),
    "seq2seq": lambda f: seq2seq(text_files(f), "bytes", **SMALL),
    "pretrain": lambda f: pretrain(
        text_files(f), "bytes", max_length=64, pack_buffer_size=8, epochs=1, **SMALL
    ),
    "pretrain / endless": lambda f: pretrain(
        text_files(f), "bytes", max_length=64, pack_buffer_size=8, **SMALL
    ),
    "masked_lm": lambda f: masked_lm(text_files(f), words(), **SMALL),
    "masked_lm / words": lambda f: masked_lm(text_files(f), words(), whole_words=True, **SMALL),
    "chat": lambda f: chat(chats(), small_tokenizer(), on_error="keep", **SMALL),
    "chat / dropped": lambda f: chat(chats(), small_tokenizer(), on_error="skip", **SMALL),
    "chat / packed": lambda f: chat(
        chats(), small_tokenizer(), on_error="keep", packed=True, max_length=256, **SMALL
    ),
    "preference": lambda f: preference(preferences(), "bytes", **SMALL),
    "preference / dropped": lambda f: preference(preferences(), "bytes", on_error="skip", **SMALL),
    "tokens": lambda f: tokens(token_rows(), max_length=16, pack_buffer_size=8, epochs=1, **SMALL),
    "tokens / mapped": lambda f: tokens(
        token_file(f), dtype="uint16", max_length=16, epochs=2, **SMALL
    ),
    "tokens / endless": lambda f: tokens(token_file(f), dtype="uint16", max_length=16, **SMALL),
}

PAIRS_TABLE = pa.Table.from_pylist(list(pairs()))
CHOICES = PAIRS_TABLE.append_column("chosen", PAIRS_TABLE["prompt"]).append_column(
    "rejected", PAIRS_TABLE["prompt"]
)
#: Recipes that may keep token ids on disk.
KEPT: dict[str, Callable[..., tp.Pipeline]] = {
    "classification": lambda f, **o: classification(
        text_files(f), "bytes", label="response", num_buckets=8, **SMALL, **o
    ),
    "sft": lambda f, **o: sft(text_files(f), "bytes", **SMALL, **o),
    "seq2seq": lambda f, **o: seq2seq(text_files(f), "bytes", **SMALL, **o),
    "pretrain": lambda f, **o: pretrain(
        text_files(f), "bytes", max_length=64, pack_buffer_size=8, epochs=1, **SMALL, **o
    ),
    "masked_lm": lambda f, **o: masked_lm(text_files(f), words(), **SMALL, **o),
    "chat": lambda f, **o: chat(chats(), small_tokenizer(), on_error="keep", **SMALL, **o),
    "preference": lambda f, **o: preference(tp.from_arrow(CHOICES), "bytes", **SMALL, **o),
}
