"""The commands of docs/recipes.md for the recipes run as they stand, on the data that it says how to make."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

import trainpipes_recipes
from torch_settings import torch_as_before
from trainpipes.cli.app import run
from trainpipes_recipes import samples

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()
ROWS = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \|.*\| `([^`]+)` \|$", PAGE, re.M)
SCRIPTS = re.findall(r"^python -m trainpipes_recipes\.(train_\w+) (.*)$", PAGE, re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    samples.main([str(folder / "samples"), "--every", "24"])
    return folder


def test_every_recipe_and_every_script_has_its_line() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(trainpipes_recipes.__all__)
    assert all(name == anchor == command.split()[0] for name, anchor, command in ROWS)
    there = Path(trainpipes_recipes.__file__).parent.glob("train_*.py")
    assert sorted(name for name, _ in SCRIPTS) == sorted(path.stem for path in there)


@pytest.mark.sample(7)
@pytest.mark.parametrize("command", [command for _, _, command in ROWS])
def test_a_recipe_runs_as_it_stands(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    code = run(["run", *shlex.split(command), "--steps", "3"])
    assert code == 0, capsys.readouterr()


@pytest.mark.sample(4)
@pytest.mark.parametrize(("script", "options"), SCRIPTS)
def test_a_script_trains_as_it_stands(
    script: str, options: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    main = importlib.import_module(f"trainpipes_recipes.{script}").main
    with torch_as_before():
        torch.set_num_threads(1)
        main([*shlex.split(options), "--steps", "2", "--batch-size", "2"])
    assert (folder / "runs" / script.removeprefix("train_") / "step-00000002.pt").exists()
