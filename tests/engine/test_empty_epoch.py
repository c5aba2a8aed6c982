"""An epoch that gives nothing says so, once, with the stage that left nothing; many in a row are an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from torchdata.nodes import Loader as NodeLoader

import trainpipes as tp
from trainpipes.interfaces.held import MOST_EMPTY_EPOCHS, MOST_EMPTY_ROWS, most_empty
from trainpipes.nodes import Filter, FromArrow
from trainpipes.order.layout import Layout

pytestmark = pytest.mark.usefixtures("nothing_warned_of")


def table(rows: int = 97) -> pa.Table:
    return pa.table({"x": range(rows)})


def rows() -> tp.Pipeline:
    return tp.from_arrow(table())


def never(row: Any) -> bool:
    return False


def said(items: Any) -> list[str]:
    """What iterating warns of, twice over, but for Python's warning of a fork and torch's of few cores."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "This DataLoader will create")
        assert list(items) == []
        assert list(items) == []
    return [str(one.message) for one in found if issubclass(one.category, UserWarning)]


@pytest.mark.parametrize(("made", "message"), [
    (lambda: rows().filter(never), "filter(never ("),
    (lambda: rows().filter(pc.field("x") > 100).batch(4), "filter(<pyarrow.compute.Expression"),
    (lambda: rows().filter(never).sharding_filter(4).shuffle(9).batch(4), "filter(never ("),
    (lambda: rows().batch(4).filter(never), "filter(never ("),
    (lambda: rows().sample(1e-6), "sample(1e-06) left none of 97 rows"),
    (lambda: rows().skip(97), "skip(97) left none of 97 rows"),
    (lambda: rows().batch(10).skip(10), "skip(10) left none of 97 rows"),
    (lambda: rows().shuffle(9).filter(pc.field("x") < 3).skip(5), "and skip(5) left none of 97 rows"),
    (lambda: rows().batch(98, drop_last=True), "batch(98, drop_last=True) left none of 97 rows"),
    (lambda: rows().flat_map(lambda row: []), "left none of 97 rows"),
    (lambda: tp.from_iterable(lambda: range(9)).skip(9), "skip(9) left none of the rows"),
    (lambda: rows().sharding_filter(8).batch(50).distributed(rank=0, world_size=4),
        "its 2 batches are fewer than 4 ranks"),
])  # fmt: skip
def test_the_stage_and_the_rows_are_named(made: Callable[[], Any], message: str) -> None:
    (found,) = said(made())
    assert found.startswith("an epoch of this pipeline gives nothing: ")
    assert message in found


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loader_says_it_for_all_its_workers(workers: int) -> None:
    pipe = rows().filter(never).sharding_filter(4).batch(4)
    (found,) = said(tp.Loader(pipe, num_workers=workers))
    assert "left none of 97 rows" in found


def test_a_node_says_it_too() -> None:
    (found,) = said(NodeLoader(Filter(FromArrow(table=table()), never)))
    assert "left none of 97 rows" in found


def test_files_say_how_many_rows_they_had(tmp_path: Path) -> None:
    for name in "ab":
        pq.write_table(table(5), tmp_path / f"{name}.parquet")
    (found,) = said(tp.list_files(tmp_path).read_parquet().filter(never).batch(2))
    assert "left none of 10 rows" in found


@pytest.mark.parametrize("made", [
    lambda: rows().take(0),
    lambda: rows().batch(4).take(0),
    lambda: rows().sample(0),
    lambda: tp.from_arrow(table(0)),
    lambda: tp.from_arrow(table(0)).filter(never).batch(3, drop_last=True),
    lambda: rows().sharding_filter(8).batch(50).distributed(rank=1, world_size=4),
], ids=["take", "take batches", "sample", "no rows", "no rows to filter", "another rank"])  # fmt: skip
def test_nothing_is_said_where_nothing_was_asked_for(made: Callable[[], Any]) -> None:
    assert said(made()) == []


def test_nothing_is_said_of_an_epoch_that_gave_something_or_is_resumed_at_its_end() -> None:
    pipe = rows().filter(pc.field("x") < 2).batch(2)
    iterator = iter(pipe)
    next(iterator)
    state = iterator.state_dict()
    assert list(iterator) == []
    pipe.load_state_dict(state)
    assert next(iter(pipe)) == [{"x": 0}, {"x": 1}]
    assert tp.Loader(rows().filter(never).batch(4)).estimate_len() >= 0


def test_peek_says_that_there_is_nothing_to_look_at() -> None:
    pipe = tp.from_dataset([1]).filter(lambda row: row > 1)
    for subject in (pipe, tp.Loader(pipe)):
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(tp.DataError, match=r"peek\(\) shows the first item .* gives nothing"),
        ):
            subject.peek()


# Too many in a row


def small(count: int) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": list(range(count))})).sharding_filter(2).shuffle(4, seed=1)


def layout(rows: int) -> Layout:
    return Layout(rows, 1, 2, 1, 1)


def test_shards_that_get_nothing_in_some_epochs_go_on() -> None:
    pipe = small(4).batch(1).filter(lambda batch: batch[0]["x"] < 2, version="1").repeat()
    found = [batch[0]["x"] for batch in islice(pipe, 400)]
    assert set(found) == {0, 1}


def test_a_finite_repeat_ends_whatever_its_epochs_give() -> None:
    for give in (2, 0):
        pipe = small(4).batch(1).filter(lambda b, give=give: b[0]["x"] < give, version="1")
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
        "a": tp.from_arrow(pa.table({"x": range(1000)})),
        "b": tp.from_arrow(pa.table({"x": range(1000, 2000)})),
    }
    pipe = tp.mix(parts).repeat().filter(lambda row: row["x"] == 500).batch(1)
    assert [row["x"] for (row,) in islice(pipe, 2)] == [500] * 2
