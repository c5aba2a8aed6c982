"""Checks for pipelines and for stages of your own.

``check_resume`` takes the state before every item, loads each into a fresh object, and wants the
identical remainder: through the end of the epoch, and the epochs after it, also in a fresh process,
and also when the same state is loaded twice.
"""

from __future__ import annotations

import copy
import hashlib
import json
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torchdata.nodes import BaseNode

from trainpipes.errors import TrainpipesError
from trainpipes.loader import Loader
from trainpipes.pipeline import Pipeline
from trainpipes.shuffle_quality import ShuffleQuality, shuffle_quality

__all__ = [
    "ResumeError",
    "ResumeReport",
    "ShuffleQuality",
    "check_resume",
    "digest",
    "shuffle_quality",
]


class ResumeError(TrainpipesError, AssertionError):
    """A resumed run gave other items than the run that was not interrupted."""


@dataclass(frozen=True)
class ResumeReport:
    """What was checked.

    Attributes:
        items: number of items of each epoch.
        points: number of places from which a run was resumed.
        processes: how many of these were resumed in a process of their own.
        state_bytes: size of the largest state, as JSON.
    """

    items: tuple[int, ...]
    points: int
    processes: int
    state_bytes: int

    def __str__(self) -> str:
        return (
            f"{sum(self.items)} items in {len(self.items)} epochs, resumed at {self.points} points "
            f"({self.processes} in fresh processes), state of {self.state_bytes:,} bytes"
        )


Subject: TypeAlias = "Pipeline | Loader | BaseNode[Any]"


