"""What ``repack`` reads: a pipeline, or files whose format their names say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes._internal.checks import require
from trainpipes.kinds.source import RowSource, RowStream
from trainpipes.pipeline import Pipeline
from trainpipes.sources.arrow.read_arrow import ReadArrow
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.parquet.read_parquet import ReadParquet
from trainpipes.start import read_by_name

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
        rows = read_by_name(paths, storage_options, f"{caller}()")
    found: Pipeline = rows if columns is None else rows.select(*columns)
    return found


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
