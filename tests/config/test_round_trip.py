"""What ``to_yaml`` writes, ``load`` reads as the same pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import every_recipe
import every_stage
import trainpipes as tp
from trainpipes.config import loads

Make = Callable[[Path], tp.Pipeline]
EVERY: dict[str, Make] = {
    **every_stage.FINITE,
    **every_stage.ENDLESS,
    **{f"recipe {name}": make for name, make in every_recipe.EVERY.items()},
}
#: Why a pipeline is not written: its rows are in memory, or an option is an object.
REASONS = ("rows in memory", "has no form in a config", "numbers is data")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.mark.parametrize("name", EVERY)
def test_a_pipeline_comes_back_the_same(name: str, folder: Path) -> None:
    pipe = EVERY[name](folder)
    try:
        text = pipe.to_yaml()
    except tp.ConfigError as error:
        assert any(reason in str(error) for reason in REASONS), error
        return
    again = loads(text, allow_imports=True)
    assert again == pipe
    assert again.to_yaml() == text
    assert again.describe()["fingerprint"] == pipe.describe()["fingerprint"]
