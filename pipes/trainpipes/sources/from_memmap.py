"""``from_memmap``: rows of files that are mapped into memory; and the same by number, ``MemmapDataset``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY
from glob import escape
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from trainpipes import errors
from trainpipes._internal.checks import IntArray, column_names, require, whole_number
from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import one_chunk, parts_of, to_arrow
from trainpipes.columns.columns import from_columns
from trainpipes.columns.content import short_digest
from trainpipes.columns.payload import Payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.columns.types import CELL, unmarked
from trainpipes.engine.planning.row_names import names_below
from trainpipes.filesystems.places import MANIFEST
from trainpipes.filesystems.systems import is_local, listed_as
from trainpipes.interfaces.read_columns import Ragged
from trainpipes.interfaces.source import Place, RandomAccessSource, even_blocks
from trainpipes.interfaces.stage_kinds import Source
from trainpipes.sources import mapped_rows
from trainpipes.sources.files.list_files import ListFiles, digests
from trainpipes.sources.mapped_rows import Array

#: What files of token ids hold.
BARE_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


class MemmapDataset(Dataset[Any]):
    """Rows of memory-mapped files as a map-style dataset.

    ``ds[i]`` is a row: a dict of tensors, or a tuple if ``write_memmap`` was given no names; ``ds[i:j]`` and
    ``ds[array]`` stack columns to ``[rows, ...]``, ragged ones to a list. All are copies.

    Args:
        path: a folder of ``write_memmap``, or a folder, glob or list of them. With ``dtype``, files.
        columns: names of columns; None for all.
        dtype: "uint8", "uint16", "uint32", "int32" or "int64", for files of bare numbers, as nanoGPT has
            them. Rows have ``input_ids``, int64 ``[length]``; a remainder is left out.
        length: with ``dtype``, numbers in a row.
        labels: with ``dtype``, add ``labels``, the next tokens: shifted already. Models of transformers
            shift labels themselves: use the recipe ``tokens``.

    Raises:
        MissingFilesError: there is no such file.
        UnreadableError: it is damaged, incomplete, or no folder of ``write_memmap``.
        SchemaError: there is no such column, or columns differ between memory maps.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "tokens.bin"
    >>> np.arange(10, dtype=np.uint16).tofile(path)
    >>> tp.read_memmap(path, dtype="uint16", length=4, labels=True)[1]
    {'input_ids': tensor([4, 5, 6, 7]), 'labels': tensor([5, 6, 7, 8])}
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        dtype: Any = None,
        length: int | None = None,
        labels: bool = False,
    ) -> None:
        self.options = check_options(path, columns, dtype, length, labels)
        columns = self.options["columns"]
        self._bare = dtype is not None
        self._found, self._folder = _found(self.options["path"], self._bare)
        if self._bare:
            _check_written(self._found, self.options["dtype"])
        first, *others = files = self._files = self._open()
        for file in others:
            if file.kinds != first.kinds or file.layout != first.layout:
                raise errors.SchemaError(
                    f"{file.path} has columns {', '.join(file.kinds)}, and {first.path} has "
                    f"{', '.join(first.kinds)}: files that are read together have the same",
                    path=file.path,
                )
        names = [column.about.name for column in first.columns]
        need_columns(names, columns or (), "read_memmap()", first.path)
        self._known = [file.identity for file in files]
        self.paths, self.layout = [file.path for file in files], first.layout
        self.chosen = [names.index(name) for name in columns or names]
        self.columns = [first.columns[number].about for number in self.chosen]
        self.firsts = np.cumsum([0, *(file.rows for file in files)], dtype=np.int64)
        if self._bare:  # which is looked at again when it is read: it may have grown
            self._files = []

    def _open(self) -> list[mapped_rows.MappedRows]:
        try:
            if self._bare:
                how = [self.options[name] for name in ("dtype", "length", "labels")]
                return [mapped_rows.open_bare(path, *how) for path in self._found]
            return [part for path in self._found for part in mapped_rows.open_folder(path)]
        except PermissionError as error:
            path = str(error.filename or self._found[0])
            said = f"{path}: {error.strerror}; allow to read it, or leave it out"
            raise errors.UnreadableError(said, path=path) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": []}

    @property
    def files(self) -> list[mapped_rows.MappedRows]:
        """What is mapped; a copy that was pickled maps it when it is read."""
        if not self._files:
            files = self._open()
            for file, known in zip_longest(files, self._known):
                if file is None or file.identity != known:
                    path = self._found[0] if file is None else file.path
                    raise errors.DataChangedError(
                        f"{path} was written anew, or has grown, since it was opened: open it again",
                        path=path,
                    )
            self._files = files
        return self._files

    @property
    def row_bytes(self) -> float:
        total = sum(file.row_bytes * file.rows for file in self.files)
        return float(total / max(1, len(self)))

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | np.integer):
            return self.__getitems__([int(index)])[0]
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        return self._named(self._columns(index))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return list(map(self._named, zip(*self._columns(indices), strict=True)))

    def _named(self, values: Iterable[Any]) -> Any:
        if self.layout == "tuple":
            return tuple(values)
        return {c.name: value for c, value in zip(self.columns, values, strict=True)}

    def _columns(self, index: Any) -> list[Any]:
        index = np.asarray(index)
        if index.ndim != 1 or (index.dtype.kind not in "iu" and index.size):
            raise TypeError(
                f"rows are chosen by a number, a slice, or integers [n], got {index.dtype}"
                f"{list(index.shape)}"
            )
        rows, index = len(self), index.astype(np.int64)
        if len(bad := index[(index < -rows) | (index >= rows)]):
            raise IndexError(f"row {bad[0]} of {rows:,}")
        index = np.where(index < 0, index + rows, index)
        columns = [self.column_at(number, index) for number in self.chosen]
        return [
            _tensors(each, about.dtype) for each, about in zip(columns, self.columns, strict=True)
        ]

    def column_at(self, number: int, index: IntArray) -> Array | Ragged:
        """The rows at ``index`` of a column as it is stored, copied."""
        parts, back = parts_of(self.firsts, index) if len(index) else ([(0, index)], None)
        pieces: list[Any] = [self.files[n].columns[number].take(rows) for n, rows in parts]
        if back is None:
            only: Array | Ragged = pieces[0]
            return only
        if not isinstance(pieces[0], Ragged):
            values: Array = np.concatenate(pieces)[back]
            return values
        lengths = np.concatenate([part.lengths for part in pieces])
        starts, values = np.cumsum(lengths) - lengths, np.concatenate([r.values for r in pieces])
        return Ragged(mapped_rows.values_at(values, starts[back], lengths[back]), lengths[back])

    def verify(self) -> None:
        """Compare all data with its checksums, of which bare files have none; raises UnreadableError, which
        names the difference.
        """
        for file in () if self._bare else self.files:
            for column in file.columns:
                if not column.is_as_written():
                    raise mapped_rows.damaged(
                        file.path, f"the checksum of column {column.about.name!r} differs"
                    )

    def relative_names(self) -> list[str]:
        """Names of the files below the folder that was asked for, or the one before a glob's first wildcard;
        none for a single file that was named itself.
        """
        asked = self.options["path"]
        urls = [asked] if isinstance(asked, str) else asked
        if len(self.paths) == 1 and self._found[0] in map(listed_as, urls):
            return [""]
        return [os.path.relpath(path, self._folder) for path in self.paths]

    def __repr__(self) -> str:
        asked = self.options["path"]
        paths = asked if isinstance(asked, str) else f"{len(self.paths)} files"
        return (
            f"MemmapDataset({paths!r}, {len(self):,} rows of {', '.join(map(str, self.columns))})"
        )


