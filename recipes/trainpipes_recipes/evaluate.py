"""Score every row of some files by the model that ``train_sft`` has saved.

    python -m trainpipes_recipes.evaluate --files 'held-out/*.parquet' --checkpoint-dir checkpoints/sft
    torchrun --nproc-per-node 2 -m trainpipes_recipes.evaluate --files 'held-out/*.parquet' ...

Each rank scores its own rows, each row once. What they found is gathered after the loop: ``scores.jsonl`` has
a line for each row, in file order, and the mean over all tokens is told. The model is for trying things out:
copy this file, and put yours in its place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from trainpipes import Loader
from trainpipes_recipes import training
from trainpipes_recipes.evaluation import evaluation


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> float:
    """Score, as the command line says.

    Returns:
        The mean loss of a token of the responses.
    """
    parser = training.text_options("evaluate", __doc__)
    parser.add_argument("--prompt", help="column of the prompt; found by its name if left out")
    parser.add_argument("--response", help="column to score; found by its name if left out")
    args = parser.parse_args(arguments)
    with training.this_rank(args) as rank:
        path = args.checkpoint_dir / "checkpoint.pt"
        if not path.exists():
            raise SystemExit(f"there is no {path}: train with train_sft, or name --checkpoint-dir")
        saved = torch.load(path, weights_only=True, map_location="cpu")
        had = saved["settings"]
        if "vocabulary_size" not in had:
            raise SystemExit(f"{path} is of no model that train_sft has trained")
        vocabulary = had["vocabulary_size"] or training.vocabulary_size(args)
        size = had["max_length"], had["width"], had["layers"], had["heads"]
        model = training.Transformer(vocabulary, *size).to(rank.device).eval()
        model.load_state_dict(saved["parts"]["model"])

        pipe = evaluation(
            args.files,
            args.tokenizer,
            prompt=args.prompt,
            response=args.response,
            max_length=had["max_length"],
            batch_size=args.batch_size,
        )
        found: list[tuple[int, float, int]] = []  # row, sum of its tokens' losses, tokens
        for batch in Loader(pipe, num_workers=args.num_workers):
            batch = rank.move(batch)
            scores = model(batch["input_ids"])[:, :-1]  # [B, L - 1, V]
            labels = batch["labels"][:, 1:]
            losses = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")  # 0 at -100
            sums, counts = losses.double().sum(1), (labels >= 0).sum(1)
            found += zip(batch["row"].tolist(), sums.tolist(), counts.tolist(), strict=True)

        # Ranks may end a batch apart: they wait for each other here, and not in the loop.
        rows = sorted(row for part in rank.gather(found) for row in part)
        tokens = sum(count for _, _, count in rows)
        mean: float = sum(loss for _, loss, _ in rows) / max(1, tokens)
        if rank.number == 0:
            with open(args.checkpoint_dir / "scores.jsonl", "w") as file:
                for row, loss, count in rows:
                    line = {"row": row, "loss": loss / max(1, count), "tokens": count}
                    file.write(json.dumps(line) + "\n")
            print(f"{len(rows):,} rows, {tokens:,} tokens, loss {mean:.4f}")
        return mean


if __name__ == "__main__":
    main()
