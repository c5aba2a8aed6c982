"""Train a recognizer of speech, from random weights or from those of a model.

    python -m trainpipes_recipes.train_speech --model openai/whisper-tiny --files speech/train.jsonl
    torchrun --nproc-per-node 8 -m trainpipes_recipes.train_speech --model facebook/wav2vec2-base --ctc \\
        --files speech/train.jsonl --tokenizer "characters:abcdefghijklmnopqrstuvwxyz '" --batch-seconds 120

A killed run that is started again goes on from its last checkpoint with the very next batch, also
on another number of ranks. At the end, the folder "model" of --output holds the model, as
transformers saves it.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCTC, AutoModelForSpeechSeq2Seq

import trainpipes as tp
from trainpipes_recipes import training


def main(arguments: Any = None, on_step: Callable[..., Any] = lambda *_: None) -> None:
    """Train. ``on_step(step, batches, loss)`` is called after each step."""
    parser = training.parser_of("runs/speech", lr=1e-4, batch_size=16)
    add = parser.add_argument
    add("--tokenizer", help="as the recipe takes it; that of the model by default")
    add("--ctc", action="store_true", help="a model of samples with CTC; else of spectrograms")
    add("--batch-seconds", type=float, help="with --ctc, instead of --batch-size")
    add("--max-seconds", type=float, default=30.0, help="longer sounds are left out")
    add("--scratch", action="store_true", help="random weights")
    args = parser.parse_args(arguments)
    training.start()
    kind = AutoModelForCTC if args.ctc else AutoModelForSpeechSeq2Seq
    changes = head(args.model, args.tokenizer or "") if args.ctc else {}
    model = training.model_of(kind, args, **changes)
    options: dict[str, Any] = {"batch_size": args.batch_size, "max_seconds": args.max_seconds}
    if args.ctc:
        options |= {"output": "input_values", "batch_seconds": args.batch_seconds}
        options["mask"] = getattr(model.config, "feat_extract_norm", "layer") != "group"
    else:
        options |= {"num_mels": model.config.num_mel_bins, "augment": True}
    options |= {"tokenizer": args.tokenizer or args.model, "on_error": "skip"}
    pipe = tp.recipe("speech", args.files, **options).repeat()
    run = training.Training(args, model, pipe, find_unused=True)  # layers may be dropped at random
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


def head(model: str, tokenizer: str) -> dict[str, Any]:
    """What the model's configuration needs for CTC."""
    options: dict[str, Any] = {"ctc_zero_infinity": True}  # of texts too long for their sounds
    begin, _, alphabet = tokenizer.partition(":")
    tokens = 2 + len({*alphabet})  # as the recipe numbers characters
    has = AutoConfig.from_pretrained(model).vocab_size
    if begin == "characters" and tokens > has:
        training.report(f"the model has {has} outputs: new ones for {tokens} tokens, to be trained")
        options |= {"vocab_size": tokens, "ignore_mismatched_sizes": True}
    return options


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.autocast(training.DEVICE.type, torch.bfloat16, enabled=training.BF16):
        loss: torch.Tensor = model(**batch).loss
    return loss


if __name__ == "__main__":
    main()
