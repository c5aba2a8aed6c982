"""Equal rows have equal hashes, and others have others."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpipes.columns.content_hash import row_hashes

VALUES: dict[str, tuple[Any, Any]] = {
    "text": (pa.string(), st.text(max_size=3)),
    "bytes": (pa.binary(), st.binary(max_size=3)),
    "numbers": (pa.int64(), st.integers(-2, 2)),
    "lists": (
        pa.list_(pa.string()),
        st.lists(st.one_of(st.none(), st.text("ab", max_size=2)), max_size=3),
    ),
    "nested": (
        pa.list_(pa.struct([("a", pa.int8()), ("b", pa.list_(pa.int8()))])),
        st.lists(
            st.fixed_dictionaries(
                {
                    "a": st.one_of(st.none(), st.integers(0, 1)),
                    "b": st.lists(st.integers(0, 1), max_size=2),
                }
            ),
            max_size=2,
        ),
    ),
    "maps": (
        pa.map_(pa.string(), pa.int8()),
        st.lists(st.tuples(st.text("ab", max_size=1), st.integers(0, 1)), max_size=2),
    ),
    "fixed": (pa.list_(pa.int8(), 2), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
}


@pytest.mark.parametrize("kind", VALUES)
@given(data=st.data())
def test_rows_are_equal_if_and_only_if_their_hashes_are(kind: str, data: st.DataObject) -> None:
    arrow, values = VALUES[kind]
    rows = data.draw(st.lists(st.one_of(st.none(), values), max_size=12))
    skipped = data.draw(st.integers(0, len(rows)))
    column = pa.array(rows, arrow).slice(skipped)
    hashes = row_hashes(pa.table({"x": column})).tolist()
    for a, one in enumerate(rows[skipped:]):
        for b, other in enumerate(rows[skipped:]):
            assert (hashes[a] == hashes[b]) == (one == other)


def test_columns_are_told_apart() -> None:
    found = row_hashes(pa.table({"a": ["x", "y", None], "b": ["y", "x", None]}))
    assert len(set(found.tolist())) == 3
