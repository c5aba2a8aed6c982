"""How a Parquet file differs from the one that was listed: said when a read has failed."""

from __future__ import annotations

import pyarrow as pa

from trainpipes.errors import UnreachableError
from trainpipes.sources.files.byte_ranges import present_size
from trainpipes.sources.files.each_file import BadFileError, reason
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.parquet.index import ParquetIndex, parse_footer, read_footer
from trainpipes.sources.remote.retry import Requests

GONE = "gone"


def change_of(files: FileList, index: ParquetIndex, file: int, requests: Requests) -> str:
    """What has changed about a file: the saved and the present value. "gone" if it is not there;
    nothing if it is the same, or cannot be read.

    Raises:
        UnreachableError: the server does not say.
    """
    system, path = files.system(file), files.paths[file]
    size = int(index.sizes[file])
    try:
        present = present_size(files, file, requests)
        if present is not None and present != size:
            return f"it had {size:,} bytes, and has {present:,}"
        footer = read_footer(system, path, size, requests)
        if index.is_footer(file, footer):
            return ""
    except FileNotFoundError:
        return GONE
    except BadFileError as error:
        return reason(error)
    except OSError as error:
        if isinstance(error, UnreachableError):
            raise
        return ""
    try:
        metadata = parse_footer(footer)
    except (pa.ArrowException, OSError) as error:
        return reason(error)
    saved = index.rows[index.groups(file)].tolist()
    rows = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
    if len(rows) != len(saved):
        return f"it had {len(saved)} row groups, and has {len(rows)}"
    for number, (old, new) in enumerate(zip(saved, rows, strict=True)):
        if old != new:
            return f"its row group {number} had {old:,} rows, and has {new:,}"
    return "it has as many bytes and rows as before, and another footer"
