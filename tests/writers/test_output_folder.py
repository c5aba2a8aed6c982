"""A folder of whole files: on a disk, in a store of objects, and where that fails."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from forked import as_stranger, strangers_folder
from interpreters import pid_of, python
from s3_store import s3_store
from trainpipes.filesystems import places
from trainpipes.prepare import repack, tokenize
from trainpipes.writers import Threads
from unfinished import begun_again, contents, noted, row_groups


def rows(count: int = 100) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": range(count)})).shuffle(20, seed=1)


# What a kill leaves


def test_a_file_without_a_note_is_made_again(tmp_path):
    rows().write_json(tmp_path / "whole", rows_per_file=30)
    rows().write_json(tmp_path / "out", rows_per_file=30)
    begun_again(tmp_path / "out", 2)
    (tmp_path / "out" / "part-00002.jsonl").write_text("half")
    (tmp_path / "out" / "part-00009.jsonl").write_text("of a program that was killed")
    (tmp_path / "out" / "_unfinished" / "part-00003.jsonl.12ab.part").write_text("half")
    for folder in ("out", "whole"):
        (tmp_path / folder / "part-of-the-readme.txt").write_text("not ours")
    assert rows().write_json(tmp_path / "out", rows_per_file=30).kept == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out" / "_unfinished").exists()


def test_a_folder_of_what_is_not_finished_may_be_left_beside_the_manifest(tmp_path):
    rows().write_json(tmp_path / "out", rows_per_file=30)
    whole = contents(tmp_path / "out")
    (tmp_path / "out" / "_unfinished").mkdir()
    (tmp_path / "out" / "_unfinished" / "about.json").write_text("{}")
    assert rows().write_json(tmp_path / "out", rows_per_file=30).kept == 4
    assert contents(tmp_path / "out") == whole
    assert not (tmp_path / "out" / "_unfinished").exists()
    # And without it, where old files were being removed.
    (tmp_path / "out" / "_unfinished").mkdir()
    (tmp_path / "out" / "_unfinished" / "about.json").write_text("{}")
    (tmp_path / "out" / "_manifest.json").unlink()
    written = rows().write_arrow(tmp_path / "out", num_files=1)
    assert sorted(contents(tmp_path / "out")) == ["_manifest.json", "part-00000.arrow"]
    assert (written.rows, written.kept) == (100, 0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": 1, "odd": 2}'])
def test_a_damaged_note_is_refused_with_its_name(text, tmp_path):
    rows().write_json(tmp_path / "out", rows_per_file=30)
    begun_again(tmp_path / "out", 2)
    (tmp_path / "out" / "_unfinished" / "part-00001.jsonl.done.json").write_text(text)
    with pytest.raises(tp.UnreadableError, match=r"part-00001.jsonl.done.json is damaged"):
        rows().write_json(tmp_path / "out", rows_per_file=30)


def test_other_options_are_refused_only_where_files_are_whole(tmp_path):
    rows().write_json(tmp_path / "out", rows_per_file=30)
    begun_again(tmp_path / "out", 1)
    with pytest.raises(tp.ConfigError, match="with rows_per_file: 30, now 50"):
        rows().write_json(tmp_path / "out", rows_per_file=50)
    assert len(noted(tmp_path / "out")) == 1
    for path in [*(tmp_path / "out").glob("part-*"), *(tmp_path / "out").rglob("*.done.json")]:
        path.unlink()
    assert rows().write_json(tmp_path / "out", rows_per_file=50).rows == 100


def test_hidden_files_of_others_do_not_count(tmp_path):
    (tmp_path / ".DS_Store").write_text("")
    assert rows().write_json(tmp_path).rows == 100
    assert (tmp_path / ".DS_Store").exists()


def refuses(row: dict[str, Any]) -> dict[str, Any]:
    raise ZeroDivisionError(row["x"])


def test_an_error_of_a_function_tells_which_file_was_being_made(tmp_path):
    with pytest.raises(ZeroDivisionError) as caught:
        rows().map(refuses).write_arrow(tmp_path / "out", num_files=2)
    assert [note for note in caught.value.__notes__ if note.startswith("while making ")]


def refuses_later(row: dict[str, Any]) -> dict[str, Any]:
    return row if row["x"] < 60 else refuses(row)


def test_an_error_of_a_task_in_another_process_has_its_trace_once(tmp_path):
    pipe = rows().map(refuses_later)
    with pytest.raises(ZeroDivisionError) as caught:
        pipe.write_arrow(tmp_path / "out", num_files=2, executor=tp.Processes(2))
    assert sum("in worker process" in note for note in caught.value.__notes__) == 1


OVERWRITERS: dict[str, Any] = {
    "a function": lambda out: rows().map(refuses).write_json(out, overwrite=True),
    "processes": lambda out: (
        rows().map(refuses).write_arrow(out, num_files=2, executor=tp.Processes(2), overwrite=True)
    ),
    "repack": lambda out: repack(rows().map(refuses), out, overwrite=True),
    "repack, shuffled": lambda out: repack(rows().map(refuses), out, shuffle=True, overwrite=True),
    "no rows": lambda out: rows().filter(lambda row: False).write_parquet(out, overwrite=True),
    "text": lambda out: tp.write_memmap(out, pa.table({"text": ["a"]}), overwrite=True),
}


@pytest.mark.parametrize("name", OVERWRITERS)
def test_what_is_to_be_overwritten_stays_until_a_row_is_made(name, tmp_path):
    rows().write_json(tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises((ZeroDivisionError, tp.ConfigError, tp.DataError)):
        OVERWRITERS[name](tmp_path / "out")
    assert contents(tmp_path / "out") == before


READERS = {"parquet": "read_parquet", "json": "read_json", "arrow": "read_arrow"}


@pytest.mark.parametrize("format", READERS)
def test_what_a_manifest_names_and_is_not_there_is_not_left_out_in_silence(format, tmp_path):
    out = tmp_path / "out"
    files = getattr(rows(), f"write_{format}")(out, rows_per_file=20).files
    for path in files[1:3]:
        os.unlink(path)
    for urls in (out, tmp_path, f"{out}/*", f"{tmp_path}/*/part-*"):
        with pytest.raises(tp.MissingFilesError, match="2 of the 5 files that _manifest") as e:
            list(getattr(tp.list_files(urls), READERS[format])())
        assert all(os.path.basename(path) in str(e.value) for path in files[1:3])
    # What was asked for is there.
    assert len(list(getattr(tp.list_files([files[0], files[3]]), READERS[format])())) == 40
    assert len(list(getattr(tp.list_files(f"{out}/part-0000[034].*"), READERS[format])())) == 60
    (out / "_manifest.json").unlink()
    assert len(list(getattr(tp.list_files(out), READERS[format])())) == 60


@pytest.mark.parametrize("format", READERS)
def test_a_file_that_is_shorter_than_its_manifest_says_is_refused(format, tmp_path):
    out = tmp_path / "out"
    files = getattr(rows(), f"write_{format}")(out, rows_per_file=20).files
    content = Path(files[2]).read_bytes()
    Path(files[2]).write_bytes(
        content[: content.rindex(b"\n", 0, -1) + 1] if format == "json" else b""
    )
    said = r"1 of the 5 files that _manifest.json names are shorter .*: part-00002"
    for urls in (out, f"{out}/part-0000[02].*"):
        with pytest.raises(tp.UnreadableError, match=said) as caught:
            list(getattr(tp.list_files(urls), READERS[format])())
        assert caught.value.path == files[2]
    if format == "json":
        (out / "_manifest.json").unlink()
        assert len(list(tp.read_json(out))) == 99


def test_files_may_grow_after_they_were_written(tmp_path):
    file = rows().write_json(tmp_path / "out").files[0]
    with open(file, "a") as opened:
        opened.write('{"x": 7}\n')
    assert len(list(tp.read_json(tmp_path / "out"))) == 101


def test_of_a_store_the_folder_that_lacks_files_is_named_by_its_url(memory):
    rows().write_parquet("memory://written/b", rows_per_file=30)
    memory.rm_file("/written/b/part-00001.parquet")
    said = r"^memory://\S*written/b: 1 of the 4 files that _manifest.json names are not there: part-00001"
    with pytest.raises(tp.MissingFilesError, match=said) as caught:
        list(tp.read_parquet("memory://written/b"))
    assert caught.value.path.startswith("memory://")


def test_manifests_of_others_do_not_count(tmp_path):
    rows().write_json(tmp_path / "out")
    for text in ("", "[]", "7", '{"files": [{"file": "a.jsonl"}]}', '{"trainpipes_files": 1}'):
        (tmp_path / "out" / "_manifest.json").write_text(text)
        assert len(list(tp.list_files(tmp_path / "out").read_json())) == 100


# Who writes

HOLDER = """
import sys
import trainpipes as tp

