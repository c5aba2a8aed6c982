"""``trainpipes tokenize``: what it prints, refuses and writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes.cli.app import run


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        told = [f"Document {n} of {number}. " + "On. " * (n % 9) for n in range(50)]
        table = pa.table({"text": told, "prompt": told, "response": told})
        pq.write_table(table, tmp_path / f"t {number}.parquet", row_group_size=20)
    return "t *.parquet"


def test_the_line_that_is_printed_trains_on_the_files(
    texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--recipe", "pretrain", "--tokenizer", "bytes", "--option", "max_length=64"]
    asked += ["--option", "num_shards=2"]
    assert run(["tokenize", texts, "ids", *asked, "--option", "text=text"]) == 0
    said = capsys.readouterr()
    assert said.err == "train with:\n"
    told = dict(line.split(maxsplit=1) for line in said.out.splitlines() if " " in line)
    assert (told["files"].strip(), told["rows"].strip()) == ("3", "150")
    line = said.out.splitlines()[-1]
    assert line == "tp.recipe('pretrain', 'ids', max_length=64, num_shards=2, tokenizer='bytes')"
    pipe, online = eval(line), tp.recipe("pretrain", texts, "bytes", max_length=64, num_shards=2)
    for _, one, other in zip(range(20), pipe, online, strict=False):
        assert {k: np.asarray(v).tolist() for k, v in one.items()} == {
            k: np.asarray(v).tolist() for k, v in other.items()
        }


def test_json_says_all_and_nothing_besides(texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["tokenize", texts, "ids", "--recipe", "sft", "--tokenizer", "bytes", "--json"]
    assert run(asked) == 0
    first = json.loads(capsys.readouterr().out)
    assert list(first) == [
        "folder", "files", "rows", "bytes", "columns", "kept", "tokens", "read", "format", "dtype",
        "seconds", "train",
    ]  # fmt: skip
    assert (len(first["files"]), first["kept"], first["rows"], first["dtype"]) == (3, 0, 150, None)
    assert sorted(first["columns"]) == ["input_ids", "labels"]
    assert run(asked) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["kept"] == 3
    assert {**again, "kept": 0, "seconds": 0} == {**first, "seconds": 0}


def test_the_same_call_says_what_is_there_and_can_verify_it(
    texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["tokenize", texts, "ids", "--recipe", "sft", "--tokenizer", "bytes"]
    assert run(asked) == 0
    capsys.readouterr()
    assert run([*asked, "--verify"]) == 0
    assert "3, 3 of them there already" in capsys.readouterr().out
    path = Path("ids/part-00000.parquet")
    path.write_bytes(path.read_bytes()[:60] + b"?" + path.read_bytes()[61:])
    assert run([*asked, "--verify"]) == 1
    assert capsys.readouterr().err.endswith("overwrite=True (here: --overwrite)\n")


def test_bare_ids_are_read_by_the_line_that_is_printed(
    texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--recipe", "pretrain", "--tokenizer", "bytes", "--format", "bin"]
    assert run(["tokenize", texts, "ids", *asked, "--option", "max_length=32"]) == 0
    said = capsys.readouterr().out
    assert "of uint16" in said
    line = said.splitlines()[-1]
    assert line == "tp.recipe('tokens', 'ids/*.bin', dtype='uint16', max_length=32)"
    assert eval(line).peek()["input_ids"].shape == (8, 32)


def test_options_that_name_columns_of_texts_are_not_in_the_line(
    texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--recipe", "sft", "--tokenizer", "bytes", "--option", "context=text"]
    assert run(["tokenize", texts, "ids", *asked]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "tp.recipe('sft', 'ids', tokenizer='bytes')"


def test_storage_options_are_not_in_the_line(
    texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--recipe", "sft", "--tokenizer", "bytes", "--executor", "threads:1"]
    asked += [
        "--storage-options",
        '{"auto_mkdir": true, "of": "hunter2"}',
        "--option",
        "cache=true",
    ]
    folder = f"file://{tmp_path}/ids"
    assert run(["tokenize", texts, folder, *asked]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"tp.recipe('sft', {folder!r}, tokenizer='bytes')"
    assert "hunter2" not in said.out + said.err


@pytest.mark.parametrize(("arguments", "message"), [
    (["t*", "ids"], "--recipe NAME or --config FILE"),
    (["t*", "ids", "--config", "x.yaml"], "change them by --set"),
    (["t*", "ids", "--recipe", "sft", "--set", "a=1"], "a recipe takes --option NAME=VALUE"),
    (["t*", "ids", "--recipe", "sft", "--option", "x"], "--option must be NAME=VALUE"),
    (["t*", "ids", "--recipe", "sft", "--executor", "processes:0"], "must be threads:N"),
    (["t*", "ids", "--recipe", "sft", "--format", "csv"], "--format"),
    (["t*", "ids", "--recipe", "tokens", "--storage-options", "x"], "must be a JSON object"),
    ([], "Missing argument"),
])  # fmt: skip
def test_a_wrong_command_line_is_told_so(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tokenize", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["ids", "--recipe", "sft"], "missing a required argument: 'files'"),
    (["nothing", "ids", "--recipe", "pretrain", "--tokenizer", "bytes"], "nothing"),
    (["{texts}", "ids", "--recipe", "pretrain", "--tokenizer", "none.json"], "none.json"),
    (["{texts}", "ids", "--recipe", "pretran", "--tokenizer", "bytes"], "did you mean 'pretrain'"),
    (["{texts}", "ids", "--recipe", "masked_lm", "--tokenizer", "bytes"], "needs the mask token"),
    (["{texts}", ".", "--recipe", "pretrain", "--tokenizer", "bytes"], "holds files that are read"),
    (["{texts}", "t 0.parquet", "--recipe", "pretrain", "--tokenizer", "bytes"], "cannot be written"),
])  # fmt: skip
def test_what_fails_is_one_sentence(
    arguments: list[str], message: str, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tokenize", *(text.format(texts=texts) for text in arguments)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert message in said.err
    assert "Traceback" not in said.err


def test_a_config_is_tokenized(texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.yaml").write_text(
        "recipe: pretrain\noptions:\n  files: t *.parquet\n  tokenizer: bytes\n  max_length: 64\n"
    )
    assert run(["tokenize", "ids", "--config", "train.yaml", "--set", "options.max_length=32"]) == 0
    chain = capsys.readouterr().out.partition("tp.")[2]
    assert chain.startswith("list_files(")
    assert eval(f"(tp.{chain})").peek()["input_ids"].shape == (8, 32)
