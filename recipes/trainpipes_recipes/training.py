"""What the training scripts share: a command line, ranks, checkpoints, a log, and a small transformer."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainpipes import Loader, TrainpipesError
from trainpipes.testing import digest

__all__ = [
    "Checkpoints", "Log", "Rank", "Step", "Transformer", "batches", "next_token_loss",
    "options", "read_log", "text_options", "this_rank", "vocabulary_size",
]  # fmt: skip

#: What must be the same after a resume, besides what the loader looks after.
FIXED = ("width", "layers", "heads", "max_length", "vocabulary_size", "seed", "lr")


# The command line


def options(script: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes: files, steps, checkpoints, workers, seed, device.

    Args:
        script: its module in this package.
        doc: its docstring, whose first paragraph is shown by ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m trainpipes_recipes.{script}",
        description=inspect.cleandoc(doc or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--files", nargs="+", required=True, help="paths, folders, globs or URLs")
    add("--batch-size", type=int, default=8, help="rows in a batch of one rank")
    add("--buffer-size", type=int, default=40_960, help="rows that the shuffle mixes, at least")
    add("--num-shards", type=int, default=24, help="a multiple of every number of ranks")
    add("--steps", type=int, default=1000, help="optimiser steps in all, before and after resumes")
    add("--lr", type=float, default=1e-3, help="learning rate")
    runs = Path("checkpoints", script.removeprefix("train_"))
    add("--checkpoint-dir", type=Path, default=runs, help="checkpoint and log")
    add("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    add(
        "--resume",
        choices=("auto", "never", "must"),
        default="auto",
        help="go on from the last checkpoint: if there is one, never, or stop without one",
    )
    add("--log-every", type=int, default=10, help="steps between two lines of the log")
    add("--log-batches", action="store_true", help="log a hash of each batch, which is slow")
    add("--num-workers", type=int, default=0, help="worker processes that make batches")
    add("--seed", type=int, default=0, help="seed of the order of rows and of the model's weights")
    add("--threads", type=int, default=0, help="torch's threads; 0 to leave them as they are")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="to train on")
    return parser


def text_options(script: str, doc: str | None) -> argparse.ArgumentParser:
    """``options``, and what scripts take that train a transformer on text: tokenizer, lengths, size."""
    parser = options(script, doc)
    add = parser.add_argument
    add("--tokenizer", default="bytes", help='a tokenizer.json, or "bytes", which needs none')
    add("--vocabulary-size", type=int, help="token ids; those of the tokenizer if left out")
    add("--max-length", type=int, default=256, help="the most tokens of a row")
    add("--width", type=int, default=128, help="size of a position's vector")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--heads", type=int, default=4, help="attention heads of a block")
    return parser


def vocabulary_size(args: argparse.Namespace) -> int:
    """How many token ids there are: ``--vocabulary-size``, or those of the tokenizer."""
    if args.vocabulary_size:
        return int(args.vocabulary_size)
    if args.tokenizer == "bytes":
        return 258  # the bytes, end-of-text, padding
    path = Path(args.tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        from tokenizers import Tokenizer

        ids: list[int] = list(Tokenizer.from_file(str(path)).get_vocab().values())
        return max(ids) + 1
    raise SystemExit(
        f"how many ids {args.tokenizer} has cannot be told from here: pass --vocabulary-size"
    )


# Ranks


@dataclass(frozen=True)
class Rank:
    """This process among all that train.

    Args:
        number: from 0; that one saves, and reports.
        ranks: how many there are.
        device: what it trains on.
        wrapped: models whose gradients are the mean of all ranks; they can do no steps after the end.
    """

    number: int
    ranks: int
    device: torch.device
    wrapped: list[DistributedDataParallel] = field(default_factory=list)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model on the device; with several ranks one whose gradients are the mean of all."""
        model = model.to(self.device)
        if self.ranks == 1:
            return model
        self.wrapped.append(DistributedDataParallel(model))
        return self.wrapped[-1]

    def move(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch on the device."""
        return {
            name: value.to(self.device, non_blocking=True) if torch.is_tensor(value) else value
            for name, value in batch.items()
        }

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in their order. A collective: all ranks call it."""
        values: list[Any] = [value] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(values, value)
        return values


@contextmanager
def this_rank(args: argparse.Namespace) -> Iterator[Rank]:
    """Seed torch, and join the other ranks if ``torchrun`` started this process; leave them at the end.

    What goes wrong with the data ends the script with one line, not with a traceback.

    Args:
        args: of the command line: ``device``, ``seed`` and ``threads``.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(args.device)
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:  # so that a resumed run has the same losses, to the last bit
        torch.use_deterministic_algorithms(True)
        # Costs a sixth of the time, and nothing here reads memory that it has not written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = Rank(dist.get_rank() if ranks > 1 else 0, ranks, device)
    try:
        yield rank
    except TrainpipesError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    finally:
        if ranks > 1:
            for model in rank.wrapped:
                # The last to hold the group must not be this: it waits for gloo's threads without letting
                # them have the interpreter, and the process may never end (torch 2.13).
                del model.logger, model.reducer
            dist.destroy_process_group()


def batches(loader: Loader, rank: Rank, steps: int) -> Iterator[Any]:
    """Batches on the device, epoch after epoch; each epoch has another order.

    The loader stands after the last batch that was given, so that its state can be saved at any step.

    Args:
        loader: of the batches.
        rank: this process.
        steps: how many to give.
    """
    given = 0
    while given < steps:
        before = given
        for batch in loader:
            given += 1
            yield rank.move(batch)
            if given == steps:
                return
        if given == before:
            raise SystemExit(
                "an epoch has no batch: give --batch-size that is at most the rows of each rank"
            )


# Checkpoints and the log


class Checkpoints:
    """The last checkpoint of a run: ``checkpoint.pt``, which rank 0 writes for all ranks.

    It holds the loader's position, the state of each part, and torch's random state of each rank. It
    may be loaded on another number of ranks, if that divides the pipeline's ``num_shards``.

    Args:
        args: of the command line: ``checkpoint_dir``, a folder that all ranks share; ``resume``; and what
            must be the same after a resume.
        rank: this process.
        loader: whose position is saved.
        parts: what else has a state, each under a name of yours: ``model=model``.
    """

    def __init__(self, args: argparse.Namespace, rank: Rank, loader: Loader, **parts: Any) -> None:
        self.path: Path = args.checkpoint_dir / "checkpoint.pt"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._how: str = args.resume
        self._rank = rank
        self._loader = loader
        self._settings = {name: value for name, value in vars(args).items() if name in FIXED}
        # Weights have the same names whether or not a model is wrapped for several ranks.
        self._parts = {
            name: part.module if isinstance(part, DistributedDataParallel) else part
            for name, part in parts.items()
        }

    def save(self, step: int) -> None:
        """Replace the last checkpoint by one of now, at once or not at all. All ranks call it after the
        same step."""
        content = {
            "step": step,
            "settings": self._settings,
            "loader": self._loader.gather_state(),
            "random": self._rank.gather(_random_state(self._rank.device)),
        }
        if self._rank.number:
            return
        content["parts"] = {name: part.state_dict() for name, part in self._parts.items()}
        beside = self.path.with_suffix(".new")
        with open(beside, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path)

    def resume(self) -> int:
        """Go back to the last checkpoint: if there is one, or as ``--resume`` says.

        Returns:
            The step that it was saved after; 0 if the run starts.
        """
        found = self._how != "never" and self.path.exists()
        if self._how == "must" and not found:
            raise SystemExit(
                f"--resume must: a checkpoint is needed, and {self.path} does not exist"
            )
        step = self._load() if found else 0
        steps = self._rank.gather(step)
        if len(set(steps)) > 1:
            raise SystemExit(
                f"{self.path}: ranks found checkpoints of steps {steps}; --checkpoint-dir is a folder "
                "that all ranks share"
            )
        return step

    def _load(self) -> int:
        content = torch.load(self.path, weights_only=True, map_location="cpu")
        for name, saved in content["settings"].items():
            if self._settings.get(name) != saved:
                raise SystemExit(
                    f"{self.path} is of a run with --{name.replace('_', '-')} {saved}, this one has "
                    f"{self._settings.get(name)}: use the same, or another --checkpoint-dir"
                )
        self._loader.load_state_dict(content["loader"])
        for name, part in self._parts.items():
            part.load_state_dict(content["parts"][name])
        number = self._rank.number
        if number < len(content["random"]):
            state = content["random"][number]
            torch.set_rng_state(state["cpu"])
            if "cuda" in state and self._rank.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda"], self._rank.device)
        else:  # a rank that was not there: numbers of its own
            torch.manual_seed(torch.initial_seed() + number)
        return int(content["step"])


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


@dataclass(frozen=True)
class Step:
    """One line of a log.

    Args:
        number: of the step, from 1.
        batch: hash of all tensors of its batch, with ``--log-batches``; else "".
        loss: before the step.
    """

    number: int
    batch: str
    loss: float


class Log:
    """``log.jsonl``: a JSON line every ``--log-every`` steps, with its number and its loss, which is printed,
    too. Asking for a loss waits for the device. With ``--log-batches`` all ranks write, the others to
    ``log-1.jsonl`` and so on.

    Args:
        args: of the command line: ``checkpoint_dir``, where the log is, ``steps``, and what is logged.
        rank: this process.
        after: the last step that is done. Steps after it that the log holds were made by a run that was
            killed after its last checkpoint, and are taken out.
    """

    def __init__(self, args: argparse.Namespace, rank: Rank, *, after: int) -> None:
        self._args = args
        self._rank = rank
        self._after, self._started = after, time.monotonic()
        if after and rank.number == 0:
            print(f"goes on after step {after}, from the checkpoint in {args.checkpoint_dir}")
        path: Path = args.checkpoint_dir / (
            f"log-{rank.number}.jsonl" if rank.number else "log.jsonl"
        )
        if rank.number == 0:  # and those of ranks that were there before
            for other in args.checkpoint_dir.glob("log-*.jsonl"):
                if int(other.stem.removeprefix("log-")) >= rank.ranks:
                    _forget(other, after)
        _forget(path, after)
        writes = rank.number == 0 or args.log_batches
        self._file = open(path, "a") if writes else None  # noqa: SIM115

    def write(self, step: int, batch: Any, loss: Tensor) -> None:
        """One step, as it was made."""
        if self._file is None or (step % self._args.log_every and step != self._args.steps):
            return
        line: dict[str, Any] = {"step": step, "loss": loss.item()}
        if self._args.log_batches:
            line["batch"] = digest(batch)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._rank.number == 0:
            rate = (step - self._after) / (time.monotonic() - self._started)
            loss_now = f"loss {line['loss']:.3f}"
            print(f"step {step} of {self._args.steps}, {loss_now}, {rate:.1f} steps/s", flush=True)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if kind is None and self._rank.number == 0:
            print(
                f"{self._args.steps} steps are done; checkpoint and log are in "
                f"{self._args.checkpoint_dir}"
            )


def read_log(path: Path) -> list[Step]:
    """The steps of a log; a last line that was cut short is left out."""
    found = [json.loads(line) for line in _whole_lines(path)]
    return [Step(line["step"], line.get("batch", ""), line["loss"]) for line in found]


def _whole_lines(path: Path) -> list[str]:
    lines = path.read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]  # a kill may have cut the last one


def _forget(path: Path, after: int) -> None:
    """Take the steps after one from a log."""
    if path.exists():
        beside = path.with_suffix(".new")
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= after]
        beside.write_text("".join(kept))
        os.replace(beside, path)


# The model


def next_token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the token after each position; 0 where no label counts.

    Args:
        scores: ``[B, L, V]``; those of position t are compared with the label of t + 1.
        labels: ``[B, L]``, each at the place of the token that it is; -100 where it is not in the loss.
    """
    wanted = labels[:, 1:].flatten()
    total = F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), wanted, reduction="sum")
    return total / (wanted >= 0).sum().clamp(min=1)


