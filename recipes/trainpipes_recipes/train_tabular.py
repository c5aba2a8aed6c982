"""Train a small network on the rows of a table: embeddings of categories, bags of those in lists, numbers.

    python -m trainpipes_recipes.train_tabular --files purchases --categories user item device seen \\
        --valid day ">=" 2026-03-20
    torchrun --nproc-per-node 8 -m trainpipes_recipes.train_tabular --files clicks --label clicked

A killed run that is started again goes on from its last checkpoint with the very next batch, also
on another number of ranks. The means, deviations and ids that it was fitted with are in the file
``--columns``. At the end, the folder "model" of --output holds the weights.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainpipes as tp
from trainpipes_recipes import training


class Network(nn.Module):
    """Embeddings of categories, their means over lists, and numbers, through two hidden layers.

    Args:
        numbers: columns of numbers.
        sizes: how many ids each column of categories has.
        lists: the same of columns of lists, by name.
        outputs: classes, or 1 for a number.
    """

    def __init__(
        self, numbers: int, sizes: Sequence[int], lists: Mapping[str, int], outputs: int,
        embedding: int = 16, width: int = 128,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, embedding) for size in sizes)
        self.lists = [*lists]  # a ModuleDict takes no "items", and no name with a dot
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, embedding, mode="mean") for size in lists.values()
        )
        inputs = numbers + embedding * (len(sizes) + len(lists))
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, outputs),
        )  # fmt: skip

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        parts = [batch["numbers"]] if "numbers" in batch else []
        parts += [
            embedding(batch["categories"][:, n]) for n, embedding in enumerate(self.embeddings)
        ]
        bags = zip(self.lists, self.bags, strict=True)
        parts += [bag(batch[name], batch[f"{name}_offsets"]) for name, bag in bags]
        outputs: Tensor = self.layers(torch.cat(parts, 1))
        return outputs

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), folder / "weights.pt")


def main(arguments: Any = None, on_step: Callable[..., Any] = lambda *_: None) -> None:
    """Train. ``on_step(step, batches, loss)`` is called after each step."""
    parser = training.parser_of("runs/tabular", lr=1e-3, batch_size=1024, model=False)
    add = parser.add_argument
    add("--label", help="column of what is predicted; found by common names by default")
    add("--numbers", nargs="*", help="columns of numbers; all others by default")
    add(
        "--categories", nargs="*", help="columns of categories; those of texts and lists by default"
    )
    add("--valid", nargs=3, metavar=("COLUMN", "SIGN", "VALUE"), help="rows that are held out")
    add("--num-shards", type=int, default=24, help="a multiple of every number of ranks of the run")
    add("--columns", type=Path, help="a file for what is fitted; in --output by default")
    args = parser.parse_args(arguments)
    training.start()
    options: dict[str, Any] = {"label": args.label, "batch_size": args.batch_size}
    options |= {
        "num_shards": args.num_shards,
        "numbers": args.numbers,
        "categories": args.categories,
    }
    options["fitted"] = args.columns or args.output / "columns.json"
    options["fitted"].parent.mkdir(parents=True, exist_ok=True)
    if args.valid:
        column, sign, value = args.valid
        options["valid"] = [[column, sign, parsed(value)]]
    pipe = tp.recipe("tabular", args.files, **options)
    model = network_of(pipe)
    run = training.Training(args, model, pipe.repeat(), weight_decay=0.01)
    for (batch,) in run.batches():
        loss = run.backward([batch], loss_of)
        run.update()
        on_step(run.step, [batch], loss)
        if run.logs:
            mean = training.over_ranks(loss).item() / training.RANKS
            training.report(f"step {run.step}: loss {mean:.4f}")
        if run.saves:
            if args.valid:
                held_out = tp.recipe("tabular", args.files, train=False, **options)
                mean = evaluate(model, held_out.to(training.DEVICE))
                training.report(f"step {run.step}: evaluation loss {mean:.4f}")
            run.save()
    run.end()


def parsed(value: str) -> Any:
    """A number or a text, as JSON has it; a text without quotes is one, too."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def network_of(pipe: tp.Pipeline) -> Network:
    """A network for the batches of the recipe."""
    stages: dict[str, Any] = {stage.name: stage for stage in pipe.stages}
    sizes = stages["encode_categories"].sizes if "encode_categories" in stages else {}
    stacked = stages["stacked"]
    single = [sizes[name] for name in stacked.categories]
    lists = {name: size for name, size in sizes.items() if name not in stacked.categories}
    encoder = stages.get("encode_labels")
    return Network(len(stacked.numbers), single, lists, encoder.num_classes if encoder else 1)


def loss_of(model: Any, batch: dict[str, Any], reduction: str = "mean") -> Tensor:
    outputs, labels = model(batch), batch["labels"]
    if labels.is_floating_point():
        return F.mse_loss(outputs[:, 0], labels, reduction=reduction)
    return F.cross_entropy(outputs, labels, reduction=reduction)


@torch.no_grad()
def evaluate(model: Any, held_out: tp.Pipeline) -> float:
    """The mean loss over all rows of all ranks."""
    model.eval()
    sums = training.sums()
    for batch in tp.Loader(held_out):
        sums[0] += loss_of(model, batch, "sum")
        sums[1] += len(batch["labels"])
    model.train()
    return training.mean_over_ranks(sums)


if __name__ == "__main__":
    main()
