"""The notebook of the docs runs, and the outputs in it are those of now."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("tour", ROOT / "docs" / "site" / "tour.py")
assert SPEC is not None
assert SPEC.loader is not None
tour = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tour)


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tour.PATH.read_text())
    return found


def test_every_cell_runs_and_gives_what_the_notebook_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name in ("TRAINPIPES_CACHE", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("TQDM_DISABLE", "1")  # a slow machine would show some
    work = tmp_path / "work"
    work.mkdir()
    changed = tour.differences(kept(), tour.run(work))
    assert not changed, (
        "the outputs in docs/tour.ipynb are out of date: run python docs/site/tour.py\n"
        + "\n".join(changed)
    )


def code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_outputs_that_are_out_of_date_are_told() -> None:
    old, new = kept(), kept()
    assert not tour.differences(old, new)
    for number, cell in enumerate(code(old)):
        if cell["outputs"]:
            new = kept()
            code(new)[number]["outputs"] = []
            said = tour.differences(old, new)
            varies = "varies" in cell["metadata"].get("tags", ())
            assert len(said) == (not varies)
            assert varies or repr("".join(cell["source"])) in said[0]


def test_the_page_of_the_site_has_all_cells_and_outputs() -> None:
    text = tour.page()
    for cell in kept()["cells"]:
        assert "".join(cell["source"]) in text
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                assert "".join(output["text"]).rstrip() in text
    assert text.count('<div class="output">') >= 3
    assert "<script" not in text


def test_the_notebook_holds_nothing_of_the_machine_that_it_was_run_on() -> None:
    text = tour.PATH.read_text()
    for word in ("/tmp/", "/work/", "/home/", "/root", "execution_time", "iopub"):
        assert word not in text
    assert not [cell for cell in code(kept()) if not cell["source"]]
