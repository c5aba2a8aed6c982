"""The README's commands for the recipes run as they stand, on the data that it says how to make."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

import trainpipes_recipes
from torch_settings import torch_as_before
from trainpipes_recipes import samples
from trainpipes_recipes.training.log import read_log

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
ROWS = re.findall(r"^\| \[`(\w+)`\]\(docs/recipes\.md#(\w+)\) \|.*\| `([^`]+)` \|$", README, re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    samples.main([str(folder / "samples"), "--every", "12"])
    return folder


def test_every_recipe_has_its_line() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(trainpipes_recipes.__all__)
    assert all(name == anchor for name, anchor, _ in ROWS)


@pytest.mark.parametrize("name", [name for name, _, _ in ROWS])
def test_a_command_runs_as_it_stands(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    commands = {name: shlex.split(command) for name, _, command in ROWS}
    script, *options = commands[name]
    if name == "evaluation":  # of what train_sft has saved
        run(*commands["sft"])
        with torch_as_before():
            mean = importlib.import_module(f"trainpipes_recipes.{script}").main(options)
        assert 0 < mean < 10
        assert len((folder / "checkpoints/sft/scores.jsonl").read_text().splitlines()) > 100
        return
    run(script, *options)
    steps = read_log(folder / "checkpoints" / script.removeprefix("train_") / "log.jsonl")
    assert [step.number for step in steps] == [1, 2, 3]


def run(script: str, *options: str) -> None:
    """Three steps of a training script."""
    main = importlib.import_module(f"trainpipes_recipes.{script}").main
    with torch_as_before():
        main([*options, "--steps", "3", "--device", "cpu", "--threads", "1"])
