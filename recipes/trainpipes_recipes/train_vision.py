"""Fine-tune a vision-language model on conversations with pictures.

    python -m trainpipes_recipes.train_vision --model Qwen/Qwen2-VL-2B-Instruct --files 'my/*.parquet'
    torchrun --nproc-per-node 8 -m trainpipes_recipes.train_vision --model my-model --files my --packed

A killed run that is started again goes on from its last checkpoint with the very next batch, also
on another number of ranks. At the end, the folder "model" of --output holds the model, as
transformers saves it.
"""

from collections.abc import Callable
from typing import Any

from transformers import AutoModelForImageTextToText

import trainpipes as tp
from trainpipes_recipes import training


def main(arguments: Any = None, on_step: Callable[..., Any] = lambda *_: None) -> None:
    """Train. ``on_step(step, batches, loss)`` is called after each step."""
    parser = training.parser_of("runs/vision", lr=2e-5, batch_size=8)
    add = parser.add_argument
    add("--scratch", action="store_true", help="start with random weights, of the model's config")
    add("--processor", help="name or folder; the model's if left out")
    add("--accumulate", type=training.count, default=1, help="batches of a rank in a step")
    add("--max-length", type=int, default=4096, help="the most tokens of a row, with its pictures")
    add("--packed", action="store_true", help="let several rows share one of --max-length tokens")
    args = parser.parse_args(arguments)
    training.start()
    pipe = tp.recipe(
        "vision_chat", args.files, args.processor or args.model, max_length=args.max_length,
        batch_size=args.batch_size, packed=args.packed,
    )  # fmt: skip
    model = training.model_of(AutoModelForImageTextToText, args)
    # Rows may have no pictures, and towers have layers whose outputs are not used.
    run = training.Training(args, model, pipe.repeat(), find_unused=True, betas=(0.9, 0.95))
    for micro in run.batches(args.accumulate):
        loss = training.mean_loss(run, micro)
        run.update()
        on_step(run.step, micro, loss)
        if run.logs:
            training.report(f"step {run.step}: loss {training.over_ranks(loss).item():.4f}")
        if run.saves:
            run.save()
    run.end()


if __name__ == "__main__":
    main()
