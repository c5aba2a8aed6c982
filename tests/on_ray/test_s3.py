"""What is written on a Ray cluster to S3, a server on this machine, has the bytes that one process writes
to a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
    how: dict[str, Any], given: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    how = {"rows_per_file": 500, "memory_limit": "100KB", **how}
    repack(given, tmp_path / "here", **how)
    url = f"s3://shared/packed {len(how)}"
    done = repack(given, url, executor=Ray(), storage_options=options, **how)
    # Nothing besides: temporary files lie there, too, until all is written.
    assert there(f"packed {len(how)}", options) == contents(tmp_path / "here")
    done.verify()
    assert repack(given, url, executor=Ray(), storage_options=options, **how).kept == 6


@pytest.mark.usefixtures("cluster")
def test_a_writer_writes_the_files_of_one_process(
    given: Path, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As fsspec reads them from its own files of settings.
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    pipe, url = tp.read_parquet(str(given)).shuffle(400, seed=2), "s3://shared/written"
    pipe.write_parquet(tmp_path / "here", num_files=7)
    done = pipe.write_parquet(url, num_files=7, executor=Ray())
    assert there("written", options) == contents(tmp_path / "here")
    assert done.files[6].startswith(f"{url}/part-00006.")
    done.verify()
    assert pipe.write_parquet(f"{url}/", num_files=7, executor=Ray()).files == done.files


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
