"""Every stage resumes exactly; from before every item, where slow tests are asked for."""

import json
import pickle
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from every_stage import ENDLESS, FINITE, public_stages
from resuming import check_resume
from trainpipes.testing import digest

pytestmark = pytest.mark.filterwarnings("ignore:pin.. does nothing here:UserWarning")


def test_no_stage_is_missing_here():
    tried = {name.split(" / ")[0] for name in [*FINITE, *ENDLESS]}
    assert public_stages() == tried


#: Of the variants of a stage one in two is resumed often: tests of ranks resume some of them, too.
SELDOM = [name for name in FINITE if " / " in name][::2]


OFTEN = [pytest.param(n, marks=pytest.mark.slow) if n in SELDOM else n for n in FINITE]


@pytest.mark.parametrize("name", OFTEN)
def test_a_stage_resumes_exactly(name, folder):
    epochs = 1 if " / " in name else 2
    report = check_resume(FINITE[name](folder), processes=0, points=3, epochs=epochs)
    assert report.items[0] >= 3


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_stage_resumes_exactly(name, folder):
    report = check_resume(ENDLESS[name](folder), limit=10, epochs=2, every=6, processes=0)
    assert report.items == (10, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FINITE, *ENDLESS])
def test_a_stage_resumes_exactly_from_before_every_item(name, folder):
    if name in FINITE:
        check_resume(FINITE[name](folder), epochs=3)
    else:
        check_resume(ENDLESS[name](folder), limit=40, epochs=2)


def test_a_process_that_is_not_forked_from_here_resumes_the_whole_chain(folder):
    for name in ("tokenize", "pack", "mix"):
        pipe = FINITE[name](folder)
        check_resume(pipe, processes=1, every=13, epochs=2, start_method="forkserver")


#: Those that keep something, draw, or call something of the user's.
WORKERS = [
    "batch / tokens", "bucket_by_length / tokens", "chat_template", "deduplicate", "flat_map / rows",
    "image_transform", "pack", "pack / concat",
]  # fmt: skip


@pytest.mark.sample(24)
@pytest.mark.parametrize(
    ("option", "name"), [*(("threads", n) for n in FINITE), *(("num_workers", n) for n in WORKERS)]
)
def test_threads_and_workers_give_the_same(option: str, name: str, folder: Path) -> None:
    make = FINITE[name]
    expected = [digest(item) for item in tp.Loader(make(folder), threads=0)]
    assert [digest(item) for item in tp.Loader(make(folder), **{option: 2})] == expected


@pytest.mark.sample(60)
@pytest.mark.parametrize("name", OFTEN)
def test_a_pipeline_prints_compares_and_pickles_as_its_record(name, folder):
    pipe = FINITE[name](folder)
    with warnings.catch_warnings(action="error"):
        text = repr(pipe)
    assert text.splitlines()[1].startswith("  .")
    assert pipe == FINITE[name](folder)
    assert hash(pipe) == hash(FINITE[name](folder))
    batched = "batch" in text or "bucket" in text
    assert pipe != (tp.from_iterable(list) if batched else pipe.batch(3))
    # Those hold an object that is like none but itself.
    if not any(held in repr(pipe) for held in ("from_dataset", "chat_template", "from_torchdata")):
        next(iter(pipe))  # what is open stays here
        again = pickle.loads(pickle.dumps(pipe))
        assert again == pipe
        assert repr(again) == text


def source(lengths: list[int]) -> tp.Pipeline:
    ids = [[1 + 100 * row + k for k in range(length)] for row, length in enumerate(lengths)]
    return tp.from_arrow(pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32()))}))


Cut = Callable[[tp.Pipeline], tp.Pipeline]
#: Stages with a position of their own, at all places where they can stand.
CUT: dict[str, Callable[[tp.Pipeline, Cut], tp.Pipeline]] = {
    "batch": lambda p, _: p.batch(max_tokens=24),
    "batch, shards": lambda p, _: p.batch(max_tokens=24, max_rows=4),
    "batch, across": lambda p, _: p.repeat().batch(max_tokens=24),
    "batch, each epoch": lambda p, _: p.batch(max_tokens=24).repeat(),
    "batch, drop_last": lambda p, _: p.batch(max_tokens=24, drop_last=True),
    "buckets": lambda p, _: p.bucket_by_length(3, buffer_size=10),
    "buckets of tokens": lambda p, _: p.bucket_by_length(max_tokens=24, buffer_size=10),
    "buckets, each epoch": lambda p, _: p.bucket_by_length(3, buffer_size=10).repeat(),
    "buckets, across": lambda p, _: p.repeat().bucket_by_length(3, buffer_size=10),
    "pack": lambda p, pack: pack(p),
    "pack, batches": lambda p, pack: pack(p).batch(3),
    "pack, filtered": lambda p, pack: pack(
        p.filter(pc.list_value_length(pc.field("input_ids")) != 2)
    ),
    "pack, each epoch": lambda p, pack: pack(p).repeat(2).batch(3),
    "pack, across": lambda p, pack: pack(p.repeat(2)).batch(3),
    "pack, endless": lambda p, pack: pack(p).repeat(),
    "pack, endless across": lambda p, pack: pack(p.repeat()),
}


