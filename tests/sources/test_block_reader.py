"""A reader of blocks of any format: whatever is read, in whatever order, it is the rows that are there."""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import trainpipes as tp
from every_format import FORMATS, opened, written
from trainpipes.columns.payload import payload_rows
from trainpipes.sources import read_parquet
from trainpipes.sources.files import block_reader

COUNTS = (40, 0, 1, 60, 3)
every = pytest.mark.parametrize("name", [name for name in FORMATS if name != "zip"])


@pytest.fixture(params=["here", "there"])
def source(request: pytest.FixtureRequest, name: str, folder: Path) -> Any:
    """Files of a format on this machine, and on another one."""
    here, there = folder / name, f"/reader/{name}"
    if not here.exists():
        here.mkdir()
        for path in written(here, FORMATS[name], COUNTS, 7):
            content = Path(path).read_bytes()
            fsspec.filesystem("memory").pipe_file(f"{there}/{os.path.basename(path)}", content)
    return opened(FORMATS[name].read(here if request.param == "here" else f"memory:/{there}", 7))


def numbers(name: str, rows: Any) -> list[int]:
    return [FORMATS[name].number(row) for row in payload_rows(rows)]


@pytest.mark.sample(16)
@every
def test_any_sequence_of_reads_gives_the_rows_that_are_there(name, source, monkeypatch):
    monkeypatch.setattr(block_reader, "SMALL", 300)  # some are fetched together, some alone
    monkeypatch.setattr(block_reader, "TOGETHER", 500)
    monkeypatch.setattr(read_parquet, "BATCH_ROWS", (1, 3))
    firsts = np.append(0, np.cumsum(source.lengths))
    for seed in range(2):
        draw, reader = random.Random(seed), source.reader()
        for _ in range(8):
            blocks = [draw.randrange(len(source.lengths)) for _ in range(draw.randrange(1, 6))]
            if draw.random() < 0.5:
                blocks = list(range(min(blocks), max(blocks) + 1))
            if draw.random() < 0.7 and hasattr(reader, "expect"):
                reader.expect(blocks)
            for block in blocks:
                length = int(source.lengths[block])
                start = draw.randrange(length + 1)
                for stop in sorted(draw.randrange(start, length + 1) for _ in range(2)):
                    first = int(firsts[block])
                    wanted = list(range(first + start, first + stop))
                    assert numbers(name, reader.read(block, start, stop)) == wanted
                    start = stop
            if draw.random() < 0.2 and hasattr(reader, "close"):
                reader.close()


@pytest.mark.sample(21)
@every
def test_readers_of_one_source_have_places_of_their_own_in_threads(name, source):
    longest = int(np.argmax(source.lengths))
    first, length = int(source.lengths[:longest].sum()), int(source.lengths[longest])
    wrong: list[int] = []

    def work(seed: int) -> None:
        reader = source.reader()
        for start in np.random.default_rng(seed).integers(0, length, 10).tolist():
            if numbers(name, reader.read(longest, start, start + 1)) != [first + start]:
                wrong.append(start)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.sample(21)
@every
def test_a_read_that_was_interrupted_loses_no_rows(name, source, monkeypatch):
    if getattr(source, "by_number", False):
        pytest.skip("rows are taken one by one")
    reader, last = source.reader(), len(source.lengths) - 1
    reader.read(0, 0, 3)
    decode = type(source.format).decode

    def interrupt(*_: Any) -> Any:
        monkeypatch.setattr(type(source.format), "decode", decode)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(source.format), "decode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reader.read(last, 0, 1)
    first = int(source.lengths[:last].sum())
    assert numbers(name, reader.read(last, 0, 2)) == [first, first + 1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc for open files")
@every
def test_a_reader_that_is_closed_or_let_go_holds_no_file(name, tmp_path):
    def held() -> int:
        links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
        found = [os.readlink(link) for link in links if os.path.lexists(link)]
        return sum(str(tmp_path) in link for link in found)

    written(tmp_path, FORMATS[name], COUNTS, 7)
    source = opened(FORMATS[name].read(tmp_path, 7))
    filled = np.flatnonzero(source.lengths).tolist()
    reader = source.reader()
    for block in (filled[0], filled[-1]):
        reader.read(block, 0, 1)
        assert held() <= 1
    reader.close()
    assert held() == 0
    assert len(reader.read(filled[-1], 0, 1)) == 1
    del reader
    assert held() == 0


def test_running_out_of_memory_is_not_called_bad_data(tmp_path, monkeypatch):
    written(tmp_path, FORMATS["parquet"], (13,), 7)
    source = opened(tp.read_parquet(tmp_path))

    def fail(*_: Any) -> Any:
        raise MemoryError("malloc of size 1 failed")

    monkeypatch.setattr(type(source.format), "decode", fail)
    with pytest.raises(MemoryError, match="malloc"):
        source.reader().read(0, 0, 1)
