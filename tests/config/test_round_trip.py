"""What ``to_yaml`` writes, ``load`` reads as the same pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import every_recipe
import every_stage
import trainpipes as tp
from config.same import assert_same
from trainpipes.config import loads

Make = Callable[[Path], tp.Pipeline]
EVERY: dict[str, Make] = {
    **every_stage.FINITE,
    **every_stage.ENDLESS,
    **{f"recipe {name}": make for name, make in every_recipe.EVERY.items()},
}
#: Why a pipeline is not written: its rows are in memory, or an option is an object.
REASONS = ("rows in memory", "has no form in a config")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def written(pipe: tp.Pipeline) -> tuple[str, str]:
    """A pipeline's text, or why it has none."""
    try:
        return pipe.to_yaml(), ""
    except tp.ConfigError as error:
        return "", str(error)


@pytest.mark.parametrize("name", EVERY)
def test_a_pipeline_comes_back_the_same(name: str, folder: Path) -> None:
    pipe = EVERY[name](folder)
    text, refused = written(pipe)
    if refused:
        assert any(reason in refused for reason in REASONS)
        return
    again = loads(text, allow_imports=True)
    assert again.to_yaml() == text
    assert_same(pipe, again)
