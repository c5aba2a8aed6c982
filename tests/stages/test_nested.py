"""pin, to: tensors are found wherever they are nested, and nothing else changes."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import trainpipes as tp
from trainpipes.stages.device import map_tensors, recorded


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
    if name == "dict":
        assert (moved["n"], moved["t"], moved["none"], [*moved]) == (1, "text", None, [*batch])
    if name == "deque":
        assert moved.maxlen == 3
    if name == "default":
        assert moved["new"] == []
    if name == "all":
        assert moved["c"] == (1, 2)
        assert moved["a"][0].note == "a pair"


@pytest.mark.parametrize("name", NESTS)
def test_what_is_there_already_stays_the_very_same(name: str) -> None:
    batch = NESTS[name]()
    if name != "own to":
        assert (
            map_tensors(batch, lambda one: one if isinstance(one, torch.Tensor) else None) is batch
        )


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
    from trainpipes._internal.messages import _warned

    _warned.clear()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    with pytest.warns(UserWarning, match="MPS shares the CPU's memory"):
        assert (
            next(iter(tp.from_tensors(x=torch.arange(2)).batch(2).collate().pin()))["x"].sum() == 1
        )


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
