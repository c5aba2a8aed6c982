"""What to write in place of objects that have epochs, an order or a position of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset


def is_pipeline(value: Any) -> bool:
    return hasattr(value, "stages") and hasattr(value, "then")


def is_hf_stream(value: Any) -> bool:
    """Whether it is a ``datasets.IterableDataset``."""
    return all(hasattr(value, name) for name in ("features", "iter", "num_shards", "state_dict"))


def instead(value: Any) -> str:
    """What to write instead of a pipeline, a loader, a node or a stream where rows or keys are taken that
    have no position of their own; "" for all others.

    >>> from torch.utils.data import DataLoader
    >>> instead(DataLoader([1, 2]))
    'a DataLoader has an order of its own: write from_dataset(loader.dataset), then .shuffle() and .batch()'
    >>> instead([1, 2])
    ''
    """
    kind = type(value)
    ours = kind.__module__.startswith("trainpipes.")
    if is_pipeline(value):
        return "a pipeline has epochs and a state of its own: use it itself, as in pipe.map(fn)"
    if ours and is_pipeline(getattr(value, "pipeline", None)):
        return "a Loader has epochs and a state of its own: write loader.pipeline"
    if ours and isinstance(value, Iterator) and hasattr(value, "state_dict"):
        passes = "of trainpipes.nodes" if hasattr(value, "stage") else "over a pipeline"
        return f"an iterator {passes} has a position of its own: use a pipeline itself"
    if isinstance(value, DataLoader) or kind.__name__ == "StatefulDataLoader":
        return _of_loader(kind.__name__, value.dataset)
    if is_hf_stream(value):
        return (
            "a datasets.IterableDataset has epochs and a state of its own: write from_hf(dataset)"
        )
    if _is_node(value):
        return f"{kind.__name__} has a state of its own: write from_torchdata(node)"
    if _is_node(getattr(value, "root", None)):
        return (
            f"a {kind.__name__} of nodes has a state of its own: write from_torchdata(loader.root)"
        )
    return ""


def _of_loader(name: str, dataset: Any) -> str:
    if is_pipeline(dataset):
        return f"a {name} over a pipeline has a position of its own: write loader.dataset"
    if is_hf_stream(dataset):
        return f"a {name} has a position of its own: write from_hf(loader.dataset)"
    if isinstance(dataset, IterableDataset):
        way = "from_iterable(loader.dataset), then .batch()"
    else:
        way = "from_dataset(loader.dataset), then .shuffle() and .batch()"
    return f"a {name} has an order of its own: write {way}"


def _is_node(value: Any) -> bool:
    names = {f"{one.__module__}.{one.__qualname__}" for one in type(value).__mro__}
    return "torchdata.nodes.base_node.BaseNode" in names
