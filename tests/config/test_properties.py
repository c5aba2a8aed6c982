"""Properties of configs that hold for all texts and values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from trainpipes.config import loads

SPECIAL = [
    '', ' ', '  x', 'x ', '\n', 'x\n', 'x\n\n', '\nx', '  x\n y', 'a\n\tb', '\t', 'a: b', 'a:',
    '- a', '#', 'a #b', 'yes', 'No', 'on', 'y', 'null', '~', 'true', '1', '1.0', '1e3', '0x10',
    '0b1', '010', '0o7', '1_000', '.5', '.', '12:30:45', '2024-01-31', '.inf', '.nan', '=', '<<',
    '!x', '!!str', '&a', '*a', '%', '@', '`', '{', '[', ']', '|', '>', '"', "'", '\\', '${HOME}',
    '$${x}', '$', '$$', '${', '$$${x}', '---', '...', '--- a', '\x00', '\x7f', '\x85', '\u2028',
    '\ufeff', '\ud800', '😀', '\U0010ffff', 'a\r\nb', '?', '? a', 'e1', '-', '+1', "x" * 500,
]  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(SPECIAL),
    st.text(st.characters(), max_size=20),
    st.lists(st.sampled_from(SPECIAL), max_size=3).map("".join),
)
NUMBERS = st.one_of(
    st.integers(), st.integers(-(10**50), 10**50), st.floats(), st.booleans(), st.none()
)
VALUES = st.recursive(
    st.one_of(NUMBERS, TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(TEXTS, st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


def exactly(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(exactly(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(exactly, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


class Kept(tp.RowStage):
    """A stage that takes any value."""

    value: Any

    def apply(self, row: Any) -> Any:
        return row


@given(value=VALUES)
@example(value={1: "a", "1": "b", None: "c"})
@examples(120)
def test_any_value_comes_back_with_its_types(value: Any) -> None:
    text = tp.list_files("d").then(Kept([value])).to_yaml()
    again = loads(text, allow_imports=True)
    assert exactly(again.stages[1].options["value"], [value])
    assert again.to_yaml() == text


@given(name=TEXTS.filter(bool), other=TEXTS.filter(bool), number=st.floats(allow_nan=False))
@examples(60)
def test_readers_of_yaml_1_1_read_the_same(name: str, other: str, number: float) -> None:
    text = tp.list_files("d").then(Kept([{name: [other, number]}])).to_yaml()
    (told,) = yaml.safe_load(text)["stages"][1].values()
    assert exactly(told, [{name: [other.replace("${", "$${"), number]}])


WORDS = [
    'stages', 'recipe', 'options', 'list_files', 'shuffle', 'batch', 'read_parquet', 'mix', 'map',
    'pack', 'sft', ':', ': ', '- ', '\n', '\n  ', '\n- ', '\n    ', '{', '}', '[', ']', ', ', "'",
    '"', '!pipeline ', '!function ', '&a ', '*a', '|', '>', '3', 'x',
    'null', 'seed', '${HOME}', '$', '# ', '---', '%', '?', '!!int ', 'files', 'd',
]  # fmt: skip


@given(words=st.lists(st.sampled_from(WORDS), max_size=25))
@examples(150)
def test_any_text_is_a_config_or_refused_in_a_sentence(words: list[str]) -> None:
    refused_or_loaded("".join(words))


@given(text=st.text(max_size=60))
@examples(80)
def test_any_characters_are_a_config_or_refused(text: str) -> None:
    refused_or_loaded(text)


STAGE_NAMES = [
    "shuffle", "batch", "pack", "take", "repeat", "select", "rename", "tokenize", "cache", "sample",
]  # fmt: skip


@given(
    name=st.sampled_from(STAGE_NAMES),
    values=st.lists(st.one_of(NUMBERS, st.sampled_from(["x", "[]", "{}", "[x]", "{x: 1}"]))),
    option=st.sampled_from(
        ["seed", "buffer_size", "columns", "names", "max_length", "key", "version"]
    ),
)
@examples(80)
def test_any_option_is_taken_or_refused(name: str, values: list[Any], option: str) -> None:
    for value in values:
        said = "null" if value is None else str(value).lower()
        refused_or_loaded(f"stages:\n- read_parquet: d\n- {name}: {{{option}: {said}}}\n")
        refused_or_loaded(f"stages:\n- read_parquet: d\n- {name}: {said}\n")


def refused_or_loaded(text: str) -> None:
    """Raise unless a text is a config, or is refused by an error of ours that names it."""
    said = ""
    try:
        loads(text)
    except tp.TrainpipesError as error:
        said = str(error)
    assert not said or said.startswith("config")


@given(data=st.binary(max_size=80))
@settings(examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_a_config_or_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_bytes(data)
    with pytest.raises(tp.ConfigError, match=r"train\.yaml"):
        tp.load(path)
