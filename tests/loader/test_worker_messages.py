"""What workers of a ``Loader`` send comes out as it went in, in messages that are bounded."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from trainpipes.engine.iterating import worker_message
from trainpipes.engine.iterating.worker_message import (
    ALONE_BYTES,
    MOST_BYTES,
    WorkerMemory,
    WorkerMessage,
    pack,
)
from trainpipes.engine.iterating.worker_receiver import Received
from trainpipes.testing import digest

BATCHES: list[Any] = [
    {"ids": torch.arange(12).view(3, 4), "text": ["a", "b", "c"], "n": 5},
    {"ids": torch.arange(8).view(4, 2).t(), "half": torch.rand(3).to(torch.bfloat16)},
    (torch.tensor(7.0), torch.zeros(0, 3), [torch.ones(2, dtype=torch.bool)]),
    {"large": torch.zeros(ALONE_BYTES, dtype=torch.uint8), "array": np.arange(3)},
    {"complex": torch.tensor([1 + 2j, 3 - 1j]), "nothing": None},
    [torch.zeros(ALONE_BYTES // 8 - 1, dtype=torch.int64) for _ in range(9)],  # more than fits
]


@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_batches_come_out_of_a_worker_as_they_went_in(start: str) -> None:
    pipe = tp.from_dataset(BATCHES).sharding_filter(2, split="stride")  # type: ignore[arg-type]
    found = list(tp.Loader(pipe, num_workers=2, multiprocessing_context=start))
    assert [digest(item) for item in found] == [digest(item) for item in BATCHES]
    assert found[1]["half"].dtype == torch.bfloat16
    found[1]["ids"].add_(1).resize_(20)  # memory of its own


def test_memory_is_not_filled_again_before_it_is_read() -> None:
    memory = WorkerMemory(1, 2)
    sent = []
    for number in range(6):
        batches = [(2 * number + n, pack([torch.full((4,), number)]), "") for n in range(2)]
        message = WorkerMessage(0, number, batches)
        memory.place(message)
        sent.append(pickle.loads(pickle.dumps(message)))
    shared = [isinstance(message.batches[0].values[0], tuple) for message in sent]
    assert shared == [True, True, True, True, False, False]
    received = [Received(memory, message) for message in sent]
    for number, one in enumerate(received):
        assert int(one.take(one.places[2 * number])[0][0]) == number
        assert memory.unpacked(0) == number  # its other batch is still there
        one.unpack_all()
        assert memory.unpacked(0) == number + 1
        assert int(one.take(one.places[2 * number + 1])[0][0]) == number


def test_messages_of_a_pass_that_was_left_free_no_memory_of_the_next_one() -> None:
    memory = WorkerMemory(1, 2)
    message = WorkerMessage(0, 0, [(0, pack([torch.ones(4)]), "")])
    memory.place(message)
    received = Received(memory, message)
    received.leave()
    received.unpack_all()
    assert memory.unpacked(0) == 0


def test_a_message_that_is_unpacked_before_an_earlier_one_does_not_free_the_earlier_ones_memory() -> (
    None
):
    memory = WorkerMemory(2, 2)
    for number in (1, 3, 2):
        memory.has_unpacked(1, number)
        assert memory.unpacked(1) == 0
    memory.has_unpacked(1, 0)
    assert [memory.unpacked(0), memory.unpacked(1)] == [0, 4]


MASK = torch.zeros(9 << 20, dtype=torch.uint8)
UNPACKED = worker_message._tensor


def late(*values: Any) -> Any:
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.003)
    return UNPACKED(*values)


def of_uneven_size(rows: list[int]) -> dict[str, Any]:
    """One message each of the first worker, and of the second large and small ones in turn."""
    (n,) = rows
    if n < 40:
        return {"n": n, "parts": [], "mask": MASK}
    count, size = (75, 25_600) if n % 4 == 2 else (4, 240_000)
    return {"n": n, "parts": [torch.full((size,), n, dtype=torch.int32) for _ in range(count)]}


@pytest.mark.usefixtures("no_processes_left")
def test_a_thread_that_is_late_finds_each_batch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """It unpacks large messages of a worker whose small ones were unpacked at once, after them."""
    monkeypatch.setattr(worker_message, "_tensor", late)
    pipe = tp.from_dataset(range(80)).sharding_filter(2).batch(1).collate(of_uneven_size)
    for number, batch in enumerate(tp.Loader(pipe, num_workers=2)):
        assert batch["n"] == number // 2 + 40 * (number % 2)
        assert all((part == batch["n"]).all() for part in batch["parts"])


@pytest.mark.usefixtures("no_processes_left")
def test_large_batches_of_passes_that_are_left_and_begun_again_are_those_of_a_serial_pass() -> None:
    rows = [torch.full((1 << 16,), n) for n in range(48)]  # 512 KiB each
    pipe = tp.from_dataset(rows).sharding_filter(4).shuffle(8).batch(2)
    start = tp.Loader(pipe).state_dict()
    wanted = [digest(batch) for batch in tp.Loader(pipe, threads=0)]
    loader = tp.Loader(pipe, num_workers=2, persistent_workers=True, prefetch_factor=1)
    for taken in (1, 3, 8, 24):
        loader.load_state_dict(start)
        found = [digest(batch) for batch in islice(loader, taken)]
        assert found == wanted[:taken]


def test_what_is_only_marked_as_conjugate_or_negative_is_sent_as_it_reads() -> None:
    memory, marked = WorkerMemory(1, 2), torch.tensor([1 + 2j, 3 - 1j]).conj()
    message = WorkerMessage(0, 0, [(0, pack([marked, marked.imag]), "")])
    memory.place(message)
    found, negative = Received(memory, message).take(0)
    assert found.tolist() == marked.tolist()
    assert negative.tolist() == marked.imag.tolist()


MADE = multiprocessing.get_context("fork").RawArray("q", 2)


def heavy_or_light(row: dict[str, Any]) -> dict[str, Any]:
    """3 MiB of small tensors for every other row, next to nothing for the others."""
    heavy = row["x"] % 2 == 0
    MADE[row["x"] % 2] += 1
    size = ALONE_BYTES * 3 // 4 if heavy else 1
    return {"x": row["x"], "parts": [torch.full((size,), n, dtype=torch.uint8) for n in range(4)]}


@pytest.mark.usefixtures("no_processes_left")
def test_a_worker_of_small_batches_waits_for_one_of_large_ones() -> None:
    MADE[0] = MADE[1] = 0
    rows = 240
    pipe = tp.from_arrow(pa.table({"x": list(range(rows))})).sharding_filter(2, split="stride")
    ahead = []
    for number, item in enumerate(tp.Loader(pipe.map(heavy_or_light), num_workers=2)):
        assert item["x"] == number
        assert [int(part[0]) for part in item["parts"]] == [0, 1, 2, 3]
        ahead.append((MADE[0] - number // 2, MADE[1] - number // 2))
    assert list(MADE) == [rows // 2, rows // 2]
    heavy, light = (max(counts) for counts in zip(*ahead, strict=True))
    assert (
        heavy <= 8 + 2 * 5
    )  # 2 batches in a message, where there could be 8; the worker makes a few ahead
    assert light <= 8 * 5  # of 120: prefetch_factor messages and some that have arrived


def test_a_message_has_at_most_8_mib_of_several_batches() -> None:
    batch = pack([torch.zeros(ALONE_BYTES - 8, dtype=torch.uint8) for _ in range(3)])
    huge = pack(torch.zeros(2 * MOST_BYTES, dtype=torch.uint8))
    assert 3 * ALONE_BYTES - 24 <= batch.size <= 3 * ALONE_BYTES + 1000
    assert huge.size >= 2 * MOST_BYTES
    message = WorkerMessage(0)
    assert message.has_room(huge)
    message.items += [(0, batch, ""), (1, batch, "")]
    assert not message.has_room(batch)
    assert message.has_room(pack("small"))


class Locked:
    """Can't be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("a lock is held")


