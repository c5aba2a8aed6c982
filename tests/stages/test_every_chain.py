"""Everyday chains give what plain Python gives, and resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from chains import tp_plain
from every_chain import CHAINS
from trainpipes.testing import check_resume


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("everyday")


@pytest.mark.parametrize("name", CHAINS)
def test_gives_what_plain_python_gives(name: str, folder: Path) -> None:
    chain = CHAINS[name]
    found = [tp_plain(item) for item in chain.make(folder)]
    assert chain.seen(found) == chain.seen([tp_plain(item) for item in chain.plain()])


@pytest.mark.parametrize("name", CHAINS)
def test_resumes(name: str, folder: Path) -> None:
    check_resume(lambda: CHAINS[name].make(folder), points=15, processes=0, epochs=2)


def test_there_are_forty_at_least() -> None:
    assert len(CHAINS) >= 40
