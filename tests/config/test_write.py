"""What ``to_yaml`` writes, how it looks, and what it refuses."""

from __future__ import annotations

import datetime
import enum
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from every_recipe import words
from every_stage import double
from interpreters import python
from trainpipes.config import loads

ROWS = tp.list_files("data/*.parquet").read_parquet()


def body(pipe: tp.Pipeline) -> str:
    """The text of a pipeline without its first lines."""
    return pipe.to_yaml().split("stages:\n- list_files: data/*.parquet\n- read_parquet\n", 1)[1]


def test_a_text_is_written_to_be_read() -> None:
    pipe = ROWS.filter([("n", ">", 3), ("lang", "in", ["en", "de"])]).shuffle(100)
    pipe = pipe.rename({"yes": "a: b", "1e3": "${x}"}).map(double).batch(8)
    assert body(pipe.pad_collate(dtype=torch.int32)) == (
        "- filter: [['n', '>', 3], [lang, in, [en, de]]]\n"
        "- shuffle: 100\n"
        "- rename: {names: {'yes': 'a: b', '1e3': '$${x}'}}\n"
        "- map: !function every_stage:double\n"
        "- batch: 8\n"
        "- pad_collate: {dtype: int32}\n"
    )
    assert body(ROWS.tokenize("bytes", template="Question: {text}\n\nAnswer:\n")) == (
        "- tokenize:\n    tokenizer: bytes\n    template: |\n      Question: {text}\n\n      Answer:\n"
    )
    assert body(ROWS.select(*(f"column {n}" for n in range(9)))).count("\n") == 10
    assert ROWS.to_yaml().startswith(f"# trainpipes {tp.__version__}\nstages:\n")


def test_a_file_is_written_whole_or_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a b.yaml"
    path.write_text("old")
    with pytest.raises(tp.ConfigError):
        ROWS.map(lambda row: row).to_yaml(path)
    assert path.read_text() == "old"
    assert ROWS.to_yaml(path) == path.read_text()
    assert tp.load(path) == ROWS
    assert [one.name for one in tmp_path.iterdir()] == ["a b.yaml"]
    with pytest.raises(tp.ConfigError, match=r"no/a.yaml cannot be written: "):
        ROWS.to_yaml(tmp_path / "no" / "a.yaml")
    with pytest.raises(tp.ConfigError, match=r"to_yaml\(\): \. cannot be written: "):
        ROWS.to_yaml(".")
    with pytest.raises(tp.ConfigError, match=r"to_yaml\(path\) must be a path on this machine"):
        ROWS.to_yaml("s3://bucket/a.yaml")


class Lower(tp.RowStage):
    column: str | None = "text"

    def apply(self, row: Any) -> Any:
        return row


class Kind(str, enum.Enum):  # noqa: UP042
    GLOBAL = "global"


class Keyed(tp.RowStage):
    api_key: str | None
    more: Any = None

    def apply(self, row: Any) -> Any:
        return row


