"""Every pipeline that README.md and docs/ make comes back from YAML the same, or is refused for a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from test_readme import PAGES, blocks, first_line

#: Why a pipeline of the docs is not written, as errors say it.
REASONS = (
    "rows in memory have no place in a config",
    "a tokenizer that is an object",
    "is defined in the script that runs",
    "a lambda has no name",
    "is made within a function",
    "has no form in a config",
    "would not come back",
    "distributed(...) is of one of them",
    "has no form as text",
    "is a stage of your own",
)

#: How many pipelines of a page come back, at least; more are made, of rows in memory for the most part.
AT_LEAST = {
    "README.md": 12, "docs/cache.md": 4, "docs/compose.md": 15, "docs/config.md": 3,
    "docs/datasets.md": 10, "docs/distributed.md": 4, "docs/formats.md": 25, "docs/images.md": 20,
    "docs/performance.md": 5, "docs/recipes.md": 50, "docs/resume.md": 10, "docs/stages.md": 60,
}  # fmt: skip
#: Pages that take seconds rather than minutes.
QUICK = ("README.md", "docs/config.md")

#: A module that keeps each pipeline that a block makes, and says of each what comes back.
HOOK = """
import json, warnings
warnings.simplefilter("ignore")
import trainpipes as tp
from trainpipes.config import loads

seen, told, busy = [], {}, False
made = tp.Pipeline.__init__

def keep(self, *args, **options):
    made(self, *args, **options)
    if not busy:
        seen.append(self)

tp.Pipeline.__init__ = keep

def what_comes_of(pipe):
    try:
        text = pipe.to_yaml()
    except tp.ConfigError as error:
        return f"refused: {error}"
    again = loads(text, allow_imports=True)
    if again != pipe or again.to_yaml() != text:
        return f"another one: {text}"
    try:
        wanted = pipe.explain().to_dict()["fingerprint"]
    except (tp.TrainpipesError, OSError, TypeError):
        return "same"  # a chain that is not whole, or reads what is not there any more
    return "same" if again.explain().to_dict()["fingerprint"] == wanted else f"another fingerprint: {text}"

def check():
    global busy
    busy = True
    for pipe in seen:
        if repr(pipe) not in told:
            told[repr(pipe)] = what_comes_of(pipe)
    seen.clear()
    busy = False
    with open("told.json", "w") as file:
        json.dump(told, file)
"""


def pipelines_of(page: str, folder: Path) -> dict[str, str]:
    """Each pipeline that a page's blocks make, and what comes of it."""
    (folder / "hook_of_pipelines.py").write_text(HOOK)
    lines = ["import sys", "sys.path.insert(0, '')", "import hook_of_pipelines"]
    for block in blocks(page):
        code = "\n" * (first_line(block) - 1) + block[1]
        lines.append(f"exec(compile({code!r}, {page!r}, 'exec'))")
        lines.append("sys.modules['hook_of_pipelines'].check()")
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=folder, capture_output=True, text=True, timeout=280
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    told: dict[str, str] = json.loads((folder / "told.json").read_text())
    return told


PARAMETERS = [
    pytest.param(page, marks=[] if page in QUICK else [pytest.mark.slow], id=page) for page in PAGES
]


@pytest.mark.parametrize("page", PARAMETERS)
def test_pipelines_of_a_page_come_back(page: str, tmp_path: Path) -> None:
    found = pipelines_of(page, tmp_path)
    for pipe, said in found.items():
        refused = said.startswith("refused") and any(reason in said for reason in REASONS)
        assert said == "same" or refused, f"{pipe}\n{said}"
    assert list(found.values()).count("same") >= AT_LEAST.get(page, 0)
