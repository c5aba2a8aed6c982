"""Texts for people: about unknown names, warnings that a process gives once, errors of other packages without
secrets, and tables, which are the same on a terminal, in a notebook and in a file.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from trainpipes import errors

#: How functions begin that read data, here and elsewhere.
BEGINNINGS = ("read_", "from_", "load_", "open_", "scan_", "list_")
#: Packages and modules whose lines a warning does not point at.
OURS = ("trainpipes", "torch", "contextlib")
#: Characters of the columns that there are: a damaged file may have names of thousands.
MOST = 1000
log = logging.getLogger("trainpipes")

_warned: set[object] = set()

#: Messages of a kind that are all logged.
MOST_SAID = 10


def nearest(name: str, names: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` for a name close to a name in ``names``, else nothing.

    >>> nearest("shufle", ["shuffle", "repeat"]), nearest("from_csv", ["from_arrow", "read_csv"])
    (" (did you mean 'shuffle'?)", " (did you mean 'read_csv'?)")
    """
    format = next((name.removeprefix(b) for b in BEGINNINGS if name.startswith(b)), "")
    same = [known for known in names if known in [f"{b}{format}" for b in BEGINNINGS if format]]
    begun = [
        known
        for known in names
        if f"{known}_".startswith(f"{name}_") or f"{name}_".startswith(f"{known}_")
    ]
    close = same or difflib.get_close_matches(name, names, n=2, cutoff=0.6) or begun
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


