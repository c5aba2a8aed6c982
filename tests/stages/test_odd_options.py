"""Options and columns that a stage cannot use are refused by name, before they make other rows."""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from every_stage import ENDLESS, FINITE
from odd_values import ODD as VALUES
from odd_values import said_well
from trainpipes.interfaces.stage import stage_classes


def rows() -> tp.Pipeline:
    ids = [list(range(n % 4 + 1)) for n in range(12)]
    return tp.from_arrow(pa.table({"x": range(12), "text": ["a"] * 12, "ids": ids}))


#: For each option of several, a pipeline with a value for it.
SEVERAL: dict[str, Any] = {
    "select": lambda p, v: p.select(v),
    "sample key": lambda p, v: p.sample(0.9, key=v),
    "split key": lambda p, v: p.split({"a": 0.9, "b": 0.1}, key=v)["a"],
    "truncate columns": lambda p, v: p.truncate(2, columns=v),
    "add_labels ignore": lambda p, v: p.add_labels("ids", ignore=v),
    "mask_tokens special_ids": lambda p, v: p.mask_tokens(
        0.5, column="ids", mask_token_id=3, vocab_size=9, special_ids=v
    ),
    "tokenize columns": lambda p, v: p.tokenize("bytes", v),
    "tokenize labels": lambda p, v: p.tokenize("bytes", labels=v),
    "pack along": lambda p, v: p.pack(4, column="ids", along=v),
    "bucket boundaries": lambda p, v: p.bucket_by_length(2, column="ids", boundaries=v),
}


@pytest.mark.parametrize("option", SEVERAL)
def test_several_of_something_have_an_order_that_is_the_same_everywhere(option: str) -> None:
    for several in ({"x", "text"}, frozenset({"x"}), {"x": 1}):
        with pytest.raises(tp.ConfigError, match="got "):
            SEVERAL[option](rows(), several)


def test_an_iterable_has_an_order_that_is_the_same_everywhere() -> None:
    with pytest.raises(tp.ConfigError, match="a set, whose order differs between processes"):
        tp.from_iterable({"a", "b"})


@pytest.mark.parametrize("times", [2, 3])
def test_a_column_is_named_once(times: int) -> None:
    names = ["x"] * times
    said = r"select\(columns\) must name each column once, got 'x' twice"
    with pytest.raises(tp.ConfigError, match=said):
        rows().select(*names)
    with pytest.raises(tp.ConfigError, match="columns of different names, got 'x' twice"):
        tp.from_arrow(pa.table([[1]] * times, names=names))


def test_a_function_with_and_without_arguments_are_two_options() -> None:
    assert rows().map(partial(dict)) == rows().map(partial(dict)) != rows().map(dict)
    assert rows().map(dict) != rows().map(partial(dict))


def test_bytes_of_a_shuffle_are_a_number_or_text_with_a_unit() -> None:
    told, number = (rows().shuffle(5, max_bytes=most) for most in ("1 MiB", 1 << 20))
    assert told == number
    assert told.state_dict() == number.state_dict()
    with pytest.raises(tp.ConfigError, match=r'shuffle\(max_bytes\) must .* "500MB", got \'lots\''):
        rows().shuffle(5, max_bytes="lots")


def test_an_option_that_holds_itself_is_refused() -> None:
    values: dict[str, Any] = {"x": []}
    values["x"].append(values["x"])
    itself: dict[str, Any] = {}
    itself["x"] = itself
    for value, said in ((values, r"got \[\["), (itself, r"got \{'x': ")):
        with pytest.raises(tp.ConfigError, match=f"up to 100 deep, {said}.*it may hold itself"):
            rows().encode_categories(value)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.bool_()])
def test_what_is_no_integer_is_no_token_id(kind: Any) -> None:
    table = pa.table({"ids": pa.array([[1, 0]], pa.list_(pa.int8())).cast(pa.list_(kind))})
    pipe = tp.from_arrow(table)
    masked = pipe.mask_tokens(0.5, column="ids", mask_token_id=3, vocab_size=9, special_ids=[])
    said = "lists of token ids, which are integers, got list<"
    for made in (pipe.add_labels("ids"), masked):
        with pytest.raises(tp.SchemaError, match=said):
            list(made)


def test_labels_are_as_wide_as_the_ids_need() -> None:
    for kind, value in ((pa.uint8(), 255), (pa.uint32(), 2**32 - 1), (pa.uint64(), 2**63 - 1)):
        table = pa.table({"input_ids": pa.array([[value]], pa.list_(kind))})
        assert next(iter(tp.from_arrow(table).add_labels()))["labels"] == [value]
    wide = pa.table({"input_ids": pa.array([[1], [2**63]], pa.list_(pa.uint64()))})
    with pytest.raises(tp.DataError, match=f"holds {2**63}") as caught:
        list(tp.from_arrow(wide).add_labels())
    assert caught.value.row == 1


