"""Which rank of how many this process is."""

from __future__ import annotations

import os
from typing import Any

from trainpipes.errors import ConfigError, TopologyError

#: Usual names of dimensions whose processes need the same batches.
SAME_BATCHES = frozenset({"tp", "pp", "cp", "sp", "tensor", "pipeline", "context", "sequence"})


def data_parallel() -> tuple[int, int]:
    """Rank and world size: of ``torch.distributed``, else ``RANK`` and ``WORLD_SIZE``, else 0 of 1."""
    import torch.distributed as dist

    set_rank, set_world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if dist.is_available() and dist.is_initialized():
        real = dist.get_rank(), dist.get_world_size()
        given = set_rank, set_world
        if None not in given and given != tuple(map(str, real)):
            raise TopologyError(
                f"torch.distributed says rank {real[0]} of {real[1]}, and the environment RANK={set_rank}, "
                f"WORLD_SIZE={set_world}: start all processes by one launcher, or give the right "
                "ones with pipe.distributed(rank=..., world_size=...)"
            )
        return real
    if (set_rank or "0", set_world or "1") == ("0", "1"):
        return 0, 1
    try:
        rank, world = int(set_rank or ""), int(set_world or "")
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        raise TopologyError(
            "RANK and WORLD_SIZE of the environment must be integers with 0 <= RANK < WORLD_SIZE, "
            f"got RANK={set_rank!r}, WORLD_SIZE={set_world!r}: set both, or neither, or give "
            "pipe.distributed(rank=..., world_size=...)"
        )
    return rank, world


def in_mesh(mesh: Any) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Rank and world size among the processes of a ``DeviceMesh``, and their global ranks."""
    names = tuple(mesh.mesh_dim_names or ())
    if any(name in SAME_BATCHES for name in names):
        parallel = [name for name in names if name not in SAME_BATCHES] or ["dp"]
        way = ", ".join(map(repr, parallel))
        raise ConfigError(
            f"distributed(mesh) must have only dimensions that are data parallel, got {names}; pass "
            f"mesh[{way}]"
        )
    members = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    if mesh.get_rank() not in members:
        raise ConfigError(
            f"distributed(mesh) must be a mesh of this process, got one of ranks {list(members)} in rank "
            f"{mesh.get_rank()}; make the pipeline only where mesh.get_coordinate() is not None"
        )
    return (members.index(mesh.get_rank()), len(members)), members
