"""``trainpipes run`` of every recipe, and what it says of a recipe's batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trainpipes as tp
import trainpipes_recipes
from every_recipe import small_tokenizer, words
from trainpipes.cli.app import run

PAIRS = [{"prompt": f"{k} + {k} =", "response": f" {2 * k}"} for k in range(32)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
    }
    for row in PAIRS
]
TEXTS = [{"text": f"a text of row {k} " * (1 + k % 3)} for k in range(32)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "chat": CHATS,
    "classification": [{"text": f"row {k}", "label": "ab"[k % 2]} for k in range(32)],
    "masked_lm": TEXTS,
    "preference": [{"prompt": f"{k}?", "chosen": " yes", "rejected": " no"} for k in range(32)],
    "pretrain": TEXTS,
    "seq2seq": PAIRS,
    "sft": PAIRS,
    "tokens": [{"tokens": list(range(k % 9 + 1))} for k in range(32)],
}
NAMES = sorted(trainpipes_recipes.__all__)


def write(name: str, folder: Path) -> list[str]:
    """Files for a recipe, and the tokenizer that it takes."""
    if name == "images":
        for k in range(8):
            (folder / "rows" / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
            pixels = np.full((8, 8, 3), 9 * k, np.uint8)
            Image.fromarray(pixels).save(folder / "rows" / "ab"[k % 2] / f"{k}.png")
        return ["--option", "size=4"]
    tp.from_dataset(ROWS[name]).write_parquet(folder / "rows")
    if name == "chat":
        small_tokenizer().save_pretrained(folder / "tokenizer")
        return ["--tokenizer", str(folder / "tokenizer")]
    if name == "masked_lm":
        words().save(str(folder / "tokenizer.json"))
        return ["--tokenizer", str(folder / "tokenizer.json")]
    return [] if name == "tokens" else ["--tokenizer", "bytes"]


def ran(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = run([str(one) for one in arguments])
    found = capsys.readouterr()
    return code, found.out + found.err


@pytest.mark.parametrize("name", NAMES)
def test_the_command_runs_it_on_files(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = write(name, tmp_path)
    code, said = ran(
        capsys, "run", name, "--files", tmp_path / "rows", *options, "--option", "batch_size=2",
        "--option", "num_shards=1", "--steps", 2, "--threads", 0, "--json",
    )  # fmt: skip
    assert code == 0, said
    assert json.loads(said)["steps"] == 2


@pytest.mark.parametrize("name", NAMES)
def test_its_first_option_is_files(name: str) -> None:
    (summary,) = (one for one in tp.recipes() if one.name == name)
    assert summary.options[0] == "files"


# Labels that are all -100


@pytest.fixture
def long_prompts(tmp_path: Path) -> Path:
    tp.from_dataset([{"prompt": "p" * 900, "response": "r"} for _ in range(32)]).write_parquet(
        tmp_path
    )
    return tmp_path


def test_no_target_at_all_is_said(long_prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "sft", "--files", long_prompts, "--tokenizer", "bytes", "--option", "max_length=32",
                 "--option", "on_error=keep", "--option", "num_shards=1"]  # fmt: skip
    code, said = ran(capsys, *arguments)
    assert code == 0
    assert "tokens       1,024, 0.0% of them targets" in said
    assert "! 0.0% of the tokens are targets" in said
    assert "on_error: skip" in said


def test_nothing_is_said_of_targets_where_there_are_no_labels(
    long_prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tp.read_parquet(long_prompts / "*.parquet").tokenize("bytes", "prompt")
    rows.batch(8).pad_collate().to_yaml(long_prompts / "prompts.yaml")
    code, said = ran(capsys, "run", long_prompts / "prompts.yaml")
    assert code == 0
    assert "targets" not in said


# What a recipe's own options can do


def uneven(folder: Path, rows: list[dict[str, Any]]) -> Path:
    tp.from_dataset(rows).write_parquet(folder / "rows")
    return folder / "rows"


def test_padding_is_cured_by_the_recipes_own_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [
        {"messages": [{"role": "user", "content": "hi " * (1 + 60 * (k % 2))},
                      {"role": "assistant", "content": "hello"}]}
        for k in range(32)
    ]  # fmt: skip
    files = uneven(tmp_path, told)
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = tmp_path / "train.yaml"
    options = f"{{files: {files}, tokenizer: {tmp_path / 'tokenizer'}, num_shards: 1}}"
    config.write_text(f"recipe: chat\noptions: {options}\n")
    by_name = [
        "chat",
        "--files",
        files,
        "--tokenizer",
        tmp_path / "tokenizer",
        "--option",
        "num_shards=1",
    ]
    for arguments in (by_name, [config]):
        _, said = ran(capsys, "run", *arguments)
        assert "cells are padding: rows share one by the option packed: true of chat" in said
        assert ".bucket_by_length" not in said


def test_padding_of_a_recipe_without_such_an_option_is_cured_in_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "p" * (1 + 60 * (k % 2)), "response": "r"} for k in range(32)]
    files = uneven(tmp_path, rows)
    _, said = ran(
        capsys, "run", "sft", "--files", files, "--tokenizer", "bytes", "--option", "num_shards=1"
    )
    assert "sft has no option for less; in a copy of it write .bucket_by_length(8)" in said


def test_stages_of_a_config_are_cured_by_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = uneven(tmp_path, [{"text": "t" * (1 + 60 * (k % 2))} for k in range(32)])
    stages = "read_parquet, {tokenize: bytes}, {batch: 8}, pad_collate"
    (tmp_path / "stages.yaml").write_text(f"stages: [{{list_files: {files}}}, {stages}]\n")
    _, said = ran(capsys, "run", tmp_path / "stages.yaml")
    assert ".bucket_by_length(8) in place of .batch(8)" in said


@pytest.mark.parametrize(
    ("recipe", "rows", "way"),
    [
        ("sft", CHATS, "use the recipe chat, which takes conversations (messages)"),
        ("sft", TEXTS, "use the recipe pretrain, which takes text (text)"),
        ("sft", ROWS["tokens"], "use the recipe tokens, which takes token ids (tokens)"),
        (
            "chat",
            PAIRS,
            "use the recipe sft, which takes prompts and responses (prompt + response)",
        ),
        ("pretrain", CHATS, "use the recipe chat, which takes conversations (messages)"),
        ("sft", ROWS["preference"], "use the recipe preference"),
    ],
)
def test_columns_of_another_recipe_name_that(
    recipe: str,
    rows: list[dict[str, Any]],
    way: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, said = ran(
        capsys, "run", recipe, "--files", uneven(tmp_path, rows), "--tokenizer", "bytes"
    )
    assert code == 1
    assert way in " ".join(said.split())
