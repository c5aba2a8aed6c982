"""What workers of a ``Loader`` send comes out as it went in."""

from __future__ import annotations

import errno
import gc
import os
import resource
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import ref

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from trainpipes.engine.processes import channel
from trainpipes.testing import digest

BATCHES: list[Any] = [
    {"ids": torch.arange(12).view(3, 4), "text": ["a", "b", "c"], "n": 5},
    {"ids": torch.arange(8).view(4, 2).t(), "half": torch.arange(3).to(torch.bfloat16)},
    (torch.tensor(7.0), torch.zeros(0, 3), [torch.ones(2, dtype=torch.bool)]),
    {"large": torch.zeros(1 << 20, dtype=torch.uint8), "array": np.arange(3)},
    {"complex": torch.tensor([1 + 2j, 3 - 1j]), "nothing": None},
    [torch.tensor([1 + 2j, 3 - 1j]).conj(), torch.tensor([1 + 2j, 3 - 1j]).conj().imag],
    {"table": pa.table({"x": range(9)}).slice(2, 3)},
    {"grad": torch.ones(3, requires_grad=True), "parameter": torch.nn.Parameter(torch.ones(2))},
    [torch.zeros((1 << 17) - 1, dtype=torch.int64) for _ in range(9)],  # more than fits
]


def batch_number(number: int) -> Any:
    return BATCHES[number]


@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_batches_come_out_of_a_worker_as_they_went_in(start: str) -> None:
    rows = tp.from_dataset(range(len(BATCHES))).sharding_filter(2, split="stride")
    pipe = rows.map(batch_number)
    found = list(tp.Loader(pipe, num_workers=2, multiprocessing_context=start))
    assert [digest(item) for item in found] == [digest(item) for item in BATCHES]
    assert found[1]["half"].dtype == torch.bfloat16
    found[1]["ids"].add_(1)  # memory of its own


@pytest.mark.usefixtures("no_processes_left")
def test_large_batches_of_passes_that_are_left_and_begun_again_are_those_of_a_serial_pass() -> None:
    rows = [torch.full((1 << 16,), n) for n in range(48)]  # 512 KiB each
    pipe = tp.from_dataset(rows).sharding_filter(4).shuffle(8).map(torch.neg).batch(2)
    start = tp.Loader(pipe).state_dict()
    wanted = [digest(batch) for batch in tp.Loader(pipe, threads=0)]
    loader = tp.Loader(pipe, num_workers=2, persistent_workers=True, prefetch_factor=1)
    for taken in (1, 3, 8, 24):
        loader.load_state_dict(start)
        found = [digest(batch) for batch in islice(loader, taken)]
        assert found == wanted[:taken]


class Locked:
    """Can't be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("a lock is held")


@pytest.mark.usefixtures("no_processes_left")
def test_a_batch_that_cannot_be_pickled_is_named_when_it_is_due() -> None:
    def lock_one(row: dict[str, Any]) -> Any:
        return {"x": row["x"], "lock": Locked() if row["x"] == 5 else None}

    rows = tp.from_arrow(pa.table({"x": list(range(12))})).sharding_filter(4, split="stride")
    loader = tp.Loader(rows.map(lock_one, version="1"), num_workers=2)
    found: list[int] = []
    said = r"must pickle .*a dict does not .*a lock is held.*use num_workers=0"
    with pytest.raises(tp.DataError, match=said):
        found += (row["x"] for row in loader)
    assert found == [0, 1, 2, 3, 4][: len(found)]


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
        for n in range(len(expected[epoch]) if epoch == 2 else 40):
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
    assert len(first | second) <= 2
    assert os.getpid() not in first | second


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
    pipe = pipeline().map(dict)
    batches = iter(tp.Loader(pipe, num_workers=2))
    for _ in range(20):
        next(batches)
    del batches
    after = set(os.listdir(place)) if place.exists() else set()
    assert not {name for name in after - before if "torch" in name}


def large(batch: list[int]) -> dict[str, torch.Tensor]:
    return {"x": torch.full((1 << 18,), batch[0], dtype=torch.int32), "n": torch.tensor(batch)}


@pytest.mark.usefixtures("no_processes_left")
def test_large_batches_are_mapped_and_belong_to_whoever_gets_them() -> None:
    own, before = psutil.Process(), psutil.Process().num_fds()
    loader = tp.Loader(tp.from_dataset(range(80)).batch(2).collate(large), num_workers=2)
    most = 0
    for number, batch in enumerate(loader):
        assert (batch["x"] == 2 * number).all()
        batch["x"].add_(1)
        assert batch["x"].data_ptr() % 64 == 0
        most = max(most, own.num_fds() - before)
    del batch, loader
    gc.collect()
    assert most < 30
    assert not channel._maps


@pytest.mark.usefixtures("no_processes_left")
def test_many_large_batches_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MOST_MAPPED", 5)
    pipe = tp.from_dataset(range(40)).batch(2).collate(large)
    kept = list(tp.Loader(pipe, num_workers=2))
    assert [digest(batch) for batch in kept] == [digest(batch) for batch in pipe]
    assert len(channel._maps) <= 5


def files_made(batch: list[int]) -> dict[str, torch.Tensor]:
    """The numbers of this process's files in memory that are open, beside a large batch."""
    names = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return {
        **large(batch),
        "files": torch.tensor(sum("memfd:trainpipes-batches" in n for n in names)),
    }