IMPORT = "define it at the top of a module, and the config names it package.module:function"
MEMORY = (
    "rows in memory have no place in a config: write them to files once, as with .write_parquet(folder), and "
    "read these"
)
IN_CODE = "has no form in a config: this pipeline belongs in code"
SECRET = (
    "a URL with a user, a password or values in its query may hold a secret: give it with storage_options, "
    "or write ${VARIABLE} there, by hand"
)
NO_SCHEMA = (
    "a schema with metadata, with columns that may not be null, or of types beyond a name or a list, "
    f"{IN_CODE}"
)
SCHEMA = pa.schema([pa.field("x", pa.int64(), nullable=False)])
REFUSED: dict[str, tuple[Any, str]] = {
    "lambda": (lambda: ROWS.map(lambda row: row),
        f"map(fn): a config cannot import {__name__}:<lambda>.<locals>.<lambda>: {IMPORT}"),
    "partial": (lambda: ROWS.map(partial(double, x=1)), f"map(fn): an object of functools.partial {IN_CODE}"),
    "array": (lambda: ROWS.then(Keyed(None, np.zeros(2))),
        f"keyed(more): an object of numpy.ndarray {IN_CODE}"),
    "enum": (lambda: ROWS.then(Keyed(None, {"x": [Kind.GLOBAL]})),
        f"keyed(more): an object of {__name__}.Kind {IN_CODE}"),
    "sampler": (lambda: tp.from_memmap("m").shuffle(sampler=tp.samplers.RandomSampler(seed=1)),
        f"shuffle(sampler): an object of trainpipes.samplers.orders.RandomSampler {IN_CODE}"),
    "date": (lambda: ROWS.filter([("day", ">", datetime.date(2020, 1, 1))]),
        f"filter(predicate): an object of datetime.date {IN_CODE}"),
    "type": (lambda: tp.read_json("d", schema=pa.schema([("x", pa.struct([("y", pa.int8())]))])),
        f"read_json(schema): {NO_SCHEMA}"),
    "schema": (lambda: tp.read_json("d", schema=SCHEMA), f"read_json(schema): {NO_SCHEMA}"),
    "dtype": (lambda: ROWS.batch(2).pad_collate(columns={"x": {"dtype": torch.int32}}),
        f"pad_collate(columns): an object of torch.dtype {IN_CODE}"),
    "table": (lambda: tp.from_arrow(pa.table({"x": [1]})), f"from_arrow(table): {MEMORY}"),
    "tensors": (lambda: tp.from_tensors(torch.arange(3)), f"from_tensors(tensors): {MEMORY}"),
    "rows": (lambda: tp.from_dataset([1, 2]), f"from_dataset(dataset): {MEMORY}"),
    "list": (lambda: tp.from_iterable([1, 2]), f"from_iterable(factory): {MEMORY}"),
    "within": (lambda: tp.mix({"a": tp.from_dataset([1, 2])}), f"from_dataset(dataset): {MEMORY}"),
    "user": (lambda: tp.list_files(["a", "sftp://me@host/a"]), f"list_files(urls): {SECRET}"),
    "signed": (lambda: tp.list_files("https://host/a?X-Amz-Signature=abc"), f"list_files(urls): {SECRET}"),
    "key": (lambda: ROWS.then(Keyed("abc")),
        "keyed(api_key): 'api_key' may be a secret: write ${VARIABLE} there, by hand"),
    "key within": (lambda: ROWS.then(Keyed(None, [{"token": "abc"}])),
        "keyed(more): 'token' may be a secret: write ${VARIABLE} there, by hand"),
    "catalog": (lambda: tp.read_iceberg("a.b", catalog={"token": "abc"}),
        "read_iceberg(catalog): 'token' may be a secret: write ${VARIABLE} there, by hand"),
    "expression": (lambda: ROWS.filter(pc.field("x") > 3),
        "filter(predicate): the expression '(x > 3)' has no form in a config: give it as a list, such as "
        '[["x", ">", 20], ["lang", "in", ["en", "de"]]] (see pyarrow.parquet.filters_to_expression)'),
    "tokenizer": (lambda: ROWS.tokenize(words()),
        "tokenize(tokenizer): a tokenizer that is an object (tokenizers.Tokenizer) has no form in a config: "
        'save it, as with save_pretrained(folder) or save("tokenizer.json"), and give that path'),
    "one rank": (lambda: ROWS.sharding_filter().distributed(rank=0, world_size=2),
        "what all ranks share is written, and distributed(...) is of one of them: write the pipeline before, "
        "and call distributed() on what tp.load gives"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_is_refused_with_the_way_out(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(tp.ConfigError) as found:
        make().to_yaml()
    assert str(found.value) == f"to_yaml(): {said}"


def test_names_of_columns_labels_and_sources_are_no_secrets() -> None:
    token, mixed = pa.schema([("token", pa.string())]), {"token": ROWS, "b": ROWS}
    for pipe in (
        tp.mix(mixed, weights={"token": 0.1, "b": 0.9}, schedule=[(4, {"token": 1, "b": 0})]),
        ROWS.rename({"token": "x"}),
        ROWS.encode_labels("label", classes={"token": 0}),
        ROWS.encode_categories({"token": ["a"]}),
        tp.read_json("data", schema=token),
    ):  # fmt: skip
        assert loads(pipe.to_yaml()) == pipe


def test_a_function_of_the_program_is_refused() -> None:
    program = """
import trainpipes as tp
def clean(row):
    return row
class Upper(tp.RowStage):
    def apply(self, row):
        return row
for pipe in (tp.list_files("d").map(clean), tp.list_files("d").then(Upper())):
    try:
        pipe.to_yaml()
    except tp.ConfigError as error:
        print(error)
"""
    run = subprocess.run([*python(), "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        f"to_yaml(): map(fn): a config cannot import __main__:clean: {IMPORT}",
        f"to_yaml(): upper: a config cannot import __main__:Upper: {IMPORT}",
    ]


@pytest.mark.parametrize("make", [
    lambda: ROWS.sample(1e-7).sample(0.1, seed=10**30),
    lambda: ROWS.shuffle().rename({"y": "no", "010": "1e3", "${HOME}": "$${HOME}"}),
    lambda: ROWS.encode_labels("x", classes=["a", "1", "true", "~"]),
    lambda: ROWS.batch(2).pad_collate(value=float("nan"), dtype=torch.float32),
    lambda: tp.list_files("a b").read_json(schema=pa.schema([("x", pa.list_(pa.int8()))])),
    lambda: ROWS.then(Lower(None)).then(Lower()).then(Lower("x")),
    lambda: ROWS.filter([[("x", "==", True)], [("x", "<", float("inf")), ("y z", "not in", (1, 2))]]),
])  # fmt: skip
def test_values_come_back_as_they_are(make: Any) -> None:
    pipe = make()
    again = loads(pipe.to_yaml(), allow_imports=True)
    assert again == pipe
    assert repr([s.identity() for s in again.stages]) == repr([s.identity() for s in pipe.stages])


def test_a_filter_of_a_list_is_the_one_of_the_expression(tmp_path: Path) -> None:
    rows = pa.table({"x": list(range(40)), "lang": ["en", "de", "fr", None] * 10})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=10)
    given = [["x", ">", 12], ["lang", "in", ["en", "de"]]]
    meant = (pc.field("x") > 12) & pc.field("lang").isin(["en", "de"])
    files = str(tmp_path / "a.parquet")
    listed = tp.read_parquet(files, ["x"], filter=given).filter([["x", "<", 30]]).batch(2)
    spelt = tp.read_parquet(files, ["x"], filter=meant).filter(pc.field("x") < 30).batch(2)
    again = loads(listed.to_yaml())
    assert list(again) == list(listed) == list(spelt)
    iterator = iter(spelt)
    next(iterator)
    again.load_state_dict(iterator.state_dict())
    assert list(again) == list(iterator)


def test_without_pyyaml_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainpipes._internal.checks.find_spec", lambda name: None)
    for what, call in (("tp.load", lambda: loads("a: b")), ("to_yaml", ROWS.to_yaml)):
        with pytest.raises(
            tp.MissingExtraError, match=rf"^{what} needs the package yaml.*pip install pyyaml$"
        ):
            call()
