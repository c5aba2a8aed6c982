"""Checks for pipelines and for stages of your own."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
import multiprocessing
import pickle
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torchdata.nodes import BaseNode

from trainpipes._internal.checks import require, whole_number, wrong
from trainpipes.engine.iterating.iteration_state import plan_of
from trainpipes.errors import TrainpipesError, shown
from trainpipes.interfaces.stage import Stage, is_ours
from trainpipes.interfaces.stage_kinds import stages_within
from trainpipes.interfaces.stateful_stage import StatefulStage, asked_often
from trainpipes.interfaces.watched_calls import seen_draws
from trainpipes.loader import Loader
from trainpipes.look.order_quality import ShuffleQuality, shuffle_quality
from trainpipes.pipeline.chain import Pipeline

#: Characters of a value in a message.
QUOTED = 40


def digest(item: Any) -> str:
    """A short hash of an item's dtypes, shapes, bytes, keys, strings and numbers."""
    return hashlib.sha256(b"".join(_parts(item))).hexdigest()[:16]


def digest_and_size(item: Any) -> tuple[str, int]:
    """A digest that also tells where each value ends, and about how many bytes the item holds."""
    parts = _parts(item)
    held, ends = b"".join(parts), repr([*map(len, parts)]).encode()
    return hashlib.sha256(held + ends).hexdigest()[:16], len(held)


def _parts(item: Any) -> list[bytes]:
    parts: list[bytes] = []
    _add(item, parts)
    return parts


#: What is written as Python does it.
PLAIN = {type(None), bool, int, float, str, bytes}


