"""Trainings that are killed and resumed, on as many ranks and on others, beside one that is left alone.

A framework has an *adapter*: a function that trains as a ``Start`` says, in a process for each rank, and
tells it each batch. What holds for all of them is checked by ``check_resumes`` and ``check_global_batches``.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from frameworks.ranks import Ranks
from trainpipes.testing import digest

__all__ = [
    "ROWS", "Notes", "Start", "Train", "between", "check_global_batches", "check_resumes", "finish", "flat",
    "growing", "in_order", "kill_at_hold", "number", "pipeline", "plain", "rank", "texts", "weights_of",
]  # fmt: skip

#: Rows of most trainings: 24 batches of 4.
ROWS = 96

#: For each rank: by (epoch, step) the digests of the batches that were trained on in it.
Notes = list[dict[tuple[int, int], list[str]]]


def texts(rows: int = ROWS) -> list[dict[str, Any]]:
    return [{"text": f"row {i} " + "ab" * (i % 5), "row": i} for i in range(rows)]


def is_kept(row: dict[str, Any]) -> bool:
    return int(row["row"]) % 5 > 0


def pipeline(kind: str, batch_size: int = 4) -> tp.Pipeline:
    """Batches of a kind: "counted", or some of the words "filtered", "packed" and "repeated"; or "rows
    repeated", before they are batched."""
    rows = tp.from_dataset(texts()).sharding_filter(num_shards=4).shuffle(buffer_size=40, seed=3)
    if "filtered" in kind:
        rows = rows.filter(is_kept)
    rows = rows.tokenize("bytes", max_length=24, labels="text")
    if "rows repeated" in kind:
        return rows.repeat().batch(batch_size).pad_collate()
    batches = rows.pack(40).batch(2) if "packed" in kind else rows.batch(batch_size)
    return batches.pad_collate().repeat() if "repeated" in kind else batches.pad_collate()


def growing(folder: Path, day: int) -> tp.Pipeline:
    """A folder that gets another file, of 5 batches, and its files."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(texts(40)[20 * day :][:20]), folder / f"{day}.parquet")
    rows = tp.list_files(str(folder / "*.parquet"), refresh="epoch").read_parquet()
    rows = rows.sharding_filter(num_shards=4).shuffle(buffer_size=40, seed=3)
    return rows.tokenize("bytes", max_length=24, labels="text").batch(4).pad_collate()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@dataclass(frozen=True)
class Start:
    """One start of a training.

    Args:
        folder: of what its ranks note.
        saved: of the checkpoints, which several starts share.
        kind: what it is trained on.
        resume: the checkpoint to go on from: its step, its name, or True for the last one.
        every: steps from one checkpoint to the next; 0 for none.
        hold: the step at which all ranks stand still, to be killed.
        options: of the adapter.
    """

    folder: Path
    saved: Path
    kind: Any = "counted"
    resume: Any = None
    every: int = 0
    hold: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def begin(self) -> Start:
        """Make the files of this rank."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"steps-{rank():02}.txt").touch()
        return self

    def trained_on(self, epoch: int, step: int, batch: Any) -> None:
        """Note a batch: it is there after a kill, too.

        Args:
            epoch: from 0, as the framework counts.
            step: the optimizer step that it is part of, from 0 over all epochs.
            batch: with ``input_ids``, those of a preference, or rows with an answer.
        """
        if step == self.hold:
            (self.folder / f"held-{rank()}").touch()
            time.sleep(1000)
        ids = content(batch)
        text = bytes(int(i) for i in ids.flatten().tolist() if 0 <= i < 256)
        rows = re.findall(r"row (\d+) ", text.decode("latin1"))
        with (self.folder / f"steps-{rank():02}.txt").open("a") as file:
            file.write(f"{epoch} {step} {digest(ids)} {','.join(rows)}\n")

    def checkpoint(self, name: str = "step-{}") -> Path | None:
        """The one to go on from, in a folder where they are called so."""
        if self.resume in (None, False):
            return None
        if self.resume is True:
            return max(self.saved.glob(name.format("*")), key=number)
        pattern = name if isinstance(self.resume, int) else "{}" + Path(name).suffix
        return self.saved / pattern.format(self.resume)

    def step(self) -> int:
        """Steps that were trained before."""
        return 0 if self.resume in (None, False) else number(self.checkpoint())

    # What was noted

    def lines(self) -> list[list[list[str]]]:
        """What each rank noted: epoch, step, digest and rows of each batch."""
        paths = sorted(self.folder.glob("steps-*.txt"))
        return [[line.split(" ") for line in path.read_text().split("\n")[:-1]] for path in paths]

    def notes(self) -> Notes:
        ranks: Notes = []
        for lines in self.lines():
            ranks.append({})
            for epoch, step, found, _ in lines:
                ranks[-1].setdefault((int(epoch), int(step)), []).append(found)
        return ranks

    def outcome(self) -> Any:
        """What the adapter returned on all ranks."""
        first, *others = [
            json.loads(path.read_text()) for path in sorted(self.folder.glob("returned-*"))
        ]
        assert all(other == first for other in others), (
            f"{self.folder.name}: ranks came to the same"
        )
        return first


