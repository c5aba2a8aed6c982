"""Rows by name, wherever their files stand, and their identity as a number of 64 bits, the same in every
process and version.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from trainpipes._internal.checks import IntArray
from trainpipes.columns.arrays import TEXTS, apart, decoded, first_null, one_chunk, to_numpy
from trainpipes.columns.block import BadCell, Block
from trainpipes.columns.columns import table_of
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.errors import known_name
from trainpipes.filesystems.systems import listed_as
from trainpipes.interfaces.read_columns import cells, naming
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage import Stage

HashArray = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_NO_SALT = np.uint64(0)
BYTES = (*TEXTS, pa.string_view(), pa.binary_view())
#: Values of which each may be a single number.
ONE = (torch.Tensor, np.generic)
#: The first n bytes of eight.
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], dtype=np.uint64)


def mix(values: HashArray) -> HashArray:
    """SplitMix64's finaliser of each: a bijection of 64 bits.

    >>> mix(np.array([1], dtype=np.uint64)).tolist()
    [6238072747940578789]
    """
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def unit(hashes: HashArray) -> npt.NDArray[np.float64]:
    """Each as a number from 0 up to 1, by its upper 53 bits."""
    numbers: npt.NDArray[np.float64] = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def with_deleted(rows: IntArray, deleted: IntArray) -> IntArray:
    """The numbers of rows in a file, of which some are deleted, by those among the rows that are left.

    >>> with_deleted(np.array([0, 1, 2]), np.array([0, 2])).tolist()
    [1, 3, 4]
    """
    numbers: IntArray = rows + np.searchsorted(
        deleted - np.arange(len(deleted)), rows, side="right"
    )
    return numbers


class RowNames:
    """Names rows for ``sample`` and ``split``: by a file's name and the row's number in it.

    ``deleted``: the rows of a file, by its number, that do not come, and are counted. ``skipped``: of each
    file, rows that do not come before its first, int64 ``[files]``.
    """

    def __init__(
        self,
        firsts: IntArray,
        names: Sequence[str],
        deleted: Callable[[int], IntArray] | None = None,
        skipped: IntArray | None = None,
    ) -> None:
        self._firsts, self._deleted = firsts, deleted
        self._begins = firsts if skipped is None else firsts - skipped
        digests = [hashlib.sha256(name.encode(errors="surrogateescape")).digest() for name in names]
        self._files = np.frombuffer(b"".join(d[:8] for d in digests), dtype="<u8").astype(np.uint64)

    def shifted(self, skipped: int) -> RowNames:
        return _Shifted(self, skipped) if skipped else self

    def hashes(self, ids: IntArray) -> HashArray:
        """The hash of each row, by its number in file order over all files."""
        file = np.searchsorted(self._firsts, ids, side="right") - 1
        row = ids - self._begins[file]
        for number in [] if self._deleted is None else np.unique(file).tolist():
            if len(deleted := self._deleted(number)):  # type: ignore[misc]
                row[file == number] = with_deleted(row[file == number], deleted)
        return mix(self._files[file] ^ mix((row.astype(np.uint64) + np.uint64(1)) * _GOLDEN))


class _Shifted(RowNames):
    """The names of rows after ``skip``, whose numbers begin with 0 again."""

    def __init__(self, names: RowNames, skipped: int) -> None:
        self._names = names
        self._skipped = skipped

    def hashes(self, ids: IntArray) -> HashArray:
        return self._names.hashes(ids + self._skipped)


def hash_keys(block: Block, names: Sequence[str], caller: Stage, salt: int = 0) -> HashArray:
    """The hash of each row's values, uint64 ``[rows]``; another hash for each ``salt``."""
    hashes: list[HashArray] = []
    for name in names:
        values = cells(block, name, caller)
        if isinstance(values, torch.Tensor):
            values = table_of(block.data, caller).column(name)
        with naming(name, caller, block.ids):
            hash_of = _hash_values if isinstance(values, list) else hash_column
            hashes.append(hash_of(values, np.uint64(salt)))
    return reduce(lambda mixed, key: mix(mixed * _GOLDEN + key), hashes)


def _null(row: int) -> BadCell:
    way = "drop such rows with filter() first, or use another key"
    return BadCell(row, f"is null, so there is nothing to choose the row by: {way}")


