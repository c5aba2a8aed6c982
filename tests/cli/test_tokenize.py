"""``trainpipes tokenize``: what it prints, refuses and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from command import Ran
from trainpipes.testing import digest


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        told = [f"Document {n} of {number}. " + "On. " * (n % 9) for n in range(50)]
        table = pa.table({"text": told, "prompt": told, "response": told})
        pq.write_table(table, tmp_path / f"t {number}.parquet", row_group_size=20)
    return "t *.parquet"


#: The arguments of a recipe, after those of the command.
SFT = ["--recipe", "sft", "--tokenizer", "bytes"]
PRETRAIN = ["--recipe", "pretrain", "--tokenizer", "bytes"]


def test_the_line_that_is_printed_trains_on_the_files(texts: str, ran: Ran) -> None:
    options = ["--option", "max_length=64", "--option", "num_shards=2", "--option", "text=text"]
    code, out, err = ran("tokenize", texts, "ids", *PRETRAIN, *options)
    assert (code, err) == (0, "train with:\n")
    told = dict(line.split(maxsplit=1) for line in out.splitlines() if " " in line)
    assert (told["files"].strip(), told["rows"].strip()) == ("3", "150")
    line = out.splitlines()[-1]
    assert line == "tp.recipe('pretrain', 'ids', max_length=64, num_shards=2, tokenizer='bytes')"
    pipe, online = eval(line), tp.recipe("pretrain", texts, "bytes", max_length=64, num_shards=2)
    for _, one, other in zip(range(20), pipe, online, strict=False):
        assert digest(one) == digest(other)


def test_files_may_be_an_option_too(texts: str, ran: Ran) -> None:
    code, out, _ = ran("tokenize", "ids", *SFT, "--option", f"files={texts}")
    assert (code, out.splitlines()[-1]) == (0, "tp.recipe('sft', 'ids', tokenizer='bytes')")


def test_json_says_all_and_nothing_besides(texts: str, ran: Ran) -> None:
    found = [ran("tokenize", texts, "ids", *SFT, "--json") for _ in "12"]
    assert [(code, err) for code, _, err in found] == [(0, "")] * 2
    first, again = (json.loads(out) for _, out, _ in found)
    assert list(first) == [
        "folder", "files", "rows", "bytes", "columns", "kept", "tokens", "read", "format", "dtype",
        "seconds", "train",
    ]  # fmt: skip
    assert (len(first["files"]), first["kept"], first["rows"], first["dtype"]) == (3, 0, 150, None)
    assert sorted(first["columns"]) == ["input_ids", "labels"]
    assert again["kept"] == 3
    assert {**again, "kept": 0, "seconds": 0} == {**first, "seconds": 0}


def test_the_same_call_says_what_is_there_and_can_verify_it(texts: str, ran: Ran) -> None:
    assert ran("tokenize", texts, "ids", *SFT)[0] == 0
    code, out, _ = ran("tokenize", texts, "ids", *SFT, "--verify")
    assert code == 0
    assert "3, 3 of them there already" in out
    path = Path("ids/part-00000.parquet")
    path.write_bytes(path.read_bytes()[:60] + b"?" + path.read_bytes()[61:])
    code, _, err = ran("tokenize", texts, "ids", *SFT, "--verify")
    assert code == 1
    assert err.endswith("overwrite=True (here: --overwrite)\n")


def test_bare_ids_are_read_by_the_line_that_is_printed(texts: str, ran: Ran) -> None:
    options = ["--format", "bin", "--option", "max_length=32"]
    code, out, _ = ran("tokenize", texts, "ids", *PRETRAIN, *options)
    assert code == 0
    assert "of uint16" in out
    line = out.splitlines()[-1]
    assert line == "tp.recipe('tokens', 'ids/*.bin', dtype='uint16', max_length=32)"
    assert eval(line).peek()["input_ids"].shape == (8, 32)


def test_options_of_texts_and_of_storage_are_not_in_the_line(
    texts: str, tmp_path: Path, ran: Ran
) -> None:
    storage = ["--storage-options", '{"auto_mkdir": true, "of": "hunter2"}']
    options = ["--executor", "threads:1", "--option", "cache=true"]
    for folder, more in (
        ("ids", ["--option", "context=text"]),
        (f"file://{tmp_path}/other", [*storage, *options]),
    ):
        code, out, err = ran("tokenize", texts, folder, *SFT, *more)
        assert code == 0
        assert out.splitlines()[-1] == f"tp.recipe('sft', {folder!r}, tokenizer='bytes')"
        assert "hunter2" not in out + err


@pytest.mark.parametrize(("arguments", "message"), [
    (["t*", "ids"], "--recipe NAME or --config FILE"),
    (["t*", "ids", "--config", "x.yaml"], "change them by --set"),
    (["t*", "ids", "--recipe", "sft", "--set", "a=1"], "a recipe takes --option NAME=VALUE"),
    (["t*", "ids", "--recipe", "sft", "--option", "x"], "--option must be NAME=VALUE"),
    (["t*", "ids", "--recipe", "sft", "--option", "prompt=Item #5"], "what follows a # is a comment"),
    (["t*", "ids", "--recipe", "sft", "--executor", "processes:0"], "must be threads:N"),
    (["t*", "ids", "--recipe", "sft", "--format", "csv"], "--format"),
    (["t*", "ids", "--recipe", "tokens", "--storage-options", "x"], "must be a JSON object"),
    ([], "Missing argument"),
])  # fmt: skip
def test_a_wrong_command_line_is_told_so(arguments: list[str], message: str, ran: Ran) -> None:
    code, _, err = ran("tokenize", *arguments)
    assert code == 2
    assert message in err


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
    arguments: list[str], message: str, texts: str, ran: Ran
) -> None:
    code, out, err = ran("tokenize", *(text.format(texts=texts) for text in arguments))
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_a_config_is_tokenized(texts: str, ran: Ran) -> None:
    Path("train.yaml").write_text(
        "recipe: pretrain\noptions:\n  files: t *.parquet\n  tokenizer: bytes\n  max_length: 64\n"
    )
    options = ["--config", "train.yaml", "--set", "options.max_length=32"]
    code, out, _ = ran("tokenize", "ids", *options)
    assert code == 0
    chain = out[out.index("(\n") :]
    assert chain.startswith("(\n  tp.list_files(")
    assert eval(chain).peek()["input_ids"].shape == (8, 32)


def test_stages_that_are_printed_to_train_with_can_be_pasted(texts: str, ran: Ran) -> None:
    Path("own.yaml").write_text(
        f"stages:\n- list_files: {texts!r}\n- read_parquet\n- tokenize: {{tokenizer: bytes, columns: text}}\n"
        "- batch: 4\n- pad_collate\n"
    )
    code, out, _ = ran("tokenize", "--config", "own.yaml", "ids")
    assert code == 0
    pasted = out[out.index("(\n") :]
    assert [digest(one) for one in eval(pasted)] == [digest(one) for one in tp.load("own.yaml")]


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": row["input_ids"] * 2}


@pytest.mark.parametrize("stages", [
    f"- map: !function {__name__}:double\n- batch: 4\n- pad_collate\n",
    "- batch: 4\n- pad_collate: {columns: {input_ids: {max_length: 9, padding_side: left, value: "
    "7, truncation_side: left}}}\n",
])  # fmt: skip
def test_stages_that_cannot_be_pasted_are_printed_as_a_config(
    stages: str, texts: str, ran: Ran
) -> None:
    Path("own.yaml").write_text(
        f"stages:\n- list_files: {texts!r}\n- read_parquet\n- select: text\n- tokenize: bytes\n{stages}"
    )
    code, out, err = ran("tokenize", "--config", "own.yaml", "ids", "--allow-imports")
    assert (code, err) == (0, "train with this config:\n")
    Path("train.yaml").write_text(out[out.index("# trainpipes") :])
    pipes = [tp.load(name, allow_imports=True) for name in ("train.yaml", "own.yaml")]
    assert len({tuple(map(digest, pipe)) for pipe in pipes}) == 1
