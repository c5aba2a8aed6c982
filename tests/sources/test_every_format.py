"""Every format that is read from files keeps what the others keep: rows, order, counts, shards, resumes,
messages; and a resume reads no more than it must."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader, IterableDataset

import trainpipes as tp
from every_format import FORMATS, opened, table, written
from resuming import check_resume
from trainpipes.testing import digest

COUNTS = (50, 0, 1, 160, 32)
FEW = (9, 0, 1, 24, 3)
every = pytest.mark.parametrize("name", FORMATS)


def numbers(name: str, items: list[Any]) -> list[list[int]]:
    """The numbers of the rows in batches."""
    return [[FORMATS[name].number(row) for row in batch] for batch in items]


@pytest.fixture(scope="module")
def few(folder: Path) -> Callable[[str], Path]:
    """A folder of a few files of a format, for those who change nothing in it."""

    @cache
    def make(name: str) -> Path:
        (made := folder / name).mkdir()
        written(made, FORMATS[name], FEW, 7)
        return made

    return make


@every
def test_rows_of_a_folder_come_in_the_order_of_files_and_are_counted(name, few):
    pipe = FORMATS[name].read(few(name), 7)
    assert [FORMATS[name].number(row) for row in pipe] == list(range(37))
    assert len(pipe) == 37
    assert "37" in str(pipe.explain())
    if name != "zip":  # is no reader
        with pytest.raises(tp.ConfigError):
            list(tp.from_tensors([1]).then(pipe.stages[-1]))


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
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumes_exactly(name, every, few):
    pipe = FORMATS[name].read(few(name), 7)
    shuffled = pipe.sharding_filter(4).shuffle(9, seed=2).batch(3)
    check_resume(shuffled, epochs=2, processes=2 if every == 1 else 0, every=every, points=4)
    check_resume(pipe.batch(5), epochs=1 if every > 1 else 2, processes=0, every=every, points=4)


class OneAfterTheOther(IterableDataset):
    """The items of several pipelines, each with a name: so that two workers read all of them."""

    def __init__(self, pipes):
        self.pipes = pipes

    def __iter__(self):
        for name, pipe in self.pipes.items():
            for item in pipe:
                yield name, digest(item)


def test_worker_processes_give_the_same_rows(few):
    read = {name: format.read(few(name), 7) for name, format in FORMATS.items()}
    pipes = {name: pipe.sharding_filter(4).batch(4) for name, pipe in read.items()}
    expected = sorted(OneAfterTheOther(pipes))
    loader = DataLoader(OneAfterTheOther(pipes), batch_size=None, num_workers=2)
    assert sorted(map(tuple, loader)) == expected
    assert {name for name, _ in expected} == {*FORMATS}


@every
def test_a_pipeline_that_was_read_from_can_be_pickled(name, few):
    pipe = FORMATS[name].read(few(name), 7)
    rows = list(pipe)
    again = pickle.loads(pickle.dumps(pipe))
    assert [digest(row) for row in again] == [digest(row) for row in rows]
    if name != "zip":
        source = opened(pipe)
        reader = pickle.loads(pickle.dumps(source)).reader()
        assert len(reader.read(0, 0, int(source.lengths[0]))) == int(source.lengths[0])


@pytest.mark.sample(8)
@every
def test_files_on_another_machine_are_read_alike(name, few):
    memory, there = fsspec.filesystem("memory"), f"/formats/{name}"
    for path in few(name).iterdir():
        memory.pipe_file(f"{there}/{path.name}", path.read_bytes())
    read = [FORMATS[name].read(folder, 7) for folder in (few(name), f"memory:/{there}")]
    one, other = ([digest(item) for item in rows.shuffle(9).batch(4)] for rows in read)
    assert one == other


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
def test_a_file_that_changes_or_goes_after_it_was_listed_is_an_error(name, tmp_path):
    format = FORMATS[name]
    paths = written(tmp_path, format, FEW, 7)
    pipe = format.read(tmp_path, 7)
    assert len(pipe) == 37
    Path(paths[3]).write_bytes(format.write(table(100, 25), 7))
    with pytest.raises(tp.DataChangedError, match="has changed since"):
        list(pipe)
    pipe = format.read(tmp_path, 7)
    assert len(pipe) == 38
    os.unlink(paths[3])
    with pytest.raises(tp.MissingFilesError, match="no longer is"):
        list(pipe)


@every
def test_a_state_is_refused_over_other_files(name, few):
    paths = sorted(map(str, few(name).iterdir()))
    for saved, now in ((paths, paths[:-1]), (paths[:-1], paths)):
        state = FORMATS[name].read(saved, 7).batch(4).state_at(1)
        with pytest.raises(tp.StateError):
            FORMATS[name].read(now, 7).batch(4).load_state_dict(state)


@pytest.mark.sample(11)
@every
def test_a_state_of_any_number_of_ranks_goes_on_with_any_other(few, name):
    def make() -> tp.Pipeline:
        return FORMATS[name].read(few(name), 7).sharding_filter(4).shuffle(9, seed=1).batch(3)

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


def keep(row: dict[str, Any]) -> bool:
    return True


SHUFFLED = "shuffled"
ABOVE: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    SHUFFLED: lambda p: p.sharding_filter(4).shuffle(20, seed=1),
    "one shard": lambda p: p,
    "several": lambda p: p.sharding_filter(4),
    "in stride": lambda p: p.sharding_filter(4, split="stride"),
    "not counted": lambda p: p.sharding_filter(4).filter(keep),
}


def ends() -> Iterator[Any]:
    """Formats and what stands above them; of most formats some of the ways in an ordinary run."""
    seekable = ["npy", "npz", "tar", "json lines", "json array", "paragraphs, zstd", "csv", "zip"]
    seekable += ["json lines, gzip", "json lines, zstd", "tsv, gzip", "text"]
    for place, name in enumerate(seekable):
        marks = [pytest.mark.slow] if place > 7 else []
        yield pytest.param(name, SHUFFLED, marks=marks)
    names = ["json lines", "json lines, zstd", "csv", "text", "tar", "arrow", "npz", "own format"]
    for place, name in enumerate(names):
        for number, above in enumerate(list(ABOVE)[1:]):
            slow = [pytest.mark.slow] if place and (place + number) % 3 else []
            yield pytest.param(name, above, marks=slow)


@cache
def long_file(name: str, rows: int, total: int) -> bytes:
    return FORMATS[name].write(table(0, total), rows)


@pytest.mark.sample(10)
@pytest.mark.parametrize(("name", "above"), list(ends()))
def test_a_resume_near_the_end_reads_little_more_than_what_is_left(tmp_path, counted, name, above):
    format, url = FORMATS[name], f"counted://d/a{FORMATS[name].suffix}"
    rows, total = (40, 8_000) if name == "npz" else (20, 2_000)  # its last 64 KB say what is in it
    data = long_file(name, rows, total)
    counted.pipe_file(url, data)

    def make() -> tp.Pipeline:
        return ABOVE[above](format.read(url, rows, index=str(tmp_path / "index"))).batch(25)

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
    # Of each shard a block; of a shuffled one a window of two blocks at most, which lies in three; where two
    # readers go side by side, one of them decodes again what a window's ends cut.
    blocks = 1.5 if above == "one shard" else 4.5
    if above == SHUFFLED:
        blocks = 4 * (5 if name == "zip" else 3)
    # And what a block may begin in.
    member = 2 * len(data) / 400 if "gzip" in name or "zstd" in name else 0
    part = 0.1 + blocks * rows / total
    most = 1.06 * part * len(data) + part * total / rows * member
    assert 0 < counted.fetched < format.reads * most < format.reads * 0.43 * len(data)


@pytest.mark.sample(8)
@every
def test_many_files_of_few_rows_and_one_of_many(tmp_path, name):
    sizes = (*(n % 3 for n in range(13)), 200, 1)
    paths = written(tmp_path, FORMATS[name], sizes, 30)
    pipe = FORMATS[name].read(paths, 30).sharding_filter(4).shuffle(60, seed=0).batch(32)
    assert len(pipe) == -(-sum(sizes) // 32)
    found = numbers(name, list(pipe))
    assert sorted(n for batch in found for n in batch) == list(range(sum(sizes)))
    in_order = FORMATS[name].read(tmp_path, 30)  # natural: 2 before 10
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
    paths = written(tmp_path, FORMATS[name], (6,) * 40, 10)
    other = pa.table({"x": [{"z": 1}], "y": [0.5], "text": ["t"]})
    if name == "csv":
        other = pa.table({"x": [1], "z": [0.5], "text": ["t"]})
    Path(paths[20]).write_bytes(format.write(other, 10))
    with pytest.raises((tp.SchemaError, tp.UnreadableError)) as caught:
        list(format.read(paths, 10))
    assert paths[20] in str(caught.value)
