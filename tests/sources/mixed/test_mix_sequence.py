"""A mix is what its parts say: each shard's rows are its sources' own rows, taken in the rule's order."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from trainpipes.engine.shards import shard_rows
from trainpipes.sources.fair_queue import (
    RowOrder,
    by_tokens,
    common_total,
    phases_of,
    whole_weights,
)

ROWS = 150


def source(number: int, rows: int, kind: str) -> tp.Pipeline:
    """Rows of one source, in one of several forms."""
    table = pa.table(
        {"x": [1000 * number + n for n in range(rows)], "n": [n % 11 for n in range(rows)]}
    )
    if kind == "stream":
        return tp.from_iterable(lambda: iter(table.to_pylist()), version=f"{number} {rows}").map(
            dict
        )
    pipe = tp.from_arrow(table)
    if kind == "filtered":
        pipe = pipe.filter(pc.field("n") != 3)
    return pipe.shuffle(7, seed=number).map(dict)


def own_rows(pipe: tp.Pipeline, shards: int) -> list[list[dict[str, Any]]]:
    """For each shard the rows that a source gives it, epoch after epoch."""
    rows = list(islice(iter(pipe.sharding_filter(shards).repeat()), ROWS * shards))
    return [rows[shard::shards] for shard in range(shards)]


KINDS = st.sampled_from(["plain", "filtered", "stream"])


@examples(25)
@given(
    kinds=st.lists(st.tuples(st.integers(30, 70), KINDS), min_size=2, max_size=4),
    weights=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    shards=st.sampled_from([1, 2, 3]),
    tokens=st.booleans(),
    stop=st.integers(0, 60),
    run_rows=st.sampled_from([1, 9, 2048]),
)
def test_a_mix_is_its_sources_in_the_rule_s_order(kinds, weights, shards, tokens, stop, run_rows):
    sources = {f"s{n}": source(n, *kind) for n, kind in enumerate(kinds)}
    shares = dict(zip(sources, weights, strict=False))
    by: Any = "tokens" if tokens else "rows"
    with pytest.MonkeyPatch.context() as patch:  # the order does not depend on them
        patch.setattr(shard_rows, "RUN_ROWS", run_rows)
        patch.setattr(shard_rows, "LEAST_ROWS", run_rows)
        pipe = tp.mix(
            sources, weights=shares, weight_by=by, column="n", stop="repeat"
        ).sharding_filter(shards)
        iterator = iter(pipe)
        found = list(islice(iterator, stop))
        state = json.loads(json.dumps(iterator.state_dict()))
        again = tp.mix(
            sources, weights=shares, weight_by=by, column="n", stop="repeat"
        ).sharding_filter(shards)
        again.load_state_dict(state)
        found += list(islice(iter(again), ROWS - stop))
    k = len(sources)
    exact = [Fraction(w) for w in shares.values()]
    whole = whole_weights(exact, common_total([exact], leaves=False))
    given_by = [own_rows(pipe, shards) for pipe in sources.values()]
    for shard in range(shards):
        own = [rows[shard] for rows in given_by]
        if tokens:
            lengths = [[max(1, row["n"]) for row in rows] for rows in own]
            place = phases_of(shard, 2)[0] * sum(whole) // 1024
            first = next(i for i in range(k) if sum(whole[: i + 1]) > place)
            order = by_tokens(whole, (0,) * k, first, lengths, ROWS).tolist()
        else:
            order = (
                RowOrder(whole, (0,) * k, phases_of(shard, k)).take([ROWS + 1] * k, ROWS).tolist()
            )
        waiting = [iter(rows) for rows in own]
        expected = [next(waiting[i]) for i in order]
        mine = found[shard::shards]
        assert mine == expected[: len(mine)]