def _found(path: str | list[str], bare: bool) -> tuple[list[str], str]:
    """Maps or bare files, and their folder."""
    absolute = os.path.abspath(path) if isinstance(path, str) else ""
    if absolute and os.path.isfile(absolute if bare else os.path.join(absolute, MANIFEST)):
        return [absolute], os.path.dirname(absolute)
    # As a pattern, so that the folder may hold memory maps that are not finished, which are named below.
    inside = f"{escape(absolute)}/**" if absolute and not bare and os.path.isdir(absolute) else path
    listed = ListFiles(urls=inside, suffix="").files()
    names = listed.names
    for number, name in enumerate(names):
        if not is_local(listed.system(number)):
            raise errors.ConfigError(
                f"only files of this machine can be mapped into memory, got {name}: copy it here first"
            )
    if not bare:
        folders = dict.fromkeys(os.path.dirname(name) for name in names)
        no_maps = {folder for folder in folders if not mapped_rows.is_memmap(folder)}
        for name in names:
            if os.path.dirname(name) in no_maps:
                raise mapped_rows.no_memmap(name)
        names = list(folders)
    if os.path.isdir(absolute):
        return names, absolute
    below = names_below([path] if isinstance(path, str) else path, names)
    within = os.path.commonpath([os.path.dirname(name) for name in names])
    return names, names[0].removesuffix(below[0]) if below else within


