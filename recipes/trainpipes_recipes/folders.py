"""Videos and texts in folders, a folder for each class; paths that begin at the folder of their file.

>>> in_folders("mine", ["a.parquet"], None) is None
True
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Mapping
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trainpipes import DataError, MissingFilesError, Pipeline, from_arrow, list_files
from trainpipes.columns.arrays import is_text, one_chunk
from trainpipes.columns.run import Run
from trainpipes.filesystems.systems import open_system
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.sources.files.folders import VIDEOS, has_magic, hidden
from trainpipes.stages.columns import row_table, with_column
from trainpipes_recipes.inputs import Input

__all__ = [
    "OwnFolders",
    "folder_of",
    "in_folders",
    "metadata_in",
    "rooted",
    "texts_in_folders",
    "warn_of_parts",
]

#: Tables of a folder that list its files, as Hugging Face's ImageFolder takes them.
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
#: Columns of the seconds at which a part of a file begins, and how many rows are looked at for some.
STARTS, FIRST_ROWS = ("offset", "start", "start_time", "time_start", "begin"), 32

log = logging.getLogger("trainpipes")


def folder_of(files: str, storage_options: Mapping[str, Any] | None) -> str | None:
    """The folder of files: the path itself, if it is one; None of a pattern of several folders."""

    def is_folder(path: str) -> bool:
        system, root = open_system(path, storage_options or {})
        return "*" not in path and bool(system.isdir(root))

    if is_folder(files):
        return files
    folder = os.path.dirname(files)
    return None if has_magic(folder) and not is_folder(folder) else folder


def alone(files: Any) -> Any:
    """The path in a list of one; else ``files``."""
    return files[0] if isinstance(files, list | tuple) and len(files) == 1 else files


def metadata_in(files: Any, storage_options: Mapping[str, Any] | None) -> Any:
    """The table that lists the files of a folder, if ``files`` is such a folder; else ``files``."""
    folder = alone(files)
    if not isinstance(folder, str | os.PathLike):
        return files
    path = os.fspath(folder)
    if folder_of(path, storage_options) != path:
        return files
    system, root = open_system(path, storage_options or {})
    there = (name for name in METADATA if system.isfile(f"{root.rstrip('/')}/{name}"))
    return next((os.path.join(path, name) for name in there), files)


def in_folders(
    recipe: str, files: Any, storage_options: Mapping[str, Any] | None
) -> tuple[Pipeline, str, list[str]] | None:
    """The videos in a folder's folders, with the names of these, their folder, and the classes; None of
    anything else.
    """
    files = alone(files)
    if not isinstance(files, str | os.PathLike):
        return None
    system, root = open_system(os.fspath(files), storage_options or {})
    if not system.isdir(root):
        return None
    found = [name[len(root) :].lstrip("/") for name in sorted(system.find(root))]
    found = [name for name in found if not any(hidden(part, True) for part in name.split("/"))]
    names = [name for name in found if "/" in name and name.lower().endswith(VIDEOS)]
    if not names:
        if found and not any(name.lower().endswith(VIDEOS) for name in found):
            return None
        way = "put each class into a folder of its own"
        raise MissingFilesError(f"{recipe}: {os.fspath(files)} has no videos in folders: {way}")
    kinds = [name.partition("/")[0] for name in names]
    table = pa.table({"video": pa.array(names, pa.string()), "label": pa.array(kinds, pa.string())})
    return from_arrow(table), os.fspath(files), sorted({*kinds})


def texts_in_folders(
    recipe: str, files: Any, storage_options: Mapping[str, Any] | None
) -> Pipeline:
    """A row for each text file: "path", "text", and "class", the name of the folder of its class. Of a
    folder, the .txt files in its folders.
    """
    wanted, one = files, alone(files)
    if isinstance(one, str | os.PathLike):
        path = os.fspath(one)
        if folder_of(path, storage_options) == path:
            wanted = f"{glob.escape(path.rstrip('/'))}/*/**/*.txt"
        elif one is files and not has_magic(path):
            wanted = []
    try:
        listed = list_files(wanted, suffix=".txt", storage_options=storage_options)
        next(iter(listed.distributed(rank=0, world_size=1)))
    except MissingFilesError:
        way = "put each class into a folder of its own, or give files with a column of classes"
        said = f"{recipe}: {files} has no .txt files in folders: {way}"
        raise MissingFilesError(said) from None
    texts = listed.read_bytes(labels="folder").with_columns(
        _texts, format="arrow", thread_safe=True
    )
    return texts.select("path", "text", "class")


def _texts(table: pa.Table) -> dict[str, Any]:
    contents = table["bytes"]
    try:
        texts = contents.cast(pa.string())
    except pa.ArrowInvalid:
        for path, content in zip(table["path"].to_pylist(), contents.to_pylist(), strict=True):
            try:
                content.decode()
            except UnicodeDecodeError as error:
                way = "write it as UTF-8, or leave it out"
                raise DataError(f"{path} is no text in UTF-8: {error.reason}: {way}") from None
        raise
    marked = pc.starts_with(texts, "\ufeff")
    return {"text": pc.if_else(marked, pc.utf8_slice_codeunits(texts, 1), texts)}


class OwnFolders(RunStage, takes="columns", asks_inputs=True):
    """Paths that begin at the folder of their row's file, made whole."""

    thread_safe = True

    column: str

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self, [self.column])
        values = one_chunk(table[self.column])
        assert self._inputs is not None
        folders = [os.path.dirname(self._inputs.place_of(int(row)).path or "") for row in block.ids]
        if is_text(values.type):
            values = _joined(folders, values)
        elif pa.types.is_struct(values.type) and values.type.get_field_index("path") >= 0:
            fields = {field.name: pc.struct_field(values, field.name) for field in values.type}
            fields["path"] = _joined(folders, fields["path"])
            null = values.is_null()
            values = pa.StructArray.from_arrays([*fields.values()], names=[*fields], mask=null)
        return run.with_block(block.with_data(with_column(table, self.column, values)))


def rooted(
    rows: Pipeline,
    column: str,
    files: Any,
    folder: str | os.PathLike[str] | None,
    storage_options: Mapping[str, Any] | None,
) -> tuple[Pipeline, str | os.PathLike[str] | None]:
    """The rows of a recipe's ``files``, and the folder where their paths begin: the given one, else that of
    the files; else, of several folders, paths are made whole.
    """
    if folder is None and isinstance(files, str | os.PathLike):
        folder = folder_of(os.fspath(files), storage_options)
    if folder is None and not isinstance(files, Pipeline):
        rows = rows.then(OwnFolders(column))
    return rows, folder or None


def _joined(folders: list[str], paths: pa.Array) -> pa.Array:
    pairs = zip(folders, paths.to_pylist(), strict=True)
    whole = [path if not path or "://" in path else os.path.join(at, path) for at, path in pairs]
    return pa.array(whole, paths.type)


def warn_of_parts(data: Input, *used: str) -> None:
    """Log a column that says where in a file the part of a row begins, by the first rows. Where the user
    names all columns of a pipeline, nothing of it is read for this.
    """
    known = data.columns if "columns" in vars(data) else ()
    name = next((name for name in STARTS if name in known and name not in used), None)
    if name is None:
        return
    rows = islice(data.rows([name]).distributed(rank=0, world_size=1), FIRST_ROWS)
    if any(isinstance(row[name], int | float) and row[name] > 0 for row in rows):
        said = "column %r is not used, and each row has its file as a whole"
        way = "write the parts to files, or decode them by start= in a chain of your own"
        log.warning(f"%s: {said}: {way}", data.recipe, name)
