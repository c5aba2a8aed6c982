"""What must stay while the inside is rebuilt: batches of a thousand chains, and all names that users have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

import pytest

from frozen import chains, public, running


@pytest.fixture(scope="module", autouse=True)
def data() -> Iterator[None]:
    with running.small_data():
        yield


def assert_unchanged(numbers: list[int]) -> None:
    said = []
    for number in numbers:
        digest, plan, code = chains.read()[number]
        found, what = running.run(code, plan, number)
        if found != digest:
            said.append(f"{number}: {code}\n    now {what}")
    assert not said, (
        f"{len(said)} chains give something else (python tests/frozen items NUMBER tells more; where that is "
        "meant: python tests/frozen make NUMBER):\n" + "\n".join(said)
    )


@pytest.mark.parametrize("number", chains.sample()[::5])
def test_a_chain_gives_the_batches_that_it_gave(number: int) -> None:
    assert_unchanged([number])


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(25))
def test_all_chains_give_the_batches_that_they_gave(turn: int) -> None:
    assert_unchanged(list(chains.read())[turn::25])


def test_only_public_names_of_the_library_are_used() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            ours = {name for name in names if name.startswith("trainpipes")}
            assert ours <= {"trainpipes", "trainpipes_recipes"}, path


def test_what_users_can_name_is_what_is_written_down() -> None:
    written, found = public.FILE.read_text().splitlines(), public.text().splitlines()
    lines = [
        line for line in unified_diff(written, found, n=0) if line[:2] not in ("--", "++", "@@")
    ]
    assert not lines, "\n".join(
        ["what users can name has changed. Where that is meant: python tests/frozen public", *lines]
    )