@pytest.mark.usefixtures("no_processes_left")
def test_the_memory_of_batches_that_are_gone_is_used_again() -> None:
    pipe = tp.from_dataset(range(400)).batch(2).collate(files_made)
    loader = tp.Loader(pipe, num_workers=2, persistent_workers=True)
    most = [max(int(batch["files"]) for batch in loader) for _ in range(3)]
    assert 0 < max(most) < 40  # of 200 batches


def bytes_of_files(batch: list[int]) -> dict[str, torch.Tensor]:
    """What this process's files in memory take, beside a batch, of which the first is larger."""
    files = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    sizes = [file.stat().st_size for file in files if "trainpipes-batches" in os.readlink(file)]
    large = torch.zeros((1 << 18) * (64 if batch[0] == 0 else 1), dtype=torch.int64)
    return {"x": large, "bytes": torch.tensor(sum(sizes))}


@pytest.mark.usefixtures("no_processes_left")
def test_a_worker_keeps_no_memory_of_a_batch_that_was_larger_than_others() -> None:
    pipe = tp.from_dataset(range(240)).batch(1).collate(bytes_of_files)
    taken = [int(batch["bytes"]) for batch in tp.Loader(pipe, num_workers=1)]
    assert max(taken) > 2**26 > taken[-1]


@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("stage", ["collate", "pad_collate"])
def test_workers_collate_what_their_functions_make(stage: str) -> None:
    rows = tp.from_dataset(range(40)).map(lambda n: {"x": np.full(1 << 17, n)}, version="1")
    pipe = getattr(rows.batch(2), stage)()
    mapped = []
    for number, batch in enumerate(tp.Loader(pipe, num_workers=2)):
        assert batch["x"][:, 0].tolist() == [2 * number, 2 * number + 1]
        mapped.append(len(channel._maps))
    assert min(mapped) > 0


@pytest.mark.usefixtures("no_processes_left")
def test_what_is_kept_of_a_batch_stays_as_it_came_while_others_come() -> None:
    pipe = tp.from_dataset(range(240)).sharding_filter(3).batch(2).collate(large)
    kept: list[tuple[int, Any]] = []
    for batch in tp.Loader(pipe, num_workers=2):
        first = int(batch["n"][0])
        if first % 10 == 0:
            kept += [(first, batch["x"][7:99]), (first, batch["x"].numpy()[::1000])]
        elif first % 40 == 4:
            del kept[1]
    assert len(kept) > 9
    assert all((part == first).all() for first, part in kept)


@pytest.mark.usefixtures("no_processes_left")
def test_a_fork_still_reads_the_batch_that_it_got() -> None:
    batches = iter(tp.Loader(tp.from_dataset(range(80)).batch(2).collate(large), num_workers=1))
    numbers = next(batches)["x"].numpy()
    reads, begins = os.pipe()
    if not (child := os.fork()):
        os.close(begins)
        os.read(reads, 1)  # until all others have come
        os._exit(int(numbers.any()))
    os.close(reads)
    del numbers
    try:
        assert sum(bool((batch["x"] == batch["n"][0]).all()) for batch in batches) == 39
    finally:
        os.close(begins)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("how", ["Loader", "map"])
def test_of_an_epoch_that_is_over_no_batch_is_held(how: str) -> None:
    def stacked(batch: list[Any]) -> torch.Tensor:
        return torch.stack(batch)

    rows = tp.from_dataset([torch.full((64,), n) for n in range(400)]).sharding_filter()
    pipe = rows.batch(2).map(stacked, version="1", num_workers=2 * (how == "map"))
    loader = tp.Loader(pipe, num_workers=2 * (how == "Loader"), persistent_workers=how == "Loader")
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            held = [ref(batch) for batch in loader]
            assert len(held) == 200
            assert sum(batch() is not None for batch in held) <= 1
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("error", [AttributeError, OSError(errno.ENOSPC, "no memory")])
def test_without_files_in_memory_batches_come_by_the_socket(
    error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=error))
    gc.collect()  # what other tests have left
    pipe = tp.from_dataset(range(40)).batch(2).collate(large)
    loader = tp.Loader(pipe, num_workers=2, multiprocessing_context="fork")
    for number, batch in enumerate(loader):
        assert (batch["x"] == 2 * number).all()
        assert not channel._maps


@pytest.mark.own_process
def test_an_answer_for_which_no_file_can_be_opened_is_refused_with_the_cause() -> None:
    loader = tp.Loader(
        tp.from_dataset(range(40)).batch(2).collate(large), num_workers=1,
        prefetch_factor=1, multiprocessing_context="fork",
    )  # fmt: skip
    batches = iter(loader)
    next(batches)
    free = os.dup(0)
    os.close(free)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, most))
    said = r"an answer cannot be taken \(OSError: .*Too many open files\).*open files \(ulimit -a\)"
    with pytest.raises(tp.WorkerError, match=said):
        list(batches)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    loader.load_state_dict(loader.state_dict())
    assert 0 < len(list(loader)) < 20
