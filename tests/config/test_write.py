"""What ``to_yaml`` writes, how it looks, and what it refuses."""

from __future__ import annotations

import datetime
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from tokenizers import Tokenizer

import trainpipes as tp
from every_recipe import words
from every_stage import double
from recipes.chats import small_tokenizer
from trainpipes.config import loads

ROWS = tp.list_files("data/*.parquet").read_parquet()


def body(pipe: tp.Pipeline) -> str:
    """The text of a pipeline without its first lines."""
    return pipe.to_yaml().split("stages:\n- list_files: data/*.parquet\n- read_parquet\n", 1)[1]


def test_a_text_is_written_to_be_read() -> None:
    pipe = ROWS.filter((pc.field("n") > 3) & pc.field("lang").isin(["en", "de"]))
    assert body(pipe.rename({"yes": "a: b", "1e3": "${x}"}).map(double).batch(8).pad_collate()) == (
        "- filter: !expression n > 3 and lang in ['en', 'de']\n"
        "- rename: {names: {'yes': 'a: b', '1e3': '$${x}'}}\n"
        "- map: !function every_stage:double\n"
        "- batch: 8\n"
        "- pad_collate\n"
    )


def test_text_of_several_lines_is_a_block() -> None:
    pipe = ROWS.tokenize("bytes", template="Question: {text}\n\nAnswer:\n")
    assert body(pipe) == (
        "- tokenize:\n    tokenizer: bytes\n    template: |\n      Question: {text}\n\n      Answer:\n"
    )
    assert loads(pipe.to_yaml()) == pipe


def test_the_first_line_names_the_version() -> None:
    assert ROWS.to_yaml().startswith(f"# trainpipes {tp.__version__}\nstages:\n")


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "a b.yaml"
    path.write_text("old")
    assert ROWS.to_yaml(path) == path.read_text()
    assert tp.load(path) == ROWS
    assert [one.name for one in tmp_path.iterdir()] == ["a b.yaml"]
    with pytest.raises(tp.ConfigError, match=r"no/a.yaml cannot be written: "):
        ROWS.to_yaml(tmp_path / "no" / "a.yaml")


def test_what_is_refused_leaves_a_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("old")
    with pytest.raises(tp.ConfigError):
        ROWS.map(lambda row: row).to_yaml(path)
    assert path.read_text() == "old"


class Local:
    def clean(self, row: Any) -> Any:
        return row


def local() -> Any:
    def inner(row: Any) -> Any:
        return row

    return inner


