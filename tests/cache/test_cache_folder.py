"""Where things are kept, how much it is, and that only ours is removed."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes import cache
from trainpipes.cache import kept_file, make_room, path_of
from trainpipes.cache.kept_file import locked


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with three blocks of rows and a footer index."""
    monkeypatch.setenv("TRAINPIPES_CACHE", str(tmp_path / "kept"))
    for n in range(3):
        pq.write_table(pa.table({"x": range(10)}), tmp_path / f"{n}.parquet")
    list(tp.list_files(tmp_path).read_parquet(index=True).cache())
    return tmp_path / "kept"


# Where


def test_the_variable_names_the_folder_and_a_path_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINPIPES_CACHE", str(tmp_path / "a"))
    assert cache.folder() == tmp_path / "a"
    assert cache.folder(tmp_path / "b") == tmp_path / "b"
    monkeypatch.setenv("TRAINPIPES_CACHE", "~/kept")
    assert cache.folder() == Path("~/kept").expanduser()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINPIPES_CACHE", "here")
    assert cache.folder() == tmp_path / "here"


@pytest.mark.parametrize("word", ["off", "OFF", "0", "none", "disabled"])
def test_off_is_off_even_for_a_path(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINPIPES_CACHE", word)
    assert cache.folder() is None
    assert cache.folder(tmp_path) is None
    assert str(cache.info()).startswith("off: 0 blocks")
    assert cache.clear() == cache.info()


@pytest.mark.skipif(sys.platform != "linux", reason="where Linux keeps caches")
def test_the_users_folder_is_where_the_system_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRAINPIPES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "trainpipes"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache.folder() == Path("~/.cache/trainpipes").expanduser()
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # nobody's home
    assert str(cache.folder()).endswith(f"/trainpipes-{os.getuid()}")


# How much


def test_info_counts_what_is_on_disk(kept: Path) -> None:
    found = cache.info()
    sizes = {path: path.stat().st_size for path in kept.rglob("*.arrow")}
    rows = [size for path, size in sizes.items() if "rows" in path.parts]
    assert found.folder == kept
    assert (found.blocks, found.block_bytes) == (3, sum(rows))
    assert (found.indexes, found.index_bytes) == (1, sum(sizes.values()) - sum(rows))
    assert str(found) == (
        f"{kept}: 3 blocks of rows ({found.block_bytes:,} bytes), 1 footer indexes "
        f"({found.index_bytes:,} bytes), 0 remote chunks (0 bytes)"
    )


def test_info_of_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    assert cache.info(tmp_path / "nowhere") == cache.CacheInfo(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_clear_removes_ours_and_nothing_else(kept: Path) -> None:
    before = cache.info()
    (kept / "mine.txt").write_text("mine")
    for name in ("notes.md", "part-00000.arrow", "1.arrow", "poetry.lock"):
        (kept / "rows" / name).write_text("mine")
    (kept / "rows" / "ab").mkdir(exist_ok=True)
    part = kept / "rows" / "ab" / "cd.123.0a1b2c3d.part"
    part.write_text("left by a process that was killed")
    os.utime(part, (1, 1))
    os.symlink(kept / "mine.txt", kept / "rows" / "link.arrow")
    assert cache.clear() == before
    assert cache.info() == cache.CacheInfo(kept)
    assert make_room(kept, 0, "rows") == 0
    left = {str(path.relative_to(kept)) for path in kept.rglob("*") if not path.is_dir()}
    inside = {"notes.md", "part-00000.arrow", "1.arrow", "poetry.lock", "link.arrow"}
    assert left == {"mine.txt", *(f"rows/{name}" for name in inside)}


def test_room_is_made_by_the_time_of_use(kept: Path) -> None:
    entries = sorted(kept.glob("rows/*/*.arrow"))
    for age, path in enumerate(entries):
        os.utime(path, (100 - age, 100 - age))
    sizes = [path.stat().st_size for path in entries]
    assert make_room(kept, sum(sizes), "rows") == sum(sizes)
    assert make_room(kept, sum(sizes) - 1, "rows") == sum(sizes[:2])
    assert [path.exists() for path in entries] == [True, True, False]
    assert make_room(kept, 0, "rows") == 0
    assert cache.info().indexes == 1


def test_room_is_made_of_what_killed_processes_left(kept: Path) -> None:
    part = kept / "rows" / "0a" / "cd.123.0a1b2c3d.part"
    part.parent.mkdir(exist_ok=True)
    for age, stays in ((0, True), (10_000, False)):
        part.write_text("left")
        os.utime(part, (time.time() - age, time.time() - age))
        make_room(kept, 1 << 30, "rows")
        assert part.exists() == stays


# Files that are whole or not there


def test_a_table_comes_back_with_its_schema_metadata_and_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "ids": pa.array([[1, 2], [], None], pa.list_(pa.int32())),
            "text": ["a", None, "ccc"],
            "coded": pa.array(["x", "y", "x"]).dictionary_encode(),
            "deep": [{"a": [1.5]}, None, {"a": []}],
            "none": pa.nulls(3),
        }
    ).replace_schema_metadata({"by": "hand"})
    for given in (
        table,
        table.slice(1),
        table.slice(3),
        pa.concat_tables([table] * 3),
    ):
        kept_file.write(tmp_path / "x.arrow", [given], {"what": 1})
        found = kept_file.read(tmp_path / "x.arrow", {"what": 1})
        assert found is not None
        assert found.equals(given)
        assert found.schema.equals(given.schema, check_metadata=True)
    assert kept_file.read(tmp_path / "x.arrow", {"what": 2}) is None
    assert kept_file.read(tmp_path / "y.arrow", {"what": 1}) is None


