"""Text that is not UTF-8: named where it is first decoded, or replaced.

Arrow passes on the bytes of text as they are, and to look at all of them would cost up to as much as to read
them. So nobody looks before a stage makes Python strings or tokens of them and fails.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.arrays import python_to_arrow, to_arrow
from trainpipes.errors import UnreadableError
from trainpipes.runtime.rows.block import Block

__all__ = ["check_sound", "check_whole", "has_text", "naming_bad_text", "replaced"]

#: Bytes of a text that a message shows.
SHOWN = 40


class naming_bad_text:
    """A context that says of which row text could not be decoded.

    Args:
        block: the rows that are worked on.
        asker: the stage that does; None for whoever iterates.

    Raises:
        UnreadableError: instead of what was raised over text of these rows that is not UTF-8.
    """

    __slots__ = ("_asker", "_block")

    def __init__(self, block: Block, asker: object = None) -> None:
        self._block = block
        self._asker = asker

    def __enter__(self) -> None:
        """Nothing is looked at before something is raised."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        found = _first_bad(self._block.data) if _is_about_text(error) else None
        if found is None:
            return
        asker, (number, name, text) = self._asker, found
        problem = UnreadableError(
            f"{'' if asker is None else f'{asker}: '}column {name!r} holds text that is not UTF-8: "
            f'{text}; write the file as UTF-8, or if it is Parquet, take read_parquet(errors="replace")',
            stage=None if asker is None else str(asker),
        )
        problem._trainpipes = asker and str(asker), int(self._block.ids[number])  # type: ignore[attr-defined]
        raise problem from error


def _is_about_text(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, UnicodeDecodeError | pa.ArrowException):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_bad(data: Any) -> tuple[int, str, str] | None:
    """The first row with text that is not UTF-8, its column, and the text, shortened."""
    found: tuple[int, str, str] | None = None
    if not isinstance(data, pa.Table):
        return None
    for name, column in zip(data.column_names, data.columns, strict=True):
        first = 0
        for chunk in column.chunks:
            bad = _bad_in(chunk)
            if bad is not None and (found is None or first + bad[0] < found[0]):
                found = first + bad[0], name, bad[1]
            if bad is not None:
                break
            first += len(chunk)
    return found


def _bad_in(array: Any) -> tuple[int, str] | None:
    if not has_text(array.type) or is_utf8(array):
        return None
    for row in range(len(array)):  # of nested columns, Arrow has looked at others, too
        try:
            array[row].as_py()
        except UnicodeDecodeError as error:
            text = bytes(error.object)
            shown = text[max(0, error.start - SHOWN // 2) :][:SHOWN]
            return row, f"{shown!r}{'' if len(text) <= SHOWN else ' …'}"
    return None


def is_utf8(array: Any) -> bool:
    """Whether all text of an Arrow array is UTF-8; 1 to 30 µs a MB of ASCII, 1 to 2 ms of others."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def check_whole(table: pa.Table) -> None:
    """Raise ArrowInvalid unless a table can be read without harm. Text need not be UTF-8: it may come so from
    a file, and whoever decodes it says so."""
    for column in table.columns:
        for chunk in column.chunks:
            try:
                check_sound(chunk)
            except pa.ArrowInvalid as error:
                if "Invalid UTF8 sequence" not in str(error):
                    raise


def check_sound(array: Any) -> None:
    """Raise ArrowInvalid unless an array can be read without harm: its offsets lie within its values, and so
    on. Text need not be UTF-8, but for text in dictionaries, of which there is little."""
    array.validate()
    kind = _as_bytes(array.type)
    (array if kind == array.type else array.view(kind)).validate(full=True)


def _as_bytes(kind: Any) -> Any:
    """A type with bytes in place of text."""
    types = pa.types
    for is_text, other in (
        (types.is_string, pa.binary()),
        (types.is_large_string, pa.large_binary()),
        (types.is_string_view, pa.binary_view()),
    ):
        if is_text(kind):
            return other
    if types.is_struct(kind):
        fields = [kind.field(n) for n in range(kind.num_fields)]
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in fields])
    if types.is_list(kind) or types.is_large_list(kind):
        inner = kind.value_field.with_type(_as_bytes(kind.value_type))
        return pa.list_(inner) if types.is_list(kind) else pa.large_list(inner)
    return kind


def has_text(kind: Any) -> bool:
    """Whether values of an Arrow type are text, or hold some."""
    types = pa.types
    if types.is_dictionary(kind):
        return has_text(kind.value_type)
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or any(has_text(kind.field(n).type) for n in range(kind.num_fields))
    )


def replaced(array: Any) -> Any:
    """An array with U+FFFD for what is not UTF-8, as Python's ``errors="replace"`` puts it."""
    kind = array.type
    if not has_text(kind) or is_utf8(array):
        return array
    types = pa.types
    if types.is_string_view(kind):
        return replaced(array.cast(pa.large_binary()).view(pa.large_string())).cast(kind)
    if types.is_string(kind) or types.is_large_string(kind):
        written = array.view(pa.binary() if types.is_string(kind) else pa.large_binary())
        texts = [None if b is None else b.decode("utf-8", "replace") for b in written.to_pylist()]
        return python_to_arrow(texts, kind)
    if array.offset:
        array = array.take(to_arrow(np.arange(len(array))))
    null = array.is_null() if array.null_count else None
    if types.is_struct(kind):
        fields = [replaced(array.field(n)) for n in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=null)
    if types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(replaced(array.values), type=kind, mask=null)
    if types.is_map(kind):
        keys, items = replaced(array.keys), replaced(array.items)
        return pa.MapArray.from_arrays(array.offsets, keys, items, type=kind, mask=null)
    lists = pa.LargeListArray if types.is_large_list(kind) else pa.ListArray
    return lists.from_arrays(array.offsets, replaced(array.values), type=kind, mask=null)
