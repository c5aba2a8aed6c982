"""The index of files of text: made once, by one process, and made again for files that have changed."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp
from sources.native_formats import opened
from trainpipes.sources.files.format import packed, unpacked
from trainpipes.sources.files.index_store import COLUMNS
from trainpipes.sources.text import block_index
from trainpipes.storage.caching import checked_file


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache."""
    monkeypatch.setenv("TRAINPIPES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to be indexed."""
    found: list[str] = []
    scan = block_index.scan

    def watched(*arguments: Any) -> Any:
        found.append(Path(arguments[3]).name)
        return scan(*arguments)

    monkeypatch.setattr(block_index, "scan", watched)
    return found


def write(path: Path, count: int, first: int = 0) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f'{{"x": {n}}}\n' for n in range(first, first + count)))
    old = time.time() - 60
    os.utime(path, (old, old + first / 1000))


def x(pipe: tp.Pipeline) -> list[int]:
    return [row["x"] for row in pipe]


def the_index(kept: Path) -> Path:
    (found,) = (kept / "footers").glob("*.arrow")
    return found


def test_a_second_run_reads_no_file_to_index_it(tmp_path, kept, scanned):
    for n in range(3):
        write(tmp_path / "d" / f"{n}.jsonl", 10, 10 * n)
    make = lambda: tp.read_json(tmp_path / "d", index=True)  # noqa: E731
    assert x(make()) == list(range(30))
    assert sorted(scanned) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert x(make()) == list(range(30))
    assert len(scanned) == 3
    assert tp.cache.info().indexes == 1


def test_small_local_files_are_kept_only_if_asked_for_and_never_if_refused(tmp_path, kept, scanned):
    write(tmp_path / "d" / "a.jsonl", 10)
    for index, count in ((None, 0), (False, 0), (True, 1), (str(tmp_path / "i.arrow"), 1)):
        len(tp.read_json(tmp_path / "d", index=index))
        assert tp.cache.info().indexes == count
    assert (tmp_path / "i.arrow").exists()
    write(tmp_path / "d" / "b.jsonl", 400_000)  # 6 MB
    tp.cache.clear()
    assert len(tp.read_json(tmp_path / "d")) == 400_010
    assert tp.cache.info().indexes == 1


def test_only_files_that_changed_or_came_are_read_again(tmp_path, kept, scanned):
    for n in range(3):
        write(tmp_path / "d" / f"{n}.jsonl", 10, 10 * n)
    make = lambda: tp.read_json(tmp_path / "d", index=True)  # noqa: E731
    len(make())
    scanned.clear()
    write(tmp_path / "d" / "1.jsonl", 10, 50)  # as many bytes, at another time
    write(tmp_path / "d" / "7.jsonl", 5, 70)
    assert x(make()) == [*range(10), *range(50, 60), *range(20, 30), *range(70, 75)]
    assert sorted(scanned) == ["1.jsonl", "7.jsonl"]


def test_other_options_of_cutting_have_an_index_of_their_own(tmp_path, kept, scanned):
    path = tmp_path / "d" / "a.txt"
    path.parent.mkdir()
    path.write_text("a\nb\n\nc\n" * 5)
    for unit, rows in (("line", 20), ("paragraph", 6), ("document", 1)):
        for _ in range(2):
            assert len(tp.read_text(path, unit, index=True)) == rows
    assert len(opened(tp.read_text(path, index=True, block_rows=3)).lengths) == 7
    assert len(scanned) == 4


def test_types_that_were_found_are_kept_beside(tmp_path, kept, monkeypatch):
    write(tmp_path / "d" / "a.jsonl", 10)
    make = lambda infer: tp.read_json(tmp_path / "d", index=True, infer=infer)  # noqa: E731
    expected = [opened(make(infer)).schema for infer in ("first", "all")]

    def fail(*_: Any) -> None:
        raise AssertionError("types are looked for again")

    monkeypatch.setattr("trainpipes.sources.text.block_schema.PieceReader", fail)
    for infer, schema in zip(("first", "all"), expected, strict=True):
        assert opened(make(infer)).schema == schema == pa.schema([("x", pa.int64())])


def _open(folder: str, started: Any, results: Any) -> None:
    scan = block_index.scan
    scans = 0

    def slow(*arguments: Any) -> Any:
        nonlocal scans
        scans += 1
        time.sleep(0.3)
        return scan(*arguments)

    block_index.scan = slow
    started.wait()
    rows = len(tp.read_json(folder, index=True))
    results.put((rows, scans))


