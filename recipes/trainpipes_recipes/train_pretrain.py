"""Pretrain a causal language model on documents, packed into rows of one length.

    python -m trainpipes_recipes.train_pretrain --model Qwen/Qwen3-0.6B --files 'my/*.parquet' --steps 9000
    torchrun --nproc-per-node 8 -m trainpipes_recipes.train_pretrain --model my-config --files 'my/*.parquet'

A killed run that is started again goes on from its last checkpoint with the very next batch, also
on another number of ranks. At the end, the folder "model" of --output holds the model, as
transformers saves it.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import trainpipes as tp
from trainpipes_recipes import training


def main(arguments: Any = None, on_step: Callable[..., Any] = lambda *_: None) -> None:
    """Train. ``on_step(step, batches, loss)`` is called after each step."""
    parser = training.parser_of("runs/pretrain", lr=3e-4, batch_size=8)
    add = parser.add_argument
    add("--tokenizer", help="name, folder or tokenizer.json; the model's if left out")
    add("--accumulate", type=training.count, default=1, help="batches of a rank in a step")
    add("--max-length", type=int, default=2048, help="tokens of a row")
    add("--attention", default="sdpa", help="or flash_attention_2, or flex_attention")
    args = parser.parse_args(arguments)
    training.start()
    shape = {"max_length": args.max_length, "batch_size": args.batch_size}
    config = AutoConfig.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=args.attention)
    pipe = tp.recipe("pretrain", args.files, args.tokenizer or args.model, **shape)  # has no end
    run = training.Training(args, model, pipe, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = args.batch_size * args.max_length * args.accumulate * training.RANKS  # of a step
    began, waited, logged = time.perf_counter(), run.loader.wait_seconds, run.step
    for micro in run.batches(args.accumulate):
        loss = run.backward(micro, lambda model, batch: loss_of(model, batch) / args.accumulate)
        run.update()
        on_step(run.step, micro, loss)
        if run.logs:
            mean = training.over_ranks(loss).item() / training.RANKS
            seconds, idle = time.perf_counter() - began, run.loader.wait_seconds - waited
            rate = f"{tokens * (run.step - logged) / seconds:,.0f} tokens/s"
            waiting = f"{idle / seconds:.1%} waiting for data"
            training.report(f"step {run.step}: loss {mean:.4f}, {rate}, {waiting}")
            began, waited, logged = time.perf_counter(), run.loader.wait_seconds, run.step
        if run.saves:
            run.save()
    run.end()


def loss_of(model: Any, batch: dict[str, Any]) -> Tensor:
    """The mean loss of a packed batch whose documents do not see each other, by ``position_ids`` or
    with flash attention by ``cu_seqlens``.
    """
    starts, longest = batch["cu_seqlens"], batch["max_seqlen"]
    with torch.autocast(training.DEVICE.type, torch.bfloat16, enabled=training.BF16):
        logits = model(
            batch["input_ids"], position_ids=batch["position_ids"], use_cache=False,
            cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=longest, max_length_k=longest,
        ).logits  # fmt: skip
    scores, wanted = logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()
    loss: Tensor = F.cross_entropy(scores, wanted, reduction="sum")
    loss /= (wanted >= 0).sum().clamp(min=1)
    return loss


if __name__ == "__main__":
    main()
