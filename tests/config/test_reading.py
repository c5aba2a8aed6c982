"""What a config says: recipes, stages, environment variables, changes, functions, storage options."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from trainpipes.config import loads, parse_change

MODULE = """
import trainpipes as tp

def clean(row):
    return {**row, "x": row["x"] + 1}

class Nest:
    class Inner:
        @staticmethod
        def clean(row):
            return row

class Upper(tp.RowStage):
    column: str
    size: tuple[int, int] = (1, 1)

    def apply(self, row):
        return {**row, self.column: row[self.column] * 2}

def count():
    return iter(range(5))

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of one's own."""
    (tmp_path / "own_stages.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_stages", raising=False)
    import own_stages  # type: ignore[import-not-found]

    yield own_stages
    sys.modules.pop("own_stages", None)


def test_options_stand_alone_or_by_name() -> None:
    text = """
stages:
- list_files: [a/*.parquet, b]
- read_parquet: [x, y]
- shuffle: 100
- sharding_filter
- batch: 8
- pad_collate: {dtype: int32, padding_side: left}
- repeat:
"""
    rows = tp.list_files(["a/*.parquet", "b"]).read_parquet(["x", "y"]).shuffle(100)
    batches = rows.sharding_filter().batch(8)
    assert loads(text) == batches.pad_collate(dtype=torch.int32, padding_side="left").repeat()
    for files in ("x.csv", "{files: x.csv}", "{files: x.csv, columns: }"):
        assert loads(f"stages: [{{read_csv: {files}}}]") == tp.read_csv("x.csv")
    text = "stages: [{read_csv: {columns: [a], delimiter: ';', files: [x.csv, y.csv]}}]"
    assert loads(text) == tp.read_csv(["x.csv", "y.csv"], ["a"], delimiter=";")


def test_a_recipe_takes_a_pipeline_and_stages_after_it(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"q": "a", "response": "b"}\n' * 40)
    text = f"""
recipe: sft
options:
  files: !pipeline
    stages:
    - read_json: {tmp_path}/x.jsonl
    - rename: {{names: {{q: prompt}}}}
  tokenizer: bytes
stages: [take: 3]
"""
    rows = tp.read_json(f"{tmp_path}/x.jsonl").rename({"q": "prompt"})
    assert loads(text) == tp.recipe("sft", rows, "bytes").take(3)
    assert len(list(loads(text))) == 3


def test_filters_and_schemas() -> None:
    conditions = [["x", ">", 20], ["lang", "in", ["en", "de"]]]
    text = f"stages: [read_parquet: {{files: d, filter: {conditions}}}, filter: [{conditions}, [[x, <, 3]]]]"
    wanted = tp.read_parquet("d", filter=conditions).filter([conditions, [["x", "<", 3]]])
    assert loads(text) == wanted
    schema = pa.schema([("a", pa.list_(pa.int32())), ("b c", pa.timestamp("us"))])
    said = "{a: list<int32>, b c: 'timestamp[us]'}"
    found = loads(f"stages: [{{read_json: {{files: d, schema: {said}}}}}]")
    assert found == tp.read_json("d", schema=schema)


def test_scalars_are_those_of_yaml_1_2() -> None:
    text = "stages: [list_files: [yes, no, 12:30, 2024-01-31, '1', a_1, 1_000]]"
    assert loads(text) == tp.list_files(["yes", "no", "12:30", "2024-01-31", "1", "a_1", "1_000"])
    for said, value in (("010", 10), ("0x10", 16), ("0o17", 15), ("+3", 3)):
        assert loads(f"stages: [list_files: d, take: {said}]") == tp.list_files("d").take(value)
    assert loads("stages: [list_files: d, sample: 1e-3]") == tp.list_files("d").sample(0.001)


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


# Environment


def test_variables_are_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.setenv("BATCH", "16")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NOPE", raising=False)
    found = loads("stages:\n- list_files: ${DATA}/${NOPE:-train}/*.parquet\n- batch: ${BATCH}")
    assert found == tp.list_files("/data/train/*.parquet").batch(16)
    text = """
stages:
- read_parquet: d
- cache:
    path: $${DATA}
    version: '${BATCH}'
    max_bytes: ${EMPTY}
"""
    assert loads(text) == tp.read_parquet("d").cache("${DATA}", version="16")
    assert loads("stages: [list_files: '${EMPTY:-x}$5 $$ ${NOPE:-}']") == tp.list_files("x$5 $$ ")


