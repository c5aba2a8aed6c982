"""Which tokenizers a faster engine is trusted with.

gigatoken [1]_ writes the regular expressions of published tokenizers out by hand, so it is right
for those that it knows and silently wrong for some that only look like them (a possessive
quantifier, a rule for line ends). A tokenizer is therefore admitted by what its ``tokenizer.json``
says, and only where it is of a type that the conformance test of this library has tried against
``tokenizers``: a million varied texts, and every code point that there is. The vocabulary is left
out of the type; each is tried by itself before the engine's first use (``checked``).

.. [1] https://github.com/marcelroed/gigatoken
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

from trainpipes._internal.extra import pip_install

__all__ = ["PATTERNS", "YOUNG", "admitted", "refusal"]

#: The engine's versions that were tried.
VERSIONS = ("0.10.",)

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

#: Code points that Unicode came to know in this century, and what has none yet: the packages'
#: tables are of different versions, so that they disagree on the class, or on the canonical order,
#: of some. Texts with one of these go to ``tokenizers``. A class of RE2, wider than need be.
YOUNG = (
    r"[\x{5C8}-\x{5CF}\x{7FD}\x{870}-\x{8FF}\x{9FE}\x{C3C}\x{C5C}\x{CDC}\x{D3B}-\x{D3C}\x{EBA}\x{1715}"
    r"\x{1AB0}-\x{1AFF}\x{1DF0}-\x{1DFF}\x{20C1}\x{2B96}\x{A7C0}-\x{A7F6}\x{A82C}\x{FBC3}-\x{FBD2}"
    r"\x{FD90}-\x{FD91}\x{FDC8}-\x{FDCE}\x{10000}-\x{1D3FF}\x{1D800}-\x{1EFFF}\x{1F6D8}"
    r"\x{1F777}-\x{1F77A}\x{1F8D0}-\x{1F8D8}\x{1FA54}-\x{1FA57}\x{1FA8A}-\x{1FA8F}\x{1FAC8}\x{1FACD}\x{1FAEA}\x{1FAEF}\x{1FBFA}"
    r"\x{2A6DE}-\x{10FFFF}]"
)

_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREFIXED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _SPACES]}
_MERGED = {
    "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
}  # fmt: skip

#: Normalizer and pre-tokenizer of BPE with byte fallback: Llama 2, Gemma, Mistral.
FALLBACK_TYPES: list[tuple[Any, Any]] = [
    (_PREFIXED, None),
    (_SPACES, None),
    (_SPACES, _MERGED),
    *(
        (None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False})
        for scheme in ("first", "always", "never")
    ),
]


def admitted() -> list[str]:
    """The types that are admitted, for messages and documentation."""
    return [
        "byte-level BPE with the regular expression of GPT-2, with or without NFC",
        f"byte-level BPE with that of {', '.join(PATTERNS)}, with or without NFC",
        "BPE with byte fallback, as Llama 2, Mistral and Gemma have it",
    ]


def refusal(content: Mapping[str, Any], splits_special: bool = False) -> str | None:
    """Why a tokenizer is left to ``tokenizers``; None if gigatoken may be tried.

    Args:
        content: a ``tokenizer.json``.
        splits_special: names of special tokens in a text are read as plain text.
    """
    try:
        found = version("gigatoken")
    except PackageNotFoundError:
        return f"gigatoken is not installed: {pip_install('gigatoken')}"
    if not found.startswith(VERSIONS):
        return f"gigatoken {found} was not tried, {' and '.join(v + '*' for v in VERSIONS)} was"
    if splits_special:
        return "it reads special tokens in a text as plain text"
    return _type(content) or _added(content)


def _type(content: Mapping[str, Any]) -> str | None:
    """What is unknown of the way from text to ids."""
    model = content["model"]
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, and gigatoken does BPE"
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            return f"its model has {option} = {model[option]!r}"
    vocab = model.get("vocab") or {}
    normalizer, splitter = (_plain(content.get(k)) for k in ("normalizer", "pre_tokenizer"))
    if model.get("byte_fallback"):
        if not model.get("fuse_unk") or model.get("unk_token") is None:
            return "its model has byte_fallback without fuse_unk and unk_token"
        if not all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
            return "its vocabulary lacks some of the 256 bytes"
        if (normalizer, splitter) not in FALLBACK_TYPES:
            return "its normalizer and pre-tokenizer are of no type that was tried"
        return None
    if model.get("fuse_unk") or model.get("unk_token"):
        return "its model has an unknown token"
    if not all(character in vocab for character in _byte_characters()):
        return "its vocabulary lacks some of the 256 bytes"
    if normalizer not in (None, {"type": "NFC"}):
        return f"its normalizer {normalizer.get('type')} was not tried"
    if not _known_split(splitter):
        return "its pre-tokenizer is of no type that was tried"
    return None


def _plain(part: Any) -> Any:
    """A normalizer or pre-tokenizer without what has no bearing on ids."""
    if part is None:
        return None
    part = {k: v for k, v in part.items() if k != "trim_offsets"}
    for name in ("normalizers", "pretokenizers"):
        if part.get("type") == "Sequence" and name in part:
            inner = [_plain(p) for p in part[name]]
            if len(inner) < 2:
                return inner[0] if inner else None
            part[name] = inner
    return part


def _known_split(splitter: Any) -> bool:
    if not splitter:
        return False
    if splitter["type"] == "ByteLevel":
        return bool(splitter.get("use_regex", True))
    if splitter["type"] != "Sequence":
        return False
    *splits, last = splitter["pretokenizers"]
    bare = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    if last != bare or not all(
        split.get("type") == "Split"
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
        for split in splits
    ):
        return False
    return tuple(split["pattern"].get("Regex") for split in splits) in PATTERNS.values()


def _added(content: Mapping[str, Any]) -> str | None:
    """What is unknown of the added tokens."""
    for token in content.get("added_tokens") or ():
        name = token.get("content")
        for flag in ("rstrip", "single_word"):
            if token.get(flag):
                return f"its added token {name!r} has {flag}, which gigatoken does not follow"
        if token.get("normalized") and not token.get("special") and content.get("normalizer"):
            return f"its added token {name!r} is looked for in normalized text"
    return None


def _byte_characters() -> list[str]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary: printable ones for
    themselves, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return list(map(chr, chain(shown, range(0x100, 0x100 + 256 - len(shown)))))
