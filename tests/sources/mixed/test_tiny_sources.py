"""A source that is so small that the mix spends its time on beginning it again is warned of."""

from __future__ import annotations

from itertools import islice

import pyarrow as pa
import pytest

import trainpipes as tp


def test_tiny_sources_of_an_endless_mix_by_tokens_under_pack_are_warned_of_by_name() -> None:
    sources = {
        name: tp.from_arrow(pa.table({"input_ids": [[n, n, n]]})) for n, name in enumerate("ab")
    }
    mix = tp.mix(sources, weights={"a": 1, "b": 1}, weight_by="tokens", stop="repeat")
    with pytest.warns(
        UserWarning,
        match=r"source '[ab]' was read [\d,]+ times for [\d,]+ rows of the mix, and to begin it again takes "
        r"longer than to read it: lower its weight or num_shards, limit max_epochs, or write its rows",
    ):
        rows = list(islice(mix.pack(8).batch(2), 4000))
    assert len(rows) == 4000
