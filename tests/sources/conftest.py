"""What holds for all tests of sources."""

from __future__ import annotations

import pytest

from trainpipes.sources.files import file_bytes
from trainpipes.sources.parquet import row_groups


@pytest.fixture(autouse=True)
def files_are_not_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remote files of a few KB stand for large ones, which do not stay in memory."""
    monkeypatch.setattr(file_bytes, "SMALL_FILE", 0)
    monkeypatch.setattr(row_groups, "WHOLE_BYTES", 0)
