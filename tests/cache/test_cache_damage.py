"""Whatever lies in the folder for caches: the batches are those without one, and no process dies of it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from damaged_files import damaged
from forked import in_child
from interpreters import python
from trainpipes import ConfigError, Pipeline, cache
from trainpipes._internal import messages as warn_once
from trainpipes.cache import kept_file, make_room
from trainpipes.testing import digest

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files to others"
)
#: A user that is not this one.
STRANGER = 12_345


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_warned_of: None) -> Path:
    monkeypatch.setenv("TRAINPIPES_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for n in range(3):
        ids = range(60 * n, 60 * n + 60)
        columns = {"x": ids, "text": [f"row {i} " + "and more " * (i % 5) for i in ids]}
        pq.write_table(pa.table(columns), folder / f"{n}.parquet", row_group_size=20)
        os.utime(folder / f"{n}.parquet", (10**9, 10**9))
    return folder


def odd(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 2)


def rows(data: Path) -> Pipeline:
    return tp.list_files(data).read_parquet(index=True).filter(odd).tokenize("bytes")


def batches(pipe: Pipeline) -> list[str]:
    return [digest(batch) for batch in pipe.shuffle(30, seed=3).batch(7).pad_collate()]


def cached(data: Path) -> list[str]:
    return batches(rows(data).cache())


def entries(kept: Path, kind: str = "rows") -> list[Path]:
    return sorted(path for path in (kept / kind).rglob("*.arrow") if path.is_file())


# Damage at random


def same_after_damage(kind: str, data: Path, kept: Path, times: int, seed: int) -> None:
    """Damage files and run, so many times."""
    want, draw = batches(rows(data)), random.Random(seed)
    assert cached(data) == want
    good = {path: path.read_bytes() for path in entries(kept, kind)}
    assert good

    def work() -> None:
        for number in range(times):
            for path in draw.sample(sorted(good), draw.randint(1, len(good))):
                content = damaged(good[path], [*good.values()], draw)
                path.unlink(missing_ok=True)
                path.write_bytes(content)
                path.chmod(0o600)
            if kind == "footers":
                for path in entries(kept):  # else they are found by what a good index says
                    path.unlink()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert cached(data) == want, number

    in_child(work)
    assert {*entries(kept, kind)} >= {*good}


@pytest.mark.parametrize("kind", ["rows", "footers"])
def test_damaged_files_change_no_batch(kind: str, data: Path, kept: Path) -> None:
    same_after_damage(kind, data, kept, 8, seed=1)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["rows", "footers"])
def test_thousands_of_damaged_files(kind: str, data: Path, kept: Path) -> None:
    same_after_damage(kind, data, kept, 20_000, seed=random.SystemRandom().randrange(2**32))


# Whose they are


def test_what_is_kept_is_its_owners_alone(data: Path, kept: Path) -> None:
    for mask in (0o000, 0o022, 0o077):
        before = os.umask(mask)
        try:
            cached(data)
        finally:
            os.umask(before)
        found = [kept, *kept.rglob("*")]
        modes = {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in found}
        assert modes == {(True, 0o700), (False, 0o600)}
        assert [path.name for path in sorted(kept.iterdir())] == ["footers", "rows"]
        shutil.rmtree(kept)


@needs_root
@pytest.mark.parametrize("kind", ["rows", "footers"])
def test_files_of_another_user_are_not_used_and_it_is_said_once(
    kind: str, data: Path, kept: Path
) -> None:
    want = cached(data)
    for path in entries(kept, kind):
        os.chown(path, STRANGER, STRANGER)
    with pytest.warns(UserWarning, match=f"is not used, for user {STRANGER} owns it") as caught:
        assert cached(data) == want
    assert len(caught) == 1
    assert {path.stat().st_uid for path in entries(kept, kind)} == {os.geteuid()}  # made anew


@needs_root
def test_a_folder_or_a_link_of_another_user_is_not_used(
    data: Path, kept: Path, tmp_path: Path
) -> None:
    want = batches(rows(data))
    cache.clear()
    for name in ("rows", "footers"):
        (kept / name).mkdir(parents=True, exist_ok=True)
        os.chown(kept / name, STRANGER, STRANGER)
        (kept / name).chmod(0o777)
    with pytest.warns(UserWarning, match="goes on without"):
        assert cached(data) == want
    assert not [path for path in kept.rglob("*") if path.is_file()]
    shutil.rmtree(kept)
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", kept)
    os.lchown(kept, STRANGER, STRANGER)
    warn_once._warned.clear()
    with pytest.warns(UserWarning, match=f"a link of user {STRANGER}.*goes on without"):
        assert cached(data) == want
    assert not [path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()]


def test_the_folder_may_be_a_link_of_its_user(data: Path, kept: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", kept)
    want = cached(data)
    assert len(entries(tmp_path / "elsewhere")) == 9
    assert cached(data) == want
    assert cache.clear().blocks == 9
    assert not entries(tmp_path / "elsewhere")


def test_links_in_it_are_not_followed(data: Path, kept: Path, tmp_path: Path) -> None:
    want = cached(data)
    mine = tmp_path / "mine"
    mine.mkdir()
    for number, path in enumerate(entries(kept)):
        path.rename(mine / f"{number}.arrow")
        os.symlink(mine / f"{number}.arrow", path)
    before = {path: path.read_bytes() for path in mine.iterdir()}
    assert cached(data) == want
    assert not [path for path in entries(kept) if path.is_symlink()]  # made anew in their place
    assert {path: path.read_bytes() for path in mine.iterdir()} == before


@pytest.mark.parametrize("name", ["rows", "footers"])
def test_nothing_is_written_to_or_removed_from_where_a_link_leads(
    name: str, data: Path, kept: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    (mine / "ab").mkdir(parents=True)
    (mine / "mine.arrow").write_text("mine")
    (mine / "ab" / "mine.arrow").write_text("mine")
    kept.mkdir()
    os.symlink(mine, kept / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert batches(rows(data).cache(max_bytes=3000)) == batches(rows(data))
    cache.clear()
    make_room(kept, 0, "rows")
    assert cache.info().blocks == cache.info().indexes == 0
    assert sorted(path.name for path in mine.rglob("*")) == ["ab", "mine.arrow", "mine.arrow"]


@pytest.mark.parametrize("what", ["a pipe", "a link to nowhere", "a folder"])
def test_what_is_no_file_in_the_place_of_one_is_no_harm(what: str, data: Path, kept: Path) -> None:
    want = cached(data)
    for path in [*entries(kept), *entries(kept, "footers")]:
        path.unlink()
        if what == "a pipe":
            os.mkfifo(path)
        elif what == "a link to nowhere":
            os.symlink(path / "nowhere", path)
        else:
            path.mkdir()
    if what == "a folder":
        with pytest.warns(UserWarning, match=r"cannot be kept .*directory.*goes on without"):
            assert cached(data) == want
    else:
        assert in_child(lambda: cached(data)) == want
        assert len(entries(kept)) == 9


# Where it cannot be kept, for a while or at all


class Failing:
    """``os.replace`` that fails some times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Iterator[int]) -> None:
        self._replace, self._fails, self.calls = os.replace, fails, 0
        monkeypatch.setattr(kept_file.os, "replace", self)

    def __call__(self, old: Any, new: Any) -> None:
        self.calls += 1
        code = next(self._fails, 0)
        if code:
            raise OSError(code, os.strerror(code), os.fspath(old))
        self._replace(old, new)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ESTALE])