def _check_written(paths: Sequence[str], dtype: str) -> None:
    """Raise ConfigError where the manifest beside bare files says that they are of another dtype."""
    for folder in dict.fromkeys(map(os.path.dirname, paths)):
        about: Any = None
        with suppress(OSError, ValueError), open(os.path.join(folder, MANIFEST), "rb") as file:
            about = json.load(file)
        options = about.get("options") if isinstance(about, dict) else None
        written = options.get("dtype") if isinstance(options, dict) else None
        if options and options.get("format") == "bin" and written in BARE_DTYPES:
            rule = f"{written!r}, of which the files in {folder} are, as {MANIFEST} there says"
            require(dtype == written, "read_memmap(dtype)", rule, dtype)


def check_options(path: Any, columns: Any, dtype: Any, length: Any, labels: Any) -> dict[str, Any]:
    if columns is not None:
        columns = column_names(columns, "read_memmap(columns)")
    if dtype is None:
        rule = 'left out without a dtype such as "uint16", which files of bare numbers need'
        good = length is None and not labels
        require(good, "read_memmap(length, labels)", rule, (length, labels))
    else:
        with suppress(TypeError):
            dtype = np.dtype(dtype).name
        known = f"what a file of token ids holds ({', '.join(BARE_DTYPES)})"
        require(dtype in BARE_DTYPES, "read_memmap(dtype)", known, dtype)
        whole_number(length, 1, "read_memmap(length)", "numbers in a row of a file of bare numbers")
    several = isinstance(path, list | tuple)
    good = all(isinstance(part, str | os.PathLike) for part in (path if several else [path]))
    require(good, "read_memmap(path)", "a path, or a list of paths", path)
    path = list(map(os.fspath, path)) if several else os.fspath(path)
    options = {"path": path, "columns": columns, "dtype": dtype, "length": length}
    return {**options, "labels": bool(labels)}


def _tensors(column: Array | Ragged, dtype: str) -> Any:
    if not isinstance(column, Ragged):
        return torch.from_numpy(column.astype(dtype, order="C", copy=False))
    cells = np.split(column.values, np.cumsum(column.lengths))[:-1]
    return [torch.from_numpy(np.array(cell)) for cell in cells]


#: Bytes and rows of a block, at most: pieces that a shuffle within a buffer puts in another order.
BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 8192


class NarrowRows(TensorRows):
    """int64 when they are looked at; until then as narrow as in their file."""

    arrays: list[Array]

    def __init__(self, arrays: list[Array], names: tuple[str, ...]) -> None:
        vars(self).update(arrays=arrays, names=names)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.part(0, len(self))

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def nbytes(self) -> int:
        return 8 * sum(array.size for array in self.arrays)

    def take(self, index: IntArray) -> TensorRows:
        return NarrowRows([array[index] for array in self.arrays], self.names or ())

    def slice(self, start: int, stop: int) -> TensorRows:
        return NarrowRows([array[start:stop] for array in self.arrays], self.names or ())

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        parts = [array[start:stop].astype(np.int64, order="C") for array in self.arrays]
        return tuple(map(torch.from_numpy, parts))


class FromMemmap(Source, random_access=True):
    """Rows of memory-mapped files: dicts or tuples of tensors; with a ragged column, rows as Arrow.

    Args:
        path, columns, dtype, length, labels: as in ``read_memmap``.

    >>> import numpy as np, pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "squares.memmap"
    >>> _ = tp.write_memmap(path, {"x": np.arange(4), "y": np.arange(4) ** 2})
    >>> list(tp.from_memmap(path).batch(2).collate())[1]
    {'x': tensor([2, 3]), 'y': tensor([4, 9])}
    """

    free = frozenset({"path"})

    path: Any
    _: KW_ONLY
    columns: Sequence[str] | None = None
    dtype: Any = None
    length: int | None = None
    labels: bool = False

    def check(self) -> None:
        self._set(**check_options(**self.options))

    def open(self) -> MemmapSource:
        return MemmapSource(MemmapDataset(**self.options))


