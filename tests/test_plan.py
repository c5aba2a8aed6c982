"""The parts of a plan, each by itself: which stage stands where, how epochs are cut, where batches begin."""

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes.engine.planning.arrange import arrange
from trainpipes.engine.planning.chain import Inputs
from trainpipes.engine.planning.layouts import Layouts
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.planning.schemas import Schemas
from trainpipes.state.format import BatchSizes

ROWS = tp.from_arrow(pa.table({"x": np.arange(100)}))


def even(row):
    return row["x"] % 2 == 0


def test_stages_that_keep_rows_wait_until_rows_are_dealt():
    pipe = ROWS.filter(even).rename({"x": "y"}).shuffle(10).sharding_filter(4).batch(5)
    chain = arrange(pipe.stages)
    assert [stage.name for stage in chain.before] == ["filter"]
    assert [stage.name for stage in chain.after] == ["rename", "batch"]
    assert (chain.num_shards, chain.batch_size, chain.times, chain.buffer) == (4, 5, 1, 10)
    assert not chain.keeps_rows


@pytest.mark.parametrize(
    ("pipe", "rows", "batches", "left"),
    [
        (ROWS.skip(10).take(20), (10, 30), (0, None), []),
        (ROWS.batch(5).skip(2).take(3), (0, None), (2, 5), ["batch"]),
        (ROWS.shuffle(10).skip(2).take(3), (0, None), (2, 5), []),
        # Rows above a shuffle are counted one by one where something cuts them anew.
        (ROWS.shuffle(10).skip(2).batch(5).take(3), (0, None), (0, 3), ["skip", "batch"]),
    ],
)
def test_what_is_counted_depends_on_where_take_and_skip_stand(pipe, rows, batches, left):
    chain = arrange(pipe.stages)
    assert (chain.skip_rows, chain.stop_rows) == rows
    assert (chain.skip_batches, chain.stop_batches) == batches
    assert [stage.name for stage in chain.after] == left


def test_a_chain_is_made_without_opening_anything(tmp_path):
    pipe = tp.list_files(tmp_path / "there-is-none").read_parquet().batch(4)
    assert arrange(pipe.stages).opener.name == "read_parquet"


@pytest.mark.parametrize(
    "pipe",
    [
        ROWS.batch(3),
        ROWS.sharding_filter(4).batch(3),
        ROWS.batch(7, drop_last=True),
        ROWS.skip(5).sharding_filter(4).batch(3).skip(2).repeat(3),
        ROWS.repeat(3).batch(7),
    ],
)
def test_a_cursor_by_arithmetic_stands_at_the_first_row_of_its_micro_batch(pipe):
    plan = Plan.of(pipe.stages)
    counts, shards = plan.counts, plan.chain.num_shards
    assert plan.counted
    batches = list(pipe)
    assert len(batches) == counts.batches_in_pass
    for m, batch in enumerate(batches):
        place = counts.cursor_at(m, m % shards, 0)
        layout = plan.layouts.of(place["epoch"])
        span = counts.slot(m % shards, place["epoch"], 0) % layout.num_spans
        row = layout.span(span)[0] + layout.window(span, place["window"])[0] + place["row"]
        assert batch[0]["x"] == plan.chain.skip_rows + row
        assert place["delivered"] == m // shards


@pytest.mark.parametrize(
    "pipe",
    [
        ROWS.filter(even).batch(3),
        ROWS.sharding_filter(4).repeat(2).batch(3),
        tp.from_iterable(lambda: range(9)).batch(3),
        ROWS.sample(0.5).batch(3),
    ],
)
def test_where_rows_drop_out_or_are_not_counted_nothing_follows_from_a_number(pipe):
    assert not Plan.of(pipe.stages).counted


def test_another_size_of_batches_shares_all_that_does_not_depend_on_it():
    plan = Plan.of(ROWS.shuffle(10).batch(4).stages)
    other = plan.resized(BatchSizes(0, 0, ((0, 4), (5, 8))))
    assert other.inputs is plan.inputs
    assert other.chain is plan.chain
    assert (plan.counts.batches_in_pass, other.counts.batches_in_pass) == (25, 15)
    assert plan.layouts.sizes is None
    assert other.resized(None).counts.batches_in_pass == 25
    assert plan.resized(None) is plan


def test_an_epoch_is_cut_alike_whatever_the_batch_size_was():
    inputs = Inputs(arrange(ROWS.shuffle(10).sharding_filter(2).batch(4).stages))
    usual = Layouts(inputs, inputs.chain)
    sized = Layouts(inputs, inputs.chain, BatchSizes(1, 0, ((0, 4), (3, 2))))
    assert sized.of(0) == usual.of(0)
    spans = range(usual.usual.num_spans)
    assert [sized.of(1).span(g) for g in spans] == [usual.of(1).span(g) for g in spans]


SCHEMA, OTHER = pa.schema([("x", pa.int64())]), pa.schema([("x", pa.string())])


def test_schemas_of_parts_are_known_under_their_names_in_another_process():
    whole, part = Schemas(), Schemas()
    whole.give("a", SCHEMA)
    assert part.get("b", lambda: OTHER) == OTHER
    whole.join("first", part)
    known = whole.known()
    assert known == {"a": SCHEMA, "first/b": OTHER}
    for join_first in (True, False):
        again, its = Schemas(), Schemas()
        if join_first:
            again.join("first", its)
        again.adopt(known)
        if not join_first:
            again.join("first", its)
        assert its.get("b", lambda: pytest.fail("it is known")) == OTHER
        assert again.known() == known
