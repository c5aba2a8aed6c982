"""Every format that is read from files keeps what Parquet keeps: order, counts, shards, resumes, messages."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from torch.utils.data import DataLoader

import trainpipes as tp
from sources.native_formats import FORMATS, Format, opened
from trainpipes.testing import check_resume, digest

SIZES = (13, 0, 1, 40, 3)

every_format = pytest.mark.parametrize("name", FORMATS)


def written(folder: Path, format: Format, sizes: tuple[int, ...] = SIZES) -> list[str]:
    paths, first = [], 0
    for number, size in enumerate(sizes):
        path = folder / f"part-{number}{format.suffix}"
        format.write(path, first, size)
        paths.append(str(path))
        first += size
    return paths


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], tp.Pipeline]:
    def make(name: str) -> tp.Pipeline:
        written(tmp_path, FORMATS[name])
        return FORMATS[name].read(tmp_path)

    return make


@every_format
def test_rows_of_a_folder_come_in_the_order_of_files_and_are_counted(name, made):
    pipe = made(name)
    assert [FORMATS[name].number(row) for row in pipe] == list(range(57))
    assert len(pipe) == 57
    assert "57" in str(pipe.explain())


@every_format
def test_shards_share_out_all_rows_once_on_any_number_of_ranks(name, made):
    pipe = made(name).sharding_filter(4).shuffle(9, seed=2).batch(4)
    whole = [digest(batch) for batch in pipe]
    numbers = [
        FORMATS[name].number(row)
        for batch in pipe.distributed(rank=0, world_size=1)
        for row in batch
    ]
    assert sorted(numbers) == list(range(57))
    for world in (2, 4):
        ranks = [
            [digest(b) for b in pipe.distributed(rank=r, world_size=world)] for r in range(world)
        ]
        side_by_side = [item for step in zip(*ranks, strict=True) for item in step]
        assert side_by_side == whole[: len(side_by_side)]
        assert len(whole) - len(side_by_side) < world


@every_format
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumes_exactly_and_in_fresh_processes(name, every, made):
    pipe = made(name)
    shuffled = pipe.sharding_filter(4).shuffle(9, seed=2).batch(3)
    check_resume(shuffled, epochs=2, processes=1, every=every)
    check_resume(pipe.batch(5), epochs=2, processes=0, every=every)


@every_format
def test_worker_processes_give_the_same_rows(name, made):
    pipe = made(name).sharding_filter(4).batch(4)
    loader = DataLoader(pipe, batch_size=None, num_workers=2)
    assert sorted(digest(item) for item in loader) == sorted(digest(item) for item in pipe)


@every_format
def test_a_pipeline_that_was_read_from_can_be_pickled(name, made):
    pipe = made(name)
    rows = list(pipe)
    again = pickle.loads(pickle.dumps(pipe))
    assert [digest(row) for row in again] == [digest(row) for row in rows]
    source = opened(pipe)
    reader = pickle.loads(pickle.dumps(source)).reader()
    assert len(reader.read(0, 0, int(source.lengths[0]))) == int(source.lengths[0])


@every_format
def test_files_on_another_machine_are_read_alike(name, tmp_path):
    format = FORMATS[name]
    paths = written(tmp_path, format)
    memory = fsspec.filesystem("memory")
    folder = f"/formats/{tmp_path.name}"
    for path in paths:
        memory.pipe_file(f"{folder}/{os.path.basename(path)}", Path(path).read_bytes())
    there = format.read(f"memory:/{folder}").shuffle(9).batch(4)
    here = format.read(tmp_path).shuffle(9).batch(4)
    assert [digest(item) for item in there] == [digest(item) for item in here]


@every_format
def test_a_folder_of_files_without_rows_gives_none(name, tmp_path):
    written(tmp_path, FORMATS[name], (0, 0))
    pipe = FORMATS[name].read(tmp_path).batch(4)
    assert len(pipe) == 0
    assert list(pipe) == []


@every_format
def test_many_files_of_one_row_are_read_in_natural_order(name, tmp_path):
    paths = written(tmp_path, FORMATS[name], (1,) * 60)
    assert [FORMATS[name].number(row) for row in FORMATS[name].read(tmp_path)] == list(range(60))
    shuffled = FORMATS[name].read(paths).sharding_filter(4).shuffle(10).batch(7)
    assert sorted(FORMATS[name].number(r) for b in shuffled for r in b) == list(range(60))


@every_format
def test_a_file_that_is_none_of_its_kind_is_named_with_a_way_out(name, tmp_path):
    paths = written(tmp_path, FORMATS[name])
    Path(paths[1]).write_bytes(b"\x89PNG this is something else altogether " * 30)
    with pytest.raises(tp.UnreadableError) as caught:
        list(FORMATS[name].read(tmp_path))
    assert paths[1] in str(caught.value)
    assert "leave them out" in str(caught.value)
    assert caught.value.path == paths[1]


@every_format
def test_a_file_that_is_cut_off_is_named(name, tmp_path):
    format = FORMATS[name]
    if not format.cut:
        pytest.skip("a file of this kind has no end of its own")
    paths = written(tmp_path, format)
    whole = Path(paths[3]).read_bytes()
    for part in (0.3, 0.6, 0.8):
        Path(paths[3]).write_bytes(whole[: int(len(whole) * part)])
        with pytest.raises(tp.UnreadableError) as caught:
            list(format.read(tmp_path))
        assert paths[3] in str(caught.value)


@every_format
def test_a_file_that_changes_or_goes_after_it_was_listed_is_an_error(name, tmp_path):
    format = FORMATS[name]
    paths = written(tmp_path, format)
    pipe = format.read(tmp_path)
    assert len(pipe) == 57
    format.write(Path(paths[3]), 100, 41)
    with pytest.raises(tp.DataChangedError, match="has changed since"):
        list(pipe)
    pipe = format.read(tmp_path)
    assert len(pipe) == 58
    os.unlink(paths[3])
    with pytest.raises(tp.MissingFilesError, match="no longer is"):
        list(pipe)


@every_format
def test_a_state_is_refused_over_other_files(name, tmp_path):
    format = FORMATS[name]
    written(tmp_path, format)
    pipe = format.read(tmp_path).batch(4)
    iterator = iter(pipe)
    next(iterator)
    state = iterator.state_dict()
    format.write(tmp_path / f"part-9{format.suffix}", 57, 5)
    with pytest.raises(tp.StateError):
        format.read(tmp_path).batch(4).load_state_dict(state)


@every_format
def test_a_reader_needs_files_below_it(name, tmp_path):
    written(tmp_path, FORMATS[name])
    reader = FORMATS[name].read(tmp_path).stages[-1]
    with pytest.raises(tp.ConfigError):
        list(tp.from_tensors([1]).then(reader))
