"""What a folder of files that is not finished says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def noted(folder: Path) -> list[dict[str, Any]]:
    """What is noted of each file that is whole."""
    notes = sorted((folder / "_unfinished").glob("*.done.json"))
    return [json.loads(path.read_text()) for path in notes]