Train = Callable[[Start], Any]


def content(batch: Any) -> Any:
    if isinstance(batch, list):
        import torch

        return torch.tensor([row["answer"] for row in batch])
    return batch["input_ids"] if "input_ids" in batch else batch["chosen_input_ids"]


def number(path: Path | str) -> int:
    return int(re.findall(r"\d+", Path(path).name)[-1])


def weights_of(model: Any) -> dict[str, float]:
    """The sum of each parameter."""
    named = model.state_dict().items()
    return {name.removeprefix("module."): float(value.double().sum()) for name, value in named}


# Processes


def _each(train: Train, starts: Sequence[Start]) -> None:
    for start in starts:
        returned = train(start.begin())
        (start.folder / f"returned-{rank():02}").write_text(json.dumps(returned))


def finish(train: Train, ranks: int, *starts: Start) -> None:
    """Train on so many ranks, one start after the other."""
    Ranks(_each, ranks, starts[-1].folder / "ranks", train, starts).wait()


def kill_at_hold(train: Train, ranks: int, *starts: Start) -> None:
    """The same, and SIGKILL all ranks once they stand still in the last start."""
    running = Ranks(_each, ranks, starts[-1].folder / "ranks", train, starts)
    running.kill_when(lambda: len(list(starts[-1].folder.glob("held-*"))) == ranks)


# Order


def flat(notes: Notes) -> Notes:
    """With one epoch."""
    return [{(0, step): found for (_, step), found in of.items()} for of in notes]


def between(notes: Notes, first: int, end: int | None = None) -> Notes:
    return [
        {at: found for at, found in of.items() if first <= at[1] and (end is None or at[1] < end)}
        for of in notes
    ]


def in_order(notes: Notes, epoch: int, first: int = 0) -> list[str]:
    """The digests of an epoch in the order of m: ranks take turns, from one on."""
    of_each = [
        [one for (of, _), found in sorted(rank.items()) if of == epoch for one in found]
        for rank in [*notes[first:], *notes[:first]]
    ]
    return [found for turn in zip(*of_each, strict=True) for found in turn]


def plain(pipe: tp.Pipeline, epochs: int = 3, most: int = 400) -> list[list[str]]:
    """The digests of each epoch, as the pipeline itself gives its batches."""
    found: list[list[str]] = []
    while len(found) < epochs and (not found or len(found[-1]) < most):
        found.append([digest(content(batch)) for batch in islice(pipe, most)])
    return found


def check_order(
    notes: Notes, expected: list[list[str]], place: tuple[int, int], ends: bool, counted: bool
) -> None:
    """What ranks trained on are the batches of each epoch from a place on: of epochs that end, all but what
    is no whole step of all ranks."""
    most = 0 if len(notes) == 1 else 1 if counted else 7
    epochs = sorted({epoch for epoch, _ in notes[0]})
    assert epochs
    for epoch in epochs:
        taken = place[1] if epoch == place[0] else 0
        found = in_order(notes, epoch, taken % len(notes))
        assert found == expected[epoch][taken:][: len(found)], f"epoch {epoch} from batch {taken}"
        if ends or epoch < epochs[-1]:
            assert len(expected[epoch]) - taken - len(found) <= most


def place_of(notes: Notes, step: int) -> tuple[int, int]:
    """Epoch, and batches of all ranks that were trained on in it, before a step."""
    epoch = min((e for e, s in notes[0] if s >= step), default=0)
    before = [found for (e, s), found in notes[0].items() if e == epoch and s < step]
    return epoch, sum(map(len, before)) * len(notes)


# What holds for every framework


