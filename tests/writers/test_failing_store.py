"""Jobs that write to a store that fails, at each request in turn: all files exact, or one clear error."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partialmethod
from itertools import count
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from faulty_server import BUSY, SLOW, Fault, FaultyServer, serving
from s3_store import address_of, s3_store
from trainpipes.filesystems import places, retry
from trainpipes.prepare import repack, tokenize
from unfinished import contents

BUCKET = "failing-writes"
#: Enough for a request and its second try on a machine that is busy, and for one that gets no answer.
RETRY = tp.Retry(deadline=20, timeout=2.5)
FAULTS: dict[str, Fault] = {
    "503": BUSY,
    "slow down": SLOW,
    "429": (429, {}),
    "reset": "reset",
    "lost": "lost",
}
TABLE = pa.table({"x": range(100), "text": [f"row {n}" for n in range(100)]})
_number = count()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(places, "BEAT", 1e6)  # no request between others


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, Any]]:
    with s3_store(BUCKET) as options:
        yield options


@pytest.fixture(scope="module")
def server(
    store: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyServer]:
    with serving(tmp_path_factory.mktemp("served")) as found:
        found.upstream = address_of(store)
        yield found
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(autouse=True)
def no_fault(server: FaultyServer) -> Iterator[None]:
    yield
    server.fault = lambda *_: None


def rows() -> tp.Pipeline:
    return tp.from_arrow(TABLE).shuffle(20, seed=1)


Job = Callable[..., Any]
JOBS: dict[str, Job] = {
    "parquet": lambda out, **o: rows().write_parquet(out, rows_per_file=40, **o),
    "arrow": lambda out, **o: rows().write_arrow(out, num_files=1, **o),
    "json": lambda out, **o: rows().write_json(out, num_files=1, **o),
    "memmap": lambda out, **o: rows().select("x").write_memmap(out, num_files=1, **o),
    "repack": lambda out, **o: repack(rows(), out, shuffle=True, num_files=1, temp_dir=f"{out}.tmp", **o),
}  # fmt: skip


def new_folder() -> str:
    return f"s3://{BUCKET}/{next(_number)}"


def options(server: FaultyServer) -> dict[str, Any]:
    return {"endpoint_url": server.url, "key": "someone", "secret": "hush"}


def of(folder: str, fault: Fault, first: int, many: int = 1) -> Callable[[str, str, int], Fault]:
    """So many requests for a folder fail; a request of a job before may come late."""
    seen = count()

    def said(_: str, asked: str, __: int) -> Fault:
        return fault if is_of(folder, asked) and first <= next(seen) < first + many else None

    return said


def each_other_of(folder: str, fault: Fault) -> Callable[[str, str, int], Fault]:
    """Each request for a folder fails, and its next try does not."""
    seen: Counter[tuple[str, str]] = Counter()

    def said(method: str, asked: str, _: int) -> Fault:
        seen[method, asked] += 1
        return fault if is_of(folder, asked) and seen[method, asked] % 2 else None

    return said


def is_of(folder: str, asked: str) -> bool:
    name = folder.rpartition("/")[2]
    return any(part in asked for part in (f"/{name}/", f"prefix={name}%2F", f"prefix={name}/"))


def there(folder: str, store: dict[str, Any]) -> dict[str, bytes]:
    system = fsspec.filesystem("s3", **store)
    system.invalidate_cache()
    path = folder.removeprefix("s3://")
    return {one.removeprefix(f"{path}/"): system.cat_file(one) for one in system.find(path)}


def asked(job: Job, server: FaultyServer) -> list[str]:
    """The requests of a job, in order."""
    folder = new_folder()
    server.asked.clear()
    job(folder, storage_options=options(server), retry=RETRY)
    return [one.replace(folder.rpartition("/")[2], "N") for one in server.asked]


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_all_requests_of_a_job_may_fail_once(fault, server, store):
    job, whole = JOBS["parquet"], new_folder()
    server.asked.clear()
    job(whole, storage_options=options(server), retry=RETRY)
    folder, without = new_folder(), len(server.asked)
    server.asked.clear()
    server.fault = each_other_of(folder, FAULTS[fault])
    job(folder, storage_options=options(server), retry=RETRY)
    assert len(server.asked) > 1.5 * without > 20
    assert there(folder, store) == there(whole, store)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_each_request_of_a_job_may_fail_once(name, server, store):
    job, whole = JOBS[name], new_folder()
    job(whole, storage_options=options(server), retry=RETRY)
    wanted, requests = there(whole, store), asked(job, server)
    assert len(requests) > 8
    kinds = {one.split("?")[0].split(".")[0]: n for n, one in enumerate(requests)}  # one of each
    for failing in range(len(requests)) if name == "json" else kinds.values():
        faults = [*FAULTS.values()]
        for fault in faults if name == "json" else [faults[failing % len(faults)]]:
            folder = new_folder()
            server.fault = of(folder, fault, failing)
            job(folder, storage_options=options(server), retry=RETRY)
            assert there(folder, store) == wanted, (requests[failing], fault)


def test_requests_of_a_job_may_stall(server, store, tmp_path):
    job = JOBS["json"]
    job(tmp_path / "here")
    requests = asked(job, server)
    folder, failing = new_folder(), count()
    places = {0, len(requests) // 2, len(requests) - 1}
    server.fault = lambda _, asked, __: (
        "stall" if is_of(folder, asked) and next(failing) in places else None
    )
    job(folder, storage_options=options(server), retry=tp.Retry(deadline=20, timeout=0.5))
    assert next(failing) >= len(requests) + 3
    assert there(folder, store) == contents(tmp_path / "here")


@pytest.mark.parametrize(
    "fault", ["503", *(pytest.param(f, marks=pytest.mark.slow) for f in ("reset", "lost"))]
)
def test_a_store_that_is_gone_is_one_clear_error_and_the_next_call_goes_on(
    fault, server, store, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(places, "LEASE", 0.2)
    job = JOBS["json"]
    job(tmp_path / "here")
    requests = asked(job, server)
    outcomes = set()
    first, last = {"503": 0, "reset": 1, "lost": 2}[fault], len(requests) - 1
    for gone in range(first, last, 3) if fault != "503" else (0, last - 4):
        folder, begun = new_folder(), time.monotonic()
        caplog.clear()
        server.fault = of(folder, FAULTS[fault], gone, 1 << 30)
        patience = tp.Retry(deadline=2 if gone else 0.5)
        try:
            job(folder, storage_options=options(server), retry=patience)
            outcomes.add("is of no more use" in caplog.text)  # all but its last request was made
        except tp.UnreachableError as error:
            said = error.message
            assert fault == "lost" or "_manifest.json" not in there(folder, store)
            outcomes.add(None)
        assert time.monotonic() - begun < 20
        server.fault = lambda *_: None
        job(folder, storage_options=options(server), retry=RETRY)
        assert there(folder, store) == contents(tmp_path / "here"), requests[gone]
    assert {None, True} <= outcomes
    wanted = ("cannot be reached", "call it again", "retry=tp.Retry(deadline=...)")
    assert all(one in said for one in wanted)


def test_each_request_of_an_upload_in_parts_may_fail(server, store, tmp_path, monkeypatch):
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda *_, **__: 1 << 16)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 0)
    numbers = tp.from_arrow(pa.table({"x": np.random.default_rng(0).integers(0, 1 << 60, 20_000)}))

    def job(out: Any, **given: Any) -> None:
        numbers.write_arrow(out, num_files=1, **given)

    job(tmp_path / "here")
    requests = asked(job, server)
    parts = [n for n, one in enumerate(requests) if "upload" in one.lower()]
    assert len(parts) > 4
    assert requests[parts[0]].startswith("POST")
    for failing, fault in {parts[0]: BUSY, parts[2]: "reset", parts[-1]: "lost"}.items():
        folder = new_folder()
        server.fault = of(folder, fault, failing)
        job(folder, storage_options=options(server), retry=RETRY)
        assert there(folder, store) == contents(tmp_path / "here"), requests[failing]


def test_ids_are_written_to_a_store_that_fails(server, tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    pipe = tp.list_files(tmp_path / "a.txt").read_text().tokenize("bytes")
    server.asked.clear()
    server.fault = lambda _, __, n: BUSY if n % 3 == 1 else None
    done = tokenize(pipe, new_folder(), storage_options=options(server), retry={"deadline": 30})
    assert (done.rows, done.tokens) == (2, 6)


# Other file systems


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_files_of_a_store_that_fails_are_written_anew(form, server, store, tmp_path):
    folder = new_folder()
    JOBS[form](folder, storage_options=store)
    server.fault = each_other_of(folder, BUSY)
    done = repack(folder, tmp_path / "out", storage_options=options(server), retry=RETRY)
    assert sum(len(pq.read_table(path)) for path in done.files) == 100


CHANGES = ("cp_file", "makedirs", "pipe_file", "rm_file", "rmdir")


class Losing(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
    """Files in memory, of which each change is made, and its answer then lost once."""

    protocol = "losing"
    lost: set[str] = set()  # noqa: RUF012

    def _once(self, method: str, *given: Any, **options: Any) -> Any:
        done = getattr(super(), method)(*given, **options)
        if method not in self.lost:
            self.lost.add(method)
            raise ConnectionResetError(method)
        return done


for name in CHANGES:
    setattr(Losing, name, partialmethod(Losing._once, name))


def test_answers_that_are_lost_once_each_change_nothing(tmp_path):
    fsspec.register_implementation("losing", Losing, clobber=True)
    Losing.lost.clear()
    rows().write_json(tmp_path / "here", rows_per_file=40)
    rows().write_json("losing://out/a", rows_per_file=40, retry=RETRY)
    assert Losing.lost == {*CHANGES}
    system = fsspec.filesystem("losing")
    found = system.find("losing://out/a")
    assert {os.path.basename(path): system.cat(path) for path in found} == contents(
        tmp_path / "here"
    )
    system.store.clear()


@pytest.mark.parametrize("retry", [5, {"seconds": 3}])
def test_what_is_no_retry_is_refused(retry, tmp_path):
    for job in JOBS.values():
        with pytest.raises(tp.ConfigError, match=r"\w+\(retry\) must be a trainpipes\.Retry, got"):
            job(tmp_path / "out", retry=retry)


def test_a_clean_up_that_fails_on_a_disk_is_a_warning(tmp_path, monkeypatch, caplog):
    def refused(_: Any, *names: str, **__: Any) -> None:
        if names:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("trainpipes.filesystems.places.Place.remove", refused)
    with caplog.at_level(logging.WARNING, "trainpipes"):
        assert rows().write_json(tmp_path / "out").rows == 100
    assert "_unfinished is of no more use, and cannot be removed" in caplog.text
    monkeypatch.undo()
    assert len(list(tp.list_files(tmp_path / "out").read_json())) == 100
    assert rows().write_json(tmp_path / "out").kept == 1
    assert not (tmp_path / "out" / "_unfinished").exists()
