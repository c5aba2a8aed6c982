"""Fine-tune a small causal transformer on prompt and response columns.

    python -m trainpipes_recipes.train_sft --files 'my/*.parquet' --tokenizer tokenizer.json --steps 500
    torchrun --nproc-per-node 2 -m trainpipes_recipes.train_sft --files 'my/*.parquet'

Killed at any moment and started again, it goes on from its last checkpoint, also on another number of
ranks or with another ``--num-workers``. The model is for trying things out: copy this file, and put
yours in its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from trainpipes import Loader
from trainpipes_recipes import training
from trainpipes_recipes.sft import sft


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, as the command line says."""
    args = parse(arguments)
    with training.this_rank(args) as rank:
        pipe = sft(
            args.files,
            args.tokenizer,
            prompt=args.prompt,
            response=args.response,
            max_length=args.max_length,
            batch_size=args.batch_size,
            buffer_size=args.buffer_size,
            seed=args.seed,
            num_shards=args.num_shards,
        )
        loader = Loader(pipe, num_workers=args.num_workers, pin_memory=rank.device.type == "cuda")

        vocabulary = training.vocabulary_size(args)
        model = rank.wrap(
            training.Transformer(vocabulary, args.max_length, args.width, args.layers, args.heads)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))

        checkpoints = training.Checkpoints(args, rank, loader, model=model, optimizer=optimizer)
        step = checkpoints.resume()
        with training.Log(args, rank, after=step) as log:
            for batch in training.batches(loader, rank, args.steps - step):
                # Padding comes last, where no token of a causal model sees it.
                scores = model(batch["input_ids"])  # [B, L, V]
                loss = training.next_token_loss(scores, batch["labels"])

                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

                step += 1
                log.write(step, batch, loss)
                if step % args.checkpoint_every == 0 or step == args.steps:
                    checkpoints.save(step)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = training.text_options("train_sft", __doc__)
    parser.add_argument("--prompt", help="column of the prompt; found by its name if left out")
    parser.add_argument("--response", help="column of the response; found by its name if left out")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
