"""A small model is trained on a recipe's batches, interrupted and resumed: the losses are the same."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from torch_settings import torch_as_before
from trainpipes import Loader, Pipeline
from trainpipes.testing import digest
from trainpipes_recipes.samples import function_pairs

__all__ = ["TRAINER", "check_training", "real_text"]

#: What a training script imports first: for ``python(*TRAINER)``.
TRAINER = ("torch._dynamo", "transformers.models.llama.modeling_llama")

#: Losses at either end of a run whose mean is compared: one batch may be hard or easy.
ENDS = 10


@functools.cache
def real_text() -> tuple[tuple[str, str], ...]:
    """Some 350 functions of Python's standard library: signature and docstring, body."""
    return tuple(function_pairs(every=12))


def check_training(
    pipeline: Callable[[], Pipeline],
    model: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Tensor],
    file: Path,
    *,
    steps: int = 60,
    below: float = 1.0,
    seed: int = 0,
    lr: float = 3e-3,
    num_workers: int = 0,
) -> list[float]:
    """Train, train again with an interruption, and compare all batches and losses to the last bit.

    The second run saves a checkpoint at a drawn step, goes on for a few steps more, and is dropped there;
    a third one, of fresh objects, starts from the checkpoint.

    Args:
        pipeline: makes the pipeline, whose batches are dicts; called for each run.
        model: makes the model; torch is seeded before.
        loss: of a model and a batch.
        file: the checkpoint to write.
        steps: optimizer steps.
        below: the mean of the last losses is below this part of the mean of the first ones.
        seed: of the model, and of the step at which it is interrupted.
        lr: learning rate.
        num_workers: worker processes of the resumed run.

    Returns:
        The losses of the run that was left alone.
    """

    def start(workers: int = 0) -> tuple[dict[str, Any], Iterator[tuple[str, float]]]:
        torch.manual_seed(seed)
        loader, learner = Loader(pipeline(), num_workers=workers), model()
        optimizer = torch.optim.AdamW(learner.parameters(), lr=lr)

        def train() -> Iterator[tuple[str, float]]:
            while True:
                for batch in loader:
                    found = loss(learner, batch)
                    optimizer.zero_grad()
                    found.backward()
                    optimizer.step()
                    yield digest(batch), found.item()

        return {"loader": loader, "model": learner, "optimizer": optimizer}, train()

    saved_after = random.Random(seed).randint(1, steps - 4)
    with torch_as_before():
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        _, training = start()
        whole = [next(training) for _ in range(steps)]

        parts, training = start()
        first = [next(training) for _ in range(saved_after)]
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        lost = [next(training) for _ in range(3)]
        training.close()
        assert first + lost == whole[: saved_after + 3]

        parts, training = start(num_workers)
        for name, state in torch.load(file, weights_only=True).items():
            parts[name].load_state_dict(state)
        rest = [next(training) for _ in range(steps - saved_after)]
        training.close()
    assert rest == whole[saved_after:], f"after a resume at step {saved_after}"

    losses = [value for _, value in whole]
    before, after = fmean(losses[:ENDS]), fmean(losses[-ENDS:])
    assert after < below * before, f"the loss went from {before:.3f} to {after:.3f}"
    return losses
