"""Fine-tune a causal language model on prompts and responses.

    python -m trainpipes_recipes.train_sft --model Qwen/Qwen3-0.6B --files 'my/*.parquet' --steps 2000
    torchrun --nproc-per-node 8 -m trainpipes_recipes.train_sft --model my-model --files 'my/*.parquet'

A killed run that is started again goes on from its last checkpoint with the very next batch, also
on another number of ranks. At the end, the folder "model" of --output holds the model, as
transformers saves it.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import trainpipes as tp
from trainpipes_recipes import training


def main(arguments: Any = None, on_step: Callable[..., Any] = lambda *_: None) -> None:
    """Train. ``on_step(step, batches, loss)`` is called after each step."""
    parser = training.parser_of("runs/sft", lr=2e-5, batch_size=8)
    add = parser.add_argument
    add("--scratch", action="store_true", help="start with random weights, of the model's config")
    add("--tokenizer", help="name, folder or tokenizer.json; the model's if left out")
    add("--eval-files", nargs="+", help="evaluate on these whenever a checkpoint is saved")
    add("--accumulate", type=training.count, default=1, help="batches of a rank in a step")
    add("--max-length", type=int, default=1024, help="the most tokens of a row")
    args = parser.parse_args(arguments)
    training.start()
    tokenizer = args.tokenizer or args.model
    shape = {"max_length": args.max_length, "batch_size": args.batch_size}
    model = training.model_of(AutoModelForCausalLM, args)
    pipe = tp.recipe("sft", args.files, tokenizer, **shape).repeat()
    run = training.Training(args, model, pipe, betas=(0.9, 0.95))
    for micro in run.batches(args.accumulate):
        loss = training.mean_loss(run, micro)
        run.update()
        on_step(run.step, micro, loss)
        if run.logs:
            training.report(f"step {run.step}: loss {training.over_ranks(loss).item():.4f}")
        if run.saves:
            if args.eval_files:
                held_out = tp.recipe("sft", args.eval_files, tokenizer, train=False, **shape)
                evaluated = evaluate(model, held_out.to(training.DEVICE))
                training.report(f"step {run.step}: evaluation loss {evaluated:.4f}")
            run.save()
    run.end()


@torch.no_grad()
def evaluate(model: Any, held_out: tp.Pipeline) -> float:
    """The mean loss over all targets of all ranks."""
    model.eval()
    sums = training.sums()
    for batch in tp.Loader(held_out):
        sums += torch.stack([training.loss_sum(model, batch), training.targets_of(batch)])
    model.train()
    return training.mean_over_ranks(sums)


if __name__ == "__main__":
    main()
