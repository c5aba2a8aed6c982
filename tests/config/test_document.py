"""What a config says: recipes, stages, environment variables, changes, functions, storage options."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

import trainpipes as tp
from trainpipes.config import loads, parse_change

MODULE = """
import functools
import numpy as np
from dataclasses import dataclass
import trainpipes as tp

def clean(row):
    return {**row, "x": row["x"] + 1}

def scaled(row, by, plus=(0,)):
    return {**row, "x": row["x"] * by + sum(plus)}

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

@dataclass(frozen=True)
class Times:
    by: int
    more: tuple[int, ...] = ()

    def __call__(self, row):
        return {**row, "x": row["x"] * self.by}

@dataclass
class Squares:
    n: int

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"x": i * i}

def count():
    return iter(range(5))

hidden = lambda row: row
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of one's own."""
    (tmp_path / "own_stages.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_stages", raising=False)
    import own_stages  # type: ignore[import-not-found]

    yield own_stages
    sys.modules.pop("own_stages", None)


def test_the_first_option_stands_alone() -> None:
    text = """
stages:
- list_files: [a/*.parquet, b]
- read_parquet: [x, y]
- shuffle: 100
- sharding_filter
- batch: 8
- pad_collate: {dtype: !dtype int32, padding_side: left}
- repeat:
"""
    wanted = (
        tp.list_files(["a/*.parquet", "b"])
        .read_parquet(["x", "y"])
        .shuffle(100)
        .sharding_filter()
        .batch(8)
        .pad_collate(dtype=torch.int32, padding_side="left")
        .repeat()
    )
    assert loads(text) == wanted
    assert repr(loads(text)) == repr(wanted)


@pytest.mark.parametrize(
    "stage",
    [
        "read_csv: data/*.csv",
        "read_csv: {files: data/*.csv}",
        "read_csv: {files: data/*.csv, columns: }",
    ],
)
def test_a_reader_takes_its_files_as_in_code(stage: str) -> None:
    assert loads(f"stages: [{{{stage}}}]") == tp.read_csv("data/*.csv")


def test_a_reader_with_files_and_options() -> None:
    text = "stages: [{read_csv: {columns: [a], delimiter: ';', files: [x.csv, y.csv]}}]"
    assert loads(text) == tp.read_csv(["x.csv", "y.csv"], ["a"], delimiter=";")


def test_stages_after_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 40)
    text = (
        f"recipe: sft\noptions: {{files: {tmp_path}/x.jsonl, tokenizer: bytes}}\nstages: [take: 3]"
    )
    assert loads(text) == tp.recipe("sft", f"{tmp_path}/x.jsonl", "bytes").take(3)
    assert len(list(loads(text))) == 3


def test_a_recipe_takes_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"q": "a", "response": "b"}\n' * 30)
    text = f"""
recipe: sft
options:
  files: !pipeline
    stages:
    - read_json: {tmp_path}/x.jsonl
    - rename: {{names: {{q: prompt}}}}
  tokenizer: bytes
"""
    rows = tp.read_json(f"{tmp_path}/x.jsonl").rename({"q": "prompt"})
    assert loads(text) == tp.recipe("sft", rows, "bytes")


def test_values_that_yaml_has_no_form_for() -> None:
    text = """
stages:
- read_parquet:
    files: d
    filter: x > 20 and lang in ['en', 'de']
- map_batches: !function builtins:len
- filter: not is_null(x)
"""
    wanted = (
        tp.read_parquet("d", filter=(pc.field("x") > 20) & pc.field("lang").isin(["en", "de"]))
        .map_batches(len)
        .filter(~pc.field("x").is_null())
    )
    assert loads(text, allow_imports=True) == wanted
    schema = pa.schema([("a", pa.list_(pa.int32())), pa.field("b c", pa.string(), nullable=False)])
    for said in (
        "{a: list<int32>, b c: string not null}",
        "!schema {a: list<int32>, b c: string not null}",
    ):
        found = loads(f"stages: [{{read_json: {{files: d, schema: {said}}}}}]")
        assert found == tp.read_json("d", schema=schema)
    sampler = tp.samplers.RandomSampler(seed=3)
    found = loads(
        "stages: [{from_memmap: m}, {shuffle: {sampler: !sampler {RandomSampler: {seed: 3}}}}]"
    )
    assert found.stages[1].options["sampler"] == sampler
    found = loads("stages: [{from_memmap: m}, {shuffle: {sampler: !sampler SequentialSampler}}]")
    assert found.stages[1].options["sampler"] == tp.samplers.SequentialSampler()


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


