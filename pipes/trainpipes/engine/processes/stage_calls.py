"""What the worker processes of a ``Loader`` do: they put runs of rows through stages that call Python. All
else, such as reading, order, batches and the state, stays in the process that trains.

A task is a run and the numbers of some stages. What comes out depends on the rows alone, so that another
worker may do it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from trainpipes._internal import activity
from trainpipes._internal.activity import TURN, ActivitySampler, doing, switched
from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import cached_property
from trainpipes.columns.block import Block, Each, Pieces, naming_bad_values
from trainpipes.columns.run import Cursors, Run
from trainpipes.engine.calling import Answer, called, row_words
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import TrainpipesError
from trainpipes.interfaces.read_columns import blame
from trainpipes.interfaces.stage import Numbers, Stage
from trainpipes.interfaces.stage_kinds import stages_within
from trainpipes.interfaces.watched_calls import NO_ROW, Known, Place, current
from trainpipes.samplers.torch_samplers import seeds_of


class Group(NamedTuple):
    """Stages that stand one above the other, by their numbers in ``steps_of`` a plan.

    Where ``batch`` is among them, batches come in: the stages below it get their rows, those above it batches
    again. What these make travels once, and rows that functions made do not.
    """

    first: int
    stop: int
    batch: int | None
    #: Whether a later stage looks at the rows of finished batches.
    keeps_rows: bool


class SentRun(NamedTuple):
    """A run on its way. ``ends``: after each of its items, how many of the items that came in are used up;
    None where no process has worked on it.
    """

    data: Any
    ids: IntArray
    epoch: Each
    part: Each
    made_of: Pieces | None
    bounds: IntArray | None
    items: list[Any] | None
    ends: IntArray | None = None

    def run(self, cursors: Cursors | None = None) -> Run:
        """The run; its ``cursors`` are those of the run that was sent."""
        data = [None] * len(self.ids) if self.data is None else self.data
        block = Block(data, self.ids, epoch=self.epoch, part=self.part)
        block.made_of = self.made_of
        if self.ends is None:
            count = len(self.ids) if self.bounds is None else len(self.bounds) - 1
            cursors = Cursors.counting({}, np.arange(count + 1, dtype=np.int64))
        elif cursors is not None:
            cursors = cursors.pick(self.ends)
        assert cursors is not None
        return Run(block, cursors, self.bounds, self.items)


def sent(run: Run, keeps_rows: bool = True) -> SentRun:
    block, items = run.block, None if run.items is None else list(run.items)
    data = block.data if items is None or keeps_rows else None
    return SentRun(data, block.ids, block.epoch, block.part, block.made_of, run.bounds, items)


@dataclass(eq=False)
class StageCall:
    """Puts runs through stages, in worker processes. Of what the parent has, these get the stages, where the
    source stands and which types are known.

    Args:
        init: called with the number of each worker before all else.
    """

    plan: Plan
    stages: Sequence[Stage]
    workers: int
    init: Callable[[int], None] | None = None
    said: str = "Loader(num_workers)"
    _sent: Mapping[str, Any] = field(default_factory=dict)
    _counted: list[Numbers] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)
    _sampler: ActivitySampler | None = None
    #: What a thread is at that waits for a worker, which counts its own work.
    while_waiting = TURN
    shares: bool = False

    def __getstate__(self) -> dict[str, Any]:
        plan: Plan | None = self.plan
        about = self._sent  # of one that was sent: the server of Ray Client sends it on
        if plan is not None:
            about = {"source": plan.inputs.source, "schemas": plan.inputs.schemas.known()}
        state = {**vars(self), "plan": None, "_sent": about}
        for name in ("_steps", "_seeds"):
            state.pop(name, None)
        return state

    @cached_property
    def _steps(self) -> list[Any]:
        return steps_of(self.plan)

    @cached_property
    def _seeds(self) -> bytes:
        """Those of the stages and their samplers."""
        return json.dumps([seeds_of(stage) for stage in stages_within(self.stages)]).encode()

    # In a worker

    def begin(self, worker: int) -> None:
        self.open()
        datasets = [step.dataset for step in self._steps if hasattr(step, "dataset")]
        _tell_torch(worker, self.workers, next(iter(datasets), None))
        if self.init is None:
            return
        try:
            self.init(worker)
        except Exception as error:
            error.add_note(
                "raised in Loader(worker_init_fn); get_worker_info().dataset is that of from_dataset(), and "
                "None without one"
            )
            raise

    def open(self) -> None:
        """Make the stages ready that it was sent."""
        about = self._sent or self.__getstate__()["_sent"]  # forked
        plan = Plan.of([stage._fresh() for stage in self.stages], about["source"])
        plan.inputs.schemas.adopt(about["schemas"])
        self.plan, self._known = plan, set(about["schemas"])
        vars(self).pop("_steps", None)
        for tally in plan.tallies:
            tally.is_silent = True
        self._counted = [tally.numbers for tally in plan.tallies]

    def answer(self, items: tuple[Group, SentRun], words: Any) -> Answer:
        """``words``: whether a profile is taken."""
        self._sampler = switched(self._sampler, bool(words))
        group, run = items[0], items[1].run()
        batches = run
        if group.batch is not None:
            run = Run(
                run.block, Cursors.counting({}, np.arange(len(run.block) + 1, dtype=np.int64))
            )
        self._seed(run, group.first)
        try:
            for number in range(group.first, group.stop):
                stage = self._steps[number]
                if number == group.batch:
                    assert len(run) == len(batches.block), "the stages below batch() keep all rows"
                    run = Run(run.block, batches.cursors, batches.bounds)
                    continue
                stage._draw_watch.reports = False  # the parent does
                if len(run):
                    with doing(stage):
                        run = self._through(number, run)
            made = sent(run, group.keeps_rows)._replace(ends=run.cursors.rows)
            self.shares = made.items is not None and made.data is None  # batches, and no rows
            return [made], None
        except BaseException as error:
            return [], error

    def _seed(self, run: Run, stage: int) -> None:
        """Seed the global generators by the rows, so that which worker does a task changes nothing."""
        hashed = hashlib.sha256(self._seeds + stage.to_bytes(8, "little"))
        hashed.update(row_words(run.block).tobytes())
        seed = int.from_bytes(hashed.digest()[:8], "little")
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def _through(self, number: int, run: Run) -> Run:
        """A run as a stage makes it: of its halves, where workers died as the stage had all of it."""
        at_work, stage = current(), self._steps[number]
        if at_work is not None:
            known = at_work.begin(run.first_ids()[0], number, len(run), stage)
            if known is Known.HALVES:
                middle = len(run) // 2
                halves = [run.part(0, middle), run.part(middle, len(run))]
                made = [self._through(number, half) for half in halves]
                joined = Run.join([half for half in made if len(half)] or made[:1])
                ends = joined.cursors.rows.copy()
                if len(joined):  # items that were left out at the end are used up, too
                    ends[-1] = run.cursors.rows[-1]
                return Run(joined.block, Cursors.counting({}, ends), joined.bounds, joined.items)
        with naming_bad_values(run.block, stage):
            return called(stage, _function(stage), run)

    def noticed(self) -> Any:
        """What stages counted since the last answer, types that were found, and which of them draw."""
        plan = self.plan
        counted = [t.since(n) for t, n in zip(plan.tallies, self._counted, strict=True)]
        self._counted = [tally.numbers for tally in plan.tallies]
        known = plan.inputs.schemas.known()
        schemas = {key: known[key] for key in known.keys() - self._known}
        self._known = set(known)
        draws = [
            (number, watch.found)
            for number, stage in enumerate(self._steps)
            if (watch := vars(stage).get("_draw_watch")) is not None and watch.found
        ]
        profiled = None if self._sampler is None else self._sampler.take()
        return counted, schemas, draws, profiled

    # In the parent

    def hear(self, noticed: Any) -> None:
        counted, schemas, draws, profiled = noticed
        if profiled is not None:
            activity.from_workers.append(profiled)
        for tally, more in zip(self.plan.tallies, counted, strict=True):
            if any(more):
                tally.adopt(more)
        if schemas:
            self.plan.inputs.schemas.adopt(schemas)
        for number, found in draws:
            self._steps[number]._draw_watch.hear(found)

    def leaves_out(self, stage: int) -> bool:
        return bool(getattr(self._steps[stage], "leaves_out", False))

    def where(self, place: Place) -> str:
        at = ""
        if place.row != NO_ROW:
            more = f"{place.rows:,} rows or batches that begin with " if place.rows > 1 else ""
            at = f" for {more}{self.plan.inputs.place_of(place.row)}"
        return f" while {self._steps[place.stage]} was at work{at}"

    def objects(self, sent_here: Sequence[Any]) -> Sequence[Any]:
        runs = [run for run in sent_here if isinstance(run, SentRun)]
        values = [run.data if run.items is None else run.items for run in runs]
        return [value for some in values if isinstance(some, list) for value in some]

    without = "use num_workers=0"

    def died_at(self, error: TrainpipesError, how: str, place: Place) -> Answer:
        own = self._steps[place.stage]
        error.message = f"{own}{error.message.removeprefix(self.said)}"
        error.stage = str(own)
        if place.row != NO_ROW:
            vars(error).pop("_trainpipes", None)
            blame(error, own, place.row)
        return [], error


def _function(stage: Any) -> Callable[[Run], Run]:
    function: Callable[[Run], Run] = getattr(stage, "call_ahead", None) or stage.process
    return function


def steps_of(plan: Plan) -> list[Any]:
    """The stages on rows and batches of a plan, then those of a mix's sources."""
    return [*plan.chain.steps, *(step for part in plan.mixed.values() for step in steps_of(part))]


class CallingWorker(torch_worker.WorkerInfo):
    """That of a process that shares out no rows; see ``reading_worker``."""

    only_calls = True


def _tell_torch(worker: int, workers: int, dataset: Any) -> None:
    """Have ``get_worker_info()`` say which worker this is, as in those of a ``DataLoader``."""
    torch_worker._worker_info = CallingWorker(
        id=worker, num_workers=workers, seed=os.getpid(), dataset=dataset
    )
    collates = torch_collate.default_collate_fn_map
    if collates[torch.Tensor] is torch_collate.collate_tensor_fn:  # and not a program's own
        collates[torch.Tensor] = _stacked


def _stacked(tensors: Any, **how: Any) -> torch.Tensor:
    """As ``default_collate`` stacks outside of workers: in these it makes a new file for each batch, and what
    we send goes to files that are used again.
    """
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        stacked: torch.Tensor = torch_collate.collate_tensor_fn(tensors, **how)
        return stacked
    finally:
        torch_worker._worker_info = info
