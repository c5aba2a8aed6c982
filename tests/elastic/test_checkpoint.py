"""Every way to save a run hands it over to any other number of ranks."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp
from elastic.checkpoint_on_ranks import LEGS, PIPELINES
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


#: Each way and each pipeline at least once; the other pairs where slow tests are run.
OFTEN = [
    *(("dcp", "filtered"), ("dcp", "fixed"), ("async", "filtered")),
    *(("files", "repeated"), ("gathered", "fixed")),
]
PAIRS = [(way, name) for way in WAYS for name in PIPELINES]


def left_by_eight_ranks(folder: Path, pairs: list[tuple[str, str]]) -> Path:
    """What eight real ranks leave, started by ``torchrun`` in an interpreter of its own."""
    asked = [f"{way},{name}" for way, name in pairs]
    run = Launch(SCRIPT, 8, folder, str(folder), *asked, interpreter=[sys.executable])
    assert run.wait(180) == 0, run.said()
    return folder


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left_by_eight_ranks(tmp_path_factory.mktemp("checkpoints"), OFTEN)


@pytest.fixture(scope="module")
def eight_ranks_of_others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    others = [pair for pair in PAIRS if pair not in OFTEN]
    return left_by_eight_ranks(tmp_path_factory.mktemp("checkpoints"), others)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(
            *pair, marks=[] if pair in OFTEN else pytest.mark.slow, id=f"{WAYS[pair[0]]}, {pair[1]}"
        )
        for pair in PAIRS
    ],
)
def test_a_run_saved_on_1_2_4_3_1_and_8_ranks_is_one_sequence(
    way: str, name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(
        "eight_ranks" if (way, name) in OFTEN else "eight_ranks_of_others"
    )
    got = [one for path in folder.glob("got-*.json") for one in json.loads(path.read_text())]
    pipe = PIPELINES[name]()
    if name == "filtered":
        pipe = pipe.repeat()
    taken = sum(ranks * steps for ranks, steps in LEGS)
    expected = [[way, name, 0, m, digest(batch)] for m, batch in enumerate(islice(pipe, taken))]
    assert sorted(one for one in got if one[:2] == [way, name]) == expected


@pytest.mark.timeout(200)
@pytest.mark.parametrize("mesh", ["data", "replicate, shard"])
def test_in_a_mesh_only_the_data_parallel_dimensions_count(eight_ranks: Path, mesh: str) -> None:
    left = [json.loads(path.read_text()) for path in eight_ranks.glob("meshed-*.json")]
    found = [one for of_rank in left for one in of_rank if one["mesh"] == mesh]
    by_rank: dict[int, list[list[str]]] = {}
    for one in found:
        by_rank.setdefault(one["rank"], []).append(one["given"])
    assert {rank: len(pair) for rank, pair in by_rank.items()} == {0: 2, 1: 2, 2: 2, 3: 2}
    assert all(first == second for first, second in by_rank.values())
    whole = [digest(batch) for batch in PIPELINES["filtered"]()]
    steps = len(by_rank[0][0])
    assert steps > 20
    for rank in range(4):
        assert by_rank[rank][0] == whole[rank : 4 * steps : 4]
    assert all(one["state"] == found[0]["state"] for one in found)
    pipe = PIPELINES["filtered"]()
    pipe.load_state_dict(found[0]["state"])
    assert [digest(batch) for batch in pipe] == whole[80:]


@pytest.mark.timeout(200)
def test_ranks_that_gather_a_state_out_of_step_are_all_told(eight_ranks: Path) -> None:
    told = [json.loads(path.read_text()) for path in eight_ranks.glob("told-*.json")]
    assert len(told) == 8
    assert all("batches: state 0 has 16, state 5 has 24; merge states" in one for one in told)


def rows(batch_size: int = 4) -> tp.Pipeline:
    table = pa.table({"x": list(range(203))})
    return tp.from_arrow(table).sharding_filter(12).shuffle(20, seed=1).batch(batch_size)


def numbers(source: Any, count: int | None = None) -> list[list[int]]:
    return [[row["x"] for row in batch] for batch in islice(source, count)]


def saved_by_dcp(source: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"loader": source}, checkpoint_id=folder, no_dist=True)


def loaded_by_dcp(target: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load({"loader": target}, checkpoint_id=folder, no_dist=True)


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
    import torch.distributed.checkpoint as dcp

    whole = numbers(rows())
    loader = tp.Loader(rows())
    numbers(iter(loader), 7)
    saved_by_dcp(loader, tmp_path)
    state = {"loader": tp.Loader(rows()).state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    resumed = tp.Loader(rows())
    resumed.load_state_dict(state["loader"])
    assert numbers(resumed) == whole[7:]


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_states_that_ranks_save_right_after_loading_merge_again(world: int) -> None:
    whole = numbers(rows())
    pipe = rows()
    numbers(iter(pipe), 7)
    state = pipe.state_dict()
    assert state is not None
    loaders = [tp.Loader(rows().distributed(rank=r, world_size=world)) for r in range(world)]
    for loader in loaders:
        loader.load_state_dict(state)
    merged = tp.merge_states([loader.state_dict() for loader in loaders])
    assert merged == state
    pipe = rows()
    pipe.load_state_dict(merged)
    assert numbers(pipe) == whole[7:]


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
