"""Train a small reward model on preferences: what is chosen is to score higher than what is rejected.

    python -m trainpipes_recipes.train_preference --files preferences.parquet --steps 500
    torchrun --nproc-per-node 2 -m trainpipes_recipes.train_preference --files preferences.parquet

Killed at any moment and started again, it goes on from its last checkpoint, also on another number of
ranks or with another ``--num-workers``. The model is for trying things out: copy this file, and put
yours in its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from trainpipes import Loader
from trainpipes_recipes import training
from trainpipes_recipes.preference import preference


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, as the command line says."""
    args = parse(arguments)
    with training.this_rank(args) as rank:
        pipe = preference(
            args.files,
            args.tokenizer,
            on_error=args.on_error,
            max_length=args.max_length,
            batch_size=args.batch_size,
            buffer_size=args.buffer_size,
            seed=args.seed,
        )
        loader = Loader(pipe, num_workers=args.num_workers, pin_memory=rank.device.type == "cuda")

        vocabulary = training.vocabulary_size(args)
        shape = (args.max_length, args.width, args.layers, args.heads)
        model = rank.wrap(training.Classifier(vocabulary, 1, *shape))  # one score, the reward
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))

        checkpoints = training.Checkpoints(args, rank, loader, model=model, optimizer=optimizer)
        step = checkpoints.resume()
        with training.Log(args, rank, after=step) as log:
            for batch in training.batches(loader, rank, args.steps - step):
                # DPO scores each side by log-probabilities of its labels instead.
                chosen = model(batch["chosen_input_ids"], batch["chosen_attention_mask"])  # [B, 1]
                rejected = model(batch["rejected_input_ids"], batch["rejected_attention_mask"])
                loss = -F.logsigmoid(chosen - rejected).mean()

                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

                step += 1
                log.write(step, batch, loss)
                if step % args.checkpoint_every == 0 or step == args.steps:
                    checkpoints.save(step)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = training.text_options("train_preference", __doc__)
    add = parser.add_argument
    add("--on-error", choices=("raise", "skip", "keep"), help="bad rows: see preference()")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
