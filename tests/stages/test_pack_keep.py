"""pack(keep=): values of the documents beside their packed rows, and columns that are left out, named."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import trainpipes as tp
from resuming import check_resume


def documents(count: int, seed: int = 0, most: int = 9) -> tp.Pipeline:
    """Documents whose tokens are all their number, with values of several types."""
    draw = random.Random(seed)
    columns = {
        "input_ids": [[n] * draw.randint(1, most) for n in range(count)],
        "id": [f"doc-{n}" for n in range(count)],
        "score": [None if n % 3 == 0 else n / 2 for n in range(count)],
        "tags": [[n, n + 1][: n % 3] for n in range(count)],
        "meta": [{"n": n} for n in range(count)],
    }
    return tp.from_arrow(pa.table(columns))


def numbers(row: dict[str, Any]) -> list[int]:
    """Of each segment of a packed row, its document."""
    found: list[int] = []
    for token, segment in zip(row["input_ids"], row["segment_ids"], strict=True):
        if segment > len(found):
            found.append(int(token))
    return found


KEPT = ["id", "score", "tags", "meta"]


def expected(number: int) -> tuple[Any, ...]:
    score = None if number % 3 == 0 else number / 2
    return f"doc-{number}", score, [number, number + 1][: number % 3], {"n": number}


@given(
    count=st.integers(1, 60),
    length=st.integers(2, 30),
    method=st.sampled_from(["best_fit", "first_fit", "concat"]),
    overflow=st.sampled_from(["split", "truncate", "drop"]),
    shards=st.sampled_from([1, 3]),
    repeats=st.booleans(),
    seed=st.integers(0, 9),
)
def test_each_list_holds_the_values_of_the_documents_in_its_row(
    count: int, length: int, method: Any, overflow: Any, shards: int, repeats: bool, seed: int
) -> None:
    rows = documents(count, seed).sharding_filter(shards).shuffle(20, seed=seed)
    rows = rows.repeat(2) if repeats else rows
    options: dict[str, Any] = {"method": method, "overflow": overflow, "keep": KEPT}
    with warnings.catch_warnings(action="ignore"):  # dropped documents are told
        for row in rows.pack(length, buffer_size=8, **options):
            assert row.keys() - {*KEPT} == {"input_ids", "labels", "position_ids", "segment_ids"}
            pieces = list(zip(*(row[name] for name in KEPT), strict=True))
            assert pieces == [expected(n) for n in numbers(row)]


@pytest.mark.parametrize("method", ["best_fit", "first_fit", "concat"])
def test_it_resumes_exactly(method: Any) -> None:
    rows = documents(14).sharding_filter(2).shuffle(7).repeat(2)
    pipe = rows.pack(12, method=method, buffer_size=4, keep=KEPT).batch(2)
    check_resume(pipe, epochs=1, processes=0)


@pytest.mark.parametrize("last", ["pad_collate", "collate"])
def test_a_batch_has_a_list_of_lists(last: str) -> None:
    packed = documents(40).pack(24, buffer_size=10, keep=KEPT)
    pipe = getattr(packed.batch(3), last)()
    rows = list(packed)
    for place, batch in enumerate(pipe):
        own = rows[3 * place : 3 * place + 3]
        assert torch.equal(batch["input_ids"], torch.tensor([row["input_ids"] for row in own]))
        for name in KEPT:
            assert batch[name] == [row[name] for row in own]
    for loader in (tp.Loader(pipe, num_workers=2), DataLoader(pipe, batch_size=None)):
        found = [n for batch in loader for row in batch["id"] for n in row]
        assert sorted(found) == sorted(f"doc-{n}" for n in range(40))


def test_kept_columns_can_be_chosen_renamed_and_counted_like_any_other() -> None:
    packed = documents(10).pack(24, keep=["id"])
    (batch, *_) = packed.rename({"id": "names"}).batch(4).pad_collate()
    assert all(name.startswith("doc-") for row in batch["names"] for name in row)
    (row, *_) = packed.select("id")
    assert row.keys() == {"id"}
    assert all(len(row["id"]) == max(row["segment_ids"]) for row in packed)


@pytest.mark.parametrize("last", ["pad_collate", "collate"])
def test_lists_stay_lists_after_a_rename_and_in_a_mix(last: str) -> None:
    columns = {"input_ids": [[n] * (n % 3 + 1) for n in range(20)], "id": range(20)}
    rows = tp.from_arrow(pa.table(columns))
    packed = rows.pack(6, keep=["id"]).rename({"id": "doc"})
    mixed = tp.mix({"a": packed, "b": packed}, weights={"a": 1, "b": 2})
    for pipe in (packed, mixed):
        whole = [row["doc"] for row in pipe]
        batches = getattr(pipe.batch(4), last)()
        assert [row for batch in batches for row in batch["doc"]] == whole


def test_columns_that_pack_leaves_out_are_named_once_and_in_explain(tmp_path: Path) -> None:
    rows = documents(9)
    says = r"pack\(20\) leaves out 'score', 'tags', 'meta'.*keep=\['id', 'score', 'tags', 'meta'\]"
    says = says.replace(r"pack\(20\)", r"pack\(20, keep=\['id'\]\)")
    pipe = rows.pack(20, keep=["id"]).batch(1)
    with pytest.warns(UserWarning, match=says) as told:
        list(pipe)
    assert len([one for one in told if "leaves out" in str(one.message)]) == 1
    with warnings.catch_warnings(action="error"):
        list(pipe)  # once in a process
        list(rows.select("input_ids", "id").pack(21, keep=["id"]).batch(1))
        list(rows.select("input_ids").pack(21).batch(1))
        list(rows.pack(21, keep=KEPT).batch(1))
    pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / "rows.parquet")
    read = tp.read_parquet(tmp_path)
    assert "leaves out 'score', 'tags', 'meta'" in str(read.pack(20, keep=["id"]).explain())
    assert "pack(" not in "".join(read.pack(20, keep=KEPT).explain().notes)
    mapped = read.map(dict).pack(20, keep=["id"])  # whose columns are found when it runs
    said = "gives 'input_ids', 'labels', 'position_ids', 'segment_ids', 'id': keep=\\[...\\] makes lists"
    assert said.replace("\\", "") in str(mapped.explain())


def test_recipes_that_pack_warn_of_no_column(tmp_path: Path) -> None:
    columns = {name: ["a b c"] * 40 for name in ("text", "prompt", "response")}
    pq.write_table(pa.table({**columns, "id": range(40)}), tmp_path / "rows.parquet")
    options = {"files": tmp_path, "tokenizer": "bytes", "max_length": 32, "batch_size": 2}
    with warnings.catch_warnings(action="error", category=UserWarning):
        next(iter(tp.recipe("pretrain", **options)))
        next(iter(tp.recipe("sft", packed=True, **options)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep": "id"}, r"pack\(keep\) must be a list of column names"),
        ({"keep": ["labels"]}, r"pack\(keep\) must be columns besides"),
        ({"keep": ["input_ids"]}, r"pack\(keep\) must be columns besides"),
        ({"keep": ["id"], "along": ["id"]}, r"pack\(keep\) must be columns that along does not"),
    ],
)
def test_odd_values_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(tp.ConfigError, match=says):
        documents(3).pack(8, **options)


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(tp.SchemaError, match=r"no column 'ids' .did you mean 'id'"):
        list(documents(3).pack(8, keep=["ids"]))


def test_it_is_kept_in_yaml_and_in_the_identity_of_a_state() -> None:
    state = documents(9).pack(8, keep=["id"]).state_dict()
    with pytest.raises(tp.StateError, match="keep"):
        documents(9).pack(8, keep=["score"]).load_state_dict(state)
    with warnings.catch_warnings(action="ignore"):
        without = documents(9).pack(8)
        without.load_state_dict(documents(9).pack(8).state_dict())
    with pytest.raises(tp.StateError, match="keep"):
        without.load_state_dict(state)


@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_padding_is_not_packed(method: Any, recwarn: pytest.WarningsRecorder) -> None:
    table = pa.table({
        "input_ids": [[5, 6, 7], [], [8, 9, 0]], "attention_mask": [[1, 1, 1], [], [1, 1, 0]],
    })  # fmt: skip
    rows = tp.from_arrow(table)
    for padded in (rows, tp.from_dataset(table.to_pylist())):
        with pytest.raises(tp.DataError, match="got 0 on padding; tokenize without") as caught:
            list(padded.pack(8, method=method))
        assert caught.value.row == 2
    whole = list(rows.take(2).pack(8, method=method))
    assert [row["segment_ids"] for row in whole] == [[1, 1, 1, 0, 0, 0, 0, 0]]
    kept = next(iter(rows.drop_columns("attention_mask").pack(8, method=method)))
    assert sorted(kept["input_ids"]) == [0, 0, 0, 5, 6, 7, 8, 9]
    assert not recwarn.list
