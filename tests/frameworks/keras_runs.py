"""What the Keras tests run in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from frameworks.example import example
from frameworks.steps import Steps

__all__ = ["script"]


def script(folder: str, *arguments: str) -> None:
    """docs/examples/keras_fit.py, which notes each batch that it trains on.

    Args:
        folder: for the notes.
        arguments: of the script.
    """
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    class Epoch(keras.callbacks.Callback):
        number = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.number = epoch

    epoch, steps, train_step = Epoch(), Steps(Path(folder), 0), keras.Model.train_step
    done = iter(range(1_000_000))

    def train_step_noted(self: Any, data: Any) -> Any:
        steps.trained_on(epoch.number, next(done), {"input_ids": data[0]})
        return train_step(self, data)

    keras.Model.train_step = train_step_noted
    example("keras_fit").main(arguments, [epoch])
