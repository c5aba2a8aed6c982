"""Epochs that give nothing: a few are chance, and too many in a row are an error."""

from __future__ import annotations

from itertools import count, islice

import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes.interfaces.empty_epoch_guard import MOST_EMPTY_EPOCHS, MOST_EMPTY_ROWS, most_empty
from trainpipes.order.layout import Layout


def rows(count: int) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": list(range(count))})).sharding_filter(2).shuffle(4, seed=1)


def layout(rows: int) -> Layout:
    return Layout(rows, 1, 2, 1, 1)


def test_shards_that_get_nothing_in_some_epochs_go_on() -> None:
    pipe = rows(4).batch(1).filter(lambda batch: batch[0]["x"] < 2, version="1").repeat()
    found = [batch[0]["x"] for batch in islice(pipe, 400)]
    assert set(found) == {0, 1}


def test_a_finite_repeat_ends_whatever_its_epochs_give() -> None:
    for give in (2, 0):
        pipe = rows(4).batch(1).filter(lambda b, give=give: b[0]["x"] < give, version="1")
        assert len(list(pipe.repeat(40))) == 40 * give


def test_large_data_is_looked_through_for_nothing_only_once() -> None:
    assert most_empty(layout(MOST_EMPTY_ROWS)) == 1
    assert most_empty(layout(9)) == MOST_EMPTY_EPOCHS


EPOCHS = {
    "epochs of a shard": (lambda p: p.repeat().batch(1), MOST_EMPTY_EPOCHS + 1, "kept no row"),
    "passes": (lambda p: p.batch(1).repeat(), MOST_EMPTY_EPOCHS - 1, "would wait forever"),
}


@pytest.mark.parametrize("name", EPOCHS)
def test_an_epoch_that_gives_something_ends_a_drought(name: str) -> None:
    make, most, said = EPOCHS[name]
    for empty in (most, most + 1):
        calls = count()
        row = tp.from_dataset([7]).filter(
            lambda _, calls=calls, empty=empty: next(calls) % (empty + 1) == 0, version="1"
        )
        items = iter(make(row))
        assert next(items) == [7]
        if empty == most:
            assert list(islice(items, 5)) == [[7]] * 5
        else:
            with pytest.raises(tp.DataError, match=said):
                next(items)


@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_documents_without_tokens_after_others_of_their_epoch_are_passed_over(method: str) -> None:
    column = [[1, 2, 3, 4]] + [[]] * 9
    documents = tp.from_arrow(pa.table({"input_ids": pa.array(column, pa.list_(pa.int64()))}))
    sizes = {} if method == "concat" else {"buffer_size": 2}
    pipe = documents.pack(2, method=method, **sizes).batch(1)  # type: ignore[arg-type]
    assert sum(len(batch) for batch in pipe) == 2


def test_the_end_of_a_mix_s_epoch_is_one_round_whatever_its_sources_count() -> None:
    """An epoch of the mix ends between two rows that are kept, and its sources' epochs go on a million
    later."""
    parts = {
        "a": tp.from_arrow(pa.table({"x": range(5000)})),
        "b": tp.from_arrow(pa.table({"x": range(5000, 10_000)})),
    }
    pipe = tp.mix(parts).repeat().filter(lambda row: row["x"] == 2500).batch(1)
    assert [row["x"] for (row,) in islice(pipe, 4)] == [2500] * 4
