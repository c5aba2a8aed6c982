"""With ``train=False`` a recipe gives every row once, in file order, on any number of ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
import trainpipes_recipes
from every_recipe import EVERY, pairs
from resuming import check_resume
from trainpipes.testing import digest
from trainpipes_recipes import sft, tokens

#: Made rows: sums of several lengths.
ROWS = [
    {"prompt": f"{k} + {k} =" + " hm" * (k % 4), "response": f" = {2 * k}", "label": k % 3}
    for k in range(53)
]
SMALL: dict[str, Any] = {"batch_size": 4, "num_shards": 12, "train": False}


def rows(given: list[dict[str, Any]] = ROWS) -> tp.Pipeline:
    return tp.from_dataset(given)


#: Recipes whose rows share rows of one length, or are cut from one sequence; and the others.
PACKED = ("pretrain", "tokens", "chat / packed", "sft / packed")
PADDED = (
    "sft / rows", "seq2seq", "chat", "preference", "masked_lm", "classification / rows", "images / rows",
    "prompts",
)  # fmt: skip
#: Of both kinds, that processes read, too.
BY_WORKERS = ("pretrain", "tokens", "sft / rows", "masked_lm")


def evaluated(name: str, folder: Path, **options: Any) -> tp.Pipeline:
    return EVERY[name](folder, train=False, **options)


def digests(batches: Any) -> list[str]:
    return [digest(batch) for batch in batches]


def texts(pipe: tp.Pipeline) -> list[str]:
    ids = [row for batch in pipe for row in batch["input_ids"].tolist()]
    return [bytes(i for i in row if i < 256).decode() for row in ids]


def test_no_recipe_is_missing_here() -> None:
    found = {name.split(" / ")[0] for name in PADDED + PACKED}
    others = {
        "speech",
        "tabular",
        "video_classification",
        "vision_chat",
    }  # see the tests of their own
    assert found | others == {*trainpipes_recipes.__all__}
    for name in trainpipes_recipes.__all__:
        options = inspect.signature(getattr(trainpipes_recipes, name)).parameters
        assert options["train"].default is True
        assert options.get("drop_last", options["train"]).default is True


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PADDED + PACKED)
def test_each_pass_has_all_rows_and_is_the_same_and_ranks_take_turns(
    name: str, folder: Path
) -> None:
    batches = list(tp.Loader(evaluated(name, folder), epoch=0))
    whole = digests(batches)
    if name in PADDED:
        assert [len(next(iter(batch.values()))) for batch in batches] == [4] * 24 + [1]
    if name in BY_WORKERS:
        assert digests(tp.Loader(evaluated(name, folder), epoch=0, num_workers=2)) == whole
    if name != "masked_lm":  # which hides other tokens in each epoch
        pipe = evaluated(name, folder)
        assert digests(pipe) == digests(pipe) == whole
    for ranks in (2, 3):
        pipes = [
            evaluated(name, folder).distributed(rank=r, world_size=ranks) for r in range(ranks)
        ]
        parts = [digests(pipe) for pipe in pipes]
        if name in PADDED:
            assert [b for step in zip_longest(*parts) for b in step if b is not None] == whole
        else:  # batches of packed rows are known when they are cut
            assert sorted(b for part in parts for b in part) == sorted(whole)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PADDED + PACKED)
def test_it_resumes_exactly_to_its_own_ragged_end(name: str, folder: Path) -> None:
    check_resume(evaluated(name, folder), every=14, processes=0, epochs=1)
    ranks = evaluated(name, folder).distributed(rank=1, world_size=3)
    check_resume(ranks, every=5, processes=0, epochs=2)


def test_rows_are_those_of_training_in_the_order_of_the_file(folder: Path) -> None:
    alone = sft(rows(), "bytes", **SMALL | {"batch_size": 1})
    assert texts(alone) == [row["prompt"] + row["response"] for row in ROWS]
    options = SMALL | {"batch_size": 1, "train": True, "drop_last": False}
    assert set(digests(alone)) == set(digests(sft(rows(), "bytes", **options)))
    labels = [int(b["labels"]) for b in evaluated("images / rows", folder, batch_size=1)]
    assert labels == [n % 7 for n in range(97)]


@pytest.mark.parametrize("name", ["pretrain", "tokens"])
def test_packed_documents_come_once(name: str, folder: Path) -> None:
    made = {
        "pretrain": [len(row["prompt"]) + 1 for row in pairs()],
        "tokens": [k % 11 for k in range(97)],
    }
    found = [int((batch["segment_ids"] > 0).sum()) for batch in evaluated(name, folder)]
    assert sum(found) == sum(made[name])


def test_ids_that_are_mapped_come_in_their_order(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    pipe = tokens(tmp_path / "train.bin", dtype="uint16", max_length=16, **SMALL)
    assert torch.cat([batch["input_ids"] for batch in pipe]).flatten().tolist() == list(range(992))


def files(folder: Path) -> Any:
    """The rows in two files, whose names are in order."""
    for number, part in enumerate([ROWS[:20], ROWS[20:]]):
        pq.write_table(pa.Table.from_pylist(part), folder / f"{number}.parquet", row_group_size=7)
    return folder / "*.parquet"


SOURCES: dict[str, Callable[[Path], Any]] = {
    "parquet": files,
    "from_iterable": lambda f: tp.from_iterable(lambda: ROWS),
    "concat": lambda f: tp.concat(rows(ROWS[:9]), rows(ROWS[9:])),
    "cached": files,
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_kind_of_source_gives_every_row_in_order(name: str, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache") if name == "cached" else False
    pipe = sft(SOURCES[name](tmp_path), "bytes", cache=cache, **SMALL)
    wanted = [row["prompt"] + row["response"] for row in ROWS]
    assert texts(pipe) == wanted
    ranks = [pipe.distributed(rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(text for rank in ranks for text in texts(rank)) == sorted(wanted)


def test_rows_that_a_filter_or_an_error_takes_away_leave_the_others() -> None:
    some = rows().filter(lambda row: row["label"] == 1)
    wanted = [row["prompt"] + row["response"] for row in ROWS if row["label"] == 1]
    assert sorted(texts(sft(some, "bytes", **SMALL))) == sorted(wanted)
    null = rows([*ROWS[:5], {"prompt": None, "response": "x"}, *ROWS[5:]])
    assert len(texts(sft(null, "bytes", on_error="skip", **SMALL))) == 53
    assert list(sft(rows([]), "bytes", prompt="prompt", response="response", **SMALL)) == []


@pytest.mark.parametrize("train", [True, False])
def test_an_option_that_is_wrong_is_refused_whether_it_is_used_or_not(train: bool) -> None:
    for recipe, columns in (
        ("sft", {}),
        ("sft", {"packed": True}),
        ("pretrain", {"text": "prompt"}),
    ):
        with pytest.raises(tp.ConfigError, match="window"):
            tp.recipe(recipe, rows(), "bytes", balance=-1, train=train, **columns)


@pytest.mark.parametrize(("given", "said"), [
    (rows().shuffle(3), r"in file order.* got rows of shuffle\(\)"),
    (rows().sharding_filter(2), r"got rows of sharding_filter\(\)"),
    (rows().repeat(), r"got rows of repeat\(\)"),
    (tp.mix({"a": rows()}), r"mix\(\).*sources of a mix one by one"),
])  # fmt: skip
def test_rows_in_another_order_are_refused(given: tp.Pipeline, said: str) -> None:
    with pytest.raises(tp.ConfigError, match=said):
        sft(given, "bytes", train=False)
