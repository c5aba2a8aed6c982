"""Servers that fail for a while give the same rows; others one error that says so, and never that the
data has changed."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import trainpipes as tp
from faulty_server import Fault, FaultyServer, first, serving
from interpreters import python
from trainpipes.sources.files import block_reader
from trainpipes.sources.files import file_bytes as remote
from trainpipes.testing import digest

FILES, GROUPS, ROWS = 4, 3, 20


def write(path: Path, first: int) -> None:
    count = GROUPS * ROWS
    texts = [f"row {n} " * 30 for n in range(first, first + count)]
    table = pa.table({"x": list(range(first, first + count)), "text": texts})
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, row_group_size=ROWS, compression="none", use_dictionary=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in range(FILES):
        write(tmp_path / "data" / f"{file}.parquet", 1000 * file)
    return tmp_path / "data"


def local(folder: Path) -> tp.Pipeline:
    return tp.list_files(folder).read_parquet(index=False)


def over_http(server: FaultyServer, seconds: float = 60, **options: Any) -> tp.Pipeline:
    urls = [f"{server.url}/{file}.parquet" for file in range(FILES)]
    return tp.list_files(urls, retry=tp.Retry(deadline=seconds)).read_parquet(**options)


def opened(server: FaultyServer, seconds: float = 60, **options: Any) -> tp.Pipeline:
    """A pipeline that has listed its files and read their footers."""
    pipe = over_http(server, seconds, **options).batch(8)
    len(pipe)
    return pipe


# What may pass


@pytest.mark.parametrize(
    "fault",
    [(408, {}), (429, {}), (500, {}), (503, {}), "close", "half, then close"],
    ids=lambda fault: str(fault[0] if isinstance(fault, tuple) else fault),
)
def test_a_server_that_fails_for_a_while_gives_the_same_rows(server, folder, fault):
    server.fault = first(3, fault)
    assert list(over_http(server)) == list(local(folder))
    server.fault = first(5, fault)
    shuffled = over_http(server).shuffle(150, seed=1).batch(8)
    wanted = local(folder).shuffle(150, seed=1).batch(8)
    assert [digest(b) for b in shuffled] == [digest(b) for b in wanted]


def test_an_error_that_is_being_handled_is_no_reason_to_try_again(server):
    try:
        raise ConnectionResetError("of something else")
    except ConnectionResetError:
        with pytest.raises(tp.MissingFilesError):
            len(tp.list_files(f"{server.url}/none.parquet").read_parquet())
    assert len(server.asked) < 8  # once for each way to look for it


@pytest.mark.parametrize("threads", [0, 2])
def test_a_fork_does_not_wait_for_a_server_that_does_not_answer(server, threads):
    loader = tp.Loader(opened(server), threads=threads)
    server.asked.clear()
    server.fault = lambda method, name, _: "stall" if name == "3.parquet" else None
    reader = threading.Thread(target=list, args=(loader,))
    reader.start()
    while "GET 3.parquet" not in server.asked:
        time.sleep(0.01)
    time.sleep(0.2)  # so that whoever wants these rows waits for them
    began = time.monotonic()
    if not (child := os.fork()):
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert time.monotonic() - began < 10  # of 15 for each try
    server.fault = lambda *_: None
    server.over.set()
    reader.join()


@pytest.mark.parametrize("fault", ["stall", "half, then stall"])
def test_a_request_that_stalls_is_made_again(server, folder, fault):
    server.fault = first(1, fault)
    assert list(over_http(server, 2)) == list(local(folder))


def test_a_server_is_not_asked_before_the_time_that_it_asks_for(server, folder):
    until: dict[str, float] = {}

    def limited(method: str, name: str, _: int) -> Fault:
        if method == "HEAD":
            return None
        if name not in until:
            until[name] = time.monotonic() + 0.9
            date = formatdate(time.time() + 2, usegmt=True)
            return 429, {"Retry-After": "1" if name == "0.parquet" else date}
        return (403, {}) if time.monotonic() < until[name] else None

    server.fault = limited
    assert list(over_http(server)) == list(local(folder))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_try_again_too(server, folder, method):
    pipe = over_http(server).sharding_filter(num_shards=2).batch(8)
    wanted = [digest(b) for b in local(folder).sharding_filter(num_shards=2).batch(8)]
    len(pipe)
    server.fault = first(3, (503, {}))
    loader = tp.Loader(pipe, num_workers=1, multiprocessing_context=method)
    assert [digest(b) for b in loader] == wanted


# What does not


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("stage", "fault"),
    [*((stage, (503, {})) for stage in ("info", "footers", "rows")), ("info", "close"), ("info", "stall"),
     ("footers", "half, then stall"), ("rows", "stall"), ("rows", "close")],
    ids=str,
)  # fmt: skip
def test_a_server_that_is_gone_is_said_to_be(server, stage, fault):
    pipe = opened(server, 1) if stage == "rows" else over_http(server, 1)
    server.fault = lambda method, *_: None if stage == "footers" and method == "HEAD" else fault
    with pytest.raises(tp.UnreachableError, match=r"tp\.Retry\(deadline=") as caught:
        list(pipe)
    error = caught.value
    assert isinstance(error, OSError)
    assert not isinstance(error, tp.DataError)
    assert error.path is not None
    assert error.path.startswith(server.url)
    assert error.attempts >= 2
    assert error.seconds > 0
    assert (error.row_group, error.row) == ((0, 0) if stage == "rows" else (None, None))


@pytest.mark.parametrize("threads", [0, 2])
def test_the_size_of_a_request_does_not_put_off_its_deadline(tmp_path, threads):
    large = pa.table({"x": np.random.default_rng(0).integers(0, 1 << 60, 1 << 17)})  # 1 MiB a file
    (tmp_path / "large").mkdir()
    for file in range(4):
        pq.write_table(large, tmp_path / "large" / f"{file}.parquet", compression="none")
    with serving(tmp_path / "large") as server:
        urls = [f"{server.url}/{file}.parquet" for file in range(4)]
        pipe = tp.list_files(urls, retry=tp.Retry(deadline=1)).read_parquet().batch(8)
        len(pipe)
        server.fault = lambda *_: "close"
        began = time.monotonic()
        with pytest.raises(tp.UnreachableError) as caught:
            list(tp.Loader(pipe, threads=threads))
        assert caught.value.seconds < 2
        assert time.monotonic() - began < 8  # 16 s more for the bytes of each request before


@pytest.mark.parametrize("status", [401, 403])
def test_denied_access_ends_at_once_and_says_what_to_do(server, status):
    pipe = opened(server)
    server.fault = lambda *_: (status, {})
    before = len(server.asked)
    with pytest.raises(tp.UnreachableError, match="renew the credentials") as caught:
        list(pipe)
    assert caught.value.attempts == 1
    assert len(server.asked) - before < 2 * FILES  # one may be asked for twice, side by side


def test_one_dead_server_is_not_asked_for_every_file(tmp_path):
    for file in range(200):
        (tmp_path / f"{file}.parquet").write_bytes(bytes(100))
    with serving(tmp_path) as server:
        urls = [f"{server.url}/{file}.parquet" for file in range(200)]
        server.fault = lambda method, *_: None if method == "HEAD" else (403, {})
        with pytest.raises(tp.UnreachableError):
            len(tp.list_files(urls).read_parquet().batch(2))
        # 64 at a time, and few more until the first answer is looked at; a slow request is made twice.
        assert len({asked for asked in server.asked if asked.startswith("GET")}) < 150


def test_a_server_that_asks_to_wait_too_long_is_not_waited_for(server):
    server.fault = lambda *_: (429, {"Retry-After": "3600"})
    with pytest.raises(tp.UnreachableError, match=r"asks to wait 3,600 s.*deadline is 60 s"):
        list(over_http(server))


def test_a_name_that_nobody_knows_is_unreachable():
    url, retry = "http://no-such-host.invalid/1.parquet", tp.Retry(deadline=0.5)
    with pytest.raises(tp.UnreachableError, match=r"no-such-host\.invalid"):
        list(tp.list_files(url, retry=retry).read_parquet())


def test_a_file_that_is_gone_is_missing_at_once(server, folder):
    pipe = opened(server)
    (folder / "2.parquet").unlink()
    with pytest.raises(tp.MissingFilesError, match=r"2\.parquet.*no longer is"):
        list(pipe)
    with pytest.raises(tp.MissingFilesError):
        list(over_http(server))


# Files that change, and what is known of them


def test_a_file_that_changes_while_the_server_fails_has_changed(server, folder):
    pipe = opened(server)
    write(folder / "1.parquet", 7)
    server.fault = first(2, (503, {}))
    with pytest.raises(tp.DataChangedError, match=r"1\.parquet, row group 0"):
        list(pipe)
    write(folder / "1.parquet", 1000)
    content = (folder / "1.parquet").read_bytes()
    (folder / "1.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(tp.DataChangedError, match=r"1\.parquet.*it had [0-9,]+ bytes, and has"):
        list(pipe)


def test_a_file_that_changes_within_a_row_group_gives_no_row_of_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "HELD_BYTES", 40_000)
    monkeypatch.setattr(remote, "LEAST_BYTES", 10_000)
    monkeypatch.setattr(block_reader, "FETCHED", 40_000)
    (tmp_path / "large").mkdir()
    path = tmp_path / "large" / "0.parquet"

    def put(first: int) -> None:
        table = pa.table({"x": list(range(first, first + 200_000))})
        pages = {"data_page_size": 8_000, "write_batch_size": 1000, "use_dictionary": False}
        pq.write_table(table, path, compression="none", row_group_size=200_000, **pages)

    put(0)
    with serving(path.parent) as server:
        items = iter(tp.list_files(f"{server.url}/0.parquet", prefetch_bytes=40_000).read_parquet())
        found = [next(items)["x"]]
        put(1)  # of the same size and layout
        server.fault = first(3, (503, {}))
        with pytest.raises(tp.DataChangedError):
            found.extend(item["x"] for item in items)
    assert found == list(range(len(found)))


def test_a_good_index_of_footers_outlives_a_server_that_fails(server, folder, tmp_path):
    kept = tmp_path / "footers.arrow"
    opened(server, index=kept)
    content = kept.read_bytes()
    for fault in ((503, {}), (403, {}), "stall"):
        server.fault = lambda *_: None
        pipe = opened(server, 1, index=kept)
        server.fault = lambda *_, fault=fault: fault
        with pytest.raises(tp.UnreachableError):
            list(pipe)
        assert kept.read_bytes() == content
    time.sleep(1.5)  # what is read ahead is given up by then
    server.fault = lambda *_: None
    server.asked.clear()
    opened(server, index=kept)
    assert all(asked.startswith("HEAD") for asked in server.asked)


def test_damaged_data_of_a_server_that_then_fails_is_no_change(server, folder, tmp_path):
    kept = tmp_path / "footers.arrow"
    pipe = opened(server, 1, index=kept)
    content = bytearray((folder / "0.parquet").read_bytes())
    content[4:200] = bytes(196)
    (folder / "0.parquet").write_bytes(content)
    heads = sum(asked.startswith("HEAD") for asked in server.asked)

    def fails_when_asked_for_the_size(method: str, name: str, number: int) -> Fault:
        sizes = sum(asked.startswith("HEAD") for asked in server.asked)
        return (503, {}) if sizes > heads else None

    server.fault = fails_when_asked_for_the_size
    with pytest.raises(tp.UnreachableError):
        list(pipe)
    assert kept.exists()


def test_after_an_error_the_last_state_goes_on_with_the_same_rows(server, folder):
    wanted = [digest(b) for b in local(folder).shuffle(100, seed=2).batch(8)]
    asked = itertools.count()
    # The store is gone in the middle of the epoch, however fast it is read.
    server.fault = lambda *_: (503, {}) if next(asked) >= 17 else None
    pipe = over_http(server, 1).shuffle(100, seed=2).batch(8)
    found, state = [], pipe.state_dict()
    items = iter(pipe)

    def run() -> None:
        nonlocal state
        for item in items:
            found.append(digest(item))
            state = items.state_dict()

    with pytest.raises(tp.UnreachableError):
        run()
    assert 0 < len(found) < len(wanted)
    server.fault = lambda *_: None
    again = over_http(server, 30).shuffle(100, seed=2).batch(8)  # the option is no part of a state
    again.load_state_dict(state)
    assert found + [digest(b) for b in again] == wanted


# File systems of any kind


class Shaky(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory whose calls fail as told."""

    protocol = "shaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    find = fsspec.AbstractFileSystem.find  # folder by folder
    fail: ClassVar[Callable[[str, str], Any]]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace("shaky://", "memory://"))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
        found = super().cat_file(path, start, end, **more)
        return found[: len(found) // 2] if type(self).fail("cat", path) == "short" else found

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        type(self).fail("ls", path)
        return super().ls(path, detail, **more)

    def info(self, path: str, **more: Any) -> Any:
        type(self).fail("info", path)
        return super().info(path, **more)


@pytest.fixture
def shaky(folder: Path) -> Iterator[str]:
    fsspec.register_implementation("shaky", Shaky, clobber=True)
    Shaky.fail = staticmethod(lambda *_: None)
    for file in range(FILES):
        content = (folder / f"{file}.parquet").read_bytes()
        Shaky("shaky").pipe_file(f"/rows/{file % 2}/{file // 2}.parquet", content)
    yield "shaky://rows"
    Shaky.store.clear()


def failing(times: int, what: Any) -> Any:
    seen: Counter[tuple[str, str]] = Counter()

    def fail(call: str, path: str) -> Any:
        seen[call, path] += 1
        if seen[call, path] > times:
            return None
        if isinstance(what, Exception):
            raise what
        return what

    return staticmethod(fail)


PASSING = [
    OSError("the line is dead"), OSError(errno.ECONNRESET, "reset"), OSError(errno.EHOSTUNREACH, "no route"),
    TimeoutError(), ConnectionRefusedError(), EOFError("half an answer"), "short",
]  # fmt: skip


@pytest.mark.parametrize("url", ["rows", "rows/*/*.parquet", "rows/**"])
def test_any_file_system_may_fail_for_a_while(shaky, url):
    wanted = list(tp.list_files(f"shaky://{url}").read_parquet(index=False))
    assert len(wanted) == FILES * GROUPS * ROWS
    for what in PASSING:
        Shaky.fail = failing(2, what)
        assert list(tp.list_files(f"shaky://{url}").read_parquet(index=False)) == wanted, what


@pytest.mark.parametrize("url", ["rows", "rows/*/*.parquet", "rows/**"])
@pytest.mark.parametrize("error", [OSError("dead"), PermissionError("not yours")], ids=repr)
def test_a_folder_that_cannot_be_listed_is_not_left_out(shaky, url, error):
    def fail(call: str, path: str) -> None:
        if call == "ls" and path == "/rows/1":
            raise error

    Shaky.fail = staticmethod(fail)
    with pytest.raises(tp.UnreachableError, match="rows/1"):
        list(tp.list_files(f"shaky://{url}", retry=tp.Retry(deadline=0.2)).read_parquet())


@pytest.mark.parametrize("call", ["ls", "info", "cat"])
def test_a_call_that_never_returns_is_left_behind(shaky, call):
    over = threading.Event()

    def fail(what: str, path: str) -> None:
        if what == call:
            over.wait()

    Shaky.fail = staticmethod(fail)
    try:
        with pytest.raises(tp.UnreachableError, match="no answer in"):
            list(tp.list_files(shaky, retry=tp.Retry(deadline=0.2)).read_parquet(index=False))
    finally:
        over.set()


def test_a_store_that_cannot_be_opened_with_new_credentials_denies_access(shaky, monkeypatch):
    class Denied(OSError):
        status = 401

    def fail(call: str, path: str) -> None:
        def init(*_: object, **__: object) -> None:
            raise ValueError("no credentials")

        monkeypatch.setattr(Shaky, "__init__", init)
        raise Denied("who are you")

    Shaky.fail = staticmethod(fail)
    with pytest.raises(tp.UnreachableError, match=r"denies access \(Denied: who are you\)"):
        list(tp.list_files(shaky).read_parquet())


def test_an_error_that_is_not_about_the_server_is_not_tried_again(shaky):
    calls: list[str] = []

    def fail(call: str, path: str) -> None:
        calls.append(call)
        raise OSError(errno.ENOSPC, "No space left on device")

    Shaky.fail = staticmethod(fail)
    with pytest.raises(tp.UnreadableError, match="No space left on device"):
        list(tp.list_files(shaky).read_parquet())
    assert len(calls) == 1


@pytest.mark.parametrize(("chain", "fault"), [("simplecache", (503, {})), ("filecache", "close")])
def test_files_that_are_copied_first_are_fetched_again(server, folder, chain, fault):
    urls = [f"{chain}::{server.url}/{file}.parquet" for file in range(FILES)]
    server.fault = first(1, fault)
    assert list(tp.list_files(urls).read_parquet(index=False)) == list(local(folder))


def test_a_cache_that_has_zeros_where_a_request_failed_is_refused(server):
    with pytest.raises(tp.ConfigError, match="zeros"):
        list(tp.list_files(f"blockcache::{server.url}/0.parquet").read_parquet())


# The option


def test_tries_and_their_time_are_checked_and_shown():
    seconds = "must be a number of seconds above 0, got"
    for given, said in [
        *(({"deadline": one}, rf"deadline\) {seconds}") for one in (0, -1, float("nan"), "1", None, True)),
        ({"timeout": -1}, rf"timeout\) {seconds} -1"), ({"max_attempts": 0}, r"max_attempts\) must"),
    ]:  # fmt: skip
        with pytest.raises(tp.ConfigError, match=said):
            tp.Retry(**given)
    for retry in (120, None, {"seconds": 3}):
        with pytest.raises(
            tp.ConfigError, match=r"list_files\(retry\) must be a trainpipes\.Retry, got"
        ):
            tp.list_files("data", retry=retry)
    shown = "Retry(deadline=120.0, max_attempts=3, timeout=5.0)"
    assert str(tp.Retry(max_attempts=3, timeout=5)) == shown
    assert f"retry={shown}" in str(tp.list_files("x", retry=tp.Retry(max_attempts=3, timeout=5)))
    assert "retry" not in str(tp.list_files("x"))


def test_a_config_says_how_long(folder, tmp_path):
    pytest.importorskip("yaml")
    pipe = tp.list_files(str(folder), retry=tp.Retry(deadline=7)).read_parquet()
    path = tmp_path / "pipe.yaml"
    pipe.to_yaml(path)
    assert "retry: {deadline: 7.0}" in path.read_text()
    assert str(tp.load(path)) == str(pipe)


# Ends

ENDS = """
import os, signal, sys, threading, time
import trainpipes as tp
from trainpipes.sources.files import file_bytes
from trainpipes.sources import read_parquet

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
# Another thread gets the signal, so that it ends no wait of the main thread: as one that comes just before.
threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

file_bytes.SMALL_FILE = read_parquet.WHOLE_BYTES = 0
url, phase, threads = sys.argv[1], sys.argv[2], None if sys.argv[3] == "None" else int(sys.argv[3])
pipe = tp.list_files([f"{url}/{n}.parquet" for n in range(4)], retry=tp.Retry(deadline=3600)).read_parquet()
pipe = pipe.shuffle(50, seed=1).batch(8)
if phase != "listing":
    len(pipe)
loader = tp.Loader(pipe, threads=threads)
items = iter(loader)
if phase in ("ahead", "closed"):
    next(items)
print(os.getpid(), flush=True)
sys.stdin.readline()
if phase == "closed":
    del items, loader
elif phase != "ahead":
    list(items)
print("ended", flush=True)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("phase", "threads"),
    [("listing", "0"), ("rows", "0"), ("rows", "None"), ("ahead", "None"), ("closed", "None")],
)
def test_a_process_ends_while_requests_are_tried_again(server, phase, threads):
    asked = threading.Event()
    interrupted = phase in ("listing", "rows")
    own = phase == "ahead"  # ends with all that it holds, which a fork leaves as it is
    child = subprocess.Popen(
        [*([sys.executable] if own else python()), "-c", ENDS, server.url, phase, threads],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        started = int(child.stdout.readline())

        def stall(*_: Any) -> Fault:
            asked.set()
            return "stall"

        server.fault = stall
        child.stdin.write("go\n")
        child.stdin.flush()
        if interrupted:
            assert asked.wait(60)
            os.kill(started, signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    if interrupted:
        assert "KeyboardInterrupt" in err
    else:
        assert (out, child.returncode) == ("ended\n", 0), err
