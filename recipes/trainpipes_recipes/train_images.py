"""Train a small convolutional network on pictures and their classes.

    python -m trainpipes_recipes.train_images --files pets/train --classes 37 --steps 500
    torchrun --nproc-per-node 2 -m trainpipes_recipes.train_images --files 'shards/*.tar' --classes 1000

Killed at any moment and started again, it goes on from its last checkpoint, also on another number of
ranks or with another ``--num-workers``. Copy this file, and put your model in the place of this one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from trainpipes import Loader
from trainpipes_recipes import training
from trainpipes_recipes.images import images


def network(classes: int, width: int = 32) -> nn.Module:
    """Images ``[B, 3, H, W]`` to scores ``[B, classes]``: four halvings, and the mean over what is left."""
    sizes = [3, width, 2 * width, 4 * width, 8 * width]
    halvings = [
        nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(1, b), nn.ReLU())
        for a, b in pairwise(sizes)
    ]
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], classes))
    return nn.Sequential(*halvings, pooled)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, as the command line says."""
    args = parse(arguments)
    with training.this_rank(args) as rank:
        pipe = images(
            args.files[0] if len(args.files) == 1 else args.files,
            size=args.size,
            batch_size=args.batch_size,
            buffer_size=args.buffer_size,
            seed=args.seed,
            num_shards=args.num_shards,
        )
        loader = Loader(pipe, num_workers=args.num_workers, pin_memory=rank.device.type == "cuda")

        model = rank.wrap(network(args.classes))
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)

        checkpoints = training.Checkpoints(args, rank, loader, model=model, optimizer=optimizer)
        step = checkpoints.resume()
        with training.Log(args, rank, after=step) as log:
            for batch in training.batches(loader, rank, args.steps - step):
                scores = model(batch["images"])  # [B, classes]
                loss = F.cross_entropy(scores, batch["labels"])

                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

                step += 1
                log.write(step, batch, loss)
                if step % args.checkpoint_every == 0 or step == args.steps:
                    checkpoints.save(step)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = training.options("train_images", __doc__)
    add = parser.add_argument
    add("--classes", type=int, required=True, help="number of classes; labels are below it")
    add("--size", type=int, default=224, help="pixels of a side")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
