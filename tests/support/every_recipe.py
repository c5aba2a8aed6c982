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
from chats import small_tokenizer
from every_stage import pictures, sounds, videos
from trainpipes_recipes import (
    chat,
    classification,
    images,
    masked_lm,
    preference,
    pretrain,
    prompts,
    seq2seq,
    sft,
    speech,
    tabular,
    tokens,
    video_classification,
    vision_chat,
)
from trainpipes_recipes.samples import write_purchases
from visions import processor_of, talks

Make = Callable[..., tp.Pipeline]

#: Options of all.
SMALL: dict[str, Any] = {"batch_size": 4, "buffer_size": 16, "num_shards": 12, "seed": 3}
PACKED = SMALL | {"max_length": 64, "pack_buffer_size": 8}
KEEP = SMALL | {"on_error": "keep"}


def pairs() -> Iterator[dict[str, Any]]:
    """Made rows: questions and answers of several lengths."""
    for k in range(97):
        yield {"prompt": f"{k} + {k} =" + " hm" * (k % 5), "response": f" {2 * k}" * (k % 4)}


PAIRS = tp.from_dataset(list(pairs()))


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
    return tp.from_arrow(pa.Table.from_pylist(rows))


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


def seen(**options: Any) -> tp.Pipeline:
    """Conversations with pictures, for a processor made on the spot."""
    return vision_chat(tp.from_dataset(talks(61)), processor_of("qwen2_vl"), **SMALL | options)


def spoken(folder: Path, **options: Any) -> tp.Pipeline:
    """Sounds of up to half a second, of which one is cut off."""
    rows = tp.read_bytes(sounds(folder), block_rows=9).map(with_text)
    return speech(
        rows, "bytes", on_error="skip", max_seconds=0.5, sampling_rate=4000, **SMALL | options
    )


@cache
def purchases(folder: Path) -> str:
    write_purchases(folder / "purchases", 160)
    return str(folder / "purchases")


def with_class(row: dict[str, Any]) -> dict[str, Any]:
    return {"video": row["bytes"], "label": len(row["path"]) % 2}


def with_text(row: dict[str, Any]) -> dict[str, Any]:
    return {"audio": row["bytes"], "text": row["path"][-5:]}


#: With a folder for files, and other options.
EVERY: dict[str, Make] = {
    "images": lambda f, **o: images(pictures(f), size=8, **SMALL | o),
    "images / rows": lambda f, **o: images(small_pictures(), size=8, padding=1, **SMALL | o),
    "classification": lambda f, **o: classification(
        text_files(f), "bytes", label="response", num_buckets=8, **SMALL | o
    ),
    "classification / rows": lambda f, **o: classification(
        PAIRS, "bytes", text="prompt", label="response", num_buckets=None, **SMALL | o
    ),
    "sft": lambda f, **o: sft(text_files(f), "bytes", **SMALL | o),
    "sft / rows": lambda f, **o: sft(PAIRS, "bytes", **SMALL | o),
    "sft / packed": lambda f, **o: sft(
        text_files(f), "bytes", packed=True, max_length=64, **SMALL | o
    ),
    "seq2seq": lambda f, **o: seq2seq(text_files(f), "bytes", **SMALL | o),
    "pretrain": lambda f, **o: pretrain(text_files(f), "bytes", **PACKED | {"epochs": 1} | o),
    "pretrain / endless": lambda f, **o: pretrain(text_files(f), "bytes", **PACKED | o),
    "masked_lm": lambda f, **o: masked_lm(text_files(f), words(), **SMALL | o),
    "masked_lm / words": lambda f, **o: masked_lm(
        text_files(f), words(), whole_words=True, **SMALL | o
    ),
    "chat": lambda f, **o: chat(chats(), small_tokenizer(), **KEEP | o),
    "chat / dropped": lambda f, **o: chat(
        chats(), small_tokenizer(), **SMALL | {"on_error": "skip"} | o
    ),
    "chat / packed": lambda f, **o: chat(
        chats(), small_tokenizer(), packed=True, max_length=256, **KEEP | o
    ),
    "preference": lambda f, **o: preference(preferences(), "bytes", **SMALL | o),
    "preference / dropped": lambda f, **o: preference(
        preferences(), "bytes", **SMALL | {"on_error": "skip"} | o
    ),
    "prompts": lambda f, **o: prompts(text_files(f), "bytes", **SMALL | o),
    "prompts / groups": lambda f, **o: prompts(
        text_files(f), "bytes", **KEEP | {"num_generations": 2, "max_length": 9} | o
    ),
    "prompts / dropped": lambda f, **o: prompts(
        PAIRS, "bytes", **SMALL | {"max_length": 12, "on_error": "skip"} | o
    ),
    "prompts / messages": lambda f, **o: prompts(chats(), **SMALL | o),
    "tokens": lambda f, **o: tokens(token_rows(), **PACKED | {"max_length": 16, "epochs": 1} | o),
    "tokens / mapped": lambda f, **o: tokens(
        token_file(f), dtype="uint16", **SMALL | {"max_length": 16, "epochs": 2} | o
    ),
    "tokens / endless": lambda f, **o: tokens(
        token_file(f), dtype="uint16", max_length=16, **SMALL | o
    ),
    "video_classification": lambda f, **o: video_classification(
        tp.read_bytes(videos(f), block_rows=3).map(with_class),
        seconds=0.4,
        num_frames=3,
        size=12,
        resize=14,
        on_error="skip",
        **SMALL | {"num_shards": 2} | o,  # of 18 videos, so that there are whole batches
    ),
    "speech": lambda f, **o: spoken(f, num_mels=8, augment=True, **o),
    "speech / samples": lambda f, **o: spoken(f, output="input_values", **o),
    "speech / seconds": lambda f, **o: spoken(f, output="input_values", batch_seconds=1.5, **o),
    "tabular": lambda f, **o: tabular(
        purchases(f), categories=["user", "item", "seen"], **SMALL | o
    ),
    "tabular / held out": lambda f, **o: tabular(
        purchases(f),
        valid=[["day", ">=", "2026-03-01"]],
        weights={True: 1, False: 0.5},
        **SMALL | {"batch_size": 2} | o,
    ),
    "tabular / numbers": lambda f, **o: tabular(
        purchases(f), label="price", valid=0.2, key="user", **SMALL | {"batch_size": 2} | o
    ),
    "vision_chat": lambda f, **o: seen(**o),
    "vision_chat / tokens": lambda f, **o: seen(max_tokens=400, **o),
    "vision_chat / packed": lambda f, **o: seen(packed=True, max_length=300, **o),
    "vision_chat / balanced": lambda f, **o: seen(packed=True, max_length=300, balance=2, **o),
}
