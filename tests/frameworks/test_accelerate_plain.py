"""Accelerate, on two real ranks, over plain DataLoaders of pipelines of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from frameworks.ranks import run

pytest.importorskip("accelerate")

from frameworks.accelerate_plain_runs import plain_loaders

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank got in each case: one launch for all tests."""
    folder = tmp_path_factory.mktemp("accelerate")
    return run(plain_loaders, 2, folder / "ranks", seconds=250)


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
    assert len(names) == 4


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
    assert len(names) == 8


def test_each_rank_is_told_once_who_shares_out_the_rows(found: Found) -> None:
    for rank in found:
        said = sorted(text.split(" so that ")[1][:40] for text in rank["warnings"])
        assert [text.split(" reads")[0] for text in said] == ["each rank", "the first rank"]
