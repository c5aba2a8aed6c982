"""Labels to classes: what is one, what is refused, and what the classes weigh."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp

AT = r" \(at .*row 1\)"


def labelled(values: Any, kind: pa.DataType | None = None) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"label": pa.array(values, kind)}))


def encoded(values: Any, classes: Any, kind: pa.DataType | None = None) -> list[Any]:
    return [row["labels"] for row in labelled(values, kind).encode_labels(classes=classes)]


@pytest.mark.parametrize("kind", [
    pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()),
])  # fmt: skip
def test_texts_of_all_kinds_have_the_class_of_their_place(kind: pa.DataType) -> None:
    assert encoded(["pos", "", "pos", "neg"], ["neg", "pos", ""], kind) == [1, 2, 1, 0]


@pytest.mark.parametrize(
    ("values", "classes", "found"),
    [
        ([2, 0, 1], 3, [2, 0, 1]),
        ([2.0, 0.0], 3, [2, 0]),
        ([True, False], 2, [1, 0]),
        ([True, False], ["no", "yes"], [1, 0]),
        ([1, 0], ["neg", "pos"], [1, 0]),
        ([7, 5], [5, 7], [1, 0]),
        (["a", "b", "c"], {"a": 0, "b": 0, "c": 1}, [0, 0, 1]),
        ([["a", "b"], [], ["b"]], ["a", "b"], [[0, 1], [], [1]]),
        ([[1], [0, 1]], 2, [[1], [0, 1]]),
        ([" a", "a"], ["a", " a"], [1, 0]),
    ],
)  # fmt: skip
def test_classes_are_a_number_a_list_or_a_dict(values: Any, classes: Any, found: Any) -> None:
    assert encoded(values, classes) == found


@pytest.mark.parametrize(
    ("values", "classes", "said"),
    [
        (["pos", "Neg "], ["pos", "neg"], r"the label 'Neg ', which .* \(did you mean 'neg'\?\)"),
        (["pos", "negg"], ["pos", "neg"], r"\(did you mean 'neg'\?\); they are \['pos', 'neg'\]"),
        ([1, None], 3, "holds a null, which is no label"),
        ([["a"], ["a", None]], ["a"], "holds a null, which is no label"),
        ([["a"], None], ["a"], "holds a null, which is no label"),
        ([1.0, 2.5], 3, "holds 2.5, and a label is a text or a whole number"),
        ([1.0, float("nan")], 3, "holds nan"),
        ([1.0, float("inf")], 3, "holds inf"),
        ([0, 3], 3, "the label 3, of 3 classes: they are 0 to 2"),
        ([0, -1], 3, "the label -1, of 3 classes: .* leave such rows out"),
        ([5, 6], [5, 7], "the label 6, which classes do not have"),
        ([["a"], ["a", "c"]], ["a", "b"], "the label 'c', which"),
    ],
)
def test_what_has_no_class_is_refused_with_its_row(values: Any, classes: Any, said: str) -> None:
    with pytest.raises(tp.DataError, match=said + ".*" + AT):
        encoded(values, classes)


def test_the_file_of_a_bad_label_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": ["a", "a", "b"]}), tmp_path / "x.parquet", row_group_size=2)
    with pytest.raises(tp.DataError, match=r"'b'.*x\.parquet, row group 1, row 2") as caught:
        list(tp.read_parquet(tmp_path / "x.parquet").encode_labels(classes=["a"]))
    assert caught.value.row == 2


def test_labels_of_another_kind_say_what_to_pass() -> None:
    with pytest.raises(tp.DataError, match="classes=2 is for labels that are integers"):
        encoded(["0", "1"], 2)
    with pytest.raises(tp.DataError, match=r"'0', which .* \(did you mean 0\?\)"):
        encoded(["0", "1"], [0, 1])
    with pytest.raises(tp.SchemaError, match=r"must hold labels.* got binary"):
        encoded([b"x"], ["x"])


@pytest.mark.parametrize(
    "classes",
    [[], {}, 0, -1, "ab", None, ["a", "a"], [True, 1], [1.5], [None], {"a": -1}, {"a": "b"}],
)
def test_classes_that_are_none_are_refused(classes: Any) -> None:
    with pytest.raises(tp.ConfigError, match=r"encode_labels\(classes\)"):
        labelled(["a"]).encode_labels(classes=classes)


def test_a_hundred_thousand_classes_are_no_burden_of_a_state() -> None:
    names = [f"class {k}" for k in range(100_000)]
    pipe = labelled(names[:10]).encode_labels(classes=names)
    iterator = iter(pipe)
    assert [row["labels"] for row in iterator] == list(range(10))
    assert len(json.dumps(iterator.state_dict())) < 2000
    turned = [names[1], names[0], *names[2:]]
    other = labelled(names[:10]).encode_labels(classes=turned)
    with pytest.raises(tp.StateError, match="classes"):
        other.load_state_dict(iterator.state_dict())


# Counts


def counts(pipe: tp.Pipeline, column: str = "label") -> dict[Any, int]:
    found: dict[Any, int] = pipe.stats(0, labels=column).labels[column]
    return found


def test_values_are_counted_in_sorted_order() -> None:
    assert str(counts(labelled(["b", "a", "b", ""]))) == str({"": 1, "a": 1, "b": 2})
    assert counts(labelled([10, 9, 10])) == {9: 1, 10: 2}
    assert counts(labelled([True, False, True])) == {0: 1, 1: 2}
    assert counts(labelled([["a", "b"], [], ["a"]])) == {"a": 2, "b": 1}
    assert counts(labelled([], pa.string())) == {}


def test_every_row_counts_once_whatever_the_order() -> None:
    rows, other = labelled(["a", "b", "a"]), labelled(["c"])
    wanted = {"a": 2, "b": 1}
    assert counts(rows.shuffle(2).sharding_filter(4).repeat()) == wanted
    assert counts(rows.distributed(rank=1, world_size=2)) == wanted
    assert counts(rows.filter(lambda row: row["label"] == "a")) == {"a": 2}
    assert counts(rows.take(1)) == {"a": 1}
    mixed = tp.mix({"x": rows.shuffle(2), "y": other}, weights={"x": 1, "y": 9}, stop="repeat")
    assert counts(mixed) == {**wanted, "c": 1}


TEN, TWENTY = labelled([n % 3 for n in range(10)]), labelled([7 + n % 2 for n in range(20)])
WEIGHTED = tp.mix({"x": TEN.shuffle(4), "y": TWENTY}, weights={"x": 3, "y": 1})
DRAWN = tp.samplers.WeightedRandomSampler([9.0, *[1.0] * 9], 30)
#: What an epoch has other rows by than the data.
EPOCHS: dict[str, tp.Pipeline] = {
    "flat_map": TEN.shuffle(4).flat_map(lambda row: [row, {"label": 9}][: 1 + row["label"]]),
    "deduplicate": tp.concat(TEN, TEN).sharding_filter(3).shuffle(4).deduplicate("label"),
    "subset": TEN.shuffle(sampler=tp.samplers.SubsetRandomSampler([1, 4])),
    "weighted": TEN.sharding_filter(2).shuffle(sampler=DRAWN),
    "encoded": TEN.encode_labels(classes=[2, 1, 0]).shuffle(sampler=DRAWN),
    "given": TEN.encode_labels(classes=[2, 1, 0], counts=[3, 3, 4]).shuffle(sampler=DRAWN),
    "mix": WEIGHTED.sharding_filter(3),
    "mix encoded": WEIGHTED.sharding_filter(3).encode_labels(classes=[*range(9)]),
    "first_exhausted": tp.mix(
        {"x": TEN, "y": TWENTY}, weights={"x": 1, "y": 1}, stop="first_exhausted", max_epochs={"x": 2}
    ),
    "mix of batches": tp.mix({"x": TEN.batch(3), "y": TWENTY.batch(3)}, weights={"x": 3, "y": 1}),
    "mix within a mix": tp.mix({"in": WEIGHTED, "out": TEN}, weights={"in": 2, "out": 1}),
    "take": TEN.shuffle(9, seed=1).take(4),
    "take of encoded": TEN.encode_labels(classes=[2, 1, 0], counts=[3, 3, 4]).take(4),
    "take of a mix": tp.mix({"x": TEN, "y": TWENTY}).take(7),
    "over a mix": tp.mix({"x": TEN, "y": TEN}).sharding_filter(1).deduplicate("label"),
}  # fmt: skip


@pytest.mark.parametrize("kind", EPOCHS)
def test_the_rows_of_an_epoch_count_as_often_as_they_come(kind: str) -> None:
    pipe = EPOCHS[kind]
    column = "labels" if any(stage.name == "encode_labels" for stage in pipe.stages) else "label"
    items = (item if isinstance(item, list) else [item] for item in pipe)
    wanted = Counter(row[column] for rows in items for row in rows)
    for chain in (
        (pipe, pipe.repeat()) if "batches" in kind else (pipe.batch(4), pipe.repeat().batch(4))
    ):
        assert {k: n for k, n in counts(chain, column).items() if n} == wanted


def test_of_files_only_the_column_is_read(tmp_path: Path) -> None:
    """A column that cannot be read is not missed."""
    table = pa.table({"text": ["x" * 1000] * 500, "label": ["a", "b"] * 250})
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False)
    chunk = pq.read_metadata(path).row_group(0).column(0)
    assert chunk.path_in_schema == "text"
    content = bytearray(path.read_bytes())
    start, length = chunk.data_page_offset, chunk.total_compressed_size
    content[start : start + length] = bytes(length)
    path.write_bytes(bytes(content))
    rows = tp.read_parquet(path)
    with pytest.raises(tp.TrainpipesError):
        list(rows)
    assert counts(rows) == {"a": 250, "b": 250}
    renamed = rows.rename({"label": "y"}).select("text", "y").shuffle(10)
    assert counts(renamed, "y") == {"a": 250, "b": 250}
    pipe = renamed.encode_labels("y", classes=["b", "a"]).tokenize("bytes").batch(2).pad_collate()
    assert counts(pipe, "labels") == {0: 250, 1: 250}


def test_classes_are_counted_alike_on_all_ranks_and_without_rows_that_need_no_counting() -> None:
    calls = []

    def see(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row)
        return row

    pipe = labelled(["a", "b", "b"]).map(see).encode_labels(classes=["a", "b", "c"])
    pipe = pipe.sharding_filter(2).batch(1)
    assert counts(pipe.distributed(rank=1, world_size=2), "labels") == {0: 1, 1: 2, 2: 0}
    counted = len(calls)
    given = labelled(["a"]).map(see).encode_labels(classes=["a", "b"], counts=[30, 10])
    assert counts(given.batch(4), "labels") == {0: 30, 1: 10}
    assert len(calls) == counted


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(tp.SchemaError, match=r"'lable' \(did you mean 'label'\?\)"):
        counts(labelled(["a"]), "lable")
    with pytest.raises(tp.DataError, match=r"stats\(labels='label'\).*a null.*" + AT):
        counts(labelled(["a", None]))
    with pytest.raises(tp.DataError, match="'b', which classes do not have" + ".*" + AT):
        counts(labelled(["a", "b"]).encode_labels(classes=["a"]), "labels")


def test_rows_that_make_no_columns_are_refused_with_the_place_for_the_stage() -> None:
    rows = tp.from_dataset([{"label": "a"}, {"label": "b"}])
    sizes = {"a": (3, 4, 4), "b": (3, 5, 4)}
    pictures = rows.map(lambda row: {**row, "image": np.zeros(sizes[row["label"]], np.uint8)})
    said = r"shapes, \(3, 4, 4\) and \(3, 5, 4\).*put it before the stage that makes such values"
    with pytest.raises(tp.SchemaError, match=said) as caught:
        list(pictures.encode_labels(classes=["a", "b"]))
    assert type(caught.value) is tp.SchemaError
