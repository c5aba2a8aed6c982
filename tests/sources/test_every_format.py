"""Every format that is read from files keeps what the others keep: rows, order, counts, shards, resumes,
messages; and a resume reads no more than it must."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader, IterableDataset

import trainpipes as tp
from every_format import FORMATS, opened, table, written
from trainpipes.testing import check_resume, digest

COUNTS = (100, 0, 1, 333, 64)
FEW = (13, 0, 1, 40, 3)
every = pytest.mark.parametrize("name", FORMATS)


def numbers(name: str, items: list[Any]) -> list[list[int]]:
    """The numbers of the rows in batches."""
    return [[FORMATS[name].number(row) for row in batch] for batch in items]


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], tp.Pipeline]:
    def make(name: str) -> tp.Pipeline:
        written(tmp_path, FORMATS[name], FEW, 7)
        return FORMATS[name].read(tmp_path, 7)

    return make


@every
def test_rows_of_a_folder_come_in_the_order_of_files_and_are_counted(name, made):
    pipe = made(name)
    assert [FORMATS[name].number(row) for row in pipe] == list(range(57))
    assert len(pipe) == 57
    assert "57" in str(pipe.explain())


@pytest.mark.parametrize("rows", [10, pytest.param(64, marks=pytest.mark.slow)])
def test_the_same_rows_in_any_format_give_the_same_batches(tmp_path, rows):
    seen: dict[str, list[str]] = {}
    orders = {}
    for name, format in FORMATS.items():
        folder = tmp_path / name
        folder.mkdir()
        paths = written(folder, format, COUNTS, rows)
        read = format.read(paths, rows).sharding_filter(4).shuffle(60, seed=3)
        items = list(read.batch(8))
        orders[name] = numbers(name, items)
        if format.columns and format.blocks:
            assert items[0][0].keys() == {"x", "y", "text"}
            batches = read.tokenize("bytes", "text").batch(8).pad_collate()
            seen[name] = [digest(item) for several in (items, batches) for item in several]
    assert len(seen) > 9
    assert len({tuple(found) for found in seen.values()}) == 1
    for name, found in orders.items():
        if FORMATS[name].blocks:
            assert found == orders["parquet"]
        assert sorted(n for batch in found for n in batch) == list(range(sum(COUNTS)))


@every
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumes_exactly(name, every, made):
    pipe = made(name)
    shuffled = pipe.sharding_filter(4).shuffle(9, seed=2).batch(3)
    check_resume(shuffled, epochs=2, processes=2 if every == 1 else 0, every=every)
    check_resume(pipe.batch(5), epochs=2, processes=0, every=every)


class OneAfterTheOther(IterableDataset):
    """The items of several pipelines, each with a name: so that two workers read all of them."""

    def __init__(self, pipes):
        self.pipes = pipes

    def __iter__(self):
        for name, pipe in self.pipes.items():
            for item in pipe:
                yield name, digest(item)


def test_worker_processes_give_the_same_rows(tmp_path):
    pipes = {}
    for name, format in FORMATS.items():
        (folder := tmp_path / name).mkdir()
        written(folder, format, FEW, 7)
        pipes[name] = format.read(folder, 7).sharding_filter(4).batch(4)
    expected = sorted(OneAfterTheOther(pipes))
    loader = DataLoader(OneAfterTheOther(pipes), batch_size=None, num_workers=2)
    assert sorted(map(tuple, loader)) == expected
    assert {name for name, _ in expected} == {*FORMATS}


@every
def test_a_pipeline_that_was_read_from_can_be_pickled(name, made):
    pipe = made(name)
    rows = list(pipe)
    again = pickle.loads(pickle.dumps(pipe))
    assert [digest(row) for row in again] == [digest(row) for row in rows]
    if name != "zip":
        source = opened(pipe)
        reader = pickle.loads(pickle.dumps(source)).reader()
        assert len(reader.read(0, 0, int(source.lengths[0]))) == int(source.lengths[0])


@every
def test_files_on_another_machine_are_read_alike(name, made, tmp_path):
    here = made(name).shuffle(9).batch(4)
    memory = fsspec.filesystem("memory")
    folder = f"/formats/{tmp_path.name}"
    for path in tmp_path.iterdir():
        memory.pipe_file(f"{folder}/{path.name}", path.read_bytes())
    there = FORMATS[name].read(f"memory:/{folder}", 7).shuffle(9).batch(4)
    assert [digest(item) for item in there] == [digest(item) for item in here]


@every
def test_a_folder_of_files_without_rows_gives_none(name, tmp_path):
    if name == "zip":
        pytest.skip("chooses columns, and no line says that they are there")
    written(tmp_path, FORMATS[name], (0, 0), 7)
    pipe = FORMATS[name].read(tmp_path, 7).batch(4)
    assert len(pipe) == 0
    assert list(pipe) == []


@every
def test_a_file_that_is_none_of_its_kind_is_named_with_a_way_out(name, tmp_path):
    paths = written(tmp_path, FORMATS[name], FEW, 7)
    Path(paths[1]).write_bytes(b"\x89PNG this is something else altogether " * 30)
    with pytest.raises(tp.UnreadableError) as caught:
        list(FORMATS[name].read(tmp_path, 7))
    assert paths[1] in str(caught.value)
    assert "leave them out" in str(caught.value)
    assert caught.value.path == paths[1]


@every
def test_a_file_that_is_cut_off_is_named(name, tmp_path):
    format = FORMATS[name]
    if not format.cut:
        pytest.skip("a file of this kind has no end of its own")
    paths = written(tmp_path, format, FEW, 7)
    whole = Path(paths[3]).read_bytes()
    for part in (0.3, 0.6, 0.8):
        Path(paths[3]).write_bytes(whole[: int(len(whole) * part)])
        with pytest.raises(tp.UnreadableError) as caught:
            list(format.read(tmp_path, 7))
        assert paths[3] in str(caught.value)


@every
def test_a_file_that_changes_or_goes_after_it_was_listed_is_an_error(name, made, tmp_path):
    format, pipe = FORMATS[name], made(name)
    assert len(pipe) == 57
    path = tmp_path / f"3{format.suffix}"
    path.write_bytes(format.write(table(100, 41), 7))
    with pytest.raises(tp.DataChangedError, match="has changed since"):
        list(pipe)
    pipe = format.read(tmp_path, 7)
    assert len(pipe) == 58
    os.unlink(path)
    with pytest.raises(tp.MissingFilesError, match="no longer is"):
        list(pipe)


@every
def test_a_state_is_refused_over_other_files(name, made, tmp_path):
    format, pipe = FORMATS[name], made(name).batch(4)
    iterator = iter(pipe)
    next(iterator)
    state = iterator.state_dict()
    (tmp_path / f"9{format.suffix}").write_bytes(format.write(table(57, 5), 7))
    with pytest.raises(tp.StateError):
        format.read(tmp_path, 7).batch(4).load_state_dict(state)


@every
def test_a_reader_needs_files_below_it(name, made):
    if name == "zip":
        pytest.skip("is no reader")
    with pytest.raises(tp.ConfigError):
        list(tp.from_tensors([1]).then(made(name).stages[-1]))


@every
def test_a_state_of_any_number_of_ranks_goes_on_with_any_other(tmp_path, name):
    paths = written(tmp_path, FORMATS[name], FEW, 7)
    make = lambda: FORMATS[name].read(paths, 7).sharding_filter(4).shuffle(9, seed=1).batch(4)  # noqa: E731
    whole = numbers(name, list(make()))
    found: list[list[int]] = []
    states: list[dict[str, Any]] = []
    for world in (2, 4, 1):
        ranks = []
        for rank in range(world):
            loader = tp.Loader(make().distributed(rank=rank, world_size=world))
            if states:
                loader.load_state_dict(tp.merge_states(states))
            ranks.append(loader)
        each = [iter(loader) for loader in ranks]
        steps = 4 // world if world > 1 else 10**6
        for _ in range(steps):
            step = [item for one in each if (item := next(one, None)) is not None]
            if not step:
                break
            found += numbers(name, step)
        states = [loader.state_dict() for loader in ranks]
    assert found == whole


SEEKABLE = ["npy", "npz", "tar", "json lines", "json array", "json lines, gzip", "json lines, zstd"]


@pytest.mark.parametrize("name", [*SEEKABLE, "csv", "tsv, gzip", "text", "paragraphs, zstd", "zip"])
def test_a_resume_near_the_end_reads_little_more_than_what_is_left(tmp_path, counted, name):
    rows, shards, total = 40, 4, 8_000
    data = FORMATS[name].write(table(0, total), rows)
    counted.pipe_file(f"/d/a{FORMATS[name].suffix}", data)

    def make() -> tp.Pipeline:
        url = f"counted://d/a{FORMATS[name].suffix}"
        read = FORMATS[name].read(url, rows, index=str(tmp_path / "index"))
        return read.sharding_filter(shards).shuffle(rows, seed=1).batch(25)

    iterator = iter(make())
    for _ in range(int(0.9 * total / 25)):
        next(iterator)
    state = iterator.state_dict()
    rest = [digest(item) for item in iterator]
    again = make()
    again.load_state_dict(state)
    counted.fetched = 0
    assert [digest(item) for item in again] == rest
    # What is left, and for each shard a window of two blocks at most, which lies in three; where two readers
    # go side by side, one of them decodes again what a window's ends cut.
    part = 0.1 + shards * (5 if name == "zip" else 3) * rows / total
    member = (
        len(data) / 400 if "gzip" in name or "zstd" in name else 0
    )  # which a block may begin in
    most = part * len(data) + part * total / rows * 2 * member
    assert 0 < counted.fetched < FORMATS[name].reads * most < FORMATS[name].reads * 0.4 * len(data)


def keep(row: dict[str, Any]) -> bool:
    return True


UNSHUFFLED: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "one shard": lambda rows: rows,
    "several": lambda rows: rows.sharding_filter(4),
    "in stride": lambda rows: rows.sharding_filter(4, split="stride"),
    "not counted": lambda rows: rows.sharding_filter(4).filter(keep),
}


def in_order():
    """Formats and ways to read in order; of most formats half of the ways in an ordinary run."""
    names = ["json lines", "json lines, zstd", "csv", "text", "tar", "arrow", "npz", "own format"]
    for place, name in enumerate(names):
        for number, kind in enumerate(UNSHUFFLED):
            slow = [pytest.mark.slow] if place and (place + number) % 2 else []
            yield pytest.param(name, kind, marks=slow)


@pytest.mark.parametrize(("name", "kind"), list(in_order()))
def test_unshuffled_a_resume_reads_what_is_left_and_a_block_for_each_shard(
    tmp_path, counted, name, kind
):
    rows, total = 40, 8_000
    data = FORMATS[name].write(table(0, total), rows)
    counted.pipe_file(f"/d/a{FORMATS[name].suffix}", data)

    def make() -> tp.Pipeline:
        url = f"counted://d/a{FORMATS[name].suffix}"
        read = FORMATS[name].read(url, rows, index=str(tmp_path / "index"))
        return UNSHUFFLED[kind](read).batch(25)

    iterator = iter(make())
    for _ in range(int(0.9 * total / 25) + 1):
        next(iterator)
    state = iterator.state_dict()
    rest = [digest(item) for item in iterator]
    again = iter(make())
    again.load_state_dict(state)
    assert again.state_dict() == state  # whatever else must be read before the first row has been
    counted.fetched = 0
    assert [digest(item) for item in again] == rest
    member = len(data) / 400 if "zstd" in name else 0  # which a block may begin in
    shards = 1 if kind == "one shard" else 4
    part = 0.1 + (shards + 0.5) * rows / total
    assert 0 < counted.fetched < 1.06 * part * len(data) + 2 * part * total / rows * member


@every
def test_many_files_of_few_rows_and_one_of_many(tmp_path, name):
    sizes = (*(n % 3 for n in range(40)), 700, 1)
    paths = written(tmp_path, FORMATS[name], sizes, 100)
    pipe = FORMATS[name].read(paths, 100).sharding_filter(4).shuffle(200, seed=0).batch(32)
    assert len(pipe) == -(-sum(sizes) // 32)
    found = numbers(name, list(pipe))
    assert sorted(n for batch in found for n in batch) == list(range(sum(sizes)))
    in_order = FORMATS[name].read(tmp_path, 100)  # natural: 2 before 10
    assert [FORMATS[name].number(row) for row in in_order] == list(range(sum(sizes)))


@every
def test_a_column_that_is_not_there_is_named_with_the_nearest(tmp_path, name):
    if not FORMATS[name].columns or name.startswith("own functions") or name == "zip":
        pytest.skip("has no choice of columns here")
    paths = written(tmp_path, FORMATS[name], (5, 5), 10)
    assert list(FORMATS[name].read(paths, 10, columns=["y"]))[1] == {"y": 1 / 7}
    with pytest.raises(tp.SchemaError, match=r"no column 'texts' \(did you mean 'text'\?\)"):
        len(FORMATS[name].read(paths, 10, columns=["texts"]))


@every
def test_a_file_with_another_schema_is_refused_and_named(tmp_path, name):
    format = FORMATS[name]
    if not format.columns:
        pytest.skip("has one schema")
    paths = written(tmp_path, FORMATS[name], (50,) * 40, 10)
    other = pa.table({"x": [{"z": 1}], "y": [0.5], "text": ["t"]})
    if name == "csv":
        other = pa.table({"x": [1], "z": [0.5], "text": ["t"]})
    Path(paths[20]).write_bytes(format.write(other, 10))
    with pytest.raises((tp.SchemaError, tp.UnreadableError)) as caught:
        list(format.read(paths, 10))
    assert paths[20] in str(caught.value)
