"""What a run trained on, as one record of plain JSON types: ``explain().to_dict()``.

Values are named by what a state knows them by (``kinds.options.identify``), short, and without what could
hold a secret: values under such names, and credentials and queries of URLs, also within a text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.secret_text import LEFT_OUT, hidden, is_secret
from trainpipes._internal.shown import cut
from trainpipes.engine.iterating.session import Session
from trainpipes.engine.planning.arrange import arrange
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import StateError
from trainpipes.kinds.options import argument_names, identify
from trainpipes.kinds.stage import Stage
from trainpipes.look.lengths import exact_length, rows_of
from trainpipes.pipeline import Pipeline
from trainpipes.state.format import FORMAT
from trainpipes.version import __version__

__all__ = ["plain", "record", "without_secrets"]

#: Packages whose versions are always told.
REQUIRED = ("torch", "torchdata", "pyarrow", "numpy", "fsspec")
#: Those that are told where a stage works with them: what each is imported as, and installed as.
OPTIONAL = {
    "tokenizers": "tokenizers", "transformers": "transformers", "tiktoken": "tiktoken",
    "sentencepiece": "sentencepiece", "gigatoken": "gigatoken", "datasets": "datasets", "PIL": "pillow",
    "torchvision": "torchvision", "s3fs": "s3fs", "gcsfs": "gcsfs", "adlfs": "adlfs",
    "huggingface_hub": "huggingface_hub",
}  # fmt: skip


def record(session: Session, loader: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a pipeline or a loader runs, and where it stands.

    Args:
        session: the pipeline's or the loader's.
        loader: the loader's options.
    """
    plan = session.plan
    rank, world_size = session.ranks()
    chain = plan.chain
    identity = json.loads(plan.identity)
    is_even = chain.num_shards % world_size == 0
    data = without_secrets(identity["data"])
    found: dict[str, Any] = {
        "fingerprint": _content_hash(identity),
        "stages": [_stage(stage) for stage in chain.stages],
        "seeds": _seeds(identity["stages"]),
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
    found["position"] = _position(session, rank)
    found["versions"] = _versions(plan)
    return found


def _stage(stage: Stage) -> dict[str, Any]:
    """A stage with all its options."""
    options = {k: v for k, v in stage.resolved_options.items() if k != "storage_options"}
    return {
        "stage": stage.name,
        **{name: _option(value, name, stage.holds_data) for name, value in options.items()},
    }


def _option(value: Any, name: str, holds_data: bool) -> Any:
    if isinstance(value, Pipeline):
        return [_stage(stage) for stage in _inner(value)]
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


def _inner(pipeline: Pipeline) -> tuple[Stage, ...]:
    """The stages of a pipeline that another one is made of, each as it is above the others."""
    return arrange(pipeline.stages).stages


def _seeds(stages: list[Any]) -> dict[str, int]:
    """Each seed that something is drawn with, by the stage that draws; by several of one name, numbered."""
    found: dict[str, int] = {}
    times: Counter[str] = Counter()
    for place, seed in _drawn(stages):
        times[place] += 1
        found[place if times[place] == 1 else f"{place} {times[place]}"] = seed
    return found


def _drawn(identity: Any, place: str = "") -> Iterator[tuple[str, int]]:
    """Seeds in what a state knows stages by, and where: ``mix/web/shuffle`` in a pipeline that is mixed."""
    if isinstance(identity, list):
        for one in identity:
            yield from _drawn(one, place)
    elif isinstance(identity, dict):
        if "stage" in identity:
            place = f"{place}/{identity['stage']}".lstrip("/")
        for key, value in identity.items():
            if key == "seed" and isinstance(value, int):
                yield place, value
            elif key == "sources":
                parts = value.items() if isinstance(value, dict) else enumerate(value)
                for name, part in parts:
                    yield from _drawn(part, f"{place}/{name}")
            else:
                yield from _drawn(value, place)


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


def _position(session: Session, rank: int) -> dict[str, Any] | None:
    """Where it stands; None where others iterate it, which know."""
    try:
        state = session.state()
    except StateError:
        return None
    if state is None:
        return None
    saved = json.loads(state["pipeline"])
    kept = state if without_secrets(saved) == saved else None
    return {"rank": rank, "epoch": state["epoch"], "m": state["m"], "state": kept}


def _versions(plan: Plan) -> dict[str, Any]:
    """Versions of the library and of what it works with, of optional packages those that are in use."""
    used = {*_packages(plan.chain.stages), *_file_systems(plan.inputs)}
    names = [*REQUIRED, *(name for package, name in OPTIONAL.items() if package in used)]
    found = {"trainpipes": __version__, "state_format": FORMAT, "python": python_version()}
    return {**found, **{name: _installed(name) for name in names}}


def _packages(stages: Iterable[Stage]) -> Iterator[str]:
    """Packages that stages work with, and those that their options are objects of."""
    for stage in stages:
        yield from stage.uses_packages
        for value in stage.options.values():
            several = value.values() if isinstance(value, dict) else value
            for one in several if isinstance(value, dict | tuple) else (value,):
                if isinstance(one, Pipeline):
                    yield from _packages(_inner(one))
                else:
                    yield type(one).__module__.split(".")[0]


def _file_systems(inputs: Inputs) -> Iterator[str]:
    """Packages of the file systems that the files are in."""
    files = getattr(inputs.source, "files", None)
    for system in getattr(files, "systems", ()):
        yield type(system).__module__.split(".")[0]
    for part in [*inputs.mixed.values(), *getattr(inputs.source, "joined_inputs", ())]:
        yield from _file_systems(part)


def _installed(name: str) -> str | None:
    if name == "torch":
        return str(torch.__version__)  # with its build, such as "+cpu"
    try:
        return version(name)
    except PackageNotFoundError:
        return None


#: Characters of one option; a larger list or dict is known by its length and content.
MOST = 8192
#: Characters of what an object says of itself.
MOST_TEXT = 500

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain(value: Any, name: str = "") -> Any:
    """An option as JSON types; functions by module and name, arrays and tables by their content.

    Args:
        value: any option of a stage, or a part of one.
        name: what it is called.

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
