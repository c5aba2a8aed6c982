"""Makes the pictures of these pages: ``python docs/pictures/make.py``. A test tells which is out of date.

Figures hold a digest of what they show, so that any version of Matplotlib may draw them.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Callable
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import trainpipes as tp

sys.path.insert(0, str(Path(__file__).parent))
import concept_drawings
import engine_drawings

__all__ = ["DRAWINGS", "PICTURES", "content"]

FOLDER = Path(__file__).parent
#: Where the figures stand that are drawn as bars.
TABLE = FOLDER.parents[1] / "benchmarks" / "README.md"

#: Of a figure in inches: words are large enough to read on a phone.
WIDTH = 5.6
#: Colours that people who do not see all of them can tell apart (Okabe and Ito, "Color Universal Design");
#: of lines that guide the eye, and of text.
BLUE, ORANGE, GREY, INK = "#0072B2", "#E69F00", "#9CA3AF", "#1F2937"
#: What replaces a colour where the reader's screen is dark.
DARK = {
    "#ffffff": "#14181f",
    "#000000": "#cbd5e1",
    INK: "#f1f5f9",
    GREY: "#9aa4b2",
    BLUE: "#56b4e9",
    "#1d3557": "#2f81f7",
    "#d62828": "#ff7b72",
}


def shuffle() -> Figure:
    """Where rows come against where they stand in the files."""
    rows = tp.from_tensors(row=range(24_000)).sharding_filter(8)
    figure = Figure(figsize=(WIDTH, 8.6), layout="constrained")
    above, below = figure.subplots(2, 1)
    for ax, shuffled, title in (
        (above, rows.shuffle(500, seed=0), "shuffle(500): rows stay near their place"),
        (below, rows.shuffle(scope="global", seed=0), 'shuffle(scope="global"): as a random order'),
    ):
        order = np.concatenate([batch["row"] for batch in shuffled.batch(32).collate()])
        taken = np.unique(np.linspace(0, len(order) - 1, 10_000).astype(np.int64))
        ax.scatter(taken, order[taken], s=0.6, color=BLUE, linewidths=0, rasterized=True)
        ax.set_title(title, loc="left", color=INK)
        ax.set_xlabel("place in the order in which rows come")
        ax.set_ylabel("number of the row in the files")
    return figure


def documents(count: int, mean: float) -> tp.Pipeline:
    """Documents of lengths as texts have them."""
    draw = random.Random(0)
    sizes = [min(1024, int(draw.lognormvariate(mean, 1.0)) + 1) for _ in range(count)]
    return tp.from_arrow(pa.table({"input_ids": [[7] * size for size in sizes]}))


def padding() -> Figure:
    """Rows of batches side by side, the longest first: their tokens, and the padding above them."""
    rows = documents(2_000, 4.0).shuffle(2_000, seed=0)
    figure = Figure(figsize=(WIDTH, 7), layout="constrained")
    for ax, batches in zip(
        figure.subplots(2, 1), (rows.batch(16), rows.bucket_by_length(16, seed=1)), strict=True
    ):
        pipe = batches.pad_collate()
        for place, batch in enumerate(islice(pipe, 10)):
            lengths = batch["attention_mask"].sum(1).sort(descending=True).values.numpy()
            edges = place + np.linspace(0.06, 0.94, len(lengths) + 1)
            full = np.full(len(lengths), batch["attention_mask"].shape[1])
            names = {"label": "padding"}, {"label": "tokens"}
            padded, tokens = names if not place else ({}, {})
            ax.stairs(full, edges, baseline=lengths, fill=True, color=ORANGE, alpha=0.55, **padded)
            ax.stairs(lengths, edges, fill=True, color=BLUE, **tokens)
        share = pipe.stats(10).padding
        assert share is not None
        ax.set_title(f"{batches.stages[-1]}: {share}", loc="left", color=INK)
        ax.set_ylabel("tokens of a row")
        ax.set_xticks([])
        ax.legend(loc="lower left", frameon=True, framealpha=0.9, reverse=True)
    return figure


def even_steps() -> Figure:
    """Of 16 ranks the largest batch of each step, for which all wait, and the mean one."""
    ranks, steps = 16, 40
    rows = documents(6_000, 4.0).sharding_filter(ranks).shuffle(2_000, seed=0)
    buckets = rows.bucket_by_length(8)
    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    drawn = figure.subplots(2, 1, sharex=True, sharey=True)
    for ax, batches, name in (
        (drawn[0], buckets.shuffle(64, seed=0), "buckets, each shard by itself"),
        (drawn[1], buckets, "buckets, shards take turns"),
    ):
        shapes = [b["input_ids"].shape for b in islice(batches.pad_collate(), ranks * steps)]
        cells = np.array([rows * length for rows, length in shapes]).reshape(steps, ranks)
        mean, largest = cells.mean(1), cells.max(1)
        edges = np.arange(steps + 1) - 0.5
        waiting = 1 - mean.sum() / largest.sum()
        ax.stairs(largest, edges, baseline=mean, fill=True, color=ORANGE, alpha=0.55, label="waits")
        ax.stairs(mean, edges, fill=True, color=BLUE, label="works")
        ax.set_title(f"{name}: ranks wait {waiting:.0%} of the time", loc="left", color=INK)
        ax.set_ylabel("cells of a batch")
        ax.spines[["top", "right"]].set_visible(False)
    drawn[0].legend(loc="upper right", frameon=True, framealpha=0.9, ncols=2)
    drawn[1].set_xlabel("step of 16 ranks, which takes as long as the largest batch")
    return figure


def demo() -> Figure:
    """Both loss curves of ``make demo``, of a run whose hashes and losses stand in demo.json."""
    held = json.loads((FOLDER / "demo.json").read_text())
    alone, resumed = held["left_alone"], held["resumed"]
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    axes = figure.add_subplot()
    numbers, losses = range(1, len(alone) + 1), [loss for _, loss in alone]
    axes.plot(numbers, losses, label="uninterrupted", color="#f0b429", linewidth=5)
    numbers, losses = range(1, len(resumed) + 1), [loss for _, loss in resumed]
    axes.plot(numbers, losses, label="killed and resumed", color="#1d3557", linewidth=1.2)
    for number, step in enumerate(held["killed_after"]):
        label = "_" if number else "SIGKILL"  # one line in the legend
        axes.axvline(step, label=label, color="#d62828", linestyle="--", linewidth=1.2)
    for end in range(held["epoch"], len(alone), held["epoch"]):
        label = "_" if end > held["epoch"] else "an epoch ends"
        axes.axvline(end + 0.5, label=label, color="#999999", linestyle=":", linewidth=1.2)
    same = "identical, bit for bit" if alone == resumed else "NOT identical"
    axes.set_title(f"{len(alone)} batches and losses: {same}", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def speeds(head: str) -> dict[str, int]:
    """Rows a second by contestant: the table of the benchmarks whose first column is called that."""
    rows = iter(line.split("|")[1:-1] for line in TABLE.read_text().splitlines())
    found = {}
    for row in rows:
        if row and row[0].strip() == head:
            next(rows)
            while row := next(rows):
                name = re.sub(r"\[(.*?)\]\(.*?\)|`", r"\1", row[0]).strip()
                found[name] = int(row[1].replace(",", ""))
    return found


def machine() -> str:
    """Where and when the speeds of the benchmarks were measured."""
    found = re.search(
        r"^Measured on (.+?), in (.+?), with (.+?)\.$", TABLE.read_text(), re.MULTILINE
    )
    assert found is not None
    return f"{found[1]}, {found[2]}\n{found[3].replace(' and ', ', ')}"


def bars(title: str, head: str) -> Figure:
    """Speeds as bars, the fastest on top; limits of the machine are left out."""
    held = {name: n for name, n in speeds(head).items() if "alone" not in name}
    order = sorted(held, key=lambda name: held[name])
    # Names stand above their bars: all is read on a phone.
    figure = Figure(figsize=(WIDTH, 0.9 + 0.52 * len(order)), layout="constrained")
    ax = figure.add_subplot()
    colours = [BLUE if name.startswith("trainpipes") else GREY for name in order]
    drawn = ax.barh(range(len(order)), [held[name] for name in order], 0.42, color=colours)
    ax.bar_label(drawn, [f"{held[name]:,}" for name in order], padding=4)
    for number, name in enumerate(order):
        ax.text(0, number + 0.27, name, va="bottom")
    ax.set_yticks([])
    ax.set_ylim(-0.4, len(order) - 0.2)
    ax.margins(x=0.16)
    ax.set_title(title, loc="left", color=INK, fontweight="bold")
    ax.set_xlabel(f"rows a second: longer is faster\n{machine()}", linespacing=1.6)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def speed_ids() -> Figure:
    return bars("Pre-tokenized Parquet, shuffled and padded", "token ids in Parquet")


def speed_text() -> Figure:
    return bars("Text, tokenized on the way", "text in Parquet")


PICTURES: dict[str, Callable[[], Figure]] = {
    "demo": demo,
    "even-steps": even_steps,
    "padding": padding,
    "shuffle": shuffle,
    "speed-ids": speed_ids,
    "speed-text": speed_text,
}
#: Drawn box by box.
DRAWINGS: dict[str, Callable[[], str]] = {
    "elastic": concept_drawings.elastic,
    "epoch": concept_drawings.epoch,
    "row-path": engine_drawings.row_path,
}


def content(figure: Figure) -> str:
    """A digest of what a figure shows: its words, and the numbers drawn."""
    found: list[Any] = []
    for ax in figure.axes:
        legend = ax.get_legend()
        texts = [ax.get_title("left"), ax.get_xlabel(), ax.get_ylabel()]
        texts += [text.get_text() for text in ax.texts]
        texts += [] if legend is None else [text.get_text() for text in legend.get_texts()]
        numbers: list[Any] = [list(ax.get_xlim()), list(ax.get_ylim())]
        numbers += [collection.get_offsets().tolist() for collection in ax.collections]
        numbers += [line.get_xydata().tolist() for line in ax.lines]
        for patch in ax.patches:
            of = patch.get_data() if hasattr(patch, "get_data") else [patch.get_bbox().bounds]
            numbers += [part if part is None else np.ravel(part).tolist() for part in of]
        found.append(
            [texts, json.loads(json.dumps(numbers), parse_float=lambda x: f"{float(x):.3g}")]
        )
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def adapted(svg: str) -> str:
    """A picture whose colours follow the reader's scheme."""
    dots = f"brightness(1.9) drop-shadow(0 0 1px {DARK[BLUE]})"
    dark = [f"text{{fill:{DARK['#000000']}}}image{{filter:{dots}}}"]
    for light, other in DARK.items():
        for what in ("fill", "stroke"):
            dark.append(f'[style*="{what}: {light.lower()}"]{{{what}:{other}!important}}')
    style = "@media (prefers-color-scheme:dark){\n" + "\n".join(dark) + "\n}"
    return svg.replace("</style>", f"\n{style}</style>", 1)


def main() -> None:
    for name, drawn in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(drawn())
    for name, draw in PICTURES.items():
        with mpl.rc_context({"svg.hashsalt": "trainpipes", "svg.fonttype": "none"}):
            figure = draw()
            said = {"Date": None, "Creator": None, "Description": f"content {content(figure)}"}
            text = StringIO()
            figure.savefig(text, format="svg", metadata=said, dpi=80)
        # Hundredths of a pixel are enough.
        short = re.sub(r"(\d\.\d\d)\d+", r"\1", text.getvalue())
        text_of = re.sub(r" +$", "", adapted(short), flags=re.MULTILINE)
        (FOLDER / f"{name}.svg").write_text(text_of)


if __name__ == "__main__":
    main()
