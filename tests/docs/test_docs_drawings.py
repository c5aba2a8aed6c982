"""The drawing of the engine is true to the code: what runs, runs along its arrows."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import trainpipes as tp

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
MOST_HOPS = 20


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(FOLDER))
        return runpy.run_path(str(FOLDER / "engine_drawings.py"))


@contextmanager
def noted(event: str) -> Iterator[list[str]]:
    """The library's functions in the order in which they are first called ("call"), or done ("return")."""
    names: list[str] = []

    def note(frame: FrameType, happened: str, _: object) -> None:
        code = frame.f_code
        if happened == event and "trainpipes" in code.co_filename and code.co_qualname not in names:
            names.append(code.co_qualname)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


def boxes(rows: Any) -> dict[str, str]:
    return {where: key for row in rows for key, _, where in row}


def leads(arrows: Any, start: str, end: str) -> bool:
    return start == end or any(leads(arrows, b, end) for a, b in arrows if a == start)


def walk(names: list[str], rows: Any, arrows: Any) -> list[str]:
    """The boxes that names came through, which must be in the order of the arrows."""
    known = boxes(rows)
    way = [known[name] for name in names if name in known]
    for a, b in pairwise(way):
        assert leads(arrows, a, b), f"{a} comes before {b}, and no arrow leads from it"
    return way


@pytest.fixture
def rows(tmp_path: Path) -> tp.Pipeline:
    texts = pa.table({"text": [f"row {n}" for n in range(100)]})
    pq.write_table(texts, tmp_path / "rows.parquet", row_group_size=20)
    return tp.read_parquet(str(tmp_path)).sharding_filter(4).shuffle(30).tokenize("bytes")


ROW_WAY = ["read", "join", "window", "rows", "run", "lazy", "shard", "consumer", "ahead", "loop"]


@pytest.mark.parametrize("counted", [True, False])
def test_a_row_goes_along_the_arrows(
    counted: bool, drawn: dict[str, Any], rows: tp.Pipeline
) -> None:
    plain = [box for box in ROW_WAY if box != "ahead"]
    made = (rows if counted else rows.pack(16)).batch(4).pad_collate()
    for pipe, way in ((made, plain), (made.to("cpu"), ROW_WAY)):
        batches = iter(tp.Loader(pipe, threads=0))
        with noted("return") as names:
            next(batches)
        assert walk(names, drawn["ROW"], drawn["ROW_ARROWS"]) == way


def test_a_row_goes_to_a_worker_and_back(drawn: dict[str, Any], rows: tp.Pipeline) -> None:
    batches = iter(tp.Loader(rows.map(dict).batch(4).pad_collate(), num_workers=1))
    with noted("return") as names:
        next(batches)
    way = walk(names, drawn["ROW"], drawn["ROW_ARROWS"])
    assert {"worker", "run", "shard", "consumer", "loop"} <= set(way)


def test_ranks_that_end_together_are_on_the_way(drawn: dict[str, Any], rows: tp.Pipeline) -> None:
    pipe = rows.filter(pc.field("text") > "").batch(4).distributed(rank=0, world_size=2)
    with noted("call") as names, pytest.raises((tp.TopologyError, RuntimeError, ValueError)):
        next(iter(pipe))  # which needs torch.distributed
    assert "Lookahead.__next__" in names
    assert leads(drawn["ROW_ARROWS"], "consumer", "ahead")


def test_all_ways_have_few_hops(drawn: dict[str, Any]) -> None:
    def longest(arrows: Any, start: str) -> int:
        return max((1 + longest(arrows, b) for a, b in arrows if a == start), default=0)

    keys = boxes(drawn["ROW"]).values()
    assert max(longest(drawn["ROW_ARROWS"], key) for key in keys) < MOST_HOPS
