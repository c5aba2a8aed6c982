"""What is wrong in a config is said in one sentence, with its place and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainpipes as tp
from trainpipes.config import loads

#: A source, which other stages come after.
STAGES = "stages:\n- list_files: d\n"
SFT = "recipe: sft\noptions:\n  files: x.jsonl\n  tokenizer: bytes\n"
IMPORTS = (
    "os:getcwd would be imported, and a config imports nothing by itself: if you trust it, "
    "tp.load(path, allow_imports=True), or --allow-imports in the shell"
)

#: Documents, and all that is said of them after the file's name: the errors that most people meet.
SAID: dict[str, str] = {
    STAGES + "- shufle\n": ":3: stages[1]: there is no stage 'shufle' (did you mean 'shuffle'?); one of your "
    "own is package.module:Class",
    STAGES + "- shuffle: {bufer_size: 3}\n": ":3: stages[1].bufer_size: shuffle() has no option 'bufer_size' "
    "(did you mean 'buffer_size'?); it takes buffer_size, seed, max_bytes, scope, sampler",
    STAGES + "- shuffle: {buffer_size: many}\n": ":3: stages[1].buffer_size: shuffle(buffer_size) must be "
    "an integer of 1 or more, got 'many'",
    STAGES + "- batch: {drop_last: yes}\n": ":3: stages[1].drop_last: batch(drop_last) must be True "
    "or False, got 'yes'",
    STAGES + "- take\n": ":3: stages[1]: take(): missing a required argument: 'count'; it is take(count)",
    STAGES + "- map: os:getcwd\n": f":3: stages[1].fn: {IMPORTS}",
    SFT.replace("sft", "stf"): ":1: recipe: no recipe 'stf' (did you mean 'sft'?); installed are chat, "
    "classification, images, masked_lm, preference, pretrain, prompts, seq2seq, sft, speech, tabular, "
    "tokens, video_classification, vision_chat",
    SFT + "  batch_size: 0\n": ":5: options.batch_size: batch(batch_size) must be an integer of 1 or more, "
    "got 0",
    STAGES + "- list_files: ${NOPE_X}\n": ":3: stages[1]: list_files is a source, which only the first "
    "stage is",
}  # fmt: skip

#: Documents, and how what is said of them begins.
BEGINS: dict[str, str] = {
    "": ":1: a config must be a mapping with recipe: or stages:, got nothing",
    "- a": ":1: a config must be a mapping with recipe: or stages:, got a list",
    "{}": ":1: a config must be a mapping",
    "pipeline:\n- take: 3\n2: x\n": ":1: a config must be a mapping with recipe: or stages:, got the "
    "keys 'pipeline', 2",
    "stages: []": ":1: a config must have a recipe or some stages",
    "stages: {a: b}": ":1: stages: stages must be a list, got a mapping",
    "recipe: sft\nstagess: []\n": ":2: stagess: there is no 'stagess' in a config (did you mean 'stages'?)",
    "recipe: [a]": ":1: recipe: no recipe",
    "recipe: sft\nfiles: x\n": ":2: files: there is no 'files' in a config; there are recipe, "
    "options, stages; an option of the recipe is options.files",
    "recipe: sft\noptions: [a]\n": ":2: options: options must be a mapping, got a list",
    "stages: [list_files: d]\noptions: {a: 1}": ":2: options: options are those of a recipe",
    "recipe: sft\n": ":1: recipe: recipe 'sft': missing a required argument: 'files'; it is sft(files, tok",
    "stages:\n- batch: 8\n": ":2: stages[0]: the first stage must be a source such as list_files, got batch",
    "stages:\n- read_parquet: {columns: [a]}\n": ":2: stages[0]: read_parquet as the first stage needs its f",
    STAGES + "- {batch: 8, pin: }\n": ":3: stages[1]: a stage must be a name, or a name and its options",
    STAGES + "- []\n": ":3: stages[1]: a stage must be a name",
    STAGES + "- 3\n": ":3: stages[1]: a stage must be a name",
    STAGES + "- !function int32\n": ":3: stages[1]: a stage must be a name",
    **{
        STAGES + f"- filter: !function {name}\n": ":3: stages[1].predicate: a function must be named "
        f"package.module:function, got '{name}'"
        for name in ("os", "3", "a:b:c")
    },
    STAGES + "- batch: {1: 2}\n": ":3: stages[1]: ",
    STAGES + "- pin: 3\n": ":3: stages[1]: pin has no options, got 3",
    STAGES + "- batch: '8'\n": ":3: stages[1].batch_size: batch(batch_size) must be an integer of 1 ",
    STAGES + "- shuffle:\n    scope:\n      all\n": ":4: stages[1].scope: shuffle(scope) must be ",
    STAGES + "- rename: [a]\n": ":3: stages[1].names: rename(names) must be a dict of old names to new o",
    STAGES + "- pad_collate: {dtype: int33}\n": ":3: stages[1].dtype: a dtype must be one of torch",
    STAGES + "- read_json: {schema: {x: int65}}\n": ":3: stages[1].schema: an Arrow type must be int64,",
    STAGES + "- filter: x > 3\n": ":3: stages[1].predicate: filter(predicate) must be a function of one row",
    STAGES + "- filter: [[x, near, 3]]\n": ":3: stages[1].predicate: filter(predicate) must be a pyarrow exp",
    STAGES + "- read_parquet: {storage_options: {key: 3}}\n": ":3: stages[1].storage_options: "
    "storage_options are not part of a config: tp.load(path, storage_options=...)",
    STAGES + "- os:getcwd: {}\n": f":3: stages[1]: {IMPORTS}",
    "stages:\n- mix: {sources: {a: x}}\n": ":2: stages[0].sources: mix(sources): 'a' must be a pipeline",
    "stages:\n- mix: {sources: {a: !pipeline [x]}}\n": ":2: stages[0].sources.a: a config must be a mapping",
    "stages:\n- mix:\n    sources:\n      a: !pipeline {stages: [{list_files: d}, {shufle: 3}]}\n": ":4: "
    "stages[0].sources.a.stages[1]: there is no stage 'shufle' (did you mean 'shuffle'?)",
    SFT + "  batch_size: two\n": ":5: options.batch_size: batch(batch_size) must be an integer of ",
    SFT.replace("sft", "chat") + "  packed: no\n": ":5: options.packed: chat(packed) must be True or Fal",
    SFT.replace("x.jsonl", "y.jsonl"): ":3: options.files: there is no file or folder 'y.jsonl'",
    SFT.replace("x.jsonl", "[1, 2]"): ":3: options.files: sft takes files (a path, folder, glob, URL",
    SFT.replace("bytes", "3"): ":4: options.tokenizer: a tokenizer is the path of a tokenizer.json",
    SFT.replace("bytes", "/nope/t.json"): ":4: options.tokenizer: there is no tokenizer /nope/t.json",
    SFT + "stages:\n- tak: 3\n": ":6: stages[0]: there is no stage 'tak' (did you mean 'take'?)",
    "stages: [list_files: '${NOPE_X}']": ":1: stages[0].urls: the environment variable NOPE_X is not set: se",
    "stages: [list_files: '${a']": ":1: stages[0].urls: a variable is ${NAME} or ${NAME:-default}",
    STAGES + "- shuffle: {buffer_size: ${N}}\n": ":3: this is no YAML: while parsing a flow mapping expected "
    "',' or '}', but got '{'; within {} and [] put ${NAME} in quotes",
    "a: 1\na: 2\n": ":2: the key 'a' stands here twice",
    "? [a]\n: 1\n": ":1: a key must be text or a number",
    "a: b\n--- \nc: d": ":2: this is no YAML: expected a single document in the stream but found another",
    "a: [b\nc: d": ":2: this is no YAML: ",
    "a: *x": ":1: this is no YAML: found undefined alias 'x'",
    "a:\n\t- b": ":2: this is no YAML: while scanning for the next token found character '\\t'",
    "a: \x01": ":1: this is no YAML: special characters are not allowed",
    STAGES + "- batch: {1: 8}\n": ":3: stages[1]: an option's name must be text, got 1",
    SFT + "  2: 8\n": ":5: options: an option's name must be text, got 2",
    "a: !foo x": ":1: there is no tag '!foo'; there are !function, !pipeline",
    "a: !!set {x}": ":1: there is no tag '!!set'",
    "stages: [list_files: d, take: !!int x]": ":1: 'x' is no int: ",
    STAGES + "- batch: {drop_last: !!bool yes}\n": ":3: 'yes' is no bool: ",
    STAGES + "- take: !!null none\n": ":3: 'none' is no null: ",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of prompts and responses, which is the one to work in."""
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOPE_X", raising=False)
    return tmp_path


