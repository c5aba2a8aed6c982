"""How token ids are written: as Parquet, or bare, one after the other.

Parquet has a row group for each block of the input, with as many rows. Bare ids are nothing but the
documents' ids in their order, native numbers of one type, as nanoGPT's ``train.bin``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainpipes.columns.arrays import one_chunk, to_numpy
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.kinds.stage import Stage
from trainpipes.stages.tokenizing import Tokenizes
from trainpipes.storage.output_file import OutputFile
from trainpipes.tokenizers.bytes import Bytes

#: Ids, masks and labels are small numbers that come again: a level above this saves 1 or 2 % and takes twice
#: the time.
LEVEL = 1
DTYPES = ("uint16", "uint32", "int32", "int64")


class FileWriter(Protocol):
    """Writes one file."""

    def write(self, table: pa.Table) -> None:
        """Some rows of a row group."""
        ...

    def end_group(self, schema: pa.Schema) -> None:
        """No more rows of this row group, which may have none."""
        ...

    def close(self) -> None: ...


class Form(Protocol):
    """A format, with its options. Pickles."""

    @property
    def suffix(self) -> str: ...

    @property
    def options(self) -> dict[str, Any]:
        """Which shape the files, of JSON types."""
        ...

    def check(self, schema: pa.Schema) -> None:
        """Raise unless it has room for rows of these columns."""
        ...

    def open(self, file: OutputFile, schema: pa.Schema) -> FileWriter: ...


@dataclass(frozen=True)
class Parquet:
    """Parquet files.

    Args:
        compression: a codec, or None.
    """

    compression: str | None = "zstd"
    suffix = ".parquet"

    @property
    def options(self) -> dict[str, Any]:
        return {"format": "parquet", "compression": self.compression}

    def check(self, schema: pa.Schema) -> None:
        """All columns have a place in it."""

    def open(self, file: OutputFile, schema: pa.Schema) -> FileWriter:
        return _ParquetFile(file, schema, self.compression or "none")


class _ParquetFile:
    def __init__(self, file: OutputFile, schema: pa.Schema, compression: str) -> None:
        level = LEVEL if compression == "zstd" else None
        self._writer = pq.ParquetWriter(
            file, schema, compression=compression, compression_level=level,
            write_page_checksum=True, use_dictionary=_repeated(schema),
        )  # fmt: skip
        self._parts: list[pa.Table] = []

    def write(self, table: pa.Table) -> None:
        self._parts.append(table)

    def end_group(self, schema: pa.Schema) -> None:
        empty = pa.Table.from_batches([], schema)
        group = pa.concat_tables(self._parts) if self._parts else empty
        self._parts = []
        self._writer.write_table(group, row_group_size=max(1, len(group)))

    def close(self) -> None:
        self._writer.close()


def _repeated(schema: pa.Schema) -> list[str]:
    """Columns whose values a dictionary makes smaller; of token ids there are too many."""
    return [f.name for f in schema if not pa.types.is_nested(f.type)]


@dataclass(frozen=True)
class Bare:
    """Files of nothing but ids.

    Args:
        dtype: of NumPy.
    """

    dtype: str
    suffix = ".bin"

    @property
    def options(self) -> dict[str, Any]:
        return {"format": "bin", "dtype": self.dtype}

    def check(self, schema: pa.Schema) -> None:
        if schema.names != ["input_ids"]:
            raise ConfigError(
                'tokenize(format="bin") writes ids and nothing besides, and rows have columns '
                f'{", ".join(schema.names)}: write format="parquet"'
            )
        kind = schema.field("input_ids").type
        if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
            raise SchemaError(f'tokenize(format="bin"): input_ids are lists of ids, got {kind}')

    def open(self, file: OutputFile, schema: pa.Schema) -> FileWriter:
        return _BareFile(file, np.dtype(self.dtype))


class _BareFile:
    def __init__(self, file: OutputFile, dtype: np.dtype[Any]) -> None:
        self._file, self._dtype = file, dtype

    def write(self, table: pa.Table) -> None:
        ids = to_numpy(one_chunk(table.column("input_ids")).flatten())
        if len(ids):
            least, most = int(ids.min()), int(ids.max())
            bounds = np.iinfo(self._dtype)
            if least < bounds.min or most > bounds.max:
                odd = least if least < bounds.min else most
                raise DataError(
                    f'tokenize(format="bin", dtype="{self._dtype}"): there is a token {odd}, which that type '
                    'cannot hold; give dtype="uint32"'
                )
            self._file.write(np.ascontiguousarray(ids.astype(self._dtype)).data)

    def end_group(self, schema: pa.Schema) -> None:
        """Nothing marks it."""

    def close(self) -> None:
        """Nothing follows the last id."""


def narrowest(stages: Sequence[Stage]) -> str:
    """The narrowest type that holds every id of the tokenizer; "uint32" where it does not show them."""
    most = 0
    for stage in stages:
        if isinstance(stage, Tokenizes):
            maker = stage.maker
            pieces = range(256) if isinstance(maker, Bytes) else (maker.pieces() or {}).values()
            end = stage.resolved_options.get("add_eos")
            known = [*maker.special_ids(), *([end] if type(end) is int else [])]
            if not pieces:
                return "uint32"
            most = max([most, *pieces, *known])
    return "uint16" if most < 1 << 16 else "uint32"
