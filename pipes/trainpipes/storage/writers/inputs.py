"""Which files rows are read from, as they are now: what a finished folder is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainpipes.sources.files.list_files import FileList
from trainpipes.state.cursor import checksum


def about_inputs(source: Any) -> dict[str, str]:
    """What a manifest says of the files that a source reads: "inputs", a checksum of their sizes, and of
    their times or etags. Nothing where there are no files.

    Args:
        source: of a plan, opened.
    """
    stamps: list[object] = []
    for files in file_lists(source):
        for size, stamp in zip(files.sizes.tolist(), files.stamps, strict=True):
            stamps += [size, stamp]
    return {"inputs": checksum(*stamps)} if stamps else {}


def file_lists(source: Any) -> Iterator[FileList]:
    """The files of a source, and of those that it puts together, in order."""
    files, mixed = getattr(source, "files", None), getattr(source, "sources", None)
    if isinstance(files, FileList):
        yield files
    if isinstance(mixed, Mapping):
        for name in sorted(mixed):
            yield from file_lists(mixed[name])
    for joined in getattr(source, "joined_inputs", ()):
        yield from file_lists(joined.source)


def places_of(source: Any) -> Iterator[str]:
    """A path or URL of each place that a source reads files from.

    Args:
        source: of a plan, opened.
    """
    for files in file_lists(source):
        systems = files.system_of.tolist()
        yield from (str(files.names[systems.index(system)]) for system in sorted(set(systems)))
    paths = getattr(getattr(source, "_dataset", None), "paths", ())  # of memory maps
    yield from (str(path) for path in paths[:1])