#: What functions, classes and methods of other libraries are here, by their names.
ELSEWHERE = {
    **dict.fromkeys(
        ("concat", "concatenate_datasets", "ConcatDataset", "ChainDataset"), "tp.concat"
    ),
    **dict.fromkeys(
        ("FileLister", "ParquetDataFrameLoader"), "tp.read_parquet(files) and the like"
    ),
    **dict.fromkeys(
        ("open_files", "read_from_stream"),
        "tp.list_files(files), then a reader such as .read_bytes() or .read_files(parse)",
    ),
    "parse_json_files": "tp.read_json",
    "parse_csv": "tp.read_csv",
    "readlines": "tp.read_text",
    **dict.fromkeys(("WebDataset", "load_from_tar", "webdataset"), "tp.read_webdataset"),
    **dict.fromkeys(("Dataset", "MapStyleWrapper", "SequenceWrapper"), "tp.from_dataset(dataset)"),
    "IterableWrapper": "tp.from_iterable(make), or tp.from_dataset(items) for a list",
    "SamplerWrapper": "tp.from_dataset(dataset, sampler=sampler)",
    "Subset": "tp.from_dataset(Subset(dataset, indices)), or .shuffle(sampler=...)",
    **dict.fromkeys(
        ("detshuffle", "py1e", "py1br", "py1b", "py2s", "py1s"),
        ".shuffle(40_960, seed=0), before batch",
    ),
    **dict.fromkeys(
        ("DistributedSampler", "fullsync", "split_by_worker", "split_dataset_by_node"),
        ".sharding_filter",
    ),
    **dict.fromkeys(("Mapper", "map_tuple"), ".map(fn)"),
    "map_dict": '.map(lambda row: {**row, "x": fn(row["x"])})',
    **dict.fromkeys(
        ("threadpool_map", "async_map_batches", "ParallelMapper"), ".map(fn, num_workers=4)"
    ),
    **dict.fromkeys(("to_tuple", "drop", "slice", "unzip"), ".select, .drop_columns or .rename"),
    **dict.fromkeys(("decode", "routed_decode"), ".decode_image"),
    "torch_audio": ".decode_audio",
    "class_encode_column": ".encode_labels",
    **dict.fromkeys(
        ("DataCollatorWithPadding", "DataCollatorForSeq2Seq", "rows2columnar"),
        ".pad_collate, after batch",
    ),
    "DataCollatorForLanguageModeling": ".mask_tokens",
    **dict.fromkeys(("Batcher", "batched"), ".batch"),
    "collate_fn": ".collate(fn)",
    **dict.fromkeys(("bucketbatch", "max_token_bucketize"), ".bucket_by_length"),
    **dict.fromkeys(
        ("groupby", "group_by"),
        "pyarrow's group_by(key) before tp.from_arrow; of neighbors a StatefulStage, or "
        ".windows(n, within=key)",
    ),
    **dict.fromkeys(("window", "sliding_window"), ".windows(n, stride=1)"),
    "demux": ".split for parts by share; by a function, .filter(fn) for each part",
    "mux_longest": "tp.mix(..., max_epochs=1), which may begin with another source",
    "sample_multiplex": "tp.mix(..., weights={...}, max_epochs=1)",
    "RoundRobin": 'tp.mix(..., stop="first_exhausted")',
    **dict.fromkeys(
        (
            "MultiNodeWeightedSampler",
            "RandomMix",
            "Stream",
            "interleave_datasets",
            "interleave",
            "sample_from_datasets",
        ),
        "tp.mix",
    ),
    **dict.fromkeys(("zip_with_iter", "zip_with_map"), "tp.zip, for rows in the same order"),
    "fork": "pipe.map(fn) or tp.Loader(pipe) for each branch: they give the same rows",
    **dict.fromkeys(("header", "head", "limit"), ".take(n)"),
    "first": ".peek()",
    **dict.fromkeys(("collect", "to_list", "to_pylist", "take_all"), "list(pipe)"),
    **dict.fromkeys(("to_pandas", "to_polars", "to_df"), "DataFrame(list(pipe))"),
    "pipe": "fn(pipe)",
    "push_to_hub": ".write_parquet(folder), whose files the Hub takes",
    "flatten": ".flat_map(list), of lists; of structs .map(fn)",
    **dict.fromkeys(
        ("columns", "column_names", "features", "schema"), ".explain(), which has columns"
    ),
    "num_rows": ".explain(), which has rows",
    **dict.fromkeys(("sort", "sort_by"), "pyarrow's sort_by(column) before tp.from_arrow"),
    "apply": ".map(fn)",
    **dict.fromkeys(("iter_batches", "iter_torch_batches"), "tp.Loader(pipe), after .batch(n)"),
    "random_shuffle": '.shuffle(scope="global")',
    "padded_batch": ".batch(n).pad_collate()",
    "bucket_by_sequence_length": ".bucket_by_length",
    "cuda": '.to("cuda"), after batch',
    "set_length": ".take(n), which cuts the rows",
    "add_index": ".enumerate",
    **dict.fromkeys(("in_memory_cache", "on_disk_cache"), ".cache"),
    "to_parquet": ".write_parquet(folder)",
    "to_json": ".write_json(folder)",
    **dict.fromkeys(("MDSWriter", "ShardWriter"), ".write_parquet(folder) and the like"),
    "to_map_datapipe": ".to_map_dataset(path)",
    **dict.fromkeys(("pin_memory", "PinMemory"), ".pin()"),
    **dict.fromkeys(
        ("DataLoader", "DataLoader2", "Prefetcher", "WebLoader", "StreamingDataLoader"),
        "tp.Loader(pipe)",
    ),
    "load_dataset": 'tp.from_hf(load_dataset(name)["train"]), or tp.read_parquet(files) and the like',
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
    **dict.fromkeys(("Unbatcher", "unbatched"), ".flat_map(list) where a row is a list"),
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
    "mux": 'tp.mix(..., stop="first_exhausted"), which may begin with another source',
    "resampled": ".repeat",
    "in_batch_shuffle": ".shuffle, before batch",
    "prefetch": "tp.Loader, which reads ahead",
    "save_to_disk": ".write_arrow(folder)",
}


