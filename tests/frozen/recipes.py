"""Chains that a recipe makes."""

from __future__ import annotations

from typing import Any

from frozen.chains import Chain, WholeChain
from frozen.drawing import Drawing
from frozen.draws import Draws

__all__ = ["recipe"]

NAMES = [
    "sft",
    "chat",
    "preference",
    "seq2seq",
    "pretrain",
    "masked_lm",
    "tokens",
    "classification",
    "images",
]


def recipe(number: int, draws: Draws, name: str | None = None) -> Chain:
    """The chain of a recipe; each in turn, if none is named."""
    name = NAMES[number % len(NAMES)] if name is None else name
    d = draws
    drawing = WholeChain(draws)
    options: dict[str, Any] = {"name": name, "files": None}
    if name not in ("tokens", "images", "tabular"):
        options["tokenizer"] = "bytes" if d.chance(60) else "$data.path('words.json')"
    options["batch"] = d.pick([3, 4, 7])
    options["shards"] = drawing.shards = d.weighted([(4, 12), (3, 4), (2, 24), (1, 1)])
    if name != "evaluation":
        options["buffer"] = d.pick([9, 16, 40, 500])
        options["seed"] = d.below(9)
    globals()[f"_{name}"](d, drawing, options)
    dropping = (
        "sft",
        "chat",
        "preference",
        "seq2seq",
        "masked_lm",
        "classification",
        "images",
        "tabular",
    )
    if name in dropping and d.chance(50):
        options["drop_last"] = d.pick([True, False])
    if (
        name in ("sft", "seq2seq", "masked_lm", "classification", "pretrain")
        and "data.path" in options["files"]
        and d.chance(25)
    ):
        options["cache"] = "$data.own('cache')"
    drawing.source = ["recipe", options]
    return {"source": drawing.source, "stages": [], "run": drawing.plan()}


def _pairs(d: Draws, options: dict[str, Any]) -> None:
    which = d.pick(["pairs", "rows", "base"])
    if which == "pairs":
        options["files"] = "$data.path('pairs.parquet')"
    elif which == "rows":
        options["files"] = "$tp.from_dataset(data.pairs())"
    else:
        options["files"] = d.pick(
            ["$data.path('parquet')", "$data.path('json')", "$data.path('csv')"]
        )
        options |= {"prompt": "text", "response": "answer"}
        if d.chance(40):
            options["context"] = "label"
    if d.chance(50):
        options["max_length"] = d.pick([12, 30, 100])


