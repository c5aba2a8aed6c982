"""``trainpipes recipes``: what is installed, with its options, and copies of files."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

import every_recipe
import trainpipes as tp
import trainpipes_recipes

ROOT = Path(trainpipes_recipes.__file__).parent


def test_the_list_as_json(ran):
    code, out, _ = ran("recipes", "--json")
    assert code == 0
    found = {one["name"]: one for one in json.loads(out)}
    assert set(found) == set(trainpipes_recipes.__all__)
    assert found["sft"]["columns"] == ["prompt", "response", "context"]
    assert found["sft"]["options"]["files"]["needed"]
    assert found["sft"]["options"]["max_length"] == {
        "default": "1024", "needed": False, "text": "the most tokens of a row, end-of-text included.",
    }  # fmt: skip


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", trainpipes_recipes.__all__)
def test_one_is_shown_with_its_file_and_every_option(name, ran):
    code, shown, _ = ran("recipes", "show", name)
    assert code == 0
    assert str(ROOT / f"{name}.py") in shown.replace("\n", "").replace(" ", "")
    (found,) = (one for one in tp.recipes() if one.name == name)
    for option in found.options:
        assert f"\n{option.split('=')[0]} " in shown
        assert found.texts[option.split("=")[0]].endswith("."), option


@pytest.mark.parametrize("line", [["show", "stf"], ["copy", "stf", "x.py"]])
def test_a_near_name_is_told(line, ran):
    code, _, err = ran("recipes", *line)
    assert code == 1
    assert "no recipe 'stf' (did you mean 'sft'?)" in err


@pytest.mark.parametrize("name", ["sft", "images"])
def test_a_copy_makes_the_pipeline_of_the_recipe(name, tmp_path, monkeypatch, ran):
    monkeypatch.chdir(tmp_path)
    told = f"own_{name}.py is yours to change; beside it, write: from own_{name} import {name}\n"
    assert ran("recipes", "copy", name, f"own_{name}.py") == (0, "", told)
    before = every_recipe.EVERY[name](tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = getattr(importlib.import_module(f"own_{name}"), name)
    monkeypatch.setattr(every_recipe, name, own)
    try:
        copied = every_recipe.EVERY[name](tmp_path)
        copied.load_state_dict(before.state_at(2))
        next(iter(copied))
    finally:
        del sys.modules[f"own_{name}"]


def test_a_copy_does_not_overwrite_unless_forced(tmp_path, ran):
    there = tmp_path / "sft.py"
    there.write_text("mine")
    for to in (there, tmp_path):
        code, _, err = ran("recipes", "copy", "sft", to)
        assert (code, "is there already" in err) == (1, True), err
    assert there.read_text() == "mine"
    assert ran("recipes", "copy", "sft", tmp_path, "--force")[0] == 0
    assert there.read_bytes() == (ROOT / "sft.py").read_bytes()
    assert os.listdir(tmp_path) == ["sft.py"]
    code, _, err = ran("recipes", "copy", "sft", tmp_path / "no" / "x.py")
    assert (code, "No such file or directory" in err) == (1, True), err
    _, _, told = ran("recipes", "copy", "sft", tmp_path / "my-sft.py")
    assert "to import sft from it, give it a name of letters, digits and _" in told
