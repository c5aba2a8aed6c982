"""Pairs are cut and written as ``tokenizers`` does it, whatever the post-processor."""

from __future__ import annotations

from functools import cache
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drawn import examples
from tokenizer_fixtures import bpe, bracketed, column
from trainpipes.errors import ConfigError
from trainpipes.stages.tokenize import Tokenize


@cache
def made(kind: str, room: int | None, side: str, special: bool) -> tuple[Tokenize, Any]:
    """The stage, and what it is to agree with."""
    options = {"max_length": room, "truncation_side": side, "add_special_tokens": special}
    stage = Tokenize(tokenizer=tokenizer_of(kind), columns=["a", "b"], pair=True, **options)
    tokenizer = tokenizer_of(kind)
    if room is not None:
        tokenizer.enable_truncation(room, direction=side)
    return stage, tokenizer


#: By kind: the templates of one text and of two.
TEMPLATES = {
    "nothing": (),
    "second first": ("$A", "$B:1 <s>:1 <pad>:1 $A:0"),
    "one type": ("$A", "<s> $A:0 $B:0 </s> </s>"),
    "types side by side": ("$A", "$A:0 </s>:0 <s>:1 $B:1"),
}
ENDS = ("</s>", 2), ("<s>", 1)


def tokenizer_of(kind: str) -> Any:
    from tokenizers import processors as p

    if kind == "brackets":
        return bracketed()
    tokenizer = bpe(*TEMPLATES.get(kind, ()))
    if kind == "roberta":
        tokenizer.post_processor = p.RobertaProcessing(*ENDS)
    elif kind in ("bert", "sequence"):
        last = p.BertProcessing(*ENDS)
        tokenizer.post_processor = last if kind == "bert" else p.Sequence([p.ByteLevel(), last])
    return tokenizer


@pytest.fixture(scope="module", params=["brackets", *TEMPLATES, "bert", "roberta", "sequence"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestPairs:
    @pytest.mark.sample(4)
    @given(
        st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12)), min_size=1, max_size=5),
        st.sampled_from([None, 4, 5, 7, 12]),
        st.sampled_from(["right", "left"]),
        st.booleans(),
    )
    @example(pairs=[("one two", "three")], room=None, side="right", special=True)
    @examples(100, often=10)
    def test_are_those_of_the_tokenizer(
        self, kind: str, pairs: list[tuple[str, str]], room: int | None, side: Any, special: bool
    ) -> None:
        stage, tokenizer = made(kind, room, side, special)
        expected = tokenizer.encode_batch(pairs, add_special_tokens=special)
        first, second = zip(*pairs, strict=True)
        rows = pa.table({"a": first, "b": second})
        assert column(stage, rows) == [e.ids for e in expected]
        assert column(stage, rows, "token_type_ids") == [e.type_ids for e in expected]

    def test_that_say_a_text_twice_are_refused(self) -> None:
        stage = Tokenize(tokenizer=bpe("$A", "$A $B:1 $A"), columns=["a", "b"], pair=True)
        with pytest.raises(ConfigError, match="writes each text of a pair once"):
            column(stage, pa.table({"a": ["x"], "b": ["y"]}))