@pytest.mark.parametrize(
    "held", ["[a, b]", "{a: b}", "!function os:getcwd", "*x", "a: b", "- a", "# x"]
)
def test_what_a_variable_holds_is_never_more_than_text(
    held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELD", held)
    assert loads("stages: [list_files: '${HELD}']") == tp.list_files(held)
    assert loads("stages:\n- list_files: ${HELD}") == tp.list_files(held)


def test_what_a_variable_holds_is_not_expanded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELD", "${OTHER} $${x}")
    assert loads("stages:\n- list_files: ${HELD}") == tp.list_files("${OTHER} $${x}")


def test_names_of_stages_and_options_are_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGE", "take")
    for text in ("stages: [list_files: d, '${STAGE}': 3]", "stages: [list_files: d, '${STAGE}']"):
        with pytest.raises(tp.ConfigError, match=r"there is no stage '\$\{STAGE\}'"):
            loads(text)


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


def test_changes_of_any_form() -> None:
    changes = {
        "stages[0].files": ["a", "b"],
        "stages[0].columns": ["x"],
        "stages[1].num_shards": 4,
        "stages[2].seed": 3,
        "stages[3].batch_size": 16,
    }
    wanted = tp.read_parquet(["a", "b"], ["x"]).sharding_filter(4).shuffle(10, seed=3).batch(16)
    assert loads(TEXT, changes=changes) == wanted
    assert loads(TEXT, changes={"stages": [{"list_files": "d"}, "pin"]}) == tp.list_files("d").pin()
    assert loads(TEXT, changes={"stages[3]": {"batch": 2}}).stages[-1].options["batch_size"] == 2


def test_values_of_changes_are_as_they_are() -> None:
    changes = {"stages[0].files": "${HOME} yes $${x} https://me:pw@host/x.parquet"}
    assert loads(TEXT, changes=changes).stages[0].options["urls"] == changes["stages[0].files"]
    text = "stages: [list_files: d, batch: 2, pad_collate]"
    assert loads(text, changes={"stages[2].dtype": torch.int32}) == (
        tp.list_files("d").batch(2).pad_collate(dtype=torch.int32)
    )


def test_changes_of_options_that_the_file_has_not(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' * 30)
    changes: dict[str, Any] = {"options.files": f"{tmp_path}/x.jsonl", "options.tokenizer": "bytes"}
    found = loads("recipe: pretrain", changes=changes)
    assert found == tp.recipe("pretrain", f"{tmp_path}/x.jsonl", "bytes")


def test_changes_within_a_pipeline_of_a_mix() -> None:
    text = "stages: [mix: {sources: {a: !pipeline {stages: [list_files: d, shuffle]}}}]"
    found = loads(text, changes={"stages[0].sources.a.stages[1].seed": 7})
    assert found == tp.mix({"a": tp.list_files("d").shuffle(seed=7)})


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("stagess[0].x", 1, "stagess[0].x: the config has no 'stagess' (did you mean 'stages'?); it has "
         "stages"),
        ("stages[4].x", 1, "stages[4].x: stages has no item 4: it is 4 items"),
        ("stages.x", 1, "stages.x: stages is a list, and has no 'x'"),
        ("stages[2].bufer_size", 1, "stages[2].bufer_size: shuffle has no option 'bufer_size' (did you mean "
         "'buffer_size'?); it takes buffer_size, seed, max_bytes, scope, sampler"),
        ("stages[2].seed.x", 1, "stages[2].seed.x: stages[2].seed is text, and has no 'x'"),
        ("stages[2].seed", "a", "stages[2].seed: shuffle(seed) is an integer, a seed; got 'a'"),
        ("stages[3].batch_size", 0, "stages[3].batch_size: batch(batch_size) is an integer of 1 or more, "
         "rows in a micro-batch; got 0"),
        ("stages[3].storage_options", {"key": 1}, "stages[3].storage_options: a config holds no "
         "storage_options: give them to tp.load(..., storage_options=...), so that credentials are in no "
         "file"),
        ("bach_size", 0, "bach_size: there is no 'bach_size' in a config; there are recipe, options and "
         "stages"),
        ("stages[0].columns", object, "stages[0].columns: read_parquet(columns) names builtins:object, and a "
         "config imports nothing by itself: if you trust it, tp.load(path, allow_imports=True), or "
         "--allow-imports in the shell"),
        ("stages[0].files", sys, "stages[0].files: an object of builtins.module has no form in a config; "
         "keep this pipeline in code, or replace it by something with a name"),
    ],
)  # fmt: skip
def test_a_change_that_leads_nowhere_is_refused(path: str, value: Any, said: str) -> None:
    with pytest.raises(tp.ConfigError) as found:
        loads(TEXT, name="train.yaml", changes={path: value})
    assert str(found.value) == f"train.yaml, changes: {said}"


