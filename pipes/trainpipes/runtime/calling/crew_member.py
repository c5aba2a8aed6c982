"""What a worker process of ``map`` does: call a function for the rows that it is sent, in order."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from trainpipes.errors import DataError, WorkerError
from trainpipes.runtime.calling.passage import Parts, packed, receive, send, unpacked
from trainpipes.runtime.calling.row_call import RowCall

__all__ = ["READY", "UNFIT", "serve"]

#: Numbers of messages that are no answers: ready to begin; what keeps it from that.
READY, UNFIT = -1, -2
#: Seconds that a function may go on when nobody waits for what it returns.
GRACE = 0.5


def serve(
    parent: socket.socket,
    call: RowCall | bytes,
    member: int,
    progress: Any,
    inherited: list[socket.socket],
) -> None:
    """Answer orders until the other side is gone.

    Args:
        parent: where orders come from and answers go.
        call: the function; pickled, unless this process is a fork.
        member: number of this worker.
        progress: shared memory: for each worker the number of the order and of the row at hand.
        inherited: the parent's own ends of its connections, if this process is a fork.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    for theirs in inherited:
        theirs.close()
    # Copies of one process would else draw the same.
    random.seed()
    np.random.seed()
    torch.seed()
    torch.set_num_threads(1)
    if isinstance(call, bytes):
        try:
            call = pickle.loads(call)
        except Exception as error:
            send(parent, UNFIT, packed(f"{type(error).__name__}: {error}"))
            return
    assert isinstance(call, RowCall)
    orders: SimpleQueue[tuple[int, Parts] | None] = SimpleQueue()
    threading.Thread(target=_take_in, args=(parent, orders), daemon=True).start()
    try:
        send(parent, READY, packed(None))
        while (order := orders.get()) is not None:
            number, parts = order
            send(parent, number, _answer(call, parts, number, member, progress))
    except ConnectionError:  # the parent is gone
        pass
    _end()


def _take_in(parent: socket.socket, orders: SimpleQueue[tuple[int, Parts] | None]) -> None:
    """Read ahead, so that whoever sends never waits long; end with the parent."""
    while (order := receive(parent)) is not None:
        orders.put(order)
    orders.put(None)
    time.sleep(GRACE)
    _end()


def _end() -> None:
    """End without what an interpreter does at its end: nothing here is worth it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)


def _answer(call: RowCall, parts: Parts, number: int, member: int, progress: Any) -> Parts:
    """What the function returns for the rows of an order, and what it raised."""
    row = 2 * member + 1
    progress[row] = 0
    progress[row - 1] = number

    def note(item: int) -> None:
        progress[row] = item

    items, words = unpacked(parts)
    results, error = call.each(items, words, note)
    if error is not None:
        error = _portable(error, call.said)
    try:
        return packed((results, error))
    except Exception as problem:
        odd = next((n for n, result in enumerate(results) if not _travels(result)), 0)
        refused = DataError(
            f"{call.said}: what the function returns must pickle to come back from a worker process, and "
            f'a {type(results[odd]).__name__} does not ({problem}); use method="thread", or return arrays, '
            "tensors and plain values"
        )
        return packed((results[:odd], refused))


def _travels(value: Any) -> bool:
    try:
        packed(value)
    except Exception:
        return False
    return True


def _portable(error: BaseException, said: str) -> BaseException:
    """An error with its traceback as a note; another one in its place if it does not pickle."""
    trace = error.__traceback__
    while (
        trace is not None and trace.tb_frame.f_code.co_filename == RowCall.each.__code__.co_filename
    ):
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    note = f"in worker process {os.getpid()}:\n{lines}"
    try:
        error.add_note(note)
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = WorkerError(
            f"{said}: the function raised {type(error).__qualname__}, which does not pickle: {error}"
        )
        error.add_note(note)
    error.__traceback__ = None
    return error
