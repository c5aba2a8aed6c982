"""windows: stretches of neighbors within a series, wherever blocks, files and shards end."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from resuming import check_resume

#: Lengths of episodes, file by file; the last of one file and the first of the next have one number.
FILES = [[13, 4, 1, 20], [9, 9, 2], [31]]


def episodes() -> list[list[tuple[str, int]]]:
    """Of each file the episode and the number of each of its rows."""
    found, row, episode = [], 0, -1
    for lengths in FILES:
        file = []
        for k, length in enumerate(lengths):
            episode += k > 0 or not found
            file += [(f"e{episode}", row + n) for n in range(length)]
            row += length
        found.append(file)
    return found


def table_of(rows: list[tuple[str, int]]) -> pa.Table:
    numbers = [n for _, n in rows]
    pixels = np.array(numbers, np.uint8).repeat(6)
    frames = pa.FixedSizeListArray.from_arrays(pa.array(pixels), 6)
    columns = {
        "episode": [name for name, _ in rows], "x": numbers, "frame": frames,
        "text": [f"t{n}" for n in numbers], "ids": [[n] * (n % 3) for n in numbers],
    }  # fmt: skip
    return pa.table(columns)


@pytest.fixture
def files(tmp_path: Path) -> str:
    for number, rows in enumerate(episodes()):
        path = tmp_path / "data" / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(table_of(rows), path, row_group_size=7)
    return str(tmp_path / "data" / "*.parquet")


def expected(length: int, stride: int, within: bool = True) -> list[list[int]]:
    found = []
    for file in episodes():
        names = dict.fromkeys(name for name, _ in file) if within else {None: None}
        for name in names:
            rows = [n for own, n in file if name in (None, own)]
            starts = range(0, len(rows) - length + 1, stride)
            found += [rows[start : start + length] for start in starts]
    return found


def xs(items: Any) -> list[list[int]]:
    return [row["x"].tolist() for row in items]


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("length", "stride"), [(1, 1), (4, 1), (4, None), (5, 3), (8, 2), (3, 11), (31, 1)]
)
@pytest.mark.parametrize("within", ["episode", None])
def test_windows_are_all_stretches_of_each_series(
    length: int, stride: int | None, within: str | None, files: str
) -> None:
    wanted = expected(length, stride or length, within is not None)
    rows = tp.read_parquet(files)
    pipe = rows.windows(length, stride=stride, within=within)
    assert xs(pipe) == wanted
    assert len(pipe) == len(wanted)
    assert sorted(xs(pipe.sharding_filter(5).shuffle(7, seed=2))) == sorted(wanted)
    in_memory = tp.concat([tp.from_arrow(table_of(file)) for file in episodes()])
    if within is not None:
        pipe = in_memory.windows(length, stride=stride, within=within)
        assert xs(pipe) == wanted
        drawn = pipe.shuffle(scope="global", seed=1).batch(3)
        assert sorted(row["x"].tolist() for batch in drawn for row in batch) == sorted(wanted)


def test_columns_come_by_their_kind(files: str) -> None:
    pipe = tp.read_parquet(files).windows(4, stride=2, within="episode")
    for row in pipe:
        first = int(row["x"][0])
        assert row["x"].dtype == np.int64
        assert isinstance(row["episode"], str)
        assert row["frame"].shape == (4, 6)
        assert row["frame"].dtype == np.uint8
        assert (row["frame"][:, 0] == row["x"]).all()
        assert row["text"] == [f"t{n}" for n in range(first, first + 4)]
        assert row["ids"] == [[n] * (n % 3) for n in range(first, first + 4)]
    batch = next(iter(pipe.select("x", "frame").batch(3).collate()))
    assert batch["x"].shape == (3, 4)
    assert batch["frame"].shape == (3, 4, 6)
    padded = next(iter(pipe.select("x", "frame", "episode").batch(3).pad_collate()))
    assert padded["frame"].shape == (3, 4, 6)
    assert padded["episode"] == ["e0"] * 3


def test_nulls_and_other_types_stay(tmp_path: Path) -> None:
    columns = {
        "a": pa.array([1, None, 3, 4], pa.int32()), "b": [True, False, True, True],
        "c": pa.array([0, 1, 2, 3], pa.timestamp("us")), "d": [{"k": n} for n in range(4)],
        "e": [b"x", None, b"z", b""],
    }  # fmt: skip
    table = pa.table(columns)
    found = list(tp.from_arrow(table).windows(2))
    rows = table.to_pylist()
    for number, row in enumerate(found):
        own = rows[2 * number : 2 * number + 2]
        assert {k: list(v) for k, v in row.items()} == {k: [r[k] for r in own] for k in row}
    tp.from_arrow(table).windows(2).write_parquet(tmp_path / "written")
    again = list(tp.read_parquet(tmp_path / "written"))
    assert [list(row["c"]) for row in again] == [list(row["c"]) for row in found]


def test_series_are_told_apart_by_several_columns_and_where_they_come_again() -> None:
    table = pa.table({"a": [0, 0, 0, 1, 1, 0, 0], "b": list("xxyyyxx"), "x": range(7)})
    rows = tp.from_arrow(table)
    assert xs(rows.windows(2, within=["a", "b"])) == [[0, 1], [3, 4], [5, 6]]
    assert xs(rows.windows(2, within="a")) == [[0, 1], [3, 4], [5, 6]]
    (first, *_) = rows.windows(2, within=["a", "b"])
    assert (first["a"], first["b"]) == (0, "x")
    ids = pa.array([bytes(16), bytes(16), b"1" * 16, b"1" * 16, b"1" * 16], pa.uuid())
    named = tp.from_arrow(pa.table({"u": ids, "x": range(5)}))
    assert xs(named.windows(2, within="u")) == [[0, 1], [2, 3]]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "chain",
    [
        lambda p: p.sharding_filter(6).shuffle(5, seed=1).batch(3),
        lambda p: p.batch(4),
        lambda p: p.sharding_filter(6, split="stride").batch(3).collate(),
        lambda p: p.shuffle(9).filter(lambda row: row["x"][0] % 2 == 0).batch(2),
        lambda p: p.sharding_filter(4).shuffle(9).repeat(2).batch(5),
    ],
)
def test_resumes_are_exact(chain: Callable[[tp.Pipeline], tp.Pipeline], files: str) -> None:
    rows = tp.read_parquet(files).select("episode", "x", "frame")
    check_resume(chain(rows.windows(4, stride=3, within="episode")), processes=0)


def test_ranks_and_workers_share_them_as_other_rows(files: str) -> None:
    pipe = tp.read_parquet(files).windows(4, stride=1, within="episode")
    pipe = pipe.sharding_filter(6).shuffle(9, seed=4).batch(2)
    whole = [xs(batch) for batch in pipe]
    ranks = [pipe.distributed(rank=rank, world_size=3) for rank in range(3)]
    steps = [list(tp.Loader(rank, num_workers=1, epoch=0)) for rank in ranks]
    joined = [xs(batch) for step in zip(*steps, strict=True) for batch in step]
    assert joined == whole[: len(joined)]
    assert len(whole) - len(joined) < 3


def test_stages_may_stand_on_either_side(files: str) -> None:
    rows = tp.read_parquet(files)
    plain = xs(rows.windows(4, stride=2, within="episode"))
    for below in (
        rows.select("x", "episode"),
        rows.with_columns(lambda table: {"more": table["x"]}),
        rows.map_batches(lambda table: table.select(["episode", "x"])),
        rows.rename({"episode": "e"}).rename({"e": "episode"}),
    ):
        assert xs(below.windows(4, stride=2, within="episode")) == plain
    skipped = rows.skip(3).take(10).windows(4, stride=2, within="episode")
    assert xs(skipped) == [list(range(n, n + 4)) for n in (3, 5, 7, 9)]
    parts = rows.windows(4, within="episode").split({"a": 0.5, "b": 0.5}, key="episode")
    names = [{row["episode"] for row in part} for part in parts.values()]
    assert not names[0] & names[1]
    assert sum(map(len, names)) == len(
        {row["episode"] for row in rows.windows(4, within="episode")}
    )
    mapped = rows.windows(4, within="episode").map(lambda row: int(row["x"].sum()))
    assert list(mapped) == [sum(own) for own in expected(4, 4)]


def test_only_the_columns_that_tell_series_are_read_for_that(
    files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tp.read_parquet(files).select("x", "episode").windows(4, within="episode")
    telling = pipe.stages[0].telling()  # type: ignore[attr-defined]
    assert telling.chains[0][1].columns == ["episode"]
    derived = tp.read_parquet(files).with_columns(
        lambda table: {"own": pa.array([n // 10 for n in table["x"].to_pylist()])}
    )
    assert derived.windows(4, within="own").stages[0].telling() is None  # type: ignore[attr-defined]
    wanted = []
    for file in episodes():
        for _, tens in groupby((n for _, n in file), lambda n: n // 10):
            own = list(tens)
            wanted += [own[k : k + 3] for k in range(0, len(own) - 2, 3)]
    assert xs(derived.windows(3, within="own")) == wanted


def test_errors_and_locate_name_the_first_row(files: str) -> None:
    pipe = tp.read_parquet(files).windows(4, within="episode")

    def fails(row: dict[str, Any]) -> Any:
        if row["x"][0] == expected(4, 4)[5][0]:
            raise ValueError("this one")
        return row

    with pytest.raises(ValueError, match="this one") as caught:
        list(pipe.map(fails))
    row = expected(4, 4)[5][0]
    assert f"0.parquet, row group {row // 7}, row {row}" in caught.value.__notes__[0]


def test_a_state_and_a_pickle_know_them(files: str, tmp_path: Path) -> None:
    rows = tp.read_parquet(files)
    pipe = rows.windows(4, stride=2, within="episode").shuffle(5).batch(2)
    expected_batches = [xs(batch) for batch in pipe]
    assert [
        xs(batch) for batch in pickle.loads(pickle.dumps(tp.Pipeline(pipe.stages)))
    ] == expected_batches
    next(iter(pipe))
    state = json.loads(json.dumps(pipe.state_dict()))
    for other in (
        rows.windows(5, stride=2, within="episode"),
        rows.windows(4, stride=1, within="episode"),
        rows.windows(4, stride=2),
    ):
        with pytest.raises(tp.StateError):
            other.shuffle(5).batch(2).load_state_dict(state)
    pipe.to_yaml(tmp_path / "pipe.yaml")
    loaded = tp.load(tmp_path / "pipe.yaml")
    loaded.load_state_dict(state)
    assert loaded == pipe


def test_short_series_are_warned_of_and_explained(
    files: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tp.read_parquet(files).windows(10, within="episode")
    said = str(pipe.explain())
    assert "windows(10): 5 of 8 series are shorter than that" in caplog.text
    assert "8, by episode; 5 too short for a window" in said
    assert "89, 29 of them in no window" in said


REFUSED: list[tuple[Callable[[tp.Pipeline], Any], str]] = [
    (lambda p: p.shuffle(5).windows(2), r"put shuffle\(\) after windows\(\)"),
    (lambda p: p.sharding_filter(2).windows(2), r"put sharding_filter\(\) after windows\(\)"),
    (lambda p: p.filter(lambda row: True).windows(2), r"put filter\(\) after windows\(\)"),
    (lambda p: p.batch(2).windows(2), r"put batch\(\) after windows\(\)"),
    (lambda p: p.map(dict).windows(2), "gives Python objects: put functions on rows after windows"),
    (
        lambda p: tp.from_dataset([{"x": 1}]).windows(2),
        r"objects: use from_arrow\(\), .* from_dataset\(schema=",
    ),
    (lambda p: p.windows(0), r"windows\(length\) must be an integer of 1 or more"),
    (lambda p: p.windows(2, stride=0), r"windows\(stride\) must be an integer of 1 or more"),
    (lambda p: p.windows(2, within=5), r"windows\(within\) must be"),
    (lambda p: list(p.windows(2, within="epi")), r"no column 'epi' .did you mean 'episode'"),
    (
        lambda p: list(p.windows(2, within="ids")),
        "tells series apart by integers or texts, got list",
    ),
]


def test_a_filter_of_the_reader_is_named_as_its_option(files: str) -> None:
    rows = tp.read_parquet(files, filter=pc.field("episode") > 0)
    with pytest.raises(
        tp.ConfigError, match=r"leave that option of read_parquet\(\) out, or write"
    ):
        rows.windows(2)


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_is_refused(make: Any, said: str, files: str) -> None:
    with pytest.raises((tp.ConfigError, tp.SchemaError), match=said):
        make(tp.read_parquet(files))


def test_data_that_gives_no_windows_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"e": [1, 1, None], "x": [1, 2, 3]}), tmp_path / "x.parquet")
    rows = tp.from_arrow(pa.table({"e": [1, 1, 2], "x": [1, 2, 3]}))
    with pytest.raises(
        tp.DataError,
        match=r"together, got 3, and the longest of 2 series has 2 rows: sort rows by series",
    ):
        list(rows.windows(3, within="e"))
    with pytest.raises(tp.DataError, match=r"'e' is null.*x.parquet, row group 0, row 2"):
        list(tp.read_parquet(tmp_path / "x.parquet").windows(2, within="e"))
