"""Train a classifier of videos, from random weights.

    python -m trainpipes_recipes.train_video --model MCG-NJU/videomae-base --files clips/train --classes 9
    torchrun --nproc-per-node 8 -m trainpipes_recipes.train_video --model my-config --files clips --classes 9

A killed run that is started again goes on from its last checkpoint with the very next batch, also
on another number of ranks. At the end, the folder "model" of --output holds the model, as
transformers saves it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForVideoClassification

import trainpipes as tp
from trainpipes_recipes import training


def main(arguments: Any = None, on_step: Callable[..., Any] = lambda *_: None) -> None:
    """Train. ``on_step(step, batches, loss)`` is called after each step."""
    parser = training.parser_of("runs/video", lr=1e-3, batch_size=8)
    add = parser.add_argument
    add("--classes", type=int, required=True, help="labels are below it")
    add("--seconds", type=float, help="of a clip at a random place; whole videos by default")
    args = parser.parse_args(arguments)
    training.start()
    config = AutoConfig.from_pretrained(args.model, num_labels=args.classes)
    model = AutoModelForVideoClassification.from_config(config)
    shape = {"num_frames": config.num_frames, "size": config.image_size}
    pipe = tp.recipe(
        "video_classification",
        args.files,
        seconds=args.seconds,
        batch_size=args.batch_size,
        **shape,
    )
    run = training.Training(args, model, pipe.repeat(), weight_decay=0.05)
    for (batch,) in run.batches():
        loss = run.backward([batch], loss_of)
        run.update()
        on_step(run.step, [batch], loss)
        if run.logs:
            mean = training.over_ranks(loss).item() / training.RANKS
            training.report(f"step {run.step}: loss {mean:.4f}")
        if run.saves:
            run.save()
    run.end()


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.autocast(training.DEVICE.type, torch.bfloat16, enabled=training.BF16):
        logits = model(batch["pixel_values"]).logits
    return F.cross_entropy(logits.float(), batch["labels"], label_smoothing=0.1)


if __name__ == "__main__":
    main()
