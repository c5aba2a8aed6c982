"""The texts that engines are tried on: the same for ever, and as odd as they should be."""

from __future__ import annotations

import hashlib
import unicodedata

from varied import varied


def digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def test_are_a_pure_function_of_the_seed() -> None:
    assert digest(varied(500)) == "076cf5bafe01fbfc"
    assert digest(varied(500, 7, ["<s>", "</s>"])) == "9e430c87c3f5f045"
    assert varied(20, 3) == varied(30, 3)[:20]


def test_hold_what_tokenizers_stumble_over() -> None:
    texts = varied(5000, 1, ["<tool>"])
    whole = "".join(texts)
    whole.encode()  # no surrogate
    classes = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Zs Zl Zp Cc Cf Co Cn Sm Sc Sk So Po"
    kinds = {unicodedata.category(c) for c in set(whole)}
    assert kinds >= set(classes.split())
    for piece in (
        "\r\n",
        "\n\n",
        "   ",
        "\t",
        "\x00",
        "'ll",
        "🙂",
        "e\u0301",
        "中",
        "م",
        "क",
        "<tool>",
    ):
        assert sum(piece in text for text in texts) >= 10, piece
    assert max(map(len, texts)) > 300
