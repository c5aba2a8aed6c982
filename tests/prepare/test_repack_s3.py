"""``repack`` to S3: a server on this machine, and the real s3fs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from s3_store import s3_store
from trainpipes.filesystems.places import place_at
from trainpipes.prepare import repack
from trainpipes.writers import Processes, Threads
from unfinished import contents

#: So little memory that there are several parts.
ONE: dict[str, Any] = {"rows_per_file": 100, "memory_limit": "64KB", "executor": Threads(2)}


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of temporary files of its own."""
    get_temp_dir()  # where multiprocessing has its sockets: below this one their names are too long
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    with s3_store("packed") as found:
        yield found


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    table = pa.table(
        {"x": [i * 7 % 450 for i in range(400)], "text": [f"row {i} é" * 10 for i in range(400)]}
    )
    for number in range(2):
        pq.write_table(table.slice(200 * number, 200), folder / f"{number}.parquet")
    return folder


def there(folder: str, options: dict[str, Any]) -> dict[str, bytes]:
    """All objects below a folder of the bucket."""
    system = fsspec.filesystem("s3", **options, skip_instance_cache=True)
    paths = system.find(f"packed/{folder}")
    return {path.removeprefix(f"packed/{folder}/"): system.cat_file(path) for path in paths}


def test_objects_are_the_files_of_a_folder(given, options, tmp_path, apart):
    choice = {**ONE, "shuffle": True, "seed": 3}
    here = repack(given, tmp_path / "here", **choice)
    url, folder = "s3://packed/größer als", "größer als"
    done = repack(given, f"{url}/", storage_options=options, **choice)
    assert there(folder, options) == contents(tmp_path / "here")
    assert done.files[0] == f"{url}/part-00000.parquet"
    assert (done.rows, done.bytes) == (here.rows, here.bytes)
    assert not list(apart.glob("trainpipes*"))
    done.verify()
    assert repack(given, url, storage_options=options, **choice).kept == len(done.files)
    with pytest.raises(tp.ConfigError, match=r"were written with .*overwrite=True"):
        repack(given, url, storage_options=options, **{**choice, "rows_per_file": 300})
    system = fsspec.filesystem("s3", **options, skip_instance_cache=True)
    system.pipe_file(f"packed/{folder}/part-00001.parquet", b"another")
    with pytest.raises(tp.DataChangedError, match=r"part-00001.parquet is not as it was written"):
        repack(given, url, storage_options=options, **choice)
    repack(given, url, storage_options=options, overwrite=True, **choice)
    assert there(folder, options) == contents(tmp_path / "here")


def test_temporary_files_may_be_objects_too(given, options, tmp_path, apart):
    choice = {**ONE, "shuffle": True, "memory_limit": "200KB"}
    repack(given, tmp_path / "here", **choice)
    done = repack(
        given, "s3://packed/both", storage_options=options, temp_dir="s3://packed/between",
        **{**choice, "executor": Processes(2)},
    )  # fmt: skip
    assert done.rows == 400
    assert there("both", options) == contents(tmp_path / "here")
    assert there("between", options) == {}
    assert not list(apart.glob("trainpipes*"))


def test_temporary_files_of_a_folder_of_another_name_stay(options):
    system = fsspec.filesystem("s3", **options, skip_instance_cache=True)
    for name in ("lr=1", "lr=[1]"):
        system.pipe_file(f"packed/{name}/_unfinished/repack/rows/0.pieces", b"of a job that runs")
    folder = place_at("s3://packed/lr=[1]", "repack", options)
    folder.remove_folder("_unfinished/repack")
    assert list(there("lr=1", options)) == ["_unfinished/repack/rows/0.pieces"]
    assert there("lr=[1]", options) == {}


def test_a_url_whose_files_are_read_cannot_be_the_output(given, options, tmp_path, monkeypatch):
    system = fsspec.filesystem("s3", **options)
    system.put_file(str(given / "0.parquet"), "packed/input/0.parquet")
    url, within = "s3://packed/input", "so that the next run would read what is written"
    for data, out, said in (
        (url, f"{url}/packed", within), (f"{url}/", f"{url}/packed", within),
        (f"{url}/**/*.parquet", f"{url}/packed", within),
        (f"{url}/0.parquet", url, r"s3://packed/input holds files that are read"),
        (given, url, "files that no writer has written"),
    ):  # fmt: skip
        with pytest.raises(tp.ConfigError, match=said):
            repack(data, out, storage_options=options, **ONE)
    done = repack(f"{url}/*.parquet", "s3://packed/inputs", storage_options=options, **ONE)
    assert done.rows == repack(given / "0.parquet", tmp_path / "here", **ONE).rows == 200
    parts = (tmp_path / "here").glob("part-*")
    here, found = {path.name: path.read_bytes() for path in parts}, there("inputs", options)
    assert {name: found[name] for name in found if name.startswith("part-")} == here
    rows = tp.list_files(f"{url}/", storage_options=options).read_parquet()
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    unnamed = {name: value for name, value in options.items() if name != "endpoint_url"}
    for same in (options, unnamed):
        with pytest.raises(tp.ConfigError, match=within):
            rows.write_parquet(f"{url}/packed", storage_options=same)
    other = {**options, "endpoint_url": options["endpoint_url"].replace("127.0.0.1", "localhost")}
    assert rows.write_parquet(f"{url}/packed", storage_options=other).rows == 200  # of its own
