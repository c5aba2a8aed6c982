"""A pipeline as plain JSON types without secrets, and as Mermaid text, https://mermaid.js.org."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from textwrap import wrap
from typing import Any

import torch

from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.record import Record
from trainpipes.errors import LEFT_OUT, hidden, is_secret
from trainpipes.interfaces.options import identify, show
from trainpipes.interfaces.stage import Stage
from trainpipes.look.lengths import exact_length, rows_of
from trainpipes.state.format import FORMAT
from trainpipes.version import __version__

#: Packages whose versions are recorded, beside torch's.
PACKAGES = (
    "torchdata", "pyarrow", "numpy", "fsspec", "tokenizers", "transformers", "tiktoken", "sentencepiece",
    "gigatoken", "datasets", "pillow", "torchvision", "soundfile", "soxr", "av", "s3fs", "gcsfs", "adlfs",
    "huggingface_hub",
)  # fmt: skip

#: Characters of a line in a box, and lines.
MOST_WIDE, MOST_LINES = 44, 4
#: What Mermaid would take for its own, in a text.
ESCAPED = {ord(c): f"#{ord(c)};" for c in '#"<>&`\\'}


def record(
    pipeline: Record,
    iteration: IterationState,
    world_size: int,
    loader: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    plan, chain = iteration.plan, iteration.plan.chain
    identity = json.loads(plan.identity)
    known = without_secrets(identity)
    data = {
        "fingerprint": _fingerprint(identity["data"]),
        "files": _files(known["data"]),
        "rows": _rows(plan.inputs),
        "known_by": known["data"],
    }
    return {
        "fingerprint": _fingerprint(identity),
        "pipeline": repr(pipeline),
        "stages": known["stages"],
        "data": data,
        "epoch_rows": plan.inputs.epoch_rows,
        "epoch_batches": exact_length(plan, 0, world_size),
        "num_shards": chain.num_shards,
        "batch_size": None if chain.batch is None else chain.batch.batch_size,
        "world_size": world_size,
        **({} if loader is None else {"loader": without_secrets(dict(loader))}),
        "versions": _versions(),
    }


def _files(data: Any) -> int | None:
    if isinstance(data, Mapping) and isinstance(data.get("files"), int):
        return int(data["files"])
    inner = data.values() if isinstance(data, Mapping) else data if isinstance(data, list) else ()
    known = [count for part in inner if (count := _files(part)) is not None]
    return sum(known) if known else None


def _rows(inputs: Inputs) -> int | None:
    if not inputs.mixed:
        return rows_of(inputs.source)
    parts = [_rows(part) for part in inputs.mixed.values()]
    return None if None in parts else sum(rows for rows in parts if rows is not None)


def _versions() -> dict[str, Any]:
    versions = {"trainpipes": __version__, "state_format": FORMAT, "python": python_version()}
    versions["torch"] = str(torch.__version__)  # with its build, such as "+cpu"
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def without_secrets(value: Any, name: str = "") -> Any:
    """A value as JSON types, without possible credentials.

    >>> without_secrets({"urls": ["https://me:pw@host/a.csv?sig=abc"], "api_key": "x"})
    {'urls': ['https://…@host/a.csv?sig=…'], 'api_key': '(left out)'}
    """
    if value is None or isinstance(value, bool):
        return value
    if is_secret(name):
        return LEFT_OUT
    if isinstance(value, Mapping):
        return {str(k): without_secrets(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(part) for part in value]
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return hidden(str(value if isinstance(value, float | str) else identify(value)))


def _fingerprint(value: Any) -> str:
    """A digest that is equal for values that a state takes for equal."""
    text = json.dumps(_given(value), sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def _given(value: Any) -> Any:
    """A value without None at the end of lists and in dicts."""
    if isinstance(value, dict):
        return {key: _given(inner) for key, inner in value.items() if inner is not None}
    if not isinstance(value, list):
        return value
    last = max((n for n, part in enumerate(value, 1) if part is not None), default=0)
    return [_given(inner) for inner in value[:last]]


# A diagram


def mermaid(pipeline: Record) -> str:
    nodes: list[str] = []
    edges: list[str] = []
    last = _draw(pipeline, nodes, edges)
    edges.append(f'    {last} --> training(["training loop"])')
    return "\n".join(["flowchart TB", *nodes, *edges])


def written(stage: Stage) -> str:
    """A stage with its options, as a line; of the pipelines that it joins, how many."""
    text = repr(stage)
    if joined := _pipelines(stage):
        options = {k: v for k, v in stage.options.items() if v is not None and not _joined(v)}
        arguments = [f"{name}={show(value)}" for name, value in options.items()]
        text = f"{stage.name}({', '.join([f'{len(joined)} pipelines', *arguments])})"
    return _legible(text)


def _pipelines(stage: Stage) -> list[tuple[str, Record]]:
    return [pipeline for value in stage.options.values() for pipeline in _joined(value)]


def _joined(value: Any) -> list[tuple[str, Record]]:
    named = list(value.items()) if isinstance(value, Mapping) else []
    if isinstance(value, tuple | list):
        named = [("", part) for part in value]
    return [(str(name), part) for name, part in named if isinstance(part, Record)]


def _legible(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _draw(pipeline: Record, nodes: list[str], edges: list[str]) -> str:
    last = ""
    for stage in pipeline.stages:
        ends = [("", last)] if last else []
        ends += [(name, _draw(part, nodes, edges)) for name, part in _pipelines(stage)]
        lines = wrap(written(stage), MOST_WIDE, max_lines=MOST_LINES, placeholder=" …")
        last = f"stage{len(nodes) + 1}"
        nodes.append(f'    {last}["{"<br/>".join(line.translate(ESCAPED) for line in lines)}"]')
        for name, end in ends:
            label = f'|"{_legible(name).translate(ESCAPED)}"|' if name else ""
            edges.append(f"    {end} -->{label} {last}")
    return last