@pytest.mark.parametrize("path", ["", ".a", "a..b", "a[b]", "a[0", "stages[-1].x", "a b", "[0]"])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(tp.ConfigError, match="is no path"):
        loads(TEXT, changes={path: 1})


def test_a_change_of_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_change("options.batch_size=16") == ("options.batch_size", 16)
    assert parse_change(" a.b = 1e-4 ") == ("a.b", 1e-4)
    assert parse_change("a=") == ("a", None)
    assert parse_change("a=b=c") == ("a", "b=c")
    assert parse_change("a='16'") == ("a", "16")
    assert parse_change("a=[x, {y: 2}]") == ("a", ["x", {"y": 2}])
    monkeypatch.setenv("N", "7")
    found = loads(TEXT, changes=dict([parse_change("stages[3].batch_size=${N}")]))
    assert found.stages[-1].options["batch_size"] == 7
    for wrong in ("a", "=3", "a b=3", "a=[1", "a=b: c: d"):
        with pytest.raises(tp.ConfigError):
            parse_change(wrong)
    change = parse_change("stages[1].dtype=!dtype int32")
    found = loads(
        "stages: [list_files: d, pad_collate: {dtype: !dtype int64}]", changes=dict([change])
    )
    assert found.stages[1].options["dtype"] is torch.int32


# Functions


def test_functions_are_imported_where_that_is_allowed(own: Any) -> None:
    text = """
stages:
- from_iterable: own_stages:count
- map: own_stages:clean
- map: own_stages:Nest.Inner.clean
- map: !partial {function: own_stages:scaled, arguments: [2], keywords: {plus: !tuple [1, 2]}}
- map: !object {own_stages:Times: {by: 3}}
- own_stages:Upper: x
- own_stages:Upper: {column: x, size: [2, 3]}
"""
    found = loads(text, allow_imports=True)
    wanted = (
        tp.from_iterable(own.count)
        .map(own.clean)
        .map(own.Nest.Inner.clean)
        .map(partial(own.scaled, 2, plus=(1, 2)))
        .map(own.Times(3))
        .then(own.Upper("x"))
        .then(own.Upper("x", (2, 3)))
    )
    assert found == wanted
    assert loads(wanted.to_yaml(), allow_imports=True) == wanted
    assert type(loads(wanted.to_yaml(), allow_imports=True).stages[-1].options["size"]) is tuple
    with pytest.raises(tp.ConfigError, match="allow_imports=True"):
        loads(text)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_stages:nope", "own_stages:nope is not there: "),
        ("own_nope:clean", "own_nope cannot be imported (ModuleNotFoundError: No module named 'own_nope')"),
        ("__main__:clean", "__main__:clean is defined in the script that runs"),
        ("own_stages:number", "map(fn) is a function"),
        ("own_broken:f", "own_broken cannot be imported (ZeroDivisionError: division by zero)"),
    ],
)  # fmt: skip
def test_a_function_that_is_not_there(name: str, said: str, own: Any, tmp_path: Path) -> None:
    (tmp_path / "own_broken.py").write_text("1 / 0")
    with pytest.raises(tp.ConfigError) as found:
        loads(f"stages: [list_files: d, map: '{name}']", allow_imports=True)
    assert str(found.value).startswith("config:1: stages[1].fn: ")
    assert said in str(found.value)


