"""Train with Accelerate; killed at any moment, go on, also on another number of processes.

accelerate launch accelerate_loop.py --train 'rows/*.parquet' --valid valid.parquet --folder run

On CPUs write ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 in place of accelerate launch.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import trainpipes as tp
from trainpipes.integrations.accelerate import loader


class NextByte(nn.Sequential):  # put your model here
    def forward(self, input_ids, attention_mask):  # the loss of each row, [B]
        target = input_ids[:, 1:].masked_fill(attention_mask[:, 1:] == 0, -100)
        scores = super().forward(input_ids[:, :-1])  # [B, L - 1, V]
        return nn.functional.cross_entropy(scores.mT, target, reduction="none").mean(1)


def main(arguments=None):
    parser = argparse.ArgumentParser()
    for option in ("--train", "--valid", "--folder"):
        parser.add_argument(option, required=True, type=Path)
    args = parser.parse_args(arguments)
    train = tp.list_files(args.train).read_parquet().sharding_filter(24).shuffle(10_000, seed=0)
    valid = tp.list_files(args.valid).read_parquet().sharding_filter(24, tail="uneven")
    train, valid = (p.tokenize("bytes").batch(4).pad_collate(max_length=64) for p in (train, valid))
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = NextByte(nn.Embedding(258, 32), nn.Linear(32, 258))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train, valid = loader(train, accelerator), loader(valid, accelerator)

    step, unfinished = 0, args.folder / "unfinished"
    if saved := sorted(args.folder.glob("step-*")):
        accelerator.load_state(saved[-1])
        step = int(saved[-1].name.removeprefix("step-"))
    for epoch in range(train.epoch, 2):
        for batch in train:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:  # no gradients are held: the time to save
                step += 1
                accelerator.save_state(unfinished)
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    unfinished.rename(args.folder / f"step-{step:08}")  # whole, or not there
        with torch.no_grad():  # every row once, on any number of processes
            losses = torch.cat([accelerator.gather_for_metrics(model(**batch)) for batch in valid])
        accelerator.print(f"epoch {epoch}: loss {losses.mean():.4f} of {len(losses)} rows")


if __name__ == "__main__":
    main()
