"""Does a GPU at full speed wait for data?

    python -m benchmarks.gpu [--device cuda] [--steps 300] [--rows 16] [--small] [--folder build/benchmarks]

A transformer of 98 M parameters (bf16, SDPA, compiled where that works) trains on packed rows of 1,024
tokens, pinned and copied ahead by ``.pin().to(device)``. The data, and a tokenizer, are made first. Run from
the repository's root; needs torch, pyarrow, torchdata and tokenizers, and PYTHONPATH=pipes where trainpipes
is not installed. About 5 minutes on a large GPU. ``--device cpu --small`` takes seconds, and only shows that
it runs.

Printed for each source: tokens a second; the share of the time in which the device had ended one step and not
begun the next; the longest such gap; and the pinned memory. Times are the device's own (CUDA events): a
gap counts from the end of a step to the moment at which the next batch is there, whatever the process does
meanwhile. "the same batch" has no data to wait for: what it shows is what the loop itself costs. On a CUDA
device the exit status is 1 if less than 1 % is not kept, or pinned memory is beyond its bound.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainpipes as tp
from benchmarks.corpus import TINY, Data, Sizes, make

__all__ = ["Figures", "main", "measure", "pinned_bound"]

#: The share of the time that a device may wait.
PROMISE = 0.01
#: Batches that are copied ahead.
DEPTH = 2
WARM_UP = 20
SIZES = Sizes(ids_rows=200_000, text_rows=100_000, buffer=8_192, corpus_bytes=24 << 20)


@dataclass(frozen=True)
class Shape:
    """Of the model and its batches: ``layers`` of width ``width``, rows of ``length`` tokens."""

    layers: int
    width: int
    heads: int
    length: int


LARGE, SMALL = Shape(12, 768, 12, 1024), Shape(2, 64, 2, 128)


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, L, width]
        rows, length, width = x.shape
        qkv = (
            self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        found = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """A GPT; its loss on a packed batch. Attention is causal over the whole row."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor, places: Tensor, labels: Tensor) -> Tensor:  # each [B, L]
        x = self.norm(self.blocks(self.tokens(ids) + self.places(places)))
        scores = F.linear(x[:, :-1], self.tokens.weight).flatten(0, 1)
        return F.cross_entropy(scores.float(), labels[:, 1:].flatten(), ignore_index=-100)


class Clock(Protocol):
    """Marks moments, and says afterwards how many seconds lie between two."""

    def mark(self) -> Any: ...
    def finish(self) -> None: ...
    def between(self, first: Any, last: Any) -> float: ...


class DeviceClock:
    """The device's: a moment is when it comes to the mark among the work that is queued."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        torch.cuda.synchronize()

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return first.elapsed_time(last) / 1000


class ProcessClock:
    """The process's, for a device that is the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def finish(self) -> None:
        pass

    def between(self, first: float, last: float) -> float:
        return last - first


@dataclass(frozen=True)
class Figures:
    """Of one source. Seconds; ``share`` is that of the time in which the device waited for a batch."""

    steps: int
    seconds: float
    share: float
    longest: float


def measure(
    batches: Iterator[Any], step: Callable[[Any], None], clock: Clock, steps: int, warm_up: int
) -> Figures:
    """Train for some steps, and see how long the device waits between two of them."""
    for batch in itertools.islice(batches, warm_up):
        step(batch)
    ends, begins = [clock.mark()], []
    for batch in itertools.islice(batches, steps):
        begins.append(clock.mark())
        step(batch)
        ends.append(clock.mark())
    clock.finish()
    waited = [clock.between(end, begin) for end, begin in zip(ends, begins, strict=False)]
    seconds = clock.between(ends[0], ends[-1])
    return Figures(len(begins), seconds, sum(waited) / seconds, max(waited))


def pinned_bound(batch: Any, depth: int) -> int:
    """Bytes that ``.pin().to(device, depth=depth)`` may have pinned at a time: torch rounds each tensor's up
    to a power of two."""
    sizes = [value.nbytes for value in batch.values() if isinstance(value, Tensor)]
    return (2 * depth + 3) * sum(1 << max(0, size - 1).bit_length() for size in sizes)


