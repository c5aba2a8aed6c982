"""A small model is trained on a recipe's batches, interrupted and resumed: the losses are the same.

@short_and_long
def test_a_model_learns_from_it_and_resumes(steps, below, tmp_path):
    files = write_parquet(real_text(), tmp_path / "data")
    check_training(
        lambda: sft(files, "bytes", max_length=128),
        lambda: training.Transformer(BYTES, 128, 32, 1, 2),
        lambda model, batch: training.next_token_loss(model(batch["input_ids"]), batch["labels"]),
        tmp_path,
        steps=steps,
        below=below,
    )
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_settings import torch_as_before
from trainpipes import Loader, Pipeline
from trainpipes.testing import digest
from trainpipes.tokenizers.bytes import VOCABULARY as BYTES
from trainpipes_recipes import training
from trainpipes_recipes.demo.corpus import function_pairs

__all__ = ["BYTES", "check_training", "real_text", "short_and_long"]

#: Steps, and the part of the first loss that the last one is below.
short_and_long = pytest.mark.parametrize(
    ("steps", "below"), [(60, 1.0), pytest.param(200, 0.8, marks=pytest.mark.slow)]
)

#: Losses at either end of a run whose mean is compared: one batch may be hard or easy.
ENDS = 10

ALONE = training.Rank(0, 1, torch.device("cpu"))


@functools.cache
def real_text() -> tuple[tuple[str, str], ...]:
    """Some 350 functions of Python's standard library: signature and docstring, body."""
    return tuple(function_pairs(every=12))


def check_training(
    pipeline: Callable[[], Pipeline],
    model: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Tensor],
    folder: Path,
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
        folder: where the checkpoint goes: an empty one.
        steps: optimiser steps.
        below: the mean of the last losses is below this part of the mean of the first ones.
        seed: of the model, and of the step at which it is interrupted.
        lr: learning rate.
        num_workers: worker processes of the resumed run.

    Returns:
        The losses of the run that was left alone.
    """

    def start(args: argparse.Namespace, workers: int = 0) -> tuple[training.Checkpoints, Any]:
        torch.manual_seed(seed)
        loader, learner = Loader(pipeline(), num_workers=workers), model()
        optimizer = torch.optim.AdamW(learner.parameters(), lr=lr)
        checkpoints = training.Checkpoints(args, ALONE, loader, model=learner, optimizer=optimizer)

        def train(after: int) -> Iterator[tuple[str, float]]:
            for batch in training.batches(loader, ALONE, steps - after):
                found = loss(learner, batch)
                optimizer.zero_grad()
                found.backward()
                optimizer.step()
                yield digest(batch), found.item()

        return checkpoints, train

    args = argparse.Namespace(checkpoint_dir=folder / "checkpoints", resume="must")
    saved_after = random.Random(seed).randint(1, steps - 4)
    with torch_as_before():
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        _, train = start(args)
        whole = list(train(0))

        checkpoints, train = start(args)
        interrupted = train(0)
        first = [next(interrupted) for _ in range(saved_after)]
        checkpoints.save(saved_after)
        lost = [next(interrupted) for _ in range(3)]
        interrupted.close()
        assert first + lost == whole[: saved_after + 3]

        checkpoints, train = start(args, num_workers)
        assert checkpoints.resume() == saved_after
        rest = list(train(saved_after))
    assert rest == whole[saved_after:], f"after a resume at step {saved_after}"

    losses = [value for _, value in whole]
    before, after = fmean(losses[:ENDS]), fmean(losses[-ENDS:])
    assert after < below * before, f"the loss went from {before:.3f} to {after:.3f}"
    return losses
