"""Messages about unknown names, and warnings that a process gives once."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Sequence

from trainpipes.errors import SchemaError
from trainpipes.errors.text import shown

#: How functions begin that read data, here and elsewhere.
BEGINNINGS = ("read_", "from_", "load_", "open_", "scan_", "list_")
#: Packages whose lines a warning does not point at.
OURS = ("trainpipes", "torch")
#: Characters of the columns that there are: a damaged file may have names of thousands.
MOST = 1000
_warned: set[object] = set()


def nearest(name: str, names: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` for a name close to one of ``names``, else nothing.

    >>> nearest("shufle", ["shuffle", "repeat"]), nearest("from_csv", ["from_arrow", "read_csv"])
    (" (did you mean 'shuffle'?)", " (did you mean 'read_csv'?)")
    """
    format = next((name.removeprefix(b) for b in BEGINNINGS if name.startswith(b)), "")
    same = [one for one in names if one in [f"{b}{format}" for b in BEGINNINGS if format]]
    begun = [
        one for one in names if f"{one}_".startswith(f"{name}_") or f"{name}_".startswith(f"{one}_")
    ]
    close = same or difflib.get_close_matches(name, names, n=2, cutoff=0.6) or begun
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


#: What functions, classes and methods of other libraries are here, by their names.
ELSEWHERE = {
    "interleave_datasets": "tp.mix",
    "load_dataset": 'tp.from_hf(load_dataset(name)["train"]), or tp.read_parquet(files) and the like',
    "concatenate_datasets": "tp.concat",
    "ConcatDataset": "tp.concat",
    "ChainDataset": "tp.concat",
    "StackDataset": "tp.zip",
    "StreamingDataset": "tp.read_parquet(files) and the like",
    "IterableDataset": "tp.from_iterable",
    "TensorDataset": "tp.from_tensors",
    "StatefulDataLoader": "tp.Loader",
    "from_generator": "tp.from_iterable",
    "from_dict": "tp.from_arrow(pa.table(...))",
    "from_pandas": "tp.from_arrow(pa.Table.from_pandas(...))",
    "from_list": "tp.from_dataset",
    "with_format": ".batch(n).collate(format=...)",
    "set_format": ".batch(n).collate(format=...)",
    "flatmap": ".flat_map",
    "shuffled_flatmap": ".flat_map(...).shuffle(...)",
    "unbatch": ".flat_map(list) where a row is a list; after batch(), leave batch() out",
    "select_columns": ".select",
    "remove_columns": ".drop_columns",
    "rename_column": ".rename",
    "rename_columns": ".rename",
    "cast_column": ".with_columns",
    "add_column": ".with_columns",
    "train_test_split": ".split",
    "random_split": ".split",
    "shard": ".sharding_filter",
    "split_by_node": ".sharding_filter",
    "cycle": ".repeat",
    "unique": ".deduplicate",
    "drop_duplicates": ".deduplicate",
    "with_epoch": ".repeat, and a loop that counts steps",
    "mux": "tp.mix",
    "resampled": ".repeat",
    "in_batch_shuffle": ".shuffle, before batch",
    "prefetch": "tp.Loader, which reads ahead",
    "save_to_disk": ".write_arrow(folder)",
}


def renamed(name: str, names: Sequence[str]) -> str:
    """What a name of another library is here, or the nearest of our ``names``.

    >>> renamed("interleave_datasets", ["mix"])
    ' (here that is tp.mix)'
    """
    found = "" if name in names else ELSEWHERE.get(name)
    return f" (here that is {found})" if found else nearest(name, names)


def need_columns(
    present: Sequence[str], wanted: Sequence[str], caller: object, path: str | None = None
) -> None:
    """Raise unless all wanted columns are present."""
    known = frozenset(present)
    missing = [name for name in wanted if name not in known]
    if not missing:
        return
    said = ", ".join(f"{name!r}{nearest(name, present)}" for name in missing)
    where = f" in {path}" if path else ""
    raise SchemaError(
        f"{caller}: no column {said}{where}; there are {shown([*present], MOST)}",
        path=path,
        stage=str(caller),
    )


def no_columns(found: str, caller: object) -> SchemaError:
    """The error of a stage that works on columns."""
    return SchemaError(
        f"{caller} works on columns, so that each row must be a dict, got {found}; make dicts with map() "
        "first",
        stage=str(caller),
    )


def has_warned(key: object) -> bool:
    """Whether this process has given a warning with this key."""
    return key in _warned


def warn_once(message: str, key: object = None) -> None:
    """Warn of something once in this process, at the line of the user's that led to it."""
    key = key or message
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, UserWarning, stacklevel=_users_level())


def _users_level() -> int:
    level, frame = 2, sys._getframe(2)
    while frame.f_globals.get("__name__", "").partition(".")[0] in OURS and frame.f_back:
        level, frame = level + 1, frame.f_back
    return level
