"""What a folder of files holds, and what one that is not finished says of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}


def row_groups(paths: Iterable[str | Path]) -> list[list[int]]:
    """Rows of the row groups of Parquet files."""
    files = [pq.read_metadata(path) for path in paths]
    return [[m.row_group(n).num_rows for n in range(m.num_row_groups)] for m in files]


def noted(folder: Path) -> list[dict[str, Any]]:
    """What is noted of each file that is whole."""
    notes = sorted((folder / "_unfinished").glob("*.done.json"))
    return [json.loads(path.read_text()) for path in notes]


def begun_again(folder: Path, files: int) -> None:
    """Make of a finished folder one where a process was killed after so many files were noted."""
    about = json.loads((folder / "_manifest.json").read_text())
    work = folder / "_unfinished"
    work.mkdir()
    for entry in about["files"][:files]:
        info = {**entry, "columns": about["columns"]}
        (work / f"{entry['file']}.done.json").write_text(json.dumps(info))
    begun = {name: about[name] for name in about.keys() - {"files", "rows", "columns", "notes"}}
    begun.pop("trainpipes_files")
    (work / "about.json").write_text(json.dumps(begun))
    (folder / "_manifest.json").unlink()
