"""What a plan knows by arithmetic, and what plans share: what was opened, and the types that were found."""

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes.engine.planning.inputs import Schemas
from trainpipes.engine.planning.plan import Plan
from trainpipes.state.format import BatchSizes

ROWS = tp.from_arrow(pa.table({"x": np.arange(100)}))


@pytest.mark.parametrize("pipe", [
    ROWS.batch(3),
    ROWS.sharding_filter(4).batch(3),
    ROWS.batch(7, drop_last=True),
    ROWS.skip(5).sharding_filter(4).batch(3).skip(2).repeat(3),
    ROWS.repeat(3).batch(7),
])  # fmt: skip
def test_a_cursor_by_arithmetic_stands_at_the_first_row_of_its_micro_batch(pipe):
    plan = Plan.of(pipe.stages)
    counts, shards = plan.counts, plan.chain.num_shards
    assert plan.counted
    batches = list(pipe)
    assert len(batches) == counts.batches_in_pass
    for m, batch in enumerate(batches):
        place = counts.cursor_at(m, m % shards, 0)
        layout = plan.layouts.of(place["epoch"])
        span = counts.slot(m % shards, place["epoch"], 0).span
        row = layout.span(span)[0] + layout.window(span, place["window"])[0] + place["row"]
        assert batch[0]["x"] == plan.chain.skip_rows + row
        assert place["delivered"] == m // shards


def test_another_size_of_batches_shares_all_that_does_not_depend_on_it():
    plan = Plan.of(ROWS.shuffle(10).batch(4).stages)
    other = plan.resized(BatchSizes(0, 0, ((0, 4), (5, 8))))
    assert other.inputs is plan.inputs
    assert other.chain is plan.chain
    assert (plan.counts.batches_in_pass, other.counts.batches_in_pass) == (25, 15)
    assert plan.layouts.sizes is None
    assert other.resized(None).counts.batches_in_pass == 25
    assert plan.resized(None) is plan


@pytest.mark.parametrize("lanes", [1, 3])
def test_lanes_of_a_plan_of_another_size_are_cut_as_the_plan_is(lanes):
    plan = Plan.of(ROWS.shuffle(10).batch(8).repeat(2).stages)
    early = plan.resized(BatchSizes(0, 0, ((0, 4), (5, 8))), 0)
    cut = early.in_lanes(lanes)
    assert (cut.chain.batch_size, cut.counts.batches_in_pass) == (4, early.counts.batches_in_pass)
    assert cut.layouts.usual.batch_size == 8  # of the epochs after this one
    assert cut.resized(None).in_lanes(1).chain is plan.chain


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
