"""Makes the pictures of these pages: ``python docs/pictures/make.py``. A test tells which is out of date.

Figures hold a digest of what they show, so that it can be told whatever version of Matplotlib draws them.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import trainpipes as tp
from trainpipes.look.pictures.figures import BLUE, EMPTY, GREY, INK
from trainpipes.testing import shuffle_quality
from trainpipes_recipes.demo.__main__ import draw as demo_curves
from trainpipes_recipes.demo.comparison import compare
from trainpipes_recipes.training import Step

sys.path.insert(0, str(Path(__file__).parent))
import concept_drawings
import engine_drawings

__all__ = ["DRAWINGS", "GRAPHS", "PICTURES", "content"]

FOLDER = Path(__file__).parent
#: Where the figures stand that are drawn as bars.
TABLE = FOLDER.parents[1] / "benchmarks" / "README.md"

#: What replaces a colour where the reader's screen is dark.
DARK = {
    "#ffffff": "#14181f",
    "#000000": "#cbd5e1",
    INK: "#f1f5f9",
    GREY: "#9aa4b2",
    EMPTY: "#374151",
    BLUE: "#56b4e9",
    "#1d3557": "#2f81f7",
    "#d62828": "#ff7b72",
}


def graph() -> tp.Pipeline:
    return (
        tp.list_files("chats/*.parquet")
        .read_parquet(["prompt", "response"])
        .sharding_filter(24)
        .shuffle(40_960, seed=0)
        .tokenize("bytes", ["prompt", "response"], labels="response")
        .batch(32)
        .pad_collate()
    )


def graph_mix() -> tp.Pipeline:
    web = tp.list_files("web/*.parquet").read_parquet(["text"]).shuffle(100_000, seed=1)
    code = tp.list_files("code/*.jsonl").read_json().select("text").shuffle(100_000, seed=2)
    mixed = tp.mix({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3}, stop="repeat")
    ready = mixed.sharding_filter(24).tokenize("bytes")
    return ready.pack(4096).batch(8).pad_collate()


def shuffle() -> Figure:
    rows = tp.from_tensors(x=range(24_000)).sharding_filter(8)
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shuffle_quality(rows.shuffle(500, seed=0).batch(32)).plot(left)
    shuffle_quality(rows.shuffle(scope="global", seed=0).batch(32)).plot(right)
    return figure


def documents(count: int, mean: float) -> tp.Pipeline:
    """Documents of lengths as texts have them."""
    draw = random.Random(0)
    sizes = [min(1024, int(draw.lognormvariate(mean, 1.0)) + 1) for _ in range(count)]
    return tp.from_arrow(pa.table({"input_ids": [[7] * size for size in sizes]}))


def padding() -> Figure:
    rows = documents(2_000, 4.0).shuffle(2_000, seed=0)
    figure = Figure(figsize=(8, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1)
    rows.batch(16).pad_collate().padding(10).plot(top)
    rows.bucket_by_length(16).pad_collate().padding(10).plot(bottom)
    return figure


def packing() -> Figure:
    return documents(300, 5.0).pack(1024).packing(20).plot()


def mixture() -> Figure:
    sources = {name: tp.from_tensors(x=range(500)) for name in ("web", "code", "books")}
    weights = [{"web": 8, "code": 1, "books": 1}, {"web": 3, "code": 4, "books": 3}]
    mixed = tp.mix(sources, schedule=[(2_000, weights[1])], weights=weights[0], stop="repeat")
    return mixed.sharding_filter(8).batch(16).mixture(6_000).plot()


def demo() -> Figure:
    """The picture that ``make demo`` ends with, of a run whose logs stand in demo.json."""
    held = json.loads((FOLDER / "demo.json").read_text())
    alone, resumed = (
        [Step(number, *step) for number, step in enumerate(held[run], start=1)]
        for run in ("left_alone", "resumed")
    )
    same = compare(alone, resumed)
    return demo_curves(alone, resumed, held["killed_after"], held["epoch"], same)


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


def bars(title: str, head: str) -> Figure:
    """Speeds as bars, the fastest on top; limits of the machine are left out."""
    held = {name: n for name, n in speeds(head).items() if "alone" not in name}
    order = sorted(held, key=lambda name: held[name])
    # Names stand above their bars, so that all is large enough to read on a phone.
    figure = Figure(figsize=(5.6, 0.9 + 0.52 * len(order)), layout="constrained")
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
    ax.set_xlabel("rows a second: longer is faster")
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
    "mixture": mixture,
    "packing": packing,
    "padding": padding,
    "shuffle": shuffle,
    "speed-ids": speed_ids,
    "speed-text": speed_text,
}
GRAPHS: dict[str, Callable[[], tp.Pipeline]] = {"graph": graph, "graph-mix": graph_mix}
#: Drawn box by box.
DRAWINGS: dict[str, Callable[[], str]] = {
    "elastic": concept_drawings.elastic,
    "epoch": concept_drawings.epoch,
    "order": concept_drawings.order,
    "row-path": engine_drawings.row_path,
    "state": concept_drawings.state,
    "state-path": engine_drawings.state_path,
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
    for name, make in GRAPHS.items():
        make().graph().save(FOLDER / f"{name}.svg")
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
