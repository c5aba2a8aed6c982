"""What must stay while the inside is rebuilt: batches of 2,000 chains, and all names that users have."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

import pytest

from frozen import adapter, corpus, public
from frozen.chains import CHAINS, LEAVING, draw, fingerprint

WRITTEN = corpus.read()
ANEW = "python tests/frozen make"


@pytest.fixture(scope="module", autouse=True)
def data() -> Iterator[None]:
    with corpus.small_data():
        yield


def assert_unchanged(numbers: list[int]) -> None:
    said = []
    for number in numbers:
        result = corpus.run_one(number)
        if result.kind != "gone" and WRITTEN[number].digest != result.digest:
            said.append(f"{number}: {WRITTEN[number].text}\n    now {result.kind}: {result.said}")
    assert not said, (
        f"{len(said)} chains give something else (python tests/frozen show NUMBER tells more; where that is "
        f"meant: {ANEW}):\n" + "\n".join(said)
    )


@pytest.mark.parametrize("number", corpus.sample())
def test_a_chain_gives_the_batches_that_it_gave(number: int) -> None:
    assert_unchanged([number])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CHAINS, 40))
def test_all_chains_give_the_batches_that_they_gave(first: int) -> None:
    assert_unchanged(list(range(first, min(first + 40, CHAINS))))


def test_all_chains_are_drawn_as_they_were() -> None:
    left = {n for n in range(CHAINS) if not adapter.words(draw(n)) & adapter.GONE}
    assert set(WRITTEN) >= left, f"some are not written down: {ANEW}"
    other = [n for n in left if fingerprint(draw(n)) != WRITTEN[n].chain]
    assert not other, f"drawn otherwise: {other[:20]}"


def test_chains_cover_all_that_they_should() -> None:
    words, kinds = Counter[str](), Counter[str]()
    for number in range(CHAINS):
        chain = draw(number)
        words.update(adapter.words(chain))
        kinds["several ranks"] += any(leg[0] > 1 for leg in chain["run"]["legs"])
        kinds["uncounted"] += chain["run"]["uncounted"]
        kinds["resumed"] += len(chain["run"]["legs"]) > 1
    kinds["refused"] = sum(line.text.startswith("refused ") for line in WRITTEN.values())
    assert kinds["refused"] <= CHAINS * 0.1
    assert kinds["uncounted"] >= CHAINS * 0.3
    assert kinds["several ranks"] >= CHAINS * 0.25
    assert kinds["resumed"] >= CHAINS * 0.8
    assert {word: n for word, n in words.items() if n < 15 and word not in adapter.GONE} == {}


def test_chains_of_what_will_be_left_out_come_last() -> None:
    leaving = {"draw", "unbatch", "tokenized_by", "recipe tabular", "recipe evaluation"}
    assert not [n for n in range(LEAVING) if adapter.words(draw(n)) & leaving]


def test_only_public_names_of_the_library_are_used() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            ours = [name for name in names if name.startswith("trainpipes")]
            assert set(ours) <= {"trainpipes", "trainpipes_recipes"}, path


def test_what_users_can_name_is_what_is_written_down() -> None:
    written, found = public.FILE.read_text().splitlines(), public.text().splitlines()
    lines = [
        line
        for line in unified_diff(written, found, lineterm="", n=0)
        if line[:2] not in ("--", "++", "@@")
    ]
    went = [line[1:] for line in lines if line[0] == "-"]
    came = [line[1:] for line in lines if line[0] == "+"]
    assert not lines, "\n".join(
        [
            "what users can name has changed. Where that is meant: python tests/frozen public",
            *(f"went: {line}" for line in went),
            *(f"came: {line}" for line in came),
        ]
    )
