"""What is repacked: files of any format, or a pipeline; and whether the output would be part of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError
from trainpipes.kinds.source import RowSource, RowStream
from trainpipes.pipeline import Pipeline
from trainpipes.sources.arrow.read_arrow import ReadArrow
from trainpipes.sources.files.formats import READERS, ends_of_names, reader_by_name
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.parquet.read_parquet import ReadParquet
from trainpipes.start import from_memmap, list_files
from trainpipes.storage.writers.inputs import file_lists
from trainpipes.storage.writers.own_input import refuse_own_input
from trainpipes.storage.writers.storage import Storage

#: Readers that have no choice of columns.
WHOLE = ("read_text", "read_images")
#: The schema's metadata that is kept: how Hugging Face's datasets say what columns mean.
KEPT_METADATA = b"huggingface"


def given_rows(
    data: Any,
    columns: Sequence[str] | None,
    storage_options: Mapping[str, Any] | None,
    asker: str,
) -> Pipeline:
    """The rows of a pipeline, or of files whose format their names say.

    Raises:
        ConfigError: it is neither, or the names do not say one format.
    """
    if isinstance(data, Pipeline):
        return data if columns is None else data.select(*columns)
    paths = _paths(data, asker)
    if len(paths) == 1 and (Path(paths[0]) / "manifest.json").is_file():
        rows = from_memmap(paths[0])
        return rows if columns is None else rows.select(*columns)
    reader = _reader(paths, storage_options, asker)
    read = getattr(list_files(paths, storage_options=storage_options), reader)
    found: Pipeline = read() if columns is None or reader in WHOLE else read(list(columns))
    return found if columns is None or reader not in WHOLE else found.select(*columns)


def _paths(data: Any, asker: str) -> list[str]:
    several = [data] if isinstance(data, str | os.PathLike) else data
    good = isinstance(several, Sequence) and len(several) > 0
    if not good or not all(isinstance(path, str | os.PathLike) for path in several):
        raise ConfigError(
            f"{asker}() takes files (a path, folder, glob, URL, or a list of them) or a pipeline of "
            f"rows, got {shown(data)}"
        )
    return [os.fspath(path) for path in several]


def _reader(paths: Sequence[str], storage_options: Mapping[str, Any] | None, asker: str) -> str:
    named = [reader_by_name(path) for path in paths]
    if "" in named:  # folders, or globs without an end
        listed = list_files(paths, suffix=ends_of_names(), storage_options=storage_options)
        named = [reader_by_name(path) for path in listed.distributed(rank=0, world_size=1)]
    found = sorted(set(named))
    if found == [""] or len(found) != 1:
        kinds = ", ".join(
            f"{reader} for {_first(paths, named, reader)}" for reader in found if reader
        )
        raise ConfigError(
            f"{asker}() reads files of one format, which the ends of their names say "
            f"({', '.join(ends[0] for ends in READERS.values())}); got {kinds or 'none that is known'}: give "
            f"files of one format, or read them yourself, and give {asker}() the pipeline"
        )
    return found[0]


def _first(paths: Sequence[str], named: Sequence[str], reader: str) -> str:
    return paths[named.index(reader)] if len(paths) == len(named) else "some"


def files_of(source: RowSource | RowStream) -> FileList | None:
    """The files that a source reads, if it reads any."""
    found = getattr(source, "files", None)
    return found if isinstance(found, FileList) else None


def inputs_of(data: Any, source: RowSource | RowStream) -> Iterator[str]:
    """Paths or URLs that rows are read from, as far as they can be told: one for each file system."""
    seen = set()
    for files in file_lists(source):
        for name in files.names:
            scheme = name.partition("://")[0] if "://" in name else ""
            if scheme not in seen:
                seen.add(scheme)
                yield name
    if not isinstance(data, Pipeline):
        yield from _paths(data, "repack")


def refuse_inside(data: Any, source: RowSource | RowStream, out: Storage, asker: str) -> None:
    """Raise ConfigError if the output folder is one of the input's, or would be read with it.

    Args:
        data: as it was given. Files of all formats are looked for in folders, where it is no pipeline.
    """
    suffixes = None if isinstance(data, Pipeline) else ends_of_names()
    refuse_own_input(source, out, ["part-00000.parquet"], asker, suffixes)


def _is_local(path: str) -> bool:
    return "://" not in path and "::" not in path


def kept_metadata(pipeline: Pipeline, source: RowSource | RowStream) -> dict[bytes, bytes] | None:
    """What the first file's schema says of the meaning of its columns, where all of them are taken."""
    files = files_of(source)
    stages = pipeline.stages
    if files is None or not len(files) or len(stages) > 2 or not _is_local(files.names[0]):
        return None
    reader = stages[-1]
    if not isinstance(reader, ReadParquet | ReadArrow) or reader.columns is not None:
        return None
    if isinstance(reader, ReadParquet):
        schema = pq.read_schema(files.names[0])
    else:
        with pa.OSFile(files.names[0], "rb") as file:
            try:
                schema = pa.ipc.open_file(file).schema
            except pa.ArrowInvalid:
                file.seek(0)
                schema = pa.ipc.open_stream(file).schema
    value = (schema.metadata or {}).get(KEPT_METADATA)
    return None if value is None else {KEPT_METADATA: value}
