"""Train with the HF Trainer; killed at any moment, go on, also on another number of processes.

torchrun --nproc-per-node 2 hf_trainer.py --files 'rows/*.parquet' --valid 'valid/*.parquet' --output run
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import trainpipes as tp
from trainpipes.integrations.transformers import Trainer


def pipeline(files: str) -> tp.Pipeline:
    return (
        tp.list_files(files)
        .read_parquet(columns=["text"])
        .sharding_filter(num_shards=24)  # 1, 2, 3, 4, 6, 8, 12 or 24 processes
        .shuffle(buffer_size=10_000, seed=0)
        .tokenize("bytes", max_length=128, labels="text")
        .batch(4)
        .pad_collate()
    )


def main(arguments: list[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", required=True)
    parser.add_argument("--valid", required=True, help="files to evaluate on")
    parser.add_argument("--output", required=True)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--save-steps", type=int, default=10)
    args = parser.parse_args(arguments)
    Path(args.output).mkdir(parents=True, exist_ok=True)

    config = GPT2Config(vocab_size=258, n_positions=128, n_embd=64, n_layer=2, n_head=2)
    trainer = Trainer(
        GPT2LMHeadModel(config),  # put your model here
        TrainingArguments(
            output_dir=args.output,
            num_train_epochs=args.epochs,
            gradient_accumulation_steps=2,
            save_steps=args.save_steps,
            eval_strategy="epoch",
            use_cpu=not torch.cuda.is_available(),  # or each process on CPUs trains by itself
        ),
        train_dataset=pipeline(args.files),
        eval_dataset=pipeline(args.valid),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output))
    return trainer


if __name__ == "__main__":
    main()