def _add(item: Any, parts: list[bytes]) -> None:
    if type(item) in PLAIN:
        parts.append(repr(item).encode())
    elif isinstance(item, torch.Tensor):
        parts.append(f"tensor {item.dtype} {tuple(item.shape)}".encode())
        whole = item.detach().cpu().clone(memory_format=torch.contiguous_format)
        parts.append(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(item, np.ndarray) and item.dtype != object:
        parts.append(f"array {item.dtype} {item.shape}".encode())
        parts.append(np.ascontiguousarray(item).tobytes())
    elif isinstance(item, pa.Table | pa.RecordBatch):
        parts.append(f"{type(item).__name__} {item.schema}".encode())
        _add(item.to_pylist(), parts)
    elif isinstance(item, Mapping):
        parts.append(f"{type(item).__name__} {len(item)}".encode())
        for key, value in item.items():
            parts.append(repr(key).encode())
            _add(value, parts)
    elif isinstance(item, list | tuple | np.ndarray):
        parts.append(f"{type(item).__name__} {len(item)}".encode())
        if PLAIN.issuperset(map(type, item)):
            parts += map(str.encode, map(repr, item))
            return
        for value in item:
            _add(value, parts)
    elif isinstance(item, bool | int | float | str | bytes):
        parts.append(repr(item).encode())
    else:
        held = io.BytesIO()
        _Pickler(held).dump(item)
        parts.append(held.getvalue())


class _Pickler(pickle.Pickler):
    """Pickles tensors without the memory around them, of which they may be views."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        return bytes, (b"".join(_parts(obj)),)


def difference(item: Any, other: Any) -> str:
    """The first difference of two items, as text; "" if there is none.

    >>> difference([{"x": 1, "y": [2, 7]}], [{"x": 1, "y": [2, 3]}])
    "row 0, column 'y' at [1] is 7 instead of 3"
    """
    return _difference(item, other, "")


def _difference(item: Any, other: Any, where: str) -> str:
    if digest_and_size(item) == digest_and_size(other):
        return ""
    here = where or "it"
    if type(item) is not type(other):
        kinds = type(item).__name__, type(other).__name__
        values = shown(item, QUOTED), shown(other, QUOTED)
        return f"{here} is {values[0]} ({kinds[0]}) instead of {values[1]} ({kinds[1]})"
    if isinstance(item, torch.Tensor) or (isinstance(item, np.ndarray) and item.dtype != object):
        return _of_arrays(item, other, here)
    if isinstance(item, pa.Table | pa.RecordBatch):
        if item.schema != other.schema:
            return f"{here} has the columns {shown(item.schema)} instead of {shown(other.schema)}"
        return _difference(item.to_pylist(), other.to_pylist(), where)
    if isinstance(item, Mapping):
        if list(item) != list(other):
            return f"{here} has {shown(list(item))} instead of {shown(list(other))}"
        name = next(n for n in item if digest_and_size(item[n]) != digest_and_size(other[n]))
        return _difference(item[name], other[name], f"{where}, column {name!r}".removeprefix(", "))
    if isinstance(item, list | tuple | np.ndarray):
        if len(item) != len(other):
            return f"{here} has the length {len(item)} instead of {len(other)}"
        pairs = enumerate(zip(item, other, strict=True))
        place = next(n for n, (a, b) in pairs if digest_and_size(a) != digest_and_size(b))
        where = f"{where} at [{place}]" if where else f"row {place}"
        return _difference(item[place], other[place], where)
    return f"{here} is {shown(item, QUOTED)} instead of {shown(other, QUOTED)}"


def _of_arrays(item: Any, other: Any, where: str) -> str:
    kinds = [
        f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}" for array in (item, other)
    ]
    if kinds[0] != kinds[1]:
        kind = "a tensor" if isinstance(item, torch.Tensor) else "an array"
        return f"{where} is {kind} {kinds[0]} instead of {kinds[1]}"
    ours, theirs = (np.array(array.tolist(), dtype=object).reshape(-1) for array in (item, other))
    same = [repr(a) == repr(b) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)]
    if all(same):  # in bits that are not shown
        return f"{where} has other bits"
    place = same.index(False)
    at = [int(n) for n in np.unravel_index(place, tuple(item.shape))]
    return f"{where}{f' at {at}' if at else ''} is {ours[place]} instead of {theirs[place]}"


__all__ = [
    "ResumeError",
    "ResumeReport",
    "ShuffleQuality",
    "check_resume",
    "digest",
    "shuffle_quality",
]

#: Bytes of items that a run keeps, to show differences.
KEPT_BYTES = 64 << 20


class ResumeError(TrainpipesError, AssertionError):
    """A resumed run gave other items than the run that was not interrupted."""


@dataclass(frozen=True)
class ResumeReport:
    """From how many places a run was resumed.

    Attributes:
        items: number of items of each epoch.
        points: number of places from which a run was resumed.
        possible: number of places there are; more than ``points`` if these were drawn.
        processes: how many of these were resumed in a process of their own.
        state_bytes: size of the largest state, as JSON.
    """

    items: tuple[int, ...]
    points: int
    processes: int
    state_bytes: int
    possible: int = 0

    def __str__(self) -> str:
        drawn = f"drawn of {self.possible:,} " if self.possible > self.points else ""
        return (
            f"{sum(self.items)} items in {len(self.items)} epochs, resumed at {self.points} points {drawn}"
            f"({self.processes} in fresh processes), state of {self.state_bytes:,} bytes"
        )


Subject: TypeAlias = "Pipeline | Loader | BaseNode[Any]"
#: In words, of a function.
SUBJECTS = "a function that makes a fresh pipeline, Loader or node"
#: Items to look at where a state is loaded once more.
AGAIN = 3


def check_resume(
    subject: Pipeline | Callable[[], Any],
    *,
    epochs: int = 3,
    limit: int | None = None,
    processes: int = 2,
    every: int = 1,
    points: int | None = 200,
    start_method: str = "fork",
) -> ResumeReport:
    """Check that a pipeline, loader or node resumes exactly, wherever it was stopped.

    Takes the state before every item, loads each (or ``points`` of them) into a fresh object, twice, and
    compares items to the end of the epoch and in the epochs after it.

    Args:
        subject: a pipeline; or a function that makes a fresh pipeline, ``Loader`` or node, the same each
            time.
        epochs: number of epochs to run. States are taken within all of them but the last, and at the start
            and the end of the last.
        limit: items of each epoch to look at, for endless or long pipelines; all if left out.
        processes: how many of the points to resume in a process of their own.
        every: take a state before every n-th item.
        points: resume at so many of these states at most, drawn the same each time; None for all.
        start_method: how those processes start: "fork", or "spawn" if ``subject`` pickles.

    Raises:
        ConfigError: an option is out of range, or ``subject`` makes nothing that resumes.
        ResumeError: names the first item that differs, the difference, and the functions it may be due
            to.

    >>> import trainpipes as tp
    >>> print(check_resume(tp.from_tensors([[1.0], [2.0], [3.0]]).shuffle(3).batch(2), processes=0))
    6 items in 3 epochs, resumed at 8 points (0 in fresh processes), state of 452 bytes
    """
    make = _maker(subject)
    counts = {"epochs": epochs, "limit": limit, "every": every, "points": points}
    for name, count in (counts | {"processes": processes}).items():
        if count is not None or name not in ("limit", "points"):
            whole_number(count, int(name in counts), f"check_resume({name})")
    methods = multiprocessing.get_all_start_methods()
    rule = f"one of {methods} here"
    require(start_method in methods, "check_resume(start_method)", rule, start_method)
    first = make()
    good = isinstance(first, Pipeline | Loader | BaseNode)
    require(good, "check_resume(subject)", f"{SUBJECTS}, each time it is called", first)
    if limit is None and not isinstance(first, BaseNode) and _continues(first):
        rule = "a number of items of each epoch for a pipeline without an end"
        raise wrong("check_resume(limit)", rule, limit, "write limit=100")
    with asked_often():
        reference = _walk(first, epochs, limit)
    hint = partial(_hint, _functions(first))
    possible = _points(reference, every, () if _continues(first) else _cut(reference, limit))
    chosen = _drawn(possible, points)
    largest = 0
    for epoch, k in chosen:
        state = reference[epoch].states[k]
        before = json.dumps(state)
        largest = max(largest, len(before))
        walked = _walk(make(), epochs - epoch, limit, state, _begun(reference[epoch], k, limit))
        _compare(reference, epoch, k, walked, hint)
        if json.dumps(state) != before:
            raise ResumeError(f"loading the state of epoch {epoch}, item {k} changed it")
        again = _walk(make(), 1, k + AGAIN, state, k)  # the same state a second time
        again[0].items = again[0].items[: len(reference[epoch].items) - k]
        _compare(reference, epoch, k, again, hint, part=True)
    alone = chosen[:: max(1, len(chosen) // processes)][:processes] if processes else []
    for epoch, k in alone:
        state = reference[epoch].states[k]
        arguments = epochs - epoch, limit, state, _begun(reference[epoch], k, limit)
        walked = _in_process(make, arguments, k, start_method)
        _compare(reference, epoch, k, walked, hint, where=" in a fresh process")
    items = tuple(len(e.items) for e in reference)
    return ResumeReport(items, len(chosen), len(alone), largest, len(possible))


@dataclass
class _Epoch:
    """Digests of items, some of the items, and the states before each and after the last."""

    items: list[str] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    kept: dict[int, Any] = field(default_factory=dict)

    def add(self, item: Any, left: int) -> int:
        """Add an item, kept if it has ``left`` bytes at most; gives how many are left."""
        digest_of, size = digest_and_size(item)
        if size <= left:
            self.kept[len(self.items)] = item
            left -= size
        self.items.append(digest_of)
        return left

    def item(self, number: int) -> Any:
        """An item as it was; None where it was not kept, or was changed since."""
        item = self.kept.get(number)
        return item if digest_and_size(item)[0] == self.items[number] else None


def _maker(subject: Any) -> Callable[[], Subject]:
    if isinstance(subject, Pipeline):
        stages, ranks = subject.stages, subject._ranks
        return lambda: Pipeline(stages, ranks)
    way = "write check_resume(lambda: trainpipes.Loader(pipe))"
    require(callable(subject), "check_resume(subject)", f"a pipeline, or {SUBJECTS}", subject, way)
    return subject  # type: ignore[no-any-return]


def _walk(
    subject: Subject, epochs: int, limit: int | None, state: Any = None, begun: int = 0
) -> list[_Epoch]:
    """Items of a subject, from a state after ``begun`` items of an epoch; without a state also the state
    before each item and after the last.
    """
    with warnings.catch_warnings():  # a limit leaves epochs before their end
        warnings.filterwarnings("ignore", "the loop before was left within")
        return _walked(subject, epochs, limit, state, begun)


def _walked(
    subject: Subject, epochs: int, limit: int | None, state: Any, begun: int
) -> list[_Epoch]:
    walked: list[_Epoch] = []
    left, saves = KEPT_BYTES, state is None
    for number in range(epochs):
        if isinstance(subject, BaseNode):
            subject.reset(None if number else state)
        elif not number and not saves:
            subject.load_state_dict(state)
        epoch, iterator = _Epoch(), subject if isinstance(subject, BaseNode) else iter(subject)
        most = math.inf if limit is None else limit - (0 if number else begun)
        while True:
            epoch.states += [copy.deepcopy(subject.state_dict())] if saves else []
            if len(epoch.items) >= most:
                break
            try:
                left = epoch.add(next(iterator), left)
            except StopIteration:
                epoch.states[-1:] = [copy.deepcopy(subject.state_dict())] if saves else []
                break
        walked.append(epoch)
    return walked


def _points(
    reference: Sequence[_Epoch], every: int, cut: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    return [
        (number, k)
        for number, epoch in enumerate(reference)
        for k in range(0, len(epoch.items) + 1, every)
        if number < max(1, len(reference) - 1) or k % max(1, len(epoch.items)) == 0
        if (number, k) not in cut
    ]


def _drawn(points: list[tuple[int, int]], most: int | None) -> list[tuple[int, int]]:
    """So many of the points, the first and the last among them."""
    if most is None or len(points) <= most:
        return points
    inner = random.Random(0).sample(range(1, len(points) - 1), max(0, most - 2))
    return [points[n] for n in sorted({0, len(points) - 1, *inner})[:most]]


def _continues(subject: Subject) -> bool:
    """Whether a loop that was left is gone on with by the next; a node begins anew at ``reset()``."""
    return isinstance(subject, BaseNode) or plan_of(subject).chain.endless


def _cut(reference: Sequence[_Epoch], limit: int | None) -> list[tuple[int, int]]:
    """Where epochs were left at ``limit``: a state there is within the epoch, and what follows in it was not
    looked at. It stays the state until the next epoch gives an item.
    """
    ended = [number for number, epoch in enumerate(reference) if len(epoch.items) == limit]
    return [(number, len(reference[number].items)) for number in ended] + [
        (n + 1, 0) for n in ended
    ]


def _compare(
    reference: list[_Epoch],
    epoch: int,
    k: int,
    walked: list[_Epoch],
    hint: Callable[[], str],
    part: bool = False,
    where: str = "",
) -> None:
    """What a resumed run gave (or ``part`` of it), against the rest. A state at an epoch's end may go on
    with the next. Before an epoch's first item the state is that of the end of the epoch before; if that
    epoch gave nothing, nothing comes once more.
    """
    expected = [(epoch, k), *((number, 0) for number in range(epoch + 1, len(reference)))]
    rest = reference[epoch].items[k:]
    if not rest and (not walked or walked[0].items):
        expected = expected[1:]
        walked = walked[: len(expected)]
    elif k == 0 and epoch and not reference[epoch - 1].items and rest and not walked[0].items:
        walked = walked[1:]
    for (number, start), run in zip(expected, walked, strict=False):
        right, items = reference[number].items[start:], run.items
        right = right[:AGAIN] if part else right
        if right == items:
            continue
        lead = f"after resuming{where} at item {k} of epoch {epoch}, "
        same = next((i for i, (a, b) in enumerate(zip(right, items, strict=False)) if a != b), None)
        if same is None:
            rest_of = "the rest of " if start else ""
            raise ResumeError(
                f"{lead}{rest_of}epoch {number} has {_items(len(items))} instead of {_items(len(right))}"
                f"{hint()}"
            )
        of = f" of epoch {number}" if number != epoch else ""
        before, now = reference[number].item(start + same), run.item(same)
        detail = "" if before is None or now is None else f": {difference(now, before)}"
        raise ResumeError(
            f"{lead}item {start + same}{of} differs from the uninterrupted run{detail}{hint()}"
        )


def _items(count: int) -> str:
    return f"{count} item{'s' * (count != 1)}"


def _functions(subject: Any) -> list[Stage]:
    pipeline = getattr(subject, "pipeline", subject)
    stages = stages_within(pipeline.stages) if isinstance(pipeline, Pipeline) else ()
    return [
        stage
        for stage in stages
        if not is_ours(type(stage)) or any(map(callable, stage.options.values()))
    ]


def _hint(functions: Sequence[Stage]) -> str:
    if not functions:
        return ""
    drawn = seen_draws(functions)
    if drawn:
        return f"; {drawn}"
    stateful = [stage for stage in functions if isinstance(stage, StatefulStage)]
    if stateful:
        return (
            f"; look at {' and '.join(map(str, stateful))}: state_dict() returns all that process() keeps "
            "from row to row, and load_state_dict() sets all of it again"
        )
    return (
        f"; look at {' and '.join(map(str, functions))}: a function returns the same for the same row, so "
        "it keeps nothing from call to call, and draws only from a generator that map(fn, rng=True) gives it"
    )


def _begun(epoch: _Epoch, k: int, limit: int | None) -> int:
    """How many items of the epoch that is gone on with came before a state: none at the end of one, after
    which the next begins.
    """
    return 0 if k == len(epoch.items) != limit else k


def _in_process(
    make: Callable[[], Subject], arguments: Any, k: int, start_method: str
) -> list[_Epoch]:
    context: Any = multiprocessing.get_context(start_method)
    receive, send = context.Pipe(duplex=False)
    sent: Any = make
    if start_method != "fork":
        sent = make()
        ForkingPickler.dumps(sent)
    process = context.Process(target=_answer, args=(send, sent, arguments))
    process.start()
    send.close()
    try:
        answer: list[list[str]] | str = receive.recv()
    except EOFError:
        process.join()
        answer = f"it ended with exit code {process.exitcode} and no answer"
    process.join()
    if isinstance(answer, str):
        raise ResumeError(
            f"after resuming in a fresh process at item {k}, the run failed: {answer}"
        )
    return [_Epoch(items) for items in answer]


def _answer(send: Any, make: Any, arguments: Any) -> None:
    epochs, limit, state, begun = arguments
    torch.set_num_threads(1)  # a fork has none of the others that torch would wait for
    try:
        subject = make if not callable(make) else make()
        walked = _walk(subject, epochs, limit, json.loads(json.dumps(state)), begun)
        send.send([epoch.items for epoch in walked])
    except Exception as error:
        send.send(f"{type(error).__name__}: {error}")
