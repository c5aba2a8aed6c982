"""Functions of rows that worker processes can import, for tests of ``map``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

Row = dict[str, Any]


def plain(row: Row) -> Row:
    return {**row, "y": row["x"] ** 2}


def noisy(row: Row, rng: np.random.Generator) -> Row:
    return {**row, "noise": rng.random(), "image": torch.from_numpy(rng.random((3, 40, 40)))}


def every_kind(row: Row) -> Row:
    x = row["x"]
    big = np.arange(9000, dtype=np.float32) + x
    return {
        "x": x,
        "big": big,
        "small": np.array([x], dtype=np.int16),
        "columns": np.asfortranarray(big.reshape(90, 100)),
        "strided": torch.from_numpy(big).reshape(90, 100).t(),
        "tensor": torch.full((50, 60), x),
        "scalar": torch.tensor(x),
        "half": torch.full((9000,), x, dtype=torch.bfloat16),
        "grad": torch.ones(2, requires_grad=True) * 1.0 if x % 2 else torch.ones(2),
        "empty": np.empty((0, 3)),
        "text": "é" * x,
        "bytes": b"\0" * x,
        "words": np.array(["a", None], dtype=object),
    }


def where(row: Row) -> Row:
    return {**row, "process": os.getpid()}


def slow_noisy(row: Row, rng: np.random.Generator) -> Row:
    time.sleep(0.002)
    return noisy(row, rng)


def slow(row: Row) -> Row:
    time.sleep(0.01)
    return row


def very_slow(row: Row) -> Row:
    time.sleep(1000)
    return row


def hangs_57(row: Row) -> Row:
    if row["x"] == 57:
        time.sleep(1000)
    return row


def refuse_57(row: Row) -> Row:
    if row["x"] == 57:
        raise ValueError("57 is not wanted")
    return row


class OwnError(Exception):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number}: {text}")


def refuse_in_own_words(row: Row) -> Row:
    if row["x"] == 57:
        raise OwnError(57, "not wanted")
    return row


def forget_57(row: Row) -> Row | None:
    return None if row["x"] == 57 else row


def exit_57(row: Row) -> Row:
    if row["x"] == 57:
        os._exit(3)
    return row


def leave_57(row: Row) -> Row:
    if row["x"] == 57:
        raise SystemExit(7)
    return row


def killed_57(row: Row) -> Row:
    if row["x"] == 57:
        os.kill(os.getpid(), signal.SIGKILL)
    return row


class ExitsOnce:
    """Ends its process at a row, once."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, row: Row) -> Row:
        if row["x"] == 57 and not self.mark.exists():
            self.mark.touch()
            os._exit(3)
        return row


class SleepsOnce:
    """Writes the number of its process to a file, and sleeps, at a row, once."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, row: Row) -> Row:
        if row["x"] == 0 and not self.file.exists():
            self.file.write_text(str(os.getpid()))
            very_slow(row)
        return row


class Counts:
    """Leaves a file for each row that it is called for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, row: Row) -> Row:
        (self.folder / str(row["x"])).touch()
        time.sleep(0.005)
        return row


def a_lambda(row: Row) -> Any:
    return {"f": lambda: row["x"]} if row["x"] == 57 else row


def stop(row: Row) -> Row:
    raise StopIteration


class SlowToSend:
    """Keeps the thread that sends it in torch for a while, without the interpreter's lock."""

    def __reduce__(self) -> Any:
        side = torch.ones(1200, 1200)
        for _ in range(8):
            side = (side @ side).clamp(max=1)
        return SlowToSend, ()


def slow_to_send(row: Row) -> Row:
    return {**row, "slow": SlowToSend()}


def drawn_from_numpy(row: Row) -> Row:
    return {**row, "noise": np.random.rand()}


class Weighted:
    """Adds numbers of tensors, a parameter and a module to a row; changes one in place."""

    def __init__(self, size: int) -> None:
        self.small, self.large = torch.arange(5.0), torch.arange(float(size))
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.module = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(self.module.weight, 2.0)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.small[0] += 0.0
        self.large[0] *= 1.0
        made = (
            self.small[1] + self.large[row["x"]] + self.parameter.sum() + self.module.weight.sum()
        )
        return {"x": row["x"], "y": float(made.detach())}