class MemmapSource(RandomAccessSource):
    """Rows of a ``MemmapDataset``, by number."""

    by_number = True
    holds_numbers = True

    def __init__(self, dataset: MemmapDataset) -> None:
        self._dataset = dataset
        self.row_bytes = dataset.row_bytes or None
        block_rows = int(min(BLOCK_ROWS, max(1, BLOCK_BYTES // max(1.0, dataset.row_bytes))))
        edges = [even_blocks(file.rows, block_rows) for file in dataset.files]
        self._begins = np.concatenate([e[:-1] for e in edges])
        self.lengths = np.concatenate([np.diff(e) for e in edges])
        self.file_of_block: IntArray = np.repeat(
            np.arange(len(edges), dtype=np.int64), [len(e) - 1 for e in edges]
        )
        ragged = [c.values for f in dataset.files for c in f.columns if c.offsets is not None]
        many = any(len(values) >= 1 << 31 for values in ragged)
        self._list = pa.LargeListArray if many else pa.ListArray
        self._offset = np.int64 if many else np.int32

    def read(self, block: int, start: int, stop: int) -> Payload:
        file = self._dataset.files[int(self.file_of_block[block])]
        file.check()
        columns = file.columns
        first = int(self._begins[block])
        chosen = [columns[number] for number in self._dataset.chosen]
        return self._payload([column.slice(first + start, first + stop) for column in chosen])

    def take(self, index: IntArray) -> Payload:
        files = self._dataset.files
        touched = np.searchsorted(self._dataset.firsts, index, side="right") - 1
        for number in np.unique(touched).tolist() if len(files) > 1 else [0]:
            files[number].check()
        return self._payload([self._dataset.column_at(n, index) for n in self._dataset.chosen])

    def _payload(self, columns: list[Array | Ragged]) -> Payload:
        dataset = self._dataset
        names = tuple(column.name for column in dataset.columns)
        if any(column.ragged for column in dataset.columns):
            return from_columns(dict(zip(names, map(self._arrow, columns), strict=True)), self)
        # What is mapped cannot be written, and a tensor can: a copy.
        writable: list[Array] = [np.require(column, requirements=("C", "W")) for column in columns]
        if writable[0].dtype != dataset.columns[0].dtype:
            return NarrowRows(writable, names)
        tensors = tuple(map(torch.from_numpy, writable))
        return TensorRows(tensors, None if dataset.layout == "tuple" else names)

    def _arrow(self, column: Array | Ragged) -> Any:
        if not isinstance(column, Ragged):
            return column
        offsets = np.concatenate([[0], np.cumsum(column.lengths)]).astype(self._offset)
        values = one_chunk(from_columns({"": column.values}, self).column(0))
        of_list = pa.large_list if self._list is pa.LargeListArray else pa.list_
        # Of elements with dimensions rows stay arrays: lists of lists could not be padded any more.
        name = CELL if column.values.ndim > 1 else "item"
        kind = of_list(pa.field(name, unmarked(values.type, "item")))
        return self._list.from_arrays(to_arrow(offsets), values, type=kind)

    def will_need(self, start: int, stop: int) -> None:
        dataset = self._dataset
        file = int(np.searchsorted(dataset.firsts, start, side="right")) - 1
        first = int(dataset.firsts[file])
        for number in dataset.chosen:
            dataset.files[file].columns[number].will_need(start - first, stop - first)

    def place(self, block: int, row: int) -> Place:
        path = self._dataset.paths[int(self.file_of_block[block])]
        return Place(path, row=int(self._begins[block]) + row)

    def relative_names(self) -> list[str]:
        return self._dataset.relative_names()

    def fingerprint(self) -> dict[str, Any]:
        files, names = self._dataset.files, self.relative_names()
        return {
            "files": len(files),
            "rows": len(self._dataset),
            "columns": [str(c) for c in self._dataset.columns],
            **({"names": digests(names)} if names != [""] else {}),
            "digest": short_digest(json.dumps([file.identity for file in files]).encode()),
        }

    def describe(self) -> list[tuple[str, str]]:
        dataset = self._dataset
        lines = [("memory map", f"{len(dataset.files):,} file{'s' * (len(dataset.files) > 1)}")]
        lines.append(("columns", ", ".join(map(str, dataset.columns))))
        lines.append(("rows", f"{len(dataset):,} of {errors.amount(dataset.row_bytes)}"))
        return lines

    def __repr__(self) -> str:
        return "from_memmap()"
