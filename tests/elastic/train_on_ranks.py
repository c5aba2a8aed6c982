"""What each rank runs: several pipelines side by side, every batch logged, every step saved.

    python -m torch.distributed.run --nproc-per-node 2 train_on_ranks.py FOLDER LEG WORKERS ROUNDS [LEG]

A leg's folder has, of each rank: ``log-R.txt``, a line for each batch: pipeline, step, epoch, m,
digest; ``states-R.json``, for each pipeline its states after the last two steps; ``processes-R.json``,
the ids of its processes. After so many rounds of all pipelines, the ragged one is run to its end.
The last argument is the leg to resume.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainpipes as tp
from interleaved import PIPELINES, RAGGED, long_filtered
from launch import write_beside
from trainpipes.engine.iterating import lookahead
from trainpipes.engine.iterating.epoch_end import agreement_over
from trainpipes.testing import digest

ENDED: Any = object()


def resume_point(leg: Path, name: str) -> tuple[int, dict[str, Any] | None]:
    """The last step that all ranks of a leg have saved, and the state of all after it."""
    files = [json.loads(path.read_text()) for path in sorted(leg.glob("states-*.json"))]
    saved = [{int(step): state for step, state in found.get(name, {}).items()} for found in files]
    common = set.intersection(*(set(steps) for steps in saved)) if saved else set()
    if not common:
        return 0, None
    step = max(common)
    return step, tp.merge_states([steps[step] for steps in saved])


class Trained:
    """One pipeline on this rank."""

    def __init__(self, name: str, folder: Path, workers: int, previous: Path | None) -> None:
        self.name = name
        limit = 60 if workers else 0
        self.loader = tp.Loader(PIPELINES[name](folder), num_workers=workers, timeout=limit)
        self.step, state = resume_point(previous, name) if previous else (0, None)
        if state is not None:
            self.loader.load_state_dict(state)
        self.before = (state["epoch"], state["batches"]) if state else (0, 0)
        self.states = {} if state is None else {self.step: self.loader.state_dict()}
        self.batches: Iterator[Any] = iter(self.loader)
        self.over = False

    def next(self) -> tuple[int, int, str] | None:
        """The pass, number and digest of the next batch; None where nothing is left for this rank."""
        batch = next(self.batches, ENDED)
        if batch is ENDED and self.name != RAGGED:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        if batch is ENDED:
            self.over = True
            return None
        state = self.loader.state_dict()
        world, rank = dist.get_world_size(), dist.get_rank()
        # The number of a batch follows from the state after it; after a pass's last one, from before.
        epoch, m = (state["epoch"], state["batches"] - world) if state["batches"] else self.before
        self.before = state["epoch"], state["batches"]
        self.step += 1
        self.states = {step: s for step, s in self.states.items() if step == self.step - 1}
        self.states[self.step] = state
        return epoch, m + (rank - m) % world, digest(batch)


def main() -> None:
    folder, leg = map(Path, sys.argv[1:3])
    workers, rounds = map(int, sys.argv[3:5])
    previous = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    faulthandler.dump_traceback_later(100, exit=True)  # a hang fails, and says where
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.new_group([0])  # as for an evaluation: ranks are now in different numbers of groups
    trained = [Trained(name, folder, workers, previous) for name in PIPELINES]
    log = (leg / f"log-{rank}.txt").open("a", buffering=1)
    for number in count():
        for one in trained:
            if number >= rounds and one.name != RAGGED:
                continue
            found = None if one.over else one.next()
            if found is not None:
                log.write(f"{one.name} {one.step} {found[0]} {found[1]} {found[2]}\n")
                write_beside(leg / f"states-{rank}.json", {t.name: t.states for t in trained})
            ranks = torch.tensor([1, int(one.over)])
            dist.all_reduce(ranks)  # what gradients do
            assert int(ranks[0]) == world
        ids = [os.getpid(), *(child.pid for child in active_children())]
        write_beside(leg / f"processes-{rank}.json", ids)
        if number >= rounds and int(ranks[1]) == world:
            break
    write_beside(leg / f"agreements-{rank}.json", count_agreements(workers))
    dist.destroy_process_group()


def count_agreements(workers: int) -> dict[str, int]:
    """Steps of a whole filtered epoch with a collective in each, and how often ranks agreed."""
    counted = []

    def counting(*ranks: Any) -> Any:
        agree = agreement_over(*ranks)

        def counted_agree(number: int, total: bool) -> int:
            counted.append(number)
            return agree(number, total)

        return counted_agree

    steps = 0
    lookahead.agreement_over = counting
    for _ in tp.Loader(long_filtered(), num_workers=workers):
        steps += 1
        dist.all_reduce(torch.ones(1))
    return {"steps": steps, "agreements": len(counted)}


if __name__ == "__main__":
    main()
