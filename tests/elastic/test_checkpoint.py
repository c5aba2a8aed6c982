"""Every way to save a run hands it over to any other number of ranks."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch.distributed.checkpoint as dcp

import trainpipes as tp
from elastic.checkpoint_on_ranks import LEGS, PIPELINES
from hundred_rows import loaded
from launch import Launch
from trainpipes.testing import digest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SCRIPT = Path(__file__).parent / "checkpoint_on_ranks.py"
WAYS = {
    "dcp": "torch.distributed.checkpoint",
    "async": "async_save, training on",
    "files": "torch.save on each rank, merge_states",
    "gathered": "gather_state",
}


#: Ways and pipelines of an ordinary run; a slow one has the other pairs.
OFTEN = [("dcp", "filtered"), ("files", "repeated")]
PAIRS = [(way, name) for way in WAYS for name in PIPELINES]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(OFTEN, id="often"),
        pytest.param([p for p in PAIRS if p not in OFTEN], id="others", marks=pytest.mark.slow),
    ],
)
def test_a_run_saved_on_1_2_4_3_1_and_8_ranks_is_one_sequence(
    pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    asked = [f"{way},{name}" for way, name in pairs]
    run = Launch(SCRIPT, 8, tmp_path, str(tmp_path), *asked, interpreter=[sys.executable])
    assert run.wait(180) == 0, run.said()
    left = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("left-*.json"))]
    got = [one for of_rank in left for one in of_rank["got"]]
    taken = sum(ranks * steps for ranks, steps in LEGS)
    for way, name in pairs:
        pipe = PIPELINES[name]().repeat() if name == "filtered" else PIPELINES[name]()
        expected = [[way, name, 0, m, digest(batch)] for m, batch in enumerate(islice(pipe, taken))]
        assert sorted(one for one in got if one[:2] == [way, name]) == expected, WAYS[way]
    told = [of_rank["told"] for of_rank in left]
    assert len(told) == 8
    assert all("batches: state 0 has 16, state 5 has 24; merge states" in one for one in told)
    check_meshes([one for of_rank in left for one in of_rank["meshed"]])


def check_meshes(left: list[dict[str, Any]]) -> None:
    """In a mesh only the data-parallel dimensions count."""
    whole = [digest(batch) for batch in PIPELINES["filtered"]()]
    for mesh in ("data", "replicate, shard"):
        found = [one for one in left if one["mesh"] == mesh]
        steps = len(found[0]["given"])
        assert steps > 20
        given = sorted((one["rank"], one["given"]) for one in found)
        assert given == [(r, whole[r : 4 * steps : 4]) for r in range(4) for _ in range(2)]
        assert all(one["state"] == found[0]["state"] for one in found)
        pipe = loaded(PIPELINES["filtered"](), found[0]["state"])
        assert [digest(batch) for batch in pipe] == whole[80:]


def rows(batch_size: int = 4) -> tp.Pipeline:
    table = pa.table({"x": list(range(203))})
    return tp.from_arrow(table).sharding_filter(12).shuffle(20, seed=1).batch(batch_size)


def numbers(source: Any, count: int | None = None) -> list[list[int]]:
    return [[row["x"] for row in batch] for batch in islice(source, count)]


def saved_by_dcp(source: Any, folder: Path) -> None:
    dcp.save({"loader": source}, checkpoint_id=folder, no_dist=True)


def loaded_by_dcp(target: Any, folder: Path) -> dict[str, Any]:
    found = {"loader": target}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found["loader"]


def test_a_checkpoint_of_a_loader_is_read_by_a_pipeline_and_the_reverse(tmp_path: Path) -> None:
    whole = numbers(rows())
    loader = tp.Loader(rows(), num_workers=2)
    assert numbers(iter(loader), 7) == whole[:7]
    saved_by_dcp(loader, tmp_path / "loader")
    pipe = rows()
    loaded_by_dcp(pipe, tmp_path / "loader")
    assert numbers(iter(pipe), 5) == whole[7:12]
    saved_by_dcp(pipe, tmp_path / "pipe")
    loader = tp.Loader(rows(), num_workers=1)
    loaded_by_dcp(loader, tmp_path / "pipe")
    assert numbers(loader) == whole[12:]


def test_a_checkpoint_can_be_read_as_a_plain_state(tmp_path: Path) -> None:
    whole = numbers(rows())
    loader = tp.Loader(rows())
    numbers(iter(loader), 7)
    saved_by_dcp(loader, tmp_path)
    resumed = loaded(tp.Loader(rows()), loaded_by_dcp(tp.Loader(rows()).state_dict(), tmp_path))
    assert numbers(resumed) == whole[7:]


def test_states_of_ranks_merge_in_any_order_and_more_than_once() -> None:
    states = []
    for rank in range(3):
        loader = tp.Loader(rows().distributed(rank=rank, world_size=3))
        numbers(iter(loader), 4)
        states.append(loader.state_dict())
    merged = tp.merge_states(states)
    assert tp.merge_states(reversed(states)) == merged
    assert tp.merge_states([merged]) == merged
    assert tp.merge_states(iter(json.loads(json.dumps(states)))) == merged
