"""What is found in files is kept: the same answers as from the files, without a look at them; made by one
process, and made again for files that have changed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import trainpipes as tp
from every_format import FORMATS, opened, table
from trainpipes.cache import kept_file
from trainpipes.sources.files import index_store
from trainpipes.sources.files.decoded_files import DecodedFiles
from trainpipes.sources.files.index_store import IndexStore

context = multiprocessing.get_context("fork")


KINDS = {
    "parquet": FORMATS["parquet"], "arrow": FORMATS["arrow stream"], "numpy": FORMATS["npy"],
    "json": FORMATS["json lines"], "csv": FORMATS["csv"], "tar": FORMATS["tar"],
    "format": FORMATS["own format"],
}  # fmt: skip
every = pytest.mark.parametrize("kind", KINDS)
#: What is the same code for all of them: one that is scanned once, and one that is looked at twice.
some = pytest.mark.parametrize("kind", ["parquet", "json"])
#: Of these files are looked at once for their rows, and once for types.
LOOKS = ("json", "csv")
FILES = 6


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_warned_of: None) -> Path:
    """The folder of the cache."""
    monkeypatch.setenv("TRAINPIPES_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def data(tmp_path: Path, kind: str) -> Path:
    """Files of 0, 10, 20, … rows."""
    for n in range(FILES):
        write(tmp_path / "data", kind, n, 100 * n, 10 * n)
    return tmp_path / "data"


def write(folder: Path, kind: str, name: Any, first: int, count: int, age: float = 60) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}{KINDS[kind].suffix}"
    path.write_bytes(KINDS[kind].write(table(first, count), 7))
    old = time.time_ns() - int(age * 1e9)
    os.utime(path, ns=(old, old))
    return path


def read(kind: str, files: Any, **options: Any) -> tp.Pipeline:
    return KINDS[kind].read(files, 7, **options)


class Scans:
    """Notes the files that are scanned."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def taken(self) -> list[str]:
        """Names of the files that were scanned since the last call."""
        found, self.names = sorted(set(self.names)), []
        return found


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Scans:
    found, inner = Scans(), index_store.open_bytes

    def noted(files: Any, file: int, *more: Any) -> Any:
        found.names.append(Path(files.names[file]).stem)
        return inner(files, file, *more)

    monkeypatch.setattr(index_store, "open_bytes", noted)
    return found


ALL = [str(n) for n in range(FILES)]


def seen(kind: str, files: Any, **options: Any) -> list[Any]:
    """Rows in a shuffled order, the state, and what shapes both."""
    pipe = read(kind, files, **{"index": True, **options})
    source = opened(pipe)
    order = pipe.sharding_filter(4).shuffle(50, max_bytes=20_000).batch(8)
    found = [str(row) for batch in order for row in batch]
    sizes = None if source.block_bytes is None else source.block_bytes.tolist()
    blocks = [source.lengths.tolist(), source.sizes.tolist(), sizes]
    return [found, order.state_dict(), source.row_bytes, str(source.schema), *blocks]


def the_file(kept: Path) -> Path:
    (found,) = kept.glob("footers/*.arrow")
    return found


# What is kept is what the files say


@every
def test_a_warm_start_scans_no_file_and_finds_the_same(kind, data, scans):
    cold = seen(kind, data)
    assert scans.taken() == ALL
    assert seen(kind, data) == cold
    assert scans.taken() == []
    assert seen(kind, data, index=False) == cold
    assert scans.taken() == ALL
    assert tp.cache.info().indexes == 1


@some
def test_one_who_makes_the_index_and_hangs_is_not_waited_for(kind, data, monkeypatch):
    inner, hangs, goes_on = index_store.open_bytes, threading.Event(), threading.Event()

    def opened_late(*some: Any) -> Any:
        if not hangs.is_set():
            hangs.set()
            goes_on.wait(60)
        return inner(*some)

    monkeypatch.setattr(index_store, "PATIENCE", 0.2)
    monkeypatch.setattr(index_store, "open_bytes", opened_late)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(seen(kind, data)))
    other.start()
    assert hangs.wait(60)
    own = seen(kind, data)
    assert not found
    goes_on.set()
    other.join(60)
    assert found == [own]


@every
def test_only_files_that_changed_or_came_are_scanned_again(kind, data, scans):
    seen(kind, data)
    write(data, kind, 3, 300, 30, age=59)  # as it was, at another time
    write(data, kind, 4, 400, 5)
    write(data, kind, "1b", 0, 5)
    (data / f"2{KINDS[kind].suffix}").unlink()
    scans.taken()
    found = seen(kind, data)
    assert scans.taken() == ["1b", "3", "4"]
    assert found == seen(kind, data, index=False)
    scans.taken()
    seen(kind, data)
    assert scans.taken() == []
    some = [str(data / f"{n}{KINDS[kind].suffix}") for n in (5, "1b", 1)]
    assert seen(kind, some) == seen(kind, some, index=False)
    assert scans.taken() == ["1", "1b", "5"]  # of the second