@pytest.mark.usefixtures("no_processes_left")
def test_a_batch_that_cannot_be_pickled_is_named_when_it_is_due() -> None:
    def lock_one(row: dict[str, Any]) -> Any:
        return {"x": row["x"], "lock": Locked() if row["x"] == 5 else None}

    rows = tp.from_arrow(pa.table({"x": list(range(12))})).sharding_filter(4, split="stride")
    batches = iter(tp.Loader(rows.map(lock_one, version="1"), num_workers=2))
    assert [row["x"] for row in islice(batches, 5)] == [0, 1, 2, 3, 4]
    with pytest.raises(tp.DataError, match=r"must pickle .*a lock is held.*use threads"):
        next(batches)


@pytest.mark.usefixtures("no_processes_left")
def test_an_exception_whose_class_cannot_be_sent_arrives() -> None:
    class Local(Exception):
        pass

    def fail(row: dict[str, Any]) -> Any:
        raise Local("of a class within a function")

    rows = tp.from_arrow(pa.table({"x": [1, 2, 3]})).sharding_filter(1).map(fail, version="1")
    with pytest.raises(RuntimeError, match="of a class within a function"):
        next(iter(tp.Loader(rows, num_workers=1, timeout=30)))


def pipeline(rows: int = 600) -> tp.Pipeline:
    table = pa.table({"input_ids": [[n] * (n % 50) for n in range(rows)]})
    return tp.from_arrow(table).sharding_filter(12).shuffle(200, seed=1).batch(4).pad_collate()


