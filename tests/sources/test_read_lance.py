"""read_lance: the rows that Lance gives, by number or by blocks, of the version that a run began with."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader, WeightedRandomSampler

import trainpipes as tp
from quiet_lance import lance
from resuming import check_resume


def rows(first: int, count: int, **more: Any) -> pa.Table:
    x = np.arange(first, first + count)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(x, 3).astype(np.float32)), 3)
    nested = [{"u": n, "t": f"n{n}"} if n % 5 else None for n in x.tolist()]
    kind = pa.struct([("u", pa.int64()), ("t", pa.string())])
    columns = {"x": x, "text": [f"row {n}" for n in x.tolist()], "v": vectors}
    return pa.table({**columns, "s": pa.array(nested, kind), **more})


@pytest.fixture
def uri(tmp_path: Path) -> str:
    uri = str(tmp_path / "a table.lance")
    lance.write_dataset(rows(0, 40), uri, max_rows_per_file=15)
    return uri


def append(uri: str, first: int = 500, count: int = 30) -> None:
    table = rows(first, count).cast(lance.dataset(uri).schema)
    lance.write_dataset(table, uri, mode="append")


def batches(uri: str, **options: Any) -> tp.Pipeline:
    shuffled = tp.read_lance(uri, **options).sharding_filter(4).shuffle(scope="global", seed=1)
    return shuffled.batch(4)


def seen(found: Any) -> list[int]:
    return sorted(row["x"] for batch in found for row in batch)


def history(uri: str, seed: int, steps: int = 8) -> None:
    rng, first = np.random.default_rng(seed), 1000
    for step in range(steps):
        table, low = lance.dataset(uri), int(rng.integers(0, 40))
        kinds = ["append", "delete", "update", "merge", "compact", "add", "drop", "rename", "widen"]
        kind, first = (
            rng.choice(kinds, p=[0.15, 0.2, 0.1, 0.15, 0.1, 0.1, 0.05, 0.1, 0.05]),
            first + 100,
        )
        names = table.schema.names
        if kind == "append" and names == rows(0, 1).schema.names:
            append(uri, first, int(rng.integers(1, 30)))
        elif kind == "delete":
            table.delete(f"x % 5 = {low % 5} AND x > {low}")
        elif kind == "update":
            table.update({"x": "x + 10000"}, where=f"x < {low}")
        elif kind == "merge":
            source = table.to_table(limit=9, offset=min(low, max(0, table.count_rows() - 9)))
            changed = source.set_column(
                0, "x", pa.array(range(first, first + len(source)), source["x"].type)
            )
            both = pa.concat_tables([source, changed])
            table.merge_insert("x").when_matched_update_all().when_not_matched_insert_all().execute(
                both
            )
        elif kind == "compact":
            table.optimize.compact_files(target_rows_per_fragment=50)
        elif kind == "add":
            table.add_columns({f"c{step}": "x * 2", f"d{step}": "concat('t', cast(x as string))"})
        elif kind == "drop" and len(names) > 4:
            table.drop_columns([names[-1]])
        elif kind == "rename":
            name = names[-1]
            table.alter_columns({"path": name, "name": f"{name}_"})
        elif kind == "widen" and table.schema.field("v").type.value_type == pa.float32():
            table.alter_columns({"path": "v", "data_type": pa.list_(pa.float64(), 3)})


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 40))]
)
def test_random_histories_give_the_rows_of_lance(uri: str, seed: int) -> None:
    history(uri, seed)
    newest = int(lance.dataset(uri).version)
    for version in {newest, newest // 2 + 1}:
        expected = lance.dataset(uri, version=version).to_table()
        pipe = tp.read_lance(uri, version=version)
        found = pipe.batch(7).collate(format="arrow")
        tables = [pa.table(batch) for batch in found]
        assert pa.concat_tables(tables).to_pylist() == expected.to_pylist()
        assert len(pipe) == len(expected)
        drawn = list(pipe.shuffle(scope="global", seed=seed))
        assert sorted(map(repr, drawn)) == sorted(map(repr, expected.to_pylist()))
        matching = expected.filter(pa.compute.field("x") < 900).select(["x"]).to_pylist()
        assert list(tp.read_lance(uri, version, ["x"], [["x", "<", 900]])) == matching


def test_places_are_rows_of_data_files(uri: str) -> None:
    lance.dataset(uri).delete("x % 4 = 1")
    for pipe in (batches(uri), tp.read_lance(uri, columns=["s.u", "x"]).shuffle(9).batch(4)):
        for step, batch in enumerate(pipe):
            for row, place in zip(batch, tp.locate(pipe, step, epoch=0).places, strict=True):
                assert place.path is not None
                assert Path(place.path).is_file()
                fragments = [f.data_files()[0].path for f in lance.dataset(uri).get_fragments()]
                assert row["x"] == 15 * fragments.index(Path(place.path).name) + (place.row or 0)
                assert len(row["s"] or {"u": 0}) <= 2
    assert "10 in 3 fragments" in str(batches(uri).explain())


def test_samplers_and_weights_take_rows_by_number(uri: str) -> None:
    weights = [0.0] * 20 + [1.0] * 20
    drawn = tp.read_lance(uri).shuffle(sampler=WeightedRandomSampler(weights, 30)).batch(10)
    assert min(seen(drawn)) >= 20
    assert len(seen(drawn)) == 30


def test_a_time_names_a_version(uri: str) -> None:
    then = lance.dataset(uri).versions()[0]["timestamp"].astimezone()
    append(uri)
    assert len(tp.read_lance(uri, version=then)) == 40
    with pytest.raises(tp.TrainpipesError, match="2001"):
        len(tp.read_lance(uri, version="2001-01-01"))


def test_a_shallow_clone_has_its_own_files_and_those_of_the_original(
    uri: str, tmp_path: Path
) -> None:
    original = lance.dataset(uri)
    clone = str(tmp_path / "clone.lance")
    original.shallow_clone(clone, original.version)
    append(clone)
    pipe = tp.read_lance(clone).batch(4)
    wanted = lance.dataset(clone).to_table(columns=["x"])["x"].to_pylist()
    assert [row["x"] for batch in pipe for row in batch] == wanted
    places = [p for step in range(len(pipe)) for p in tp.locate(pipe, step, epoch=0).places]
    assert {Path(str(place.path)).parent for place in places} == {
        Path(clone, "data"), Path(uri, "data")
    }  # fmt: skip
    assert all(Path(str(place.path)).is_file() for place in places)


def test_a_resume_reads_the_version_of_its_run(uri: str) -> None:
    run: Any = tp.Loader(batches(uri))
    items = iter(run)
    state = [next(items), next(items), run.state_dict()][-1]
    append(uri, 200)
    lance.dataset(uri).optimize.compact_files()
    rest, after = list(items), list(run)
    resumed: Any = tp.Loader(batches(uri))
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert [list(resumed), list(resumed)] == [rest, after]
    assert len(seen(batches(uri))) == 70
    with pytest.raises(tp.StateError, match="data/version: saved 1, now 2"):
        tp.Loader(batches(uri, version=2)).load_state_dict(state)
    given: list[int] = []
    for rank in range(2):
        part = tp.Loader(batches(uri).distributed(rank=rank, world_size=2))
        part.load_state_dict(state)
        given += seen(part)
    assert sorted(given) == seen(rest)


def test_a_version_that_was_cleaned_up_is_named(uri: str) -> None:
    run = tp.Loader(batches(uri))
    next(iter(run))
    state = run.state_dict()
    lance.dataset(uri).delete("x < 20")
    lance.dataset(uri).optimize.compact_files()
    lance.dataset(uri).cleanup_old_versions(timedelta(0))
    with pytest.raises(tp.MissingFilesError, match=r"version 1 .* cannot be read any more"):
        tp.Loader(batches(uri)).load_state_dict(state)
    assert len(tp.read_lance(uri)) == 20
    for path in (Path(uri) / "data").iterdir():
        path.unlink()
    with pytest.raises(tp.MissingFilesError, match="is gone"):
        len(tp.read_lance(uri))


def test_each_epoch_may_have_the_newest_version(uri: str) -> None:
    loader = tp.Loader(batches(uri, refresh="epoch"))
    for epoch in range(2):
        assert len(seen(loader)) == 40 + 30 * epoch
        append(uri, 100 * (epoch + 1))


def test_check_resume_passes(uri: str) -> None:
    lance.dataset(uri).delete("x % 7 = 2")
    check_resume(batches(uri), epochs=2, processes=0, every=5)
    cached = tp.read_lance(uri).map(lambda row: {"x": row["x"]}).cache().shuffle(9).batch(4)
    check_resume(cached, epochs=2, processes=0, every=5)


@pytest.mark.usefixtures("failed_workers_let_go")
def test_a_process_that_was_forked_says_what_to_do(uri: str) -> None:
    pipe = batches(uri, version=1)
    next(iter(pipe))  # opened here, before the fork
    loader = DataLoader(pipe, batch_size=None, num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(tp.ConfigError, match="forkserver"):
        list(loader)


def test_processes_write_its_rows(uri: str, tmp_path: Path) -> None:
    pipe, folder = tp.read_lance(uri, columns=["x"]), tmp_path / "rows"
    pipe.write_parquet(folder, num_files=2, executor=tp.Processes(2))
    assert [row["x"] for row in tp.read_parquet(folder)] == list(range(40))


def test_yaml_both_ways(uri: str, tmp_path: Path) -> None:
    pipe = batches(uri, version=1, columns=["x"])
    path = tmp_path / "pipe.yaml"
    path.write_text(pipe.to_yaml())
    assert tp.load(path) == pipe
    assert list(tp.load(path)) == list(pipe)


def test_wrong_options_and_tables_are_one_line_each(uri: str, tmp_path: Path) -> None:
    for options, kind, said in [
        ({"uri": str(tmp_path / "nowhere")}, tp.MissingFilesError, "there is no Lance table at"),
        (
            {"uri": uri, "version": 9},
            tp.ConfigError,
            r"at most the newest of the table .*, 1, got 9",
        ),
        ({"uri": uri, "version": "soon"}, tp.ConfigError, "a time such as"),
        ({"uri": uri, "columns": ["y"]}, tp.SchemaError, "'y'"),
        ({"uri": uri, "filter": [("y", ">", 1)]}, tp.SchemaError, "'y'"),
        ({"uri": ""}, tp.ConfigError, r"read_lance\(uri\) must be"),
    ]:
        with pytest.raises(kind, match=said) as caught:
            next(iter(tp.read_lance(**options)))
        assert "\n" not in str(caught.value)
    path = Path(uri) / "data" / lance.dataset(uri).get_fragments()[0].data_files()[0].path
    path.write_bytes(bytes(200))
    with pytest.raises(tp.UnreadableError, match=path.name):
        list(tp.read_lance(uri))