def _hash_values(values: list[Any], salt: np.uint64) -> HashArray:
    """The hash of each Python value."""
    if any(value is None for value in values):
        raise _null(next(k for k, value in enumerate(values) if value is None))
    hashes = np.empty(len(values), dtype=np.uint64)
    try:
        values = [value.item() if isinstance(value, ONE) else value for value in values]
        types = np.array([hash(_kind(value)) for value in values])
        for kind in np.unique(types):
            same = np.flatnonzero(types == kind)
            hashes[same] = hash_column(pa.array([values[k] for k in same.tolist()]), salt)
    except (pa.ArrowException, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise BadCell(None, f"has no hash: {error}") from error
    return hashes


def _kind(value: Any) -> Any:
    """Values of a kind are hashed together; of decimals those of a scale, which Arrow else makes one."""
    return str(value.as_tuple().exponent) if type(value) is Decimal else type(value)


def hash_column(column: Any, salt: np.uint64 = _NO_SALT) -> HashArray:
    """The hash of each value of an Arrow column, uint64: numbers of any width by value."""
    array = one_chunk(column)
    if pa.types.is_dictionary(array.type):
        array = decoded(array)
    if array.null_count:
        raise _null(first_null(array))
    kind = array.type
    if pa.types.is_floating(kind):
        floats = to_numpy(array).astype(np.float64) + 0.0  # -0.0 is 0.0
        return mix((floats.view(np.uint64) ^ _SECOND) + salt)
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        array = array.view({32: pa.int32(), 64: pa.int64()}[kind.bit_width])
        kind = array.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return mix(to_numpy(array).astype(np.uint64) + _GOLDEN + salt)
    if pa.types.is_decimal(kind):
        array, kind = array.cast(pa.string()), pa.string()
    if kind in BYTES or pa.types.is_fixed_size_binary(kind):
        return _hash_bytes(array.cast(pa.large_binary()), salt)
    raise BadCell(None, f"is {kind}, and a key is text, bytes, a number or a time")


def _hash_bytes(array: Any, salt: np.uint64) -> HashArray:
    """The sum of each value's mixed 8-byte words, and its length, mixed."""
    if not len(array):
        return np.empty(0, dtype=np.uint64)
    content, offsets = apart(array)
    padded = np.concatenate([content, np.zeros(8, dtype=np.uint8)])
    at = np.ndarray(len(content) + 1, "<u8", padded, strides=(1,))  # 8 bytes from each byte on
    lengths = np.diff(offsets)
    words = -(-lengths // 8)
    before = np.concatenate([[0], np.cumsum(words)])
    place = np.arange(int(before[-1])) - np.repeat(before[:-1], words)
    word = at[np.repeat(offsets[:-1], words) + place * 8]
    word = word & _MASKS[np.minimum(np.repeat(lengths, words) - place * 8, 8)]
    mixed = mix(word ^ mix((place.astype(np.uint64) + np.uint64(1)) * _GOLDEN + salt))
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    total = sums[before[1:]] - sums[before[:-1]]
    return mix(total ^ mix(lengths.astype(np.uint64) * _GOLDEN))


#: A mark of patterns that stands for itself; and what a pattern begins with before others.
ESCAPED = re.compile(r"\[([*?[])\]")
PLAIN = re.compile(r"(?:\[[*?[]\]|[^*?[])*")


def row_names(inputs: Inputs) -> RowNames:
    """Rows by file and number; by number alone without files."""
    if inputs.mixed:
        return _MixedNames(inputs)
    source = inputs.source
    if isinstance(source, RowSource) and source.named_by is not None:
        named, skipped = source.named_by
        return row_names(named).shifted(skipped)
    files = source.file_of_block if isinstance(source, RowSource) else None
    if files is None:
        return RowNames(np.zeros(1, dtype=np.int64), [""])
    names = file_names(inputs)
    block = np.searchsorted(files, np.arange(len(names)))
    besides = (getattr(source, name, None) for name in ("deleted_rows", "skipped_rows"))
    return RowNames(inputs.blocks.firsts[block], names, *besides)


class _MixedNames(RowNames):
    """The names of a mix's rows, each by those of its source."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._source: Any = inputs.source
        self._names: dict[tuple[str, ...], RowNames] = {}

    def hashes(self, ids: IntArray) -> HashArray:
        hashes = np.empty(len(ids), dtype=np.uint64)
        for path, places, rows in self._source.ids.split(ids):
            if path not in self._names:
                inputs = self._inputs
                for name in path:
                    inputs = inputs.mixed[name]
                self._names[path] = row_names(inputs)
            hashes[places] = self._names[path].hashes(rows)
        return hashes


def file_names(inputs: Inputs) -> list[str]:
    if not isinstance(inputs.source, RowSource) or inputs.source.file_of_block is None:
        return [""]
    source: Any = inputs.source
    if hasattr(source, "relative_names"):
        return list(source.relative_names())
    if not hasattr(source, "files"):  # a source of the user's own
        return [str(number) for number in range(int(source.file_of_block.max(initial=-1)) + 1)]
    urls = inputs.chain.urls
    listed = source.files
    names = names_below([urls] if isinstance(urls, str) else urls, listed.known_names())
    return list(listed.relative_names() if names is None else names)


def names_below(urls: Sequence[str], names: Sequence[str]) -> list[str] | None:
    """Names relative to the listed folders; None for names of other forms.

    >>> names_below(["s3://b/data/*/x-*.parquet"], ["s3://b/data/en/x-1.parquet"])
    ['en/x-1.parquet']
    >>> names_below(["s3://b/v[[]1]/*/x.parquet"], ["s3://b/v[1]/en/x.parquet"])
    ['en/x.parquet']
    """
    known, roots = set(names), []
    for url in urls:
        whole = known_name(listed_as(url)).rstrip("/")
        plain = PLAIN.match(whole)
        assert plain is not None
        if whole in known:
            roots.append(whole.rpartition("/")[0])
        else:
            root = ESCAPED.sub(r"\1", plain[0])
            roots.append(root if plain[0] == whole else root.rpartition("/")[0])
    parts = [root.split("/") for root in roots]
    root = "/".join(os.path.commonprefix(parts)) + "/"  # noqa: RUF071  (of lists)
    if not all(name.startswith(root) for name in names):
        return None
    return [name[len(root) :] for name in names]
