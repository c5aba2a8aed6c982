"""to_map_dataset() keeps rows once for all processes of a machine."""

import os
import pickle

import pyarrow as pa
import pytest

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
