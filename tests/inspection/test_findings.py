"""What is said of data before training, and what to write to mend it."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import trainpipes as tp
from inspection.tables import kinds, parquet, said
from trainpipes.look.inspection import inspect_files

DRAW = np.random.default_rng(0)


def test_good_data_has_no_findings(tmp_path: Path) -> None:
    for n in range(4):
        texts = [f"row {k} of {n}" for k in range(20_000)]
        rows = {"text": texts, "label": DRAW.integers(0, 10, 20_000)}
        parquet(tmp_path / f"{n}.parquet", rows, row_group_size=5000)
    assert inspect_files(tmp_path).findings == ()


def test_large_row_groups_are_told_with_the_command_that_cuts_them(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    parquet(folder / "a.parquet", {"n": np.arange(150_000)}, row_group_size=150_000)
    told = said(inspect_files(folder), "large_row_groups")
    assert "150,000 rows" in told
    assert f"trainpipes repack {shlex.quote(str(folder))} OUT --row-group-size 10000" in told
    parquet(folder / "a.parquet", {"n": np.arange(150_000)}, row_group_size=50_000)
    assert "large_row_groups" not in kinds(inspect_files(folder))


def test_small_row_groups_are_told_where_there_are_many(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"n": np.arange(20_000)}, row_group_size=100)
    assert "200 row groups have 100 rows" in said(inspect_files(tmp_path), "small_row_groups")
    few = parquet(tmp_path / "few" / "a.parquet", {"n": range(1000)}, row_group_size=100)
    assert kinds(inspect_files(few)) == []


def test_row_groups_of_few_wide_rows_are_not_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.look.inspection.file_findings.MANY", 10)
    for width in (4, 40_000):
        rows = {"text": ["x" * width] * 500}
        parquet(tmp_path / "a.parquet", rows, row_group_size=50, use_dictionary=False)
        assert ("small_row_groups" in kinds(inspect_files(tmp_path))) == (width == 4)


def test_row_groups_that_several_shards_share_are_told(tmp_path: Path) -> None:
    rows = {"n": np.arange(1_000_000)}
    path = parquet(tmp_path / "a.parquet", rows, row_group_size=250_000)
    assert "4 row groups for 24 shards: each is decoded about 7 times" in said(
        inspect_files(path), "few_row_groups"
    )
    assert "few_row_groups" not in kinds(inspect_files(path, num_shards=4))
    parquet(path, rows, row_group_size=20_000)
    assert "few_row_groups" not in kinds(inspect_files(path))


@pytest.mark.parametrize("files", [1, 8])
def test_rows_sorted_by_a_label_are_told(files: int, tmp_path: Path) -> None:
    labels = np.repeat(["cat", "dog", "fox", "owl"], 50_000 // files)
    for n in range(files):
        parquet(tmp_path / f"{n}.parquet", {"id": np.arange(len(labels)), "label": labels})
    found = inspect_files(tmp_path)
    told = said(found, "clustered")
    assert "the same 'label'" in told
    assert "--shuffle" in told


def test_files_of_one_label_each_are_told(tmp_path: Path) -> None:
    for n in range(8):
        rows = {"text": [f"{n} {k}" for k in range(10_000)], "source": ["ab"[n // 4]] * 10_000}
        parquet(tmp_path / f"{n}.parquet", rows, row_group_size=1000)
    told = said(inspect_files(tmp_path, sample=100), "clustered")
    assert "'source'" in told


@pytest.mark.parametrize("labels", [2, 10, 100])
@pytest.mark.parametrize("skew", [False, True])
def test_rows_in_random_order_are_not_told_to_be_sorted(
    labels: int, skew: bool, tmp_path: Path
) -> None:
    draw = np.random.default_rng(labels)
    column = draw.integers(0, labels, 100_000)
    if skew:
        column = np.where(draw.random(100_000) < 0.95, 0, column)
    for n in range(4):
        rows = {"id": np.arange(25_000) + n, "label": column[25_000 * n : 25_000 * (n + 1)]}
        parquet(tmp_path / f"{n}.parquet", rows, row_group_size=5000)
    assert "clustered" not in kinds(inspect_files(tmp_path))


def test_the_cure_for_sorted_rows_cures_it(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(4), 25_000)
    rows = pa.table({"id": np.arange(100_000), "label": labels})
    parquet(tmp_path / "a" / "a.parquet", rows, row_group_size=10_000)
    assert "clustered" in kinds(inspect_files(tmp_path / "a"))
    mixed = rows.take(DRAW.permutation(100_000))
    parquet(tmp_path / "b" / "a.parquet", mixed, row_group_size=10_000)
    assert kinds(inspect_files(tmp_path / "b")) == []


def test_nulls_are_told_with_a_filter_that_drops_them(tmp_path: Path) -> None:
    rows = {"text": [f"text {n}" if n % 4 else None for n in range(100)]}
    path = parquet(tmp_path / "a.parquet", rows)
    told = said(inspect_files(path), "nulls")
    assert "'text' (25 %, 25 rows)" in told
    assert ".filter(pc.field('text').is_valid())" in told
    kept = tp.read_parquet(path).filter(pc.field("text").is_valid())
    assert len(list(kept)) == 75


def test_nulls_of_files_without_footers_are_told_of_the_sample(tmp_path: Path) -> None:
    lines = [f'{{"a": {"null" if n % 2 else n}}}\n' for n in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    assert "'a' (50 %, 50 rows)" in said(inspect_files(tmp_path), "nulls")
    assert "about 50 rows" in said(inspect_files(tmp_path, sample=50), "nulls")


def test_empty_texts_are_told_with_a_filter_that_drops_them(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": ["", "b", None, "d"] * 5, "n": range(20)})
    told = said(inspect_files(path), "empty_texts")
    assert "'text' (25 % of 20 rows looked at)" in told
    assert ".filter(pc.field('text') != \"\")" in told
    assert len(list(tp.read_parquet(path).filter(pc.field("text") != ""))) == 10


def test_equal_rows_are_told(tmp_path: Path) -> None:
    rows = {"text": [f"text {n % 80}" for n in range(100)], "list": [[n % 80] for n in range(100)]}
    path = parquet(tmp_path / "a.parquet", rows)
    told = said(inspect_files(path), "duplicates")
    assert "20 of 100 rows are equal to another one (20 %)" in told
    assert "--drop-duplicates" in told


def test_equal_rows_of_all_files_are_counted_where_that_is_asked_for(tmp_path: Path) -> None:
    for n in range(2):
        rows = {"n": np.arange(20_000), "text": [f"t{k}" for k in range(20_000)]}
        parquet(tmp_path / f"{n}.parquet", rows, row_group_size=3000)
    assert "--duplicates looks at all rows" in said(
        inspect_files(tmp_path, sample=1000), "duplicates"
    ) or "duplicates" not in kinds(inspect_files(tmp_path, sample=1000))
    told = said(inspect_files(tmp_path, sample=1000, duplicates=True), "duplicates")
    assert "20,000 of 40,000 rows" in told


def test_equal_texts_are_told_where_a_column_is_named(tmp_path: Path) -> None:
    rows = {"id": range(13), "text": ["same"] * 4 + [str(n) for n in range(6)] + [None] * 3}
    path = parquet(tmp_path / "a.parquet", rows)
    assert kinds(inspect_files(path)) == ["nulls"]
    told = said(inspect_files(path, column="text"), "duplicates")
    assert "3 of 10 rows are equal to another one in 'text'" in told
    assert "--drop-duplicates-by text" in told


def test_files_with_other_columns_are_told_with_the_first_of_them(tmp_path: Path) -> None:
    for n in range(3):
        parquet(tmp_path / f"{n}.parquet", {"text": [f"{n}"], "n": [n]})
    parquet(tmp_path / "3.parquet", {"text": ["3"]})
    parquet(tmp_path / "4.parquet", {"text": ["4"], "n": ["four"]})
    told = said(inspect_files(tmp_path), "mixed_schemas")
    assert "column 'n' is missing (2 of 5 files; the first is " in told
    assert "3.parquet" in told
    (tmp_path / "3.parquet").unlink()
    assert "column 'n' is string, and int64 before" in said(
        inspect_files(tmp_path), "mixed_schemas"
    )


def test_files_without_rows_are_told(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"x": [1]})
    parquet(tmp_path / "b.parquet", pa.schema([("x", pa.int64())]).empty_table())
    found = inspect_files(tmp_path)
    assert "b.parquet" in said(found, "no_rows")
    assert found.readable


def test_files_that_are_not_read_are_told(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["x"] * 1})
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "README").write_text("about")
    found = inspect_files(tmp_path)
    assert found.reader == "read_parquet"
    assert "b.jsonl" in said(found, "other_formats")
    assert [one.level for one in found.findings] == ["warning", "note"]
    assert "README" in said(found, "other_files")


@pytest.mark.parametrize(
    "name", ["_unfinished.json", "b.parquet.part", ".c.parquet.tmp", "_temporary/0/x.parquet"]
)
def test_what_is_still_being_written_is_told(name: str, tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["x"]})
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("")
    found = inspect_files(tmp_path)
    assert name.split("/")[0] in said(found, "being_written")
    assert kinds(found) == ["being_written"]


def test_data_that_is_worth_compressing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.look.inspection.file_findings.WORTH_BYTES", 1000)
    rows = {"text": [f"{n}" * 20 for n in range(1000)]}
    path = parquet(tmp_path / "a.parquet", rows, compression="none")
    assert "--compression zstd" in said(inspect_files(path), "not_compressed")
    parquet(path, rows, compression="gzip")
    assert "gzip" in kinds(inspect_files(path))
    parquet(path, rows, compression="zstd")
    assert kinds(inspect_files(path)) == []


def test_rows_too_wide_for_a_usual_shuffle_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.look.inspection.file_findings.SHUFFLE_BYTES", 1 << 20)
    path = parquet(tmp_path / "a.parquet", {"content": ["x" * 10_000] * 500}, use_dictionary=False)
    told = said(inspect_files(path, sample=100), "wide_rows")
    assert "rows have 10.0 kB in memory: .shuffle(40960) would need 5.0 MB, and mixes 104" in told
    assert "max_bytes=" in told


def test_uneven_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainpipes.look.inspection.file_findings.UNEVEN_BYTES", 10_000)
    for n in range(5):
        rows = {"n": DRAW.integers(0, 1 << 40, 50_000 if n == 3 else 10)}
        parquet(tmp_path / f"{n}.parquet", rows)
    assert "3.parquet" in said(inspect_files(tmp_path), "uneven_files")


def test_of_more_column_chunks_than_are_looked_at_shares_are_told_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.look.inspection.parquet_files.MOST_CHUNKS", 20)
    for n in range(10):
        rows = {"n": [None, 1] * 500, "text": ["some text"] * 1000}
        parquet(tmp_path / f"{n}.parquet", rows, row_group_size=100)
    found = inspect_files(tmp_path, sample=100)
    assert found.rows == 10_000
    column = found.columns[0]
    assert (column.nulls, column.null_rows, column.nulls_counted) == (0.5, 5000, False)
    assert column.most is None


def test_what_some_files_lack_is_counted_only_where_it_is(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["ab", None] * 10})
    parquet(tmp_path / "b.parquet", {"n": list(range(60)), "prompt": ["abcde"] * 59 + ["abcd"]})
    found = inspect_files(tmp_path)
    assert [(one.columns, one.total) for one in found.lengths] == [
        (("text",), 20), (("prompt",), 299)
    ]  # fmt: skip
    assert "all rows of the files that have it" in str(found)
    text = found.columns[0]
    assert (text.null_rows, text.nulls_counted) == (10, True)
    assert "10 rows" in said(found, "nulls")
    assert "about" not in said(found, "nulls")


def test_types_that_differ_beside_columns_that_do_are_told_and_shown(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"v": 1, "w": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"v": 0.5, "w": "x", "extra": 1}\n')
    found = inspect_files(tmp_path)
    assert {one.name: one.type for one in found.columns} == {
        "v": "double", "w": "int64 or string", "extra": "int64"
    }  # fmt: skip
    told = said(found, "mixed_types")
    assert "'v' is int64 or double, 'w' is int64 or string" in told
    assert any(one.kind == "mixed_types" for one in found.warnings)
