"""S3 that fails: the same rows after a while, or one error that says so; one layer tries again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from faulty_server import BUSY, DENIED, EXPIRED, Fault, FaultyServer, first, serving
from s3_store import address_of, s3_store
from trainpipes.sources.remote import retry


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)


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


@pytest.mark.parametrize(
    ("fault", "glob"),
    [
        *((BUSY, glob) for glob in ("*/*.parquet", "**/*.parquet", "", "1/*.parquet")),
        ("close", "**/*.parquet"),
        ("close", ""),
        ("half, then close", "*/*.parquet"),
        ("half, then close", "1/*.parquet"),
    ],
    ids=lambda value: str(value[0] if isinstance(value, tuple) else value),
)
def test_a_store_that_fails_for_a_while_gives_all_rows(
    server: FaultyServer, fault: Fault, glob: str
) -> None:
    wanted = list(pipeline(server, glob))
    assert len(wanted) == (200 if glob == "1/*.parquet" else 400)
    server.fault = first(2, fault)
    assert list(pipeline(server, glob)) == wanted


def test_a_folder_that_cannot_be_listed_is_not_left_out(server: FaultyServer) -> None:
    server.fault = lambda method, name, _: BUSY if "prefix=1%2F" in name else None
    with pytest.raises(tp.UnreachableError, match="failing-store/1"):
        list(pipeline(server, seconds=1))


@pytest.mark.parametrize("stage", ["listing", "rows"])
@pytest.mark.parametrize("fault", [BUSY, "stall"], ids=["503", "stall"])
def test_a_store_that_is_gone_is_said_to_be(server: FaultyServer, stage: str, fault: Fault) -> None:
    pipe = pipeline(server, "1/*.parquet", 1).batch(8)
    if stage == "rows":
        len(pipe)
    server.fault = lambda *_: fault
    with pytest.raises(tp.UnreachableError, match="cannot be reached"):
        list(pipe)


@pytest.mark.parametrize("stage", ["listing", "rows"])
def test_a_try_is_one_request(server: FaultyServer, stage: str) -> None:
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


@pytest.mark.parametrize("fault", [EXPIRED, DENIED], ids=["expired", "denied"])
@pytest.mark.parametrize("stage", ["listing", "rows"])
def test_credentials_that_expire_are_named(server: FaultyServer, stage: str, fault: Fault) -> None:
    pipe = pipeline(server).batch(8)
    if stage == "rows":
        len(pipe)
    server.fault = lambda *_: fault
    with pytest.raises(tp.UnreachableError, match="renew the credentials") as caught:
        list(pipe)
    assert caught.value.attempts == (
        2 if fault == EXPIRED else 1
    )  # other credentials are looked for, once
