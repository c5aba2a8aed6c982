"""Chains of any stages in any order: what they give, and that runs of them go on exactly.

``python -m tests.attacks --only chains`` draws more of them, and runs them with worker processes, too.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attacks.chains import came_of
from drawn import examples
from drawn_chains import draw_chain

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*do not divide num_shards", "ignore:.*columns that", "ignore:mix.*never ends"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chains")


@given(st.integers(0, 2**32))
@examples(300, often=40, shrink=False)
def test_any_chain_gives_what_plain_python_gives_and_goes_on_anywhere(
    folder: Path, seed: int
) -> None:
    draw = random.Random(seed)
    assert came_of(draw_chain(draw), folder, draw) in ("exact", "named")
