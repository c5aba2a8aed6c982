"""Documents that pack leaves out are counted, and said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

import trainpipes as tp

LENGTHS = [3, 9, 4, 8, 1, 7, 2, 2, 30, 5] * 12  # 4 of 10 are longer than 5, of 54 tokens
METHODS = pytest.mark.parametrize("method", ["best_fit", "first_fit", "concat"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = pa.table({"input_ids": [[1] * n for n in LENGTHS]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=50)
    return tmp_path


def packed(folder: Path, method: Any, window: int = 16) -> tp.Pipeline:
    rows = tp.list_files(folder).read_parquet().sharding_filter(2).shuffle(20)
    return rows.pack(5, method=method, overflow="drop", buffer_size=window)


def said(pipe: tp.Pipeline) -> str | None:
    return dict(pipe.explain().lines).get("pack")


@METHODS
def test_each_is_counted_once_an_epoch(folder: Path, method: Any) -> None:
    pipe = packed(folder, method)
    assert said(pipe) is None
    list(pipe)
    expected = "48 of 120 documents left out: longer than 5 tokens (648 tokens)"
    assert said(pipe) == expected
    list(pipe)
    assert said(pipe) == expected.replace("48 of 120", "96 of 240").replace("648", "1,296")


def test_windows_that_are_all_too_long_are_counted_too() -> None:
    pipe = tp.from_arrow(pa.table({"input_ids": [[1] * 9] * 40})).pack(
        5, overflow="drop", buffer_size=8
    )
    assert list(pipe) == []
    assert said(pipe) == "40 of 40 documents left out: longer than 5 tokens (360 tokens)"


def test_the_first_one_is_named_and_then_every_tenfold(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trainpipes"):
        rows = tp.list_files(folder).read_parquet().pack(5, overflow="drop", buffer_size=2)
        list(rows)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert (
        "pack(5, buffer_size=2, overflow='drop'): 1 of 2 documents left out: longer than 5"
        in texts[0]
    )
    assert texts[0].endswith(f"the last one has 9 at {folder}/rows.parquet, row group 0, row 1")
    assert "10 of 2" in texts[1]


def test_where_all_fit_nothing_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tp.list_files(folder).read_parquet().pack(30, overflow="drop")
    with caplog.at_level(logging.WARNING, logger="trainpipes"):
        list(pipe)
    assert not caplog.records
    assert said(pipe) is None


def test_workers_say_it_themselves(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    log = tmp_path_factory.mktemp("log") / "said"
    handler = logging.FileHandler(log)
    logging.getLogger("trainpipes").addHandler(handler)
    try:
        pipe = packed(folder, "best_fit").batch(4)
        loader: DataLoader[Any] = DataLoader(pipe, batch_size=None, num_workers=1)
        assert len(list(loader)) > 2
    finally:
        logging.getLogger("trainpipes").removeHandler(handler)
        handler.close()
    assert "documents left out: longer than 5 tokens" in log.read_text()


def test_it_is_no_part_of_the_state(folder: Path) -> None:
    pipe = packed(folder, "best_fit").batch(2)
    list(pipe)
    fresh = packed(folder, "best_fit").batch(2)
    fresh.load_state_dict(pipe.state_dict() or {})
    assert fresh.state_dict() == pipe.state_dict()
