"""Pairs are cut and written as ``tokenizers`` does it, whatever the post-processor."""

from __future__ import annotations

from functools import cache
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import trainpipes as tp
from drawn import examples
from tokenizer_fixtures import bpe, bracketed, column
from trainpipes.errors import ConfigError
from trainpipes.stages.tokenize import Tokenize


def words(*known: str) -> Tokenizer:
    numbers = {word: number for number, word in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=known[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


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


#: By the template of pairs: the ids of "a a a a" and "b c" and those in the loss of the second text, whole
#: and cut to 6 tokens; 6 is the end token, 4 and 5 are special ones.
PAIRS: dict[str, tuple[list[int], list[int], list[int], list[int]]] = {
    "$A $B:1": (
        [0, 0, 0, 0, 1, 2, 6], [-100, -100, -100, -100, 1, 2, 6],
        [0, 0, 0, 1, 2, 6], [-100, -100, -100, 1, 2, -100],
    ),
    "[CLS] $A [SEP] $B:1 [SEP]:1": (
        [4, 0, 0, 0, 0, 5, 1, 2, 5, 6], [-100] * 6 + [1, 2, -100, 6],
        [4, 0, 5, 1, 5, 6], [-100] * 3 + [1, -100, -100],
    ),
}  # fmt: skip


@pytest.mark.parametrize("template", PAIRS)
def test_the_loss_is_on_the_texts_that_are_named(template: str) -> None:
    def labelled(labels: Any, **options: Any) -> tuple[list[int], list[int]]:
        tokenizer = words("a", "b", "c", "[UNK]", "[CLS]", "[SEP]", "</s>")
        special = [("[CLS]", 4), ("[SEP]", 5)]
        tokenizer.post_processor = processors.TemplateProcessing("$A", template, special)
        pipe = rows.tokenize(tokenizer, ["x", "y"], pair=True, labels=labels, **options)
        row = next(iter(pipe))
        return row["input_ids"], row["labels"]

    rows = tp.from_arrow(pa.table({"x": ["a a a a"], "y": ["b c"]}))
    whole, second, cut, second_cut = PAIRS[template]
    assert labelled("y", add_eos="</s>") == (whole, second)
    assert labelled(["y"], add_eos="</s>", max_length=6) == (cut, second_cut)
    first = [n if n == 0 else -100 for n in whole[:-1]]
    assert labelled("x") == (whole[:-1], first)
    assert labelled(True, add_eos="</s>") == (whole, whole)
    assert labelled(True, add_eos="</s>", max_length=6) == (cut, [*cut[:-1], -100])
    assert labelled("y", add_eos="</s>", max_length=6, truncation_side="left")[1][-1] == 6


def test_explain_says_how_many_pairs_were_cut() -> None:
    rows = tp.from_arrow(pa.table({"x": ["a a a a", "a"], "y": ["b c", "c"]}))
    pipe = rows.tokenize(words("a", "b", "c"), ["x", "y"], pair=True, max_length=5)
    list(pipe)
    assert "1 of 2 texts cut to max_length=5 (1 tokens)" in str(pipe.explain())
