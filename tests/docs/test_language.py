"""Docs and messages are in plain American English: words that must not come back.

``DOCS`` are words that no page uses; ``CODE`` those that also the library's docstrings and messages don't.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "configs").glob("*.yaml")),
]
MODULES = [path for room in ("pipes", "recipes") for path in sorted((ROOT / room).rglob("*.py"))]

#: A word, and what to write instead.
CODE = {
    r"micro-batch(es)?": "batch (only gradient accumulation has micro-batches)",
    r"learnt": "in the loss, learned",
    r"asker": "caller",
    r"told": "reported, logged, passed",
    r"whatever": "any",
    r"mend(s|ed|ing)?": "fix",
    r"dear": "expensive, slow",
    r"human eyes": "a person, print",
    r"nothing moves": "has no side effects",
    r"behaviour|favour\w*|honour\w*|neighbour\w*|colour\w*": "-or",
    r"(de)?(serial|token|vector|normal|optim|material|special|organ|summar)is(e|es|ed|er|ing|ation)": "-ize",
    r"licence|catalogue|centre[ds]?": "license, catalog, center",
}
DOCS = CODE | {
    r"in words": "as text",
    r"of (one's|its|their) own": "own, separate",
    r"modelling|labelled|labelling": "modeling, labeled, labeling",
    r"initialis\w+|recognis\w+|pretokenis(ed|ing)|synchronis\w+": "-ize",
    r"grey": "gray",
}
#: Names of code, in backquotes and in blocks, are as they are.
CODE_OF_PAGES = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def found(text: str, words: dict[str, str]) -> list[str]:
    """The words in a text, each with what to write instead."""
    return [
        f"{hit[0]!r}: {instead}"
        for word, instead in words.items()
        for hit in re.finditer(rf"\b(?:{word})\b", text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_in_plain_words(page: Path) -> None:
    assert not found(CODE_OF_PAGES.sub("", page.read_text()), DOCS)


def test_the_library_is_in_plain_words() -> None:
    wrong = {path.relative_to(ROOT): found(path.read_text(), CODE) for path in MODULES}
    assert len(wrong) > 100
    assert not {str(path): hits for path, hits in wrong.items() if hits}


def test_such_words_are_found_and_plain_ones_are_not() -> None:
    for text in ("The labels are learnt.", "It serialises rows.", "Micro-batches"):
        assert found(text, CODE), text
    assert not found("Recommended: batches in the loss, serialized, optimizer, a specialist.", DOCS)


def test_pages_have_the_words_that_readers_search_for() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    words = (
        "prefetch", "checkpoint", "spill", "pruning", "LRU", "deadlock", "out of memory", "hang",
    )  # fmt: skip
    assert not [one for one in words if not re.search(rf"\b{one}", pages, re.IGNORECASE)]
