"""The one place that knows how the library spells what the chains say today.

A chain is data in words of its own (``chains.py``). Here it becomes code: the text of an expression, which
is what is run, and what ``show`` prints. Where a name or an option of the library changes, or what stood in
one method moves into another, change it here, and no chain changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

import trainpipes as tp
from frozen import data, functions

#: Words of the chains that the library has no more. Chains that have one of them are left out.
GONE: set[str] = {"keep_in_memory", "recipe evaluation", "recipe tabular", "unbatch"}

#: The method for each stage, where it has another name than in the chains.
METHODS = {
    "deal": "sharding_filter",
    "keep": "filter",
    "each": "map",
    "columns": "map_batches",
    "add_columns": "with_columns",
    "expand": "flat_map",
    "number": "enumerate",
    "drop": "drop_columns",
    "chat": "chat_template",
    "labels": "add_labels",
    "mask": "mask_tokens",
    "classes": "encode_labels",
    "decode": "decode_image",
    "transform": "image_transform",
    "buckets": "bucket_by_length",
    "pad": "pad_collate",
}

#: Options that have another name than in the chains, by stage or source ("*" for all).
OPTIONS: dict[str, dict[str, str]] = {
    "*": {},
    "deal": {"shards": "num_shards", "how": "split"},
    "shuffle": {"buffer": "buffer_size"},
    "batch": {"size": "batch_size", "on_long": "overflow"},
    "buckets": {
        "size": "batch_size",
        "buckets": "num_buckets",
        "on_long": "overflow",
        "buffer": "buffer_size",
    },
    "pack": {
        "buffer": "buffer_size",
        "on_long": "overflow",
        "pad": "pad_token_id",
        "with": "along",
    },
    "mask": {"mask": "mask_token_id", "special": "special_ids", "vocabulary": "vocab_size"},
    "classes": {"output": "output_column"},
    "decode": {"output": "output_column"},
    "pad": {"multiple": "pad_to_multiple_of", "side": "padding_side", "cut": "truncation_side"},
    "truncate": {"cut": "truncation_side"},
    "tokenize": {"cut": "truncation_side", "eos": "add_eos"},
    "number": {"output": "output_column"},
    "mix": {
        "by": "weight_by",
        "tokens": "column",
        "repetitions": "max_epochs",
        "column": "output_column",
    },
    "text": {"column": "output_column"},
    "numpy": {"column": "output_column"},
    "csv": {"names": "column_names"},
    "recipe": {
        "batch": "batch_size",
        "buffer": "buffer_size",
        "shards": "num_shards",
        "window": "pack_buffer_size",
        "on_bad": "on_error",
        "pad": "pad_token_id",
        "eos": "add_eos",
        "probability": "mlm_probability",
        "buckets": "num_buckets",
    },
}

#: Values that are written in another way than in the chains, by stage or source, option and value.
VALUES: dict[tuple[str, str, Any], Any] = {
    ("deal", "how", "stride"): "stride",
    ("deal", "tail", "ragged"): "uneven",
    ("tar", "missing", "null"): "null",
    ("recipe", "on_bad", "raise"): None,
}

#: Options that are given by place, in this order, before all others.
BY_PLACE = {
    "select": "names",
    "drop": "names",
}

#: Options of recipes that chains leave out, where the library's own default is another.
DEFAULTS: dict[str, dict[str, Any]] = {
    "seq2seq": {"drop_last": False},
    "masked_lm": {"drop_last": False},
}

#: The function for each source; "{}" stands for its options.
SOURCES = {
    "parquet": "tp.read_parquet({})",
    "arrow": "tp.read_arrow({})",
    "json": "tp.read_json({})",
    "csv": "tp.read_csv({})",
    "text": "tp.read_text({})",
    "numpy": "tp.read_numpy({})",
    "tar": "tp.read_webdataset({})",
    "bytes": "tp.read_bytes({})",
    "images": "tp.read_images({})",
    "files": "tp.read_files({})",
    "paths": "tp.list_files({})",
    "map": "tp.from_memmap({})",
    "table": "tp.from_arrow({})",
    "dataset": "tp.from_dataset({})",
    "tensors": "tp.from_tensors({})",
    "iterable": "tp.from_iterable({})",
    "node": "tp.from_torchdata({})",
}

NAMESPACE = {
    "tp": tp,
    "np": np,
    "pa": pa,
    "pc": pc,
    "torch": torch,
    "data": data,
    "functions": functions,
}

IMPORTS = """\
import sys, tempfile
from pathlib import Path
sys.path.insert(0, "tests")
import numpy as np, pyarrow as pa, pyarrow.compute as pc, torch
import trainpipes as tp
from frozen import adapter, data, functions

