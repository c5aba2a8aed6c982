"""Who asks for rows: which rank of how many; user code that makes rows itself, a DataLoader, or another
library's loop.

What is known of the loops of other libraries is in ``trainpipes.integrations.callers``, which is asked once
one of these is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import FrameType
from typing import Any

from trainpipes.errors import ConfigError, TopologyError, shown

#: Usual names of dimensions whose processes need the same batches.
SAME_BATCHES = frozenset(
    name
    for short, long in {"tp": "tensor", "pp": "pipeline", "cp": "context", "sp": "sequence"}.items()
    for name in (short, long, f"{long}_parallel")
)


def data_parallel() -> tuple[int, int]:
    """Rank and world size: of ``torch.distributed``, else ``RANK`` and ``WORLD_SIZE``, else 0 of 1."""
    import torch.distributed as dist

    set_rank, set_world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if dist.is_available() and dist.is_initialized():
        real = dist.get_rank(), dist.get_world_size()
        in_environment = set_rank, set_world
        if None not in in_environment and in_environment != tuple(map(str, real)):
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
    if not hasattr(mesh, "mesh_dim_names"):
        raise ConfigError(
            f"distributed(mesh) must be a DeviceMesh, got {shown(mesh)}; write mesh['dp'], the part of "
            "init_device_mesh(...) that is data parallel"
        )
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


#: Whether a user's code is asked, in this thread, for the rows or keys of an epoch.
_making_rows = ContextVar("making_rows", default=False)
#: Libraries whose loops are known, by modules that are imported where they run, and the module that knows
#: them.
LIBRARIES = ("accelerate", "transformers", "lightning.pytorch", "pytorch_lightning", "ray.train")
KNOWING = "trainpipes.integrations.callers"
#: Modules of the samplers of torch's loaders, which ask for a length first.
SAMPLERS = (
    "torch.utils.data.sampler",
    "torch.utils.data.distributed",
    "torchdata.stateful_dataloader.sampler",
)


def callers() -> Iterator[tuple[str, str]]:
    """Module and qualified name of each function on the stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        frame = frame.f_back


def batched_outside() -> bool:
    """Whether the DataLoader that asks makes batches by itself."""
    frame = sys._getframe(2)
    return frame.f_code.co_name == "__init__" and bool(frame.f_locals.get("auto_collation", False))


def reading_worker() -> Any:
    """``get_worker_info()`` where a DataLoader's workers share out the rows of a pipeline. Those of a
    ``Loader`` call functions, and a pipeline that one of these iterates is read whole.
    """
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return None if getattr(info, "only_calls", False) else info


@contextmanager
def making_rows() -> Iterator[None]:
    """A user's code is asked for the rows or keys of an epoch within: all of them, also in a worker of a
    DataLoader, which it does not see.
    """
    from torch.utils.data._utils import worker

    token, info = _making_rows.set(True), worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info
        _making_rows.reset(token)


def refuse_in_an_iterable() -> None:
    """Raise if the rows of ``from_iterable`` or the keys of a sampler are made of a pass that starts now: the
    state would not hold its epoch."""
    if _making_rows.get():
        raise ConfigError(
            "from_iterable() and samplers must not iterate a pipeline, which after a resume would begin in "
            "epoch 0 again and which reads only this rank's rows: use the pipeline itself, as in "
            "pipe.map(fn) or pipe.flat_map(fn), or a tp.RowStream that keeps its state_dict (docs/extend.md)"
        )


def refuse_sampler() -> None:
    """Raise if a sampler asks for the length of a ``Loader``: a DataLoader would take batches by number."""
    if sys._getframe(2).f_globals.get("__name__") in SAMPLERS:
        raise ConfigError(
            "DataLoader(dataset) must be a pipeline or a data set of rows, got a trainpipes.Loader, which is "
            "a loader itself: iterate it in place of the DataLoader, or write DataLoader(pipe, "
            "batch_size=None)"
        )


def _asked(question: str, *about: Any) -> Any:
    """Ask the module that knows other libraries; None if none of them is imported."""
    if not any(library in sys.modules for library in LIBRARIES):
        return None
    return getattr(import_module(KNOWING), question)(*about)


def in_trainer() -> str | None:
    """The code to write instead, where the HF Trainer asks."""
    way: str | None = _asked("in_trainer")
    return way


def reading_ranks(ranks: tuple[int, int], batching: Callable[[], Any]) -> tuple[int, int]:
    """Rank and world size to read by; 0 of 1 where a library shares out the rows again."""
    shared: tuple[int, int] | None = (
        None if ranks[1] == 1 else _asked("shared_ranks", ranks[1], batching)
    )
    return shared or ranks


def warn_without_data_module() -> None:
    """Warn if Lightning trains without the data module that keeps the position."""
    _asked("warn_without_data_module")


def refuse_prepared_by_ray() -> None:
    """Raise if Ray prepares a loader: it deals rows out again."""
    _asked("refuse_prepared_by_ray")
