"""Rows without a target, whose labels are all -100: warned of once, refused, left out, or kept."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from every_stage import chat_tokenizer
from resuming import check_resume
from trainpipes.stages.tokenizing import TokenizedBy

pytestmark = pytest.mark.usefixtures("nothing_warned_of")

#: Every fourth row has a short prompt: the others fill 32 tokens before their response.
PAIRS = [{"prompt": f"{k} " * (60 if k % 4 else 2), "response": f" {k}", "n": k} for k in range(64)]
CHATS = [
    {"messages": [{"role": who, "content": row[key]} for who, key in
                  (("user", "prompt"), ("assistant", "response"))], "n": row["n"]}
    for row in PAIRS
]  # fmt: skip
IDS = [
    {"input_ids": [7] * length, "labels": [-100] * (length - 2) + [7, 7], "n": k}
    for k, length in enumerate([4, 60, 60, 60] * 16)
]
GOOD = list(range(0, 64, 4))


def tokenized(rows: tp.Pipeline, on_error: Any) -> tp.Pipeline:
    options: Any = {"concat": ["prompt", "response"], "max_length": 32, "labels": "response"}
    return rows.tokenize("bytes", add_eos=True, on_error=on_error, **options)


def chatted(rows: tp.Pipeline, on_error: Any) -> tp.Pipeline:
    return rows.chat_template(chat_tokenizer(), max_length=60, on_error=on_error)


def truncated(rows: tp.Pipeline, on_error: Any) -> tp.Pipeline:
    return rows.truncate(32, on_error=on_error)


STAGES: dict[str, tuple[list[dict[str, Any]], Callable[[tp.Pipeline, Any], tp.Pipeline], str]] = {
    "tokenize": (PAIRS, tokenized, "raise max_length=32"),
    "chat_template": (CHATS, chatted, "raise max_length=60"),
    "truncate": (IDS, truncated, "raise max_length=32"),
}


@pytest.fixture
def files(tmp_path: Path) -> Callable[[list[dict[str, Any]]], str]:
    """Two files of row groups of 8 rows."""

    def write(rows: list[dict[str, Any]]) -> str:
        for part in range(2):
            table = pa.Table.from_pylist(rows[32 * part : 32 * part + 32])
            pq.write_table(table, tmp_path / f"part-{part}.parquet", row_group_size=8)
        return str(tmp_path / "*.parquet")

    return write


def numbers(pipe: Any) -> list[int]:
    return [row["n"] for row in pipe]


@pytest.mark.parametrize("name", STAGES)
def test_rows_without_a_target_are_kept_and_warned_of_once(name: str, files: Any) -> None:
    rows, stage, cure = STAGES[name]
    pipe = stage(tp.read_parquet(files(rows)).shuffle(64), None)
    with pytest.warns(UserWarning, match="no target") as caught:
        kept = [*numbers(pipe), *numbers(pipe)]
    assert sorted(kept) == sorted([*range(64), *range(64)])
    (said,) = {str(one.message) for one in caught}
    assert len(caught) == 1
    assert said.startswith(f"{name}(")
    assert "cut before the response" in said
    assert cure in said
    assert 'on_error="raise", "skip" or "keep"' in said
    assert len(pipe) == 64


def test_the_warning_counts_the_rows_of_its_block() -> None:
    rows = tp.from_arrow(pa.Table.from_pylist(PAIRS)).shuffle(64).batch(64)
    said = "48 of 64 rows have no target for the loss, since 48 of them were cut"
    with pytest.warns(UserWarning, match=said):
        list(tokenized(rows, None))


def test_a_row_that_is_as_long_as_may_be_was_not_cut() -> None:
    row = {"prompt": "ab", "response": ""}
    texts: Any = {"concat": ["prompt", "response"], "labels": "response", "on_error": "raise"}
    for most, cut in ((1, True), (2, False), (3, False)):
        with pytest.raises(tp.DataError, match="no target") as caught:
            list(tp.from_dataset([row]).tokenize("bytes", max_length=most, **texts))
        assert ("it was cut" in str(caught.value)) == cut
        assert (f"raise max_length={most}, or" in str(caught.value)) == cut
    asked = tp.from_dataset([{"messages": [{"role": "user", "content": "hi"}]}])
    whole = len(next(iter(asked.chat_template(chat_tokenizer(), on_error="keep")))["input_ids"])
    for most in (whole - 1, whole):
        with pytest.raises(tp.DataError, match="no target") as caught:
            list(asked.chat_template(chat_tokenizer(), max_length=most, on_error="raise"))
        assert ("it was cut" in str(caught.value)) == (most < whole)


def shares(folder: Path, *parts: tuple[int, int]) -> tp.Pipeline:
    """Of each so many rows, one has its target cut off every so often."""
    long = {"input_ids": [1] * 9, "labels": [-100] * 8 + [1]}
    short = {"input_ids": [1], "labels": [1]}
    rows = [long if n % every == 0 else short for count, every in parts for n in range(count)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "x.parquet", row_group_size=100)
    return tp.read_parquet(folder / "x.parquet").truncate(8).batch(16)


def said_of(found: Any) -> list[str]:
    return re.findall(r"[\d,]+ of [\d,]+ rows", " ".join(map(str, found)))


def test_each_share_that_they_pass_is_warned_of_once(tmp_path: Path) -> None:
    pipe = shares(tmp_path, (20_000, 20), (20_000, 2), (60_000, 1))
    with pytest.warns(UserWarning, match="no target") as caught:
        list(pipe)
    found = [re.findall(r"[\d,]+", said) for said in said_of(one.message for one in caught)]
    parts = [int(lacking.replace(",", "")) / int(seen.replace(",", "")) for lacking, seen in found]
    levels = [(0.01, 0.1), (0.1, 0.5), (0.5, 0.7)]
    assert all(low <= part < high for part, (low, high) in zip(parts, levels, strict=True))


def test_less_than_a_percent_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = shares(tmp_path, (3000, 300))
    with warnings.catch_warnings(action="error"):
        for epoch in range(2):
            list(pipe)
            said = f"epoch {epoch}: truncate(8): 10 of 3,000 rows"
            assert caplog.messages[epoch].startswith(said)
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("options", [{}, {"threads": 3}, {"num_workers": 2}])
def test_they_are_counted_at_the_end_of_each_epoch(
    options: Any, files: Any, caplog: pytest.LogCaptureFixture, no_processes_left: None
) -> None:
    source = tp.read_parquet(files(PAIRS)).sharding_filter(4).shuffle(16)
    loader = tp.Loader(tokenized(source, None).batch(4), **options)
    with pytest.warns(UserWarning, match="no target") as caught:
        _ = list(loader), list(loader)
    assert sum("no target" in str(one.message) for one in caught) == 1
    assert said_of(caplog.messages) == ["48 of 64 rows"] * 2
    assert "96 of 128 rows have no target" in str(loader.explain())
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    list(loader)
    assert "epoch 2 from batch 1 on: " in caplog.messages[2]


def test_workers_of_a_dataloader_count_their_own(files: Any, tmp_path: Path) -> None:
    source = tp.read_parquet(files(PAIRS)).sharding_filter(4).shuffle(16)
    pipe = tokenized(source, None).batch(4)
    log, handler = logging.getLogger("trainpipes"), logging.FileHandler(tmp_path / "log")
    log.addHandler(handler)
    list(torch.utils.data.DataLoader(pipe, batch_size=None, num_workers=2))
    log.removeHandler(handler)
    handler.close()
    said = (tmp_path / "log").read_text()
    counted = re.findall(r"epoch 0, worker (\d): .* (\d+) of (\d+) rows have no target", said)
    assert sorted(worker for worker, *_ in counted) == ["0", "1"]
    assert sum(int(lacking) for _, lacking, _ in counted) == 48
    assert sum(int(seen) for *_, seen in counted) == 64


@pytest.mark.parametrize("name", STAGES)
def test_where_that_is_asked_for_they_are_kept_silently_or_the_first_one_is_refused(
    name: str, files: Any
) -> None:
    rows, stage, cure = STAGES[name]
    source = tp.read_parquet(files(rows))
    with warnings.catch_warnings(action="error"):
        assert numbers(stage(source, "keep")) == list(range(64))
    with pytest.raises(tp.DataError, match="a row has no target for the loss") as caught:
        list(stage(source, "raise"))
    assert (caught.value.path or "").endswith("part-0.parquet")
    assert (caught.value.row_group, caught.value.row) == (0, 1)
    assert cure in str(caught.value)


@pytest.mark.parametrize("name", STAGES)
def test_left_out_ones_are_counted(name: str, files: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows, stage, _ = STAGES[name]
    pipe = stage(tp.read_parquet(files(rows)), "skip")
    with caplog.at_level(logging.WARNING, "trainpipes"):
        assert numbers(pipe) == GOOD
    assert "left out: they have no target" in caplog.messages[0]
    assert re.search(r"part-\d.parquet, row group \d, row \d", caplog.messages[0])
    assert "48 of 64 rows left out" in str(pipe.explain())
    with pytest.raises(TypeError, match=name):
        len(pipe)


@pytest.mark.parametrize("name", STAGES)
def test_a_resume_and_threads_and_workers_leave_out_the_same_rows(
    name: str, files: Any, no_processes_left: None
) -> None:
    rows, stage, _ = STAGES[name]
    source = tp.read_parquet(files(rows)).sharding_filter(4).shuffle(16)
    pipe = stage(source, "skip").batch(3)
    check_resume(pipe, epochs=2, points=4, processes=0)
    serial, *others = (
        [numbers(batch) for batch in tp.Loader(tp.Pipeline(pipe.stages), **options)]
        for options in ({"threads": 0}, {"threads": 3}, {"num_workers": 2})
    )
    assert sorted(n for batch in serial for n in batch) == GOOD
    assert others == [serial, serial]


@pytest.mark.parametrize("name", STAGES)
def test_a_state_is_of_the_rows_and_not_of_what_is_said_of_them(name: str, files: Any) -> None:
    rows, stage, _ = STAGES[name]
    source = tp.read_parquet(files(rows)).shuffle(16)
    kept = stage(source, "keep").batch(4)
    next(iter(kept))
    loader = tp.Loader(kept)
    next(iter(loader))
    same = tp.Loader(stage(source, "raise").batch(4))
    same.load_state_dict(loader.state_dict())
    other = tp.Loader(stage(source, "skip").batch(4))
    with pytest.raises(tp.StateError, match="on_error"):
        other.load_state_dict(loader.state_dict())


def test_a_cache_keeps_what_is_left(files: Any, tmp_path: Path) -> None:
    source = tp.read_parquet(files(PAIRS))
    for _ in range(2):
        kept = tokenized(source, "skip").cache(str(tmp_path / "kept")).shuffle(64)
        assert sorted(numbers(kept)) == GOOD


@pytest.mark.parametrize("rows", ["columns", "objects"])
def test_a_row_whose_text_is_null_is_left_out_with_them(rows: str) -> None:
    given = [
        {"prompt": "a" if k % 3 else None, "response": "b" if k % 5 else None, "n": k}
        for k in range(30)
    ]
    of_columns = tp.from_arrow(pa.Table.from_pylist(given))
    table = of_columns if rows == "columns" else tp.from_dataset(given)
    good = [k for k in range(30) if k % 3 and k % 5]
    assert numbers(tokenized(table, "skip")) == good
    assert numbers(table.tokenize("bytes", concat=["prompt", "response"], on_error="skip")) == good
    with pytest.raises(tp.DataError, match="is null"):
        numbers(tokenized(table, "keep"))


def test_a_null_in_a_dictionary_is_one() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), pa.array([None, "a"]))
    rows = tp.from_arrow(pa.table({"text": column, "n": range(4)}))
    assert numbers(rows.tokenize("bytes", on_error="skip")) == [1]


def test_a_row_that_is_no_conversation_is_left_out_with_them() -> None:
    rows = [*CHATS[:1], {"messages": [], "n": 1}, {"messages": None, "n": 2}, CHATS[4]]
    table = tp.from_arrow(pa.Table.from_pylist(rows))
    assert numbers(chatted(table, "skip")) == [0, 4]
    assert numbers(table.chat_template(chat_tokenizer(), labels=False, on_error="skip")) == [0, 4]
    for on_error in (None, "raise", "keep"):
        with pytest.raises(tp.DataError):
            numbers(chatted(table, on_error))


def test_empty_texts_are_not_said_to_be_cut() -> None:
    rows = tp.from_dataset([{"text": ""}])
    said = r"1 of 1 rows has no target for the loss: choose on_error"
    with pytest.warns(UserWarning, match=said):
        list(rows.tokenize("bytes", labels=True))


# Packing


def packed(on_error: Any, method: Any = "best_fit") -> tp.Pipeline:
    rows = tp.from_arrow(pa.Table.from_pylist(IDS)).select("input_ids", "labels")
    return rows.shuffle(16).pack(16, method=method, buffer_size=8, on_error=on_error)


def has_target(row: dict[str, Any]) -> bool:
    return any(label != -100 for label in row["labels"])


def test_packed_rows_without_a_target_are_warned_of_once() -> None:
    said = r"of \d+ packed rows have no target.* raise max_length=16"
    with pytest.warns(UserWarning, match=said) as caught:
        rows = list(packed(None))
    assert len(caught) == 1
    assert not all(map(has_target, rows))
    with pytest.raises(tp.DataError, match="a packed row has no target for the loss"):
        list(packed("raise"))


@pytest.mark.parametrize("method", ["best_fit", "first_fit", "concat"])
def test_packed_rows_without_one_are_left_out(
    method: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kept, left = list(packed("keep", method)), list(packed("skip", method))
    assert left == [row for row in kept if has_target(row)]
    assert len(left) < len(kept)
    assert "packed rows left out: they have no target" in caplog.text
    check_resume(packed("skip", method).batch(2), epochs=2, points=4, processes=0)


def test_packing_nothing_but_prompts_for_ever_is_refused() -> None:
    rows = [{"input_ids": [7] * 20, "labels": [-100] * 20}] * 4
    table = tp.from_arrow(pa.Table.from_pylist(rows))
    for pipe in (
        table.pack(8, on_error="skip").repeat(),
        table.repeat().pack(8, on_error="skip"),
        table.repeat().pack(8, method="concat", on_error="skip"),
    ):
        with pytest.raises(tp.DataError, match="would wait forever"):
            next(iter(pipe))


# Files that are tokenized ahead


def test_ids_that_are_there_already_are_looked_at(files: Any) -> None:
    cut = [{k: v if k == "n" else v[:16] for k, v in row.items()} for row in IDS]
    rows = tp.read_parquet(files(cut)).shuffle(64)
    with pytest.warns(UserWarning, match="no target for the loss: choose on_error"):
        assert len(numbers(rows.then(TokenizedBy("bytes")))) == 64
    assert sorted(numbers(rows.then(TokenizedBy("bytes", on_error="skip")))) == GOOD
    with pytest.raises(tp.DataError, match="no target"):
        numbers(rows.then(TokenizedBy("bytes", on_error="raise")))
    assert len(numbers(rows.then(TokenizedBy("bytes", on_error="keep")))) == 64


def test_classes_are_no_labels_of_tokens() -> None:
    rows = tp.from_arrow(pa.table({"input_ids": [[1, 2]], "labels": [-100]}))
    with warnings.catch_warnings(action="error"):
        assert list(rows.then(TokenizedBy("bytes")))
        assert len(list(rows.select("input_ids").pack(2))) == 1  # whose labels are its own


def test_truncate_looks_at_rows_too_that_it_does_not_cut() -> None:
    labels = [[1, 2], [-100, -100], [-100] * 3 + [5], []]  # the third is cut
    rows = tp.from_arrow(pa.table({"input_ids": labels, "labels": labels, "n": range(4)}))
    assert numbers(rows.truncate(3, on_error="skip")) == [0]
    assert numbers(rows.truncate(3, on_error="keep")) == [0, 1, 2, 3]
    with pytest.raises(tp.DataError, match=r"has no target for the loss.*row 1\b"):
        numbers(rows.truncate(3, on_error="raise"))
    with pytest.warns(UserWarning, match="1 of 4 rows has no target"):
        assert numbers(rows.truncate(3)) == [0, 1, 2, 3]  # only of those that it cuts


def padded(labels: list[list[int]], **options: Any) -> list[list[int]]:
    table = pa.table({"chosen_labels": pa.array(labels, pa.list_(pa.int64()))})
    batch = next(iter(tp.from_arrow(table).batch(2).pad_collate(**options)))
    rows: list[list[int]] = batch["chosen_labels"].tolist()
    return rows


def test_labels_of_another_name_that_are_padded_into_the_loss_are_told_of() -> None:
    labels = [[-100, 5, 6], [7]]
    said = (
        r"'chosen_labels' holds -100, as labels do, and is padded with 0, .* loss: "
        r"pass columns={'chosen_labels': {'value': -100}}"
    )
    with pytest.warns(UserWarning, match=said):
        assert padded(labels)[1] == [7, 0, 0]
    assert padded(labels, columns={"chosen_labels": {"value": -100}})[1] == [7, -100, -100]
    assert padded(labels, columns={"chosen_labels": {"value": 0}})[1] == [7, 0, 0]
    assert padded([[-100, -3, 6], [7]])[1] == [7, 0, 0]
