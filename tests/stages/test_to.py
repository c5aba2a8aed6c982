"""to: batches are copied ahead of use, and the state is that of what was given."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, _utils
from torchdata.nodes import Loader as NodeLoader

import trainpipes as tp
from trainpipes._internal.messages import _warned
from trainpipes.nodes import Batch, Collate, FromTensors, ShardingFilter, Shuffle, node_of
from trainpipes.stages.device import To

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def batches(rows: int = 40, shards: int = 4) -> tp.Pipeline:
    table = tp.from_tensors(x=torch.arange(rows)).sharding_filter(shards).shuffle(7, seed=1)
    return table.batch(2).collate()


class Noted(To):
    """Notes when copies begin and when batches are given."""

    notes: ClassVar[list[tuple[str, int]]] = []

    def begun(self, item: Any) -> Any:
        number = int(item["x"].sum())
        self.notes.append(("begun", number))
        ready = super().begun(item)

        def given() -> Any:
            self.notes.append(("given", number))
            return ready()

        return given


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_as_a_node_it_copies_as_far_ahead_and_its_state_is_that_of_what_was_given(
    depth: int,
) -> None:
    expected = [int(batch["x"].sum()) for batch in batches()]

    def chain() -> Any:
        rows = FromTensors(tensors=(torch.arange(40),), names=("x",))
        dealt = Shuffle(ShardingFilter(rows, 4), 7, seed=1)
        return NodeLoader(node_of(Noted)(Collate(Batch(dealt, 2)), "cpu", depth=depth))

    Noted.notes = []
    loader = chain()
    found, state = [], None
    for number, batch in enumerate(loader):
        found.append(int(batch["x"].sum()))
        if number == 5:
            begun = sum(what == "begun" for what, _ in Noted.notes)
            assert begun == 6 + depth
            state = json.loads(json.dumps(loader.state_dict()))
    assert found == expected
    assert state is not None
    again = chain()
    again.load_state_dict(state)
    assert [int(batch["x"].sum()) for batch in again] == expected[6:]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_copies_begin_so_many_batches_ahead(depth: int) -> None:
    Noted.notes = []
    expected = [int(batch["x"].sum()) for batch in batches()]
    found = [int(batch["x"].sum()) for batch in batches().then(Noted(device="cpu", depth=depth))]
    assert found == expected
    begun = [n for what, n in Noted.notes if what == "begun"]
    given = [n for what, n in Noted.notes if what == "given"]
    assert begun == given == expected
    ahead, most = 0, []
    for what, _ in Noted.notes:
        ahead += 1 if what == "begun" else -1
        most.append(ahead)
    assert max(most) == depth + 1
    middle = [n for n, (what, _) in zip(most, Noted.notes, strict=True) if what == "given"][
        depth : -depth - 1
    ]
    assert set(middle) == {depth}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_state_is_of_what_was_given(depth: int, workers: int) -> None:
    def make() -> tp.Loader:
        return tp.Loader(batches().to("cpu", depth=depth), num_workers=workers)

    plain = [batch["x"].tolist() for batch in batches()]
    states = []
    loader = make()
    for k, batch in enumerate(loader):
        assert batch["x"].tolist() == plain[k]
        states.append(json.loads(json.dumps(loader.state_dict())))
    for k in (0, 1, 7, len(plain) - 2):
        resumed = make()
        resumed.load_state_dict(states[k])
        assert [batch["x"].tolist() for batch in resumed] == plain[k + 1 :]
        untouched = tp.Loader(batches())
        iterator = iter(untouched)
        list(islice(iterator, k + 1))
        assert states[k] == json.loads(json.dumps(untouched.state_dict()))


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_break_the_state_is_that_of_the_last_batch(workers: int) -> None:
    loader = tp.Loader(batches().to("cpu", depth=3), num_workers=workers)
    plain = [batch["x"].tolist() for batch in batches()]
    for k, _ in enumerate(loader):
        if k == 4:
            break
    resumed = tp.Loader(batches().to("cpu"))
    resumed.load_state_dict(loader.state_dict())
    assert [batch["x"].tolist() for batch in resumed] == plain[5:]


def test_an_error_comes_where_it_would_have_come() -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] == 13:
            raise ValueError("no")
        return row

    pipe = tp.from_tensors(x=torch.arange(20)).map(fails).batch(2).collate().to("cpu", depth=4)
    iterator = iter(pipe)
    assert [batch["x"].tolist() for batch in islice(iterator, 6)] == [
        [2 * k, 2 * k + 1] for k in range(6)
    ]
    state = iterator.state_dict()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            next(iterator)
    assert iterator.state_dict() == state


def test_tensors_are_moved_wherever_they_are_nested() -> None:
    pipe = tp.from_dataset([{"a": [torch.zeros(2), 5], "b": "text"}] * 3).to("meta")
    first = next(iter(pipe))
    assert first["a"][0].device.type == "meta"
    assert (first["a"][1], first["b"]) == (5, "text")


def test_workers_of_a_plain_loader_pass_it_over_with_one_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _warned.clear()
    pipe = batches().to("meta")
    info = _utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=pipe)
    with monkeypatch.context() as patched:  # in a worker, its warnings would be its own
        patched.setattr(_utils.worker, "_worker_info", info)
        iterator = iter(pipe)
        with pytest.warns(UserWarning, match=r"to\('meta'\) runs in the process that trains"):
            first = next(iterator)
    assert first["x"].device.type == "cpu"
    loader: DataLoader[Any] = DataLoader(batches().to("meta"), batch_size=None, num_workers=0)
    assert next(iter(loader))["x"].device.type == "meta"


def test_nodes_place_batches_too() -> None:
    from torchdata.nodes import Loader as NodeLoader

    from trainpipes.nodes import Batch, Collate, FromTensors

    node = node_of(To)(Collate(Batch(FromTensors(tensors=(torch.arange(4),)), 2)), "meta")
    assert all(batch[0].device.type == "meta" for batch in NodeLoader(node))


def test_pin_and_to_without_an_accelerator_say_so(recwarn: pytest.WarningsRecorder) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    _warned.clear()
    for _ in range(2):
        list(batches().pin().to("cpu"))
    notices = [str(w.message) for w in recwarn if "pin()" in str(w.message)]
    assert notices == ["pin() does nothing here: there is no accelerator to copy to"]
    with pytest.raises(tp.ConfigError, match=r"there is no device 'cuda' here; .*leave to\(\) out"):
        next(iter(batches().to("cuda")))


def test_it_is_no_part_of_a_state() -> None:
    state = batches().state_dict()
    pipe = batches().to("cpu", depth=1)
    pipe.load_state_dict(state or {})
    assert pipe.state_dict() == state


@needs_gpu
def test_what_is_computed_on_a_device_waits_for_its_copy() -> None:
    rows = torch.arange(64 * 512 * 1024, dtype=torch.float32).reshape(64, 512 * 1024)
    pipe = tp.from_tensors(x=rows).batch(4).collate().pin().to("cuda", depth=3)
    busy = torch.ones(2048, 2048, device="cuda")
    sums = []
    for batch in pipe:
        for _ in range(20):
            busy = busy @ busy / 2048
        sums.append(batch["x"].double().sum())
        del batch
    found = torch.stack(sums).cpu().numpy()
    assert np.array_equal(found, rows.double().reshape(16, -1).sum(dim=1).numpy())


@needs_gpu
def test_copies_run_beside_the_work_on_earlier_batches() -> None:
    rows = torch.zeros(24, 16 << 20)
    busy = torch.ones(4096, 4096, device="cuda")

    def seconds(depth: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        loader = iter(tp.from_tensors(x=rows).batch(2).collate().pin().to("cuda", depth=depth))
        next(loader)
        torch.cuda.synchronize()
        start.record()
        for batch in loader:
            for _ in range(8):
                torch.mm(busy, busy)
            batch["x"].sum().item()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    seconds(2)
    assert min(seconds(2) for _ in range(3)) < min(seconds(0) for _ in range(3)) * 1.05


@needs_gpu
def test_pinned_memory_and_batches_on_their_way_are_bounded_on_a_device_that_lags() -> None:
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("this torch does not count pinned memory")
    rows, depth = torch.zeros(256, 1 << 20), 2
    busy = torch.ones(4096, 4096, device="cuda")
    pipe = tp.from_tensors(x=rows).batch(2).collate().pin().to("cuda", depth=depth)
    size = 2 * rows[0].nbytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    pinned, used = 0, torch.cuda.memory_allocated()
    for batch in pipe:
        for _ in range(20):
            torch.mm(busy, busy)
        batch["x"].sum()
        pinned = max(pinned, torch.cuda.host_memory_stats()["active_bytes.current"])
    assert pinned <= (2 * depth + 3) * size
    # Work of its own: a product, and the sum.
    assert torch.cuda.max_memory_allocated() - used <= (2 * depth + 3) * size + 3 * busy.nbytes


@needs_gpu
def test_what_is_on_the_device_already_stays_there_and_pin_leaves_it_alone() -> None:
    there = torch.arange(4, device="cuda")
    batch = next(iter(tp.from_dataset([{"a": there, "b": torch.arange(4)}]).pin().to("cuda")))
    assert batch["a"] is there
    assert batch["b"].is_cuda
    assert batch["b"].tolist() == [0, 1, 2, 3]


@needs_gpu
def test_a_stream_of_the_users_waits_for_the_copies_too() -> None:
    rows = torch.arange(64 * 512 * 1024, dtype=torch.float32).reshape(64, 512 * 1024)
    pipe = tp.from_tensors(x=rows).batch(4).collate().pin().to("cuda", depth=3)
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        sums = [batch["x"].double().sum() for batch in pipe]
    own.synchronize()
    found = torch.stack(sums).cpu()
    assert torch.equal(found, rows.double().reshape(16, -1).sum(dim=1))


@needs_gpu
def test_a_device_beyond_those_that_there_are_is_one_sentence() -> None:
    with pytest.raises(
        tp.ConfigError, match=r"there is no device 'cuda:99' here; .*leave to\(\) out"
    ):
        next(iter(batches().to("cuda:99")))