class Bench:
    """The sources, and a model that trains on them."""

    def __init__(self, device: str, small: bool, rows: int, folder: Path) -> None:
        self.shape = SMALL if small else LARGE
        sizes = TINY if small else SIZES
        self.rows, self.device, self.cuda = rows, device, device.startswith("cuda")
        root = folder / f"data-gpu-{'small' if small else 'large'}"
        make(root, sizes, _tell)
        self.ids, self.text = Data(root, False, sizes.buffer), Data(root, True, sizes.buffer)
        self.cache = root / "cache"
        self.clock: Clock = DeviceClock() if self.cuda else ProcessClock()
        self.vocabulary = sizes.vocabulary

    def packed(self, rows: tp.Pipeline) -> tp.Pipeline:
        """Rows of token ids as batches on the device, without end."""
        pipe = rows.sharding_filter(24).shuffle(self.ids.buffer, seed=0).repeat()
        pipe = pipe.pack(self.shape.length).batch(self.rows, drop_last=True).pad_collate()
        return (pipe.pin() if self.cuda else pipe).to(self.device, depth=DEPTH)

    def sources(self) -> dict[str, tp.Pipeline]:
        ids = tp.list_files(self.ids.files).read_parquet(columns=["input_ids"])
        text = self.tokenized()
        return {
            "pretokenised Parquet": self.packed(ids),
            "text, cached": self.packed(text.cache(self.cache)),
            "text, tokenized on the way": self.packed(text),
        }

    def fill_cache(self) -> None:
        """Go through the texts once, as a first epoch does."""
        for _ in self.tokenized().cache(self.cache).batch(1024):
            pass

    def tokenized(self) -> tp.Pipeline:
        text = tp.list_files(self.text.files).read_parquet(columns=["text"])
        return text.tokenize(self.text.tokenizer, columns="text")

    def trainer(self, batch: Any) -> Callable[[Any], None]:
        """A model and its optimizer: what trains on a batch. Compiled, if that works here."""
        torch.manual_seed(0)
        model = Transformer(self.shape, self.vocabulary).to(self.device)
        count = sum(parameter.numel() for parameter in model.parameters())
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.cuda)
        kind = torch.device(self.device).type

        def training(loss_of: Callable[..., Tensor]) -> Callable[[Any], None]:
            def step(batch: Any) -> None:
                with torch.autocast(kind, torch.bfloat16, enabled=self.cuda):
                    loss = loss_of(batch["input_ids"], batch["position_ids"], batch["labels"])
                loss.backward()
                adam.step()
                adam.zero_grad(set_to_none=True)

            return step

        how = "not compiled"
        step = training(model)
        if self.cuda:
            _tell("compiling the model")
            try:
                compiled = training(torch.compile(model))
                compiled(batch)
                step, how = compiled, "compiled"
            except Exception as error:
                how = f"not compiled ({type(error).__name__})"
        print(
            f"{count / 1e6:.1f} M parameters, {how}; {self.rows} rows of {self.shape.length} tokens a step"
        )
        return step


def main(arguments: list[str] | None = None) -> int:
    """Measure all sources, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--small", action="store_true", help="a toy: seconds on a CPU")
    parser.add_argument("--steps", type=int, help="for each source [300; small: 10]")
    parser.add_argument("--rows", type=int, help="of a batch [16; small: 4]")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each batch is late")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/benchmarks"), help="for the data"
    )
    given = parser.parse_args(arguments)
    if given.device.startswith("cuda"):
        if not torch.cuda.is_available():
            parser.error(f"torch {torch.__version__} sees no CUDA device: try --device cpu --small")
        torch.cuda.set_device(torch.device(given.device).index or 0)
        torch.set_float32_matmul_precision("high")
    elif given.device != "cpu":
        parser.error(f"times are taken on cuda or cpu, got {given.device!r}")
    if given.small and given.device == "cpu":
        torch.set_num_threads(1)  # several take longer to meet than the toy takes to train
    bench = Bench(given.device, given.small, given.rows or (4 if given.small else 16), given.folder)
    steps = given.steps or (10 if given.small else 300)
    warm_up = 2 if given.small else WARM_UP
    name = (
        torch.cuda.get_device_name() if bench.cuda else platform.processor() or platform.machine()
    )
    print(f"{name}; torch {torch.__version__}, trainpipes {tp.__version__}")
    _tell("filling the cache")
    bench.fill_cache()
    sources = bench.sources()
    first = next(iter(sources["pretokenised Parquet"]))
    bound = pinned_bound(first, DEPTH)
    step = bench.trainer(first)
    print("| source | tokens/s | waiting | longest, ms | pinned, KiB |\n|---|--:|--:|--:|--:|")
    kept = True
    everything = {"the same batch": itertools.repeat(first), **sources}
    for source, batches in everything.items():
        _tell(source)
        found = measure(_late(batches, given.delay), step, bench.clock, steps, warm_up)
        pinned = _pinned(bench.cuda)
        tokens = found.steps * bench.rows * bench.shape.length / found.seconds
        shown = "not known" if pinned is None else f"{pinned / 1024:,.0f}"
        _tell("")
        print(
            f"| {source} | {tokens:,.0f} | {found.share:.3%} | {found.longest * 1e3:.2f} | {shown} |",
            flush=True,
        )
        promised = source in ("pretokenised Parquet", "text, cached")
        kept &= not promised or (found.share < PROMISE and (pinned or 0) <= bound)
    print(f"Pinned memory may reach {bound / 1024:,.0f} KiB with {DEPTH} batches copied ahead.")
    if not bench.cuda:
        return 0
    print(f"Less than {PROMISE:.0%} waiting, within that bound: {'kept' if kept else 'NOT KEPT'}")
    return 0 if kept else 1


def _late(batches: Iterable[Any], delay: float) -> Iterator[Any]:
    for batch in batches:
        if delay:
            time.sleep(delay)
        yield batch


def _pinned(cuda: bool) -> int | None:
    """Bytes that are pinned: what became free is used again. None if torch can't say."""
    if not cuda:
        return 0
    if not hasattr(torch.cuda, "host_memory_stats"):
        return None
    found = torch.cuda.host_memory_stats().get("allocated_bytes.current")
    return None if found is None else int(found)


def _tell(message: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
