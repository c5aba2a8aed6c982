"""A faster engine is used where it may be, watched while it runs, and left out when it errs."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from tokenizer_fixtures import TEXTS, bpe, bracketed, column
from tokenizer_types import tokenizer_of
from trainpipes.engine.shards import opener
from trainpipes.errors import ConfigError
from trainpipes.stages.tokenize import Tokenize
from trainpipes.testing import check_resume
from trainpipes.tokenizers import admission
from trainpipes.tokenizers.checked import EVERY, FIRST, PROBES, SHOWN, Checked
from trainpipes.tokenizers.hf import HuggingFace
from trainpipes.tokenizers.ragged import Ragged

BAD = "a text that goes wrong"


def lengths_of(texts: pa.LargeStringArray) -> Ragged:
    """Each text as one id, its length: the reference."""
    found = [[len(text)] for text in texts.to_pylist()]
    return Ragged.of_lists(found)


class Panic(BaseException):
    """What a panic of Rust is to Python."""


class Engine:
    """Right but for one text; remembers how often it was asked."""

    def __init__(self, bad: list[int] | BaseException | None = None) -> None:
        self.bad = bad
        self.asked = 0

    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        self.asked += len(texts)
        found = [[len(text)] for text in texts.to_pylist()]
        for number, text in enumerate(texts.to_pylist()):
            if text == BAD and isinstance(self.bad, BaseException):
                raise self.bad
            if text == BAD and self.bad is not None:
                found[number] = self.bad
        return Ragged.of_lists(found)


def array(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def started(engine: Any) -> Checked:
    """Past its first rows."""
    checked = Checked(lambda: engine, lengths_of, "some.json")
    checked.encode(array(["first"] * FIRST))
    return checked


class TestWhatIsCompared:
    def test_the_first_rows_wait_for_the_engine_and_are_compared_when_it_starts(self) -> None:
        engine = Engine()
        checked = started(engine)
        assert engine.asked == 0
        assert checked.encode(array(["x", "yy"])).values.tolist() == [1, 2]
        assert engine.asked == PROBES + FIRST + 2
        assert checked.stopped is None

    def test_an_engine_that_errs_on_the_first_rows_delivers_nothing(self) -> None:
        engine = Engine([7])
        checked = Checked(lambda: engine, lengths_of, "some.json")
        checked.encode(array(["x"] * 9 + [BAD]))
        checked.encode(array(["x"] * FIRST))
        assert checked.encode(array([BAD, "x"])).values.tolist() == [len(BAD), 1]
        assert checked.stopped is not None

    def test_many_rows_at_once_wait_for_the_engine(self) -> None:
        engine = Engine()
        checked = Checked(lambda: engine, lengths_of, "some.json")
        texts = array(["x" * (k % 7) for k in range(5000)])
        found = checked.encode(texts)
        assert np.array_equal(found.values, lengths_of(texts).values)
        assert np.array_equal(found.offsets, lengths_of(texts).offsets)
        assert engine.asked == PROBES + 5000

    @pytest.mark.parametrize("bad", [[7], [], [1, 2], [len(BAD), 0]])
    @pytest.mark.parametrize("place", [0, 1, 700, EVERY - 1])
    def test_one_row_in_a_thousand_is_compared_before_it_is_delivered(
        self, bad: list[int], place: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        checked = started(Engine(bad))
        texts = ["x"] * EVERY
        texts[place] = BAD
        compared = -FIRST % EVERY  # of the rows from here on; row 1,000 of all
        with caplog.at_level(logging.WARNING, "trainpipes"):
            found = checked.encode(array(texts)).to_rows()
        if place == compared:
            assert BAD in caplog.text
        assert [row.tolist() for row in found[:place]] == [[1]] * place
        assert (found[place].tolist() == [len(BAD)]) == (place == compared)

    def test_a_difference_is_logged_with_its_text_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = Engine([7])
        checked = started(engine)
        texts = ["x"] * EVERY
        texts[-FIRST % EVERY] = BAD
        with caplog.at_level(logging.WARNING, "trainpipes"):
            for _ in range(3):
                found = checked.encode(array(texts))
                assert np.array_equal(found.values, lengths_of(array(texts)).values)
        (record,) = caplog.records
        assert record.name == "trainpipes"
        assert repr(BAD) in record.getMessage()
        assert "some.json" in record.getMessage()
        assert engine.asked == PROBES + FIRST + EVERY  # no more after that

    def test_of_a_long_text_the_start_is_logged(self) -> None:
        class Long(Engine):
            def encode(self, texts: pa.LargeStringArray) -> Ragged:
                return Ragged.of_lists(
                    [[0 if len(t) > 9000 else len(t)] for t in texts.to_pylist()]
                )

        checked = Checked(Long, lengths_of, "some.json")
        checked.encode(array(["é" * 10_000] * FIRST))
        checked.encode(array(["x"]))
        assert checked.stopped is not None
        assert "ééé…" in checked.stopped
        assert len(checked.stopped) < SHOWN + 100

    @pytest.mark.parametrize("failure", [RuntimeError, Panic])
    def test_an_engine_that_fails_is_left_out(self, failure: Any) -> None:
        checked = started(Engine(failure("no such byte")))
        found = checked.encode(array(["x", BAD]))
        assert found.values.tolist() == [1, len(BAD)]
        assert "no such byte" in str(checked.stopped)

    def test_an_engine_that_does_not_start_is_left_out(self) -> None:
        def fail() -> Engine:
            raise RuntimeError("unknown pre-tokenizer")

        checked = Checked(fail, lengths_of, "some.json")
        for _ in range(3):
            assert checked.encode(array(["x"] * FIRST)).values.tolist() == [1] * FIRST
        assert "unknown pre-tokenizer" in str(checked.stopped)

    def test_an_engine_that_loses_rows_is_left_out(self) -> None:
        class Short(Engine):
            def encode(self, texts: pa.LargeStringArray) -> Ragged:
                return super().encode(texts.slice(1) if BAD in texts.to_pylist() else texts)

        checked = started(Short())
        assert checked.encode(array(["x", BAD])).values.tolist() == [1, len(BAD)]
        assert "1 rows for 2 texts" in str(checked.stopped)

    def test_rows_with_young_code_points_are_the_references(self) -> None:
        class Wrong(Engine):
            def encode(self, texts: pa.LargeStringArray) -> Ragged:
                found = [[0] * ("\u1ae0" in t) or [len(t)] for t in texts.to_pylist()]
                return Ragged.of_lists(found)

        checked = started(Wrong())
        texts = array(["é", "x\u1ae0", "abc", "\u1ae0"]).slice(1)
        assert checked.encode(texts).values.tolist() == [2, 3, 1]
        assert checked.stopped is None


@pytest.fixture
def installed() -> None:
    pytest.importorskip("gigatoken")


@pytest.mark.usefixtures("installed")
class TestTokenize:
    def test_gives_the_same_with_either_engine(self) -> None:
        auto, plain = (Tokenize(tokenizer=bracketed(), engine=e) for e in ("auto", "tokenizers"))
        for options in ({}, {"max_length": 5}, {"max_length": 5, "truncation_side": "left"}):
            auto, plain = (
                Tokenize(tokenizer=bracketed(), add_eos=True, engine=e, **options)
                for e in ("auto", "tokenizers")
            )
            for _ in range(3):
                texts = [text + word for text in TEXTS for word in ("", " a", "\n</s>") * 10]
                assert column(auto, texts) == column(plain, texts)
            assert "gigatoken" in auto.runs_on()
            assert auto._engine.loaded.checked._fast is not None  # type: ignore[attr-defined]

    def test_goes_on_alone_from_a_difference_on(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Wrong:
            def __init__(self, right: Any) -> None:
                self.right = right

            def encode(self, texts: pa.LargeStringArray) -> Ragged:
                found: Ragged = self.right.encode(texts)
                wrong = np.repeat([text == BAD for text in texts.to_pylist()], found.lengths)
                return Ragged(found.values + wrong.astype(np.int32), found.offsets)

        monkeypatch.setenv("TRAINPIPES_THREADS", "0")  # what others encode meanwhile may be wrong
        monkeypatch.setattr(opener, "RUN_ROWS", EVERY)  # so that the first wrong ones are compared
        faster = HuggingFace._faster
        monkeypatch.setattr(HuggingFace, "_faster", lambda self: Wrong(faster(self)))
        texts = [f"row {k}" for k in range(2 * EVERY)] + [BAD] * 500
        rows = tp.from_arrow(pa.table({"text": texts}))
        pipe = rows.tokenize(bpe()).batch(100)
        assert "gigatoken 0.10" in str(pipe.explain())
        assert list(pipe) == list(rows.tokenize(bpe(), engine="tokenizers").batch(100))
        (record,) = [r for r in caplog.records if r.name == "trainpipes"]
        assert repr(BAD) in record.getMessage()
        assert f"not gigatoken: it differs on the text {BAD!r}" in str(pipe.explain())

    def test_names_the_engine_and_the_reason_in_explain(self) -> None:
        rows = tp.from_arrow(pa.table({"text": ["a"] * 8}))

        def said(tokenizer: Any, **options: Any) -> str:
            lines = dict(rows.tokenize(tokenizer, **options).batch(2).explain().lines)
            return lines["tokenizer"]

        assert said(bpe()).startswith("Tokenizer: gigatoken 0.10")
        assert 'not gigatoken: engine="tokenizers"' in said(bpe(), engine="tokenizers")
        assert "not gigatoken: its pre-tokenizer" in said(tokenizer_of("cl100k"))
        assert "tokenizer" not in dict(rows.tokenize("bytes").batch(2).explain().lines)
        assert "one thread at a time" in said(lambda texts: [[1] for _ in texts])

    def test_resumes_with_the_other_engine(self) -> None:
        rows = tp.from_arrow(pa.table({"text": [f"row {k}" for k in range(40)]})).shuffle(16)
        auto, plain = (rows.tokenize(bpe(), engine=e).batch(4) for e in ("auto", "tokenizers"))
        batches = iter(auto)
        head = [next(batches) for _ in range(3)]
        state = auto.state_dict()
        assert state is not None
        plain.load_state_dict(state)
        assert head + list(plain) == list(rows.tokenize(bpe()).batch(4))
        assert auto.state_dict() is not None

    def test_resumes_exactly_at_every_batch(self) -> None:
        texts = [f"row {k} of some text" for k in range(FIRST + 128)]
        rows = tp.from_arrow(pa.table({"text": texts})).shuffle(64).tokenize(bpe(), max_length=6)
        check_resume(rows.batch(96).pad_collate())

    def test_runs_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def absent(name: str) -> str:
            raise PackageNotFoundError(name)

        monkeypatch.setattr(admission, "version", absent)
        stage = Tokenize(tokenizer=bpe())
        assert column(stage, TEXTS) == [e.ids for e in bpe().encode_batch(TEXTS)]
        assert stage._engine.loaded.checked is None  # type: ignore[attr-defined]
        assert "pip install 'gigatoken>=0.10,<0.11'" in stage.runs_on()

    def test_leaves_versions_alone_that_were_not_tried(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(admission, "version", lambda name: "0.11.0")
        assert "0.11.0 was not tried" in Tokenize(tokenizer=bpe()).runs_on()


def test_another_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="'kitoken'"):
        Tokenize(tokenizer=bpe(), engine="kitoken")  # type: ignore[arg-type]


def test_added_tokens_with_habits_of_their_own_are_refused() -> None:
    pytest.importorskip("gigatoken")
    from tokenizers import AddedToken

    for flag in ("rstrip", "single_word"):
        tokenizer = bpe()
        tokenizer.add_tokens([AddedToken("<x>", **{flag: True})])
        assert flag in str(HuggingFace(tokenizer)._refusal())
    neox = tokenizer_of("neox")
    neox.add_tokens([AddedToken("word", normalized=True)])
    assert "normalized text" in str(HuggingFace(neox)._refusal())