MODULE = "define it at the top of a module, and the config names it package.module:function"
MEMORY = (
    "rows in memory have no place in a config: write them to files once, as with .write_parquet(folder), and "
    "read these"
)
REFUSED = {
    "lambda": (lambda: ROWS.map(lambda row: row), f"map(fn): a lambda has no name: {MODULE}"),
    "local": (
        lambda: ROWS.map(local()),
        f"map(fn): local.inner is made within a function: {MODULE}",
    ),
    "partial": (
        lambda: ROWS.map(partial(lambda row, x: row, x=1)),
        f"map(fn).func: a lambda has no name: {MODULE}",
    ),
    "argument": (
        lambda: ROWS.map(partial(double, x=[1, object()])),
        "map(fn)['x'][1]: an object of builtins.object has no form in a config; keep this pipeline in code, "
        "or replace it by something with a name",
    ),
    "table": (lambda: tp.from_arrow(pa.table({"x": [1]})), f"from_arrow(table): {MEMORY}"),
    "tensors": (lambda: tp.from_tensors(torch.arange(3)), f"from_tensors(tensors): {MEMORY}"),
    "rows": (lambda: tp.from_dataset([1, 2]), f"from_dataset(dataset): {MEMORY}"),
    "list": (lambda: tp.from_iterable([1, 2]), f"from_iterable(factory): {MEMORY}"),
    "password": (
        lambda: tp.list_files("https://me:pw@host/a.parquet"),
        "list_files(urls): it is a URL with a user or password: give it with storage_options, or write "
        "${VARIABLE} there, by hand",
    ),
    "user": (
        lambda: tp.list_files(["a", "sftp://me@host/a.parquet"]),
        "list_files(urls)[1]: it is a URL with a user or password: give it with storage_options, or write "
        "${VARIABLE} there, by hand",
    ),
    "signed": (
        lambda: tp.list_files("https://host/a.parquet?x=1&X-Amz-Signature=abc"),
        "list_files(urls): it is a URL with values in its query, which may be secret: give it with "
        "storage_options, or write ${VARIABLE} there, by hand",
    ),
    "key": (
        lambda: ROWS.map(partial(double, api_key="abc")),
        "map(fn)['api_key']: it is called 'api_key' and may be a secret: write ${VARIABLE} there, by hand",
    ),
    "large": (
        lambda: ROWS.map(partial(double, x=np.zeros(5000))),
        "map(fn)['x']: an array of 5,000 numbers is data (4,096 are written); keep it in a file",
    ),
    "expression": (
        lambda: ROWS.filter(pc.starts_with(pc.field("x"), "a")),
        "filter(predicate): the expression 'starts_with(x, {pattern=\"a\", ignore_case=false})' has no form "
        "as text, as it has a function, or a column's name, that text has no form for: "
        "write it with columns, comparisons, in, and, or, not; or put it behind as a .map_batches() "
        "of a function",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_is_refused_with_the_way_out(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(tp.ConfigError) as found:
        make().to_yaml()
    assert str(found.value) == f"to_yaml(): {said}"
    assert found.value.stage is not None


def test_a_pipeline_of_one_rank_is_refused() -> None:
    with pytest.raises(tp.ConfigError, match=r"call distributed\(\) on what tp.load gives"):
        ROWS.sharding_filter().distributed(rank=0, world_size=2).to_yaml()


def test_a_function_of_the_program_is_refused(tmp_path: Path) -> None:
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
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    first, second = run.stdout.splitlines()
    assert first == (
        f"to_yaml(): map(fn): clean is defined in the script that runs, and other programs "
        f"cannot import it from there: {MODULE}"
    )
    assert second.startswith(
        "to_yaml(): upper is a stage of your own, and Upper is defined in the script"
    )


def test_a_tokenizer_says_where_it_is(tmp_path: Path) -> None:
    words().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        tp.ConfigError, match=r'save it with save\("tokenizer.json"\), and give that path'
    ):
        ROWS.tokenize(tokenizer).to_yaml()
    small_tokenizer().save_pretrained(tmp_path / "saved")
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    with pytest.raises(
        tp.ConfigError, match=r"it is the same as that of '.*saved': give that instead"
    ):
        ROWS.tokenize(loaded).to_yaml()
    loaded.add_tokens(["more"])
    with pytest.raises(tp.ConfigError, match=r"save it with save_pretrained\(folder\)"):
        ROWS.tokenize(loaded).to_yaml()
    with pytest.raises(tp.ConfigError, match="save it to a file that"):
        ROWS.tokenize(lambda texts: [[1] for _ in texts]).to_yaml()


@pytest.mark.parametrize(
    "value",
    [
        torch.float32, pa.list_(pa.int32()),
        pa.struct([('a b', pa.string()), pa.field('c', pa.int8(), False)]),
        pa.timestamp('us', 'UTC'), pa.decimal128(5, 2), pa.dictionary(pa.int8(), pa.string()),
        pa.binary(3), pa.list_(pa.float32(), 3), pa.map_(pa.string(), pa.large_list(pa.bool_())),
        pa.time32('s'), Path('a b'),
        pa.schema([('x', pa.int64()), pa.field('y: z', pa.string(), nullable=False)]), {1, 2},
        (1, (2, [3])), np.array([[1, 2], [3, 4]], np.int8), np.array([True]),
        np.array([0.1, np.inf]), torch.tensor([1.5]), torch.tensor(3), b'\x00\xff', 2 ** 200, -0.0,
        float('inf'), {1: {2.5: None, True: 'x'}}, len, str.upper, dict, partial(double, 1),
        pc.field('x') > 3, pc.utf8_length(pc.field('a b')) > 7, tp.samplers.SequentialSampler(),
        tp.samplers.WeightedRandomSampler([1, 2], 3),
        tp.samplers.SubsetRandomSampler([3, 1], seed=4),
        tp.samplers.DistributedSampler(10, 2, 1, drop_last=True),
        tp.samplers.RandomSampler(9, True, 4),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_come_back_as_they_are(value: Any) -> None:
    pipe = ROWS.map(partial(double, value, x=value))
    found = loads(pipe.to_yaml(), allow_imports=True).stages[2].options["fn"]
    for one in (found.args[0], found.keywords["x"]):
        assert type(one) is type(value)
        if isinstance(value, np.ndarray | torch.Tensor):
            assert one.dtype == value.dtype
            assert one.tolist() == value.tolist()
        elif isinstance(value, partial):
            assert (one.func, one.args) == (value.func, value.args)
        elif isinstance(value, pc.Expression):
            assert one.equals(value)
        else:
            assert one == value
            assert repr(one) == repr(value)


def test_not_a_number_comes_back() -> None:
    pipe = ROWS.batch(2).pad_collate(value=float("nan"), dtype=torch.float32)
    assert loads(pipe.to_yaml()) == pipe


def test_partials_of_the_same_are_the_same() -> None:
    one, other = ROWS.map(partial(double, 1, x=[2])), ROWS.map(partial(double, 1, x=[2]))
    assert one == other
    assert one != ROWS.map(partial(double, 1, x=[3]))
    assert one != ROWS.map(partial(double, 1))


def test_without_pyyaml_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainpipes._internal.extra.find_spec", lambda name: None)
    for what, call in (("tp.load", lambda: loads("a: b")), ("to_yaml", ROWS.to_yaml)):
        with pytest.raises(
            tp.MissingExtraError, match=rf"^{what} needs the package yaml.*pip install pyyaml$"
        ):
            call()


def test_pyyaml_is_imported_where_it_is_used() -> None:
    program = "import sys, trainpipes; print('yaml' in sys.modules, trainpipes.load.__name__)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "False load\n"


FIELD = pc.field


@pytest.mark.parametrize(
    "expression",
    [
        FIELD("name, with comma") == "a1", FIELD("a, b").isin([1, 2]), ~FIELD("a,b"),
        FIELD("a, b").is_null() & (pc.utf8_length(FIELD("c, d")) > 3),
        (FIELD("true") == 1) & (FIELD("y") == True),  # noqa: E712
        FIELD("false") & FIELD("12"), FIELD("") == 1, FIELD("12") == 12.0,
        (FIELD("nest", "a") == 1) | FIELD("nest", "b c, d").is_valid(),
    ],
    ids=str,
)  # fmt: skip
def test_columns_of_any_name_are_written(expression: pc.Expression) -> None:
    text = ROWS.filter(expression).to_yaml()
    assert loads(text).stages[-1].predicate.equals(expression)


@pytest.mark.parametrize(
    ("expression", "part"),
    [
        (FIELD("d") > datetime.date(2020, 1, 1), "a date or time"),
        (FIELD("x") == b"ab", "a type that text does not tell, such as bytes"),
        (FIELD("x") == pa.scalar(1, pa.int32()), "a type that text does not tell"),
        (FIELD("x") < float("inf"), "NaN or infinity"),
        (FIELD("x").isin(["nan", None]), "null as a value"),
        (FIELD(0) == 1, "a column by its number"),
        (FIELD("x").is_null(nan_is_null=True), "nan_is_null"),
    ],
    ids=str,
)
def test_the_part_of_an_expression_that_has_no_form_is_named(
    expression: pc.Expression, part: str
) -> None:
    with pytest.raises(tp.ConfigError, match=part):
        ROWS.filter(expression).to_yaml()
