"""Small files to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.look.inspection import Inspection


def parquet(path: Path, columns: Any, **options: Any) -> Path:
    """Write a table, or columns, as a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, path, **options)
    return path


def kinds(found: Inspection) -> list[str]:
    """What was found, by name."""
    return [one.kind for one in found.findings]


def said(found: Inspection, kind: str) -> str:
    """The text and the cure of the finding of a name."""
    one = next(one for one in found.findings if one.kind == kind)
    return f"{one.text} -> {one.cure}"