class Transformer(nn.Module):
    """Scores of tokens, to try things on: put your own model in its place.

    Args:
        vocabulary: V, token ids.
        max_length: positions; rows may be shorter.
        width: D, size of a position's vector.
        layers: blocks.
        heads: attention heads of each block.
        causal: whether a position sees those before it only; False for masked tokens.
    """

    def __init__(
        self,
        vocabulary: int,
        max_length: int,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        *,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(
        self,
        input_ids: Tensor,
        segments: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """``[B, L]`` ids to ``[B, L, V]`` scores of tokens (logits).

        Args:
            input_ids: ``[B, L]``.
            segments: ``[B, L]``; a position sees those of its own number only: ``attention_mask``, or
                the ``segment_ids`` of packed rows. A causal model needs none where padding comes last.
            position_ids: ``[B, L]``; 0, 1, 2, … if left out.
        """
        length = input_ids.shape[1]
        places = (
            self.positions.weight[:length] if position_ids is None else self.positions(position_ids)
        )
        x = self.tokens(input_ids) + places
        seen = None
        if segments is not None:
            seen = segments[:, :, None] == segments[:, None, :]  # [B, L, L]
            if self.causal:
                seen = seen & torch.ones_like(seen[0]).tril()
        for block in self.blocks:
            x = block(x, seen, self.causal and seen is None)
        scores: Tensor = self.norm(x) @ self.tokens.weight.T
        return scores


class _Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor, seen: Tensor | None, causal: bool) -> Tensor:
        """``[B, L, D]`` to the same; ``seen`` ``[B, L, L]`` is True where a position sees another."""
        B, L, D = x.shape
        q, k, v = (
            self.queries_keys_values(self.norm(x))
            .view(B, L, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        mask = None if seen is None else seen[:, None]
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        x = x + self.mixed(attended.transpose(1, 2).reshape(B, L, D))
        out: Tensor = x + self.perceptron(x)
        return out
