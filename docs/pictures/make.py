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

import trainpipes as tp
from trainpipes.testing import shuffle_quality

sys.path.insert(0, str(Path(__file__).parent))
import concept_drawings
import engine_drawings

__all__ = ["DRAWINGS", "GRAPHS", "PICTURES", "content"]

FOLDER = Path(__file__).parent


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


PICTURES: dict[str, Callable[[], Figure]] = {
    "mixture": mixture,
    "packing": packing,
    "padding": padding,
    "shuffle": shuffle,
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
        (FOLDER / f"{name}.svg").write_text(re.sub(r" +$", "", short, flags=re.MULTILINE))


if __name__ == "__main__":
    main()
