"""Messages about names that are not there: of columns, and of readers of files."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from trainpipes.errors import SchemaError

__all__ = ["need_columns", "nearest", "nearest_reader", "reader_of"]

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
