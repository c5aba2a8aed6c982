"""What is written on a Ray cluster to S3, a server on this machine, has the bytes that one process writes
to a folder; and a disk that is full leaves whole files only."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import trainpipes as tp
from s3_store import s3_store
from trainpipes.prepare import repack, tokenize
from trainpipes.writers import Ray, Threads
from unfinished import contents

s3fs = pytest.importorskip("s3fs")

ROWS = 3000


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    with s3_store("shared") as found:
        yield found


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    table = pa.table(
        {
            "x": range(ROWS),
            "key": [i * 37 % 100 for i in range(ROWS)],
            "text": [f"row {n} é" + "and more " * (n % 9) for n in range(ROWS)],
        }
    )
    for n in range(3):
        part = table.slice(n * ROWS // 3, ROWS // 3)
        pq.write_table(part, folder / f"{n}.parquet", row_group_size=130)
    return folder


def there(folder: str, options: dict[str, Any]) -> dict[str, bytes]:
    """All objects below a folder of the bucket."""
    system = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    paths = system.find(f"shared/{folder}")
    return {path.removeprefix(f"shared/{folder}/"): system.cat_file(path) for path in paths}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("how", [{}, {"shuffle": True, "seed": 3}])
def test_repack_writes_the_files_of_threads(
    how: dict[str, Any],
    given: Path,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    how = {"rows_per_file": 500, "memory_limit": "100KB", **how}
    repack(given, tmp_path / "here", **how)
    url = f"s3://shared/packed {len(how)}"
    done = repack(given, url, executor=Ray(), storage_options=options, **how)
    # Nothing besides: temporary files lie there, too, until all is written.
    assert there(f"packed {len(how)}", options) == contents(tmp_path / "here")
    done.verify()
    assert repack(given, url, executor=Ray(), storage_options=options, **how).kept == 6


#: Kills its driver at a row, the first time.
PROGRAM = """
import json, os, sys
import trainpipes as tp
from trainpipes.prepare import repack
from trainpipes.writers import Ray
given, mark, address, options = sys.argv[1:]
driver = os.getpid()

def kill(row):
    if row["x"] == 1800 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(driver, 9)
    return row

rows = tp.read_parquet(given).map(kill, version=1)
repack(rows, "s3://shared/killed", executor=Ray(address), **json.loads(options))
"""


@pytest.mark.usefixtures("cluster")
def test_a_driver_that_is_killed_goes_on_by_the_same_call(
    given: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    how = {"shuffle": True, "rows_per_file": 500, "memory_limit": "100KB"}
    address = ray.get_runtime_context().gcs_address
    words = [str(given), str(tmp_path / "mark"), address]
    words.append(json.dumps({**how, "storage_options": options}))
    command = [sys.executable, "-c", PROGRAM, *words]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == -9
    left = there("killed", options)
    assert "_unfinished/about.json" in left
    assert not [name for name in left if name.startswith("part-")]
    subprocess.run(command, check=True)
    repack(given, tmp_path / "here", shuffle=True, rows_per_file=500)
    found, wanted = there("killed", options), contents(tmp_path / "here")
    assert found.keys() == wanted.keys()
    assert all(found[name] == wanted[name] for name in wanted if name != "_manifest.json")


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("method", ["write_parquet", "write_arrow", "write_json"])
def test_writers_write_the_files_of_one_process(
    method: str,
    given: Path,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fsspec

    # As fsspec reads them from its own files of settings.
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    pipe = tp.read_parquet(str(given)).shuffle(400, seed=2)
    getattr(pipe, method)(tmp_path / "here", num_files=7)
    url = f"s3://shared/{method}"
    done = getattr(pipe, method)(url, num_files=7, executor=Ray())
    assert there(method, options) == contents(tmp_path / "here")
    assert done.files[6].startswith(f"{url}/part-00006.")
    done.verify()
    before = done.files
    assert getattr(pipe, method)(f"{url}/", num_files=7, executor=Ray()).files == before
    with pytest.raises(tp.ConfigError, match=r"wrote with num_files: 7, now 8"):
        getattr(pipe, method)(url, num_files=8, executor=Ray())


@pytest.mark.usefixtures("cluster")
def test_tokenize_writes_the_files_of_one_process(
    given: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    pipe, url = tp.read_parquet(str(given)).select("text").tokenize("bytes"), "s3://shared/ids"
    how = {"executor": Ray(), "storage_options": options}
    tokenize(pipe, tmp_path / "here", executor=Threads(1))
    done = tokenize(pipe, url, **how)
    assert there("ids", options) == contents(tmp_path / "here")
    assert done.files[0] == f"{url}/part-00000.parquet"
    assert list(done.pipeline) == list(pipe)
    assert tokenize(pipe, url, **how).kept == 3
