"""to_map_dataset() keeps rows once for all processes of a machine."""

import os
import pickle
import sys

import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

import trainpipes as tp


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


def test_slices_and_lists_of_numbers_give_lists_of_rows(tmp_path):
    data = pipeline(5).to_map_dataset(tmp_path / "rows.arrow")
    rows = list(data)
    assert (data[1:3], data[::-2], data[9:]) == (rows[1:3], rows[::-2], [])
    assert data[[0, -1]] == data.__getitems__([0, -1]) == [rows[0], rows[4]]
    with pytest.raises(IndexError, match="row 5 of 5"):
        data[[0, 5]]
    with pytest.raises(TypeError, match=r"takes a row's number, a slice, or a list .*, got 1\.5"):
        data[1.5]


@pytest.mark.parametrize("column", [
    pa.array(["a", None, "a text that is long"], pa.string_view()),
    pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(["a", None])),
    pa.array([["a", None], None, []], pa.list_(pa.string_view())),
    pa.array([{"t": b"a"}, None, {"t": None}], pa.struct([("t", pa.binary_view())])),
])  # fmt: skip
def test_views_and_run_ends_come_one_by_one_in_lists_and_to_a_data_loader(column, tmp_path):
    table = pa.table({"x": column})
    data = tp.from_arrow(table).to_map_dataset(tmp_path / "rows.arrow")
    rows = table.to_pylist()
    assert (list(data), data[[2, 0]], data[1:], data[[]]) == (
        rows,
        [rows[2], rows[0]],
        rows[1:],
        [],
    )
    assert list(DataLoader(data, batch_size=2, collate_fn=list)) == [rows[:2], rows[2:]]
    assert list(tp.from_dataset(data)) == rows


@pytest.mark.parametrize(("unit", "time"), [("ns", 1), ("s", 10**15)])
def test_a_time_that_python_lacks_is_named_by_column_and_row(unit, time, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # which has nanoseconds
    table = pa.table({"at": pa.array([0, 0, time], pa.timestamp(unit))})
    data = tp.from_arrow(table).to_map_dataset(tmp_path / "rows.arrow")
    assert len(data[[0, 1]]) == 2
    for ask in (2, [0, 2], slice(1, 3)):
        with pytest.raises(
            tp.UnreadableError, match=rf"column 'at' holds a .*\[{unit}\].*rows\.arrow, row 2"
        ):
            data[ask]


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail(row):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        pipeline().map(fail).to_map_dataset(str(tmp_path / "rows.arrow"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_made_for_it_is_for_all_users_as_the_file_is(tmp_path):
    before = os.umask(0o022)
    try:
        pipeline().to_map_dataset(tmp_path / "new" / "folder" / "rows.arrow")
    finally:
        os.umask(before)
    made = (
        tmp_path / "new" / "folder" / "rows.arrow",
        tmp_path / "new" / "folder",
        tmp_path / "new",
    )
    assert [path.stat().st_mode & 0o777 for path in made] == [0o644, 0o755, 0o755]


def test_it_stands_before_batch_and_repeat(tmp_path):
    with pytest.raises(tp.ConfigError, match=r"call it before batch\(\), .*, got batch\(2\)"):
        pipeline().batch(2).to_map_dataset(tmp_path / "rows.arrow")


def test_a_url_is_no_path_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        tp.ConfigError, match=r"to_map_dataset\(path\) must be a path on this machine"
    ):
        pipeline().to_map_dataset("s3://bucket/rows.arrow")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_removed_says_how_to_get_it_back(tmp_path):
    data = pipeline().to_map_dataset(tmp_path / "rows.arrow")
    sent = pickle.dumps(data)
    assert data[3] == {"y": 6, "text": "t3"}
    os.unlink(tmp_path / "rows.arrow")
    assert data[4] == {"y": 8, "text": "t4"}, "it is open"
    with pytest.raises(tp.MissingFilesError, match=r"are gone; make it again by to_map_dataset"):
        pickle.loads(sent)[3]


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "rows.arrow"
    data = pipeline().to_map_dataset(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(tp.UnreadableError, match=r"rows\.arrow is no Arrow file, or damaged"):
        data[0]


def test_an_empty_pipeline_is_refused(tmp_path):
    with pytest.raises(tp.ConfigError, match="has no rows"):
        pipeline(0).to_map_dataset(str(tmp_path / "rows.arrow"))


def test_what_a_killed_process_has_left_of_the_file_goes(tmp_path):
    mine, others = tmp_path / "rows.12.0123abcd.part", tmp_path / "other.12.0123abcd.part"
    young = tmp_path / "rows.13.0123abcd.part"
    for path in (mine, others, young):
        path.write_text("half")
        if path != young:  # which another process may still write
            os.utime(path, (0, 0))
    pipeline(5).to_map_dataset(tmp_path / "rows.arrow")
    assert {*tmp_path.iterdir()} == {tmp_path / "rows.arrow", others, young}


def test_a_tilde_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert pipeline(5).to_map_dataset("~/rows.arrow").path == str(tmp_path / "rows.arrow")
    rows = tp.list_files("rows.parquet").read_parquet()
    rows.to_yaml("~/rows.yaml")
    assert str(tp.load("~/rows.yaml")) == str(rows)
    assert os.listdir() == []
