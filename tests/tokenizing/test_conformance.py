"""gigatoken gives the ids that ``tokenizers`` gives, for each type that it was tried with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tokenizer_types import (
    ADMITTED,
    BYTE_LEVEL,
    PLAIN,
    SPECIAL,
    borders_of,
    content_of,
    tokenizer_of,
)
from trainpipes.errors import ConfigError
from trainpipes.tokenizers import hf
from trainpipes.tokenizers.hf import Checked, HuggingFace, why_not, young_texts
from varied import varied

pytest.importorskip("gigatoken")

STEP = 10_000


def assert_same(name: str, batches: Iterator[list[str]], content: Any = None) -> None:
    """The ids of texts by the engine, guarded as in use, and by ``tokenizers``."""
    from tokenizers import Tokenizer

    tokenizer = tokenizer_of(name) if content is None else Tokenizer.from_str(json.dumps(content))
    engine = HuggingFace(tokenizer)
    reference = HuggingFace(tokenizer, engine="tokenizers")
    assert engine.package() == "gigatoken"
    for texts in batches:
        given = pa.array(texts, pa.large_string())
        found = engine.encode(given)
        right = reference.encode(given)
        if not np.array_equal(found.values, right.values):
            rows = zip(texts, found.to_rows(), right.to_rows(), strict=True)
            text, got, expected = next(row for row in rows if not np.array_equal(*row[1:]))
            pytest.fail(f"{name}: {text!r}: {got.tolist()} instead of {expected.tolist()}")
        assert np.array_equal(found.offsets, right.offsets)


def batches(count: int, seed: int) -> Iterator[list[str]]:
    for number, start in enumerate(range(0, count, STEP)):
        yield varied(min(STEP, count - start), seed + number, SPECIAL + PLAIN)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ADMITTED)
def test_of_varied_texts(name: str) -> None:
    assert_same(name, batches(800, 100))


def nightly(test: Any) -> Any:
    """Marks a test that takes up to half an hour."""
    return pytest.mark.nightly(pytest.mark.timeout(1800)(test))


@nightly
@pytest.mark.parametrize("name", ADMITTED)
def test_of_a_million_varied_texts(name: str) -> None:
    assert_same(name, batches(1_000_000, 1000))


def left_to_it() -> list[str]:
    """All code points that the guard lets through."""
    every = pa.array([chr(c) for c in range(0x110000) if c >> 11 != 27], pa.large_string())
    kept = np.delete(np.arange(len(every)), np.flatnonzero(young_texts(every)))
    points: list[str] = every.take(pa.array(kept)).to_pylist()
    assert 100_000 < len(points) < 150_000
    return points


@nightly
@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_draws_the_same_borders_around_every_code_point(name: str) -> None:
    def around() -> Iterator[list[str]]:
        points = left_to_it()
        for start in range(0, len(points), STEP):
            some = points[start : start + STEP]
            yield [f"a{c}b A{c}B 1{c}1.{c}. {c}\n{c}\u0301a{c}/\n{c}'s" for c in some]

    assert_same(name, around(), borders_of(name))


@nightly
@pytest.mark.parametrize("name", ADMITTED)
def test_of_every_code_point_that_is_left_to_it(name: str) -> None:
    def around() -> Iterator[list[str]]:
        points = left_to_it()
        for start in range(0, len(points), STEP):
            yield [f"a{c}b {c} 1{c}.{c}a '{c}\n{c} " for c in points[start : start + STEP]]
            yield [f"a\u0301{c}\u0323 {c}{c}\u0345{c}" for c in points[start : start + STEP]]

    assert_same(name, around())


def test_of_parts_of_an_array() -> None:
    tokenizer = tokenizer_of("llama 3")
    engine = hf.Gigatoken(json.dumps(content_of("llama 3")))
    texts = ["", "one", "zwei drei", "", "四", ""]
    whole = pa.array(texts, pa.large_string())
    for first in range(len(texts) + 1):
        for stop in range(first, len(texts) + 1):
            found = engine.encode(whole.slice(first, stop - first))
            expected = tokenizer.encode_batch(texts[first:stop], add_special_tokens=False)
            assert [row.tolist() for row in found.to_rows()] == [e.ids for e in expected]
            assert found.values.dtype == np.int32
            assert found.offsets.dtype == np.int64


def test_stays_the_same_when_the_engine_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "RENEWED", 20_000)
    engine = hf.Gigatoken(json.dumps(content_of("gpt 2")))
    texts = pa.array(varied(200, 5), pa.large_string())
    backends, found = [], []
    for _ in range(6):
        found.append(engine.encode(texts).values)
        backends.append(engine._backend)
    assert len({id(backend) for backend in backends}) > 1
    assert all(np.array_equal(values, found[0]) for values in found)


def test_other_models_are_left_to_tokenizers() -> None:
    assert why_not(content_of("gpt 2")) is None
    for key, value, why in (
        ("type", "WordPiece", "is WordPiece"),
        ("dropout", 0.1, "has dropout = 0.1"),
    ):
        content = content_of("gpt 2")
        content["model"][key] = value
        assert f"its model {why}" in str(why_not(content))


@pytest.mark.parametrize("flag", ["rstrip", "single_word"])
def test_added_tokens_with_habits_of_their_own_are_left_to_tokenizers(flag: str) -> None:
    from tokenizers import AddedToken

    tokenizer = tokenizer_of("gpt 2")
    tokenizer.add_tokens([AddedToken("<x>", **{flag: True})])
    assert flag in str(HuggingFace(tokenizer)._refusal)
    assert HuggingFace(tokenizer).package() == "tokenizers"


def test_a_type_with_other_ids_is_refused_on_its_first_texts() -> None:
    """OpenAI's own notation, in which four digits are one token for one package and not for the other."""
    checked: Checked = HuggingFace(tokenizer_of("cl100k")).loaded[1]
    said = r"gives other ids than tokenizers for the text .*engine="
    with pytest.raises(ConfigError, match=said):
        checked.encode(pa.array(varied(256, 3), pa.large_string()))


def test_without_the_guard_young_code_points_would_differ() -> None:
    """So the guard is needed, and the test sees what it keeps away."""
    engine = HuggingFace(tokenizer_of("qwen 2, nfc"))
    texts = pa.array(["a", "a\u0301\u1ae0\u0323", "é"], pa.large_string())
    assert young_texts(texts).tolist() == [False, True, False]
    right = HuggingFace(tokenizer_of("qwen 2, nfc"), engine="tokenizers").encode(texts)
    assert not np.array_equal(engine._faster(engine._content).encode(texts).values, right.values)
    assert np.array_equal(engine.encode(texts).values, right.values)
