"""What ``repack`` reads: a pipeline, or files whose format their names say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes._internal.checks import require
from trainpipes.errors import ConfigError, MissingFilesError
from trainpipes.kinds.source import RowSource, RowStream
from trainpipes.pipeline import Pipeline
from trainpipes.sources.arrow.read_arrow import ReadArrow
from trainpipes.sources.files.file_list import FileList
from trainpipes.sources.files.file_reader import (
    READERS,
    ends_of_names,
    reader_by_name,
    suffixes_of,
)
from trainpipes.sources.memmap.manifest import is_memmap
from trainpipes.sources.parquet.read_parquet import ReadParquet
from trainpipes.start import from_memmap, list_files

#: The schema's metadata that is kept: how Hugging Face's datasets say what columns mean.
KEPT_METADATA = b"huggingface"


def given_rows(
    data: Any,
    columns: Sequence[str] | None,
    storage_options: Mapping[str, Any] | None,
    caller: str,
) -> Pipeline:
    rows = data
    if not isinstance(data, Pipeline):
        several = [data] if isinstance(data, str | os.PathLike) else data
        good = isinstance(several, Sequence) and len(several) > 0
        good = good and all(isinstance(path, str | os.PathLike) for path in several)
        rule = "files (a path, folder, glob, URL, or a list of them) or a pipeline of rows"
        require(good, f"{caller}(data)", rule, data)
        paths = [os.fspath(path) for path in several]
        if len(paths) == 1 and is_memmap(paths[0]):
            rows = from_memmap(paths[0])
        else:
            reader = _reader(paths, storage_options, caller)
            rows = getattr(list_files(paths, storage_options=storage_options), reader)()
    found: Pipeline = rows if columns is None else rows.select(*columns)
    return found


def _reader(paths: Sequence[str], storage_options: Mapping[str, Any] | None, caller: str) -> str:
    found = {*map(reader_by_name, paths)}
    if "" in found:  # folders, or globs without an end
        try:
            found = _readers_below(paths, ends_of_names(), storage_options)
        except MissingFilesError:  # notes alone are text
            found = _readers_below(paths, suffixes_of("read_text"), storage_options)
    if found == {""} or len(found) != 1:
        raise ConfigError(
            f"{caller}() reads files of one format, which the ends of their names say "
            f"({', '.join(ends[0] for ends in READERS.values())}); got files for "
            f"{', '.join(sorted(filter(None, found))) or 'no reader that is known'}: give files of one "
            f"format, or read them yourself, and give {caller}() the pipeline"
        )
    return found.pop()


def _readers_below(
    paths: Sequence[str], suffixes: Sequence[str], storage_options: Mapping[str, Any] | None
) -> set[str]:
    listed = list_files(paths, suffix=suffixes, storage_options=storage_options)
    return {reader_by_name(path) for path in listed.distributed(rank=0, world_size=1)}


def kept_metadata(pipeline: Pipeline, source: RowSource | RowStream) -> dict[bytes, bytes] | None:
    """The first file's schema metadata, where all columns are taken."""
    files, reader = getattr(source, "files", None), pipeline.stages[-1]
    if not isinstance(files, FileList) or not len(files) or len(pipeline.stages) > 2:
        return None
    if not isinstance(reader, ReadParquet | ReadArrow) or reader.columns is not None:
        return None
    with files.system(0).open(files.paths[0], "rb") as file:
        if isinstance(reader, ReadParquet):
            schema = pq.read_schema(file)
        else:
            try:
                schema = pa.ipc.open_file(file).schema
            except pa.ArrowInvalid:
                file.seek(0)
                schema = pa.ipc.open_stream(file).schema
    value = (schema.metadata or {}).get(KEPT_METADATA)
    return None if value is None else {KEPT_METADATA: value}
