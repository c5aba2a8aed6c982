"""to: batches are copied ahead of use, and the state is that of what was given."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, _utils
from torchdata.nodes import Loader as NodeLoader

import trainpipes as tp
from fake_device import Batch as FakeBatch
from fake_device import FakeDevice
from trainpipes.nodes import Batch, Collate, FromTensors, ShardingFilter, Shuffle, node_of
from trainpipes.stages.device import To, can, map_tensors, recorded

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

pytestmark = pytest.mark.usefixtures("nothing_warned_of")


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
def test_as_a_node_it_copies_ahead_and_its_state_is_that_of_what_was_given(depth: int) -> None:
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
    for what in ("begun", "given"):
        assert [n for which, n in Noted.notes if which == what] == expected
    ahead = np.cumsum([1 if what == "begun" else -1 for what, _ in Noted.notes])
    assert max(ahead) == depth + 1
    after = [n for n, (what, _) in zip(ahead, Noted.notes, strict=True) if what == "given"]
    assert set(after[depth : -depth - 1]) == {depth}


@pytest.mark.parametrize(("depth", "workers"), [(4, 0), (4, 2)])
def test_a_state_is_of_what_was_given(depth: int, workers: int) -> None:
    def make() -> tp.Loader:
        return tp.Loader(batches().to("cpu", depth=depth), num_workers=workers)

    plain = [batch["x"].tolist() for batch in batches()]
    states = []
    loader = make()
    for k, batch in enumerate(loader):
        assert batch["x"].tolist() == plain[k]
        states.append(json.loads(json.dumps(loader.state_dict())))
    for k in (0, 7, len(plain) - 2):
        resumed = make()
        resumed.load_state_dict(states[k])
        assert [batch["x"].tolist() for batch in resumed] == plain[k + 1 :]
        untouched = tp.Loader(batches())  # it is no part of a state
        list(islice(untouched, k + 1))
        assert states[k] == json.loads(json.dumps(untouched.state_dict()))


def test_an_error_comes_where_it_would_have_come() -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] == 13:
            raise ValueError("no")
        return row

    pipe = tp.from_tensors(x=torch.arange(20)).map(fails).batch(2).collate().to("cpu", depth=4)
    iterator = iter(pipe)
    before = [batch["x"].tolist() for batch in islice(iterator, 6)]
    assert before == [[2 * k, 2 * k + 1] for k in range(6)]
    state = iterator.state_dict()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            next(iterator)
    assert iterator.state_dict() == state


class Once(list[int]):
    """Moves at the second try."""

    tries = 0

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        self.tries += 1
        if self.tries == 1:
            raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_that_could_not_be_placed_is_given_next(depth: int) -> None:
    def pipe() -> tp.Pipeline:
        return tp.from_dataset(range(4)).batch(2).map(Once).to("cpu", depth=depth)

    moved, found = iter(pipe()), []
    for _ in range(4):
        state = moved.state_dict()
        try:
            found.append(next(moved))
        except KeyboardInterrupt:
            assert moved.state_dict() == state
    assert found == [[0, 1], [2, 3]]


def test_workers_of_a_plain_loader_pass_it_over_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = batches().to("meta")
    info = _utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=pipe)
    with monkeypatch.context() as patched:  # in a worker, its warnings would be its own
        patched.setattr(_utils.worker, "_worker_info", info)
        iterator = iter(pipe)
        with pytest.warns(UserWarning, match=r"to\('meta'\) runs in the process that trains"):
            first = next(iterator)
    assert first["x"].device.type == "cpu"
    loader: DataLoader[Any] = DataLoader(batches().to("meta"), batch_size=None, num_workers=0)
    for given in (loader, tp.Loader(pipe), tp.Loader(pipe, num_workers=1)):
        assert next(iter(given))["x"].device.type == "meta"


def test_pin_and_to_without_an_accelerator_say_so(recwarn: pytest.WarningsRecorder) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    for _ in range(2):
        list(batches().pin().to("cpu"))
    notices = [str(w.message) for w in recwarn if "pin()" in str(w.message)]
    assert notices == ["pin() does nothing here: there is no accelerator to copy to"]
    with pytest.raises(tp.ConfigError, match=r"there is no device 'cuda' here; .*leave to\(\) out"):
        next(iter(batches().to("cuda")))


@needs_gpu
@pytest.mark.parametrize("own", [False, True])
def test_what_is_computed_on_a_device_waits_for_its_copy(own: bool) -> None:
    rows = torch.arange(64 * 512 * 1024, dtype=torch.float32).reshape(64, 512 * 1024)
    pipe = tp.from_tensors(x=rows).batch(4).collate().pin().to("cuda", depth=3)
    busy = torch.ones(2048, 2048, device="cuda")
    stream = torch.cuda.Stream() if own else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    sums = []
    with torch.cuda.stream(stream):
        for batch in pipe:
            for _ in range(20):
                busy = busy @ busy / 2048
            sums.append(batch["x"].double().sum())
            del batch
    stream.synchronize()
    assert torch.equal(torch.stack(sums).cpu(), rows.double().reshape(16, -1).sum(dim=1))


@needs_gpu
def test_pinned_memory_and_batches_on_their_way_are_bounded_on_a_device_that_lags() -> None:
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("this torch does not count pinned memory")
    rows, depth = torch.zeros(256, 1 << 20), 2
    busy = torch.ones(4096, 4096, device="cuda")
    pipe = tp.from_tensors(x=rows).batch(4).collate().pin().to("cuda", depth=depth)
    size = 4 * rows[0].nbytes  # of no other test, whose free memory it would use
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, used = torch.cuda.host_memory_stats(), torch.cuda.memory_allocated()
    for batch in pipe:
        for _ in range(20):
            torch.mm(busy, busy)
        batch["x"].sum()
    # Pinned memory that became free is used again, and never given back.
    name = "allocated_bytes.current"
    pinned = torch.cuda.host_memory_stats()[name] - before.get(name, 0)
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


class Pair(NamedTuple):
    x: Any
    note: str = "a pair"


class Named(dict[str, Any]):
    title = "none"


class Texts(UserDict[str, Any]):
    """As a BatchEncoding is: a mapping that is no dict, with a ``to``."""

    def to(self, device: Any, non_blocking: bool = False) -> Texts:
        return Texts({key: value.to(device) for key, value in self.items()})


@dataclasses.dataclass(frozen=True)
class Example:
    x: Any
    size: int = 2
    later: Any = dataclasses.field(init=False)


def example(x: Any) -> Example:
    found = Example(x)
    object.__setattr__(found, "later", [x])
    return found


def x() -> torch.Tensor:
    return torch.ones(2, 3)


NESTS: dict[str, Any] = {
    "tensor": x,
    "dict": lambda: {"x": x(), "n": 1, "t": "text", "none": None},
    "list": lambda: [x(), [x(), b"bytes"]],
    "tuple": lambda: (x(), (x(), 1.5)),
    "named tuple": lambda: Pair(x()),
    "struct": lambda: torch.max(x(), 1),
    "deque": lambda: deque([x(), 1], maxlen=3),
    "user list": lambda: UserList([x(), 1]),
    "ordered": lambda: OrderedDict(b=x(), a=x()),
    "default": lambda: defaultdict(list, x=x()),
    "dict of its own class": lambda: Named(x=x()),
    "user dict": lambda: UserDict(x=x()),
    "read only": lambda: MappingProxyType({"x": x()}),
    "dataclass": lambda: example(x()),
    "own to": lambda: Texts(x=x()),
    "packed": lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "all": lambda: {"a": [Pair((x(), {"b": example(x())}))], "c": torch.Size([1, 2])},
}  # fmt: skip


def devices(batch: Any) -> set[str]:
    if isinstance(batch, torch.nn.utils.rnn.PackedSequence):
        return {batch.data.device.type}
    return {one.device.type for one in recorded(batch)}


@pytest.mark.parametrize("name", NESTS)
def test_tensors_are_moved_and_all_else_stays(name: str) -> None:
    batch = NESTS[name]()
    moved = next(iter(tp.from_dataset([batch]).to("meta")))
    assert type(moved) is type(batch)
    assert devices(moved) == {"meta"}
    assert devices(batch) == {"cpu"}
    if name != "own to":  # what is there already stays the very same
        there = map_tensors(batch, lambda one: one if isinstance(one, torch.Tensor) else None)
        assert there is batch
    if name == "dict":
        assert (moved["n"], moved["t"], moved["none"], [*moved]) == (1, "text", None, [*batch])
    if name == "deque":
        assert moved.maxlen == 3
    if name == "default":
        assert moved["new"] == []
    if name == "all":
        assert moved["c"] == (1, 2)
        assert moved["a"][0].note == "a pair"


@pytest.mark.parametrize(
    "item",
    [
        None,
        5,
        "text",
        b"bytes",
        {1, 2},
        range(3),
        torch.float32,
        dict,
        Example,
        torch.device("cpu"),
    ],
)
def test_what_has_no_tensors_is_passed_on(item: Any) -> None:
    assert next(iter(tp.from_dataset([[item]]).to("meta")))[0] is item


@pytest.mark.filterwarnings("ignore:pin.. does nothing here:UserWarning")
@pytest.mark.parametrize("name", NESTS)
def test_pin_calls_each_dense_tensor_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu"
        assert tensor.layout in (torch.strided, torch.jagged)
        pinned.append(id(tensor))
        return tensor.clone()

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = NESTS[name]()
    found = next(iter(tp.from_dataset([[batch, torch.eye(2).to_sparse(), x().to("meta")]]).pin()))
    assert type(found[0]) is type(batch)
    expected = {id(one) for one in recorded(batch) if one.device.type == "cpu"}
    if name != "packed":  # it pins its own
        assert expected <= set(pinned)
        assert not expected & {id(one) for one in recorded(found[0])}


def test_pin_leaves_mps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    pipe = tp.from_tensors(x=torch.arange(2)).batch(2).collate().pin()
    with pytest.warns(UserWarning, match="MPS shares the CPU's memory"):
        assert next(iter(pipe))["x"].sum() == 1


class Plain:
    """Copies itself as Lightning and Accelerate ask for it."""

    def __init__(self, place: Any = "cpu") -> None:
        self.place = place

    def to(self, device: torch.device) -> Plain:
        return Plain(device)


def test_a_method_that_takes_a_device_alone_will_do() -> None:
    [[moved]] = tp.from_dataset([[Plain()]]).to("meta")
    assert moved.place == torch.device("meta")


def test_a_device_without_streams_is_waited_for() -> None:
    """On MPS a copy that is not waited for may read memory that was given back."""

    class Noted:
        def __init__(self) -> None:
            self.asked: list[bool] = []

        def to(self, device: Any, non_blocking: bool) -> Noted:
            self.asked.append(non_blocking)
            return self

    batch = Noted()
    list(tp.from_dataset([batch]).to("meta", non_blocking=True))
    assert batch.asked == [False]


def test_loaders_pin_before_they_copy() -> None:
    pipe = tp.from_tensors(x=torch.arange(8)).batch(2).collate()
    shown = repr(tp.Loader(pipe.to("meta"), pin_memory=True).pipeline)
    assert shown.index("pin()") < shown.index("to(")
    assert repr(tp.Loader(pipe, pin_memory=True).pipeline).rstrip(" )\n").endswith("pin(")
    once = tp.Loader(pipe.pin().to("meta"), pin_memory=True).pipeline
    assert repr(once).count("pin()") == 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    found = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: found)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return found


def noted(fake: FakeDevice, count: int = 12) -> tp.Pipeline:
    return tp.from_dataset([FakeBatch(number, fake) for number in range(count)])


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_a_batch_is_copied_on_the_side_and_used_after_its_copy(
    fake: FakeDevice, depth: int
) -> None:
    given = list(noted(fake).to("cuda", depth=depth))
    assert [batch.number for batch in given] == list(range(12))
    assert {str(batch.device) for batch in given} == {"cuda:0"}
    place = {note: n for n, note in enumerate(fake.notes)}
    for number in range(12):
        copies = place["side", "copies", number]
        end = fake.notes[copies + 1]
        assert end[:2] == ("side", "records")
        waits = place["main", "waits for", end[2]]
        assert copies < waits < place["main", "uses", number]


class Held:
    """Copies what it holds, but for lengths, as those of packed sequences stay on the CPU."""

    __slots__ = ("held", "lengths", "owner")

    def __init__(self, held: Any) -> None:
        self.held, self.lengths, self.owner = held, torch.ones(2), self

    def to(self, device: torch.device, non_blocking: bool) -> Held:
        def moved(value: Any) -> Any:
            return value.to(device, non_blocking=non_blocking) if can(value, "to") else None

        return Held(map_tensors(self.held, moved))


def test_all_that_is_on_the_device_is_noted_as_used_and_nothing_else(fake: FakeDevice) -> None:
    batches = [[FakeBatch(0, fake), Held(Example(Held([FakeBatch(1, fake)])))]]
    list(tp.from_dataset(batches).to("cuda"))
    assert [number for who, what, number in fake.notes if what == "uses"] == [0, 1]


@pytest.mark.filterwarnings("ignore:Sparse")  # they are new
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_is_noted_as_used_by_its_dense_parts(layout: str) -> None:
    square = torch.eye(2)
    block = {"blocksize": (1, 1)} if layout[0] == "b" else {}
    sparse = square.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **block)
    parts = list(recorded([sparse]))
    assert len(parts) == (2 if layout == "coo" else 3)
    assert all(part.layout == torch.strided for part in parts)
    assert parts[-1].sum() == 2


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_no_more_batches_are_on_their_way_than_it_says(fake: FakeDevice, depth: int) -> None:
    """The device never ends anything by itself, and the process queues work and asks for the next batch."""
    most = 0
    for _ in noted(fake, 40).to("cuda", depth=depth):
        most = max(most, fake.copies_on_their_way())
    assert depth < most <= 2 * depth + 2


@pytest.mark.parametrize("depth", [0, 2])
def test_the_process_is_ahead_of_the_device_by_so_many(fake: FakeDevice, depth: int) -> None:
    """When batch k is given, it has waited for the work on batch k - depth - 2, and for none later."""
    waited = []
    for k, _ in enumerate(noted(fake, 20).to("cuda", depth=depth)):
        ends = [note for note in fake.notes if note[1] == "records" and note[0] == "main"]
        before = [note[2] for note in fake.notes if note[:2] == ("process", "waits for")]
        done = [n for n, note in enumerate(ends) if note[2] in before]
        waited.append((k, max(done, default=-1) + 1))
    steady = waited[depth + 2 : 20 - depth]
    assert {k - done for k, done in steady} == {depth + 1}


def test_a_process_that_waits_for_cuda_sleeps_and_xpu_is_not_asked_to(fake: FakeDevice) -> None:
    for device, options in (("cuda", {"blocking": True}), ("xpu", {})):
        list(noted(fake).to(device))
        assert all(event.options == options for event in fake.unended)
        assert fake.unended
        fake.unended.clear()


def test_a_copy_that_fails_is_tried_again_when_its_batch_is_due(fake: FakeDevice) -> None:
    tries: list[int] = []

    class Full(FakeBatch):
        def to(self, device: torch.device, non_blocking: bool) -> FakeBatch:
            tries.append(self.number)
            if self.number == 3 and tries.count(3) < 3:
                raise RuntimeError("out of memory")
            return super().to(device, non_blocking)

    iterator = iter(tp.from_dataset([Full(n, fake) for n in range(6)]).to("cuda", depth=2))
    assert [next(iterator).number for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="out of memory"):
        next(iterator)
    assert [batch.number for batch in iterator] == [3, 4, 5]
    assert fake.used.name == "main"


def test_without_a_number_it_is_the_current_device(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    fake.devices, fake.current = 8, 3
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert {str(batch.device) for batch in noted(fake).to("cuda")} == {"cuda:3"}
    assert {str(batch.device) for batch in noted(fake).to("cuda:5")} == {"cuda:5"}
    fake.devices, fake.current = 1, 0  # each rank sees one
    assert {str(batch.device) for batch in noted(fake).to("cuda")} == {"cuda:0"}
    assert not recwarn.list


def test_a_rank_on_anothers_device_is_told(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.devices = 8
    monkeypatch.setenv("LOCAL_RANK", "3")
    said = r"current device, cuda:0, and LOCAL_RANK is 3: call torch.cuda.set_device\(3\) before"
    with pytest.warns(UserWarning, match=said):
        assert {str(batch.device) for batch in noted(fake).to("cuda")} == {"cuda:0"}


def test_a_device_that_is_not_there_is_one_sentence(fake: FakeDevice) -> None:
    for devices, device in ((0, "cuda"), (2, "cuda:2"), (1, "xpu:9")):
        fake.devices = devices
        said = rf"there is no device '{device}' here; .*: leave to\(\) out"
        with pytest.raises(tp.ConfigError, match=said):
            next(iter(noted(fake).to(device)))
    assert not fake.notes


def devices_in(value: Any) -> set[str]:
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    values = value.values() if isinstance(value, dict) else value
    return {device for inner in values for device in devices_in(inner)}


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("meta_by_default")
@pytest.mark.parametrize("threads", [0, 2])
def test_batches_lie_on_the_cpu_whatever_the_default_device_is(threads: int) -> None:
    rows = [
        {"lists": [n, 1], "number": np.float32(n), "audio": np.ones(900, "f")} for n in range(8)
    ]
    numbers = {"input_ids": [[1, 2], [3]], "x": [0.5, 1.5]}
    for pipe in (
        tp.from_dataset(rows).select("lists", "number").batch(4).collate(),
        tp.from_dataset(rows).log_mel(column="audio").select("input_features").batch(4).collate(),
        tp.from_arrow(pa.table(numbers)).batch(2).pad_collate(),
        tp.from_arrow(pa.table(numbers)).select("x").batch(2).collate(dtype=torch.float32),
        tp.from_tensors(x=[1, 2, 3], y=np.arange(3)).shuffle(3).batch(2).collate(),
    ):
        loader = tp.Loader(pipe, threads=threads)
        assert {device for batch in loader for device in devices_in(batch)} == {"cpu"}
        tp.Loader(pipe).load_state_dict(loader.state_dict())


@pytest.mark.usefixtures("meta_by_default")
def test_workers_have_rows_of_a_list_whatever_the_default_device_is() -> None:
    loader = tp.Loader(
        tp.from_dataset([{"x": n} for n in range(2000)]).map(dict).batch(500), num_workers=1
    )
    assert [sum(row["x"] for row in batch) for batch in loader] == [124750, 374750, 624750, 874750]