def test_of_several_processes_one_makes_the_index_and_the_others_wait(tmp_path, kept):
    for n in range(2):
        write(tmp_path / "d" / f"{n}.jsonl", 10, 10 * n)
    context = multiprocessing.get_context("fork")
    started, results = context.Barrier(3), context.Queue()
    ranks = [
        context.Process(target=_open, args=(str(tmp_path / "d"), started, results))
        for _ in range(3)
    ]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert [rows for rows, _ in found] == [20, 20, 20]
    assert sorted(scans for _, scans in found) == [0, 0, 2]


def test_what_was_indexed_before_a_file_failed_is_kept(tmp_path, kept, scanned):
    write(tmp_path / "d" / "a.jsonl", 10)
    (tmp_path / "d" / "b.jsonl").write_text("[1, 2]")
    for _ in range(2):
        with pytest.raises(tp.UnreadableError, match=r"b\.jsonl"):
            len(tp.read_json(tmp_path / "d", index=True))
    assert sorted(scanned) == ["a.jsonl", "b.jsonl", "b.jsonl"]


LIES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda values: values + 1,
    "stop": lambda values: values - 3,
    "checks": lambda values: values ^ 1,
    "at": lambda value: value + 4,
}


@pytest.mark.parametrize("column", LIES)
@pytest.mark.parametrize("compressed", [False, True])
def test_an_index_that_lies_is_found_out_and_made_again(tmp_path, kept, column, compressed):
    path = tmp_path / "d" / "a.jsonl"
    write(path, 100)
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
        os.utime(path, (time.time() - 60,) * 2)
    make: Callable[[], tp.Pipeline] = lambda: tp.read_json(path, index=True)  # noqa: E731
    assert x(make()) == list(range(100))
    about = _about(the_index(kept))
    table = checked_file.read(the_index(kept), about)
    assert table is not None
    row = table.to_pylist()[0]
    if column in row:
        row[column] = [int(LIES[column](value)) for value in row[column]]
    else:
        extra = unpacked(row["extra"])
        row["extra"] = packed(**{**extra, column: LIES[column](extra[column])})
    if column == "at":
        row["start"] = [row["start"][0] + 4]
    lying = pa.Table.from_pylist([row], schema=COLUMNS)
    checked_file.write(the_index(kept), lambda: [lying], about)
    with pytest.raises((tp.DataChangedError, tp.UnreadableError)) as caught:
        x(make())
    assert str(path) in str(caught.value)
    assert x(make()) == list(range(100))


def _about(path: Path) -> Any:
    with pa.memory_map(str(path)) as file:
        return json.loads(pa.ipc.open_file(file).schema.metadata[b"trainpipes"])["about"]


@pytest.mark.parametrize("how", ["cut", "empty", "other"])
def test_an_index_that_is_damaged_is_made_again(tmp_path, kept, scanned, how):
    write(tmp_path / "d" / "a.jsonl", 100)
    make = lambda: tp.read_json(tmp_path / "d", index=True)  # noqa: E731
    len(make())
    path = the_index(kept)
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-100], "empty": b"", "other": b"x" * 5000}[how])
    with pytest.warns(UserWarning, match="was damaged"):
        assert x(make()) == list(range(100))
    assert len(scanned) == 2


def test_a_file_of_the_users_own_that_is_no_index_is_refused(tmp_path):
    write(tmp_path / "d" / "a.jsonl", 10)
    mine = tmp_path / "mine.arrow"
    mine.write_bytes(b"something of value")
    with pytest.raises(tp.ConfigError, match="not an index of trainpipes"):
        len(tp.read_json(tmp_path / "d", index=mine))
    assert mine.read_bytes() == b"something of value"


def test_workers_read_the_index_that_their_parent_made(tmp_path, kept, scanned):
    for n in range(4):
        write(tmp_path / "d" / f"{n}.jsonl", 50, 50 * n)
    pipe = tp.read_json(tmp_path / "d", index=True, block_rows=10).sharding_filter(4).batch(5)
    loader = tp.Loader(pipe, num_workers=2)
    assert sorted(row["x"] for batch in loader for row in batch) == list(range(200))
    assert tp.cache.info().indexes == 1
