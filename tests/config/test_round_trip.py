"""What ``to_yaml`` writes, ``load`` reads as the same pipeline: equal, with the same batches and states."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import every_stage
import trainpipes as tp
import trainpipes_recipes
from chats import conversations_of, small_tokenizer
from config.same import assert_same
from every_recipe import purchases, text_files, token_file, words
from trainpipes.config import loads
from trainpipes.interfaces.options import same

SMALL = {"batch_size": 4, "buffer_size": 16, "num_shards": 4}
#: Why a pipeline is not written.
REASONS = ("rows in memory", "has no form in a config")


def written(pipe: tp.Pipeline) -> tuple[str, str]:
    """A pipeline's text, or why it has none."""
    try:
        return pipe.to_yaml(), ""
    except tp.ConfigError as error:
        return "", str(error)


CHAINS = {**every_stage.FINITE, **every_stage.ENDLESS}


@pytest.mark.filterwarnings("ignore:pin")
@pytest.mark.parametrize("variants", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chains_of_every_stage_come_back_the_same(variants: bool, tmp_path: Path) -> None:
    names = [name for name in CHAINS if (" / " in name) == variants]
    done = []
    for name in names:
        pipe = CHAINS[name](tmp_path)
        text, refused = written(pipe)
        if refused:
            assert any(reason in refused for reason in REASONS), name
            continue
        done.append(name)
        again = loads(text, allow_imports="every_stage:" in text or "!function" in text)
        assert again.to_yaml() == text, name
        assert again == pipe, name
        assert again.state_dict() == pipe.state_dict(), name
        assert same(again.peek(), pipe.peek()), name
    assert len(done) > len(names) / 2


def rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return str(folder / f"{name}.parquet")


PAIRS = [(f"{k} + {k} =", f" {2 * k}" * (1 + k % 3)) for k in range(60)]
ALPACA = [
    {"instruction": a, "input": "now" * (k % 2), "output": b} for k, (a, b) in enumerate(PAIRS)
]
TRIPLES = [{"prompt": a, "chosen": b, "rejected": b[::-1]} for a, b in PAIRS]
LABELLED = [{"text": a + b, "label": "ab"[k % 2]} for k, (a, b) in enumerate(PAIRS)]


CHATS = [{"messages": told} for told in conversations_of(PAIRS)]
IDS = [{"input_ids": list(range(k % 40))} for k in range(200)]


@cache
def saved_words(folder: Path) -> str:
    words().save(str(folder / "words.json"))
    return str(folder / "words.json")


@cache
def saved_chats(folder: Path) -> str:
    small_tokenizer().save_pretrained(folder / "chat")
    return str(folder / "chat")


def present(folder: Path) -> tp.Pipeline:
    return tp.read_parquet(text_files(folder)).filter([["response", "!=", ""]])


#: Of a folder: the files and the options that a recipe is made with, beside SMALL.
RECIPES: dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {
    "sft": lambda f: (text_files(f), {"tokenizer": "bytes", "seed": 3}),
    "sft / alpaca": lambda f: (rows(f, "alpaca", ALPACA), {"tokenizer": "bytes"}),
    "sft / pipeline": lambda f: (present(f), {"tokenizer": "bytes"}),
    "chat": lambda f: (
        rows(f, "chats", CHATS), {"tokenizer": saved_chats(f), "roles": {"narrator": "system"}}
    ),
    "preference": lambda f: (rows(f, "dpo", TRIPLES), {"tokenizer": "bytes"}),
    "images": lambda f: (every_stage.pictures(f), {"size": 8, "scale": (0.1, 0.9)}),
    "classification": lambda f: (rows(f, "labels", LABELLED), {"tokenizer": "bytes"}),
    "masked_lm": lambda f: (text_files(f), {"tokenizer": saved_words(f)}),
    "pretrain": lambda f: (text_files(f), {"tokenizer": "bytes", "max_length": 64}),
    "prompts": lambda f: (
        text_files(f), {"tokenizer": "bytes", "num_generations": 2, "on_error": "skip", "max_length": 64}
    ),
    "seq2seq": lambda f: (text_files(f), {"tokenizer": "bytes"}),
    "tabular": lambda f: (
        purchases(f), {"categories": ["user", "seen"], "valid": 0.2, "key": "user", "fitted": f"{f}/fit.json"}
    ),
    "tokens": lambda f: (rows(f, "ids", IDS), {"max_length": 16}),
    "tokens / mapped": lambda f: (token_file(f), {"dtype": "uint16", "max_length": 16}),
}  # fmt: skip


def made(name: str, folder: Path) -> tp.Pipeline:
    files, options = RECIPES[name](folder)
    return tp.recipe(name.split(" /")[0], files, **options, **SMALL)


def test_each_recipe_is_here() -> None:
    elsewhere = {"vision_chat", "speech", "video_classification"}  # in tests/recipes
    found = {name.split(" /")[0] for name in RECIPES} | elsewhere
    assert found == set(trainpipes_recipes.__all__)


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_written_as_the_recipe(name: str, folder: Path) -> None:
    pipe = made(name, folder)
    text = pipe.to_yaml()
    assert text.split("\n")[1] == f"recipe: {name.split(' /')[0]}"
    again = loads(text)  # nothing is imported
    assert again.to_yaml() == text
    assert_same(pipe, again, items=4)


def test_only_options_that_differ_are_written(folder: Path) -> None:
    files = text_files(folder)
    pipe = tp.recipe("sft", files, tokenizer="bytes", batch_size=8, seed=5, cache=False)
    body = f"recipe: sft\noptions:\n  files: {files}\n  tokenizer: bytes\n  seed: 5\n"
    assert pipe.to_yaml() == f"# trainpipes {tp.__version__}\n{body}"


def test_stages_after_a_recipe_come_back(folder: Path) -> None:
    skipped = made("chat", folder).skip(3)
    pipe = skipped.map(dict)
    text = pipe.to_yaml()
    assert text.endswith("stages:\n- skip: 3\n- map: !function builtins:dict\n")
    with pytest.raises(tp.ConfigError, match="allow_imports"):
        loads(text)
    assert loads(skipped.to_yaml()) == skipped
    assert_same(pipe, loads(text, allow_imports=True), items=4)
    with pytest.raises(tp.ConfigError, match=r"map\(fn\): a config cannot import"):
        skipped.map(lambda row: row).to_yaml()


def test_options_may_change_after_the_recipe_took_them(folder: Path) -> None:
    files = [text_files(folder)]
    pipe = tp.recipe("sft", files, "bytes", **SMALL)
    text = pipe.to_yaml()
    files.append("another")
    assert pipe.to_yaml() == text


@pytest.mark.parametrize("name", ["chat", "images", "preference", "sft / alpaca"])
def test_a_recipe_called_as_a_function_is_written_by_its_stages_or_refused(
    name: str, folder: Path
) -> None:
    files, options = RECIPES[name](folder)
    pipe = getattr(trainpipes_recipes, name.split(" /")[0])(files, **options, **SMALL)
    text, refused = written(pipe)
    assert any(reason in refused for reason in REASONS) or loads(text, allow_imports=True) == pipe