def test_masks_and_drawn_tokens_fit_whatever_the_column_held() -> None:
    table = pa.table({"ids": pa.array([[1] * 400], pa.list_(pa.uint8()))})
    shares = {"random_replace_prob": 0.5, "mask_replace_prob": 0.5}
    known: Any = {"mask_token_id": 300, "vocab_size": 4000, "special_ids": []}
    (row,) = tp.from_arrow(table).mask_tokens(1.0, column="ids", **known, **shares)
    drawn = [token for token in row["ids"] if token != 300]
    assert 100 < len(drawn) < 300
    assert 3000 < max(drawn) < 4000
    assert row["labels"] == [1] * 400


def test_texts_in_views_are_shuffled() -> None:
    texts = pa.array([f"text {n}" for n in range(9)] + [None], pa.string_view())
    table = pa.table({"t": texts, "n": range(10)})
    found = list(tp.from_arrow(table).shuffle(4))
    assert sorted(found, key=lambda row: row["n"]) == table.to_pylist()


def test_views_of_text_do_what_texts_do(tmp_path: Path) -> None:
    """Also those in dictionaries, as categories of Polars are."""
    texts = [f"a text that is long {n % 3}" for n in range(9)]
    views = pa.array(texts, pa.string_view())
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2] * 3), views[:3])
    for column in (views, words):
        rows = tp.from_arrow(pa.table({"t": column, "n": range(9)}))
        texts_of = tp.from_arrow(pa.table({"t": texts, "n": range(9)}))

        def same(of: Any, rows: tp.Pipeline = rows, texts_of: tp.Pipeline = texts_of) -> None:
            assert repr(of(rows)) == repr(of(texts_of))

        same(lambda p: p.shuffle(4).batch(5).pad_collate().peek())
        same(lambda p: list(p.filter([["t", "!=", texts[1]]])))
        same(lambda p: list(p.deduplicate("t")))
        same(lambda p: list(p.sample(0.5, key="t")))
        same(lambda p: list(p.tokenize("bytes", "t")))
        same(lambda p: list(p.encode_labels("t", classes=texts[:3])))
        same(lambda p: p.fit_columns(categories="t").categories)
        same(lambda p: list(p.map_batches(lambda c: {"u": c["t"]}, format="numpy")))
        tp.Loader(rows.batch(2)).state_dict()
        rows.write_parquet(tmp_path / str(column.type.id))
        assert list(tp.read_parquet(tmp_path / str(column.type.id))) == list(texts_of)


def test_lists_of_views_come_as_numpy_and_torch_have_them() -> None:
    lists = pa.array([["a", "b"], [], None], pa.list_(pa.string_view()))
    for form in ("numpy", "torch"):
        seen: list[Any] = []
        rows = tp.from_arrow(pa.table({"t": lists, "n": range(3)})).batch(3)
        list(rows.map_batches(lambda c, seen=seen: seen.append(c["t"]) or c, format=form))
        assert [None if t is None else list(t) for t in seen[0]] == lists.to_pylist()


def test_a_state_knows_views_within_lists_and_structs_also_beside_nulls() -> None:
    for value, kind in (
        (["a"], pa.list_(pa.string_view())), ({"t": "a"}, pa.struct([("t", pa.string_view())])),
    ):  # fmt: skip
        states = []
        for change in (value, None):
            table = pa.table({"x": pa.array([value, None, change], kind)})
            states.append(tp.Loader(tp.from_arrow(table).batch(1)).state_dict()["pipeline"])
        assert states[0] != states[1]


def test_conversations_of_views_are_written_and_kept_in_packed_rows(tmp_path: Path) -> None:
    said = pa.struct([("role", pa.string_view()), ("content", pa.string_view())])
    talks = [[{"role": "user", "content": f"hello {n} " * n}] * n for n in range(5)] + [None]
    table = pa.table({
        "messages": pa.array(talks, pa.list_(said)), "input_ids": [[n] for n in range(6)],
    })  # fmt: skip
    tp.from_arrow(table).shuffle(4).write_parquet(tmp_path / "a")
    rows = list(tp.read_parquet(tmp_path / "a"))
    assert sorted(rows, key=lambda row: row["input_ids"]) == table.to_pylist()
    (packed,) = tp.from_arrow(table).pack(6, method="concat", keep=["messages"])
    assert packed["messages"] == talks


def test_dictionaries_of_views_are_read(tmp_path: Path) -> None:
    words = pa.array(["a", "a text that is long"], pa.string_view())
    table = pa.table({"t": pa.DictionaryArray.from_arrays(pa.array([1, None, 0]), words)})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    assert list(tp.read_arrow(tmp_path / "a.arrow")) == table.to_pylist()


