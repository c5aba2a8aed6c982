"""Train a small classifier of texts.

    python -m trainpipes_recipes.train_classification --files 'my/*.parquet' --label topic --steps 500
    torchrun --nproc-per-node 2 -m trainpipes_recipes.train_classification --files 'my/*.parquet'

Classes are found in the data, and rare ones count more. Killed at any moment and started again, it goes on
from its last checkpoint, also on another number of ranks or with another ``--num-workers``. The model is for
trying things out: copy this file, and put yours in its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from trainpipes import Loader
from trainpipes_recipes import training
from trainpipes_recipes.classification import classification


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, as the command line says."""
    args = parse(arguments)
    with training.this_rank(args) as rank:
        pipe = classification(
            args.files,
            args.tokenizer,
            text=args.text,
            text_pair=args.text_pair,
            label=args.label,
            max_length=args.max_length,
            batch_size=args.batch_size,
            buffer_size=args.buffer_size,
            seed=args.seed,
        )
        counts = pipe.stats(0, labels="labels").labels["labels"]  # rows of each class
        balanced = [sum(counts.values()) / (len(counts) * max(1, n)) for n in counts.values()]
        weights = torch.tensor(balanced, device=rank.device)  # [C]
        loader = Loader(pipe, num_workers=args.num_workers, pin_memory=rank.device.type == "cuda")

        vocabulary = training.vocabulary_size(args)
        size = args.max_length, args.width, args.layers, args.heads
        model = rank.wrap(training.Classifier(vocabulary, len(weights), *size))
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

        checkpoints = training.Checkpoints(args, rank, loader, model=model, optimizer=optimizer)
        step = checkpoints.resume()
        with training.Log(args, rank, after=step) as log:
            for batch in training.batches(loader, rank, args.steps - step):
                scores = model(batch["input_ids"], batch["attention_mask"])  # [B, C]
                loss = training.class_loss(scores, batch["labels"], weights)

                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

                step += 1
                log.write(step, batch, loss)
                if step % args.checkpoint_every == 0 or step == args.steps:
                    checkpoints.save(step)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = training.text_options("train_classification", __doc__)
    parser.add_argument("--text", help="column of texts; found by its name if left out")
    parser.add_argument("--text-pair", help="column of second texts")
    parser.add_argument("--label", help="column of classes; found by its name if left out")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