#: What attributes of a ``DataLoader`` are at a ``Loader``.
OF_LOADERS = {
    **dict.fromkeys(
        ("sampler", "batch_sampler"),
        "the order of the pipeline, another one in every epoch by itself; loader.set_epoch(n) chooses it",
    ),
    "dataset": "loader.pipeline; for the number of rows count those of the batches as they come",
    **dict.fromkeys(("batch_size", "drop_last"), "an option of .batch() in loader.pipeline"),
    "collate_fn": ".collate(fn) or .pad_collate() in loader.pipeline",
    "next": "next(iter(loader)), or loader.peek(), which does not move it on",
    "epoch": 'loader.metrics()["data/epoch"]',
    "reset": "loader.set_epoch(n)",
    **dict.fromkeys(("save", "load", "state"), "state_dict() and load_state_dict(state)"),
    **dict.fromkeys(("skip", "skip_batches", "skip_first_batches"), "load_state_dict(state)"),
}


def renamed(name: str, names: Sequence[str]) -> str:
    """What a name of another library is here, or the nearest of our ``names``.

    >>> renamed("interleave_datasets", ["mix"])
    ' (here that is tp.mix)'
    """
    ours = "" if name in names else ELSEWHERE.get(name)
    return f" (here that is {ours})" if ours else nearest(name, names)


def need_columns(
    present: Sequence[str], wanted: Sequence[str], caller: object, path: str | None = None
) -> None:
    """Raise unless all wanted columns are present."""
    known = frozenset(present)
    missing = [name for name in wanted if name not in known]
    if not missing:
        return
    texts = [name for name in present if isinstance(name, str)]  # a dict may have other keys
    said = ", ".join(f"{name!r}{nearest(name, texts)}" for name in missing)
    where = f" in {path}" if path else ""
    raise errors.SchemaError(
        f"{caller}: no column {said}{where}; there are {errors.shown([*present], MOST)}",
        path=path,
        stage=str(caller),
    )


def no_columns(row_type: str, caller: object) -> errors.SchemaError:
    """The error of a stage that works on columns."""
    if row_type == "dict":
        why = "rows here are Python objects that make none: put it before the stage that makes them"
        return errors.SchemaError(f"{caller} works on columns, and {why}", stage=str(caller))
    way = "make dicts with map() first"
    if row_type == "str":
        way += ", or add a reader, such as .read_parquet(), where these are paths of list_files()"
    return errors.SchemaError(
        f"{caller} works on columns, so that each row must be a dict, got {row_type}; {way}",
        stage=str(caller),
    )


def is_worth_a_line(count: int) -> bool:
    """Whether the n-th of a kind is logged: each of the first ten, then ever fewer of them.

    >>> [n for n in range(1, 1001) if is_worth_a_line(n)][9:13], is_worth_a_line(1000)
    ([10, 20, 30, 40], True)
    """
    return count <= MOST_SAID or set(str(count)[1:]) == {"0"}


def has_warned(key: object) -> bool:
    """Whether this process has given a warning with this key."""
    return key in _warned


def log_once(message: str) -> None:
    """Log something once in this process that asks nothing of the user."""
    if message not in _warned:
        _warned.add(message)
        log.info(message)


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


#: Values of an error that hold no text.
_PLAIN = (int, float, bytes, type(None))
#: Characters kept of the text of another package's error: some print whole answers of servers.
MOST_TEXT = 1000


class OriginalError(Exception):
    """The class name and the text of an error of another package."""


def clean(error: BaseException) -> Any:
    """What stands for an error, and for all that led to it: raise this, or name it as the cause.

    >>> clean(KeyError("https://host/a?sig=abc"))
    KeyError('https://host/a?sig=…')
    """
    return _clean(error, {})


