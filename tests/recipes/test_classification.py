"""What ``classification`` makes of labelled texts, and what it refuses."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import trainpipes as tp
from resuming import check_resume
from trainpipes_recipes import classification

#: Made rows: texts of several lengths, about animals or about food.
ROWS = [
    {"text": f"{'cat' if k % 3 else 'bread'} {k}" + " hm" * (k % 5), "label": "animal" if k % 3 else "food"}
    for k in range(97)
]  # fmt: skip
SMALL: dict[str, Any] = {"batch_size": 4, "buffer_size": 16, "num_shards": 12, "seed": 3}


def parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=13)
    return folder / "rows.parquet"


SOURCES: dict[str, Callable[[Path], Any]] = {
    "parquet": parquet,
    "mix": lambda f: tp.mix({"a": tp.from_dataset(ROWS[:30]), "b": tp.from_dataset(ROWS[30:])}),
    "filter": lambda f: tp.from_dataset(ROWS).filter(lambda row: "7" not in row["text"]),
}


def tokenizer() -> Tokenizer:
    words = ["[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d", "e"]
    found = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 1)],
    )
    return found


def in_order(rows: list[dict[str, Any]], tokens: Any = "bytes", **options: Any) -> dict[str, Any]:
    """One batch of rows in sorted order of their first token ids."""
    options = {"batch_size": len(rows), "num_buckets": None, "num_shards": 1} | options
    batch: dict[str, Any] = classification(tp.from_dataset(rows), tokens, **options).peek()
    order = sorted(range(len(rows)), key=lambda n: batch["input_ids"][n].tolist())
    return {name: tensor[order] for name, tensor in batch.items()}


def test_a_batch_holds_texts_and_classes() -> None:
    rows = [{"text": "a", "label": "y"}, {"text": "bc", "label": "x"}, {"text": "d", "label": "y"}]
    batch = in_order(rows)
    assert {n: (t.dtype, t.tolist()) for n, t in batch.items()} == {
        "input_ids": (torch.int64, [[97, 257], [98, 99], [100, 257]]),
        "attention_mask": (torch.int64, [[1, 0], [1, 1], [1, 0]]),
        "labels": (torch.int64, [1, 0, 1]),
    }


def test_pairs_have_the_tokenizers_type_ids() -> None:
    rows = [
        {"premise": "a b", "hypothesis": "c", "label": 0},
        {"premise": "d", "hypothesis": "e e", "label": 1},
    ]
    batch = in_order(rows, tokenizer())
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[0, 3, 4, 1, 5, 1], [0, 6, 1, 7, 7, 1]],
        "attention_mask": [[1] * 6] * 2,
        "token_type_ids": [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]],
        "labels": [0, 1],
    }
    joined = in_order(rows)
    assert "token_type_ids" not in joined
    assert bytes(joined["input_ids"][0].tolist()) == b"a b\n\nc"


def test_a_pair_without_its_second_text_is_refused_or_left_out() -> None:
    rows = [
        {"premise": "a b", "hypothesis": "c", "label": 0},
        {"premise": "d", "hypothesis": None, "label": 1},
        {"premise": "e", "hypothesis": "", "label": 1},
    ]
    for tokens in (tokenizer(), "bytes"):
        with pytest.raises(tp.DataError, match=r"column 'hypothesis' is null.*row 1\)"):
            in_order(rows, tokens)
        left = classification(
            tp.from_dataset(rows), tokens, num_shards=1, train=False, on_error="skip"
        )
        assert left.peek()["labels"].tolist() == [0, 1]


def test_rows_of_several_classes_have_a_float_for_each() -> None:
    rows = [
        {"text": "a", "label": ["x", "z", "x"]}, {"text": "b", "label": []}, {"text": "c", "label": ["y"]},
    ]  # fmt: skip
    batch = in_order(rows)
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    given = in_order(rows, classes={"x": 0, "y": 3, "z": 0})
    assert given["labels"].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("name", SOURCES)
def test_each_kind_of_source_gives_every_row(name: str, tmp_path: Path) -> None:
    pipe = classification(SOURCES[name](tmp_path), "bytes", drop_last=False, **SMALL)
    found = []
    for batch in pipe:
        for ids, label in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            found.append((bytes(i for i in ids if i < 256).decode(), ["animal", "food"][label]))
    wanted = {(row["text"], row["label"]) for row in ROWS}
    if name == "filter":
        wanted = {(text, label) for text, label in wanted if "7" not in text}
    assert set(found) == wanted


def test_buckets_spare_padding_and_none_counts_batches() -> None:
    rows = tp.from_dataset([{"text": "x" * (k % 50), "label": k % 2} for k in range(7000)])
    plain = classification(rows, "bytes", num_buckets=None, seed=3)
    assert len(plain) == 7000 // 16
    shares = [pipe.stats().padding.share for pipe in (classification(rows, "bytes"), plain)]
    assert shares[0] < shares[1] / 4


def test_few_rows_are_taken_as_they_come_so_that_none_is_lost() -> None:
    """Each of 24 shards would have 4 rows, and no batch of 16."""
    pipe = classification(tp.from_dataset(ROWS), "bytes")
    assert len(pipe) == len(list(pipe)) == 97 // 16
    assert list(classification(tp.from_dataset(ROWS), "bytes", num_buckets=32)) == []


# Classes and their weights


def test_rows_of_the_classes_need_no_second_pass() -> None:
    seen = []

    def see(row: dict[str, Any]) -> dict[str, Any]:
        seen.append(row)
        return row

    rows = tp.from_dataset(ROWS).map(see)
    pipe = classification(rows, "bytes")
    read = len(seen)
    assert pipe.stats(0, labels="labels").labels["labels"] == {0: 64, 1: 33}
    assert len(seen) == read


def test_classes_given_in_another_order_are_another_state() -> None:
    rows = tp.from_dataset(ROWS)
    state = iter(classification(rows, "bytes", **SMALL)).state_dict()
    same = classification(rows, "bytes", classes=["animal", "food"], **SMALL)
    same.load_state_dict(state)
    other = classification(rows, "bytes", classes=["food", "animal"], **SMALL)
    with pytest.raises(tp.StateError, match="classes"):
        other.load_state_dict(state)


def test_names_of_hugging_face_are_as_many_classes() -> None:
    """For a dataset of the shape of theirs; their own is in ``tests/sources/test_hf.py``."""

    class Named(list[dict[str, Any]]):
        features: Any

    rows = Named([{"text": "a", "label": 2}, {"text": "b", "label": 1}])
    rows.features = {"label": SimpleNamespace(names=["neg", "mid", "pos", "none"])}
    pipe = classification(tp.from_dataset(rows), "bytes", train=False)
    assert pipe.peek()["labels"].tolist() == [2, 1]
    assert pipe.stats(0, labels="labels").labels["labels"] == {0: 0, 1: 1, 2: 1, 3: 0}
    rows.features = torch.zeros(2, 3)  # a dataset's own, of no classes
    pipe = classification(tp.from_dataset(rows), "bytes", train=False)
    assert pipe.stats(0, labels="labels").labels["labels"] == {0: 0, 1: 1, 2: 1}


def test_columns_of_common_names_are_found(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"sentence1": "a", "sentence2": "b", "sentence": "c", "intent": "x"}]
    with caplog.at_level(logging.INFO, "trainpipes"):
        pipe = classification(tp.from_dataset(rows), "bytes", batch_size=1)
    assert bytes(pipe.peek()["input_ids"][0].tolist()) == b"a\n\nb"
    assert "text from column 'sentence1', text_pair from column 'sentence2'" in caplog.text
    assert "label from column 'intent'" in caplog.text


@pytest.mark.parametrize(("rows", "options", "error", "said"), [
    ([{"text": "a", "lable": 0}], {}, tp.SchemaError, r"the columns are \['text', 'lable'\]"),
    ([{"premise": "a", "label": 0}], {}, tp.SchemaError, "for the text; the columns are"),
    (ROWS, {"classes": ["animal", "foods"]}, tp.DataError,
        r"'food', which .*\(did you mean 'foods'\?\).* row \d+\)"),
    ([{"text": "a", "label": 0}, {"text": "b", "label": None}], {}, tp.DataError, r"a null.*row 1\)"),
    ([{"text": "a", "label": 0}, {"text": "b", "label": -1}], {}, tp.DataError, r"label -1.*row 1\)"),
    ([{"text": "a", "label": 0}, {"text": "b", "label": -1}], {}, tp.DataError, "of one class: it is 0;"),
    ([{"text": "a", "label": -1}, {"text": "b", "label": -1}], {}, tp.DataError,
        "classification: column 'label' holds -1 in every row, as test splits .*: give rows with labels"),
    ([{"text": "a", "label": -1}, {"text": "b", "label": -2}], {}, tp.DataError, r"pass classes=\[-2, -1\]"),
    ([{"text": "a", "label": -1}, {"text": "b", "label": 1}], {}, tp.DataError,
        r"label -1.*row 0\); .* others, pass classes=\[-1, 1\]"),
    ([{"text": "a"}], {"text": "text", "label": "text"}, tp.ConfigError,
        "columns of their own, got 'text' for both"),
    ([{"text": "a", "label": 0.5}], {}, tp.DataError,
        r"^classification: column 'label' holds 0.5,.*: to predict numbers.* rename\({'label': 'labels'}\)"),
    ([{"text": "a", "label": 10**6}], {}, tp.DataError, "integers up to 1,000,000, and only 1 diff"),
    ([{"text": "a", "label": 0}, {"text": None, "label": 0}], {"num_shards": 1}, tp.DataError,
        r"'text' is null.*row 1\)"),
    ([], {"text": "text", "label": "label"}, tp.TrainpipesError, "no label|there is no row"),
    ([{"text": "a", "label": []}], {}, tp.DataError, "no label: there are no rows, or only empty lists"),
])  # fmt: skip
def test_what_is_not_right_is_refused(
    rows: Any, options: Any, error: type[Exception], said: str
) -> None:
    def made() -> tp.Pipeline:
        return classification(tp.from_dataset(rows), "bytes", **{"batch_size": 1} | options)

    with pytest.raises(error, match=said):
        made() if error is tp.ConfigError else list(made())


@pytest.mark.parametrize("kind", [int, float, bool])
@pytest.mark.parametrize("classes", [None, 3, ["x", "y", "z"], [7, 8, 9]])
def test_a_one_or_zero_for_each_class_is_the_target(kind: type, classes: Any) -> None:
    wanted = [[0, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 1]]
    rows = [{"text": t, "label": [*map(kind, row)]} for t, row in zip("abcd", wanted, strict=True)]
    batch = in_order(rows, classes=classes)
    assert (batch["labels"].dtype, batch["labels"].tolist()) == (torch.float32, wanted)
    two = [{"text": t, "label": [*map(kind, row)]} for t, row in (("a", (0, 1)), ("b", (1, 1)))]
    assert in_order(two)["labels"].tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(("labels", "classes", "said"), [
    ([[0, 1], [1, 0]], None, r"lists such as \[0, 1\], which are two classes, or a 1 or 0"),
    ([[1, 0]], ["x", "y"], "give the 1 or 0 as floats or bools"),
    ([[0, 1], [1], [1, 1]], None, r"holds the class 1 twice.*row 2\)"),
    ([[2, 0], [0, 1, 0, 1]], 4, r"holds the class 0 twice.*row 1\)"),
    ([[0.0, 1.0]] * 9 + [[1.0]], 2, r"a 1 or 0 for each of 2 classes.*got \[1.0\].*row 9\)"),
    ([[0.0, 1.0]] * 1000 + [[1.0]], 2, r"a 1 or 0 for each of 2 classes.*got \[1.0\].*row 1000\)"),
    ([[0, 1, 1]] * 1000 + [[0, 1, 2]], None, r"for each of 3 classes.*row 1000\)"),
])  # fmt: skip
def test_lists_that_may_be_either_are_refused(labels: Any, classes: Any, said: str) -> None:
    rows = tp.from_dataset([{"text": "a", "label": label} for label in labels])
    with pytest.raises(tp.DataError, match=said):
        list(classification(rows, "bytes", batch_size=2, num_shards=1, classes=classes))


def test_lists_of_both_classes_or_of_one_are_lists_of_classes() -> None:
    rows = [{"text": "a", "label": [0, 1]}, {"text": "b", "label": [1]}]
    assert in_order(rows)["labels"].tolist() == [[1, 1], [0, 1]]


def test_integers_below_0_are_numbered_by_classes() -> None:
    batch = in_order([{"text": "a", "label": -1}, {"text": "b", "label": 1}], classes=[-1, 1])
    assert batch["labels"].tolist() == [0, 1]


def test_classes_from_1_on_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": f"t {n}", "label": 1 + n % 3} for n in range(12)]
    batch = classification(tp.from_dataset(rows), "bytes", batch_size=12, num_shards=1).peek()
    assert sorted(set(batch["labels"].tolist())) == [1, 2, 3]
    way = "to number them from 0, pass classes=[1, 2, 3]"
    assert caplog.messages == [
        f"classification: column 'label' holds integers from 1 on, so that class 0 has no rows; {way}"
    ]
    options: dict[str, Any] = {"classes": [1, 2, 3], "batch_size": 12, "num_shards": 1}
    batch = classification(tp.from_dataset(rows), "bytes", **options).peek()
    assert sorted(set(batch["labels"].tolist())) == [0, 1, 2]
    from_0 = [{**row, "label": row["label"] - 1} for row in rows]
    classification(tp.from_dataset([*from_0, {"text": "x", "label": 4}]), "bytes")
    assert len(caplog.messages) == 1


# Folders


def reviews(folder: Path, count: int = 12) -> Path:
    """As of IMDb: a text in each file, a folder for each class, and other files beside them."""
    for kind in ("pos", "neg"):
        (folder / kind / "more").mkdir(parents=True)
        for n in range(count):
            name = f"{kind}/more/{n}.txt" if n % 2 else f"{kind}/{n}.txt"
            (folder / name).write_text(f"{kind} {n:02}" + "\n!" * n, encoding="utf-8")
        (folder / f"urls_{kind}.txt").write_text("http://there\n")
    (folder / "labels.feat").write_text("1:2")
    return folder


def test_classes_of_data_to_evaluate_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    rows = tp.from_dataset([{"text": "a", "label": "cat"}, {"text": "b", "label": "ant"}])
    numbers = tp.from_dataset([{"text": "a", "label": 0}, {"text": "b", "label": 1}])
    classification(rows, "bytes", num_shards=1)
    classification(rows, "bytes", train=False, classes=["ant", "bee", "cat"])
    classification(numbers, "bytes", train=False)
    assert caplog.messages == []
    classification(rows, "bytes", train=False)
    assert caplog.messages == [
        "classification: classes are numbered in the order of the names that are here; where the "
        "training had others, pass its classes=[...]"
    ]


def test_numbers_as_texts_are_warned_of_where_they_are_numbered_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def trained(names: list[str], **options: Any) -> None:
        rows = tp.from_dataset([{"text": "a", "label": name} for name in names])
        classification(rows, "bytes", num_shards=1, **options)

    names = [str(n) for n in (0, 1, 2, 10)]
    trained(names[:3])
    trained(["1", "a"])
    trained(names, classes=names)
    assert caplog.messages == []
    trained(names)
    assert caplog.messages == [
        "classification: column 'label' holds numbers as texts, which are numbered in the order of texts: "
        "class 2 is '10'; make integers of them, or pass classes=['0', '1', '2', '10']"
    ]


def test_a_folder_for_each_class_gives_each_text_with_its_class(tmp_path: Path) -> None:
    folder = reviews(tmp_path / "a[1]")
    (folder / "pos/bom.txt").write_bytes(b"\xef\xbb\xbfpos with a mark")
    pipe = classification(folder, "bytes", train=False, batch_size=5, num_shards=1)
    seen = []
    for batch in pipe:
        for ids, label in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            seen.append((bytes(i for i in ids if i < 256).rstrip(b"\0").decode(), label))
    texts = [f"{kind} {n:02}" + "\n!" * n for kind in ("pos", "neg") for n in range(12)]
    expected = [(text, int(text.startswith("pos"))) for text in [*texts, "pos with a mark"]]
    assert sorted(seen) == sorted(expected)
    listed = classification([folder], "bytes", train=False, batch_size=30, num_shards=1)
    assert listed.peek()["labels"].tolist() == [label for _, label in seen]
    other = classification(folder, "bytes", batch_size=5, classes=["pos", "neg"], num_shards=1)
    assert other.stats(0, labels="labels").labels["labels"] == {0: 13, 1: 12}
    globbed = classification(f"{tmp_path}/a[[]1]/*/*.txt", "bytes", batch_size=13, num_shards=1)
    assert globbed.peek()["labels"].sum() == 7
    check_resume(classification(folder, "bytes", **SMALL))


def test_a_shuffle_reads_the_texts_of_the_first_batches_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = reviews(tmp_path / "a", 400), []
    pipe = classification(
        folder, "bytes", classes=["neg", "pos"], batch_size=4, num_shards=1, num_buckets=None
    )
    opening = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *a, **k: opened.append(path) or opening(path, *a, **k)
    )
    next(iter(pipe))
    count = len([path for path in opened if str(path).endswith(".txt")])
    assert (
        0 < count < 400
    )  # of 800, with those of the next runs, which other threads read meanwhile


@pytest.mark.parametrize("shape", ["a file", "a flat folder", "no text"])
def test_texts_in_no_folders_have_no_classes(shape: str, tmp_path: Path) -> None:
    for name in {"a file": ["a.txt"], "a flat folder": ["a/1.txt"], "no text": ["a/1.md"]}[shape]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    place = tmp_path / ("a.txt" if shape == "a file" else "a")
    with pytest.raises(
        tp.MissingFilesError, match=r"has no \.txt files in folders: put each class"
    ):
        classification(place, "bytes")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    folder = reviews(tmp_path / "a")
    (folder / "pos/3.txt").write_bytes(b"caf\xe9")
    with pytest.raises(
        tp.DataError, match=r"pos/3\.txt is no text in UTF-8: .*: write it as UTF-8"
    ):
        list(classification(folder, "bytes", **SMALL))
