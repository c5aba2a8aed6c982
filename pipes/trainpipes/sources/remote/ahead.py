"""Blocks of remote files that are fetched before they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

from trainpipes.engine.pool import Pool, Ticket, waits_for_server
from trainpipes.errors import UnreachableError

#: Threads of a process that wait for servers.
MAX_THREADS = 16
#: Row groups that one reader has opened ahead, and their bytes, about.
AHEAD_BLOCKS, AHEAD_BYTES = 8, 32 << 20
Opened = TypeVar("Opened")
_waiting: list[Pool] = []


def waiting() -> Pool:
    """The threads that wait for servers, shared by all readers of the process."""
    if not _waiting:
        _waiting.append(Pool(MAX_THREADS))
    return _waiting[0]


class Ahead(Generic[Opened]):
    """What is opened ahead, in the order in which it will be needed.

    Args:
        open_block: opens a row group and fetches it; called by several threads at once.
        size: bytes of a row group, about.
    """

    def __init__(self, open_block: Callable[[int], Opened], size: Callable[[int], float]) -> None:
        self._open = open_block
        self._size = size
        self._upcoming: deque[int] = deque()
        self._tickets: dict[int, Ticket] = {}

    def expect(self, blocks: Iterable[int]) -> None:
        """Say which row groups will be read next, in order; others are forgotten."""
        self._upcoming = deque(blocks)
        self._tickets = {}
        self._go_on()

    def _go_on(self) -> None:
        held = sum(self._size(block) for block in self._tickets)
        while self._upcoming and len(self._tickets) < AHEAD_BLOCKS:
            held += self._size(self._upcoming[0])
            if held > AHEAD_BYTES and self._tickets:
                return
            block = self._upcoming.popleft()
            self._tickets[block] = waiting().submit(partial(self._open, block))

    def take(self, block: int) -> Opened | None:
        """A row group that was opened ahead; None for one that was not expected, or that could not be
        reached then. Raises what opening it raised."""
        if block in self._upcoming:
            while self._upcoming.popleft() != block:
                pass
        ticket = self._tickets.pop(block, None)
        self._go_on()
        if ticket is None or (ticket.done and isinstance(ticket.error, UnreachableError)):
            return None  # the server may be there again
        try:
            with waits_for_server():
                opened: Opened = waiting().result(ticket)
        except FileNotFoundError:
            return None  # who reads it says so, and where
        return opened
