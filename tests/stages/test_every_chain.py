"""Everyday chains, and chains of any stages in any order: what they give, and that they go on exactly.

``python -m tests.attacks --only chains`` draws more of them, and runs them with worker processes, too.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attacks.chains import came_of
from chains import tp_plain
from drawn import examples
from drawn_chains import draw_chain
from every_chain import CHAINS
from resuming import goes_on_exactly


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", CHAINS)
def test_an_everyday_chain_gives_what_python_gives_and_resumes(name: str, folder: Path) -> None:
    chain = CHAINS[name]
    found = [tp_plain(item) for item in chain.make(folder)]
    assert chain.seen(found) == chain.seen([tp_plain(item) for item in chain.plain()])
    goes_on_exactly(lambda: chain.make(folder))


def test_there_are_forty_at_least() -> None:
    assert len(CHAINS) >= 40


@pytest.mark.filterwarnings(
    "ignore:.*do not divide num_shards",
    "ignore:.*columns that",
    "ignore:mix.*never ends",
    "ignore:.*hardly moves",
)
@given(st.integers(0, 2**32))
@examples(300, often=4, shrink=False)
def test_any_chain_gives_what_python_gives_and_goes_on_anywhere(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    assert came_of(draw_chain(draw), folder, draw) in ("exact", "named")
