"""Training data that Lightning is given without the data module that keeps its position."""

from __future__ import annotations

import sys

from trainpipes.callers import callers
from trainpipes.warn_once import warn_once

__all__ = ["warn_without_data_module"]

#: Who asks for an iterator to train on, in either of Lightning's packages.
_ASKS = "_FitLoop.setup_data"
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
#: The modules that keep the position right.
_ANSWERS = "trainpipes.integrations.lightning."


def warn_without_data_module() -> None:
    """Warn if Lightning, here on the stack, asks for what it trains on: it would not keep the position."""
    if not any(package in sys.modules for package in _PACKAGES):
        return
    for module, function in callers():
        if module.startswith(_ANSWERS):
            return
        if function == _ASKS and module.startswith(_PACKAGES):
            warn_once(
                "Lightning alone does not resume data exactly: it does not load the position at the "
                "end of an epoch, saves the position of one rank only, and without a len() that "
                "of the following batch, so that a resumed run repeats or misses batches. "
                "Write trainer.fit(model, datamodule="
                "trainpipes.integrations.lightning.PipelineDataModule(train=pipe))",
                key=_ASKS,
            )
            return
