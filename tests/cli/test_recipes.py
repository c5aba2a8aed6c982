"""``trainpipes recipes``: what is installed, its files, and copies of them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainpipes as tp
import trainpipes_recipes
from cli.command import environment, trainpipes
from cli.test_frame import SAY_HEAVY, on_terminal
from every_recipe import EVERY
from trainpipes.cli.app import run

ROOT = Path(trainpipes_recipes.__file__).parent


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """An installed package that offers recipes: one that imports its neighbours, one that it does not
    define where it is offered, one that is no function of a file."""
    place = tmp_path / "site"
    package = place / "mine_pipes"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from .deep.chain import chained\nimport functools\nmade = functools.partial(chained, 3)\n"
        "def whole(n: int = 4):\n"
        '    """Numbers of a package."""\n'
        "    from .deep import chain\n"
        "    return chain.chained(n)\n"
    )
    (package / "sizes.py").write_text("ROWS = 8\n")
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "other.py").write_text("SIZE = 2\n")
    (package / "deep" / "chain.py").write_text(
        '"""Numbers: \N{GREEK SMALL LETTER ALPHA}."""\n'
        "import trainpipes as tp\n"
        "from . import other\n"
        "from .other import SIZE; from..sizes import (\n    ROWS,\n)\n"
        "def chained(n: int = ROWS) -> tp.Pipeline:\n"
        '    """Numbers in a chain.\n\n'
        '    Args:\n        n: column of nothing, but\n            how many.\n    """\n'
        "    from .. import sizes\n"
        "    return tp.from_dataset(range(min(n, sizes.ROWS))).batch(min(SIZE, other.SIZE))\n"
    )
    info = place / "mine_pipes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-pipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[trainpipes.recipes]\n"
        "mine = mine_pipes.deep.chain:chained\n"
        "again = mine_pipes:chained\n"
        "whole = mine_pipes:whole\n"
        "made = mine_pipes:made\n"
    )
    monkeypatch.syspath_prepend(str(place))
    yield place
    for name in [name for name in sys.modules if name.split(".")[0] == "mine_pipes"]:
        del sys.modules[name]


