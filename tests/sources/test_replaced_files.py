"""Files that are replaced between checkpoint and resume, to the same size and number of rows, are noticed."""

from __future__ import annotations

import json
import os
import random
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from every_format import FORMATS, Format, table, written
from trainpipes.testing import digest

COUNTS, ROWS = (13, 8, 11), 5
#: What a state knows by names, sizes and rows alone, on disks.
BY_SIZE = {"npy", "own functions", "own functions, not counted", "own format"}


def read(format: Format, files: Any, **options: Any) -> tp.Pipeline:
    return format.read(files, ROWS, **options).shuffle(7, seed=1).batch(3)


def following(pipe: tp.Pipeline, state: dict[str, Any], **options: Any) -> list[str]:
    pipe.load_state_dict(state, **options)
    return [digest(item)[:8] for item in islice(pipe, 4)]


def other(format: Format, content: bytes, first: int, count: int) -> bytes:
    """Another file of as many bytes and rows."""
    rows = table(first, count)
    for seed in range(2000):
        order = list(range(count))
        random.Random(seed).shuffle(order)
        found = format.write(rows.take(order), ROWS)
        if len(found) == len(content) and found != content:
            return found
    raise AssertionError("no such file was found")


def changed(format: Format, path: Path) -> None:
    """Replace the second file."""
    content, times = path.read_bytes(), path.stat()
    path.write_bytes(other(format, content, COUNTS[0], COUNTS[1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def saved(format: Format, folder: Path) -> tuple[list[str], dict[str, Any], list[str]]:
    """Files, a state of a pipeline that reads them, and what follows it."""
    paths = written(folder, format, COUNTS, ROWS)
    state = read(format, paths).state_at(2)
    return paths, state, following(read(format, paths), state)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", FORMATS)
def test_a_replaced_file_is_refused_by_name(name, tmp_path):
    format = FORMATS[name]
    paths, state, then = saved(format, tmp_path)
    changed(format, Path(paths[1]))
    allowed = following(read(format, paths), state, allow_changes=["data"])
    assert allowed == following(read(format, paths), read(format, paths).state_at(2))
    if name in BY_SIZE:
        assert following(read(format, paths), state) == allowed
        return
    assert allowed != then
    with pytest.raises(tp.StateError, match=r"content.*saved") as caught:
        read(format, paths).load_state_dict(state)
    assert f"(file 2 of 3 is not the saved one: {paths[1]})" in str(caught.value)
    assert "allow_changes=['data']" in str(caught.value)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", FORMATS)
def test_files_elsewhere_and_those_written_again_are_the_same(name, tmp_path):
    format = FORMATS[name]
    (tmp_path / "a").mkdir()
    paths, state, then = saved(format, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copies = [str(tmp_path / "b" / Path(path).name) for path in paths]
    for number, path in enumerate(copies):
        os.utime(path, ns=(0, 10**9 * number))
    assert following(read(format, copies), state) == then
    written(tmp_path / "a", format, COUNTS, ROWS)
    assert following(read(format, paths), state) == then


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", FORMATS)
def test_a_renamed_file_is_refused(name, tmp_path):
    format = FORMATS[name]
    paths, state, _ = saved(format, tmp_path)
    renamed = Path(paths[2]).rename(tmp_path / f"9{format.suffix}")
    for allow in ((), ("data",)):
        with pytest.raises(tp.StateError, match=r"file 3 of 3 is not the saved one") as caught:
            read(format, [*paths[:2], renamed]).load_state_dict(state, allow_changes=allow)
        assert "allow_changes" not in str(caught.value)


def test_files_of_other_sizes_and_as_many_rows_are_allowed_by_name(tmp_path):
    def make() -> tp.Pipeline:
        return tp.read_parquet(tmp_path).shuffle(7).batch(3)

    for number in range(3):
        pq.write_table(pa.table({"x": ["a"] * 8}), tmp_path / f"{number}.parquet")
    state = make().state_at(2)
    pq.write_table(pa.table({"x": ["b" * 100] * 8}), tmp_path / "1.parquet")
    with pytest.raises(tp.StateError, match=r"bytes: saved .*file 2 of 3.*allow_changes"):
        make().load_state_dict(state)
    pipe = make()
    pipe.load_state_dict(state, allow_changes=["data", "batch_size"])
    assert len(list(pipe)) == len(make()) - 2
    pq.write_table(pa.table({"x": ["b"] * 9}), tmp_path / "1.parquet")
    with pytest.raises(tp.StateError, match="rows: saved 24, now 25"):
        make().load_state_dict(state, allow_changes=["data"])
    pq.write_table(pa.table({"x": ["b"] * 8}), tmp_path / "1.parquet", row_group_size=4)
    with pytest.raises(tp.StateError, match="file 2 of 3"):  # another order of rows
        make().load_state_dict(state, allow_changes=["data"])


@pytest.mark.parametrize("kind", ["concat", "mix"])
def test_a_replaced_file_of_a_combined_source_is_named(kind, tmp_path):
    format = FORMATS["json lines"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths, _, _ = saved(format, tmp_path / "a")
    more = written(tmp_path / "b", format, COUNTS, ROWS)

    def make() -> tp.Pipeline:
        parts = {"a": tp.read_json(more), "b": tp.read_json(paths).map(dict)}
        whole = tp.mix(parts) if kind == "mix" else tp.concat(*parts.values())
        return whole.batch(4)

    state = make().state_at(2)
    changed(format, Path(paths[1]))
    with pytest.raises(tp.StateError, match=r"sources/[1b]/content") as caught:
        make().load_state_dict(state)
    assert f"(file 2 of 3 is not the saved one: {paths[1]})" in str(caught.value)
    make().load_state_dict(state, allow_changes=["data"])
    make().load_state_dict(state, allow_changes=["data", "mix"])


def test_the_state_of_a_thousand_files_is_small_and_names_a_group(tmp_path):
    def make() -> tp.Pipeline:
        return tp.read_text(tmp_path).sharding_filter().shuffle(40).batch(3)

    for number in range(1000):
        (tmp_path / f"{number}.txt").write_text(f"row {number:04}\n")
    state = make().state_at(2)
    assert len(json.dumps(state)) < 1024
    (tmp_path / "321.txt").write_text("row xxxx\n")
    with pytest.raises(tp.StateError, match=r"one of the files 313 to 375 of 1000") as caught:
        make().load_state_dict(state)
    assert f"{tmp_path / '312.txt'} to {tmp_path / '374.txt'}" in str(caught.value)


def test_whole_files_on_a_disk_are_known_by_size(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(b"a" * 9)
    state = tp.list_files(tmp_path).read_bytes().batch(2).state_at(1)
    (tmp_path / "1.png").write_bytes(b"b" * 9)
    tp.list_files(tmp_path).read_bytes().batch(2).load_state_dict(state)
    (tmp_path / "1.png").write_bytes(b"b" * 10)
    with pytest.raises(tp.StateError, match=r"file 2 of 3 is not the saved one: .*1\.png"):
        tp.list_files(tmp_path).read_bytes().batch(2).load_state_dict(state)


# On a store


def whole(files: Any, rows: int, **options: Any) -> tp.Pipeline:
    return tp.read_bytes(files, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["parquet", "arrow", "json lines", "npy", "tar", "whole files"])
def test_on_s3(s3, name, tmp_path):
    format = FORMATS.get(name) or Format(FORMATS["json lines"].write, whole, ".jsonl")
    system, options = fsspec.filesystem("s3", **s3), {"storage_options": s3}
    paths = written(tmp_path, format, COUNTS, ROWS)
    place = f"s3://test-replaced-files/{name.replace(' ', '-')}"
    urls = {where: [f"{place}/{where}/{Path(p).name}" for p in paths] for where in "ab"}

    def put() -> None:
        for where, names in urls.items():
            for url, path in zip(names, paths, strict=True):
                if where == "a" or not system.exists(url):
                    system.pipe(url, Path(path).read_bytes())

    put()
    state = read(format, urls["a"], **options).state_at(1)
    then = following(read(format, urls["a"], **options), state)
    put()  # the same again
    assert following(read(format, urls["a"], **options), state) == then
    for elsewhere in (read(format, urls["b"], **options), read(format, paths)):
        elsewhere.load_state_dict(state)
    content = Path(paths[1]).read_bytes()
    Path(paths[1]).write_bytes(other(format, content, COUNTS[0], COUNTS[1]))
    put()
    with pytest.raises(tp.StateError, match="data/content") as caught:
        read(format, urls["a"], **options).load_state_dict(state)
    assert f"(file 2 of 3 is not the saved one: {urls['a'][1]})" in str(caught.value)
    read(format, urls["a"], **options).load_state_dict(state, allow_changes=["data"])
    read(format, urls["b"], **options).load_state_dict(state)