@pytest.mark.parametrize("name", CUT)
@examples(12)
@given(
    st.lists(st.integers(0, 24), max_size=50), st.sampled_from(["best_fit", "first_fit", "concat"]),
    st.integers(1, 13), st.integers(1, 9), st.integers(1, 3), st.data(),
)  # fmt: skip
def test_rows_that_are_cut_anew_resume_within_windows_and_over_their_ends(
    name: str, lengths: list[int], method: Any, length: int, window: int, shards: int, data: Any
) -> None:
    rows = source([*lengths, 1, 2, 3] * 2)
    if shards > 1:
        rows = rows.sharding_filter(shards).shuffle(4)
    pipe = CUT[name](rows, lambda p: p.pack(length, method=method, buffer_size=window))
    items = [digest(item) for item in islice(pipe, 40)]
    for _ in range(3):
        stop = data.draw(st.integers(0, len(items)))
        iterator = iter(tp.Pipeline(pipe.stages))
        assert [digest(next(iterator)) for _ in range(stop)] == items[:stop]
        then = tp.Pipeline(pipe.stages)
        then.load_state_dict(json.loads(json.dumps(iterator.state_dict())))
        found = [digest(item) for item in islice(then, 40 - stop)]
        assert found == items[stop:] or stop == len(items)


IDS = [[1 + 100 * row + k for k in range(4)] for row in range(30)]
SAME = pa.table({"input_ids": pa.array(IDS, pa.list_(pa.int64())), "n": range(30)})
#: The rows of a table as others have them.
KINDS: dict[str, Callable[[Path], tp.Pipeline]] = {
    "dicts": lambda _: tp.from_dataset(SAME.to_pylist()),
    "dicts of tensors": lambda _: tp.from_dataset(
        [{name: torch.tensor(value) for name, value in row.items()} for row in SAME.to_pylist()]
    ),
    "dicts on the way": lambda _: tp.from_arrow(SAME).map(dict),
    "tensors": lambda _: tp.from_tensors(input_ids=torch.tensor(IDS), n=torch.arange(30)),
    "memory map": lambda folder: tp.from_memmap(
        tp.write_memmap(folder / "rows", {"input_ids": np.array(IDS), "n": np.arange(30)}).paths[0]
    ),
}
STAGES: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "add_labels": lambda p: p.add_labels(ignore=[1, 102]),
    "batch": lambda p: p.batch(max_tokens=9),
    "batch, integers": lambda p: p.batch(max_tokens=90, column="n"),
    "bucket_by_length": lambda p: p.bucket_by_length(4, column="n", buffer_size=12),
    "drop_columns": lambda p: p.drop_columns("n"),
    "encode_categories": lambda p: p.encode_categories({"n": [3, 9], "input_ids": [1, 102]}),
    "encode_labels": lambda p: p.encode_labels("n", classes=30),
    "enumerate": lambda p: p.enumerate(),
    "filter": lambda p: p.filter(pc.field("n") > 7),
    "map_batches": lambda p: p.map_batches(lambda c: {"x": c["n"] + 1}, format="numpy"),
    "mask_tokens": lambda p: p.mask_tokens(0.5, mask_token_id=7, vocab_size=4000, special_ids=[]),
    **{
        f"pack, {method}": lambda p, method=method: p.pack(6, method=method, along=[])
        for method in ("best_fit", "first_fit", "concat")
    },
    "pack, padded": lambda p: p.pack(6).batch(4).pad_collate(),
    "normalize_columns": lambda p: p.normalize_columns({"n": {"mean": 15, "std": 9}}).select("n"),
    "pad_collate": lambda p: p.batch(4).pad_collate(mask=False),
    "rename": lambda p: p.rename({"n": "x"}),
    "sample": lambda p: p.sample(0.5),
    "sample, key": lambda p: p.sample(0.5, key="n"),
    "sample_by": lambda p: p.sample_by("n", largest=30).select("n"),
    "select": lambda p: p.select("n"),
    "split": lambda p: p.split({"a": 0.5, "b": 0.5}, key="n")["a"],
    "truncate": lambda p: p.truncate(2, truncation_side="left"),
    "with_columns": lambda p: p.with_columns(lambda c: {"x": c["n"] + 1}, format="numpy"),
}


def plain(item: Any) -> Any:
    """An item in lists and numbers."""
    if isinstance(item, dict):
        return {name: plain(value) for name, value in item.items()}
    return [plain(one) for one in item] if isinstance(item, list) else np.asarray(item).tolist()


@pytest.mark.sample(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_gives_the_same_whatever_rows_come_as(name: str, kind: str, tmp_path: Path) -> None:
    expected = [plain(item) for item in STAGES[name](tp.from_arrow(SAME))]
    assert [plain(item) for item in STAGES[name](KINDS[kind](tmp_path))] == expected
    assert expected