def _sft(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    _pairs(d, options)
    if options["tokenizer"] != "bytes":
        options["tokenizer"] = "bytes"  # the small vocabulary has no end of text


def _seq2seq(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    _pairs(d, options)
    if d.chance(40):
        options["hf_names"] = True
    if d.chance(20):
        options["keep_in_memory"] = True


def _evaluation(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    _pairs(d, options)
    options["tokenizer"] = "bytes"
    drawing.ragged = True
    if d.chance(40):
        options["padding_side"] = "left"


def _chat(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    options["tokenizer"] = "$data.chat_tokenizer()"
    bad = d.chance(50)
    layout = d.pick(["openai", "sharegpt"])
    options["files"] = f"$tp.from_dataset(data.conversations({layout!r}, {bad}))"
    if not bad and d.chance(40):
        options["files"] = "$data.path('chats.parquet')"
    if bad:
        options["on_bad"] = d.weighted([(5, "skip"), (3, "keep"), (1, "raise")])
        drawing.finite_uncounted = options["on_bad"] == "skip"
    if d.chance(35):
        options["packed"] = True
        options["max_length"] = d.pick([128, 256])
        drawing.finite_uncounted = True
    elif d.chance(50):
        options["max_length"] = d.pick([60, 200])


def _preference(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    options["tokenizer"] = "bytes"
    bad = d.chance(40)
    options["files"] = f"$tp.from_dataset(data.preferences({bad}))"
    if bad:
        options["on_bad"] = d.weighted([(5, "skip"), (3, "keep"), (1, "raise")])
        drawing.finite_uncounted = options["on_bad"] == "skip"
    if d.chance(40):
        options["max_length"] = d.pick([8, 20])


def _pretrain(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    options["files"] = d.pick(["$data.path('parquet')", "$data.path('json')", "$data.path('text')"])
    if options["tokenizer"] != "bytes":
        options["eos"] = "</s>" if d.chance(50) else False
    _packed(d, drawing, options)


def _packed(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    options["max_length"] = d.pick([24, 64])
    options["method"] = d.pick(["best_fit", "first_fit", "concat"])
    if options["method"] != "concat":
        options["window"] = d.pick([6, 20])
    drawing.finite_uncounted = True
    if d.chance(50):
        options["epochs"] = d.pick([1, 2])
    else:
        drawing.endless = True


def _tokens(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    if d.chance(40):
        options |= {
            "files": "$data.path('tokens.bin')",
            "dtype": "uint16",
            "max_length": d.pick([8, 16]),
        }
        if d.chance(50):
            options["epochs"] = d.pick([1, 2])
        else:
            drawing.endless = True
        return
    _packed(d, drawing, options)
    options["files"] = d.pick(
        [
            "$tp.from_dataset(data.token_rows())",
            "$tp.from_dataset(data.token_rows(False))",
            "$data.path('parquet')",
            "$data.path('map')",
        ]
    )
    if d.chance(40):
        options["pad"] = 5


def _masked_lm(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    options["tokenizer"] = "$data.path('words.json')"
    options["files"] = d.pick(["$data.path('parquet')", "$data.path('json')", "$data.path('csv')"])
    if d.chance(40):
        options["whole_words"] = True
    if d.chance(50):
        options["probability"] = d.pick([0.3, 0.5])
    if d.chance(40):
        options["max_length"] = d.pick([6, 20])


def _classification(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    options["files"] = d.pick(["$data.path('parquet')", "$data.path('json')", "$data.path('csv')"])
    buckets = d.pick([None, 4, "auto"])
    options["buckets"] = buckets
    drawing.finite_uncounted = buckets is not None
    if d.chance(40):
        options["classes"] = d.pick([["cat", "dog", "eel"], {"eel": 0, "cat": 1, "dog": 2}])
    if d.chance(30):
        options["class_weights"] = "balanced"
    if d.chance(30):
        options["text_pair"] = "answer"
        options["text"] = "text"
        options["tokenizer"] = "$data.path('words.json')"
    if d.chance(40):
        options["max_length"] = d.pick([8, 20])


def _images(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    options["files"] = d.pick(["$data.path('pictures')", "$tp.from_tensors(**data.pixels())"])
    options["size"] = d.pick([6, 8])
    how = d.weighted([(3, "plain"), (2, "padding"), (1, "transform"), (3, "evaluate")])
    if how == "padding":
        options["padding"] = 1
    elif how == "transform":
        options["size"] = 8
        options["transform"] = "$functions.Jitter()"
        options["files"] = "$tp.from_tensors(**data.pixels())"
    elif how == "evaluate":
        options["train"] = False
        drawing.ragged = True
    elif d.chance(40):
        options["scale"] = "$(0.3, 1.0)"
    if d.chance(30):
        options["normalize"] = False
    if d.chance(30) and how in ("plain", "padding"):
        options["flip"] = 0.2


def _tabular(d: Draws, drawing: Drawing, options: dict[str, Any]) -> None:
    options["files"] = d.pick(["$data.path('parquet')", "$data.path('csv')"])
    options |= {"numeric": ["x", "score"], "categorical": ["answer"], "label": "label"}
    if d.chance(40):
        options["scaling"] = d.pick(["minmax", "none"])
    if d.chance(40):
        options["missing"] = "indicator"