def refused(text: str) -> str:
    """What is said of a text, or of a file with it."""
    Path("train.yaml").write_text(text)
    with pytest.raises(tp.TrainpipesError) as found:
        loads(text, name="train.yaml")
    assert found.value.path in ("train.yaml", "y.jsonl", "/nope/t.json")
    with pytest.raises(tp.TrainpipesError) as again:
        tp.load("train.yaml")
    assert str(again.value) == str(found.value)
    return str(found.value).removeprefix("train.yaml")


@pytest.mark.parametrize("text", [*SAID, *BEGINS])
def test_what_is_wrong_is_named_at_its_place_with_the_way_out(text: str) -> None:
    said = refused(text)
    begins = SAID.get(text, BEGINS.get(text, ""))
    assert said[: len(begins)] == begins
    assert said == begins or text in BEGINS


def test_another_option_of_the_same_value_is_not_blamed() -> None:
    text = SFT + "  seed: -3\n  buffer_size: 5\n  max_length: 5\n  num_shards: -3\n"
    with pytest.raises(tp.ConfigError, match=r"^config:8: options.num_shards: "):
        loads(text)


def test_a_word_of_the_message_is_no_value_that_is_to_blame() -> None:
    said = refused("recipe: sft\noptions:\n  prompt: is\n  files: y.jsonl\n  tokenizer: bytes\n")
    assert said.startswith(":4: options.files: there is no file")


