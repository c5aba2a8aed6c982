"""What ranks do in tests of the plain parts."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import torch.distributed as dist

import trainpipes as tp
from frameworks.example import example
from trainpipes.state.merge import gather


def pipeline(counted: bool) -> tp.Pipeline:
    rows = tp.from_dataset(range(200)).sharding_filter(num_shards=4)
    return rows.batch(4) if counted else rows.filter(lambda row: row % 3 > 0).batch(4).repeat()


def saved_alone(counted: bool) -> Any:
    """What rank 0 is told that saves alone; then what all are told that save together, and one too many."""
    dist.init_process_group("gloo")
    loader = tp.Loader(pipeline(counted))
    list(islice(loader, 3))
    told = []
    if dist.get_rank() == 0:
        try:
            told.append(loader.full_state_dict(timeout=1)["batches"])
        except tp.StateError as error:
            told.append(str(error))
    dist.barrier()
    told += [loader.full_state_dict(timeout=30)["batches"] for _ in range(3)]
    list(islice(loader, 1 + dist.get_rank()))
    try:
        told.append(loader.full_state_dict(timeout=30)["batches"])
    except tp.StateError as error:
        told.append(str(error))
    return told


def evaluated(every: list[str], weights: str) -> Any:
    """What docs/examples/evaluate.py finds in files, and whether a training in whose midst it ran was
    disturbed."""
    script, told = example("evaluate"), []
    train = iter(tp.Loader(pipeline(True)))
    given, begin = [next(train)], dist.init_process_group
    dist.init_process_group = lambda name: dist.is_initialized() or begin(name)  # main() begins it
    for files in every:
        loss, rows = script.main(files, weights)
        own = sum(len(batch["input_ids"]) for batch in tp.Loader(script.pipeline(files)))
        told.append([loss, rows, own])
    given += [next(train) for _ in range(3)]
    return told, given == list(islice(tp.Loader(pipeline(True)), 4))


def come_late(tries: int) -> Any:
    """What ranks gather where one comes as the time of the other is over: None for an error."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for number in range(tries):
        dist.barrier()
        if rank:
            time.sleep(0.19 + 0.002 * number)
        try:
            found.append(gather((number, rank), (0, 1), 0.2, "it"))
        except tp.StateError:
            found.append(None)
    dist.barrier()
    return [*found, gather(("last", rank), (0, 1), 30, "it")]
