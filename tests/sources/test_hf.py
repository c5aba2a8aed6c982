"""``from_hf`` gives the rows of a dataset of Hugging Face's as it does itself, and goes on where it stopped.

Those that make datasets need the package ``datasets``; the others have in its place what it is made of.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

import trainpipes as tp
from every_stage import SavedRows, chat_tokenizer
from resuming import check_resume
from trainpipes.sources import from_hf
from trainpipes.testing import digest


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets")


def rows(count: int = 100) -> dict[str, list[Any]]:
    return {
        "x": list(range(count)),
        "text": [f"text {n}" for n in range(count)],
        "chat": [[{"role": "user", "content": str(n)}] * (n % 3) for n in range(count)],
    }


# Without the package

JSON_MESSAGES = [
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo", "calls": [{"n": 1}]},
    ],
    [{"role": "user", "content": ["a", {"b": None}], "name": "me"}, None],
    None,
]


def json_table():
    """What datasets 5 makes of JSON whose objects have other keys, and values of other types."""
    texts = [m and [one if one is None else json.dumps(one) for one in m] for m in JSON_MESSAGES]
    messages = pa.array(texts, pa.list_(pa.string())).cast(pa.list_(pa.json_()))
    meta = pa.StructArray.from_arrays([pa.array(['{"n": 1.5}', "[1]", None], pa.json_())], ["j"])
    return pa.table({"id": range(3), "messages": messages, "meta": meta})


def test_json_within_maps_comes_as_what_it_says():
    texts = pa.array(['{"a": [1]}', None, '"b"'], pa.json_())
    maps = pa.MapArray.from_arrays(
        [0, 2, 2, 3], ["k", "l", "m"], texts, mask=pa.array([False, True, False])
    )
    table = pa.table({"x": maps, "s": pa.StructArray.from_arrays([maps], ["m"])})
    found = [[("k", {"a": [1]}), ("l", None)], None, [("m", "b")]]
    assert list(tp.from_arrow(table)) == [{"x": pairs, "s": {"m": pairs}} for pairs in found]


JSON_ROWS = [
    {"id": 0, "messages": JSON_MESSAGES[0], "meta": {"j": {"n": 1.5}}},
    {"id": 1, "messages": JSON_MESSAGES[1], "meta": {"j": [1]}},
    {"id": 2, "messages": None, "meta": {"j": None}},
]


def test_json_within_columns_comes_as_what_it_says_wherever_rows_become_python(tmp_path):
    table = json_table()
    pq.write_table(table, tmp_path / "rows.parquet")
    for rows in (tp.from_hf(SavedRows(table)), tp.read_parquet(tmp_path / "rows.parquet")):
        assert list(rows) == JSON_ROWS
        assert list(rows.map(lambda row: row["messages"] is None)) == [False, False, True]
        (batch,) = rows.batch(3).pad_collate()
        assert batch["messages"] == JSON_MESSAGES
        assert list(rows.skip(1).take(1).batch(1).collate(list)) == [[JSON_ROWS[1]]]
        check_resume(rows.sharding_filter(2).shuffle(2).batch(1), processes=0)
        kinds = rows.with_columns(
            lambda c: {"kind": [type(m).__name__ for m in c["messages"]]}, format="numpy"
        )
        assert [row["kind"] for row in kinds] == ["list", "list", "NoneType"]


def test_conversations_in_json_reach_the_chat_template_as_dicts_and_tools_as_text():
    talk = [
        json.dumps(m)
        for m in [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    ]
    tools = [json.dumps({"name": "f", "default": None})]
    columns = {"messages": pa.array([talk]), "tools": pa.array([tools])}
    table = pa.table({k: v.cast(pa.list_(pa.json_())) for k, v in columns.items()})
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    pipe = tp.from_hf(SavedRows(table))
    written = pipe.chat_template(chat_tokenizer(), template=template, tools="tools", labels=False)
    text = chat_tokenizer().decode(next(iter(written))["input_ids"])
    assert text == '[{"name": "f", "default": null}]userhiassistantyo'


def test_what_is_no_json_in_such_a_column_is_an_error():
    table = pa.table({"a": pa.array(["{", "1"], pa.string()).cast(pa.json_())})
    with pytest.raises(tp.DataError, match=r"JSON type is JSON, got '\{'"):
        list(tp.from_hf(SavedRows(table)))


def test_rows_come_in_the_order_of_the_indices():
    table = pa.table({"x": range(30)})
    chunks = pa.concat_tables([table.slice(0, 7), table.slice(7, 0), table.slice(7)])
    for indices in ([3, 1, 29, 29, 0], list(range(5, 20)), [7], []):
        pipe = tp.from_hf(SavedRows(chunks, indices), block_rows=4)
        assert [row["x"] for row in pipe] == indices
        assert len(pipe) == len(indices)
    assert [row["x"] for row in tp.from_hf(SavedRows(chunks))] == list(range(30))


def test_columns_that_the_format_leaves_out_are_left_out():
    data = SavedRows(pa.table({"x": [1, 2], "y": ["a", "b"]}))
    data.format = {"type": "torch", "columns": ["y"]}  # type: ignore[misc]
    assert list(tp.from_hf(data)) == [{"y": "a"}, {"y": "b"}]
    data.format = {"type": "torch", "columns": ["y"], "output_all_columns": True}  # type: ignore[misc]
    assert list(tp.from_hf(data)) == [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]


def test_a_transform_that_would_not_be_carried_out_is_refused():
    data = SavedRows(pa.table({"x": [1, 2]}))
    data.format = {"type": "custom", "columns": None}  # type: ignore[misc]
    with pytest.raises(tp.ConfigError, match=r"would not run.*from_dataset"):
        tp.from_hf(data)


def test_of_several_splits_one_is_chosen():
    both = {"train": SavedRows(pa.table({"x": [1]})), "test": SavedRows(pa.table({"x": [2]}))}
    with pytest.raises(tp.ConfigError, match=r"choose dataset\['train'\] or dataset\['test'\]"):
        tp.from_hf(both)


def test_what_is_no_dataset_is_refused_with_a_way_out():
    for other in ([1, 2], pa.table({"x": [1]}), "my/dataset", None):
        with pytest.raises(tp.ConfigError, match=r"from_hf\(dataset\) must be a datasets.Dataset"):
            tp.from_hf(other)


def test_a_state_is_refused_over_other_indices_and_other_rows():
    table = pa.table({"x": range(30)})
    pipe = tp.from_hf(SavedRows(table, [3, 1, 2, 9])).batch(2)
    state = pipe.state_at(1)
    tp.from_hf(SavedRows(table, [3, 1, 2, 9])).batch(2).load_state_dict(state)
    for other in (
        SavedRows(table, [3, 1, 9, 2]),
        SavedRows(pa.table({"x": range(1, 31)}), [3, 1, 2, 9]),
    ):
        with pytest.raises(tp.StateError):
            tp.from_hf(other).batch(2).load_state_dict(state)


def test_a_part_that_was_split_by_node_is_refused():
    class Part(SavedRows):
        _distributed: ClassVar = SimpleNamespace(rank=0, world_size=2)

    with pytest.raises(tp.ConfigError, match=r"split_dataset_by_node.*sharding_filter"):
        tp.from_hf(Part(pa.table({"x": [1]})))


# Datasets


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")
def test_every_choice_that_a_dataset_makes_of_its_rows_is_respected(datasets):
    data = datasets.Dataset.from_dict(rows())
    for chosen in (
        data,
        data.shuffle(seed=3),
        data.select([5, 2, 2, 99]),
        data.select(range(10, 40)),
        data.filter(lambda row: row["x"] % 3 == 0),
        data.shuffle(seed=1).shard(3, 1),
        data.sort("text", reverse=True),
        datasets.concatenate_datasets(
            [data.select(range(5)), data.shuffle(seed=1).select(range(9))]
        ),
        data.remove_columns("chat").rename_column("x", "y"),
        data.select([]),
    ):
        assert list(tp.from_hf(chosen, block_rows=7)) == list(chosen)


def test_datasets_on_disk_and_in_memory_resume_exactly(datasets, tmp_path):
    data = datasets.Dataset.from_dict(rows())
    data.save_to_disk(tmp_path / "data", num_shards=3)
    mapped = datasets.load_from_disk(tmp_path / "data").shuffle(seed=2)
    for one in (data, mapped):
        pipe = tp.from_hf(one, block_rows=9).sharding_filter(4).shuffle(16).batch(7)
        check_resume(pipe, epochs=2, processes=1)
        loader = DataLoader(pipe.distributed(rank=0, world_size=1), batch_size=None, num_workers=2)
        assert sorted(map(digest, loader)) == sorted(map(digest, pipe))
    assert tp.from_hf(mapped).state_dict() == tp.from_hf(mapped).state_dict()


def test_images_stay_as_they_are_stored(datasets):
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    data = datasets.Dataset.from_dict(
        {"image": [{"bytes": b"123", "path": None}], "label": ["b"]}, features=features
    )
    assert list(tp.from_hf(data)) == [{"image": {"bytes": b"123", "path": None}, "label": 1}]


def test_extension_types_come_as_what_they_are_stored_as(datasets):
    features = datasets.Features({"a": datasets.Array2D((2, 2), "int32")})
    data = datasets.Dataset.from_dict({"a": [[[1, 2], [3, 4]]] * 3}, features=features)
    assert list(tp.from_hf(data)) == [{"a": [[1, 2], [3, 4]]}] * 3


def test_json_that_datasets_reads_comes_as_in_its_own_rows(datasets, tmp_path):
    lines = [json.dumps({"id": n, "messages": JSON_MESSAGES[n]}) for n in (0, 1)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    options = {"data_files": str(tmp_path / "rows.jsonl"), "split": "train"}
    data = datasets.load_dataset("json", cache_dir=str(tmp_path / "cache"), **options)
    assert "Json" in str(data.features), "its type, of which this is about"
    assert list(tp.from_hf(data)) == list(data)
    stream = datasets.load_dataset("json", streaming=True, **options)
    assert list(tp.from_hf(stream)) == list(stream)
    data.save_to_disk(tmp_path / "saved")
    assert list(tp.read_arrow(tmp_path / "saved")) == list(data)


# Iterable datasets


def streams(datasets: Any) -> dict[str, Callable[[], Any]]:
    def made() -> Iterator[dict[str, Any]]:
        for n in range(700):
            yield {"x": n, "text": f"text {n}"}

    def gaps() -> Any:
        """Columns of which the first rows do not tell the types."""
        columns = {"text": [None] * 50 + ["a"] * 650, "ids": [[]] * 500 + [[1]] * 200}
        return datasets.Dataset.from_dict({**rows(700), **columns}).to_iterable_dataset()

    whole = rows(700)
    return {
        "of a dataset": lambda: datasets.Dataset.from_dict(whole).to_iterable_dataset(num_shards=3),
        "mapped": lambda: (
            datasets.Dataset.from_dict(whole).to_iterable_dataset().map(lambda r: {"y": r["x"] * 2})
        ),
        "filtered": lambda: (
            datasets.Dataset.from_dict(whole)
            .to_iterable_dataset()
            .filter(lambda r: r["x"] % 3 == 0)
        ),
        "of a generator": lambda: datasets.IterableDataset.from_generator(made),
        "filtered, with nulls": lambda: gaps().filter(lambda r: r["x"] % 3 == 0),
        "columns left out, with nulls": lambda: gaps().remove_columns("chat"),
    }


@pytest.mark.parametrize(
    "name",
    ["of a dataset", "mapped", "filtered", "of a generator", "filtered, with nulls",
     "columns left out, with nulls"],
)  # fmt: skip
def test_an_iterable_dataset_goes_on_by_its_own_state(name, datasets):
    make = streams(datasets)[name]
    expected = list(make())
    assert list(tp.from_hf(make())) == expected
    pipe = tp.from_hf(make()).sharding_filter(4).shuffle(100, seed=1).batch(40)
    check_resume(pipe, epochs=2, processes=0, every=4)
    check_resume(tp.from_hf(make()).batch(90), epochs=2, processes=0)
    loader = DataLoader(pipe.distributed(rank=0, world_size=1), batch_size=None, num_workers=2)
    assert sorted(map(digest, loader)) == sorted(map(digest, pipe))


def types_of(table: pa.Table) -> pa.Table:
    return pa.table({"types": [str(table.schema.remove_metadata())] * len(table)})


def test_rows_that_a_filter_of_datasets_keeps_have_the_values_and_types_of_its_features(datasets):
    value, whole = datasets.Value, {
        "label": [0, 1, None] * 3, "large": [2**63 - 1, 0, 1] * 3, "small": [-1, None, 7] * 3,
        "real": [0.1, None, 1e30] * 3, "double": [0.1, float("nan"), None] * 3,
        "yes": [True, None, False] * 3,
        "lists": [[[0.5], [], None], None, []] * 3, "chat": [[{"role": "user", "n": None}], [], None] * 3,
        "text": ["a", None, ""] * 3, "bytes": [b"a", None, b""] * 3,
    }  # fmt: skip
    features = {
        "label": datasets.ClassLabel(names=["no", "yes"]), "large": value("uint64"), "small": value("int8"),
        "real": value("float32"), "double": value("float64"), "yes": value("bool"),
        "lists": datasets.List(datasets.List(value("float32"))),
        "chat": datasets.List({"role": value("string"), "n": value("int64")}),
        "text": value("large_string"), "bytes": value("binary"),
    }  # fmt: skip
    for names in ([*whole], [name for name in whole if name != "bytes"]):  # by Arrow, and not
        data = datasets.Dataset.from_dict(
            {name: whole[name] for name in names},
            features=datasets.Features({name: features[name] for name in names}),
        ).to_iterable_dataset()
        kept, rows = tp.from_hf(data.filter(lambda row: True)), tp.from_hf(data)
        assert digest(list(kept)) == digest(list(rows))
        types = [list(each.map_batches(types_of, format="arrow")) for each in (kept, rows)]
        assert types[0] == types[1]


def test_a_state_of_filtered_rows_that_were_read_by_arrow_goes_on(datasets, monkeypatch):
    def made() -> tp.Pipeline:
        return tp.from_hf(streams(datasets)["filtered"]()).sharding_filter(4).shuffle(50).batch(8)

    with monkeypatch.context() as before:
        before.setattr(from_hf, "_is_exact", lambda *_: False)
        batches = iter(made())
        for _ in range(9):
            next(batches)
        state, rest = batches.state_dict(), list(batches)
    later = made()
    later.load_state_dict(state)
    assert digest(list(later)) == digest(rest)


def test_a_resume_of_an_iterable_dataset_reads_few_rows_again(datasets):
    read: list[int] = []

    def noted(row: dict[str, Any]) -> dict[str, Any]:
        read.append(row["x"])
        return row

    def make() -> tp.Pipeline:
        data = datasets.Dataset.from_dict({"x": range(6000)}).to_iterable_dataset(num_shards=3)
        return tp.from_hf(data.map(noted)).batch(50)

    pipe = make()
    iterator = iter(pipe)
    for _ in range(108):
        next(iterator)
    state = iterator.state_dict()
    read.clear()
    later = make()
    later.load_state_dict(state)
    assert [row["x"] for batch in later for row in batch] == list(range(5400, 6000))
    assert (
        len(read) < 600 + 2100
    )  # a third of the rows is a shard, in which it may seek by row or not


def test_an_iterable_dataset_that_shuffles_resumes_exactly_and_says_what_it_costs(datasets):
    def make(seed: int | None = 5) -> Any:
        data = datasets.Dataset.from_dict(rows(300)).to_iterable_dataset(num_shards=3)
        return data.shuffle(seed=seed, buffer_size=50)

    with pytest.warns(
        UserWarning, match=r"cannot save its position.*\.shuffle\(buffer_size\) after from_hf"
    ):
        pipe = tp.from_hf(make())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert list(pipe) == list(make())
        check_resume(tp.from_hf(make()).batch(20), epochs=2, processes=1, every=3)
        state = tp.from_hf(make(None)).batch(20).state_dict()
        with pytest.raises(tp.StateError):
            tp.from_hf(make(None)).batch(20).load_state_dict(state)


def test_columns_of_an_iterable_dataset_have_the_types_of_its_features(datasets):
    data = datasets.Dataset.from_dict(rows(50)).to_iterable_dataset()
    batch = next(iter(tp.from_hf(data).batch(10).collate(format="arrow")))
    assert batch.schema.field("x").type == pa.int64()
    assert batch.num_rows == 10


@pytest.mark.parametrize("several", [False, True])
def test_classes_of_a_split_are_as_many_as_its_features_name(
    several: bool, datasets: Any, caplog: pytest.LogCaptureFixture
) -> None:
    label = datasets.ClassLabel(names=["z", "y", "x", "w"])
    features = {"text": datasets.Value("string"), "label": [label] if several else label}
    rows = [
        {"text": "a", "label": [1] if several else 1},
        {"text": "b", "label": [2] if several else 2},
    ]
    data = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    pipe = tp.recipe("classification", tp.from_hf(data), "bytes", train=False)
    wanted = [[0, 1, 0, 0], [0, 0, 1, 0]] if several else [1, 2]
    assert pipe.peek()["labels"].tolist() == wanted
    if not several:
        assert pipe.stats(0, labels="labels").labels["labels"] == {0: 0, 1: 1, 2: 1, 3: 0}
    assert caplog.messages == []