@every
def test_an_unreadable_file_is_named_and_the_rest_is_not_lost(kind, data, scans):
    path = data / f"2{KINDS[kind].suffix}"
    good, times = path.read_bytes(), path.stat()
    bad = {"csv": b"\xff\xfetext", "json": b'{"x": 1', "format": b'{"x": 1'}
    path.write_bytes(bad.get(kind, good[: len(good) // 2]))
    for _ in range(2):
        with pytest.raises(tp.DataError, match=path.name):
            seen(kind, data)
    path.write_bytes(good)
    os.utime(path, ns=(times.st_mtime_ns + 1, times.st_mtime_ns + 1))
    scans.taken()
    assert seen(kind, data) == seen(kind, data, index=False)


@pytest.mark.parametrize("kind", ["parquet"])
def test_other_columns_read_only_a_sample_again(kind, tmp_path, scans):
    for n in range(130):
        write(tmp_path / "many", kind, n, 0, 1)
    known: dict[str, Any] = {}
    for columns, count in ((["x"], 130), (["text"], 44), (None, 44), (["text"], 0), (["x"], 0)):
        found = seen(kind, tmp_path / "many", columns=columns)
        assert found == known.setdefault(str(columns), found)
        assert len(scans.taken()) == count  # every third
        if count == 44:
            assert seen(kind, tmp_path / "many", columns=columns, index=False) == found
            scans.taken()


@pytest.mark.parametrize("kind", ["parquet"])
def test_schemas_that_do_not_fit_are_still_found(kind, data):
    seen(kind, data)
    pq.write_table(pa.table({"x": ["a"], "y": [0.5], "text": ["a"]}), data / "3b.parquet")
    said = r"'x' is int64 in .*0\.parquet and string in .*3b"
    for _ in range(2):
        with pytest.raises(tp.SchemaError, match=said):
            seen(kind, data)
    with pytest.raises(tp.SchemaError, match=r"no column 'z'.* in .*0\.parquet"):
        seen(kind, data, columns=["z"])


def test_other_ways_to_cut_text_have_an_index_of_their_own(tmp_path, scans):
    path = tmp_path / "a.txt"
    path.write_text("a\nb\n\nc\n" * 5)
    for unit, rows in (("line", 20), ("paragraph", 6), ("document", 1)):
        for count in (1, 0):
            assert len(tp.read_text(path, unit, index=True)) == rows
            assert len(scans.taken()) == count
    assert len(opened(tp.read_text(path, index=True, block_rows=3)).lengths) == 7


# Files that only look as if they had not changed


@pytest.mark.parametrize("kind", ["parquet"])
def test_a_file_that_may_change_within_the_clocks_tick_is_not_believed(kind, data, scans):
    just_now = time.time_ns()
    os.utime(data / "3.parquet", ns=(just_now, just_now))
    seen(kind, data)  # waits for the tick to pass
    assert time.time_ns() - just_now > index_store.TICK
    ahead = time.time_ns() + 60 * 10**9  # by the clock of a server
    os.utime(data / "4.parquet", ns=(ahead, ahead))
    scans.taken()
    for _ in range(2):
        seen(kind, data)
        assert scans.taken() == ["4"]


@pytest.mark.parametrize("kind", ["parquet"])
def test_another_footer_in_a_file_of_the_same_size_and_time_is_found(kind, data):
    path = data / "4.parquet"
    content, times = path.read_bytes(), path.stat()
    seen(kind, data)
    padded = write(data, kind, 4, 400, 39).read_bytes()
    footer = int.from_bytes(padded[-8:-4], "little") + 8
    gap = bytes(len(content) - len(padded))
    path.write_bytes(padded[:-footer] + gap + padded[-footer:])
    os.utime(path, ns=(times.st_mtime_ns, times.st_mtime_ns))
    with pytest.raises(tp.DataChangedError, match=r"4\.parquet.*the file has changed"):
        seen(kind, data)
    assert seen(kind, data) == seen(kind, data, index=False)  # made anew, as the message says


# The file itself


NOT_WHOLE = [("parquet", how) for how in ("empty", "cut", "foreign", "old")]


@pytest.mark.parametrize(("kind", "how"), [*NOT_WHOLE, ("json", "old"), ("json", "flipped")])
def test_a_file_that_is_not_whole_is_made_again(kind, how, data, kept, scans):
    expected = seen(kind, data)
    path = the_file(kept)
    content = path.read_bytes()
    path.unlink()
    old = pa.table({"path": ["x"], "stamp": ["1"]})
    half = len(content) // 2
    if how == "old":
        kept_file.write(path, [old], {"layouts": 0, "format": "Parquet", "key": ""})
    else:
        bad = {"empty": b"", "cut": content[:half], "foreign": b"PAR1 and so on" * 99}
        flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        path.write_bytes(bad.get(how, flipped))
    scans.taken()
    if how == "old":
        assert seen(kind, data) == expected
    else:
        with pytest.warns(UserWarning, match=r"was damaged: .* made again"):
            assert seen(kind, data) == expected
    assert scans.taken() == ALL
    assert seen(kind, data) == expected
    assert scans.taken() == []


@every
@pytest.mark.parametrize("cache", ["on", "off"])
def test_it_can_be_kept_in_a_file_or_folder_of_ones_own(
    kind, data, tmp_path, scans, cache, monkeypatch
):
    if cache == "off":
        monkeypatch.setenv("TRAINPIPES_CACHE", "off")
    for where in (tmp_path / "own" / "index.arrow", tmp_path / "own" / "several"):
        for count in (FILES, 0):
            read(kind, data, index=where).explain()
            assert len(scans.taken()) == count
    assert (tmp_path / "own" / "index.arrow").is_file()
    assert len(list((tmp_path / "own" / "several").iterdir())) == 1
    assert tp.cache.info().indexes == 0


@some
def test_few_local_files_are_kept_only_if_asked_for_and_many_always(
    kind, tmp_path, kept, monkeypatch
):
    for n in range(64):
        write(tmp_path / "many", kind, n, n, 1)
    files = sorted(map(str, (tmp_path / "many").iterdir()))
    read(kind, files[1:]).explain()
    monkeypatch.setenv("TRAINPIPES_CACHE", "off")
    read(kind, files, index=True).explain()
    monkeypatch.setenv("TRAINPIPES_CACHE", str(kept))
    read(kind, files, index=False).explain()
    assert not kept.exists()
    read(kind, files).explain()
    assert tp.cache.info().indexes == 1


def test_a_few_mb_of_text_are_worth_an_index(tmp_path):
    (tmp_path / "a.txt").write_text("a line of text\n" * 300_000)
    assert len(tp.read_text(tmp_path / "a.txt")) == 300_000
    assert tp.cache.info().indexes == 1


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_where_it_cannot_be_written_all_goes_on(kind, data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(
        UserWarning, match=r"\(index\): the index cannot be kept in .*name another place"
    ):
        found = seen(kind, data, index=str(tmp_path / "file" / "x"))
    monkeypatch.setenv("TRAINPIPES_CACHE", str(tmp_path / "file"))  # which nobody named for it
    assert found == seen(kind, data, index=True) == seen(kind, data, index=False)


@pytest.mark.parametrize("name", ["mine.arrow", "mine.parquet", "mine"])
def test_a_file_of_the_users_own_that_is_no_index_is_refused(tmp_path, name):
    write(tmp_path / "data", "parquet", 0, 0, 10)
    mine = tmp_path / name
    mine.write_bytes(b"something of value")
    with pytest.raises(tp.ConfigError, match="is not an index of trainpipes"):
        len(read("parquet", tmp_path / "data", index=mine))
    assert mine.read_bytes() == b"something of value"


@some
@pytest.mark.parametrize("index", ["", 3, b"x.arrow", ["x"]])
def test_what_is_no_place_is_refused(kind, index):
    said = r"index.* must be a file that ends in \.arrow, a folder"
    with pytest.raises(tp.ConfigError, match=said):
        read(kind, "x", index=index)


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_url_is_no_place_for_it(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = r"index.* must be a path on this machine, got 's3://b/footers\.arrow'; write there, and copy it"
    with pytest.raises(tp.ConfigError, match=said):
        read(kind, "x", index="s3://b/footers.arrow")
    assert os.listdir() == []


@some
def test_it_is_no_part_of_a_state(kind):
    stages = [read(kind, "x", index=i).stages[1].identity() for i in (None, "here", False)]
    assert stages[0] == stages[1] == stages[2]


@pytest.mark.parametrize("kind", ["parquet"])
def test_other_files_of_the_same_folder_stay_up_to_a_number(kind, tmp_path, monkeypatch, scans):
    paths = [str(write(tmp_path / "d", kind, n, 0, 1)) for n in range(12)]
    monkeypatch.setattr(index_store, "SOME_OTHERS", 2)
    monkeypatch.setattr(index_store, "OTHERS", 1)
    for some, scanned in ((paths[:8], 8), (paths[8:11], 3), (paths[5:8], 0), (paths[:5], 5)):
        len(tp.read_parquet(some, index=True))
        assert len(scans.taken()) == scanned


# Other stores


class Told(MemoryFileSystem):
    """Files in memory; what a listing says of them besides is set by the test."""

    protocol = "told"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    more: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("told://", "memory://"))

    def find(self, path: str, **options: Any) -> Any:
        found = super().find(path, **options)
        return {name: {**info, **self.more} for name, info in found.items()}


@pytest.fixture
def told(data: Path) -> type[Told]:
    fsspec.register_implementation("told", Told, clobber=True)
    Told.store, Told.more = {}, {}
    Told.clear_instance_cache()
    system = fsspec.filesystem("told")
    for path in data.iterdir():
        system.pipe_file(f"/d/{path.name}", path.read_bytes())
    return Told


@some
def test_an_etag_tells_whether_a_remote_file_has_changed(kind, told, scans, kept):
    for _ in range(2):  # told neither time nor ETag
        len(read(kind, "told://d", index=True))
        assert len(scans.taken()) == FILES
    assert not kept.exists()
    for etag, again in (("a", FILES), ("a", 0), ("b", FILES), ("b", 0)):
        told.more = {"ETag": etag}
        len(read(kind, "told://d"))
        assert len(scans.taken()) == again


# Several processes, and how long it takes


def open_it(
    kind: str, folder: Path, looked: Any, started: Any, results: Any, seconds: float
) -> None:
    """In a process: open a pipeline, slowly. Gives its rows, and how many files it has looked at."""
    complete, own = IndexStore.complete, []

    def slowly(store: IndexStore, scan: Any, *more: Any, **options: Any) -> None:
        def slow(job: Any) -> Any:
            own.append(1)
            looked.set()
            time.sleep(seconds)
            return scan(job)

        complete(store, slow, *more, **options)

    IndexStore.complete = slowly  # type: ignore[method-assign]
    started.wait()
    results.put((len(read(kind, folder, index=True)), len(own)))


def begun(work: Callable[..., None], *arguments: Any) -> Any:
    process = context.Process(target=work, args=arguments)
    process.start()
    return process


@some
def test_of_several_processes_one_makes_the_index(kind, data):
    started, results = context.Barrier(3), context.Queue()
    arguments = (kind, data, context.Event(), started, results, 0.02)
    several = [begun(open_it, *arguments) for _ in range(3)]
    found = sorted(results.get(timeout=60) for _ in several)
    for one in several:
        one.join()
    assert [rows for rows, _ in found] == [150] * 3
    types = FILES - 1 if kind in LOOKS else 0  # of one file there are no rows
    assert sum(looks for _, looks in found) == FILES + types
    assert [looks for _, looks in found if looks >= FILES] == [max(looks for _, looks in found)]
    assert tp.cache.info().indexes == 1


@some
def test_if_the_one_that_makes_it_is_killed_another_one_does(kind, data, kept):
    looked, alone, results = context.Event(), context.Barrier(1), context.Queue()
    first = begun(open_it, kind, data, looked, alone, results, 600)
    assert looked.wait(60)
    second = begun(open_it, kind, data, context.Event(), alone, results, 0)
    second.join(0.3)
    assert second.is_alive()  # it waits
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    assert results.get(timeout=60)[1] >= FILES
    third = begun(open_it, kind, data, context.Event(), alone, results, 0)
    assert results.get(timeout=60) == (150, 0)
    for process in (first, second, third):
        process.join()
    assert [path.suffix for path in (kept / "footers").iterdir()] == [".arrow"]


@some
def test_processes_that_write_at_once_always_find_a_whole_file(kind, data, kept):
    good = context.Value("i", 0)

    def child(clears: bool) -> None:
        for _ in range(10):
            assert len(read(kind, data, index=True)) == 150
            if clears:
                tp.cache.clear()
        with good.get_lock():
            good.value += 1

    running = [begun(child, clears) for clears in (True, False, False)]
    for process in running:
        process.join(60)
        process.kill()
    assert good.value == 3
    assert not list(kept.rglob("*.part"))


@pytest.mark.parametrize("kind", ["json"])
def test_workers_read_the_index_that_their_parent_made(kind, data, scans):
    pipe = tp.read_json(data, index=True, block_rows=10).sharding_filter(4).batch(5)
    loader = tp.Loader(pipe, num_workers=2)
    assert sum(len(batch) for batch in loader) == 150
    assert tp.cache.info().indexes == 1


def test_files_of_the_same_columns_share_one_schema(tmp_path: Path) -> None:
    for n in range(6):
        odd = {"more": [n]} if n == 3 else {}
        pq.write_table(pa.table({"x": [n], "y": [0.5], **odd}), tmp_path / f"{n}.parquet")
    pipe = tp.read_parquet(str(tmp_path), columns=["x"], index=False)
    source = pipe._iteration.plan.inputs.source
    assert isinstance(source, DecodedFiles)
    assert len({id(layout.schema) for layout in source.layouts}) == 2
    assert [row["x"] for row in pipe] == list(range(6))