@pytest.mark.parametrize(("data", "said"), [
    (b"a\0b", "train.yaml:1: this is no YAML"),
    (b"a: b\nc: \xff\n", "train.yaml: a config must be UTF-8"),
    ("a: b".encode("utf-16"), "train.yaml: a config must be UTF-8"),
    (b"a: " + b"x" * (1 << 20), "train.yaml: a config must have at most 1,048,576 bytes"),
    (b"stages: [list_files: d]\n#" + "ü".encode() * (1 << 19) + b"\nstages2: x",
        "train.yaml: a config must have at most 1,048,576 bytes"),
], ids=["binary", "no utf-8", "utf-16", "too large", "too large in bytes"])  # fmt: skip
def test_a_file_that_is_no_text_is_refused(data: bytes, said: str) -> None:
    Path("train.yaml").write_bytes(data)
    with pytest.raises(tp.ConfigError) as found:
        tp.load("train.yaml")
    assert str(found.value).startswith(said)


def test_a_path_that_is_none_is_refused(folder: Path) -> None:
    for path in ("no.yaml", folder, "a\0b"):
        with pytest.raises(tp.ConfigError, match=r"^the config '.*' cannot be read: "):
            tp.load(path)
    with pytest.raises(tp.ConfigError, match=r"path of a YAML file, got 3; .*loads\(text\)"):
        tp.load(3)  # type: ignore[arg-type]
    with pytest.raises(tp.ConfigError, match=r"loads\(text\) must be text"):
        loads(b"a: b")  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "said"), [
    ({"changes": [("stages[0].urls", "e")]}, r"load\(changes\) must be a dict, got 'list'"),
    ({"changes": {5: "e"}}, "5 is no path: it is written as options.batch_size or "),
    ({"storage_options": ["secret"]}, r"load\(storage_options\) must be a dict, got 'list'$"),
])  # fmt: skip
def test_options_beside_the_file_are_dicts(options: Any, said: str) -> None:
    with pytest.raises(tp.ConfigError, match=said):
        loads(STAGES, **options)


def test_a_byte_order_mark_is_no_part_of_it() -> None:
    Path("train.yaml").write_bytes(b"\xef\xbb\xbfstages: [{list_files: d}]\r\n")
    assert tp.load("train.yaml") == tp.list_files("d")
