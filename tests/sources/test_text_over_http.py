"""JSON files on a server: the same rows, also while it fails; and errors that say what is wrong."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainpipes as tp
from faulty_server import FaultyServer, first, serving
from trainpipes.filesystems import retry
from trainpipes.sources.text import pieces
from trainpipes.testing import digest

pytest.importorskip("aiohttp")


@pytest.fixture(autouse=True)
def short_pauses_and_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [json.dumps({"x": n, "text": f"row {n} " * 9}).encode() + b"\n" for n in range(400)]
    found = tmp_path / "data"
    found.mkdir()
    (found / "0.jsonl").write_bytes(b"".join(lines[:150]))
    parts = [gzip.compress(b"".join(lines[n : n + 10])) for n in range(150, 300, 10)]
    (found / "1.jsonl.gz").write_bytes(b"".join(parts))
    (found / "2.jsonl").write_bytes(gzip.compress(b"".join(lines[300:])))
    return found


@pytest.fixture
def server(folder: Path) -> Iterator[FaultyServer]:
    with serving(folder) as found:
        yield found


NAMES = ("0.jsonl", "1.jsonl.gz", "2.jsonl")


def over_http(server: FaultyServer, seconds: float = 60) -> tp.Pipeline:
    urls = [f"{server.url}/{name}" for name in NAMES]
    return tp.list_files(urls, retry=tp.Retry(deadline=seconds)).read_json(index=False)


@pytest.mark.parametrize("fault", [(503, {}), "close", "half, then close"], ids=str)
def test_a_server_that_fails_for_a_while_gives_the_same_rows(server, folder, fault):
    here = [str(folder / name) for name in NAMES]
    server.fault = first(2, fault)
    assert [row["x"] for row in over_http(server)] == list(range(400))
    server.fault = first(4, fault)
    there = over_http(server).sharding_filter(4).shuffle(40, seed=1).batch(8)
    wanted = tp.read_json(here).sharding_filter(4).shuffle(40, seed=1).batch(8)
    assert [digest(b) for b in there] == [digest(b) for b in wanted]


def test_a_server_that_does_not_come_back_is_named_and_never_the_data(server, folder):
    pipe = over_http(server, 1)
    assert len(pipe) == 400
    server.fault = lambda *_: (503, {})
    with pytest.raises(tp.UnreachableError) as caught:
        list(pipe)
    assert "0.jsonl" in str(caught.value)
    assert not isinstance(caught.value, tp.DataError)
    with pytest.raises(tp.UnreachableError):
        len(over_http(server, 1))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_file_that_changes_or_goes_on_the_server_is_an_error(server, folder, number):
    pipe = over_http(server)
    assert len(pipe) == 400
    path = folder / NAMES[number]
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(tp.DataChangedError, match=r"it had [\d,]+ bytes, and has"):
        list(pipe)
    path.write_bytes(content[::-1])
    with pytest.raises((tp.DataChangedError, tp.UnreadableError)) as caught:
        list(pipe)
    assert NAMES[number] in str(caught.value)
    path.unlink()
    with pytest.raises(tp.MissingFilesError, match="no longer is"):
        list(pipe)
