"""Wherever a ``cache()`` may stand, the sequence of batches is the one without it."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from drawn import GroupSource, RowGroups, build, examples, rows_of, specs
from oracle import Spec, Starved, sequence
from trainpipes import ConfigError, Pipeline
from trainpipes.interfaces.source import RowSource
from trainpipes.stages.cache import Cache

ENOUGH = 120  # items of a pipeline that has no end


class KnownGroups(RowGroups, has_blocks=True):
    """Row groups that are known by their sizes."""

    def open(self) -> RowSource:
        return KnownSource(self.groups)


class KnownSource(GroupSource):
    def block_key(self, block: int) -> Any:
        return [self.lengths.tolist(), block]


def with_cache(pipe: Pipeline, place: int, folder: str) -> Pipeline:
    """The pipeline with a cache above its first ``place`` stages."""
    stages = list(pipe.stages)
    stages.insert(place, Cache(folder))
    made = Pipeline(stages)
    try:
        assert made._iteration.plan.chain.cache is not None
    except ConfigError:
        assume(False)
    return made


def items_of(pipe: Pipeline, count: int = ENOUGH) -> list[Any]:
    found: list[Any] = []
    if count:
        for item in pipe:
            found.append(rows_of(item))
            if len(found) == count:
                break
    return found


@pytest.mark.timeout(1200)
@examples(25)
@given(specs(), st.integers(1, 4), st.data())
def test_it_changes_neither_sequence_nor_states(
    spec: Spec, place: int, data: st.DataObject
) -> None:
    plain = build(spec, Pipeline([KnownGroups(list(spec.groups))]))
    try:
        expected = sequence(spec, 0, ENOUGH)
    except Starved:
        assume(False)
    with TemporaryDirectory() as folder:
        cached = with_cache(plain, place, folder)
        want = items_of(plain)
        assert [[i] if isinstance(i, int) else i for i in want] == expected
        k = data.draw(st.integers(0, len(want)))
        for _ in range(2):  # cold, then warm
            assert items_of(with_cache(plain, place, folder)) == want
        assert cached._iteration.plan.identity == plain._iteration.plan.identity
        for saving, loading in ((cached, Pipeline(plain.stages)), (Pipeline(plain.stages), cached)):
            if not k:
                continue
            items_of(saving, k)
            state = saving.state_dict()
            assert state is not None
            loading.load_state_dict(state)
            rest = items_of(loading)
            assert rest[: ENOUGH - k] == want[k:] or k == len(want)
