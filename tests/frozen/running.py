"""Runs a chain: once without a stop on one rank, then in legs, each of which goes on from the state of the
one before on a topology of its own. The legs must give what the run without a stop gives."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from frozen import adapter
from frozen.digests import digest

__all__ = ["Outcome", "run"]

#: Items of an epoch, and whether it ended.
Epoch = tuple[list[str], bool]


class Differs(AssertionError):
    """A resumed run gave other items than the run without a stop."""


@dataclass
class Outcome:
    """What became of a chain.

    Attributes:
        digest: 8 digits of the run without a stop, and 8 of the legs.
        kind: "runs", "refused" or "differs".
        said: for people: lengths, or the error.
        items: digests of the items of the whole run, by epochs.
        legs: the same for each rank of each leg.
    """

    digest: str
    kind: str
    said: str
    items: list[list[str]] = field(default_factory=list)
    legs: list[list[list[list[str]]]] = field(default_factory=list)
    accident: bool = False


@dataclass
class Read:
    """What one rank read in one leg."""

    epochs: list[Epoch]
    state: Any
    length: int | None
    error: str | None = None
    said: str = ""
    refusal: bool = True


def run(chain: Mapping[str, Any], number: int = 0) -> Outcome:
    """Run a chain, and take the digest of what it gives."""
    os.environ["FROZEN_CHAIN"] = f"{number}-{os.getpid()}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _run(adapter.code(chain), chain["run"])
        except Differs as error:
            return Outcome("0" * 16, "differs", str(error))


def _run(text: str, plan: Mapping[str, Any]) -> Outcome:
    over = plan["epochs"] + (plan["limit"] is None)  # legs may go on into one epoch more
    whole = _leg(text, plan, 1, 0, None, over, plan["limit"], apart=False)[0]
    if whole.error is not None:
        return _refused("alone", [whole])
    epochs = whole.epochs
    first = sha256(repr((whole.length, epochs)).encode()).hexdigest()[:8]
    made = sha256()
    outcome = Outcome("", "runs", "", [items for items, _ in epochs])
    position, states, before = (0, 0), None, 0
    positions: list[tuple[int, int]] = []  # of each rank, with a ragged tail
    ragged: list[Read] = []
    for place, (ranks, workers, until) in enumerate(plan["legs"]):
        last = place == len(plan["legs"]) - 1
        left, most = _amount(epochs, position, ranks, until, plan, last)
        if plan["ragged"] and ranks > 1 and not ragged:
            ragged = _leg(text, plan, ranks, 0, None, over, plan["limit"], apart=False)
            positions = [(0, 0)] * ranks
        given = None
        if states is not None:
            own = ranks == before and (plan["own_states"] or plan["ragged"])
            given = states if own else [_merged(states)] * ranks
        found = _leg(text, plan, ranks, workers, given, left, most, apart=plan["apart"])
        outcome.legs.append([[items for items, _ in read.epochs] for read in found])
        if any(read.error is not None for read in found):
            refused = _refused(f"leg {place}", found)
            refused.items, refused.legs = outcome.items, outcome.legs
            refused.digest = first + refused.digest[:8]
            return refused
        made.update(repr((place, [(read.length, read.epochs) for read in found])).encode())
        if ragged and ranks != len(ragged):
            pass  # each rank is compared with itself, and these are others
        elif ragged:
            positions = _follow_ragged(ragged, found, positions, place)
            position = min(positions)
        else:
            position = _follow(epochs, found, position, place, whole.length is not None, before)
        states, before = [read.state for read in found], ranks
    outcome.digest = first + made.hexdigest()[:8]
    lengths = "+".join(str(len(items)) + ("" if ended else "…") for items, ended in epochs)
    outcome.said = f"{lengths} items, len {whole.length}"
    return outcome


def _merged(states: Sequence[Any]) -> Any:
    return states[0] if len(states) == 1 else adapter.merge(states)


def _amount(
    epochs: Sequence[Epoch],
    position: tuple[int, int],
    ranks: int,
    until: Any,
    plan: Mapping[str, Any],
    last: bool,
) -> tuple[int, int | None]:
    """How many epochs' ends, and how many items each rank of a leg goes to at most."""
    epoch, m = position
    left = max(1, plan["epochs"] - epoch)
    if plan["limit"] is not None:  # without an end
        most = (plan["limit"] - m) // ranks
        return left, most if last else min(most, until if isinstance(until, int) else 5)
    if last:
        return left, None
    if until == "end":
        return 1, None
    if until == "last":
        rest = len(epochs[epoch][0]) - m if epoch < len(epochs) else 0
        return 1, max(1, rest // ranks)
    return left, until


def _follow(
    epochs: Sequence[Epoch],
    found: Sequence[Read],
    position: tuple[int, int],
    leg: int,
    counted: bool,
    before: int,
) -> tuple[int, int]:
    """Compare what all ranks of a leg gave with the run without a stop; where that stands then."""
    epoch, m = position
    ranks = len(found)
    for number in range(max(len(read.epochs) for read in found)):
        if any(len(read.epochs) <= number for read in found):
            raise Differs(f"leg {leg}: ranks are in different epochs")
        own = [read.epochs[number] for read in found]
        if len({(len(items), ended) for items, ended in own}) > 1:
            raise Differs(f"leg {leg}, epoch {epoch}: ranks gave {[len(i) for i, _ in own]} items")
        at = _place(epochs, own, (epoch, m), counted, before)
        if at is None:
            raise Differs(f"leg {leg}: not the items from item {m} of epoch {epoch} on")
        epoch, m = at
        m += len(own[0][0]) * ranks
        if own[0][1]:
            if epoch < len(epochs):
                left = len(epochs[epoch][0]) - m
                if left and (ranks == 1 or counted) and left >= ranks:
                    raise Differs(f"leg {leg}, epoch {epoch}: ended {left} items early")
            epoch, m = epoch + 1, 0
    return epoch, m


def _place(
    epochs: Sequence[Epoch],
    own: Sequence[Epoch],
    position: tuple[int, int],
    counted: bool,
    before: int,
) -> tuple[int, int] | None:
    """Where the items of all ranks stand in the run without a stop: there, or at the next epoch's start
    where less than a step was left, of these ranks or of those that saved."""
    epoch, m = position
    ranks, steps = len(own), len(own[0][0])
    rest = len(epochs[epoch][0]) - m if epoch < len(epochs) else 0
    places = [(epoch, m)]
    if m and counted and rest < max(ranks, before):
        places = [(epoch + 1, 0)]
    elif m and not counted:
        places.append((epoch + 1, 0))
    if epoch and not m and epoch <= len(epochs) and not epochs[epoch - 1][0]:
        places.append((epoch - 1, 0))  # an epoch without items may come again
    if not steps:
        empty = [place for place in places if place[0] < len(epochs) and not epochs[place[0]][0]]
        return (empty or places)[0]
    for at_epoch, at in places:
        if at_epoch >= len(epochs):
            return at_epoch, at  # beyond what the run without a stop was asked for
        want = epochs[at_epoch][0][at : at + steps * ranks]
        for turn in range(ranks):
            order = [(turn + k) % ranks for k in range(ranks)]
            if [own[r][0][step] for step in range(steps) for r in order] == want:
                return at_epoch, at
    return None


def _follow_ragged(
    whole: Sequence[Read], found: Sequence[Read], positions: Sequence[tuple[int, int]], leg: int
) -> list[tuple[int, int]]:
    """Compare each rank with itself: with a ragged tail some give an item more."""
    taken = []
    for rank, (read, own) in enumerate(zip(whole, found, strict=True)):
        epoch, first = positions[rank]
        for items, ended in own.epochs:
            if epoch < len(read.epochs):
                want, over = read.epochs[epoch]
                if over and first and first == len(want):
                    epoch, first = epoch + 1, 0
            if epoch < len(read.epochs):
                want = read.epochs[epoch][0]
                if want[first : first + len(items)] != items:
                    raise Differs(f"leg {leg}, rank {rank}: other items in epoch {epoch}")
                if ended and first + len(items) < len(want):
                    raise Differs(f"leg {leg}, rank {rank}: epoch {epoch} ended early")
            epoch, first = (epoch + 1, 0) if ended else (epoch, first + len(items))
        taken.append((epoch, first))
    return taken


def _refused(where: str, reads: Sequence[Read]) -> Outcome:
    errors = [(read.error, [items for items, _ in read.epochs]) for read in reads]
    made = sha256(repr((where, errors)).encode()).hexdigest()[:16]
    first = next(read for read in reads if read.error is not None)
    said = f"{where}: {first.error}: {first.said}"
    return Outcome(made, "refused", said, accident=not first.refusal)


def _leg(
    text: str,
    plan: Mapping[str, Any],
    ranks: int,
    workers: int,
    states: Sequence[Any] | None,
    epochs: int,
    most: int | None,
    *,
    apart: bool,
) -> list[Read]:
    """What each rank reads, up to so many epochs' ends or items, one rank after the other; ``apart`` each in
    a process of its own, told by the environment, at the same time."""
    given = [None if states is None else states[rank] for rank in range(ranks)]
    if apart and ranks > 1:
        return _apart(text, plan, ranks, workers, given, epochs, most)
    places = [(rank, ranks) for rank in range(ranks)]
    return [
        _read(text, plan, place, workers, state, epochs, most)
        for place, state in zip(places, given, strict=True)
    ]


def _read(
    text: str,
    plan: Mapping[str, Any],
    place: tuple[int, int] | None,
    workers: int,
    state: Any,
    epochs: int,
    most: int | None,
) -> Read:
    """What one rank reads."""
    found: list[Epoch] = []
    count, saved, length = 0, None, None
    items: list[str] = []
    try:
        reader = adapter.Reader(text, plan["reads"], place, workers, plan["threads"])
        length = reader.length()
        if state is not None:
            reader.load(state)
        while len(found) < epochs and (most is None or count < most):
            items = []
            reader.begin()
            while most is None or count < most:
                try:
                    items.append(digest(reader.next()))
                    count += 1
                except StopIteration:
                    found.append((items, True))
                    items = []
                    break
                if count > 3000:
                    raise RuntimeError("no end")
            else:
                found.append((items, False))
                items = []
        saved = reader.state()
        reader.close()
    except Exception as error:
        if items:
            found.append((items, False))
        name = adapter.error_name(error)
        return Read(found, None, length, name, str(error), adapter.is_refusal(error))
    return Read(found, saved, length)


def _apart(
    text: str,
    plan: Mapping[str, Any],
    ranks: int,
    workers: int,
    states: Sequence[Any],
    epochs: int,
    most: int | None,
) -> list[Read]:
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            ours, theirs = fork.Pipe(duplex=False)
            arguments = (text, plan, None, workers, states[rank], epochs, most)
            process = fork.Process(target=_on_rank, args=(theirs, folder, rank, ranks, arguments))
            process.start()
            theirs.close()
            started.append((process, ours))
        found = []
        for process, ours in started:
            try:
                found.append(ours.recv() if ours.poll(60) else None)
            except EOFError:
                found.append(None)
            if found[-1] is None:
                process.kill()
            process.join()
    lost = Read([], None, None, "Lost", "a rank gave no answer", False)
    return [lost if read is None else read for read in found]


def _on_rank(answer: Any, folder: str, rank: int, ranks: int, arguments: Any) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo")
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    answer.send(_read(*arguments))
    answer.close()
    try:
        dist.barrier()
        dist.destroy_process_group()
    finally:
        os._exit(0)
