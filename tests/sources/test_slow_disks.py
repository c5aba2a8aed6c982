"""Threads that look at local files: only where these are slow."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes.sources.files import file_reader


class Slow(tp.Format):
    """Files of one byte a row, some of which take a while to look at."""

    name, suffixes, schema = "slow", (".rows",), pa.schema([("x", pa.uint8())])

    def __init__(self, slow: set[str], seconds: float) -> None:
        self.slow, self.seconds, self.clock = slow, seconds, 0.0
        self.by: set[int] = set()

    def scan(self, file: Any) -> tp.Layout:
        self.by.add(threading.get_ident())
        self.clock += self.seconds if Path(file.name).stem in self.slow else 0.0001
        size = np.array([file.size])
        return tp.Layout(size, np.zeros(1, np.int64), size, self.schema)

    def decode(self, data: Any, layout: tp.Layout, block: int, columns: Any) -> Any:
        [content] = data.read(self.ranges(layout, block, columns))
        yield pa.record_batch({"x": np.frombuffer(content, np.uint8)})


@pytest.mark.parametrize(
    ("slow", "seconds", "helped"),
    [({"3"}, 0.01, False), ({str(n) for n in range(60)}, 0.01, True), ({"0"}, 0.1, True)],
    ids=["a hiccup", "a slow disk", "a large file"],
)
def test_threads_help_where_files_are_slow(tmp_path, monkeypatch, slow, seconds, helped):
    for n in range(60):
        (tmp_path / f"{n}.rows").write_bytes(bytes([n]))
    form = Slow(slow, seconds)
    monkeypatch.setattr(file_reader, "perf_counter", lambda: form.clock)
    assert [row["x"] for row in tp.read_files(tmp_path, form, index=False)] == list(range(60))
    assert (len(form.by) > 1) == helped
