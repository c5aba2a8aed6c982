"""What each of eight ranks runs: the first k of them train, save, and others load, for several k.

    python -m torch.distributed.run --nproc-per-node 8 checkpoint_on_ranks.py FOLDER WAY,PIPELINE ...

Leaves in the folder, of each rank, what it got: a list of [way, pipeline, epoch, m, digest];
what it got in a mesh where pairs of ranks are to get the same, and what it was told when ranks were out
of step.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import trainpipes as tp
from every_stage import odd
from launch import write_beside
from trainpipes.testing import digest

__all__ = ["LEGS", "PIPELINES"]

#: Ranks, and steps that they take: they hand over at m = 1, 7, 15, 24, 26.
LEGS = [(1, 1), (2, 3), (4, 2), (3, 3), (1, 2), (8, 3)]


def rows(count: int) -> tp.Pipeline:
    table = pa.table(
        {"x": list(range(count)), "text": [f"row {i} " * (i % 5) for i in range(count)]}
    )
    return tp.from_arrow(table).sharding_filter(24).shuffle(40, seed=2)


PIPELINES = {
    "fixed": lambda: rows(400).tokenize("bytes").batch(4).pad_collate(),
    "filtered": lambda: rows(900).filter(odd).batch(4),
    "repeated": lambda: rows(100).repeat().batch(4),
}


class Run:
    """One pipeline, handed from one set of ranks to the next by one way of saving."""

    def __init__(self, way: str, name: str, folder: Path) -> None:
        self.way, self.name = way, name
        self.folder = folder / f"{way}-{name}"
        self.got: list[tuple[str, str, int, int, str]] = []

    def leg(self, number: int, group: Any, saved: Any) -> Any:
        """Load, train, save on the ranks of ``group``; what was saved, where that is a value."""
        ranks, steps = LEGS[number]
        rank = dist.get_rank(group)
        pipe = PIPELINES[self.name]().distributed(rank=rank, world_size=ranks)
        if self.name == "filtered":
            pipe = pipe.repeat()  # the ranks of a group cannot agree on an epoch's end
        workers = int(number in (1, 3))
        loader = tp.Loader(pipe, num_workers=workers, timeout=60 * workers)
        weights = torch.full((3,), float(number))
        if number:
            self._load(loader, weights, number, group, saved)
        state = loader.state_dict()
        epoch, start = state["epoch"], state["batches"]
        first = start + (rank - start) % ranks
        batches = iter(loader)
        for step in range(steps):
            batch = next(batches)
            self.got.append((self.way, self.name, epoch, first + step * ranks, digest(batch)))
        return self._save(loader, weights, number, group, batches)

    def _load(
        self, loader: tp.Loader, weights: torch.Tensor, number: int, group: Any, saved: Any
    ) -> None:
        import torch.distributed.checkpoint as dcp  # not where only the names here are asked for

        if self.way in ("dcp", "async"):
            state = {"weights": weights, "loader": loader}
            dcp.load(state, checkpoint_id=self.folder / str(number - 1), process_group=group)
            assert weights.tolist() == [number - 1] * 3
            weights.fill_(number)
        elif self.way == "files":
            files = sorted((self.folder / str(number - 1)).iterdir())
            states = [torch.load(path, weights_only=True)["loader"] for path in files]
            loader.load_state_dict(tp.merge_states(states))
        else:
            shared = [saved]
            dist.broadcast_object_list(shared, src=0, group=group)
            loader.load_state_dict(shared[0])

    def _save(
        self,
        loader: tp.Loader,
        weights: torch.Tensor,
        number: int,
        group: Any,
        batches: Iterator[Any],
    ) -> Any:
        import torch.distributed.checkpoint as dcp

        where = self.folder / str(number)
        state = {"weights": weights, "loader": loader}
        if self.way == "dcp":
            dcp.save(state, checkpoint_id=where, process_group=group)
        elif self.way == "async":
            written = dcp.async_save(state, checkpoint_id=where, process_group=group)
            next(batches)  # training goes on, and the checkpoint is of the moment of the call
            written.result()
        elif self.way == "files":
            where.mkdir(parents=True, exist_ok=True)
            torch.save({"loader": loader.state_dict()}, where / f"rank-{dist.get_rank(group)}.pt")
        else:
            return loader.gather_state(group)
        return None


def meshed() -> list[dict[str, Any]]:
    """What this rank gets of a filtered epoch in two meshes of 4 data-parallel ranks of 2 processes each, and
    the state of all ranks at its 20th step. In the second mesh the ranks have two dimensions."""
    one = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
    two = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    row, column = two.get_local_rank("replicate"), two.get_local_rank("shard")
    ranks = {"data": (one["data"], one.get_local_rank("data"))}
    ranks["replicate, shard"] = two["replicate", "shard"], 2 * row + column
    return [_read_in(name, *parts) for name, parts in ranks.items()]


def _read_in(name: str, mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    loader = tp.Loader(PIPELINES["filtered"]().distributed(mesh=mesh))
    batches = iter(loader)
    given = [digest(next(batches)) for _ in range(20)]
    state = loader.gather_state(timeout=float("inf"))
    given += [digest(batch) for batch in batches]
    return {"mesh": name, "rank": rank, "given": given, "state": state}


def out_of_step() -> str:
    """What ranks are told that gather a state while one of them is a step ahead."""
    loader = tp.Loader(PIPELINES["fixed"]())
    list(islice(loader, 3 if dist.get_rank() == 5 else 2))
    try:
        loader.gather_state()
    except tp.StateError as error:
        return str(error)
    return "nothing"


def main() -> None:
    folder = Path(sys.argv[1])
    faulthandler.dump_traceback_later(100, exit=True)  # a hang fails, and says where
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    groups = [dist.new_group(list(range(ranks)), backend="gloo") for ranks, _ in LEGS]
    runs = [Run(*pair.split(","), folder) for pair in sys.argv[2:]]
    for run in runs:
        saved = None
        for number, (ranks, _) in enumerate(LEGS):
            if rank < ranks:
                saved = run.leg(number, groups[number], saved)
            dist.barrier()  # until it is saved
    got = [one for run in runs for one in run.got]
    left = {"got": got, "meshed": meshed(), "told": out_of_step()}
    write_beside(folder / f"left-{rank}.json", left)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
