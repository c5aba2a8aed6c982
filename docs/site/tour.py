"""The notebook ``docs/tour.ipynb``: run, compared with what is in it, and shown as a page of the site.

    python docs/site/tour.py    runs it, and writes its outputs into it; needs nbclient and ipykernel

Cells with the tag "varies" give something else each time, such as seconds; their outputs are not compared.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["PATH", "differences", "page", "run"]

PATH = Path(__file__).parents[1] / "tour.ipynb"
#: Kinds of outputs, from the one that a page shows if it can on.
KINDS = ("text/html", "image/svg+xml", "image/png", "text/plain")
#: Seconds that a cell may take.
TIMEOUT = 120


def run(folder: Path, path: Path = PATH) -> dict[str, Any]:
    """The notebook with the outputs of a fresh run.

    Args:
        folder: where it runs, and writes its files to.
        path: the notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    found: dict[str, Any] = json.loads(nbformat.writes(notebook))
    for cell in found["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = list(_kept(cell["outputs"]))
    found["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return found


def _kept(outputs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Outputs but for what stderr was told, and what was shown for a while only; prints that follow each
    other as one."""
    before = None
    for output in outputs:
        if output.get("name") == "stderr" or output.get("data", {}).get("text/html") == "":
            continue
        if before is not None and output["output_type"] == before["output_type"] == "stream":
            before["text"] = [*before["text"], *output["text"]]
            continue
        output.pop("transient", None)
        before = output
        yield output


def differences(kept: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Where the outputs that are kept are not those of now, in words."""
    found = []
    for number, (old, new) in enumerate(zip(kept["cells"], now["cells"], strict=True)):
        if old["cell_type"] != "code" or "varies" in old["metadata"].get("tags", ()):
            continue
        texts = list(_texts(old)), list(_texts(new))
        if texts[0] != texts[1]:
            found.append(
                f"cell {number}, {''.join(old['source'])!r}: kept {texts[0]}, now {texts[1]}"
            )
    return found


def _texts(cell: dict[str, Any]) -> Iterator[str]:
    """What a cell gives, but for the pixels of pictures."""
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            yield "".join(output["text"])
        for kind, value in sorted(output.get("data", {}).items()):
            picture = kind == "image/png" or "".join(value).startswith("<Picture")
            yield kind if picture else "".join(value)


def page() -> str:
    """The notebook as Markdown."""
    parts = []
    for cell in json.loads(PATH.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += map(_shown, cell["outputs"])
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """An output of a cell, as Markdown or HTML."""
    if output["output_type"] == "stream":
        return _text("".join(output["text"]))
    data = output["data"]
    kind = next(kind for kind in KINDS if kind in data)
    value = "".join(data[kind])
    if kind == "text/plain":
        return _text(value)
    if kind == "image/png":
        plain = escape("".join(data.get("text/plain", "a picture")))
        value = f'<img alt="{plain}" src="data:image/png;base64,{value.strip()}"/>'
    value = re.sub(r"\n\s*\n", "\n", value)  # an empty line would end the HTML for Markdown
    return f'<div class="output">{value}</div>'


def _text(text: str) -> str:
    return f"````text\n{text.rstrip()}\n````"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = run(Path(folder))
    PATH.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    sys.exit(0)