def test_no_byte_of_the_rows_can_change_unnoticed(tmp_path: Path) -> None:
    table = pa.table(
        {"ids": [[n] * (n % 5) for n in range(40)], "text": [f"{n}" for n in range(40)]}
    )
    path = tmp_path / "x.arrow"
    kept_file.write(path, [table], {})
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        changed = (
            bytes(content[:place]) + bytes([content[place] ^ 0x10]) + bytes(content[place + 1 :])
        )
        path.write_bytes(changed)
        path.chmod(0o600)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it was damaged
            found = kept_file.read(path, {})
        assert found is None or found.equals(table), place


def test_a_system_that_lacks_memory_or_handles_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, about = tmp_path / "kept" / "a.arrow", {"rows": 1}
    kept_file.write(path, [pa.table({"x": [1]})], about)

    def lacking(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(pa, "memory_map", lacking)
        assert kept_file.read(path, about) is None
    assert kept_file.read(path, about) == pa.table({"x": [1]})


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    contents = [pa.table({"x": [n] * 50_000}) for n in range(6)]

    def write(n: int) -> None:
        for _ in range(10):
            kept_file.write(tmp_path / "x.arrow", [contents[n]], {})

    threads = [threading.Thread(target=write, args=(n,)) for n in range(len(contents))]
    for thread in threads:
        thread.start()
    seen = 0
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "x.arrow").exists():
            found = kept_file.read(tmp_path / "x.arrow", {})
            assert found is not None
            assert len(set(found.column("x")[::9999])) == 1
            seen += 1
    assert seen
    assert [path.name for path in tmp_path.iterdir()] == ["x.arrow"]


def test_a_file_is_put_and_a_lock_taken_while_others_clear(tmp_path: Path) -> None:
    done = threading.Event()

    def clear() -> None:
        while not done.is_set():
            cache.clear(tmp_path)

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        for n in range(200):
            kept_file.write(path_of(tmp_path, "rows", f"{n:064x}"), [pa.table({"x": [n]})], {})
            with locked(path_of(tmp_path, "rows", f"{n:064x}").with_suffix(".lock")):
                pass
    finally:
        done.set()
        thread.join()


def test_one_that_finds_a_file_locked_leaves_nothing_open(tmp_path: Path) -> None:
    path, here = tmp_path / "kept" / "lock", "/proc/self/fd"
    if not os.path.isdir(here):
        pytest.skip("the system does not list open files")
    with locked(path):
        before = os.listdir(here)
        with locked(path, patience=0) as mine:
            assert not mine
        assert len(os.listdir(here)) == len(before)


@pytest.mark.filterwarnings("ignore:cache")
def test_what_fails_is_left_for_a_while_and_what_is_too_large_for_good(tmp_path: Path) -> None:
    store = kept_file.Store(tmp_path, "rows", 100, "max_bytes", "cache()", "name another folder")
    path, large = store.path("a" * 64), store.path("b" * 64)
    assert not store.is_off(path)
    store.failed(OSError(28, "no space left"))
    assert [store.is_off(path) for _ in range(3)] == [True, False, False]
    store.make(large, lambda file: file.write(b"x" * 1000))
    assert store.is_off(large)
    assert not store.is_off(path)
