"""CONTRIBUTING.md, done word for word in a copy of the repository."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from interpreters import python

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()

NEW_FILE = re.compile(r"`([\w/]+\.py)`:\n\n```python no-run\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Changes of a file, which is the one named last before them.
CHANGE = re.compile(r"`([\w/]+\.py)`|```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r'^(TRAINPIPES_\w+=1 )?make test PYTEST="(.*lower.*)"$', re.MULTILINE)


def changed(text: str, change: str) -> str:
    """A file's text with lines added where a change has them."""
    lines = change.splitlines()
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    assert text.count(before) == 1, before
    return text.replace(before, "".join(f"{line[1:]}\n" for line in lines))


def write_all(folder: Path) -> list[str]:
    """Write what the page says into a copy. Returns the files it names."""
    for path, content in NEW_FILE.findall(TEXT):
        assert not (folder / path).exists()
        (folder / path).write_text(content)
    named, changes = "", []
    for path, change in CHANGE.findall(TEXT):
        named = path or named
        if change:
            changes.append(named)
            (folder / named).write_text(changed((folder / named).read_text(), change))
    return changes


def copied(folder: Path) -> Path:
    for name in ("pipes", "recipes", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_what_it_says_to_change_is_there(tmp_path: Path) -> None:
    assert write_all(copied(tmp_path)) == [
        "pipes/trainpipes/pipeline/chain.py",
        "pipes/trainpipes/pipeline/chain.py",
        "tests/support/every_stage.py",
    ]


def test_classes_that_it_names_are_there() -> None:
    named = set(
        re.findall(r"`([A-Z][a-z]\w+)`", TEXT.split("## What does what")[1].split("\n## ")[0])
    )
    code = "".join(path.read_text() for path in (ROOT / "pipes" / "trainpipes").rglob("*.py"))
    assert len(named) > 15
    assert not named - set(re.findall(r"^class (\w+)", code, re.MULTILINE))


@pytest.mark.slow
def test_a_first_stage_passes_its_tests(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    write_all(folder)
    paths = [str(folder / name) for name in ("pipes", "recipes")]
    found = COMMAND.findall(TEXT)
    assert len(found) == 2
    for setting, arguments in found:
        set_to = dict([setting.strip().split("=")]) if setting else {}
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **set_to}
        command = [*python(), "-m", "pytest", "-q", *shlex.split(arguments)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert " passed" in done.stdout
    assert '"every stage, lower"' in (folder / "tests/golden/identities.json").read_text()
