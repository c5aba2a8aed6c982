"""to_map_dataset() keeps rows once for all processes of a machine."""

import os
import pickle

import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

import trainpipes as tp
from trainpipes._internal import messages as warn_once


@pytest.fixture(autouse=True)
def kept(tmp_path_factory, monkeypatch):
    """A cache of its own for each test."""
    folder = tmp_path_factory.mktemp("kept")
    monkeypatch.setenv("TRAINPIPES_CACHE", str(folder))
    monkeypatch.setattr(warn_once, "_warned", set())
    return folder


def doubled(row):
    return {"y": row["x"] * 2, "text": row["text"]}


def pipeline(rows=50):
    return tp.from_arrow(pa.table({"x": range(rows), "text": [f"t{i}" for i in range(rows)]})).map(
        doubled
    )


def test_rows_are_indexed_from_both_ends(tmp_path):
    data = pipeline().to_map_dataset(str(tmp_path / "rows.arrow"))
    assert len(data) == 50
    assert data[3] == {"y": 6, "text": "t3"}
    assert data[-1] == data[49]
    assert data.__getitems__([2, 0]) == [data[2], data[0]]
    for index in (50, -51):
        with pytest.raises(IndexError, match=f"row {index} of 50"):
            data[index]


def test_a_data_loader_shuffles_it_in_workers(tmp_path):
    data = pipeline().to_map_dataset(str(tmp_path / "rows.arrow"))
    found = [
        batch["y"].tolist() for batch in DataLoader(data, batch_size=8, shuffle=True, num_workers=2)
    ]
    assert sorted(y for batch in found for y in batch) == list(range(0, 100, 2))


def test_it_pickles_as_its_path(tmp_path):
    data = pipeline().to_map_dataset(str(tmp_path / "rows.arrow"))
    assert data[0]
    again = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 500
    assert again[7] == data[7]


def test_the_same_rows_are_written_once(kept):
    first = pipeline().to_map_dataset()
    written = os.stat(first.path).st_mtime_ns, os.stat(first.path).st_ino
    os.utime(first.path, ns=(1, 1))
    again = pipeline().to_map_dataset()
    assert os.stat(again.path).st_ino == written[1]
    assert list(again) == list(first) == list(pipeline())
    assert pipeline(51).to_map_dataset().path != first.path
    assert sorted(os.listdir(kept)) == ["datasets"]
    assert all(name.endswith(".arrow") for name in os.listdir(kept / "datasets"))


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail(row):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        pipeline().map(fail).to_map_dataset(str(tmp_path / "rows.arrow"))
    assert list(tmp_path.iterdir()) == []


def test_it_stands_before_batch_and_repeat(tmp_path):
    with pytest.raises(tp.ConfigError, match=r"call it before batch\(\), .*, got batch\(2\)"):
        pipeline().batch(2).to_map_dataset()


def test_an_empty_pipeline_is_refused(tmp_path):
    with pytest.raises(tp.ConfigError, match="has no rows"):
        pipeline(0).to_map_dataset(str(tmp_path / "rows.arrow"))
