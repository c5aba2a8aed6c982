"""The pictures of the docs are what is drawn today."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
DRAWN = ("elastic", "epoch", "row-path")
SHOWN = ("demo", "even-steps", "padding", "shuffle", "speed-ids", "speed-text")
LARGEST = 60_000


@cache
def make() -> dict[str, Any]:
    """The script that makes them."""
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(FOLDER / "make.py"))


def test_every_picture_is_looked_at():
    assert {*make()["DRAWINGS"]} == {*DRAWN}
    assert {*make()["PICTURES"]} == {*SHOWN}


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_shows_what_is_drawn_today(name):
    held = re.search(r"content (\w{16})", (FOLDER / f"{name}.svg").read_text())
    assert held is not None
    assert held[1] == make()["content"](make()["PICTURES"][name]()), "run docs/pictures/make.py"


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_what_is_drawn_today(name):
    held = (FOLDER / f"{name}.svg").read_text()
    assert held == make()["DRAWINGS"][name](), "run docs/pictures/make.py"
    ElementTree.fromstring(held)


def test_pictures_are_small_and_shown_somewhere():
    root = FOLDER.parents[1]
    others = (root / "README.md", root / "benchmarks" / "README.md")
    pages = "".join(path.read_text() for path in (*FOLDER.parent.glob("*.md"), *others))
    for path in FOLDER.glob("*.svg"):
        assert path.stat().st_size < LARGEST, path.name
        assert f"pictures/{path.name})" in pages
        assert "prefers-color-scheme:dark" in path.read_text(), path.name


def test_bars_are_all_rows_of_their_table():
    table = (FOLDER.parents[1] / "benchmarks" / "README.md").read_text()
    for head in ("token ids in Parquet", "text in Parquet"):
        drawn = make()["speeds"](head)
        rows = table.split(f"| {head} |")[1].split("\n\n")[0].splitlines()[2:]
        assert len(drawn) == len(rows) > 8
        for figure, row in zip(drawn.values(), rows, strict=True):
            assert f" {figure:,} " in row
