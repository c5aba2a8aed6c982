"""Small real tokenizers, trained here on the standard library's own text, and texts to try them on."""

from __future__ import annotations

import inspect
import json
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.block import Block
from trainpipes.columns.run import Cursors, Run

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
UNK, BOS, EOS, PAD = range(4)

TEXTS = [
    "def f(x):\n    return x + 1",
    "",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "emoji 🙂👩‍👩‍👧‍👦 and flags 🇩🇪",
    "中文和日本語のテキスト",
    "control \x00\x01\x7f\t\r\n characters",
    "é",  # decomposed
    "  leading, double  and trailing spaces  ",
    "a </s> in the middle",
    "x",
    "𝕬𝖗𝖙 ﷽ ｗｉｄｅ",
    "1234567890 3.14159",
]


@cache
def corpus() -> tuple[str, ...]:
    """Lines of prose and code."""
    source = inspect.getsource(json) + inspect.getsource(textwrap) + inspect.getsource(inspect)
    return tuple(line for line in source.splitlines() if line.strip())


@cache
def bpe_json() -> str:
    """A byte-level BPE of 800 tokens, without a post-processor."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus()[:600], trainer)
    return str(tokenizer.to_str())


def bpe(single: str | None = None, pair: str | None = None) -> Any:
    """A fresh tokenizer; with a template, its post-processor."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(bpe_json())
    if single is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(name, k) for k, name in enumerate(SPECIAL)]
        )
    return tokenizer


def bracketed() -> Any:
    """``<s> text </s>``, and ``<s> text </s> text </s>``."""
    return bpe("<s> $A </s>", "<s> $A </s> $B:1 </s>:1")


def sentencepiece_model(directory: Path) -> Path:
    """A SentencePiece model of 400 pieces."""
    import sentencepiece

    prefix = directory / "small"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()[:600]),
        model_prefix=str(prefix),
        vocab_size=400,
        pad_id=3,
        byte_fallback=True,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


def tiktoken_encoding(**special: int) -> Any:
    """Bytes and a few merges."""
    import tiktoken

    merges = [b"th", b"he", b"the", b"in", b"er", b"  ", b"re", b"on", b"an"]
    ranks = {bytes([k]): k for k in range(256)} | {m: 256 + k for k, m in enumerate(merges)}
    return tiktoken.Encoding(
        "small",
        pat_str=r"\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+",
        mergeable_ranks=ranks,
        special_tokens=special or {"<|endoftext|>": 300},
    )


def run_of(data: Any, bounds: list[int] | None = None, first: int = 0) -> Run:
    """Rows as a stage gets them, numbered from ``first``."""
    rows = len(data)
    cuts = None if bounds is None else np.array(bounds, dtype=np.int64)
    positions = np.arange(rows + 1) if cuts is None else cuts
    return Run(Block(data, np.arange(first, first + rows)), Cursors.counting({}, positions), cuts)


def column(stage: Any, texts: Any, name: str = "input_ids", text: str = "text") -> list[list[int]]:
    """One column of what a stage makes of texts."""
    table = texts if isinstance(texts, pa.Table) else pa.table({text: texts})
    done = stage.process(run_of(table)).block.data
    assert done.column(name).type == pa.list_(pa.int32())
    return done.column(name).to_pylist()
