"""Fine-tune a small Llama with TRL on prompts and responses; killed at any moment, go on.

    python -m trainpipes_recipes.samples samples
    torchrun --nproc-per-node 2 trl_sft.py --files samples/functions --tokenizer samples/tokenizer

Started again, it goes on from its last checkpoint, also on another number of processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig

import trainpipes as tp
from trainpipes.integrations.trl import SFTTrainer


def main(argv: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", required=True, help="with columns prompt and response")
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer of transformers")
    parser.add_argument("--output", default="run", help="folder of the checkpoints")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a process's batch")
    args = parser.parse_args(argv)
    Path(args.output).mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    pipe = tp.recipe(
        "sft", files=args.files, tokenizer=tokenizer, batch_size=args.batch_size, max_length=256
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    arguments = SFTConfig(
        output_dir=args.output, num_train_epochs=args.epochs, save_steps=args.save_steps,
        gradient_accumulation_steps=2, learning_rate=1e-3, logging_steps=1, bf16=False, report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = SFTTrainer(
        LlamaForCausalLM(config), arguments, train_dataset=pipe, processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output))
    return trainer


if __name__ == "__main__":
    main()
