"""What a folder of files that is not finished says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def noted(folder: Path) -> list[dict[str, Any]]:
    """What is noted of each file that is whole; once, also where Ctrl-C had a line written twice."""
    state = json.loads((folder / "_unfinished.json").read_text())
    journal = folder / str(state.get("journal"))
    text = journal.read_text() if journal.is_file() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    entries = [*state["files"], *(json.loads(line)["file"] for line in lines)]
    return [one for k, one in enumerate(entries) if not k or one != entries[k - 1]]