def test_one_failure_does_not_turn_a_cache_off_for_good(
    code: int, data: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(data).explain()  # the index is written
    Failing(monkeypatch, iter([code]))
    pipe, want = rows(data).cache().shuffle(30, seed=3).batch(7).pad_collate(), batches(rows(data))
    with pytest.warns(UserWarning, match="goes on without.*until they can be") as caught:
        found = [digest(batch) for batch in pipe]
    assert found == want
    assert len(caught) == 1
    list(pipe)
    assert len(entries(kept)) == 9
    assert not list(kept.rglob("*.part"))


def test_what_always_fails_is_said_once_and_seldom_tried(
    data: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(data).explain()
    failing = Failing(monkeypatch, iter([errno.ENOSPC] * 10_000))
    pipe = rows(data).cache()
    with pytest.warns(UserWarning, match="No space left") as caught:
        found = [len(list(pipe)) for _ in range(20)]
    assert found == [90] * 20
    assert len(caught) == 1
    assert 3 <= failing.calls <= 12  # of 180
    assert not [path for path in (kept / "rows").rglob("*") if path.is_file()]


def test_a_read_only_folder_is_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # which others may come to, unlike pytest's
        os.chmod(folder, 0o755)
        there = Path(folder, "data")
        shutil.copytree(data, there)
        kept = Path(folder, "kept")
        monkeypatch.setenv("TRAINPIPES_CACHE", str(kept))
        want = batches(rows(there).cache())
        entries(kept)[0].unlink()
        for path in [kept, *kept.rglob("*")]:
            if os.geteuid() == 0:
                os.chown(path, STRANGER, STRANGER)
            if path.is_dir():
                path.chmod(0o500)

        def work() -> tuple[list[str], list[str]]:
            if os.geteuid() == 0:
                os.setuid(STRANGER)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = batches(rows(there).cache())
            return found, [str(warning.message) for warning in caught]

        found, said = in_child(work)
        assert found == want
        assert len([text for text in said if "goes on without" in text]) == 1
        for path in [kept, *kept.rglob("*")]:
            if path.is_dir():
                path.chmod(0o700)
        assert len(entries(kept)) == 8


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_believed(
    data: Path, kept: Path
) -> None:
    want = batches(rows(data))
    context = multiprocessing.get_context("fork")
    for seed in range(4):
        process = context.Process(target=lambda: [cached(data) for _ in range(50)])
        process.start()
        deadline = time.monotonic() + 20
        while len(list(kept.rglob("*"))) < 2 + seed and time.monotonic() < deadline:
            time.sleep(0.001)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(20)
        assert cached(data) == want
        cache.clear()


def test_what_killed_processes_left_is_removed_by_the_next(data: Path, kept: Path) -> None:
    cached(data)
    first, second, *_ = entries(kept)
    old, new, foreign = (
        first.with_name(name)
        for name in ("ab.123.0a1b2c3d.part", "ab.123.0a1b2c3e.part", "movie.part")
    )
    for path in (old, new, foreign):
        path.write_text("half")
    for path in (old, foreign):
        os.utime(path, (1, 1))
    for path in entries(kept):
        path.unlink()
    cached(data)
    assert (old.exists(), new.exists(), foreign.exists()) == (False, True, True)
    assert second.exists()


def test_what_is_left_in_a_folder_is_looked_for_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, count = cache.remove_leftovers, 0

    def counted(*given: Any) -> int:
        nonlocal count
        seen = looked(*given)
        count += seen
        return seen

    monkeypatch.setattr(cache, "remove_leftovers", counted)
    folder = tmp_path / "kept" / "bytes" / "ab"
    for number in range(1000):
        kept_file.make_file(folder / f"{number:062x}.chunk", lambda file: file.write(b"x"))
    assert len(list(folder.iterdir())) == 1000
    assert count < 20 * 1000  # half a million, if after each


# Where the folder is


def test_a_url_is_no_folder(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINPIPES_CACHE", "s3://bucket/kept")
    with pytest.raises(ConfigError, match=r"TRAINPIPES_CACHE must be a folder of this .*s3://"):
        cache.folder()
    for path in ("s3://bucket/kept", ""):  # which is not all that the user has
        with pytest.raises(ConfigError, match="the folder for caches must be a path"):
            cache.clear(path)


def test_a_relative_folder_is_below_the_working_one_from_the_start(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINPIPES_CACHE", "here")
    pipe = rows(data).cache()
    assert pipe._iteration.plan.inputs.cached_blocks is not None
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    list(pipe)
    assert len(entries(tmp_path / "here")) == 9


def test_a_relative_folder_where_the_working_one_is_gone_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("TRAINPIPES_CACHE", "here")
    with pytest.raises(ConfigError, match="working folder, which is gone"):
        cache.folder()
    monkeypatch.chdir(tmp_path)


HOMELESS = """
import os, sys, tempfile
from pathlib import Path
tempfile.tempdir = sys.argv[1]
for name in ("HOME", "XDG_CACHE_HOME", "TRAINPIPES_CACHE"):
    os.environ.pop(name, None)
os.chmod(sys.argv[1], 0o1777)
planted = Path(sys.argv[1]) / "trainpipes-54321"
if sys.argv[2] == "planted":
    (planted / "rows").mkdir(parents=True)
    for path in (planted, planted / "rows"):
        os.chown(path, 12345, 12345)
        os.chmod(path, 0o777)
import trainpipes as tp, pyarrow as pa, warnings
pipe = tp.from_arrow(pa.table({"x": range(10)})).cache()
os.setuid(54321)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert [row["x"] for row in pipe] == list(range(10))
print(tp.cache.folder(), tp.cache.info().blocks, len(caught), [str(w.message) for w in caught])
"""


@needs_root
@pytest.mark.parametrize("planted", ["planted", "free"])
def test_without_a_home_a_folder_that_a_stranger_has_planted_is_not_used(
    planted: str, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        command = [*python(), "-c", HOMELESS, folder, planted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        where, blocks, said, *_ = done.stdout.split()
        assert where == f"{folder}/trainpipes-54321"
        assert (blocks, said) == (("0", "1") if planted == "planted" else ("1", "0"))


# What a named index may be


@needs_root
def test_an_index_that_the_user_names_may_be_anothers(data: Path, tmp_path: Path) -> None:
    mine = tmp_path / "index.arrow"
    tp.list_files(data).read_parquet(index=str(mine)).explain()
    os.chown(mine, STRANGER, STRANGER)
    before = mine.stat().st_ino
    assert len(list(tp.list_files(data).read_parquet(index=str(mine)))) == 180
    assert mine.stat().st_ino == before


# Several at once


def test_damage_and_use_at_the_same_time_change_no_batch(data: Path, kept: Path) -> None:
    want, done = batches(rows(data)), threading.Event()
    cached(data)
    good = {path: path.read_bytes() for path in entries(kept)}

    def spoil() -> None:
        draw = random.Random(5)
        while not done.is_set():
            path = draw.choice(sorted(good))
            beside = path.with_suffix(".spoiled")
            beside.write_bytes(damaged(good[path], [], draw))
            beside.chmod(0o600)
            os.replace(beside, path)

    def work() -> None:
        thread = threading.Thread(target=spoil)
        thread.start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(5):
                    assert cached(data) == want
        finally:
            done.set()
            thread.join()

    in_child(work)
