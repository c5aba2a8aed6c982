"""What must stay while the inside is rebuilt: batches of 2,000 chains, and all names that users have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

import pytest

from frozen import chains, corpus, public

WRITTEN = chains.read()
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
            said.append(
                f"{number}: {chains.short(WRITTEN[number].chain)}\n    now {result.kind}: {result.said}"
            )
    assert not said, (
        f"{len(said)} chains give something else (python tests/frozen show NUMBER tells more; where that is "
        f"meant: {ANEW}):\n" + "\n".join(said)
    )


@pytest.mark.parametrize("number", chains.sample())
def test_a_chain_gives_the_batches_that_it_gave(number: int) -> None:
    assert_unchanged([number])


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(50))
def test_all_chains_give_the_batches_that_they_gave(turn: int) -> None:
    assert_unchanged(list(WRITTEN)[turn::50])


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
