"""What is wrong in a config is said in one sentence, with its place and the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainpipes as tp
from trainpipes.config import loads

#: A source, which other stages come after.
STAGES = "stages:\n- list_files: d\n"

#: Documents, and what is said of them after the file's name.
WRONG: list[tuple[str, str]] = json.loads(Path(__file__).with_name("wrong.json").read_text())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of prompts and responses, which is the one to work in."""
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOPE_X", raising=False)
    return tmp_path


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_wrong_value_is_named(text: str, said: str, folder: Path) -> None:
    with pytest.raises(tp.TrainpipesError) as found:
        loads(text, name="train.yaml")
    assert str(found.value) == f"train.yaml{said}"
    (folder / "train.yaml").write_text(text)
    with pytest.raises(tp.TrainpipesError) as found:
        tp.load("train.yaml")
    assert str(found.value) == f"train.yaml{said}"


FILES = [
    (b"a\0b", "train.yaml: a config is a text file of YAML, and this is binary"),
    (b"a: b\nc: \xff\n", "train.yaml:2: a config is UTF-8, and byte 0xff is not: save it as UTF-8"),
    (
        "a: b".encode("utf-16"),
        "train.yaml: a config is UTF-8, and this is UTF-16: save it as UTF-8",
    ),
    (
        b"a: " + b"x" * (1 << 20),
        "train.yaml: a config has 1,048,576 bytes at most, and this has more: keep data in files",
    ),
]


@pytest.mark.parametrize(("data", "said"), FILES, ids=["binary", "no utf-8", "utf-16", "too large"])
def test_a_file_that_is_no_text_is_refused(data: bytes, said: str, folder: Path) -> None:
    (folder / "train.yaml").write_bytes(data)
    with pytest.raises(tp.ConfigError) as found:
        tp.load("train.yaml")
    assert str(found.value) == said


def test_a_path_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(tp.ConfigError, match=r"^there is no config no.yaml$"):
        tp.load("no.yaml")
    with pytest.raises(tp.ConfigError, match="is a folder"):
        tp.load(folder)
    with pytest.raises(tp.ConfigError, match=r"cannot be read"):
        tp.load("a\0b")
    with pytest.raises(tp.ConfigError, match=r"path of a YAML file, got 3; .*loads\(text\)"):
        tp.load(3)  # type: ignore[arg-type]
    with pytest.raises(tp.ConfigError, match=r"loads\(text\) is text"):
        loads(b"a: b")  # type: ignore[arg-type]


def test_a_byte_order_mark_is_no_part_of_it(folder: Path) -> None:
    (folder / "train.yaml").write_bytes(b"\xef\xbb\xbfstages: [{list_files: d}]\r\n")
    assert tp.load("train.yaml") == tp.list_files("d")


def test_errors_carry_their_file(folder: Path) -> None:
    with pytest.raises(tp.ConfigError) as found:
        loads(STAGES + "- batch: 0", name="train.yaml")
    assert found.value.path == "train.yaml"
    with pytest.raises(tp.MissingFilesError) as missing:
        loads("recipe: sft\noptions: {files: y.jsonl, tokenizer: bytes}", name="train.yaml")
    assert str(missing.value).startswith("train.yaml:2: options.files: there is no file")


def test_the_first_error_of_a_file_is_told(folder: Path) -> None:
    text = STAGES + "- batch: many\n- shufle\n- take: x\n"
    with pytest.raises(tp.ConfigError, match=r"^config:3: stages\[1\].batch_size"):
        loads(text)


def test_another_option_of_the_same_value_is_not_blamed(folder: Path) -> None:
    text = """
recipe: sft
options:
  files: x.jsonl
  tokenizer: bytes
  seed: -3
  buffer_size: 5
  max_length: 5
  num_shards: -3
"""
    with pytest.raises(tp.ConfigError, match=r"^config:9: options.num_shards: ") as found:
        loads(text)
    assert "num_shards" in found.value.message.split(": ", 2)[2]


def test_a_deep_document_is_no_recursion_error() -> None:
    for text in ("[" * 100_000, "{a: " * 100_000, "- " * 50_000):
        with pytest.raises(tp.ConfigError, match="64 deep"):
            loads(text)


def test_aliases_cannot_make_it_deep() -> None:
    lines = ["- &a0 [x]", *(f"- &a{n} [*a{n - 1}]" for n in range(1, 5000))]
    with pytest.raises(tp.ConfigError, match="64 deep"):
        loads("\n".join(lines))


def test_aliases_cannot_make_it_large() -> None:
    lines = [
        "a0: &a0 [x, x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)),
    ]
    with pytest.raises(tp.ConfigError, match="100,000 values at most"):
        loads("\n".join(lines))


def test_an_alias_stands_for_what_it_names() -> None:
    text = """
stages:
- mix:
    sources:
      a: !pipeline
        stages: &rows [{list_files: d}, {read_parquet: &columns [x, y]}]
      b: !pipeline {stages: *rows}
- select: *columns
"""
    rows = tp.list_files("d").read_parquet(["x", "y"])
    assert loads(text) == tp.mix({"a": rows, "b": rows}).select("x", "y")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STAGES + "- batch: !set [[1], 2]\n",
         "train.yaml:3: stages[1].batch_size[0]: batch(batch_size): a !set holds texts, numbers and tuples; "
         "got [1]"),
        ("recipe: sft\noptions:\n  tokenizer: bytes\n  files: [1, 2]\n",
         "train.yaml:4: options.files: sft takes files (a path, folder, glob, URL, or a list of them)"),
    ],
    ids=["set", "files"],
)  # fmt: skip
def test_values_of_the_wrong_kind_are_named_at_their_place(text: str, said: str) -> None:
    with pytest.raises(tp.ConfigError) as found:
        loads(text, name="train.yaml")
    assert str(found.value).startswith(said)
