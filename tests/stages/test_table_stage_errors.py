"""An error of a stage of one's own on tables names the row that it is about."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import trainpipes as tp


class Positive(tp.TableStage):
    """Refuses tables with a number below 0."""

    def apply(self, table: pa.Table) -> pa.Table:
        if pc.any(pc.less(table["x"], 0)).as_py():
            raise tp.DataError("a number below 0")
        return table


@pytest.mark.parametrize("bad", [0, 1, 6, 49, 99])
@pytest.mark.parametrize("others", [(), (99,)])
def test_the_first_bad_row_is_named(bad: int, others: tuple[int, ...], tmp_path: Path) -> None:
    values = [-1 if k in (bad, *others) else k for k in range(100)]
    pq.write_table(pa.table({"x": values}), tmp_path / "x.parquet")
    with pytest.raises(tp.DataError, match=rf"below 0 \(at .*x\.parquet, row group 0, row {bad}\)"):
        list(tp.read_parquet(tmp_path / "x.parquet").then(Positive()).batch(100))
