"""Loaders that are given to ``ray.train.torch.prepare_data_loader``, which is for DataLoaders of rows."""

from __future__ import annotations

import sys

from trainpipes.callers import callers
from trainpipes.errors import ConfigError

__all__ = ["refuse_prepared_by_ray"]

#: Where Ray prepares loaders, and where it iterates what it has prepared.
_MODULES = ("ray.train.torch.train_loop_utils", "ray.train.v2.torch.train_loop_utils")
_ASKS = (
    "prepare_data_loader",
    "_TorchAccelerator.prepare_data_loader",
    "_WrappedDataLoader.__iter__",
)


def refuse_prepared_by_ray() -> None:
    """Raise if Ray, here on the stack, prepares a loader, or iterates one that it has prepared: it deals
    rows out once more, and takes a batch ahead, by which the position would be one batch late."""
    if not any(module in sys.modules for module in _MODULES):
        return
    for module, function in callers():
        if module in _MODULES and function in _ASKS:
            raise ConfigError(
                "a trainpipes.Loader reads the rows of its worker and no others, and Ray would take a batch "
                "ahead of its position, got ray.train.torch.prepare_data_loader(loader): leave that out, and "
                "write pipe.to(ray.train.torch.get_device()) to have batches on the device"
            )