def waits(row):
    if row["x"] == 50:
        print("writing", flush=True)
        sys.stdin.read()
    return row

tp.from_dataset([{"x": n} for n in range(100)]).map(waits, version="1").write_json(
    sys.argv[1], rows_per_file=30
)
"""


def test_a_second_process_is_refused_and_a_killed_one_holds_nothing(tmp_path):
    out = tmp_path / "out"
    command = [*python(), "-c", HOLDER, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"writing\n"
        with pytest.raises(tp.ConfigError, match=r"another process writes to .*/out: let one"):
            rows().write_json(out)
        os.kill(pid_of(holder), signal.SIGKILL)
    assert rows().write_json(out).rows == 100


# At a URL


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/written", recursive=True) if system.exists("/written") else None


def test_any_file_system_of_fsspec_will_do(memory, tmp_path):
    rows().write_parquet(tmp_path / "here", rows_per_file=30)
    written = rows().write_parquet("memory://written/a", rows_per_file=30, executor=Threads(2))
    there = {path.rpartition("/")[2]: memory.cat(path) for path in memory.ls("/written/a", False)}
    assert there == contents(tmp_path / "here")
    assert written.files[0] == "memory://written/a/part-00000.parquet"
    written.verify()
    assert rows().write_parquet("memory://written/a", rows_per_file=30).kept == 4
    with pytest.raises(tp.ConfigError, match=r"memory://written/a holds files .* with rows_per"):
        rows().write_parquet("memory://written/a", rows_per_file=40)
    rows().write_json("memory://written/a", overwrite=True)
    found = sorted(path.rpartition("/")[2] for path in memory.ls("/written/a", False))
    assert found == ["_manifest.json", "part-00000.jsonl"]
    with pytest.raises(tp.ConfigError, match="leave out what stands before"):
        rows().write_json("simplecache::memory://written/c")


@pytest.mark.parametrize("name", ["c?d", "c[1]d", "c*d", "[!a]"])
def test_at_a_url_the_name_of_a_folder_is_no_pattern(name, memory):
    url, between = f"memory://written/{name}", f"memory://written/temporary/{name}"
    written = repack(rows(), url, shuffle=True, rows_per_file=30, temp_dir=between)
    assert written.files[0] == f"{url}/part-00000.parquet"
    assert len(tp.read_parquet(url)) == 100
    found = {path.removeprefix(f"/written/{name}/") for path in memory.find("/written")}
    assert found == {"_manifest.json", *(f"part-{number:05}.parquet" for number in range(4))}


def test_at_a_url_only_a_folder_of_the_very_name_is_removed(memory):
    for name in ("run1", "run[1]"):
        memory.pipe_file(f"/written/{name}/rows/a", b"1")
        memory.pipe_file(f"/written/{name}/rows/b/c", b"1")
        memory.mkdir(f"/written/{name}/rows/empty")
    places.place_at("memory://written/run[1]", "repack").remove_folder("rows")
    assert memory.find("/written") == ["/written/run1/rows/a", "/written/run1/rows/b/c"]
    assert not memory.exists("/written/run[1]/rows")


@pytest.mark.parametrize("failing", ["part-00002.parquet", "part-00001.parquet.done.json"])
def test_a_store_that_fails_leaves_whole_files_and_the_next_call_goes_on(
    failing, memory, tmp_path, monkeypatch
):
    rows().write_parquet(tmp_path / "here", rows_per_file=30)
    put = type(memory).put_file

    def refused(self: Any, local: str, path: str, *args: Any, **options: Any) -> Any:
        if failing in path:
            raise PermissionError("no more room")
        return put(self, local, path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(type(memory), "put_file", refused)
        with pytest.raises((tp.ConfigError, tp.UnreachableError), match="cannot be written"):
            rows().write_parquet("memory://written/b", rows_per_file=30)
    left = {
        path.rpartition("/")[2]: memory.cat(path) for path in memory.find("/written/b", maxdepth=1)
    }
    here = contents(tmp_path / "here")
    assert left
    assert all(here[name] == data for name, data in left.items())
    done = rows().write_parquet("memory://written/b", rows_per_file=30)
    assert done.kept == (2 if "part-00002" in failing else 1)
    assert {name: memory.cat(f"/written/b/{name}") for name in here} == here


def held(memory: Any, **changes: Any) -> None:
    """Say that another one writes to ``/written/c``."""
    lock = {"host": socket.gethostname(), "pid": os.getpid(), "token": "other", "beat": 0}
    lock["pids"] = places._pids()
    memory.pipe_file("/written/c/_unfinished/lock", json.dumps({**lock, **changes}).encode())


def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


#: Who holds a lock; the last in a container of the same host name, where no process here has that number.
HOLDERS: list[dict[str, Any]] = [{}, {"host": "elsewhere"}, {"pid": 1 << 29, "pids": "others"}]


@pytest.mark.parametrize("holder", HOLDERS, ids=str)
@pytest.mark.parametrize("lives", [True, False])
def test_at_a_url_one_counts_as_long_as_it_gives_signs_of_life(lives, holder, memory, monkeypatch):
    monkeypatch.setattr(places, "LEASE", 0.05)
    held(memory, **holder)
    if not lives:
        assert rows().write_json("memory://written/c").rows == 100
        return
    beats, read = itertools.count(1), type(memory).cat_file

    def read_and_beat(self: Any, path: str, *args: Any, **options: Any) -> Any:
        data = read(self, path, *args, **options)
        if path.endswith("/lock"):
            held(memory, **holder, beat=next(beats))
        return data

    monkeypatch.setattr(type(memory), "cat_file", read_and_beat)
    with pytest.raises(tp.ConfigError, match=r"process \d+ of \S+ writes to memory://"):
        rows().write_json("memory://written/c")
    assert next(beats) > 2


def test_at_a_url_a_process_that_is_gone_from_this_machine_is_not_waited_for(memory):
    held(memory, pid=ended())
    begun = time.monotonic()
    assert rows().write_json("memory://written/c").rows == 100
    assert time.monotonic() - begun < places.LEASE
    assert not memory.find("/written/c/_unfinished")


def test_of_two_that_waited_for_one_that_is_gone_only_one_writes(memory, monkeypatch):
    monkeypatch.setattr(places, "LEASE", 0.5)
    held(memory, host="elsewhere")
    gone, remove = memory.cat_file("/written/c/_unfinished/lock"), type(memory).rm_file
    calls, second = itertools.count(), threading.Event()

    def remove_late(self: Any, path: str) -> None:
        number = next(calls) if path.endswith("/lock") else 2
        if number == 0:
            assert second.wait(20)
        if number == 1:
            second.set()
            while not memory.exists(path) or memory.cat_file(path) == gone:
                time.sleep(0.01)  # until the first one has a lock there
        remove(self, path)

    monkeypatch.setattr(type(memory), "rm_file", remove_late)
    done: list[object] = []

    def write() -> None:
        try:
            done.append(rows().write_json("memory://written/c").rows)
        except tp.ConfigError as error:
            done.append(str(error))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(type, done), key=str) == [int, str]


def test_who_writes_to_a_url_gives_signs_of_life(memory, monkeypatch):
    monkeypatch.setattr(places, "BEAT", 0.05)
    seen: list[int] = []

    def look(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] == 10:
            for _ in range(200):
                found = json.loads(memory.cat_file("/written/c/_unfinished/lock"))
                seen.append(found["beat"])
                if seen[-1] > 2:
                    break
                threading.Event().wait(0.05)
        return row

    rows().map(look).write_json("memory://written/c")
    assert seen[-1] > 2


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_store("bucket") as options:
        yield options


def test_s3_holds_the_same_files_and_nothing_besides(s3, tmp_path):
    system = fsspec.filesystem("s3", **s3, use_listings_cache=False)
    url, how = "s3://bucket/out", {"rows_per_file": 30, "storage_options": s3}
    rows().write_parquet(tmp_path / "here", rows_per_file=30)
    gone = {"host": socket.gethostname(), "pid": ended(), "token": "b", "pids": places._pids()}
    system.pipe_file("bucket/out/_unfinished/lock", json.dumps(gone).encode())
    rows().write_parquet(url, **how)
    found = system.find("bucket/out")
    assert {path.rpartition("/")[2]: system.cat(path) for path in found} == contents(
        tmp_path / "here"
    )
    assert rows().write_parquet(url, **how).kept == 4
    system.rm("bucket/out/part-00001.parquet")
    with pytest.raises(tp.MissingFilesError, match=r"1 of the 4 files .* part-00001.parquet;"):
        list(tp.list_files(url, storage_options=s3).read_parquet())
    with pytest.raises(tp.ConfigError, match=r"s3://nowhere/out/.* cannot be written"):
        rows().write_parquet("s3://nowhere/out", **how)


def test_of_two_that_begin_at_once_on_s3_one_creates_the_lock(s3, monkeypatch):
    first, second = (places.place_at("s3://bucket/two", "write_json", s3).lock() for _ in range(2))
    read, seen = places._Lease._read, list[Any]()
    first.take()

    def late(self: Any) -> Any:
        seen.append(read(self))
        return None if len(seen) == 1 else seen[-1]  # it looked before the other had begun

    monkeypatch.setattr(places._Lease, "_read", late)
    with pytest.raises(tp.ConfigError, match="writes to s3://bucket/two"):
        second.take()
    second.free()
    monkeypatch.undo()
    assert read(first)["token"] == seen[0]["token"]
    first.free()
    assert read(first) is None


def test_only_files_of_names_that_writers_give_are_removed(tmp_path):
    rows().write_parquet(tmp_path / "out", num_files=2)
    mine = "part-00001.labels.txt", "part-00001.parquet.md5", "part-1.parquet", "part-00000.csv"
    for name in mine:
        (tmp_path / "out" / name).write_text("not ours")
    (tmp_path / "out/part-00007.x.npy").write_text("ours")
    rows().write_json(tmp_path / "out", overwrite=True)
    there = {"_manifest.json", "part-00000.jsonl", *mine}
    assert {path.name for path in (tmp_path / "out").iterdir()} == there


def test_numbers_may_be_of_numpy(tmp_path):
    three = np.int64(3)
    done = rows(9).write_parquet(tmp_path / "files", num_files=three, row_group_size=three)
    assert row_groups(done.files) == [[3]] * 3
    assert rows(9).write_parquet(tmp_path / "files", num_files=3, row_group_size=3).kept == 3
    assert len(rows(9).write_json(tmp_path / "rows", rows_per_file=three).files) == 3
    done = repack(rows(9), tmp_path / "repacked", shuffle=True, seed=three, row_group_size=three)
    assert row_groups(done.files) == [[3] * 3]
    texts = tmp_path / "a.txt"
    texts.write_text("a\nb\n")
    pipe = tp.list_files(texts).read_text().tokenize("bytes")
    assert tokenize(pipe, tmp_path / "ids", bytes_per_file=np.int64(1 << 20)).rows == 2


def test_colons_in_a_path_of_this_machine_are_no_protocol(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rows(9).write_parquet("a::b/out", num_files=2).folder == str(tmp_path / "a::b/out")
    assert repack("a::b/out", "a::c", shuffle=True).rows == 9
    assert len(list(tp.read_parquet(f"{tmp_path}/a::c"))) == 9
    assert sorted(os.listdir()) == ["a::b", "a::c"]
    with pytest.raises(tp.ConfigError, match="leave out what stands before '::'"):
        rows().write_parquet("simplecache::memory://out")


# Folders that may not be read


@pytest.mark.parametrize("mode", [0o000, 0o333], ids=oct)
def test_a_folder_that_may_not_be_read_is_named(mode):
    with strangers_folder() as top:
        closed = top / "closed"
        (top / "a.txt").write_text("one\ntwo\n")
        ids = tp.read_text(top / "a.txt").tokenize("bytes")
        jobs: dict[str, Any] = {
            "json": lambda: rows().write_json(closed),
            "memmap": lambda: rows().write_memmap(closed),
            "repack": lambda: repack(rows(), closed, shuffle=True),
            "tokenize": lambda: tokenize(ids, closed),
        }
        if mode == 0o000:  # else files can be made there
            jobs["below"] = lambda: rows().write_json(closed / "out")
            jobs["temp_dir"] = lambda: repack(rows(), top / "out", shuffle=True, temp_dir=closed)
            jobs["map dataset"] = lambda: rows().to_map_dataset(closed / "rows.arrow")
        closed.chmod(mode)

        def said(job: Any) -> str:
            try:
                job()
            except tp.ConfigError as error:
                return str(error)
            return "nothing"

        told = as_stranger(lambda: {name: said(job) for name, job in jobs.items()})
        for name, text in told.items():
            assert f"{closed}" in text, name
            assert "Permission denied; " in text or "(Permission denied)" in text, name


def test_a_manifest_that_may_not_be_read_is_named():
    with strangers_folder() as top:

        def work() -> str:
            rows().write_json(top / "closed")
            (top / "closed" / "_manifest.json").chmod(0)
            with pytest.raises(tp.ConfigError) as caught:
                rows().write_json(top / "closed")
            return str(caught.value)

        assert "_manifest.json: Permission denied; allow reading" in as_stranger(work)


@pytest.mark.parametrize("name", ["loop", "n" * 300], ids=["loop", "long"])
def test_a_path_that_leads_nowhere_is_named(name, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(tp.ConfigError, match=f"{name}: (Too many levels|File name too long)"):
        rows().write_json(tmp_path / name)


def test_options_that_are_no_dict_are_refused_and_not_shown():
    with pytest.raises(tp.ConfigError) as caught:
        rows().write_json("memory://x/y", storage_options='{"secret": "hush"}')
    assert str(caught.value) == (
        "write_json(storage_options) must be a dict of fsspec options, got 'str'"
    )
