"""A loader's state as frameworks ask for it: one that is whole on each rank."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trainpipes.errors import ConfigError
from trainpipes.gather import TIMEOUT
from trainpipes.loader import Loader
from trainpipes.shown import shown

__all__ = ["gathered"]


class _Gathered:
    """What ``gathered`` makes."""

    def __init__(self, loader: Loader, timeout: float) -> None:
        self.loader = loader
        self.timeout = timeout

    def state_dict(self) -> dict[str, Any]:
        """A state that any number of ranks can load, as ``Loader.whole_state`` says."""
        return self.loader.whole_state(timeout=self.timeout)

    def load_state_dict(
        self, state: dict[str, Any], *, allow_changes: Collection[str] = ()
    ) -> None:
        """Let the loader go on where ``state`` was taken, as ``Loader.load_state_dict`` says."""
        self.loader.load_state_dict(state, allow_changes=allow_changes)


def gathered(loader: Loader, *, timeout: float = TIMEOUT) -> _Gathered:
    """An object whose ``state_dict()`` is the state of all ranks, for frameworks that save one state for all:

        accelerator.register_for_checkpointing(gathered(loader))

    Where batches are counted, each rank's own state is that of all. Else all ranks must call ``state_dict()``
    after the same step.

    Args:
        loader: the ``Loader`` whose position to save.
        timeout: seconds that a rank waits for the others.

    Raises:
        ConfigError: ``loader`` is no ``Loader``.

    >>> import trainpipes as tp
    >>> from trainpipes.integrations import gathered
    >>> loader = tp.Loader(tp.from_dataset(range(10)).batch(2))
    >>> batch = next(iter(loader))
    >>> gathered(loader).state_dict()["m"]
    1
    """
    if not isinstance(loader, Loader):
        raise ConfigError(
            f"gathered(loader) takes a trainpipes.Loader, got {shown(loader)}; for a pipeline write "
            "gathered(trainpipes.Loader(pipe))"
        )
    return _Gathered(loader, timeout)
