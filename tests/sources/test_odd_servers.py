"""Servers that answer what was not asked for: an error that names the file, or the same rows later."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

import trainpipes as tp
from faulty_server import Fault, FaultyServer, first, write_each_format
from s3_store import address_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_each_format(tmp_path)
    return tmp_path


READERS: dict[str, Callable[[Any], tp.Pipeline]] = {
    "a.parquet": lambda files: files.read_parquet(),
    "a.arrow": lambda files: files.read_arrow(),
    "a.jsonl": lambda files: files.read_json(block_rows=10),
    "a.npy": lambda files: files.read_numpy(),
    "a.tar": lambda files: files.read_webdataset(),
}


def read(server: FaultyServer, name: str, seconds: float = 1) -> tp.Pipeline:
    return READERS[name](tp.list_files(f"{server.url}/{name}", retry=tp.Retry(deadline=seconds)))


@pytest.mark.parametrize(
    ("name", "num_workers"), [*((name, 0) for name in READERS), ("a.parquet", 1), ("a.jsonl", 1)]
)
def test_a_server_that_stops_to_know_ranges_is_named_with_the_file_and_a_way_out(
    server, folder, name, num_workers
):
    pipe = read(server, name).sharding_filter(2).batch(4)
    len(pipe)
    server.fault = lambda *_: "whole"
    copied = READERS[name](tp.list_files(f"simplecache::{server.url}/{name}"))
    assert len(list(copied)) == 40
    with pytest.raises(
        tp.UnreadableError, match=r"not know ranges; .*'simplecache::' before"
    ) as caught:
        list(tp.Loader(pipe, num_workers=num_workers))
    assert f"{server.url}/{name}" in str(caught.value)
    if num_workers == 0:  # torch passes on the text alone
        assert caught.value.path == f"{server.url}/{name}"


def test_a_star_in_a_query_is_no_pattern(server, folder):
    rows = list(tp.read_json(f"{server.url}/a.jsonl?columns=*"))
    assert rows == list(tp.read_json(folder / "a.jsonl"))


@pytest.mark.parametrize("when", ["listing", "rows"])
@pytest.mark.parametrize("name", READERS)
def test_a_redirection_to_nowhere_ends_after_a_few_tries(server, name, when):
    pipe = read(server, name).batch(4)
    if when == "rows":
        len(pipe)
    server.asked.clear()
    server.fault = lambda *_: (301, {})
    with pytest.raises(tp.UnreachableError, match=r"rejects the request \(.*301.*where to"):
        list(pipe)
    assert len(server.asked) < 10


@pytest.mark.parametrize("status", [412, 416])
@pytest.mark.parametrize("pattern", ["a.jsonl", "*.jsonl"])
def test_a_status_that_refuses_a_listing_is_told(server, status, pattern):
    server.fault = lambda *_: (status, {})
    with pytest.raises(tp.UnreachableError, match=rf"rejects the request \(.*{status}"):
        list(tp.list_files(f"{server.url}/{pattern}").read_json())


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_an_answer_of_s3_whose_checksum_does_not_fit_is_asked_for_again(tmp_path, server, s3, name):
    place = f"test-odd-servers/{name}"
    fsspec.filesystem("s3", **s3).put(str(tmp_path / name), place)
    wanted = list(read(server, name))
    server.upstream = address_of(s3)
    damaged: list[str] = []

    def fault(method: str, path: str, _: int) -> Fault:
        if method != "GET" or not path.startswith(place) or len(damaged) == 3:
            return None
        damaged.append(path)
        return 200, {"body": "damaged", "x-amz-checksum-crc32": "AAAAAA=="}

    server.fault = fault
    options = {**s3, "endpoint_url": server.url}
    assert list(READERS[name](tp.list_files(f"s3://{place}", storage_options=options))) == wanted
    assert len(damaged) == 3


def test_a_bucket_of_another_region_is_said_to_be(s3, server):
    server.upstream = address_of(s3)
    server.fault = lambda *_: (301, {})  # without the region, as some proxies answer
    options = {**s3, "endpoint_url": server.url}
    files = tp.list_files("s3://odd/a.jsonl", storage_options=options, retry=tp.Retry(deadline=20))
    with pytest.raises(
        tp.UnreachableError, match=r"redirects without end, .*\"region_name\""
    ) as caught:
        list(files.read_json())
    assert caught.value.attempts <= 2  # a busy server may let one wait too long


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_that_denies_what_is_not_there_gives_what_is(server, folder, status):
    server.fault = lambda _, name, __: (status, {}) if name.endswith("state.json") else None
    assert list(read(server, "a.arrow")) == list(tp.read_arrow(folder / "a.arrow"))
    server.fault = lambda *_: (403, {})
    with pytest.raises(tp.UnreachableError, match="denies access"):
        list(read(server, "a.arrow"))


def test_files_of_a_saved_dataset_are_looked_for_more_than_once(server, folder):
    shutil.copy(folder / "a.arrow", folder / "b.arrow")
    names = [{"filename": "a.arrow"}, {"filename": "b.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    server.fault = first(1, (503, {}))
    assert len(list(read(server, "a.arrow", seconds=20))) == 40
    (folder / "b.arrow").unlink()
    with pytest.raises(tp.MissingFilesError, match=r"names b\.arrow, which is not there"):
        list(read(server, "a.arrow", seconds=20))


def test_an_index_page_is_a_folder(server, folder):
    (folder / "below").mkdir()
    shutil.copy(folder / "a.jsonl", folder / "below" / "b.jsonl")
    rows = list(tp.read_json(folder / "a.jsonl"))
    assert list(tp.read_json(f"{server.url}/")) == [*rows, *rows]
    assert list(tp.read_json(f"{server.url}/below/")) == rows
    with pytest.raises(tp.MissingFilesError, match="there is no file or folder"):
        list(tp.read_json(f"{server.url}/none/"))
