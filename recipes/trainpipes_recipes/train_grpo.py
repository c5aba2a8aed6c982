"""Train a causal language model on rewards of its own answers, by GRPO, with rollouts in threads.

    python -m trainpipes_recipes.train_grpo --model samples/model --scratch --tokenizer samples/tokenizer \\
        --files sums.parquet --steps 100

Rows have a prompt, and an answer or a response. Rollouts take as long as they take, and finish in any
order; a group of answers without variance teaches nothing, and another one takes its place. Kill it at
any time, and start it again: it goes on from its last checkpoint, and each prompt comes once an epoch.
"""

import argparse
import queue as queues
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import trainpipes as tp
from trainpipes_recipes.training import (
    CLIP,
    DEVICE,
    LOG_EVERY,
    model_of,
    parser_of,
    report,
    require_finite,
    resume,
    save,
)


def main(
    arguments: Any = None,
    reward: Callable[[str, Any], float] | None = None,
    on_step: Callable[..., Any] = lambda *_: None,
) -> None:
    """Train. ``reward(text, row)`` judges an answer; ``on_step(step, groups, mean_reward)`` is called after
    each step."""
    parser = parser_of("runs/grpo", lr=1e-3, batch_size=4)
    parser.set_defaults(steps=100, save_every=10)
    add = parser.add_argument
    add("--scratch", action="store_true", help="start with random weights, of the model's config")
    add("--tokenizer", help="name or folder; the model's if left out")
    add("--generations", type=int, default=8, help="answers to each prompt")
    add("--max-length", type=int, default=256, help="the most tokens of a prompt")
    add("--max-tokens", type=int, default=16, help="of an answer")
    add("--threads", type=int, default=4, help="rollouts at a time")
    add("--latency", type=float, default=0.0, help="seconds that a rollout waits, at most")
    add("--retire", action="store_true", help="prompts that are always answered do not come again")
    args = parser.parse_args(arguments)
    if args.generations < 2:
        parser.error("--generations must be 2 or more, since an answer is judged beside others")

    torch.manual_seed(0)
    model = model_of(AutoModelForCausalLM, args)
    model.to(DEVICE).eval()  # no dropout, so that the policy is the one that answered
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    shape = {"max_length": args.max_length, "batch_size": None}  # single prompts
    rows = tp.recipe("prompts", args.files, tokenizer, on_error="skip", **shape)
    most = 4 * args.batch_size + args.threads
    queue = tp.WorkQueue(
        tp.Loader(rows, num_workers=args.num_workers), max_in_flight=most, epochs=None
    )
    parts = {"model": model, "optimizer": optimizer, "queue": queue}
    step = resume(args.output, parts)

    weights = threading.Lock()  # held while the model answers, or changes
    groups: queues.Queue[Any] = queues.Queue(2 * args.batch_size)  # so that rollouts are not stale

    def roll_out() -> None:
        try:
            for work in queue:
                time.sleep(random.random() * args.latency)
                with weights:
                    ids = answers(model, work.item["input_ids"], args)
                texts = tokenizer.batch_decode(ids[:, len(work.item["input_ids"]) :])
                judged = [(reward or likeness)(text, work.item) for text in texts]
                groups.put((work, ids, torch.tensor(judged, dtype=torch.float32)))
        except BaseException as error:
            groups.put((None, error, None))

    threads = [threading.Thread(target=roll_out, daemon=True) for _ in range(args.threads)]
    for thread in threads:
        thread.start()
    try:
        while step < args.steps:
            chosen: list[Any] = []
            while len(chosen) < args.batch_size:
                try:
                    work, ids, rewards = groups.get(timeout=1)
                except queues.Empty:
                    if any(thread.is_alive() for thread in threads):
                        continue
                    break
                if work is None:  # its thread ended
                    raise ids
                if rewards.max() - rewards.min() > 0:
                    chosen.append((work, ids, rewards))
                elif args.retire and rewards.min() >= 1:
                    queue.retire(work.key)
                else:
                    queue.done(work.key)  # nothing to learn of it: another one fills up the step
            if len(chosen) < args.batch_size:
                report("all prompts are answered: nothing is left to train on")
                save(args.output, step, parts, args.keep)
                break
            step += 1
            with weights:
                for work, ids, rewards in chosen:
                    total = loss(model, ids, rewards, len(work.item["input_ids"]))
                    (total / len(chosen)).backward()
                require_finite(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP), step)
                optimizer.step()
                optimizer.zero_grad()
            for work, *_ in chosen:
                queue.done(work.key)
            mean = float(torch.cat([rewards for *_, rewards in chosen]).mean())
            on_step(step, chosen, mean)
            if step % LOG_EVERY == 0:
                report(f"step {step}: reward {mean:.3f}")
            if step % args.save_every == 0 or step == args.steps:
                save(args.output, step, parts, args.keep)
    finally:
        queue.close()
        while any(thread.is_alive() for thread in threads):
            with suppress(queues.Empty):
                groups.get(timeout=0.1)  # a thread may wait for room
    model.save_pretrained(args.output / "model")


@torch.no_grad()
def answers(model: Any, prompt: Sequence[int], args: argparse.Namespace) -> Tensor:
    """A prompt's ids with those of each answer, ``[generations, L]``."""
    ids = torch.tensor([list(prompt)], device=DEVICE)
    return model.generate(  # type: ignore[no-any-return]
        ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=args.max_tokens,
        min_new_tokens=args.max_tokens, num_return_sequences=args.generations, pad_token_id=0,
    )  # fmt: skip


def likeness(text: str, row: Any) -> float:
    """The rule: 1 if an answer contains that of the row; else how much of it is alike."""
    wanted = str(row["answer"] if "answer" in row else row["response"])
    return 1.0 if wanted in text else 0.9 * SequenceMatcher(None, text, wanted[:200]).ratio()


def loss(model: Any, ids: Tensor, rewards: Tensor, start: int) -> Tensor:
    """The policy gradient of one group: each answer's log-probability by its advantage in the group."""
    advantage = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).to(ids.device)
    logits = model(ids).logits[:, start - 1 : -1].float()
    chosen = torch.gather(logits.log_softmax(-1), 2, ids[:, start:, None])[..., 0]
    return -(advantage[:, None] * chosen).mean()


if __name__ == "__main__":
    main()