def _clean(error: BaseException, known: dict[int, BaseException]) -> BaseException:
    if id(error) in known:
        return known[id(error)]
    stand_in = error if isinstance(error, errors.TrainpipesError) else _stand_in(error)
    known[id(error)] = stand_in
    cause, context, silent = error.__cause__, error.__context__, error.__suppress_context__
    stand_in.__cause__ = None if cause is None else _clean(cause, known)
    stand_in.__context__ = None if context is None else _clean(context, known)
    stand_in.__suppress_context__ = silent
    if stand_in is not error:
        stand_in.__traceback__ = error.__traceback__
    notes = getattr(error, "__notes__", None)
    if notes:
        stand_in.__notes__ = [errors.hidden(str(note)) for note in notes]
    return stand_in


def _stand_in(error: BaseException) -> BaseException:
    """An error of the first of its kinds that Python has itself, or else ``OriginalError``."""
    kind: Any = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    arguments: list[Any] = [_named(error)]
    if kind is type(error):
        arguments = [
            value if isinstance(value, _PLAIN) else errors.hidden(str(value))
            for value in error.args
        ]
    elif kind in (Exception, BaseException):
        kind = OriginalError
    try:
        stand_in: BaseException = kind(*arguments)
    except Exception:
        return OriginalError(_named(error))
    if isinstance(error, OSError) and isinstance(stand_in, OSError):
        stand_in.errno = error.errno
        if kind is type(error) and error.filename is not None:
            stand_in.filename = errors.hidden(str(error.filename))
    return stand_in


def _named(error: BaseException) -> str:
    message = errors.cut(errors.hidden(str(error)), MOST_TEXT)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


#: Columns where no terminal says how many it has, and those that a cell has at least.
WIDTH, NARROWEST = 100, 4


def terminal_width() -> int:
    """Columns of the terminal, or ``COLUMNS``."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def in_color(stream: Any) -> bool:
    """Whether a stream shows colors."""
    if os.environ.get("NO_COLOR"):
        return False
    known = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    return known or bool(os.environ.get("FORCE_COLOR"))


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Rows of cells in columns, two spaces apart.

    >>> print(table([["name", "n"], ["a", "1"], ["b c d e f", "2"]], width=11))
    name      n
    a         1
    b c d e   2
    f
    """
    sizes = [max(map(_widest, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        sizes = [min(size, width) for size in sizes]
        room = width - 2 * (len(sizes) - 1)
        while sum(sizes) > room and max(sizes) > NARROWEST:
            sizes[sizes.index(max(sizes))] -= 1
    lines = []
    for line in rows:
        cells = [folded(cell, size) for cell, size in zip(line, sizes, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = [
                p + " " * (size - errors.columns_of(p))
                for p, size in zip(parts, sizes, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


class Printed:
    """What prints as a table of its rows."""

    def _rows(self) -> Iterable[Sequence[str]]:
        """Cells, row by row: of most, a label and a text."""
        raise NotImplementedError

    def __str__(self) -> str:
        return table([*self._rows()])

    def __repr__(self) -> str:
        return str(self)


class Report(Printed):
    """A dataclass of what was found: its public fields are the data, and ``_rows`` the text."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        found: Any = self
        return asdict(found)


def folded(text: str, width: int) -> list[str]:
    """A text in lines of at most so many columns, cut before words if possible.

    >>> folded("one two three", 8)
    ['one two', 'three']
    """
    return [part for line in text.split("\n") for part in _folded(line, max(2, width))]


def _folded(line: str, width: int) -> list[str]:
    if errors.columns_of(line) <= width:
        return [line]
    lines, left = [""], width
    for word in re.findall(r"\S+\s?|\s+", line):
        step = width if errors.columns_of(word) <= width or word.isascii() else width // 2
        for part in (word[k : k + step] for k in range(0, len(word), step)):
            if errors.columns_of(part.rstrip()) > left:
                lines.append("")
                left = width
            lines[-1] += part
            left -= errors.columns_of(part)
    return [part.rstrip() for part in lines]


def _widest(cell: str) -> int:
    return max(map(errors.columns_of, cell.split("\n")))
