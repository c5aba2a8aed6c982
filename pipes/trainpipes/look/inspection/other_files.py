"""What files of other formats than Parquet say of themselves, file by file.

Arrow and NumPy files, memory maps and archives have headers. JSON, CSV and text have none: files of moderate
size are read once to count their rows, of larger ones only the beginning is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa

from trainpipes.columns.columns import table_of
from trainpipes.errors import ConfigError, TrainpipesError, UnreachableError
from trainpipes.kinds.source import RowSource
from trainpipes.look.inspection.given_files import GivenFiles
from trainpipes.look.inspection.inspection import BadFile
from trainpipes.look.inspection.part import Found, Part, own_reason
from trainpipes.look.inspection.text_head import read_head
from trainpipes.sources.arrow.read_arrow import ReadArrow
from trainpipes.sources.compressed.streams import kind_by_name
from trainpipes.sources.files.each_file import each_file, reason
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.list_files import FileList, ListFiles
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.memmap.from_memmap import FromMemmap
from trainpipes.sources.numpy.read_numpy import ReadNumpy
from trainpipes.sources.remote.retry import Requests, Stopped
from trainpipes.sources.tar.read_webdataset import ReadWebdataset
from trainpipes.sources.text.read_csv import ReadCsv
from trainpipes.sources.text.read_json import ReadJson
from trainpipes.sources.text.read_text import ReadText
from trainpipes.sources.text.text_reader import TextReader
from trainpipes.sources.whole_files.read_images import ReadImages

__all__ = ["other_files"]

#: Bytes of text that are read once to count rows: about 1 s a GB. Of compressed and of remote files, which
#: take 8 s a GB and more, a quarter.
COUNTED_BYTES = 256 << 20
#: Files of which the beginning is looked at where they are too large, evenly spread; and of how many of these
#: it is looked at whether they can be entered at several places, if they are compressed.
HEADS, MEMBERS_OF = 64, 4
#: What an archive that can only be read from its start may have, to be read whole.
WHOLE_BYTES = 256 << 20

READERS: dict[str, Callable[[], FileReader]] = {
    "read_arrow": ReadArrow,
    "read_csv": partial(ReadCsv, index=False),
    "read_json": partial(ReadJson, index=False),
    "read_numpy": ReadNumpy,
    "read_text": partial(ReadText, index=False),
    "read_webdataset": partial(ReadWebdataset, index=False, missing="null"),
}


def other_files(given: GivenFiles) -> Found:
    """What files say of themselves.

    Raises:
        TrainpipesError: a memory map, or the folder of images, cannot be opened.
        UnreachableError: a server does not answer, or denies access.
    """
    if given.reader == "from_memmap":
        return _memmap(given)
    if given.reader == "read_images":
        return _images(given)
    reader = READERS[given.reader]()
    found = Found("record batches" if given.reader == "read_arrow" else "blocks")
    files = given.files
    most = COUNTED_BYTES
    if given.remote or any(map(kind_by_name, files.names)):
        most //= 4
    if isinstance(reader, TextReader) and int(np.maximum(files.sizes, 0).sum()) > most:
        picked = list(range(0, len(files), -(-len(files) // HEADS)))
        look = partial(read_head, files, reader.form, set(picked[:MEMBERS_OF]))
    else:
        picked, look = [], partial(_opened, files, reader)
        for file in range(len(files)):
            from_start = isinstance(reader, ReadWebdataset) and not _seeks(files, file)
            if from_start and int(files.sizes[file]) > WHOLE_BYTES:
                found.passed_over.append(files.names[file])
                continue
            picked.append(file)
    read = each_file(
        files, partial(_kept, files, look), "inspect_files()", "data", wanted=picked, least=1,
        job="looking at files",
    )  # fmt: skip
    for file, part in read.items():
        if isinstance(part, BadFile):
            found.bad.append(part)
        else:
            found.parts.append(part)
            kind = kind_by_name(files.names[file])
            found.codecs[kind or "none"] += part.size
    if len(picked) + len(found.passed_over) < len(files):
        _spread(found, files, set(picked))
    return found


def _seeks(files: FileList, file: int) -> bool:
    """Whether a part of an archive can be had without the bytes before it."""
    name = files.names[file].lower()
    return is_local(files.system(file)) and not kind_by_name(name) and not name.endswith(".tgz")


def _kept(
    files: FileList, look: Callable[[int, Requests], Part], file: int, requests: Requests
) -> Part | BadFile:
    """What is found of a file, or why nothing is."""
    try:
        return look(file, requests)
    except (UnreachableError, Stopped, MemoryError, ConfigError):
        raise
    except TrainpipesError as error:
        return BadFile(files.names[file], own_reason(files.names[file], error))
    except Exception as error:
        return BadFile(files.names[file], reason(error))


def _opened(files: FileList, reader: FileReader, file: int, _: Requests) -> Part:
    """A file that is opened as a pipeline opens it."""
    one = files.pick(np.array([file], dtype=np.int64))
    source = reader.open_files([ListFiles.of(one, one.names)])
    return _part(files.names[file], max(0, int(files.sizes[file])), source)


def _part(name: str, size: int, source: RowSource) -> Part:
    rows = int(source.lengths.sum())
    schema = source.schema
    if schema is None:  # rows are tensors
        block = int(np.argmax(source.lengths)) if rows else -1
        schema = pa.schema([])
        if block >= 0:
            schema = table_of(source.reader().read(block, 0, 1), "inspect_files()").schema
    block_bytes = source.block_bytes
    row_bytes = source.row_bytes or (size / rows if rows else 0.0)
    if block_bytes is None:
        block_bytes = source.lengths.astype(np.float64) * row_bytes
    return Part(
        name, size, rows, True, source.lengths, block_bytes, row_bytes, schema, lambda: source
    )


def _memmap(given: GivenFiles) -> Found:
    urls = list(given.urls)
    source = FromMemmap(urls if len(urls) > 1 else urls[0]).open()
    row_bytes = source.row_bytes or 0.0
    size = int(row_bytes * int(source.lengths.sum()))
    part = _part(given.urls[0], size, source)
    found = Found("blocks", [part], memory_maps=len(np.unique(source.file_of_block)))
    found.codecs["none"] = size
    return found


def _images(given: GivenFiles) -> Found:
    """Images, with their classes where all lie in folders of classes."""
    files, found = given.files, Found("blocks")
    empty = np.flatnonzero(files.sizes == 0)
    found.bad = [BadFile(files.names[file], "empty: 0 bytes") for file in empty.tolist()]
    files = files.pick(np.flatnonzero(files.sizes != 0).astype(np.int64))
    if not len(files):
        return found
    stage = ListFiles.of(files, given.urls)
    try:
        source: RowSource = ReadImages().open_files([stage])
    except ConfigError:  # they lie in no folders of classes
        source = ReadImages(labels=None).open_files([stage])
    size = int(np.maximum(files.sizes, 0).sum())
    found.parts.append(_part(files.names[0], size, source))
    found.codecs["none"] = size
    return found


def _spread(found: Found, files: FileList, picked: set[int]) -> None:
    """Count the rows of files that were not looked at as if they were like the others."""
    size = sum(part.size for part in found.parts)
    rest = sum(max(0, int(files.sizes[file])) for file in range(len(files)) if file not in picked)
    if not size:
        return
    for part in found.parts:
        part.rows, part.counted = int(part.rows * (1 + rest / size)), False
