"""What a run trained on, as one record of plain JSON types: ``explain().to_dict()``.

Values are named by what a state knows them by, without what could hold a secret.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.secrets import LEFT_OUT, hidden, is_secret
from trainpipes._internal.text import cut
from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.engine.planning.arrange import arrange
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.errors import StateError
from trainpipes.kinds.options import argument_names, identify
from trainpipes.kinds.stage import Stage
from trainpipes.look.lengths import exact_length, rows_of
from trainpipes.pipeline import Pipeline
from trainpipes.state.format import FORMAT
from trainpipes.version import __version__

#: Packages whose versions are told, beside torch's.
PACKAGES = (
    "torchdata", "pyarrow", "numpy", "fsspec", "tokenizers", "transformers", "tiktoken", "sentencepiece",
    "gigatoken", "datasets", "pillow", "torchvision", "s3fs", "gcsfs", "adlfs", "huggingface_hub",
)  # fmt: skip


def record(iteration: IterationState, loader: Mapping[str, Any] | None = None) -> dict[str, Any]:
    plan = iteration.plan
    rank, world_size = iteration.ranks()
    chain = plan.chain
    identity = json.loads(plan.identity)
    is_even = chain.num_shards % world_size == 0
    data = without_secrets(identity["data"])
    found: dict[str, Any] = {
        "fingerprint": _content_hash(identity),
        "stages": [_stage(stage) for stage in chain.stages],
        "data": {
            "fingerprint": _content_hash(identity["data"]),
            "files": _files(data),
            "rows": _rows(plan.inputs),
            "known_by": data,
        },
        "epoch_rows": plan.inputs.epoch_rows,
        "epoch_batches": exact_length(plan, 0, world_size) if is_even else None,
        "num_shards": chain.num_shards,
        "batch_size": None if chain.batch is None else chain.batch.batch_size,
        "world_size": world_size,
    }
    if loader is not None:
        found["loader"] = plain(dict(loader))
    found["position"] = _position(iteration, rank)
    found["versions"] = _versions()
    return found


def _stage(stage: Stage) -> dict[str, Any]:
    options = {k: v for k, v in stage.resolved_options.items() if k != "storage_options"}
    return {
        "stage": stage.name,
        **{name: _option(value, name, stage.holds_data) for name, value in options.items()},
    }


def _option(value: Any, name: str, holds_data: bool) -> Any:
    if isinstance(value, Pipeline):
        return [_stage(stage) for stage in arrange(value.stages).stages]
    if isinstance(value, Stage):
        return _stage(value)
    if isinstance(value, dict) and _has_pipelines(value.values()):
        return {str(key): _option(one, name, holds_data) for key, one in value.items()}
    if isinstance(value, tuple) and _has_pipelines(value):
        return [_option(one, name, holds_data) for one in value]
    if holds_data and isinstance(value, list | tuple | dict):  # rows, which "data" tells of
        return f"{type(value).__name__} of {len(value):,} rows"
    return plain(value, name)


def _has_pipelines(values: Iterable[Any]) -> bool:
    return any(isinstance(one, Pipeline) for one in values)


def _files(data: Any) -> int | None:
    """Files that the data are in; None where they are in none."""
    if isinstance(data, Mapping):
        if isinstance(data.get("files"), int):
            return int(data["files"])
        data = list(data.values())
    counts = [_files(one) for one in data] if isinstance(data, list) else []
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _rows(inputs: Inputs) -> int | None:
    """Rows of the data; None where they are not counted in advance."""
    if inputs.mixed:
        parts = [_rows(part) for part in inputs.mixed.values()]
        known = [rows for rows in parts if rows is not None]
        return sum(known) if len(known) == len(parts) else None
    return rows_of(inputs.source)


def _position(iteration: IterationState, rank: int) -> dict[str, Any] | None:
    try:
        state = iteration.state()
    except StateError:
        return None
    if state is None:
        return None
    saved = json.loads(state["pipeline"])
    kept = state if without_secrets(saved) == saved else None
    return {"rank": rank, "epoch": state["epoch"], "m": state["m"], "state": kept}


def _versions() -> dict[str, Any]:
    """Versions of the library and of what it works with, as far as it is installed."""
    found = {"trainpipes": __version__, "state_format": FORMAT, "python": python_version()}
    found["torch"] = str(torch.__version__)  # with its build, such as "+cpu"
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


#: Characters of one option; a larger list or dict is known by its length and content.
MOST = 8192
#: Characters of what an object says of itself.
MOST_TEXT = 500

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain(value: Any, name: str = "") -> Any:
    """An option as JSON types; functions by module and name, arrays and tables by their content.

    >>> plain({"size": (224, 224), "dtype": torch.float32, "password": "x"})
    {'size': [224, 224], 'dtype': 'torch.float32', 'password': '(left out)'}
    """
    found = _plain(value, name)
    if isinstance(found, list | dict) and len(text := json.dumps(found)) > MOST:
        return (
            f"{len(found):,} {'items' if isinstance(found, list) else 'entries'}, {_digest(text)}"
        )
    return found


def _plain(value: Any, name: str = "") -> Any:
    if value is not None and not isinstance(value, bool) and is_secret(name):
        return LEFT_OUT
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return hidden(str(value))
    if isinstance(value, Mapping):
        kept = {str(k): v for k, v in value.items() if k != "storage_options"}
        return {k: _plain(v, k) for k, v in kept.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, torch.dtype | torch.device | np.dtype | pa.DataType):
        return str(value)
    if isinstance(value, pa.Schema):
        return {field.name: str(field.type) for field in value}
    if isinstance(value, pa.Table | pa.RecordBatch):
        return f"{type(value).__name__} of {len(value):,} rows"
    if getattr(value, "func", None) is not None and hasattr(value, "keywords"):  # a partial
        named = zip(argument_names(value), value.args, strict=True)
        return {
            "function": _plain(value.func),
            "arguments": [_plain(one, name) for name, one in named],
            "keywords": _plain(value.keywords),
        }
    found = identify(value)
    if isinstance(found, str):
        return cut(hidden(_ADDRESS.sub("", found.removesuffix(": "))), MOST_TEXT)
    return _plain(found)


def without_secrets(value: Any) -> Any:
    """A value of JSON types without what may be a credential.

    >>> without_secrets(["https://me:pw@host/a.csv?sig=abc", "s3://bucket/part-?.parquet"])
    ['https://…@host/a.csv?sig=…', 's3://bucket/part-?.parquet']
    """
    return _plain(value)


def _content_hash(value: Any) -> str:
    """A digest of a value of JSON types: equal for what a state takes for equal, where None is as good as
    nothing and the order of keys does not matter."""
    return _digest(json.dumps(_canonical(value), sort_keys=True, separators=(",", ":")))


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items() if inner is not None}
    if not isinstance(value, list):
        return value
    found = [_canonical(inner) for inner in value]
    while found and found[-1] is None:
        found.pop()
    return found