def check_resumes(
    train: Train,
    folder: Path,
    kind: Any = "counted",
    *,
    ranks: int = 2,
    every: int,
    holds: Sequence[int],
    at: Sequence[int | str] = (),
    moved: Sequence[int | str] = (),
    back: Sequence[int] = (),
    expected: list[list[str]] | None = None,
    ends: bool = False,
    **options: Any,
) -> dict[str, Start]:
    """Check that a training that is killed goes on with the batches that would have come.

    Args:
        train: the adapter.
        folder: an empty one.
        kind: what it is trained on.
        ranks: how many.
        every: steps from one checkpoint to the next.
        holds: steps in which it is killed, one after the other.
        at: more checkpoints from which it goes on, on as many ranks.
        moved: checkpoints from which it goes on on one rank.
        back: checkpoints of a run on one rank, from which it goes on on all.
        expected: the batches of each epoch; one epoch for adapters that tell none. Those of the run that was
            left alone, if left out.
        ends: whether a run ends with an epoch.
        options: of the adapter.

    Returns:
        All starts by their names: "whole", "part-0" and so on, "at-6", "alone", "moved-6", "back-6".
    """
    starts: dict[str, Start] = {}

    def start(name: str, saved: str = "saved", **more: Any) -> Start:
        starts[name] = Start(folder / name, folder / saved, kind, options=options, **more)
        return starts[name]

    whole = start("whole", every=1 if at or moved else 0)
    parts = [
        start(f"part-{n}", "killed", resume=n > 0, every=every, hold=hold)
        for n, hold in enumerate([*holds, None])
    ]
    for n, part in enumerate(parts[:-1]):
        kill_at_hold(train, ranks, *([whole] if n == 0 else []), part)
    if moved or back:
        alone = start("alone", "saved alone", every=1)
        finish(train, 1, alone, *(start(f"moved-{name}", resume=name) for name in moved))
    others = [start(f"at-{name}", resume=name) for name in at]
    backs = [start(f"back-{name}", "saved alone", resume=name) for name in back]
    finish(train, ranks, parts[-1], *others, *backs)

    notes, outcome = whole.notes(), whole.outcome()
    kept: Counter[str] = Counter()
    for part, (first, end) in zip(parts, pairwise([0, *holds, None]), strict=True):
        first = first // every * every
        assert part.notes() == between(notes, first, end), part.folder.name
        lasting = None if end is None else end // every * every
        kept.update(_rows(part, first, lasting))
    assert kept == Counter(_rows(whole, 0, None)), (
        "each row as often as in the run that was left alone"
    )
    if kind == "counted":
        assert len(kept) == ROWS
        assert len(set(kept.values())) == 1, "each row as often as all others"
    assert parts[-1].outcome() == outcome
    for other in others:
        assert other.notes() == between(notes, number(str(other.resume))), other.folder.name
        assert other.outcome() == outcome
    if (moved or back) and expected is None:
        expected = [in_order(notes, 0)]
    from_start = [(whole, (0, 0))] + ([(alone, (0, 0))] if moved or back else [])
    later = [(starts[f"moved-{name}"], place_of(notes, number(str(name)))) for name in moved]
    later += [(one, place_of(alone.notes(), one.resume)) for one in backs]
    for one, place in (*from_start, *later) if expected else ():
        check_order(one.notes(), expected, place, ends, kind == "counted")
    return starts


def _rows(start: Start, first: int, end: int | None) -> list[str]:
    """The rows of what a start trained on from a step to another, by its texts."""
    return [
        row
        for lines in start.lines()
        for _, step, _, rows in lines
        if first <= int(step) and (end is None or int(step) < end)
        for row in filter(None, rows.split(","))
    ]


def check_global_batches(
    train: Train, folder: Path, kinds: Sequence[str], batches: int = 4
) -> None:
    """Check that a run on 4, then 2 ranks, then one takes the steps of one on one."""

    def start(name: str, kind: str, stop: int, resume: int | None) -> Start:
        options = {"global_batches": batches, "steps": stop}
        saved = folder / f"{kind} {name.split('-')[0]}"
        return Start(folder / f"{kind} {name}", saved, kind, resume, stop, None, options)

    stops = (0, 3, 7, 16)  # an epoch's end, and places within later ones
    last = [start("alone", kind, stops[-1], None) for kind in kinds]
    parts = [
        [start(f"moved-{world}", kind, stop, first or None) for kind in kinds]
        for world, (first, stop) in zip((4, 2, 1), pairwise(stops), strict=True)
    ]
    for world, of_kinds in zip((4, 2, 1), parts, strict=True):
        finish(train, world, *of_kinds, *(last if world == 1 else ()))
    for place, alone in enumerate(last):
        (steps,) = flat(alone.notes())
        assert sorted(steps) == [(0, step) for step in range(stops[-1])]
        for world, of_kinds, (first, stop) in zip((4, 2, 1), parts, pairwise(stops), strict=True):
            ranks = flat(of_kinds[place].notes())
            for step in range(first, stop):
                each = [of[0, step] for of in ranks]
                assert [len(found) for found in each] == [batches // world] * world
                assert sorted(chain.from_iterable(each)) == sorted(steps[0, step]), (
                    f"step {step} on {world}"
                )
        same = of_kinds[place].outcome()["weights"]
        if isinstance(same, dict):  # by name: of a model without dropout
            assert same == pytest.approx(alone.outcome()["weights"], rel=1e-5)
