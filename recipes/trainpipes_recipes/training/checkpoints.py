"""Checkpoints: everything that a resumed run needs, in one file that is whole or not there."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Protocol

import torch

from trainpipes import Loader
from trainpipes_recipes.training.options import fixed
from trainpipes_recipes.training.ranks import Rank

__all__ = ["Checkpoints", "Stateful"]


class Stateful(Protocol):
    """A model, an optimiser, a schedule: what says its state and takes one."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Checkpoints:
    """The last checkpoint of a run: ``checkpoint.pt``, which rank 0 writes for all ranks.

    It holds the loader's position, the state of each part, and torch's random state of each rank. It
    may be loaded on another number of ranks, if that divides the pipeline's ``num_shards``.

    Args:
        args: of the command line: ``checkpoint_dir``, a folder that all ranks share; ``resume``; and what
            must be the same after a resume.
        rank: this process.
        loader: whose position is saved.
        parts: what else has a state, each under a name of yours: ``model=model``.
    """

    def __init__(
        self, args: argparse.Namespace, rank: Rank, loader: Loader, **parts: Stateful
    ) -> None:
        self.path: Path = args.checkpoint_dir / "checkpoint.pt"
        self._how: str = args.resume
        self._rank = rank
        self._loader = loader
        self._settings = fixed(args)
        # Weights have the same names whether or not a model is wrapped for several ranks.
        self._parts = {name: getattr(part, "module", part) for name, part in parts.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def save(self, step: int) -> None:
        """Replace the last checkpoint by one of now, at once or not at all. All ranks call it after the
        same step."""
        loader = self._loader.gather_state()
        random = self._rank.gather(_random_state(self._rank))
        if self._rank.number:
            return
        content = {
            "step": step,
            "settings": self._settings,
            "loader": loader,
            "random": random,
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }
        beside = self.path.with_suffix(".new")
        with open(beside, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path)

    def resume(self) -> int:
        """Go back to the last checkpoint: if there is one, or as ``--resume`` says.

        Returns:
            The step that it was saved after; 0 if the run starts.
        """
        found = self._how != "never" and self.path.exists()
        if self._how == "must" and not found:
            raise SystemExit(
                f"--resume must: a checkpoint is needed, and {self.path} does not exist"
            )
        step = self._load() if found else 0
        steps = self._rank.gather(step)
        if len(set(steps)) > 1:
            raise SystemExit(
                f"{self.path}: ranks found checkpoints of steps {steps}; --checkpoint-dir is a folder "
                "that all ranks share"
            )
        return step

    def _load(self) -> int:
        content = torch.load(self.path, weights_only=True, map_location="cpu")
        for name, saved in content["settings"].items():
            if self._settings.get(name) != saved:
                raise SystemExit(
                    f"{self.path} is of a run with --{name.replace('_', '-')} {saved}, this one has "
                    f"{self._settings.get(name)}: use the same, or another --checkpoint-dir"
                )
        self._loader.load_state_dict(content["loader"])
        for name, part in self._parts.items():
            part.load_state_dict(content["parts"][name])
        if self._rank.number < len(content["random"]):
            _set_random_state(self._rank, content["random"][self._rank.number])
        else:  # a rank that was not there: numbers of its own
            torch.manual_seed(torch.initial_seed() + self._rank.number)
        return int(content["step"])


def _random_state(rank: Rank) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if rank.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(rank.device)
    return state


def _set_random_state(rank: Rank, state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if rank.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], rank.device)
