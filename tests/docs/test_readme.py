"""What README.md, CONTRIBUTING.md and docs/ show is what happens.

Each file's ```python blocks are run from top to bottom in one process and one empty folder. A ```text
block right after one is what it prints. A block marked ```python no-run needs what is not here; after a line
that ends with ``[examples/NAME.py](examples/NAME.py):`` it is that file, which other tests run.
``python tests/docs/test_readme.py`` writes what the blocks print, and those files, into the pages.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import trainpipes as tp
from interpreters import python
from trainpipes import Pipeline

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]

EXAMPLES = sorted((ROOT / "docs" / "examples").rglob("*.py"))

BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
#: A link to a script at a line's end, and what stands in the block after it, if one does.
SCRIPT = re.compile(
    r"\[(examples/[\w/]+\.py)\]\(\1\):$(?:\n\n```python no-run\n(.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")

END = "=== end of block {} ==="


def blocks(page: str) -> list[re.Match[str]]:
    """The blocks to run, each with its code and, if the page shows it, what it prints."""
    return list(BLOCK.finditer((ROOT / page).read_text()))


def first_line(block: re.Match[str]) -> int:
    """The line of the page on which a block's code starts."""
    return block.string.count("\n", 0, block.start(1)) + 1


def printed(page: str, folder: Path) -> list[str]:
    """What each block of a page prints, run in ``folder``."""
    lines = ["import torch, warnings", "warnings.simplefilter('error')"]
    lines.append("torch.set_num_threads(1)")  # several, on a busy machine, wait for each other
    for expected in ("This DataLoader will create", ".*multi-threaded.*fork", ".*set_vital"):
        lines.append(f"warnings.filterwarnings('ignore', {expected!r})")
    for number, block in enumerate(blocks(page)):
        # Lines keep their numbers, so that an error names the place in the page.
        code = "\n" * (first_line(block) - 1) + block[1]
        lines.append(f"exec(compile({code!r}, {page!r}, 'exec'))")
        lines.append(f"print({END.format(number)!r}, flush=True)")
    command = [*python(), "-c", "\n".join(lines)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    said, rest = [], run.stdout
    for number in range(len(blocks(page))):
        one, rest = rest.split(END.format(number) + "\n", 1)
        said.append(one)
    return said


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_is_what_it_prints(page: str, tmp_path: Path) -> None:
    found = blocks(page)
    assert found, f"{page} has no block to run"
    for block, said in zip(found, printed(page, tmp_path), strict=True):
        assert said == (block[2] or ""), f"{page}, block at line {first_line(block)}"


@pytest.mark.parametrize("page", PAGES)
def test_scripts_that_a_page_shows_are_the_scripts_and_links_lead_somewhere(page: str) -> None:
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    for script, shown in SCRIPT.findall(text):
        assert shown == (folder / script).read_text(), f"{page}, {script}"
    assert not [target for target in LINK.findall(text) if not (folder / target).exists()]


def test_every_script_is_linked_somewhere() -> None:
    scripts = {path.relative_to(ROOT / "docs").as_posix() for path in EXAMPLES}
    found = {link for page in PAGES for link in LINK.findall((ROOT / page).read_text())}
    assert len(scripts) > 10
    assert not scripts - found


def test_every_source_and_stage_is_in_a_table_and_has_an_example() -> None:
    text = (ROOT / "docs" / "stages.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    stages = {name for name, method in vars(Pipeline).items() if type(method).__name__ == "Method"}
    sources = {
        *(name for name in tp._NAMES["pipeline.starts"].split() if name != "recipe"),
        *(name for name in dir(Pipeline) if name.startswith("read_")),
    }
    assert len(stages) > 30
    assert len(sources) > 15
    assert stages | sources <= named
    plain = {name for name in stages if ">>>" not in (getattr(Pipeline, name).__doc__ or "")}
    assert plain <= {"chat_template", "pin"}  # a template and an accelerator are needed


def test_the_tree_that_is_shown_is_the_tree() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = text.split("## Where things are")[1].split("##")[0]
    named = re.findall(r"[\w./]+(?:\.py|/)(?=\s)|\.ci/run", tree)
    rooms = ["pipes", "recipes", "tests", "docs", ".ci"]
    there = {path.name for room in rooms for path in (ROOT / room).rglob("*")}
    assert len(named) > 15
    lost = [name for name in named if name.rstrip("/") not in there]
    assert not [name for name in lost if not (ROOT / name).exists()]


if __name__ == "__main__":
    for page in PAGES:
        text = (ROOT / page).read_text()
        with TemporaryDirectory() as folder:
            said = printed(page, Path(folder))
        for block, one in reversed(list(zip(blocks(page), said, strict=True))):
            if block[2] is not None:
                text = text[: block.start(2)] + one + text[block.end(2) :]
        for link in reversed(list(SCRIPT.finditer(text))):
            if link[2] is not None:
                script = ((ROOT / page).parent / link[1]).read_text()
                text = text[: link.start(2)] + script + text[link.end(2) :]
        (ROOT / page).write_text(text)
