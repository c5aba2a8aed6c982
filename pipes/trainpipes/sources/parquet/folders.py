from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa

from trainpipes.columns.arrays import python_to_arrow
from trainpipes.errors import SchemaError

#: What stands for null in a folder's name.
NULL = "__HIVE_DEFAULT_PARTITION__"
INTEGER = re.compile(r"[+-]?\d{1,18}")


def folder_columns(names: Sequence[str], caller: str, needed: bool) -> pa.Table:
    """A row for each file: its folders' values, int64 if all are integers, else text."""
    pairs = [_pairs(name) for name in names]
    first = pairs[0] if pairs else {}
    for name, own in zip(names, pairs, strict=True):
        if odd := first.keys() ^ own.keys():
            if not needed:
                return pa.table({})
            key = min(odd)
            has, lacks = (names[0], name) if key in first else (name, names[0])
            raise SchemaError(
                f"{caller}: the path {has} has a folder {key}=..., and {lacks} has none; list files of the "
                "same folders, or leave partitioning out",
                path=name,
                stage=caller,
            )
    if needed and not first:
        raise SchemaError(
            f'{caller}: partitioning="hive" makes columns of folders such as lang=en/, and {names[0]} is in '
            "no such folder: leave partitioning out, or list the folder that holds them",
            path=names[0],
            stage=caller,
        )
    return pa.table({key: _column([own[key] for own in pairs]) for key in first})


def only(folders: pa.Table, names: Sequence[str]) -> pa.Table:
    return folders.select([name for name in folders.column_names if name in names])


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
