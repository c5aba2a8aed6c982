"""Messages about names that are not there: of columns, and of readers of files."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from trainpipes.errors import SchemaError

__all__ = ["need_columns", "nearest", "nearest_reader", "other_name", "reader_of"]

#: How other libraries call a format, by what reads it here.
READERS = {
    "from_hf": ("hf", "huggingface", "datasets", "hf_dataset"),
    "from_ray": ("ray", "ray_data", "from_ray_data", "ray_dataset"),
    "from_torchdata": ("torchdata", "node", "nodes"),
    "read_arrow": ("arrow", "ipc", "feather", "disk", "from_disk"),
    "read_bytes": ("bytes", "binary", "binary_files"),
    "read_csv": ("csv", "tsv", "table"),
    "read_images": ("images", "image", "image_folder", "imagefolder"),
    "read_json": ("json", "jsonl", "ndjson", "jsonlines", "json_lines"),
    "read_numpy": ("numpy", "npy", "npz"),
    "read_parquet": ("parquet", "pq"),
    "read_webdataset": ("webdataset", "wds", "tar", "tars"),
    "read_text": ("text", "txt", "lines", "textfile", "text_file"),
}
#: What to write for a method or function that other libraries have, by its name there.
ELSEWHERE = {
    "add_column": "with_columns(fn) adds columns",
    "apply": "map(fn), or map_batches(fn) for columns",
    "batched": "batch(n)",
    "bucketbatch": "bucket_by_length(batch_size)",
    "chain": "trainpipes.concat(a, b)",
    "class_encode_column": "encode_labels(column)",
    "collect": "list(pipe)",
    "columns": "column_names",
    "concat": "trainpipes.concat(a, b)",
    "concatenate": "trainpipes.concat(a, b)",
    "concatenate_datasets": "concat(a, b)",
    "cycle": "repeat(), or repeat(times)",
    "dataloader": "trainpipes.Loader(pipe)",
    "DataLoader": "Loader(pipe)",
    "demux": "filter(fn), once for each part, or split(parts)",
    "features": "column_names",
    "first": "peek()",
    "fork": "pipe itself, as often as needed: its methods return new pipelines and never change it",
    "group_by_length": "bucket_by_length(batch_size)",
    "groupby": "bucket_by_length(batch_size) for groups by length; group by a key before from_arrow(table)",
    "head": "take(n), or peek() for the first item",
    "header": "take(n)",
    "in_batch_shuffle": "shuffle(buffer_size)",
    "in_batches": "batch(n)",
    "interleave": 'trainpipes.mix({"a": a, "b": b})',
    "interleave_datasets": 'mix({"a": a, "b": b})',
    "limit": "take(n)",
    "load_dataset": 'from_hf(datasets.load_dataset(...)), or read_parquet("data/*.parquet")',
    "max_token_bucketize": "bucket_by_length(max_tokens=n)",
    "mux": 'trainpipes.mix({"a": a, "b": b})',
    "mux_longest": 'trainpipes.mix({"a": a, "b": b}, max_epochs=1)',
    "padded_batch": "batch(n).pad_collate()",
    "prefetch": "trainpipes.Loader(pipe), which works ahead by itself",
    "random_split": 'split({"train": 0.9, "valid": 0.1})',
    "remove_columns": "drop_columns(*columns)",
    "rename_column": "rename({old: new})",
    "rename_columns": "rename({old: new})",
    "sample_multiplex": 'trainpipes.mix({"a": a, "b": b}, weights={"a": 0.7, "b": 0.3})',
    "save_to_disk": "write_arrow(folder)",
    "select_columns": "select(*columns)",
    "set_format": "collate() for tensors; map_batches(fn, format=...) for columns",
    "set_length": "take(n); estimate_len() says about how long an epoch is",
    "shard": "sharding_filter(), which finds the ranks, or distributed(rank=..., world_size=...)",
    "slice": "select(*columns) for columns, take(n) and skip(n) for rows",
    "to_json": "write_json(folder)",
    "to_list": "list(pipe)",
    "to_map_datapipe": "to_map_dataset()",
    "to_parquet": "write_parquet(folder)",
    "train_test_split": 'split({"train": 0.9, "test": 0.1})',
    "transform": "map(fn)",
    "unique": "value_counts(column)",
    "unzip": "select(*columns), once for each part",
    "with_format": "collate() for tensors; map_batches(fn, format=...) for columns",
    "zipper": "zip(other)",
}
BEGINNINGS = ("read_", "from_", "load_", "open_", "scan_", "list_")


def nearest(name: str, names: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` for a name close to one of ``names``, else nothing."""
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def nearest_reader(name: str, names: Sequence[str]) -> str:
    """What ``nearest`` says of a name, which may be that of a format's reader in another library.

    >>> nearest_reader("from_csv", ["from_arrow", "read_csv"])
    " (did you mean 'read_csv'?)"
    """
    format = next((name.removeprefix(b) for b in BEGINNINGS if name.startswith(b)), name)
    known = [reader for reader, others in READERS.items() if format in others and reader in names]
    return f" (did you mean {known[0]!r}?)" if known else nearest(name, names)


def other_name(name: str, names: Sequence[str]) -> str:
    """What to write for a name that is not there, which another library may have; "" if nothing is known.

    >>> other_name("limit", ["take"]), other_name("shufle", ["shuffle"])
    (': write take(n)', " (did you mean 'shuffle'?)")
    """
    return f": write {ELSEWHERE[name]}" if name in ELSEWHERE else nearest_reader(name, names)


def reader_of(path: str) -> str:
    """The reader of files of a format that can't be mistaken for text, by a file's name; "" for others.

    >>> reader_of("data/chats.jsonl.gz"), reader_of("notes.txt")
    ('read_json', '')
    """
    ends = path.rsplit("/", 1)[-1].lower().split(".")[1:]
    found = (reader for reader, names in READERS.items() if {*ends} & {*names})
    return next((reader for reader in found if reader != "read_text"), "")


def need_columns(
    present: Sequence[str], wanted: Sequence[str], asker: object, path: str | None = None
) -> None:
    """Raise unless all wanted columns are present.

    Raises:
        SchemaError: names the missing ones, the nearest names, and all that are there.
    """
    missing = [name for name in wanted if name not in present]
    if not missing:
        return
    said = ", ".join(f"{name!r}{nearest(name, present)}" for name in missing)
    where = f" in {path}" if path else ""
    raise SchemaError(
        f"{asker}: no column {said}{where}; there are {list(present)}", path=path, stage=str(asker)
    )
