"""What another library saved is refused by one error, which says what it is and what to write instead."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torchdata.nodes import IterableWrapper
from torchdata.nodes import Loader as NodesLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import trainpipes as tp


def pipeline() -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": list(range(100))})).sharding_filter(4).batch(4)


def ours(steps: int = 3) -> dict[str, Any]:
    loader = tp.Loader(pipeline())
    list(islice(loader, steps))
    return loader.state_dict()


def goes_on(state: Any) -> bool:
    """Whether a Loader goes on from a state where ``ours`` stopped."""
    loader = tp.Loader(pipeline())
    loader.load_state_dict(state)
    return list(loader) == list(pipeline())[3:]


#: Whatever takes a state.
WAYS: dict[str, Callable[[Any], object]] = {
    "Loader": lambda state: tp.Loader(pipeline()).load_state_dict(state),
    "Loader with workers": lambda s: tp.Loader(pipeline(), num_workers=1).load_state_dict(s),
    "allow_changes": lambda state: tp.Loader(pipeline()).load_state_dict(
        state, allow_changes=["batch_size"]
    ),
    "Pipeline": lambda state: pipeline().load_state_dict(state),
    "iterator": lambda state: iter(pipeline()).load_state_dict(state),
    "merge_states": lambda state: tp.merge_states([state, state]),
    "node": lambda state: tp.nodes.Batch(tp.nodes.FromArrow(pa.table({"x": [1]})), 2).reset(state),
}


def refusal(state: Any, way: str = "Loader") -> str:
    with pytest.raises(tp.StateError) as caught:
        WAYS[way](state)
    return str(caught.value)


def of_a_stateful_data_loader(workers: int) -> dict[str, Any]:
    loader = StatefulDataLoader(list(range(10)), num_workers=workers)
    next(iter(loader))
    return loader.state_dict()


def of_a_nodes_loader() -> dict[str, Any]:
    loader = NodesLoader(IterableWrapper(range(10)))
    next(iter(loader))
    return loader.state_dict()


def of_a_sampler() -> dict[str, Any]:
    sampler = StatefulDistributedSampler(list(range(10)), num_replicas=1, rank=0)
    next(iter(sampler))
    return sampler.state_dict()


def of_an_optimizer() -> dict[str, Any]:
    return torch.optim.AdamW([torch.zeros(3, requires_grad=True)]).state_dict()


#: By what made them: the state, what it is, and the way out.
FOREIGN: dict[str, tuple[Callable[[], Any], str, str]] = {
    "StatefulDataLoader": (
        lambda: of_a_stateful_data_loader(0),
        "the state of a StatefulDataLoader (Accelerate keeps one as dl_state_dict.bin) over something else",
        "load it where it was saved",
    ),
    "StatefulDataLoader with workers": (
        lambda: of_a_stateful_data_loader(2),
        "the state of a StatefulDataLoader (Accelerate keeps one as dl_state_dict.bin) over something else",
        "load it where it was saved",
    ),
    "torchdata.nodes": (
        of_a_nodes_loader,
        "the state of a torchdata.nodes.Loader",
        "load it into the torchdata.nodes.Loader that saved it",
    ),
    "sampler": (of_a_sampler, "the state of a sampler of torchdata", "load it where it was saved"),
    "datasets": (
        lambda: {
            "examples_iterable": {"shard_idx": 0, "shard_example_idx": 3, "type": "Arrow"},
            "epoch": 0,
        },
        "the state of a datasets.IterableDataset",
        "dataset.load_state_dict(state)",
    ),
    "Lightning": (
        lambda: {
            "epoch": 0,
            "global_step": 3,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": {"weight": torch.zeros(3)},
            "loops": {"fit_loop": {"state_dict": {}}},
        },
        "a checkpoint of Lightning",
        "trainer.fit(model, datamodule=PipelineDataModule(train=pipe), ckpt_path=path)",
    ),
    "Trainer": (
        lambda: {"global_step": 3, "epoch": 0.5, "log_history": [{"loss": 1.0}], "max_steps": 9},
        "the trainer_state.json of a Hugging Face Trainer",
        ".train(resume_from_checkpoint=folder)",
    ),
    "MosaicML": (
        lambda: {"epoch": 0, "sample_in_epoch": 12, "num_canonical_nodes": 2, "shuffle_seed": 9},
        "the state of a StreamingDataset of MosaicML",
        "dataset.load_state_dict(state)",
    ),
    "torchtitan": (
        lambda: {"dp_rank_0": b"\x80\x04}\x94.", "world_size": 2},
        "the state of torchtitan's ParallelAwareDataloader",
        "load it where it was saved",
    ),
    "nanochat": (
        lambda: {"pq_idx": 3, "rg_idx": 7, "epoch": 1},
        "the position of nanochat's own loader",
        "load it where it was saved",
    ),
    "optimizer": (of_an_optimizer, "the state of an optimizer", "optimizer.load_state_dict(state)"),
    "model": (
        lambda: torch.nn.Linear(2, 2).state_dict(),
        "the key 'trainpipes' is missing (found 'weight', 'bias')",
        "load what state_dict() of this pipeline or loader gave",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("library", FOREIGN)
def test_a_state_of_another_library_is_named_with_what_to_write_instead(
    library: str, way: str
) -> None:
    make, what, cure = FOREIGN[library]
    told = refusal(make(), way)
    assert "not a state of trainpipes" in told
    assert what in told
    assert cure in told
    assert len(told) < 500


#: Checkpoints of several things, ours among them: by the expression that the error tells.
AROUND: dict[str, Callable[[Any], Any]] = {
    'state["loader"]': lambda state: {"model": {"w": torch.zeros(2)}, "loader": state, "step": 3},
    'state["train"]["data"]': lambda state: OrderedDict(train={"data": state}, step=torch.ones(1)),
    'state["states"][1]': lambda state: {"states": [None, state]},
    'state["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]': lambda state: {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {"w": torch.zeros(2)},
        "loops": {"fit_loop": {"state_dict": {"combined_loader": [state]}}},
    },
    'state["root"]': lambda state: {"root": state, "num_yielded": 3},
    'state["dataloader"]': lambda state: {"epochs_run": 1, "total_epochs": 2, "dataloader": state},
    "state[3]": lambda state: {3: state},
}


@pytest.mark.parametrize("where", AROUND)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_several_things_is_told_where_ours_is_in_it(where: str, way: str) -> None:
    state = AROUND[where](ours())
    told = refusal(state, way)
    call = f"merge_states([{where}, ...])" if way == "merge_states" else f"load_state_dict({where})"
    assert f"write {call}, which trainpipes saved" in told
    assert goes_on(eval(where, {"state": state}))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loaders_state_within_a_checkpoint_is_told_as_a_whole(workers: int) -> None:
    stateful = StatefulDataLoader(pipeline(), batch_size=None, num_workers=workers)
    list(islice(stateful, 3))
    told = refusal({"model": {}, "loader": stateful.state_dict()})
    assert 'write load_state_dict(state["loader"]), which trainpipes saved' in told
    assert goes_on(stateful.state_dict())


def test_of_many_states_of_ours_in_a_checkpoint_three_are_named() -> None:
    told = refusal({f"loader {number}": ours() for number in range(9)})
    assert 'load_state_dict(state["loader 0"]) or load_state_dict(state["loader 1"])' in told
    assert told.count("load_state_dict") == 3


@pytest.mark.parametrize(
    ("state", "cure"),
    [
        (lambda: [ours(), ours()], "load_state_dict(trainpipes.merge_states(states))"),
        (lambda: json.dumps(ours()), "load_state_dict(json.loads(text))"),
        (lambda: json.dumps(ours()).encode(), "load_state_dict(json.loads(text))"),
        (lambda: "run/checkpoint.pt", "load_state_dict(torch.load(path, weights_only=True))"),
        (lambda: Path("checkpoint.pt"), "load_state_dict(torch.load(path, weights_only=True))"),
        (lambda: tp.Loader(pipeline()), "load_state_dict(it.state_dict())"),
    ],
    ids=["states of ranks", "JSON", "bytes", "path as text", "path", "a loader"],
)
@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"node"}))
def test_what_is_no_dict_is_told_how_it_becomes_one(
    state: Callable[[], Any], cure: str, way: str
) -> None:
    told = refusal(state(), way)
    assert "a state is the dict that state_dict() gave, got" in told
    assert cure in told


def test_a_checkpoint_of_very_many_parts_or_of_one_within_itself_is_looked_through_quickly() -> (
    None
):
    endless: dict[str, Any] = {"more": [{} for _ in range(100)]}
    endless["self"] = endless
    for state in (endless, {str(key): {} for key in range(200_000)}):
        assert "the key 'trainpipes' is missing" in refusal(state)
