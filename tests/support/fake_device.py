"""A device that exists on paper: what a process asks of its streams and events, noted in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["FakeDevice"]


class Stream:
    def __init__(self, owner: FakeDevice, name: str) -> None:
        self.owner, self.name = owner, name

    def wait_event(self, event: Event) -> None:
        self.owner.notes.append((self.name, "waits for", event.number))


class Event:
    """Of work that ends when somebody waits for it, or for what was queued after it on its stream."""

    def __init__(self, owner: FakeDevice, **options: bool) -> None:
        self.owner, self.options = owner, options

    def record(self, stream: Stream) -> None:
        self.owner.events += 1
        self.number, self.stream = self.owner.events, stream.name
        self.owner.unended.append(self)
        self.owner.notes.append((stream.name, "records", self.number))

    def synchronize(self) -> None:
        self.owner.notes.append(("process", "waits for", self.number))
        same = [one for one in self.owner.unended if one.stream == self.stream]
        for one in same:
            if one.number <= self.number:
                self.owner.unended.remove(one)


class FakeDevice:
    """Has what ``torch.cuda`` has and ``to`` uses.

    Attributes:
        notes: (who, what, which event or batch), in order.
        unended: events of work that the device has not ended.
        devices, current: how many devices there are, and which is the current one.
    """

    def __init__(self, devices: int = 1, current: int = 0) -> None:
        self.notes: list[tuple[str, str, int]] = []
        self.events = 0
        self.unended: list[Event] = []
        self.devices, self.current = devices, current
        self.used = Stream(self, "main")
        self.asked: list[torch.device] = []

    def is_available(self) -> bool:
        return self.devices > 0

    def device_count(self) -> int:
        return self.devices

    def current_device(self) -> int:
        return self.current

    def current_stream(self, device: torch.device) -> Stream:
        assert device in self.asked
        return self.used

    def Stream(self, device: torch.device) -> Stream:
        self.asked.append(device)
        return Stream(self, "side")

    def Event(self, **options: bool) -> Event:
        return Event(self, **options)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.used = self.used, stream
        try:
            yield
        finally:
            self.used = before

    def copies_on_their_way(self) -> int:
        return sum(one.stream == "side" for one in self.unended)


class Batch:
    """A batch that notes when it is copied, and by which stream it is used."""

    def __init__(self, number: int, device: FakeDevice, place: Any = "cpu") -> None:
        self.number, self.fake, self.device = number, device, place

    def to(self, device: torch.device, non_blocking: bool) -> Batch:
        self.fake.notes.append((self.fake.used.name, "copies", self.number))
        assert non_blocking
        return Batch(self.number, self.fake, device)

    def record_stream(self, stream: Stream) -> None:
        self.fake.notes.append((stream.name, "uses", self.number))
