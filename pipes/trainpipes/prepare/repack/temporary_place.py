"""Where temporary files lie, and whether the disks have room."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes._internal.checks import local_path
from trainpipes._internal.text import amount, shown
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.kinds.source import RowSource, RowStream
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.repack.options import Options
from trainpipes.prepare.repack.temporary import TemporaryFiles
from trainpipes.sources.arrow.read_arrow import ReadArrow
from trainpipes.sources.files.file_rows import READERS, ends_of_names, reader_by_name
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.parquet.read_parquet import ReadParquet
from trainpipes.start import from_memmap, list_files
from trainpipes.state.cursor import checksum
from trainpipes.storage.writers.inputs import file_lists, refuse_own_input
from trainpipes.storage.writers.manifest import UNFINISHED, read_manifest
from trainpipes.storage.writers.storage import LocalStorage, Storage

#: What temporary files take, and files that are written, of the rows' bytes in memory: at least, since
#: data that cannot be compressed takes twice and four times as much.
TEMPORARY_SHARE, OUTPUT_SHARE = 0.5, 0.25
#: The folder of temporary files, where none is given.
TEMPORARY = ".repack"


class TemporaryPlace:
    """Where the temporary files of a folder lie.

    Args:
        storage: the folder that is written to.
        given: a path or URL of the user's, or None.
        options: of the folder's file system.
        shared: whether other machines read them.
        asker: for messages.

    Attributes:
        root: their folder; None where it is made on this machine when it is needed.
    """

    def __init__(
        self,
        storage: Storage,
        given: Any,
        options: Mapping[str, Any] | None,
        shared: bool,
        asker: str,
    ) -> None:
        self._storage, self._options, self._asker = storage, options or {}, asker
        self.root: str | None = None
        # More than one output may have its temporary files in one folder.
        name = f"repack-{checksum(storage.root)}"
        if given is None:
            if shared or isinstance(storage, LocalStorage):
                self.root = storage.at(TEMPORARY)
        elif isinstance(given, str) and "://" in given:
            self.root = f"{given.rstrip('/')}/{name}"
        else:
            folder = local_path(given, f"{asker}(temp_dir)")
            self.root = str(Path(folder).expanduser().absolute() / name)

    def files(self, before: str | None) -> TemporaryFiles:
        """The temporary files.

        Args:
            before: their folder when the work was begun. If it is not to be any more, they are removed.
        """
        root = self.root
        if root is None and before is not None and os.path.isdir(before):
            root = before
        if before not in (None, root):
            self._at(str(before)).clear()
        return self._at(root or tempfile.mkdtemp(prefix="trainpipes-repack-"))

    def clear(self) -> None:
        """Remove those of what is overwritten."""
        with suppress(UnreadableError, KeyError):
            self._at(read_manifest(self._storage, UNFINISHED)["notes"]["temporary"]).clear()
        self._at(self._storage.at(TEMPORARY)).clear()

    def _at(self, root: str) -> TemporaryFiles:
        kind = root.partition("://")[0]
        own = "://" in root and self._storage.root.startswith(f"{kind}://")
        return TemporaryFiles(root, self._asker, self._options if own else {})


def check_space(size: float, options: Options, out: Storage, temporary: TemporaryFiles) -> None:
    """Raise ConfigError where a disk of this machine is too small, as far as can be told.

    Args:
        size: bytes of all rows in memory.
        options: what is done with them.
        out: where they are written to.
        temporary: where they are in between.
    """
    needs: dict[int, tuple[Path, float]] = {}
    wanted = []
    if isinstance(out, LocalStorage):
        wanted.append((Path(out.root), OUTPUT_SHARE * size))
    if options.moves_rows and temporary.local:
        twice = 2 if options.needs_all else 1
        wanted.append((Path(temporary.root), twice * TEMPORARY_SHARE * size))
    for path, need in wanted:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        device = os.stat(there).st_dev
        needs[device] = there, needs.get(device, (there, 0.0))[1] + need
    for path, need in needs.values():
        free = shutil.disk_usage(path).free
        if free < need:
            raise ConfigError(
                f"{options.asker}() needs about {amount(need)} on the disk of {path}, which has "
                f"{amount(free)} free: free space there, or give temp_dir=... on another disk"
            )


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
