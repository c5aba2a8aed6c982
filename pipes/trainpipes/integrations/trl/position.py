"""The position of ``pipe.to_hf()`` in the checkpoints of TRL's trainers, and of transformers' ``Trainer``.

A trainer puts the dataset through stages of its own, which drop, cut and pack rows, and fetches batches
ahead. So the position is that of the whole dataset after the batch that was trained on last, as a
``StatefulDataLoader`` keeps it: the callback lets the trainer's loader be one. Each rank writes its own into
the checkpoint's folder.
"""

from __future__ import annotations

import os
import pickle
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

from trainpipes.errors import ConfigError, StateError
from trainpipes.extra import need
from trainpipes.gather import TIMEOUT, gather
from trainpipes.integrations.datasets import pipeline_of
from trainpipes.sources.hf.stream import shuffles
from trainpipes.topology import data_parallel

need("transformers", "trainpipes.integrations.trl")
need("accelerate", "trainpipes.integrations.trl")

from accelerate.data_loader import DataLoaderShard  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

__all__ = ["PositionCallback"]

#: Options of the trainer's loader that ours has as well.
OPTIONS = (
    "batch_size",
    "drop_last",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


#: What is saved.
KEYS = {"run", "step", "num_workers", "loader"}


class PositionCallback(TrainerCallback, ExportableState):
    """Keeps the position of a dataset of ``pipe.to_hf()`` in a trainer's checkpoints, so that
    ``train(resume_from_checkpoint=...)`` goes on with the batch that would have come next.

    For ``SFTTrainer``, ``DPOTrainer`` and other trainers of TRL, with any number of ranks and any
    ``dataloader_num_workers``; both must be the same after a resume. The pipeline must end with
    ``.repeat()``, and ``max_steps`` must be given, as for all datasets without a length: no epoch ends, so
    ranks never wait for each other. Batches that were trained on are not read again: ``ignore_data_skip`` is
    set.

    Args:
        checkpoint: the folder that training resumes from, if it is not in ``output_dir``.

    Raises:
        ConfigError: at the start, if the dataset is not one that it can keep the position of.
        StateError: on a resume, if the checkpoint has no position, or that of other ranks or workers.

    ``SFTTrainer(model, args, train_dataset=pipe.repeat().to_hf(), callbacks=[PositionCallback()])``
    """

    def __init__(self, checkpoint: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._run = ""  # which start of training saves

    def state(self) -> dict[str, Any]:
        """What the trainer writes into trainer_state.json: which files belong to it."""
        return {"args": {}, "attributes": {"run": self._run}}

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.ignore_data_skip = True

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        if not args.ignore_data_skip:
            raise ConfigError(
                "PositionCallback has to be there when the trainer is made: pass it as "
                "callbacks=[PositionCallback()], not by add_callback()"
            )
        loader = _shard(train_dataloader)
        for name in ("save_strategy", "eval_strategy"):
            if getattr(args, name) == "epoch":
                raise ConfigError(
                    f'{name}="epoch": rows of pipe.repeat().to_hf() have no epochs that end: say "steps", '
                    "and how many"
                )
        rank, ranks = args.process_index, args.world_size
        reading = data_parallel()[1]
        if reading > 1 and ranks == 1:
            raise ConfigError(
                f"{reading} ranks read this pipeline, and the trainer takes each process for the only one: "
                "each would train a model of its own. On CPUs pass use_cpu=True to its arguments"
            )
        saved = self._saved(args, state, rank, ranks) if state.global_step else None
        self._run = _run_id(ranks)
        if saved is not None and saved["num_workers"] != loader.num_workers:
            raise StateError(
                f"dataloader_num_workers: saved {saved['num_workers']}, now {loader.num_workers}; a dataset "
                "of pipe.to_hf() has a position in each worker: set it as it was"
            )
        options = {name: getattr(loader, name) for name in OPTIONS}
        stateful = StatefulDataLoader(loader.dataset, **options)
        if saved is not None:
            stateful.load_state_dict(saved["loader"])
        loader.base_dataloader = stateful

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step < state.max_steps and not control.should_training_stop:
            raise ConfigError(
                f"PositionCallback: the dataset ended at step {state.global_step} of {state.max_steps}, "
                "though its pipeline repeats: leave take() of the dataset out"
            )

    def on_save(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        # Accelerate keeps it as it was after the batch that it gave last, though it has fetched another.
        saved = {
            "run": self._run,
            "step": state.global_step,
            "num_workers": train_dataloader.num_workers,
            "loader": train_dataloader.state_dict(),
        }
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        path = folder / _name(args.process_index, args.world_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        torch.save(saved, beside)
        os.replace(beside, path)

    def _saved(self, args: Any, state: Any, rank: int, ranks: int) -> dict[str, Any]:
        """What this rank has saved beside the trainer's state that was loaded.

        Raises:
            StateError: it has not, or on another number of ranks.
        """
        step = state.global_step
        kept = state.stateful_callbacks.get(type(self).__name__)
        if not isinstance(kept, dict):
            raise StateError(
                f"the checkpoint of step {step} was saved without PositionCallback, and holds no position: "
                "resume from one that was saved with it, or start a new run"
            )
        given = args.resume_from_checkpoint
        places = [
            self._checkpoint,
            Path(given) if isinstance(given, str) else None,
            Path(args.output_dir, f"checkpoint-{step}"),
        ]
        tried, others = [], ""
        for place in filter(None, places):
            path = place / _name(rank, ranks)
            tried.append(str(path))
            if path.exists():
                try:
                    saved = torch.load(path, weights_only=True)
                except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
                    raise StateError(
                        f"{path} is damaged ({error or type(error).__name__}): resume from an earlier "
                        "checkpoint"
                    ) from error
                if not isinstance(saved, dict) or not saved.keys() >= KEYS:
                    raise StateError(
                        f"{path} is damaged, or of something else: resume from an earlier checkpoint"
                    )
                if (saved["run"], saved["step"]) == (kept["attributes"]["run"], step):
                    return dict(saved)
            found = sorted(path.parent.glob("rank-*-of-*"))
            if found and not path.exists():
                others = found[0].stem.rpartition("-")[2].lstrip("0")
        if others and others != str(ranks):
            raise StateError(
                f"ranks: saved {others}, now {ranks}; where the trainer drops, cuts or packs rows, each rank "
                "has a position of its own, from which only as many ranks can go on"
            )
        raise StateError(
            f"the position of step {step} is not in {' or '.join(tried)}: if the checkpoint lies elsewhere, "
            "say PositionCallback(checkpoint=folder); if the run was killed while it was saved, resume from "
            "an earlier one"
        )


def _shard(loader: Any) -> Any:
    """A trainer's loader, if its dataset is one of ours, of which this rank has its own shards."""
    dataset = getattr(loader, "dataset", None)
    if type(dataset).__name__ == "IterableDatasetShard":
        raise ConfigError(
            "PositionCallback: each rank would read all rows and keep its part; have datasets deal shards to "
            "the ranks: add .sharding_filter() to the pipeline, and leave split_batches out"
        )
    pipeline = pipeline_of(dataset)
    if pipeline is None:
        raise ConfigError(
            "PositionCallback keeps the position of train_dataset=pipe.repeat().to_hf(), got "
            f"{type(dataset).__name__}"
        )
    if not pipeline._session.plan.chain.endless:
        raise ConfigError(
            "PositionCallback: ranks would end their epochs at different steps, and wait for each other for "
            "ever: write pipe.repeat().to_hf(), and say max_steps"
        )
    if shuffles(dataset):
        raise ConfigError(
            "PositionCallback: shuffle() of datasets, or shuffle_dataset=True, draws from a buffer that its "
            "state does not hold: leave it out, and put .shuffle(buffer_size) into the pipeline"
        )
    if not isinstance(loader, DataLoaderShard):
        raise ConfigError(
            "PositionCallback: one rank would read the rows of all; pass "
            "accelerator_config={'dispatch_batches': False} to the trainer's arguments, as TRL does"
        )
    return loader


def _run_id(ranks: int) -> str:
    """A name for this start of training, the same on all ranks."""
    own = uuid.uuid4().hex
    if ranks == 1 or not dist.is_initialized():
        return own
    return str(gather(own, tuple(range(ranks)), TIMEOUT, "the start of training")[0])


def _name(rank: int, ranks: int) -> str:
    return f"trainpipes/rank-{rank:05}-of-{ranks:05}.pt"
