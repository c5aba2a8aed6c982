"""Train a small network on a table's columns, to tell a class.

    python -m trainpipes_recipes.train_tabular --files 'my/*.parquet' --label churned --steps 500
    torchrun --nproc-per-node 2 -m trainpipes_recipes.train_tabular --files 'my/*.parquet'

Scales and vocabularies are fitted once, and kept in ``fit.json`` beside the checkpoint. Killed at any moment
and started again, it goes on from its last checkpoint, also on another number of ranks or with another
``--num-workers``. The model is for trying things out: copy this file, and put yours in its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainpipes import Loader
from trainpipes_recipes import training
from trainpipes_recipes.tables.fit import TableFit
from trainpipes_recipes.tabular import fit_of, tabular


class Network(nn.Module):
    """Scores of C classes: numbers and an embedding of each category, then two linear layers."""

    def __init__(self, fit: TableFit, classes: int, width: int = 64) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, 8) for n in fit.cardinalities)
        first = nn.Linear(len(fit.numeric) + 8 * len(fit.cardinalities), width)
        self.layers = nn.Sequential(first, nn.ReLU(), nn.Linear(width, classes))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """``[B, N]`` numbers and ``[B, K]`` codes of categories to ``[B, C]`` scores."""
        parts = [batch["numeric"]] if "numeric" in batch else []
        parts += [embed(batch["categorical"][:, k]) for k, embed in enumerate(self.embeddings)]
        scores: Tensor = self.layers(torch.cat(parts, dim=1))
        return scores


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, as the command line says."""
    parser = training.options("train_tabular", __doc__)
    parser.add_argument("--label", help="column of classes; found by its name if left out")
    args: argparse.Namespace = parser.parse_args(arguments)
    with training.this_rank(args) as rank:
        options = {
            "batch_size": args.batch_size,
            "buffer_size": args.buffer_size,
            "seed": args.seed,
        }
        fit = args.checkpoint_dir / "fit.json"
        pipe = tabular(args.files, label=args.label, target="class", fit=fit, **options)
        counts = pipe.stats(0, labels="labels").labels["labels"]  # rows of each class
        balanced = [sum(counts.values()) / (len(counts) * max(1, n)) for n in counts.values()]
        weights = torch.tensor(balanced, device=rank.device)  # [C]
        loader = Loader(pipe, num_workers=args.num_workers, pin_memory=rank.device.type == "cuda")

        model = rank.wrap(Network(fit_of(pipe), len(weights)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

        checkpoints = training.Checkpoints(args, rank, loader, model=model, optimizer=optimizer)
        step = checkpoints.resume()
        with training.Log(args, rank, after=step) as log:
            for batch in training.batches(loader, rank, args.steps - step):
                loss = training.class_loss(model(batch), batch["labels"], weights)

                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

                step += 1
                log.write(step, batch, loss)
                if step % args.checkpoint_every == 0 or step == args.steps:
                    checkpoints.save(step)


if __name__ == "__main__":
    main()
