"""Which reader files are for, by the ends of their names."""

from __future__ import annotations

#: What reads files, by the ends of their names.
READERS = {
    "read_parquet": (".parquet", ".pq"),
    "read_json": (".jsonl", ".ndjson", ".json"),
    "read_csv": (".csv", ".tsv"),
    "read_arrow": (".arrow", ".arrows", ".feather", ".ipc"),
    "read_text": (".txt", ".text"),
    "read_webdataset": (".tar", ".tgz"),
    "read_numpy": (".npy", ".npz"),
    "read_images": (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"),
}
#: Ends of the names of compressed files, after those of the format.
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")


def ends_of_names() -> list[str]:
    """Ends of the names of all files that some reader reads."""
    ends = [end for several in READERS.values() for end in several]
    return ends + [end + more for end in ends for more in COMPRESSED]


def reader_by_name(path: str) -> str:
    """The reader of a file by the end of its name; "" where that does not say.

    >>> reader_by_name("data/chats.jsonl.gz"), reader_by_name("README.md")
    ('read_json', '')
    """
    name = path.split("?")[0].lower()
    for end in COMPRESSED:
        name = name.removesuffix(end)
    return next((reader for reader, ends in READERS.items() if name.endswith(ends)), "")