@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize(
    "options", [{"prefetch_factor": None}, {"persistent_workers": True, "prefetch_factor": 1}]
)
def test_workers_that_end_at_different_steps_and_passes_that_are_broken_off(
    options: dict[str, Any],
) -> None:
    whole = tp.Loader(pipeline().filter(lambda b: int(b["input_ids"].sum()) % 3 > 0, version="1"))
    expected = [[digest(batch) for batch in whole] for _ in range(3)]
    pipe = pipeline().filter(lambda b: int(b["input_ids"].sum()) % 3 > 0, version="1")
    loader = tp.Loader(pipe, num_workers=3, **options)
    for epoch in range(3):
        batches = iter(loader)
        for n in range(40 if epoch == 1 else len(expected[epoch])):
            assert digest(next(batches)) == expected[epoch][n]
        del batches


@pytest.mark.usefixtures("no_processes_left")
def test_persistent_workers_go_on_while_an_iterator_that_has_ended_is_kept() -> None:
    def process(row: dict[str, Any]) -> dict[str, Any]:
        return {"process": os.getpid()}

    rows = tp.from_arrow(pa.table({"x": list(range(40))})).sharding_filter(4)
    loader = tp.Loader(rows.map(process, version="1"), num_workers=2, persistent_workers=True)
    kept = [iter(loader), iter(loader)]
    first, second = ({row["process"] for row in batches} for batches in kept)
    assert len(first) == 2
    assert first == second


@pytest.mark.usefixtures("no_processes_left")
def test_passes_that_are_left_keep_no_large_tensors_in_their_worker() -> None:
    class Large:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, n: int) -> torch.Tensor:
            return torch.full((300_000,), float(n))

    loader = tp.Loader(
        tp.from_dataset(Large()).batch(2).collate(), num_workers=1, persistent_workers=True, epoch=0
    )
    before, held = set(psutil.Process().children()), []
    for _ in range(30):
        assert next(iter(loader))[:, 0].tolist() == [0, 1]
        (worker,) = set(psutil.Process().children()) - before
        held.append(worker.num_fds())  # one for each tensor that waits
    assert max(held) < held[0] + 30


def test_nothing_is_left_in_shared_memory() -> None:
    place = Path("/dev/shm")
    before = set(os.listdir(place)) if place.exists() else set()
    batches = iter(tp.Loader(pipeline(), num_workers=2))
    for _ in range(20):
        next(batches)
    del batches
    after = set(os.listdir(place)) if place.exists() else set()
    assert not {name for name in after - before if "torch" in name}