def test_a_class_that_is_no_stage(own: Any) -> None:
    with pytest.raises(tp.ConfigError, match="own_stages:clean is no stage"):
        loads("stages: [list_files: d, 'own_stages:clean']", allow_imports=True)
    with pytest.raises(
        tp.ConfigError, match=r"stages\[1\].colum: upper has no option 'colum'|'colum'"
    ):
        loads("stages: [list_files: d, 'own_stages:Upper': {colum: x}]", allow_imports=True)
    with pytest.raises(tp.ConfigError, match=r"own_stages:Times cannot be made \(TypeError: "):
        loads(
            "stages: [list_files: d, map: !object {own_stages:Times: {bi: x}}]", allow_imports=True
        )
    with pytest.raises(tp.ConfigError, match="names a class, and own_stages:clean is none"):
        loads("stages: [list_files: d, map: !object {own_stages:clean: {}}]", allow_imports=True)


def test_rows_of_a_dataset_with_options(own: Any) -> None:
    pipe = tp.from_dataset(own.Squares(9)).shuffle(4).batch(2)
    assert loads(pipe.to_yaml(), allow_imports=True) == pipe


# Storage options


def test_storage_options_go_to_all_that_take_them(tmp_path: Path) -> None:
    given = {"anon": True}
    found = loads("stages: [read_parquet: d, pin]", storage_options=given)
    assert [stage.options.get("storage_options") for stage in found.stages] == [given, given, None]
    text = "stages: [mix: {sources: {a: !pipeline {stages: [read_parquet: d]}}}]"
    inner = loads(text, storage_options=given).stages[0].options["sources"]["a"]
    assert inner.stages[1].options["storage_options"] == given
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    text = f"recipe: pretrain\noptions: {{files: {tmp_path}/x.jsonl, tokenizer: bytes}}"
    assert loads(text, storage_options={}) == tp.recipe(
        "pretrain", f"{tmp_path}/x.jsonl", "bytes", storage_options={}
    )
    with pytest.raises(tp.ConfigError, match="no stage of it takes any"):
        loads("stages: [from_memmap: m]", storage_options=given)


def test_storage_options_are_not_written() -> None:
    pipe = tp.list_files("s3://b/x", storage_options={"key": "SECRET"}).read_parquet().batch(2)
    text = pipe.to_yaml()
    assert "SECRET" not in text
    assert "# storage_options are not written: tp.load(path, storage_options=...)" in text
    assert loads(text) == tp.list_files("s3://b/x").read_parquet().batch(2)


def test_a_fingerprint_is_the_same_with_storage_options(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' * 9)
    pipe = tp.read_json(f"{tmp_path}/*.jsonl", storage_options={"auto_mkdir": False}).batch(2)
    again = loads(pipe.to_yaml(), storage_options={"auto_mkdir": False})
    assert again.describe()["fingerprint"] == pipe.describe()["fingerprint"]
    again = loads(pipe.to_yaml())
    assert again.describe()["fingerprint"] == pipe.describe()["fingerprint"]
    np.testing.assert_array_equal(len(list(pipe)), len(list(again)))


def test_a_variable_in_braces_is_refused_with_the_way_out() -> None:
    with pytest.raises(tp.ConfigError, match="write these options one a line"):
        loads("stages:\n- list_files: d\n- shuffle: {buffer_size: ${N}}\n")
