"""The loaders that a Trainer trains on and evaluates on, and the position in its checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from transformers import TrainerCallback
from transformers.trainer_pt_utils import find_batch_size

from trainpipes._internal.checks import require
from trainpipes.engine.iterating.iteration_state import iteration_of, plan_of
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.record import AnyRecord
from trainpipes.errors import ConfigError, StateError
from trainpipes.interfaces.stage_kinds import ShardStage
from trainpipes.loader import Loader
from trainpipes.look.lengths import batches_left, no_length
from trainpipes.stages.device import map_tensors
from trainpipes.state.cursor import is_count
from trainpipes.state.format import BatchSizes

#: The position's file in a checkpoint's folder, and the file in which the Trainer says how far it is.
FILE = "trainpipes.json"
TRAINER_STATE = "trainer_state.json"


def saved_position(folder: Path) -> tuple[int, dict[str, Any], int]:
    """The pipeline's epoch as training began, the loader's state, and how often its next batch was given."""
    path = folder / FILE
    try:
        saved = json.loads(path.read_text())
        first, state, batches = saved["first_epoch"], saved["loader"], saved.get("given", 0)
        good = is_count(first) and first <= state["epoch"] and is_count(batches)
        if saved["step"] == trained(folder)[0] and good:
            return first, state, batches
    except FileNotFoundError:
        raise StateError(
            f"{folder} has no {FILE}, the position in the data: it is not of this Trainer; with "
            "ignore_data_skip=True its weights are loaded alone",
            path=str(folder),
        ) from None
    except (ValueError, RecursionError, OSError, TypeError, KeyError):
        pass
    way = "resume from a checkpoint as it was saved"
    raise StateError(f"{path} is damaged, or of another checkpoint: {way}", path=str(path))


def trained(folder: Path) -> tuple[int, int]:
    """Optimizer steps and whole epochs that were trained before a checkpoint, as the Trainer says."""
    try:
        state = json.loads((folder / TRAINER_STATE).read_text())
    except (OSError, ValueError, RecursionError):
        return 0, 0
    return int(state.get("global_step") or 0), int((state.get("epoch") or 0) + 1e-6)


def rows_of_batches(plan: Plan) -> int:
    """Rows of a batch; 1 where they are not known."""
    opener = plan.chain.opener
    sampler = opener.options.get("batch_sampler") if plan.chain.batch is None else None
    size = getattr(sampler, "batch_size", None)
    return size if is_count(size) and size else plan.chain.batch_size


class TrainingLoader:
    """Gives the batches of a ``train()``, epoch after epoch, and knows its place.

    Args:
        times: how often each batch is given, in turn.
    """

    def __init__(self, loader: Loader, prepare: Callable[[Any], Any], times: int = 1) -> None:
        self.loader = loader
        self.times = times
        #: How often the batch after ``_before`` was given; 0 if as often as it is to be.
        self.given = 0
        self._before: dict[str, Any] = {}
        self._prepare = prepare
        self._first_epoch = self.step = self.epoch = 0
        self._resumed = False
        self._noted = loader.state_dict(), 0
        self.left: int | None = None
        self.epochs: int | None = None
        self.length = 1
        #: Batches of the epoch that has ended; None within an epoch.
        self.last: int | None = None

    def __len__(self) -> int:
        plan = plan_of(self.loader)
        if plan.grows:
            raise TypeError(f"this pipeline has no len() in training: {no_length(plan)}")
        return len(self.loader) * self.times

    def __iter__(self) -> Iterator[Any]:
        self.last, taken = None, 0
        if self.times == 1:
            for batch in self.loader:
                taken += 1
                yield self._prepare(batch)
        else:
            self._before = self.loader.state_dict()
            for batch in self.loader:
                for number in range(self.given + 1, self.times + 1):
                    self.given = number % self.times
                    taken += 1
                    yield self._prepare(batch)
                self._before = self.loader.state_dict()
        self.last = taken

    def start(
        self, folder: Path | None, allow_changes: Collection[str] = (), goes_on: bool = True
    ) -> None:
        """Stand where a checkpoint was saved, or at the start of an epoch.

        Args:
            goes_on: whether to go on at the checkpoint's position.
        """
        loader = self.loader
        saved = saved_position(folder) if folder is not None and goes_on else None
        self.step, self.epoch = (0, 0) if folder is None else trained(folder)
        if saved is not None:
            loader.load_state_dict(saved[1], allow_changes=allow_changes)
            self.given = saved[2] % self.times
        elif plan_of(loader).chain.endless and not iteration_of(loader.pipeline).passes.now.loaded:
            loader.load_state_dict(loader.pipeline.state_at(0))
        else:
            loader.set_epoch(self.epoch)
        state = loader.state_dict()
        self._noted = state, self.given
        self._first_epoch = state["epoch"] - self.epoch if saved is None else saved[0]
        self.epoch = state["epoch"] - self._first_epoch
        self._resumed = folder is not None or state["batches"] > 0
        self.left = self._left(state, self.given)
        if self.left == 0 and state["batches"]:  # the loader goes on with the next epoch
            self.epoch += 1
            self.left = len(self)
        if self.left == 0:
            ranks = iteration_of(loader).ranks()[1]
            raise ConfigError(
                f"an epoch must have a batch for each rank, got fewer batches than the {ranks} ranks; add "
                "rows, or make smaller batches"
            )

    def _left(self, state: dict[str, Any], batches: int) -> int | None:
        """Batches that this rank has yet to get in the epoch of a state."""
        plan, sizes = plan_of(self.loader), BatchSizes.parse(state["batch_sizes"])
        left = batches_left(plan, state["batches"], self.loader._step, sizes)
        if left is None or plan.grows:
            return None
        return left // iteration_of(self.loader).ranks()[1] * self.times - batches

    def steps_and_epochs(
        self, max_steps: int, updates: int, accumulation: int, by_epochs: bool
    ) -> tuple[int, int]:
        """Optimizer steps of the whole training, and the epoch after the Trainer's last, which counts from
        ``step // updates``.
        """
        assert self.left is not None
        rest = math.ceil(self.left / accumulation)
        if by_epochs and self._resumed:
            max_steps = self.step + max(0, rest + max_steps - (self.epoch + 1) * updates)
        more = max_steps - self.step
        epochs = 0 if more <= 0 else 1 + math.ceil(max(0, more - rest) / updates)
        self.epochs = self.epoch + epochs
        return max_steps, self.step // updates + epochs

    def note(self) -> float:
        """Note that the batches taken until now were trained on; return how many epochs that makes."""
        state = self._before if self.given else self.loader.state_dict()
        self._noted = state, self.given
        left = self._left(state, self.given)
        world = iteration_of(self.loader).ranks()[1]
        taken = state["batches"] // world * self.times + self.given
        done = taken if left is None else self.length - left
        return float(state["epoch"] - self._first_epoch + done / self.length)

    def position(self, step: int, timeout: float) -> dict[str, Any]:
        """The state after so many whole optimizer steps. If batches are not counted, all ranks call it."""
        state, batches = self._noted
        state = self.loader._whole(state, None, timeout)
        position = {"step": step, "first_epoch": self._first_epoch, "loader": state}
        return position if self.times == 1 else {**position, "given": batches}


class EpochLength(int):
    """The number of batches in an epoch, which the training loop compares with those it has taken: a resumed
    epoch has fewer.
    """

    loader: TrainingLoader

    def __eq__(self, batches: object) -> bool:
        last = self.loader.last
        return batches == (int(self) if last is None else last)

    __hash__ = int.__hash__


class NotePosition(TrainerCallback):
    """Notes the loader's position after each optimizer step."""

    #: While it trains.
    loader: TrainingLoader | None = None

    def on_step_end(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        loader = self.loader
        if loader is not None:
            rule = "the Trainer's own, whose position is saved"
            way = "leave out what wraps or replaces it"
            require(train_dataloader is loader, "train_dataloader", rule, train_dataloader, way)
            state.epoch = loader.note()
            state.num_train_epochs = loader.epochs or state.num_train_epochs


# Evaluation


def every_row(pipe: AnyRecord) -> AnyRecord:
    """A pipeline that leaves no batch out where ranks do not divide their number."""
    good, way = not plan_of(pipe).chain.has_no_end, "leave .repeat() out, or end a mix by .take(n)"
    require(good, "eval_dataset", "a pipeline with an end", pipe, way)
    stages = [s._replaced(tail="uneven") if isinstance(s, ShardStage) else s for s in pipe.stages]
    return type(pipe)(stages, pipe._ranks, pipe._members)


class EvaluationLoader(DataLoaderStateMixin):
    """Gives each rank its batches, then ones to fill in while others have more; ``gatherer`` drops their
    rows.
    """

    def __init__(
        self, loader: Loader, accelerator: Accelerator, prepare: Callable[[Any], Any]
    ) -> None:
        self.loader = loader
        self.gradient_state = GradientState()
        self._accelerator = accelerator
        self._prepare = prepare
        self._sizes = [0]  # rows of each process's batch that count
        self._given = 0  # rows of this rank's, also where it fills in
        self._filler: Any = None
        self._steps: int | None = None
        #: Rows of all ranks that were given, once all were.
        self.rows: int | None = None

    def __len__(self) -> int:
        if self._steps is not None:
            return self._steps
        iteration = iteration_of(self.loader)
        len(self.loader)  # says why it is not known
        return math.ceil(iteration.plan.counts.batches_in_pass / iteration.ranks()[1])

    def __iter__(self) -> Iterator[Any]:
        iteration_of(self.loader).start_over()
        batches = iter(self.loader)
        steps = rows = 0
        self.begin()
        try:
            upcoming = self._step(next(batches, None))
            while upcoming is not None:
                batch, self._sizes, self._given = upcoming
                steps, rows = steps + 1, rows + sum(self._sizes)
                upcoming = self._step(next(batches, None))
                self.end_of_dataloader = upcoming is None
                yield batch
        finally:
            self.end()
        self._steps, self.rows = steps, rows

    def _step(self, batch: Any) -> tuple[Any, list[int], int] | None:
        """A batch or a filler, each rank's rows, and this rank's; None at the end of all ranks."""
        batch = None if batch is None else self._prepare(batch)
        sizes = [0 if batch is None else _rows(batch)]
        if self._accelerator.num_processes > 1:
            rank = iteration_of(self.loader).ranks()[0]
            here = torch.tensor([rank, *sizes], device=self._accelerator.device)
            everywhere = self._accelerator.gather(here).tolist()
            ranks, sizes = everywhere[::2], everywhere[1::2]
            # Of processes that share a rank's rows, the first counts.
            sizes = [0 if ranks[n] in ranks[:n] else rows for n, rows in enumerate(sizes)]
        if not any(sizes):
            return None
        if batch is None and self._filler is None:  # there are more ranks than batches
            alone = self.loader.pipeline.distributed(rank=0, world_size=1)
            batch = self._prepare(next(iter(Loader(alone, threads=0))))
        self._filler = self._filler if batch is None else batch
        return self._filler, sizes, _rows(self._filler)

    def fills_in(self) -> bool:
        """Whether this rank's batch at hand is there for others, which have more."""
        return not self._sizes[self._accelerator.process_index]

    def gatherer(self, repeated: int) -> Callable[[Any], Any]:
        """A function that gathers the rows of all ranks in the order of batches, without fillers."""
        return lambda values: map_tensors(values, lambda value: self._gather(value, repeated))

    def _gather(self, value: Any, repeated: int) -> Any:
        accelerator, sizes = self._accelerator, self._sizes
        if not isinstance(value, torch.Tensor):
            return None
        rows = sizes[accelerator.process_index]
        if value.dim() == 1 and len(value) == repeated:
            value = value[:1].expand(self._given) if len(value) != self._given else value
        elif value.dim() == 0 or len(value) != self._given:
            return accelerator.gather(value)  # not by rows
        value = value[:rows]
        return value if len(sizes) == 1 else gathered(accelerator.gather, value, sizes)


def gathered(gather: Callable[[Any], Any], value: Any, sizes: list[int]) -> Any:
    """The rows of all ranks, which have so many each."""
    most = max(sizes)
    whole = value.new_zeros((most, *value.shape[1:]))
    whole[: len(value)] = value
    parts = gather(whole).split(most)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _rows(batch: Any) -> int:
    return find_batch_size(batch) or 1
