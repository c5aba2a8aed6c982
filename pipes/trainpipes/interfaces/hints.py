"""What messages say of a stage, or of ``Loader``, beside its own text, by the name of its class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from trainpipes._internal.messages import nearest

T = TypeVar("T")
#: How a user's function draws at random there.
DRAWS = {
    "Stage": "draw in a map(fn, rng=True) before it, whose function gets a row and a generator of its own",
    "TableStage": (
        "define open(), whose function gets the numbers and epochs of the rows, and draw from these and a "
        "seed (docs/extend.md has an example), or add what is drawn by a map(fn, rng=True) before it"
    ),
    "RowStage": "use map(fn, rng=True) instead, whose function gets a row and a generator of its own",
    "FinishingStage": "use map(fn, rng=True) instead, whose function gets a batch and a generator of its own",
    "Filter": "draw in a map(fn, rng=True) before it, and look here at its column; or use sample(fraction)",
    "FlatMap": "draw in a map(fn, rng=True) before it, which adds what was drawn to the row",
    "ImageTransform": "draw from torch's generator, which is seeded for each row, or use map(fn, rng=True)",
    "Map": "pass rng=True: the function is called as fn(row, rng), with a generator for each row",
    "ColumnFunction": "draw in a map(fn, rng=True) before it, or in a TableStage (see docs/extend.md)",
}
_COLUMNS = "map() takes a row; map_batches(fn) takes columns of many and replaces them, with_columns(fn) adds"
_SEED = "orders are drawn with the seed of a stage: pipe.shuffle(n, seed=0)"
#: What to write instead of other libraries' options.
ELSEWHERE = {
    "Stage": {},
    "Map": {
        "batched": _COLUMNS,
        "batch_size": _COLUMNS,
        "num_proc": "use num_workers=..., method='process'",
        "remove_columns": "map() replaces the row; drop_columns() leaves columns out",
        "with_indices": "enumerate() adds the row's number as a column",
    },
    "Loader": {
        "batch_sampler": "give it to trainpipes.from_dataset(dataset, batch_sampler=...)",
        "batch_size": "the pipeline makes the batches: pipe.batch(batch_size)",
        "collate_fn": "a stage after batch() makes the batch: pipe.batch(n).collate(fn), or pad_collate()",
        "dataset": "the pipeline is its first argument; trainpipes.from_dataset(dataset) makes one",
        "drop_last": "pipe.batch(n, drop_last=True)",
        "generator": _SEED,
        "in_order": "batches always come in order",
        "pin_memory_device": "pipe.to(device) brings batches to a device",
        "sampler": "give it to trainpipes.from_dataset(dataset, sampler=...)",
        "seed": _SEED,
        "shuffle": "a stage shuffles: pipe.shuffle(buffer_size, seed=0) before batch()",
    },
}
#: An example call, where other libraries' calls look different.
EXAMPLES = {"Stage": "", "Mix": 'mix({"a": a, "b": b}, weights={"a": 0.7, "b": 0.3})'}


def hint(of: Mapping[str, T], kind: type) -> T:
    """What a table says of a class of stages: of the first of its bases here that is in it."""
    ours = (base.__name__ for base in kind.__mro__ if base.__module__.startswith("trainpipes."))
    return next(of[name] for name in ours if name in of)


def refuse_unknown(options: Iterable[str], known: Sequence[str], kind: type, name: str) -> None:
    """Raise TypeError for an option that a class, called ``name``, does not take."""
    elsewhere = hint(ELSEWHERE, kind)
    for option in (one for one in options if one not in known):
        takes = f"{nearest(option, known)}; it takes {', '.join(known) or 'none'}"
        said = f": {elsewhere[option]}" if option in elsewhere else takes
        raise TypeError(f"{name}() has no option {option!r}{said}")


# Objects that have epochs, an order or a position of their own


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
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
    return "torchdata.nodes.base_node.BaseNode" in names