data.make(Path(tempfile.mkdtemp()), adapter.write_memmap)
"""


# Chains as code


def code(chain: Mapping[str, Any]) -> str:
    """The expression that makes a chain."""
    lines = [_source(*chain["source"])]
    lines += [_stage(name, options) for name, options in chain["stages"]]
    return "\n    ".join(lines) if len(lines) > 1 else lines[0]


def build(text: str) -> Any:
    """The pipeline that ``code`` wrote."""
    return eval(f"({text})", dict(NAMESPACE))


def words(chain: Mapping[str, Any]) -> set[str]:
    """Names of the sources, stages and recipes in a chain, and an option that has gone."""
    name, options = chain["source"]
    found = {name, *(stage for stage, _ in chain["stages"])} | ({"keep_in_memory"} & options.keys())
    if name == "recipe":
        found.add(f"recipe {options['name']}")
    parts = options.get("parts", [])
    for part in parts.values() if isinstance(parts, dict) else parts:
        found |= words(part)
    return found


def _source(name: str, options: Mapping[str, Any]) -> str:
    if name == "recipe":
        given = {**DEFAULTS.get(options["name"], {}), **options}
        given.pop("class_weights", None)  # counted by stats() today
        pad = None
        if given["name"] == "seq2seq" and not given.pop("hf_names", False):
            pad = 257 if given["tokenizer"] == "bytes" else 0  # of words.json
        first = [_text(given.pop("name")), _text(given.pop("files"))]
        if "tokenizer" in given:
            first.append(_text(given.pop("tokenizer")))
        made = f"tp.recipe({', '.join([*first, *_options(name, given)])})"
        return f"{made}.map(functions.TargetIds({pad}))" if pad is not None else made
    if name in ("concat", "zip"):
        parts = [f"({code(part)})" for part in options["parts"]]
        return f"tp.{name}({', '.join(parts)})"
    if name == "plus":
        return "(" + " + ".join(f"({code(part)})" for part in options["parts"]) + ")"
    if name == "beside":
        first, *others = (f"({code(part)})" for part in options["parts"])
        return f"{first}.zip({', '.join(others)})"
    if name == "mix":
        given = dict(options)
        parts = ", ".join(f"{k!r}: ({code(part)})" for k, part in given.pop("parts").items())
        return f"tp.mix({', '.join(['{' + parts + '}', *_options(name, given)])})"
    return SOURCES[name].format(", ".join(_options(name, options)))


def _stage(name: str, options: Mapping[str, Any]) -> str:
    if name == "part":  # of a split
        given = dict(options)
        part = given.pop("part")
        return f".split({', '.join(_options(name, given))})[{part!r}]"
    if name == "read":  # of the files that the stages before have listed
        given = dict(options)
        method = SOURCES[given.pop("as")].split("(")[0].removeprefix("tp.")
        return f".{method}({', '.join(_options(options['as'], given))})"
    if name == "draw":
        (sampler,) = options[""]
        return f".shuffle(sampler={_text(sampler)})"
    return f".{METHODS.get(name, name)}({', '.join(_options(name, options))})"


def _options(owner: str, options: Mapping[str, Any]) -> list[str]:
    """Arguments of a call; those of "" come first, without names."""
    given = dict(options)
    if owner == "mask" and {"random", "keep"} & given.keys():
        random, keep = given.pop("random", 0.1), given.pop("keep", 0.1)
        given |= {"mask_replace_prob": 1 - random - keep, "random_replace_prob": random}
    if owner == "tokenize" and isinstance(given[""][-1], list) and not given.get("pair"):
        *given[""], given["concat"] = given[""]  # joined
    found = [_text(value) for value in given.pop("", [])]
    names = {**OPTIONS["*"], **OPTIONS.get(owner, {})}
    for name, value in given.items():
        if isinstance(value, str | int | bool):
            value = VALUES.get((owner, name, value), value)
        found.append(f"{names.get(name, name)}={_text(value)}")
    return found


def _text(value: Any) -> str:
    """A value as code; texts that begin with "$" are code already."""
    if isinstance(value, str) and value.startswith("$"):
        return value[1:]
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    return repr(value)


# Running


class Reader:
    """One rank that reads a chain, epoch after epoch.

    Args:
        text: the chain's code.
        reads: "pipe" iterates the pipeline itself, "loader" a ``Loader``.
        place: rank and world size; None for those of the environment.
        workers, threads: of the ``Loader``.
    """

    def __init__(
        self,
        text: str,
        reads: str,
        place: tuple[int, int] | None,
        workers: int,
        threads: int | None,
    ) -> None:
        pipe = build(text)
        if place is not None:
            pipe = pipe.distributed(rank=place[0], world_size=place[1])
        self.pipe = pipe
        self.reads: Any = pipe
        if reads == "loader":
            how = {"num_workers": workers} if workers else {"threads": threads}
            self.reads = tp.Loader(pipe, **how)
        self.iterator: Any = None

    def begin(self) -> None:
        """Start the next epoch."""
        self.iterator = iter(self.reads)

    def next(self) -> Any:
        """The next item; StopIteration at the epoch's end."""
        return next(self.iterator)

    def state(self) -> Any:
        """Where it stands, through JSON and back."""
        return json.loads(json.dumps(self.reads.state_dict()))

    def load(self, state: Any) -> None:
        """Go on from there."""
        self.reads.load_state_dict(state)

    def length(self) -> int | None:
        """Items of an epoch, where that is known."""
        try:
            return len(self.reads)
        except TypeError:
            return None

    def close(self) -> None:
        """Let workers go."""
        self.iterator = None
        self.reads = self.pipe = None


def merge(states: Iterable[Any]) -> Any:
    """One state of those of all ranks."""
    return tp.merge_states(list(states))


def running(text: str, run: Mapping[str, Any]) -> str:
    """Code that reads a chain on one rank, as a person would try it."""
    lines = [f"pipe = (\n    {text}\n)"]
    lines.append(
        "reads = pipe"
        if run["reads"] == "pipe"
        else f"reads = tp.Loader(pipe, threads={run['threads']})"
    )
    lines.append("for batch in reads:\n    print(batch)")
    return IMPORTS + "\n".join(lines)


def write_memmap(path: Any, rows: Any) -> None:
    """Write rows as a memory map."""
    tp.write_memmap(path, rows)


def error_name(error: BaseException) -> str:
    """The nearest class of an error that users know: one of the library's, or a built-in one."""
    for kind in type(error).__mro__:
        if getattr(tp, kind.__name__, None) is kind or kind.__module__ == "builtins":
            return kind.__name__
    return "Exception"


def is_refusal(error: BaseException) -> bool:
    """Whether it is one of the library's own errors, rather than an accident."""
    return isinstance(error, tp.TrainpipesError)
