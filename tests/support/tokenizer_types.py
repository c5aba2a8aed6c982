"""A tokenizer of each type that a faster engine is trusted with, and of some that it is not.

Their vocabularies are learnt from varied texts without any cutting into words, so that tokens reach
across every border that the regular expressions draw: a border in another place shows in the ids.
Some tokens cannot be reached by merging, as in published vocabularies.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import chain
from typing import Any

from varied import varied

#: Regular expressions of byte-level BPE that were tried, by a model that has them.
PATTERNS = {
    "llama 3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "qwen 2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "qwen 3.5": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "nemotron": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek v3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
}

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_start|>a"]
#: Bytes that a byte-level vocabulary writes as themselves.
SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
#: Written as they are, wherever they stand; the second takes the space before it along.
PLAIN = ["<tool>", "<fill>"]


@cache
def byte_level_json() -> dict[str, Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=12,
    )
    tokenizer.train_from_iterator(varied(3000, 1), trainer)
    return extended(tokenizer)


@cache
def fallback_json() -> dict[str, Any]:
    from tokenizers import Tokenizer, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
        max_token_length=8,
        limit_alphabet=400,
    )
    tokenizer.train_from_iterator(varied(3000, 1), trainer)
    content = extended(tokenizer)
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"][:3] != "<0x"]
    return content


def extended(tokenizer: Any) -> dict[str, Any]:
    """With added tokens of several kinds, and tokens that no merge makes."""
    from tokenizers import AddedToken

    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    for word in ("Ġwhat", "isn", "▁what", "été", "été", "def"):
        vocab.setdefault(word + "'x", len(vocab))
    tokenizer = type(tokenizer).from_str(json.dumps(content))
    tokenizer.add_tokens([AddedToken(PLAIN[0], normalized=False)])
    tokenizer.add_tokens([AddedToken(PLAIN[1], normalized=False, lstrip=True)])
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


def split(*patterns: str) -> dict[str, Any]:
    """The pre-tokenizer of byte-level BPE with these regular expressions."""
    parts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    bytes_of = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*parts, {"type": "ByteLevel", **bytes_of}]}


def gpt_2(prefixed: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel", "add_prefix_space": prefixed, "trim_offsets": True, "use_regex": True
    }  # fmt: skip


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


NFC = {"type": "NFC"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREFIXED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACES]}
MERGED = {
    "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
}  # fmt: skip

#: Normalizer, pre-tokenizer and options of the model, by name.
BYTE_LEVEL: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt 2": (None, gpt_2(), {}),
    "roberta": (None, gpt_2(True), {}),
    "neox": (NFC, gpt_2(), {}),
    **{name: (None, split(*patterns), {}) for name, patterns in PATTERNS.items()},
    **{f"{name}, nfc": (NFC, split(*patterns), {}) for name, patterns in PATTERNS.items()},
    "llama 3, whole": (None, split(*PATTERNS["llama 3"]), {"ignore_merges": True}),
    "o200k, whole": (None, split(*PATTERNS["o200k"]), {"ignore_merges": True}),
}
FALLBACK: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama 2": (PREFIXED, None, {}),
    "gemma": (SPACES, MERGED, {}),
    "gemma, bare": (SPACES, None, {}),
    **{f"mistral, {s}": (None, metaspace(s), {}) for s in ("first", "always", "never")},
}
ADMITTED = [*BYTE_LEVEL, *FALLBACK]

#: OpenAI's own notation: possessive for its engine, a repetition of a repetition for that of
#: ``tokenizers``, so that four digits are one token here and not there.
POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
REFUSED: dict[str, tuple[Any, Any, dict[str, Any]]] = {"cl100k": (None, split(POSSESSIVE), {})}


def content_of(name: str) -> dict[str, Any]:
    """The ``tokenizer.json`` of a type."""
    table, made = (FALLBACK, fallback_json) if name in FALLBACK else (BYTE_LEVEL, byte_level_json)
    normalizer, splitter, options = (table | REFUSED)[name]
    content = json.loads(json.dumps(made()))
    content |= {"normalizer": normalizer, "pre_tokenizer": splitter}
    content["model"] |= options
    found: dict[str, Any] = content
    return found


def borders_of(name: str) -> dict[str, Any]:
    """The type with a vocabulary that shows every border beside a code point: its last byte merges
    with what follows, and its first with what stands before, unless a border is between."""
    normalizer, splitter, options = BYTE_LEVEL[name]
    letter = _byte_characters()
    by_byte = dict(zip([*SHOWN, *(b for b in range(256) if b not in SHOWN)], letter, strict=True))
    pairs = [(x, y) for y in b"abB1. \n/'\xcc" for x in range(0x80, 0xC0)]
    pairs += [(x, y) for x in b"aA1. \n'" for y in range(0xC2, 0xF5)]
    merges = [(by_byte[x], by_byte[y]) for x, y in pairs]
    vocab = {token: number for number, token in enumerate([*letter, *map("".join, merges)])}
    content: dict[str, Any] = json.loads(json.dumps(byte_level_json()))
    content |= {"normalizer": normalizer, "pre_tokenizer": splitter, "added_tokens": []}
    content["model"] |= {"vocab": vocab, "merges": merges, **options}
    return content


def tokenizer_of(name: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(content_of(name)))


def _byte_characters() -> list[str]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary: printable ones for
    themselves, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return list(map(chr, chain(shown, range(0x100, 0x100 + 256 - len(shown)))))