def check_resume(
    subject: Pipeline | Callable[[], Any],
    *,
    epochs: int = 3,
    limit: int | None = None,
    processes: int = 2,
    every: int = 1,
    start_method: str = "fork",
) -> ResumeReport:
    """Check that a pipeline, loader or node resumes exactly, wherever it was stopped.

    Args:
        subject: a pipeline; or a function that makes a fresh pipeline, ``Loader`` or node, the same
            each time.
        epochs: number of epochs to run. States are taken within all of them but the last, and at the start
            and the end of the last.
        limit: items of each epoch to look at, for endless pipelines; all if left out.
        processes: how many of the points to resume in a process of their own.
        every: take a state before every n-th item; 1 for each.
        start_method: how those processes start: "fork", or "spawn" if ``subject`` pickles.

    Returns:
        What was checked.

    Raises:
        ResumeError: names the first item that differs.

    >>> import trainpipes as tp
    >>> print(check_resume(tp.from_tensors([[1.0], [2.0], [3.0]]).shuffle(3).batch(2), processes=0))
    6 items in 3 epochs, resumed at 8 points (0 in fresh processes), state of 425 bytes
    """
    make = _maker(subject)
    reference = _walk(_Driver(make()), epochs, limit)
    points = _points(reference, every)
    largest = 0
    for epoch, k in points:
        state = reference[epoch].states[k]
        largest = max(largest, len(json.dumps(state)))
        before = json.dumps(state)
        _compare(reference, epoch, k, _resume(make, state, epochs - epoch, limit, k))
        if json.dumps(state) != before:
            raise ResumeError(f"loading the state of epoch {epoch}, item {k} changed it")
        again = _resume(make, state, 1, k + 3, k)  # the same state a second time
        _compare(reference, epoch, k, [again[0][: len(reference[epoch].items) - k]], part=True)
    alone = points[:: max(1, len(points) // processes)][:processes] if processes else []
    for epoch, k in alone:
        state = reference[epoch].states[k]
        found = _in_process(make, state, epochs - epoch, limit, k, start_method)
        _compare(reference, epoch, k, found)
    items = tuple(len(e.items) for e in reference)
    return ResumeReport(items, len(points), len(alone), largest)


def digest(item: Any) -> str:
    """A short hash of an item's content: dtypes, shapes and bytes of tensors and arrays, keys,
    strings and numbers."""
    found = hashlib.sha256()
    for part in _parts(item):
        found.update(part)
    return found.hexdigest()[:16]


def _parts(item: Any) -> Iterator[bytes]:
    if isinstance(item, torch.Tensor):
        yield f"tensor {item.dtype} {tuple(item.shape)}".encode()
        whole = item.detach().cpu().clone(memory_format=torch.contiguous_format)
        yield whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(item, np.ndarray) and item.dtype != object:
        yield f"array {item.dtype} {item.shape}".encode()
        yield np.ascontiguousarray(item).tobytes()
    elif isinstance(item, pa.Table | pa.RecordBatch):
        yield f"{type(item).__name__} {item.schema}".encode()
        yield from _parts(item.to_pylist())
    elif isinstance(item, Mapping):
        yield f"{type(item).__name__} {len(item)}".encode()
        for key, value in item.items():
            yield repr(key).encode()
            yield from _parts(value)
    elif isinstance(item, list | tuple | np.ndarray):
        yield f"{type(item).__name__} {len(item)}".encode()
        for value in item:
            yield from _parts(value)
    elif item is None or isinstance(item, bool | int | float | str | bytes):
        yield repr(item).encode()
    else:
        yield pickle.dumps(item)


@dataclass
class _Epoch:
    items: list[str]
    states: list[Any]


class _Driver:
    """One way to iterate and to take and load states, for all that can be checked."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def load(self, state: Any) -> None:
        if isinstance(self._subject, BaseNode):
            self._state: Any = state
        else:
            self._subject.load_state_dict(state)

    _state: Any = None

    def epoch(self) -> Iterator[Any]:
        if not isinstance(self._subject, BaseNode):
            return iter(self._subject)
        self._subject.reset(self._state)
        self._state = None
        iterator: Iterator[Any] = self._subject
        return iterator

    def state(self) -> Any:
        return self._subject.state_dict()


def _maker(subject: Any) -> Callable[[], Subject]:
    if isinstance(subject, Pipeline):
        stages, ranks = subject.stages, subject._ranks
        return lambda: Pipeline(stages, ranks)
    return subject  # type: ignore[no-any-return]


def _walk(driver: _Driver, epochs: int, limit: int | None) -> list[_Epoch]:
    """Items and the state before each one and after the last."""
    found: list[_Epoch] = []
    for _ in range(epochs):
        items: list[str] = []
        states: list[Any] = []
        iterator = driver.epoch()
        while limit is None or len(items) < limit:
            states.append(copy.deepcopy(driver.state()))
            try:
                items.append(digest(next(iterator)))
            except StopIteration:
                states[-1] = copy.deepcopy(driver.state())
                break
        else:
            states.append(copy.deepcopy(driver.state()))
        found.append(_Epoch(items, states))
    return found


def _points(reference: Sequence[_Epoch], every: int) -> list[tuple[int, int]]:
    return [
        (number, k)
        for number, epoch in enumerate(reference)
        for k in range(0, len(epoch.items) + 1, every)
        if number < max(1, len(reference) - 1) or k % max(1, len(epoch.items)) == 0
    ]


def _resume(
    make: Callable[[], Subject], state: Any, epochs: int, limit: int | None, k: int
) -> list[list[str]]:
    subject = make()
    driver = _Driver(subject)
    driver.load(state)
    found: list[list[str]] = []
    for number in range(epochs):
        items: list[str] = []
        left = None if limit is None else limit - (k if number == 0 else 0)
        iterator = driver.epoch()
        while left is None or len(items) < left:
            try:
                items.append(digest(next(iterator)))
            except StopIteration:
                break
        found.append(items)
    return found


def _compare(
    reference: list[_Epoch], epoch: int, k: int, found: list[list[str]], part: bool = False
) -> None:
    """What a resumed run gave (or ``part`` of it), against the rest. A state at an epoch's end may go on
    with the next. Before an epoch's first item the state is that of the end of the epoch before, of which,
    where it gave nothing, nothing comes once more."""
    expected = [reference[epoch].items[k:], *(e.items for e in reference[epoch + 1 :])]
    if not expected[0] and (not found or found[0]):
        expected = expected[1:]
        found = found[: len(expected)]
    elif (
        k == 0
        and epoch
        and not reference[epoch - 1].items
        and expected[0]
        and found == [[], *found[1:]]
    ):
        found = found[1:]
    for number, (right, given) in enumerate(zip(expected, found, strict=False)):
        if right == given or (part and right[: len(given)] == given):
            continue
        same = next((i for i, (a, b) in enumerate(zip(right, given, strict=False)) if a != b), None)
        first = min(len(right), len(given)) if same is None else same
        raise ResumeError(
            f"resumed before item {k} of epoch {epoch}: epoch {epoch + number} went on with "
            f"{len(given)} items and must with {len(right)}; the first that differs is number {first} "
            "after the resume"
        )


def _in_process(
    make: Callable[[], Subject],
    state: Any,
    epochs: int,
    limit: int | None,
    k: int,
    start_method: str,
) -> list[list[str]]:
    context: Any = multiprocessing.get_context(start_method)
    receive, send = context.Pipe(duplex=False)
    sent: Any = make
    if start_method != "fork":
        sent = make()
        ForkingPickler.dumps(sent)
    process = context.Process(target=_answer, args=(send, sent, state, epochs, limit, k))
    process.start()
    send.close()
    try:
        found: list[list[str]] | str = receive.recv()
    except EOFError:
        found = f"ended with exit code {process.exitcode} and no answer"
    process.join()
    if isinstance(found, str):
        raise ResumeError(f"resumed before item {k} in a fresh process: {found}")
    return found


def _answer(send: Any, make: Any, state: Any, epochs: int, limit: int | None, k: int) -> None:
    try:
        maker = _maker(make) if isinstance(make, Pipeline) else make
        send.send(_resume(maker, json.loads(json.dumps(state)), epochs, limit, k))
    except Exception as error:
        send.send(f"{type(error).__name__}: {error}")
