from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trainpipes._internal.checks import repeated
from trainpipes._internal.messages import nearest
from trainpipes.columns.arrays import python_to_arrow, to_arrow
from trainpipes.engine.planning.row_names import names_below
from trainpipes.errors import ConfigError, SchemaError, UnreadableError
from trainpipes.filesystems.retry import Retry
from trainpipes.interfaces.stage import Stage
from trainpipes.sources.files.each_file import one_line
from trainpipes.sources.files.file_errors import without
from trainpipes.sources.files.file_list import FileList
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.sources.files.remote_bytes import open_bytes
from trainpipes.sources.whole_files.read_bytes import BLOCK_ROWS, WholeFiles

#: What the column of a labels file with the images' names may be called.
NAMES = ("file_name", "filename", "file", "path", "image")


class ReadImages(FileReader, has_blocks=True, random_access=True):
    """Reads whole image files, with classes from the names of their folders, or with labels from a CSV.

    A folder stands for its images (``.jpg``, ``.jpeg``, ``.png``, ``.ppm``, ``.bmp``, ``.pgm``, ``.tif``,
    ``.tiff``, ``.webp``). Rows have ``path`` and ``bytes``, for ``decode_image`` after the shuffle. With
    ``labels="folder"`` they also have ``class``, the folder's name, and ``label``, its number by name, and
    come class by class as in torchvision's ``ImageFolder``.

    Args:
        labels: "folder"; or the path of a CSV with a column of image names (``file_name``, ``filename``,
            ``file``, ``path`` or ``image``), relative to the CSV or the listed folder; its other columns are
            added. None for neither.
        block_rows: images in a block (a shuffle permutes blocks first).
        storage_options: more options of fsspec; never shown or saved.

    Raises:
        ConfigError: an image lies in no folder of a class.
        SchemaError: the CSV has no row for an image, or several.
        DataChangedError: a file has changed since it was listed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("dog/1.png", "cat/2.png", "cat/10.png"):
    ...     (folder / name).parent.mkdir(exist_ok=True)
    ...     _ = (folder / name).write_bytes(b"...")
    >>> rows = tp.list_files(folder).read_images()
    >>> [(row["path"].rsplit("/")[-1], row["class"], row["label"]) for row in rows]
    [('10.png', 'cat', 0), ('2.png', 'cat', 0), ('1.png', 'dog', 1)]
    """

    free = frozenset({"labels"})

    labels: str | os.PathLike[str] | None = "folder"
    _: KW_ONLY
    block_rows: int = BLOCK_ROWS
    storage_options: Mapping[str, Any] | None = None

    def check(self) -> None:
        super().check()
        labels = os.fspath(self.labels) if isinstance(self.labels, os.PathLike) else self.labels
        good = labels is None or (isinstance(labels, str) and labels)
        self._require(good, "labels", '"folder", the path of a CSV, or None')
        self._set(labels=labels)

    def _open_on(self, files: Sequence[Stage]) -> WholeFiles:
        listed = self.listed(files)
        more = None
        if self.labels == "folder":
            listed, more = _by_folder(listed, _below(files[0], listed), str(self))
        elif self.labels is not None:
            more = self._by_csv(listed, _below(files[0], listed))
        return WholeFiles(listed, more, self.block_rows, str(self))

    def _by_csv(self, files: FileList, below: list[str]) -> pa.Table:
        path = str(self.labels)

        def unfit(what: str) -> SchemaError:
            return SchemaError(f"{self}: {path} {what}", path=path)

        table = _read_csv(path, self.storage_options, files.retry)
        column = next((name for name in NAMES if name in table.column_names), None)
        if column is None:
            there = f"one of {list(NAMES)}; there are {table.column_names}"
            raise unfit(f"needs a column with the images' names, {there}")
        for name in sorted({"bytes", "path"}.intersection(table.column_names) - {column}):
            raise unfit(f"has a column {name!r}, as rows have one already: rename it")
        names = table.column(column).cast(pa.string()).to_pylist()
        if twice := repeated(names):
            raise unfit(f"has two rows for {twice[0]!r}: leave one out")
        rows = {name: row for row, name in enumerate(names)}
        folder = posixpath.dirname(path if "://" in path else os.path.abspath(path))
        rows_of_files = []
        for name, short in zip(files.names, below, strict=True):
            beside = name.removeprefix(f"{folder}/")
            rows_of_files.append(rows.get(beside, rows.get(short, rows.get(name, -1))))
            if rows_of_files[-1] < 0:
                raise unfit(
                    f"has no row for {name}{nearest(short, names)}: add one, or leave the image out with "
                    f"{without(name)}"
                )
        return table.drop_columns([column]).take(to_arrow(np.array(rows_of_files, dtype=np.int64)))


def _below(stage: Stage, files: FileList) -> list[str]:
    assert isinstance(stage, ListFiles)
    urls = [stage.urls] if isinstance(stage.urls, str) else stage.urls
    return names_below(urls, files.known_names()) or files.relative_names()


def _by_folder(files: FileList, below: list[str], caller: str) -> tuple[FileList, pa.Table]:
    loose = next((n for n, name in enumerate(below) if "/" not in name), None)
    if loose is not None:
        raise ConfigError(
            f"{caller}: {files.names[loose]} lies in no folder of a class: list the folder above those of "
            "the classes, or take labels=None",
            path=files.names[loose],
        )
    # As ImageFolder sorts them: by class, folder and name, each as text.
    order = sorted(
        range(len(below)),
        key=lambda n: (below[n].split("/", 1)[0], *posixpath.split(below[n])),
    )
    classes = [below[n].split("/", 1)[0] for n in order]
    names = sorted(set(classes))
    number = {name: label for label, name in enumerate(names)}
    labels = np.array([number[name] for name in classes], dtype=np.int64)
    more = pa.table({"class": python_to_arrow(classes, pa.string()), "label": to_arrow(labels)})
    return files.pick(np.array(order, dtype=np.int64)), more


def _read_csv(path: str, options: Mapping[str, Any] | None, retry: Retry) -> pa.Table:
    listed = ListFiles(path, suffix="", storage_options=options, retry=retry).files()
    data = open_bytes(listed, 0)
    try:
        return pyarrow.csv.read_csv(pa.BufferReader(data.read([(0, data.size)])[0]))
    except pa.ArrowException as error:
        raise UnreadableError(
            f"read_images(labels): {path} cannot be read as CSV: {one_line(error)}; give the path of a "
            "CSV with a line for each image",
            path=path,
        ) from error