@pytest.mark.parametrize("held", ["[a, b]", "!function os:getcwd", "a: b", "${OTHER} $${x}", "# x"])
def test_what_a_variable_holds_is_never_more_than_text(
    held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELD", held)
    assert loads("stages: [list_files: '${HELD}']") == tp.list_files(held)
    assert loads("stages:\n- list_files: ${HELD}") == tp.list_files(held)
    with pytest.raises(tp.ConfigError, match=r"there is no stage '\$\{HELD\}'"):
        loads("stages: [list_files: d, '${HELD}': 3]")


def test_a_variable_that_a_change_replaces_need_not_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOPE", raising=False)
    text = "stages:\n- list_files: ${NOPE}"
    with pytest.raises(tp.ConfigError, match=r"config:2: stages\[0\].urls: .* NOPE is not set"):
        loads(text)
    assert loads(text, changes={"stages[0].urls": "d"}) == tp.list_files("d")


# Changes

TEXT = """
stages:
- read_parquet: d/*.parquet
- sharding_filter
- shuffle: {buffer_size: 10, seed: 1}
- batch: 8
"""


def test_changes_of_any_form(tmp_path: Path) -> None:
    changes = {
        "stages[0].files": ["a", "b"], "stages[0].columns": ["x"], "stages[1].num_shards": 4,
        "stages[2].seed": 3, "stages[3].batch_size": 16,
    }  # fmt: skip
    wanted = tp.read_parquet(["a", "b"], ["x"]).sharding_filter(4).shuffle(10, seed=3).batch(16)
    assert loads(TEXT, changes=changes) == wanted
    assert loads(TEXT, changes={"stages": [{"list_files": "d"}, "pin"]}) == tp.list_files("d").pin()
    assert loads(TEXT, changes={"stages[3]": {"batch": 2}}).stages[-1].options["batch_size"] == 2
    text = "stages: [mix: {sources: {a: !pipeline {stages: [list_files: d, shuffle]}}}]"
    found = loads(text, changes={"stages[0].sources.a.stages[1].seed": 7})
    assert found == tp.mix({"a": tp.list_files("d").shuffle(seed=7)})
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' * 30)
    given: dict[str, Any] = {"options.files": f"{tmp_path}/x.jsonl", "options.tokenizer": "bytes"}
    assert loads("recipe: pretrain", changes=given) == tp.recipe("pretrain", *given.values())


def test_a_change_of_one_use_of_an_alias_leaves_the_others() -> None:
    text = "stages: [list_files: d, sample: &x {fraction: 0.5, seed: 1}, sample: *x]"
    found = loads(text, changes={"stages[1].seed": 2})
    assert [found.stages[n].options["seed"] for n in (1, 2)] == [2, 1]


def test_values_of_changes_are_as_they_are() -> None:
    changes = {"stages[0].files": "${HOME} yes $${x} https://me:pw@host/x.parquet"}
    assert loads(TEXT, changes=changes).stages[0].options["urls"] == changes["stages[0].files"]
    found = loads("stages: [list_files: d, pad_collate]", changes={"stages[1].dtype": torch.int32})
    assert found.stages[1].options["dtype"] is torch.int32


@pytest.mark.parametrize(("path", "value", "said"), [
    ("stagess[0].x", 1, "there is no 'stagess' (did you mean 'stages'?); it has stages"),
    ("stages[4].x", 1, "there is no 4; it is a list"),
    ("stages.x", 1, "there is no 'x'; it is a list"),
    ("stages[2].seed.x", 1, "there is no 'x'; it is 1"),
    ("stages[2].bufer_size", 1, "shuffle() has no option 'bufer_size' (did you mean 'buffer_size'?)"),
    ("stages[2].seed", "a", "shuffle(seed) must be an integer, got 'a'"),
    ("stages[3].batch_size", 0, "batch(batch_size) must be an integer of 1 or more"),
    ("bach_size", 0, "there is no 'bach_size' in a config; there are recipe, options, stages"),
])  # fmt: skip
def test_a_change_that_leads_nowhere_is_refused(path: str, value: Any, said: str) -> None:
    with pytest.raises(tp.ConfigError) as found:
        loads(TEXT, name="train.yaml", changes={path: value})
    assert str(found.value).startswith(f"train.yaml, changes: {path}: {said}")


def test_a_path_that_is_none_is_refused() -> None:
    for path in ("", ".a", "a..b", "a[b]", "a[0", "stages[-1].x", "a b", "[0]"):
        with pytest.raises(tp.ConfigError, match="is no path"):
            loads(TEXT, changes={path: 1})


def test_a_change_of_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", "7")
    assert parse_change(" a.b = 1e-4 ") == ("a.b", 1e-4)
    assert parse_change("a=") == ("a", None)
    assert parse_change("a=b=c") == ("a", "b=c")
    assert parse_change("a='16'") == ("a", "16")
    assert parse_change("a=[x, {y: 2}, no]") == ("a", ["x", {"y": 2}, "no"])
    assert parse_change("a=${N}") == ("a", 7)
    for wrong in ("a", "=3", "a b=3", "a=[1", "a=b: c: d", "a=!function os:getcwd"):
        with pytest.raises(tp.ConfigError):
            parse_change(wrong)
    for cut in ("a=### Q: {text}", "a=Item #5 is", "a=[x] # why", "a={b: 1} #"):
        with pytest.raises(tp.ConfigError, match="the change a: what follows a # is a comment"):
            parse_change(cut)
    assert parse_change("a='Item #5'") == ("a", "Item #5")
    assert parse_change("""a=["#", b#1, ' #']""") == ("a", ["#", "b#1", " #"])
    allowed = parse_change("a=!function os:getcwd", allow_imports=True)
    assert allowed == ("a", os.getcwd)


# Functions


def test_functions_are_imported_where_that_is_allowed(own: Any) -> None:
    text = """
stages:
- from_iterable: own_stages:count
- map: own_stages:clean
- map: !function own_stages:Nest.Inner.clean
- filter: own_stages:clean
- own_stages:Upper: x
- own_stages:Upper: {column: x, size: [2, 3]}
"""
    rows = tp.from_iterable(own.count).map(own.clean).map(own.Nest.Inner.clean)
    wanted = rows.filter(own.clean).then(own.Upper("x")).then(own.Upper("x", (2, 3)))
    assert loads(text, allow_imports=True) == wanted
    assert loads(wanted.to_yaml(), allow_imports=True) == wanted
    with pytest.raises(tp.ConfigError, match="allow_imports=True"):
        loads(text)
    changes = {"stages[1].fn": "own_stages:Nest.Inner.clean"}
    changed = loads(text, allow_imports=True, changes=changes)
    assert changed.stages[1].options["fn"] is own.Nest.Inner.clean


@pytest.mark.parametrize(("stage", "said"), [
    ("map: own_stages:nope", "stages[1].fn: own_stages:nope cannot be imported (AttributeError: "),
    ("map: own_nope:clean", "stages[1].fn: own_nope:clean cannot be imported (ModuleNotFoundError: "),
    ("map: __main__:clean", "stages[1].fn: __main__:clean cannot be imported (ImportError: other "),
    ("map: own_broken:f", "stages[1].fn: own_broken:f cannot be imported (ZeroDivisionError: "),
    ("map: own_stages:number", "stages[1].fn: map(fn) must be a function"),
    ("own_stages:clean", "stages[1]: own_stages:clean must be a class of stages"),
    ("own_stages:Upper: {colum: x}", "stages[1].colum: upper() has no option 'colum' (did you"),
])  # fmt: skip
def test_a_function_or_class_that_will_not_do(stage: str, said: str, own: Any) -> None:
    with pytest.raises(tp.ConfigError) as found:
        loads(f"stages:\n- list_files: d\n- {stage}", allow_imports=True)
    assert str(found.value).removeprefix("config:3: ").startswith(said)


# Storage options


def test_storage_options_go_to_all_that_take_them(tmp_path: Path) -> None:
    given = {"anon": True}
    found = loads("stages: [read_parquet: d, pin]", storage_options=given)
    assert [stage.options.get("storage_options") for stage in found.stages] == [None, given, None]
    assert found == tp.read_parquet("d", storage_options=given).pin()
    text = "stages: [mix: {sources: {a: !pipeline {stages: [read_parquet: d]}}}]"
    inner = loads(text, storage_options=given).stages[0].options["sources"]["a"]
    assert inner.stages[1].options["storage_options"] == given
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    text = f"recipe: pretrain\noptions: {{files: {tmp_path}/x.jsonl, tokenizer: bytes}}"
    made = tp.recipe("pretrain", f"{tmp_path}/x.jsonl", "bytes", storage_options={})
    assert loads(text, storage_options={}) == made
    with pytest.raises(tp.ConfigError, match="no stage of it takes any"):
        loads("stages: [from_memmap: m]", storage_options=given)


def test_storage_options_are_not_written(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' * 9)
    given = {"auto_mkdir": False}
    chain = tp.read_json(f"{tmp_path}/*.jsonl", storage_options=given).batch(2)
    made = tp.recipe("pretrain", f"{tmp_path}/*.jsonl", "bytes", storage_options=given)
    for pipe in (chain, made):
        text = pipe.to_yaml()
        assert "# storage_options are not written: tp.load(path, storage_options=...)" in text
        assert "auto_mkdir" not in text
        for again in (loads(text), loads(text, storage_options=given)):
            assert again.state_dict()["pipeline"] == pipe.state_dict()["pipeline"]
