"""Files on S3: a server on this machine, and the real s3fs."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes.errors import MissingFilesError
from trainpipes.filesystems.retry import Requests
from trainpipes.sources import read_parquet
from trainpipes.sources.files import file_bytes as remote
from trainpipes.sources.files.file_source import FileSource
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.sources.read_parquet import ReadParquet

#: Rows of each row group of each file; the last is large enough to be fetched in parts.
FILES = {"2.parquet": (5, 0, 7, 3, 4), "10.parquet": (1,), "more/1.parquet": (3000,)}


def rows(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    texts = pa.array([f"{n} " * 40 for n in numbers], pa.string())
    return pa.table({"id": pa.array(numbers, pa.int64()), "text": texts})


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    first = 0
    for name, groups in FILES.items():
        path = folder / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        small = {"data_page_size": 8000, "write_batch_size": 50, "use_dictionary": False}
        with pq.ParquetWriter(path, rows(0, 0).schema, compression="none", **small) as writer:
            for count in groups:
                writer.write_table(rows(first, count))
                first += count
    (folder / "train" / "_SUCCESS").touch()
    return folder


@pytest.fixture(scope="module")
def bucket(local: Path, s3: dict[str, Any]) -> str:
    place = f"test-s3/{uuid4().hex}"  # one server serves all tests, and a worker may set up twice
    fsspec.filesystem("s3", **s3).put(f"{local}/train", f"{place}/train", recursive=True)
    return f"s3://{place}"


def source(url: Any, s3: dict[str, Any], columns: list[str] | None = None) -> FileSource:
    return ReadParquet(columns=columns)._open_on([ListFiles(urls=url, storage_options=s3)])


def read_all(found: FileSource) -> pa.Table:
    reader = found.reader()
    return pa.concat_tables(reader.read(n, 0, m) for n, m in enumerate(found.lengths.tolist()))


def test_folders_globs_and_lists_of_urls_stand_for_objects(bucket, s3):
    train = f"{bucket}/train"
    wanted = [f"{train}/{name}" for name in FILES]
    for urls in (
        bucket,
        f"{train}/",
        f"{bucket}/**/*.parquet",
        [f"{train}/*.parquet", f"{train}/more"],
    ):
        files = ListFiles(urls=urls, storage_options=s3).files()
        assert files.names == wanted
    assert ListFiles(urls=wanted[1], storage_options=s3).files().names == wanted[1:2]


def test_objects_that_stand_for_folders_are_no_files(s3):
    system, root = fsspec.filesystem("s3", **s3), f"test-s3/{uuid4().hex}"
    for name, content in {"": b"", "a/": b"", "a/b/": b"", "a/b/1.bin": b"one"}.items():
        system.call_s3("put_object", Bucket="test-s3", Key=f"{root[8:]}/{name}", Body=content)
    for pattern in ("", "/**", "/**/*", "/a/**"):
        files = tp.list_files(f"s3://{root}{pattern}", storage_options=s3)
        assert [row["bytes"] for row in files.read_bytes()] == [b"one"]


def test_the_rows_and_the_fingerprint_are_those_of_the_local_files(bucket, local, s3):
    here, there = source(local, {}), source(bucket, s3)
    assert there.fingerprint() == here.fingerprint()
    assert read_all(there).equals(read_all(here))
    assert there.place(2, 1).path == f"{bucket}/train/2.parquet"


def test_a_large_row_group_is_fetched_in_parts_and_small_ones_together(
    bucket, local, s3, monkeypatch
):
    here, there = source(local, {}, ["text"]), source(bucket, s3, ["text"])
    asked: list[int] = []
    ranges = Requests.ranges

    def count(requests: Any, system: Any, path: str, wanted: Any, *more: Any) -> Any:
        asked.append(sum(stop - start for start, stop in wanted))
        return ranges(requests, system, path, wanted, *more)

    monkeypatch.setattr(Requests, "ranges", count)
    monkeypatch.setattr(read_parquet, "BUFFER_BYTES", 16 << 10)
    monkeypatch.setattr(remote, "HELD_BYTES", 100_000)
    monkeypatch.setattr(remote, "LEAST_BYTES", 10_000)
    reader, last = there.reader(), len(there.lengths) - 1
    wanted = here.reader().read(last, 1000, 3000)
    parts = [reader.read(last, start, start + 500) for start in range(1000, 3000, 500)]
    assert pa.concat_tables(parts).equals(wanted)
    assert len(asked) > 3
    assert max(asked) < 200_000
    reader.read(last, 0, 10)  # back to the start
    asked.clear()
    for most in (4, 3):  # the footer is fetched once: replies are of its version
        reader.expect(range(5))
        for block in range(5):
            reader.read(block, 0, int(there.lengths[block]))
        assert len(asked) <= most
        asked.clear()
        reader.read(last, 0, 10)
        asked.clear()


def test_options_may_be_given_to_the_reader_and_stay_out_of_states(bucket, s3):
    stage = ReadParquet(columns=["id"], storage_options=s3)
    found = stage._open_on([ListFiles(urls=bucket)])
    assert found.lengths.sum() == sum(map(sum, FILES.values()))
    assert "hush" not in f"{stage.identity()} {found.fingerprint()} {stage} {found.describe()}"


def _in_a_child(found: FileSource, answer: Any) -> None:
    answer.put(found.reader().read(2, 0, 7).column("id").to_pylist())


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_source_that_was_opened_here_reads_in_a_child_process(bucket, s3, method):
    found = source(bucket, s3)
    found.reader().read(0, 0, 1)
    context = multiprocessing.get_context(method)
    answer = context.Queue()
    child = context.Process(target=_in_a_child, args=(found, answer))
    child.start()
    assert answer.get(timeout=60) == list(range(5, 12))
    child.join(10)
    assert child.exitcode == 0
    assert pickle.loads(pickle.dumps(found)).reader().read(0, 0, 1).num_rows == 1


def test_what_is_not_there_is_named_with_what_is(bucket, s3):
    def refusal(url: str) -> str:
        with pytest.raises(MissingFilesError) as caught:
            ListFiles(urls=url, storage_options=s3).files()
        return str(caught.value)

    assert refusal(f"{bucket}/trian/*.parquet") == (
        f"no file matches '{bucket}/trian/*.parquet' (did you mean 'train'?); the nearest folder that "
        f"exists is {bucket}, with: train/"
    )
    assert "with: 2.parquet, 10.parquet, _SUCCESS, more/" in refusal(f"{bucket}/train/*.json")
    assert "there is no file or folder" in refusal(f"{bucket}/train/3.parquet")
    assert "and nothing above it can be listed" in refusal("s3://no-such-bucket/x/*.parquet")