# Every option of every stage, of the Loader and of Retry


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where relative paths may lie."""
    monkeypatch.chdir(tmp_path)


#: Objects of the user's that give rows: their own errors come as they are.
OWN = {("from_dataset", "dataset"), ("from_iterable", "factory"), ("from_torchdata", "node")}


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[tp.Pipeline, int]]:
    """For each stage a pipeline with it, and its place there."""
    folder, found = tmp_path_factory.mktemp("odd"), {}
    for make in {**FINITE, **ENDLESS}.values():
        pipe = make(folder)
        found |= {stage.name: (pipe, number) for number, stage in enumerate(pipe.stages)}
    return found


def values(of: str, every: bool) -> Iterator[tuple[str, Any]]:
    """All odd values, or some, which are others for each option."""
    names = list(VALUES) if every else random.Random(of).sample(list(VALUES), 2)
    # A tokenizer of such a name is looked for on the Hub.
    hub = {"text", "numpy text"} if "tokenizer" in of else set()
    return ((name, VALUES[name]()) for name in names if name not in hub)


def given(make: Any, of: str, every: bool) -> None:
    for name, value in values(of, every):
        try:
            pipe = make(value)
            repr(pipe)
            items = iter(pipe)
            list(islice(items, 2))
            json.dumps(items.state_dict())
        except Exception as error:
            assert not said_well(error), f"{of}: {name}"  # noqa: PT017


@pytest.mark.sample(45)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", stage_classes())
def test_an_odd_value_of_any_option_works_or_is_refused_in_our_words(
    name: str, every: bool, chains: dict[str, tuple[tp.Pipeline, int]]
) -> None:
    pipe, number = chains[name]
    for field in dataclasses.fields(stage_classes()[name]):
        if (name, field.name) in OWN:
            continue

        def make(value: Any, option: str = field.name) -> tp.Pipeline:
            stages = list(pipe.stages)
            stages[number] = stages[number]._replaced(**{option: value})
            return tp.Pipeline(stages)

        given(make, f"{name}({field.name})", every)


@pytest.mark.parametrize("name", list(inspect.signature(tp.Loader).parameters))
def test_an_odd_value_of_the_loader_is_refused_in_our_words(name: str) -> None:
    for odd, value in values(name, True):
        try:
            tp.Loader(**{"pipeline": rows().batch(2), name: value})
        except Exception as error:
            assert not said_well(error), odd  # noqa: PT017


def test_an_odd_value_of_a_call_is_refused_in_our_words() -> None:
    pipe = rows().batch(2)
    state = pipe.state_at(1)
    calls: dict[str, Any] = {
        "Retry": lambda v: tp.Retry(v),
        "load": pipe.load_state_dict,
        "allow": lambda v: pipe.load_state_dict(state, allow_changes=v),
        **{k: lambda v, k=k: pipe.load_state_dict({**state, k: v}) for k in state},
        "state_at": pipe.state_at,
        "epoch": lambda v: pipe.state_at(1, epoch=v),
        "set_epoch": lambda v: tp.Loader(pipe).set_epoch(v),
        "rank": lambda v: pipe.distributed(rank=v, world_size=4),
        "then": pipe.then,
    }
    for call, work in calls.items():
        for odd, value in values(call, True):
            try:
                work(value)
            except Exception as error:
                assert not said_well(error), f"{call}: {odd}"  # noqa: PT017


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32])
def test_integers_of_numpy_are_integers(kind: Any) -> None:
    def make(number: Any) -> tp.Pipeline:
        pipe = rows().select("x").sharding_filter(number(4)).shuffle(number(5), seed=number(3))
        return pipe.batch(number(2)).skip(number(1))

    assert make(kind) == make(int)
    state = make(kind).state_at(kind(2), epoch=kind(1))
    assert json.loads(json.dumps(state)) == make(int).state_at(2, epoch=1)
    texts = [tp.read_parquet("a.parquet").shuffle(n(5)).batch(n(2)).to_yaml() for n in (kind, int)]
    assert texts[0] == texts[1]


def test_integers_of_numpy_are_integers_in_executors_and_a_quarantine() -> None:
    def make(number: Any, share: Any) -> tuple[Any, ...]:
        quarantine = tp.Quarantine("bad", max_rows=number(4), max_share=share(0.5))
        return tp.Threads(number(2)), tp.Processes(number(2)), quarantine

    assert repr(make(np.int64, np.float32)) == repr(make(int, float))
    pipe = tp.read_parquet("a.parquet").select("x")
    for one, other in zip(make(np.int64, np.float32), make(int, float), strict=True):
        option = "on_error" if isinstance(one, tp.Quarantine) else "executor"
        texts = [pipe.map(json.dumps, **{option: value}).to_yaml() for value in (one, other)]
        assert texts[0] == texts[1]


def test_an_odd_value_of_any_option_of_a_recipe_is_refused_in_our_words(tmp_path: Path) -> None:
    pairs = rows().rename({"text": "prompt"}).map(lambda row: {**row, "response": "b"})
    (sft,) = (recipe for recipe in tp.recipes() if recipe.name == "sft")
    options = {"files": pairs, "tokenizer": "bytes", "batch_size": 2}
    for name in sft.texts:
        given(lambda v, k=name: tp.recipe("sft", **{**options, k: v}), f"sft({name})", False)
