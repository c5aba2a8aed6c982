"""S3 that fails: the same rows after a while, or one error that says so; one layer tries again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from faulty_server import BUSY, DENIED, EXPIRED, SLOW, XML, FaultyServer, first, serving
from s3_store import address_of, s3_store
from trainpipes.filesystems import retry


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[str, int]]:
    with s3_store("failing-store") as options:
        system = fsspec.filesystem("s3", **options)
        for file in range(4):
            sink = pa.BufferOutputStream()
            table = pa.table({"x": list(range(100 * file, 100 * file + 100))})
            pq.write_table(table, sink, row_group_size=25)
            system.pipe(f"failing-store/{file % 2}/{file}.parquet", sink.getvalue().to_pybytes())
        yield address_of(options)


@pytest.fixture
def server(store: tuple[str, int], tmp_path: Path) -> Iterator[FaultyServer]:
    with serving(tmp_path) as found:
        found.upstream = store
        yield found
    # Each server has a client of its own, which fsspec keeps.
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def pipeline(server: FaultyServer, glob: str = "*/*.parquet", seconds: float = 60) -> tp.Pipeline:
    options: dict[str, Any] = {"endpoint_url": server.url, "key": "someone", "secret": "hush"}
    url = f"s3://failing-store/{glob}"
    listed = tp.list_files(url, storage_options=options, retry=tp.Retry(deadline=seconds))
    return listed.read_parquet(index=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fault", "glob"),
    [
        (BUSY, "*/*.parquet"),
        (BUSY, ""),
        ("close", "**/*.parquet"),
        ("half, then close", "1/*.parquet"),
    ],
    ids=lambda value: str(value[0] if isinstance(value, tuple) else value),
)
def test_a_store_that_fails_for_a_while_gives_all_rows(server, fault, glob):
    wanted = list(pipeline(server, glob))
    assert len(wanted) == (200 if glob == "1/*.parquet" else 400)
    server.fault = first(2, fault)
    assert list(pipeline(server, glob)) == wanted


@pytest.mark.parametrize(
    ("stage", "fault"), [("listing", BUSY), ("listing", "stall"), ("rows", "stall")], ids=range(3)
)
def test_a_store_that_is_gone_is_said_to_be(server, stage, fault):
    len(pipeline(server, "1/*.parquet"))  # the first client of a process takes a while to be made
    pipe = pipeline(server, "1/*.parquet", 1 if stage == "rows" else 0.5).batch(8)
    if stage == "rows":
        len(pipe)
    server.fault = lambda *_: fault
    with pytest.raises(tp.UnreachableError, match="cannot be reached"):
        list(pipe)


@pytest.mark.parametrize("stage", ["listing", "rows"])
def test_a_try_is_one_request(server, stage):
    # The first client of a process takes a while to be made: a try that ends before sends nothing.
    len(pipeline(server, "0/*.parquet"))
    pipe = pipeline(server, "1/1.parquet", 2).batch(8)
    if stage == "rows":
        len(pipe)
    server.asked.clear()
    server.fault = lambda *_: BUSY
    with pytest.raises(tp.UnreachableError) as caught:
        list(pipe)
    assert caught.value.attempts > 1
    assert len(server.asked) == caught.value.attempts


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", [EXPIRED, DENIED], ids=["expired", "denied"])
@pytest.mark.parametrize("stage", ["listing", "rows"])
def test_credentials_that_expire_are_named(server, stage, fault):
    pipe = pipeline(server, seconds=600).batch(
        8
    )  # a new client may take long: no try ends before it
    if stage == "rows":
        len(pipe)
    server.fault = lambda *_: fault
    with pytest.raises(tp.UnreachableError, match="renew the credentials") as caught:
        list(pipe)
    assert caught.value.attempts == (
        2 if fault == EXPIRED else 1
    )  # other credentials are looked for, once


@pytest.mark.parametrize("stage", ["listing", "rows"])
def test_credentials_that_are_renewed_in_mid_run_are_found(server, tmp_path, monkeypatch, stage):
    def credentials(key: str) -> None:
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = hush\n"
        (tmp_path / "credentials").write_text(text)

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    credentials("before")
    url = "s3://failing-store/*/*.parquet"
    pipe = tp.list_files(url, storage_options={"endpoint_url": server.url}).read_parquet(
        index=False
    )
    assert (
        len(tp.list_files(url, storage_options={"endpoint_url": server.url}).read_parquet()) == 400
    )
    if stage == "rows":
        len(pipe)
    server.expired.add("before")
    credentials("after")
    rows = list(pipe)
    assert sorted(row["x"] for row in rows) == sorted(row["x"] for row in pipeline(server))
    server.expired.add("after")  # and again
    credentials("third")
    assert list(pipe) == rows


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "fault",
    [SLOW, (429, {}), (200, {**XML, "body": "<List"}), "half, then close", "reset"],
    ids=str,
)
def test_a_listing_that_fails_for_a_while_has_all_files(server, fault):
    failing = first(2, fault)
    server.fault = lambda method, name, n: failing(method, name, n) if "list-type" in name else None
    assert len(list(pipeline(server))) == 400


def test_tries_may_be_counted(server):
    options: dict[str, Any] = {"endpoint_url": server.url, "key": "someone", "secret": "hush"}
    retry = tp.Retry(max_attempts=3)
    pipe = tp.list_files(
        "s3://failing-store/0/0.parquet", storage_options=options, retry=retry
    ).read_parquet()
    server.fault = lambda *_: BUSY
    with pytest.raises(
        tp.UnreachableError, match=r"3 tries .* more than 3 by .*max_attempts"
    ) as caught:
        list(pipe)
    assert caught.value.attempts == 3


def test_one_message_in_ten_seconds_says_how_many_retries_there_were(server, monkeypatch, caplog):
    pipe = pipeline(server).batch(8)
    before = pipe.stats(0).retries
    monkeypatch.setattr(retry, "_said_of", before)
    monkeypatch.setattr(retry, "_last_message", time.monotonic() + 3600)
    server.fault = first(3, BUSY)
    len(pipe)
    made = pipe.stats(0).retries - before
    assert made >= 3
    assert "tried again" not in caplog.text
    assert f"retries  {before + made:,} of requests, so far" in str(pipe.stats(0))
    monkeypatch.setattr(retry, "_last_message", -1e9)
    server.fault = first(1, BUSY)
    list(pipe)
    assert caplog.text.count("tried again for up to 60 s") == 1
    assert f"{made + 1:,} requests of this process" in caplog.text
