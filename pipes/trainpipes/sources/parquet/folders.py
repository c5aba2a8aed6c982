from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import python_to_arrow, to_arrow
from trainpipes.engine.layout import IntArray
from trainpipes.errors import SchemaError

#: What stands for null in a folder's name.
NULL = "__HIVE_DEFAULT_PARTITION__"
INTEGER = re.compile(r"[+-]?\d{1,18}")


class FolderColumns:
    """A value for each file and column: int64 if all are integers, else text."""

    def __init__(self, values: dict[str, pa.Array]) -> None:
        self._values = values

    @staticmethod
    def of(names: Sequence[str], caller: str, needed: bool) -> FolderColumns:
        first, found = _pairs(names[0]) if names else {}, []
        for name in names if first or needed else ():
            pairs = _pairs(name)
            if pairs.keys() != first.keys():
                if not needed:
                    return FolderColumns({})
                raise _odd(names[0], first, name, pairs, caller)
            found.append(pairs)
        if needed and not first:
            raise SchemaError(
                f'{caller}: partitioning="hive" makes columns of folders such as lang=en/, and '
                f"{names[0]} is in no such folder: leave partitioning out, or list the folder that "
                "holds them",
                path=names[0],
                stage=caller,
            )
        return FolderColumns({key: _column([pairs[key] for pairs in found]) for key in first})

    def __bool__(self) -> bool:
        return bool(self._values)

    @property
    def fields(self) -> list[pa.Field]:
        return [pa.field(name, values.type) for name, values in self._values.items()]

    def only(self, names: Sequence[str]) -> FolderColumns:
        return FolderColumns({n: values for n, values in self._values.items() if n in names})

    def pick(self, index: IntArray) -> FolderColumns:
        places = to_arrow(index)
        return FolderColumns({n: values.take(places) for n, values in self._values.items()})

    def values(self, file: int) -> dict[str, pa.Array]:
        return {name: values.slice(file, 1) for name, values in self._values.items()}

    def text(self, file: int) -> str:
        values = {name: one.to_pylist()[0] for name, one in self.values(file).items()}
        return f"\0{values}" if values else ""


def repeated(one: pa.Array, rows: int) -> pa.Array:
    return one.take(to_arrow(np.zeros(rows, dtype=np.int64)))


def _pairs(name: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        key, is_pair, value = folder.partition("=")
        if key and is_pair:
            found[unquote(key)] = None if value == NULL else unquote(value)
    return found


def _column(texts: list[str | None]) -> pa.Array:
    given = [text for text in texts if text is not None]
    if given and all(INTEGER.fullmatch(text) for text in given):
        numbers = [None if text is None else int(text) for text in texts]
        return python_to_arrow(numbers, pa.int64())
    return python_to_arrow(texts, pa.string())


def _odd(
    first_name: str, first: dict[str, Any], name: str, pairs: dict[str, Any], caller: str
) -> SchemaError:
    has, lacks = (first_name, name) if first.keys() - pairs.keys() else (name, first_name)
    key = sorted(first.keys() ^ pairs.keys())[0] if has == name else sorted(first.keys() - pairs)[0]
    return SchemaError(
        f"{caller}: the path {has} has a folder {key}=..., and {lacks} has none; list files of the same "
        "folders, or leave partitioning out",
        path=name,
        stage=caller,
    )