def test_the_list_says_what_each_recipe_expects(capsys):
    assert run(["recipes"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    blocks = told.out.split("\n\n")
    assert [block.split()[0] for block in blocks] == sorted(trainpipes_recipes.__all__)
    sft = next(block for block in blocks if block.startswith("sft"))
    assert "needs: files, tokenizer" in sft
    assert "columns: prompt, response, context" in sft
    assert "max_length=1024" in sft
    assert max(map(len, told.out.splitlines())) <= 100
    assert not [line for line in told.out.splitlines() if line != line.rstrip()]


def test_every_recipe_says_its_columns_and_all_its_options():
    for one in tp.recipes():
        assert one.columns, one.name
        assert set(one.texts) == {option.split("=")[0] for option in one.options}, one.name
        assert all(text.endswith(".") for text in one.texts.values()), one.name


def test_the_list_as_json(capsys):
    assert run(["recipes", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert set(found) == set(trainpipes_recipes.__all__)
    assert found["sft"]["columns"] == ["prompt", "response", "context"]
    options = found["sft"]["options"]
    assert options["files"] | {"text": ""} == {"default": None, "needed": True, "text": ""}
    assert options["max_length"] == {
        "default": "1024",
        "needed": False,
        "text": "the most tokens of a row, end-of-text included.",
    }


def test_the_list_fits_a_narrow_terminal():
    code, text = on_terminal(["recipes"], {"NO_COLOR": "1"}, columns=40)
    assert code == 0
    assert max(map(len, text.splitlines())) <= 40


@pytest.mark.parametrize("name", trainpipes_recipes.__all__)
def test_show_prints_the_file_as_it_is(name, capfdbinary):
    assert run(["recipes", "show", name]) == 0
    assert capfdbinary.readouterr().out == (ROOT / f"{name}.py").read_bytes()


def test_show_imports_nothing_heavy():
    told = trainpipes("recipes", "show", "sft", before=SAY_HEAVY)
    assert told.stderr == "heavy ['rich']\n"
    assert told.stdout == (ROOT / "sft.py").read_text()


def test_show_has_colours_on_a_terminal():
    code, text = on_terminal(["recipes", "show", "sft"], {}, columns=200)
    assert code == 0
    assert "\x1b[" in text
    code, text = on_terminal(["recipes", "show", "sft"], {"NO_COLOR": "1"}, columns=40)
    assert text == (ROOT / "sft.py").read_text()


@pytest.mark.parametrize("line", [["show", "stf"], ["copy", "stf", "x.py"]])
def test_a_near_name_is_told(line, capsys):
    assert run(["recipes", *line]) == 1
    assert "no recipe 'stf' (did you mean 'sft'?)" in capsys.readouterr().err


@pytest.mark.parametrize("name", EVERY)
def test_a_copy_makes_the_pipeline_of_the_recipe(name, tmp_path, monkeypatch, capsys):
    import every_recipe

    recipe = name.split(" / ")[0]
    assert run(["recipes", "copy", recipe, str(tmp_path / f"own_{recipe}.py")]) == 0
    capsys.readouterr()
    data = tmp_path / "data"
    data.mkdir()
    before = EVERY[name](data)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = getattr(importlib.import_module(f"own_{recipe}"), recipe)
    assert own is not getattr(every_recipe, recipe)
    monkeypatch.setattr(every_recipe, recipe, own)
    try:
        copied = EVERY[name](data)
        assert own.__module__ == f"own_{recipe}"
        if recipe == "tokens" and name != "tokens":  # whose map() is a function of its own file
            same = copied._session.plan.identity.replace(
                "own_tokens.", "trainpipes_recipes.tokens."
            )
            assert same == before._session.plan.identity
            return
        assert (
            copied.explain().to_dict()["fingerprint"] == before.explain().to_dict()["fingerprint"]
        )
        copied.load_state_dict(before.state_at(2))
        next(iter(copied))
    finally:
        del sys.modules[f"own_{recipe}"]


def test_a_copy_says_what_to_do_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["recipes", "copy", "sft", "my_sft.py"]) == 0
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line == "my_sft.py is yours to change; beside it, write: from my_sft import sft"
    code = f"{line.partition('write: ')[2]}; print(sft.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "my_sft\n", done.stderr
    assert os.listdir(tmp_path) in (["my_sft.py"], ["my_sft.py", "__pycache__"])


def test_a_copy_that_cannot_be_imported_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["recipes", "copy", "sft", "my-sft.py"]) == 0
    assert "to import it, give it a name such as my_sft.py" in capsys.readouterr().err


def test_a_copy_does_not_overwrite_unless_forced(tmp_path, capsys):
    there = tmp_path / "mine.py"
    there.write_text("mine")
    there.chmod(0o600)
    assert run(["recipes", "copy", "sft", str(there)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert there.read_text() == "mine"
    assert run(["recipes", "copy", "sft", str(there), "--force"]) == 0
    assert there.read_bytes() == (ROOT / "sft.py").read_bytes()
    assert os.listdir(tmp_path) == ["mine.py"]


def test_a_copy_goes_into_a_folder_and_through_a_link(tmp_path, capsys):
    assert run(["recipes", "copy", "sft", str(tmp_path)]) == 0
    assert (tmp_path / "sft.py").read_bytes() == (ROOT / "sft.py").read_bytes()
    (tmp_path / "link.py").symlink_to("sft.py")
    assert run(["recipes", "copy", "chat", str(tmp_path / "link.py")]) == 1
    assert run(["recipes", "copy", "chat", str(tmp_path / "link.py"), "--force"]) == 0
    assert (tmp_path / "link.py").is_symlink()
    assert (tmp_path / "sft.py").read_bytes() == (ROOT / "chat.py").read_bytes()


@pytest.mark.parametrize(
    ("to", "force", "said"),
    [
        ("tokenize.py", False, "would hide the module 'tokenize'"),
        ("torch.py", False, "would hide the module 'torch'"),
        ("trainpipes.py", False, "would hide the module 'trainpipes'"),
        ("no/such/x.py", False, "is not there: make it first"),
        ("fifo.py", True, "it is no file"),
        ("dangling.py", False, "it is no file"),
    ],
)
def test_where_a_copy_cannot_be(to, force, said, tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo.py")
    (tmp_path / "dangling.py").symlink_to("nowhere.py")
    before = sorted(os.listdir(tmp_path))
    arguments = ["recipes", "copy", "classification", str(tmp_path / to), *["--force"][:force]]
    assert run(arguments) == 1
    assert said in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == before


def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device", "hidden.new")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(os, "replace", full)
    assert run(["recipes", "copy", "sft", str(tmp_path / "x.py")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'x.py'}: No space left on device\n"
    assert os.listdir(tmp_path) == []


def test_recipes_of_another_package(other_package, tmp_path, monkeypatch, capsys):
    assert run(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert "Numbers in a chain." in listed
    assert "columns: n\n" in listed
    chain = other_package / "mine_pipes" / "deep" / "chain.py"
    for name in ("mine", "again"):
        assert run(["recipes", "show", name]) == 0
        assert capsys.readouterr().out == chain.read_text()


@pytest.mark.parametrize(
    ("name", "function"), [("mine", "chained"), ("again", "chained"), ("whole", "whole")]
)
def test_a_copy_of_another_package_names_what_it_imports(
    other_package, name, function, tmp_path, monkeypatch, capsys
):
    work = tmp_path / "work"
    work.mkdir()
    assert run(["recipes", "copy", name, str(work / "my_own.py")]) == 0
    assert f"from my_own import {function}" in capsys.readouterr().err
    monkeypatch.syspath_prepend(str(work))
    own = getattr(importlib.import_module("my_own"), function)
    try:
        assert list(own()) == list(tp.recipe(name))
        assert own.__module__ == "my_own"
    finally:
        del sys.modules["my_own"]


def test_a_recipe_that_stands_in_no_file_is_said_to(other_package, capsys):
    assert run(["recipes", "show", "made"]) == 1
    assert "which is no function that stands in a file of Python" in capsys.readouterr().err


def test_who_reads_no_further_is_no_error():
    code = "from trainpipes.cli import main; main()"
    line = f"set -o pipefail; {sys.executable} -c '{code}' recipes | head -n 1"
    told = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment())
    assert told.stderr == ""
    assert told.stdout.startswith("chat ")
