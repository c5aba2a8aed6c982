"""Train a classifier of pictures, from random weights.

    python -m trainpipes_recipes.train_images --model microsoft/resnet-50 --files pets/train --classes 37
    torchrun --nproc-per-node 8 -m trainpipes_recipes.train_images --model my-config --files pets --classes 9

A killed run that is started again goes on from its last checkpoint with the very next batch, also
on another number of ranks. At the end, the folder "model" of --output holds the model, as
transformers saves it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForImageClassification

import trainpipes as tp
from trainpipes_recipes import training


def main(arguments: Any = None, on_step: Callable[..., Any] = lambda *_: None) -> None:
    """Train. ``on_step(step, batches, loss)`` is called after each step."""
    parser = training.parser_of("runs/images", lr=1e-3, batch_size=32)
    add = parser.add_argument
    add("--classes", type=int, required=True, help="labels are below it")
    add("--eval-files", nargs="+", help="evaluate on these whenever a checkpoint is saved")
    add("--size", type=int, default=224, help="pixels of a side")
    args = parser.parse_args(arguments)
    training.start()
    shape: dict[str, Any] = {"size": args.size, "batch_size": args.batch_size}
    config = AutoConfig.from_pretrained(args.model, num_labels=args.classes)
    model = AutoModelForImageClassification.from_config(config)
    pipe = tp.recipe("images", args.files, **shape).repeat()
    if args.eval_files:
        shape["classes"] = folders_of(pipe, args.files)
    run = training.Training(args, model, pipe, weight_decay=0.05)
    for (batch,) in run.batches():
        loss = run.backward([batch], loss_of)
        run.update()
        on_step(run.step, [batch], loss)
        if run.logs:
            training.report(
                f"step {run.step}: loss {training.over_ranks(loss).item() / training.RANKS:.4f}"
            )
        if run.saves:
            if args.eval_files:
                held_out = tp.recipe("images", args.eval_files, train=False, **shape)
                training.report(
                    f"step {run.step}: {evaluate(model, held_out.to(training.DEVICE)):.1%} are right"
                )
            run.save()
    run.end()


def folders_of(pipe: tp.Pipeline, files: list[str]) -> list[str] | None:
    """The folders of the classes, in the order of their numbers; None where rows name their class."""
    if all(getattr(stage, "labels", None) != "folder" for stage in pipe.stages):
        return None
    firsts: dict[str, str] = {}

    def is_first(path: str) -> bool:  # one of each folder, as all of a folder have one class
        return firsts.setdefault(path.rpartition("/")[0], path) == path

    read = tp.list_files(files).filter(is_first).read_images()
    rows = read.select("class", "label").distributed(rank=0, world_size=1)
    return [name for _, name in sorted({(row["label"], row["class"]) for row in rows})]


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.autocast(training.DEVICE.type, torch.bfloat16, enabled=training.BF16):
        logits = model(batch["images"]).logits
    return F.cross_entropy(logits.float(), batch["labels"], label_smoothing=0.1)


@torch.no_grad()
def evaluate(model: Any, held_out: tp.Pipeline) -> float:
    """The part of all pictures of all ranks whose class is found."""
    model.eval()
    counts = training.sums()
    for batch in tp.Loader(held_out):
        counts[0] += (model(batch["images"]).logits.argmax(1) == batch["labels"]).sum()
        counts[1] += len(batch["labels"])
    model.train()
    return training.mean_over_ranks(counts)


if __name__ == "__main__":
    main()
