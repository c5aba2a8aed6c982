"""Accelerate and the HF Trainer, on two real ranks, over pipelines that deal their rows themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.launch import Launch

pytest.importorskip("accelerate")

SCRIPT = Path(__file__).parent / "accelerate_on_ranks.py"

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank got in each case: one launch for all tests."""
    folder = tmp_path_factory.mktemp("accelerate")
    run = Launch(SCRIPT, 2, folder, str(folder))
    assert run.wait(250) == 0, run.said()
    ranks: Found = json.loads((folder / "found.json").read_text())
    return ranks


def cases(found: Found, rows: int) -> Iterator[tuple[str, list[list[list[list[int]]]]]]:
    """Each case of so many rows: its name, and of each epoch the batches of each rank."""
    for name in found[0]:
        if name.startswith(f"{rows} rows"):
            epochs = zip(*(rank[name]["epochs"] for rank in found), strict=True)
            yield name, [list(ranks) for ranks in epochs]


def flat(ranks: list[list[list[int]]]) -> list[int]:
    return [row for batches in ranks for batch in batches for row in batch]


@pytest.mark.timeout(300)
def test_accelerate_gives_every_row_once_where_its_batches_divide_them(found: Found) -> None:
    names = []
    for name, epochs in cases(found, 96):
        names.append(name)
        for ranks in epochs:
            assert sorted(flat(ranks)) == list(range(96)), name
            assert [len(batches) for batches in ranks] == [rank[name]["len"] for rank in found]
        assert flat(epochs[0]) != flat(epochs[1]), "each epoch has an order of its own"
    assert len(names) == 6


def test_accelerate_gives_every_row_and_some_first_ones_again_where_they_do_not_divide(
    found: Found,
) -> None:
    names = []
    for name, epochs in cases(found, 101):
        names.append(name)
        for ranks in epochs:
            rows = flat(ranks)
            assert set(rows) == set(range(101)), name
            # Each worker's last batches are filled up to whole ones of both ranks.
            assert len(rows) - 101 <= (2 if "2 workers" in name else 1) * 2 * 4 - 2, name
            assert len({len(batches) for batches in ranks}) == 1, "ranks take as many steps"
    assert len(names) == 10


def test_the_hf_trainer_takes_a_step_for_each_batch_of_all_ranks(found: Found) -> None:
    for workers in (0, 2):
        runs = [rank[f"Trainer, {workers} workers"] for rank in found]
        assert [run["steps"] for run in runs] == [12, 12]
        assert sorted(flat([run["rows"] for run in runs])) == list(range(96))


def test_accelerate_leaves_a_loader_of_ours_as_it_is(found: Found) -> None:
    for ranks in zip(*(rank["Loader"]["epochs"] for rank in found), strict=True):
        assert sorted(flat(list(ranks))) == list(range(96))
        assert [len(batches) for batches in ranks] == [rank["Loader"]["len"] for rank in found]


def test_batches_are_not_shared_out_as_if_they_were_rows(found: Found) -> None:
    for rank in found:
        for case, who in (
            ("batches as rows", "IterableDatasetShard"),
            ("batches sent on", "DataLoaderDispatcher"),
        ):
            assert rank[case].startswith(f"{who} shares out rows among 2 ranks")
            assert "batch(4)" in rank[case]
            assert "trainpipes.Loader" in rank[case]


def test_each_rank_is_told_once_who_shares_out_the_rows(found: Found) -> None:
    for rank in found:
        said = sorted(text.split(" so that ")[1][:40] for text in rank["warnings"])
        assert [text.split(" reads")[0] for text in said] == ["each rank", "the first rank"]
