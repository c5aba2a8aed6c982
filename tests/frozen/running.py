"""Runs a chain: once without a stop on one rank, then in legs, each of which goes on from the state of the
one before on ranks and workers of its own."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

import trainpipes as tp
from frozen import data, functions
from frozen.chains import read

__all__ = ["digest", "run", "run_all", "small_data"]

#: Seconds that one chain may take.
MOST = 120

NAMESPACE = {"tp": tp, "np": np, "pa": pa, "pc": pc, "torch": torch}
NAMESPACE |= {"data": data, "functions": functions}


@dataclass
class Read:
    """What one rank read in one leg: digests of items by epochs, and whether each epoch ended."""

    epochs: list[tuple[list[str], bool]] = field(default_factory=list)
    state: Any = None
    length: int | None = None
    error: str = ""
    said: str = ""


@contextmanager
def small_data() -> Iterator[None]:
    """The files that chains read."""
    with tempfile.TemporaryDirectory(prefix="frozen-", ignore_cleanup_errors=True) as folder:
        before = os.environ.get("TRAINPIPES_CACHE")
        os.environ["TRAINPIPES_CACHE"] = f"{folder}/cache"
        files = Path(folder) / "data"
        files.mkdir()
        data.make(files)
        try:
            yield
        finally:
            del os.environ["TRAINPIPES_CACHE"]
            os.environ |= {} if before is None else {"TRAINPIPES_CACHE": before}


def run_all(numbers: list[int], jobs: int) -> dict[int, tuple[str, str]]:
    """The digest of each chain, and what it gives in words."""
    parts = [numbers[first : first + 20] for first in range(0, len(numbers), 20)]
    with ProcessPoolExecutor(jobs, get_context("spawn"), _prepare) as pool:
        done = as_completed([pool.submit(_some, part) for part in parts])
        found = {number: one for future in done for number, one in future.result().items()}
    return {number: found[number] for number in numbers}


def _prepare() -> None:
    kept = small_data()
    kept.__enter__()
    atexit.register(kept.__exit__, None, None, None)
    signal.signal(signal.SIGALRM, _too_long)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {MOST} seconds")


def _some(numbers: list[int]) -> dict[int, tuple[str, str]]:
    found = {}
    for number in numbers:
        _, plan, code = read()[number]
        signal.alarm(MOST)
        try:
            found[number] = run(code, plan, number)
        except TimeoutError as error:
            found[number] = "0" * 16, str(error)
        finally:
            signal.alarm(0)
    return found


def run(code: str, plan: Mapping[str, Any], number: int) -> tuple[str, str]:
    """8 digits of what the run without a stop gives, and 8 of the legs; and that in words."""
    os.environ["FROZEN_CHAIN"] = f"{number}-{os.getpid()}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = _read(code, plan, 0, 1, 0, None, plan["epochs"], plan["most"])
        if whole.error:
            return _short(("alone", _refused([whole])), 16), f"{whole.error}: {whole.said}"
        first, legs, before = _short((whole.length, whole.epochs), 8), hashlib.sha256(), [whole]
        for place, (ranks, workers, epochs, most, *own) in enumerate(plan["legs"]):
            states: Sequence[Any] = [None] * ranks
            if place:
                states = [read.state for read in before]
                if not own:
                    states = [tp.merge_states(states) if len(states) > 1 else states[0]] * ranks
            before = [
                _read(code, plan, rank, ranks, workers, state, epochs, most)
                for rank, state in enumerate(states)
            ]
            if found := next((read for read in before if read.error), None):
                ended = _short((f"leg {place}", _refused(before)), 8)
                return first + ended, f"leg {place}: {found.error}: {found.said}"
            legs.update(repr((place, [(read.length, read.epochs) for read in before])).encode())
    said = " + ".join(str(len(items)) for items, _ in whole.epochs)
    return first + legs.hexdigest()[:8], f"{said} items, len {whole.length}"


def _refused(reads: Sequence[Read]) -> list[tuple[str | None, list[list[str]]]]:
    return [(read.error or None, [items for items, _ in read.epochs]) for read in reads]


def _short(value: object, digits: int) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:digits]


def _read(
    code: str,
    plan: Mapping[str, Any],
    rank: int,
    ranks: int,
    workers: int,
    state: Any,
    epochs: int,
    most: int | None,
) -> Read:
    """What one rank reads, up to so many epochs' ends or items."""
    found, items, count = Read(), list[str](), 0
    try:
        reads = eval(f"({code})", dict(NAMESPACE)).distributed(rank=rank, world_size=ranks)
        if plan["reads"] == "loader":
            how = {"num_workers": workers} if workers else {"threads": plan["threads"]}
            reads = tp.Loader(reads, **how)
        with suppress(TypeError):
            found.length = len(reads)
        if state is not None:
            reads.load_state_dict(state)
        while len(found.epochs) < epochs and (most is None or count < most):
            items, iterator, ended = [], iter(reads), False
            while not ended and (most is None or count < most):
                try:
                    items.append(digest(next(iterator)))
                    count += 1
                except StopIteration:
                    ended = True
                assert count <= 3000, "no end"
            found.epochs.append((items, ended))
            items = []
        found.state = json.loads(json.dumps(reads.state_dict()))
    except Exception as error:
        if items:
            found.epochs.append((items, False))
        kinds = [kind for kind in type(error).__mro__
                 if getattr(tp, kind.__name__, None) is kind or kind.__module__ == "builtins"]  # fmt: skip
        found.error, found.said = kinds[0].__name__, str(error)
    return found


def digest(item: Any) -> str:
    """16 hex digits of an item: types, shapes and bytes, in the order in which they came."""
    found = hashlib.sha256()
    _add(found, item)
    return found.hexdigest()[:16]


def _add(found: Any, item: Any) -> None:
    def tag(*words: object) -> None:
        found.update(("\0".join(map(str, words)) + "\1").encode())

    if isinstance(item, torch.Tensor):
        tag("tensor", item.dtype, tuple(item.shape))
        if item.numel():
            flat = item.detach().cpu().contiguous().view(-1)
            found.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(item, np.ndarray):
        tag("array", item.dtype, item.shape)
        if item.dtype == object:
            for value in item.reshape(-1):
                _add(found, value)
        else:
            found.update(np.ascontiguousarray(item).tobytes())
    elif isinstance(item, np.generic):
        tag("scalar", item.dtype)
        found.update(item.tobytes())
    elif isinstance(item, pa.Table | pa.RecordBatch):
        tag("table", item.num_rows, *(f"{f.name}:{f.type}" for f in item.schema))
        for name in item.schema.names:
            _add(found, item.column(name).to_pylist())
    elif isinstance(item, dict):
        tag("dict", len(item))
        for pair in item.items():
            _add(found, pair[0])
            _add(found, pair[1])
    elif isinstance(item, list | tuple):
        tag(type(item).__name__ if type(item) in (list, tuple) else "tuple", len(item))
        for value in item:
            _add(found, value)
    elif isinstance(item, bytes | bytearray | memoryview):
        tag("bytes", len(item))
        found.update(bytes(item))
    else:
        assert item is None or isinstance(item, str | bool | int | float), type(item)
        tag(type(item).__name__, repr(item))
