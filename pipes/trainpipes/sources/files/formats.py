"""What a format is to the reader of its files: blocks of rows, and a schema that those of all files fit."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.checks import IntArray, repeated
from trainpipes._internal.messages import nearest, need_columns
from trainpipes.columns.arrays import decoded
from trainpipes.columns.types import Rule, UnlikeFields, unite_schemas
from trainpipes.errors import SchemaError, TrainpipesError
from trainpipes.interfaces.source import Place
from trainpipes.sources.files.file_bytes import FetchedBytes, FileBytes, merged


class BadFileError(Exception):
    """Why a file cannot be read, as text."""


def reason(error: Exception) -> str:
    if isinstance(error, BadFileError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "it was listed, but is no longer there"
    if isinstance(error, PermissionError):
        return "permission denied"
    if is_encrypted(error):
        return f"a column is encrypted, which is not supported ({one_line(error)})"
    if isinstance(error, UnicodeDecodeError):
        return "the name of a column is not UTF-8"
    return f"{type(error).__name__}: {one_line(error)}"


def is_of_content(error: BaseException) -> bool:
    """Whether an error is about a file's content, the same wherever it is read: not about a file that is
    not reached.
    """
    if isinstance(error, OSError):  # Arrow raises those without a number
        return type(error) is OSError and error.errno is None
    kinds = BadFileError | ValueError | EOFError | ArithmeticError | LookupError | pa.ArrowException
    return isinstance(error, kinds) and not isinstance(error, TrainpipesError)


def is_encrypted(error: BaseException) -> bool:
    return "decrypt" in str(error).lower()


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def plain(field: pa.Field) -> pa.Field:
    """A field without metadata, dictionaries and registered extension types at every depth."""
    return pa.field(field.name, _plain_type(field.type), field.nullable)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if isinstance(kind, pa.ExtensionType):
        return _plain_type(kind.storage_type)
    if types.is_struct(kind):
        return pa.struct([plain(kind.field(n)) for n in range(kind.num_fields)])
    if types.is_map(kind):
        return pa.map_(plain(kind.key_field), plain(kind.item_field), kind.keys_sorted)
    return _list_of(plain(kind.value_field), kind) if _is_list(kind) else kind


def chosen(
    schema: pa.Schema, columns: Sequence[str] | None, caller: str, path: str
) -> dict[str, pa.Field]:
    names: list[str] = schema.names
    twice = sorted(name for name in repeated(names) if columns is None or name in columns)
    if twice:
        said = f"{path} has more than one column {twice[0]!r}; choose others by columns=[...]"
        raise _wrong(said, path, caller)
    if columns is None:
        return {name: plain(schema.field(name)) for name in names}
    fields: dict[str, pa.Field] = {}
    missing, known = [], frozenset(names)
    for top, inner in inner_paths(columns, names).items():
        whole = plain(schema.field(top)) if top in known else None
        field = None if whole is None else _narrow(whole, inner)
        if field is not None:
            fields[top] = field
        else:
            lost = [part for part in inner if whole is None or _narrow(whole, [part]) is None]
            missing += [f"{top}.{part}" if part else top for part in lost]
    need_columns(_also_inner(schema, missing), missing, caller, path)
    return fields


def _wrong(said: str, path: str, caller: str) -> SchemaError:
    return SchemaError(f"{caller}: {said}", path=path, stage=caller)


def inner_paths(columns: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """The wanted columns, in order, with the paths in each, "" for all of it."""
    wanted: dict[str, list[str]] = {}
    known = frozenset(names)
    for column in columns:
        whole = column in known or not all(column.split("."))
        top, _, inner = (column, "", "") if whole else column.partition(".")
        wanted.setdefault(top, []).append(inner)
    return wanted


def _narrow(field: pa.Field, paths: Sequence[str]) -> pa.Field | None:
    """A field with only the parts that these paths lead to; None if a path leads nowhere."""
    if "" in paths:
        return field
    kind = field.type
    if pa.types.is_struct(kind):
        wanted = inner_paths(paths, ())
        known = all(kind.get_field_index(top) >= 0 for top in wanted)
        parts = [_narrow(kind.field(top), wanted[top]) if known else None for top in wanted]
        lacks = any(part is None for part in parts)
        return None if lacks else field.with_type(pa.struct(parts))
    if not _is_list(kind):
        return None
    value, steps = kind.value_field, [path.split(".", 2) for path in paths]
    if any(step[:2] not in (["list", value.name], ["bag", value.name]) for step in steps):
        return None
    value = _narrow(value, [".".join(step[2:]) for step in steps])
    return None if value is None else field.with_type(_list_of(value, kind))


def _list_of(value: pa.Field, kind: pa.DataType) -> pa.DataType:
    """A list type of the same kind as ``kind``."""
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(value, kind.list_size)
    return pa.large_list(value) if pa.types.is_large_list(kind) else pa.list_(value)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _also_inner(schema: pa.Schema, missing: Sequence[str]) -> list[str]:
    """Names of columns, and paths in them that are as long as a missing path, or all."""
    tops = dict.fromkeys(path.split(".", 1)[0] for path in missing if "." in path)
    fields = [plain(schema.field(top)) for top in tops if top in schema.names]
    paths = [path for field in fields for path in _paths(field, field.name)]
    depths = {path.count(".") for path in missing}
    return [*schema.names, *([path for path in paths if path.count(".") in depths] or paths)]


def _paths(field: pa.Field, path: str) -> list[str]:
    kind = field.type
    if _is_list(kind):
        return _paths(kind.value_field, f"{path}.list.{kind.value_field.name}")
    if not pa.types.is_struct(kind):
        return []
    parts = [(kind.field(n), f"{path}.{kind.field(n).name}") for n in range(kind.num_fields)]
    return [inner for part, its in parts for inner in (its, *_paths(part, its))]


def different_schemas(
    names: Sequence[str], schemas: Iterable[pa.Schema]
) -> list[tuple[str, pa.Schema]]:
    different: list[tuple[str, pa.Schema]] = []
    seen: set[int] = set()
    for name, schema in zip(names, schemas, strict=True):
        if id(schema) in seen:  # files share schemas that an index has read once
            continue
        seen.add(id(schema))
        if not any(schema.equals(other) for _, other in different):
            different.append((name, schema))
    return different


def cast_to(column: pa.Array, field: pa.Field, place: Callable[[], Place]) -> pa.Array:
    if column.type.equals(field.type):
        return column
    try:
        values = decoded(column) if pa.types.is_dictionary(column.type) else column
        return values.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"{place()}: column {field.name!r} is {column.type} here and {field.type} over all files, and a "
            f"value does not fit: {error}; convert the file, or read the files in pipelines of their own",
            **vars(place()),
        ) from error


def fitted(rows: Rows, schema: pa.Schema) -> Rows:
    """A table or batch with the columns and types of a schema."""
    if rows.schema.equals(schema):
        return rows
    columns = [rows.column(field.name).cast(field.type) for field in schema]
    return type(rows).from_arrays(columns, schema=schema)


def same_names(
    first_path: str, first: Sequence[str], path: str, names: Sequence[str], caller: str
) -> None:
    for has, lacks, odd, others in (
        (first_path, path, set(first) - set(names), names),
        (path, first_path, set(names) - set(first), first),
    ):
        if odd:
            name = next(name for name in (*first, *names) if name in odd)
            said = (
                f"{has} has a column {name!r}{nearest(name, list(others))}, and {lacks} has not; "
            )
            raise _wrong(f"{said}choose columns that all files have by columns=[...]", path, caller)


def one_schema(
    files: Sequence[tuple[str, pa.Schema]],
    columns: Sequence[str] | None,
    caller: str,
    rule: Rule = "files",
) -> pa.Schema:
    """The columns of all files, each with its path; SchemaError if they have others, or unlike types."""
    first_path, first = files[0]

    def choose(path: str, schema: pa.Schema) -> tuple[str, pa.Schema]:
        if columns is None:
            same_names(first_path, first.names, path, schema.names, caller)
        try:
            return path, pa.schema(chosen(schema, columns, caller, path).values())
        except SchemaError as error:
            if path == first_path:
                raise
            said = f"{error}; {first_path} has {'them' if len(columns or ()) > 1 else 'it'}"
            raise SchemaError(said, path=path, stage=caller) from None

    return united((choose(*file) for file in files), caller, rule)


def united(
    schemas: Iterable[tuple[str, pa.Schema]],
    caller: str,
    rule: Rule,
    way: str = "leave the column out by columns=[...], or read the files in pipelines of their own",
) -> pa.Schema:
    """The columns that hold the values of all files; SchemaError, with two files, if none do."""
    try:
        return unite_schemas(schemas, rule)
    except UnlikeFields as error:
        (first_path, first), (path, second) = error.first, error.second
        said = (
            f"column {first.name!r} is {first.type} in {first_path} and {second.type} in {path}, and no "
            f"type can hold both: convert one, {way}"
        )
        raise _wrong(said, path, caller) from error


#: Names of columns; None for all.
Columns = Sequence[str] | None


class OtherBytesError(Exception):
    """A file differs from its scan; the message says how."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The blocks that a format found in a file.

    Args:
        rows: rows of each block, int64 ``[blocks]``.
        start: where the bytes of each block begin in the file, int64 ``[blocks]``.
        stop: where they end, int64 ``[blocks]``.
        schema: columns and types; no columns if only the rows show them.
        extra: more that ``decode`` needs.

    Raises:
        ValueError: the arrays differ in length.
    """

    rows: IntArray
    start: IntArray
    stop: IntArray
    schema: pa.Schema
    extra: bytes = b""

    def __post_init__(self) -> None:
        numbers = [_counts(name, getattr(self, name)) for name in ("rows", "start", "stop")]
        if len({len(each) for each in numbers}) > 1 or (numbers[1] > numbers[2]).any():
            lengths = ", ".join(f"{len(each):,}" for each in numbers)
            raise ValueError(
                "Layout(rows, start, stop) are numbers of the same blocks, none of which ends before it "
                f"begins, got {lengths} of them"
            )
        for name, each in zip(("rows", "start", "stop"), numbers, strict=True):
            object.__setattr__(self, name, each)


def checked_layout(
    rows: IntArray, start: IntArray, stop: IntArray, schema: pa.Schema, extra: bytes
) -> Layout:
    """A layout of numbers that were checked when it was kept."""
    layout = object.__new__(Layout)
    vars(layout).update(rows=rows, start=start, stop=stop, schema=schema, extra=extra)
    return layout


def _counts(name: str, values: npt.ArrayLike) -> IntArray:
    counts = np.asarray(values)
    if counts.ndim != 1 or (len(counts) and (counts.dtype.kind not in "iu" or counts.min() < 0)):
        raise ValueError(f"Layout({name}) is a list of integers of 0 or more, got {values!r:.80}")
    return counts.astype(np.int64, copy=False)


class InPieces:
    """What a format has opened a file as, if it decodes more rows at a time where more are read at a time.
    ``wanted``: how many are, at the beginning of a block.
    """

    wanted = 0


class Format(ABC):
    """A file format of your own: it finds the blocks of a file, and decodes a block.

    It has no state and is picklable: threads and processes share it.

    Attributes:
        name: its name in messages and in the index.
        suffixes: endings of its files in folders; ``("",)`` for all.
        key: options that change the layout or the rows, as text; a state with another key is refused.

    >>> import numpy as np, pathlib, pyarrow as pa, tempfile, trainpipes as tp
    >>> class Numbers(tp.Format):
    ...     name, suffixes, schema = "numbers", (".i8",), pa.schema([("x", pa.int64())])
    ...     def scan(self, file):
    ...         start = np.arange(0, file.size, 800)
    ...         stop = np.append(start[1:], file.size)
    ...         return tp.Layout((stop - start) // 8, start, stop, self.schema)
    ...     def decode(self, data, layout, block, columns):
    ...         [content] = data.read(self.ranges(layout, block, columns))
    ...         yield pa.record_batch({"x": np.frombuffer(content, "<i8")})
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.i8").write_bytes(np.arange(1000, dtype="<i8").tobytes())
    >>> rows = tp.read_files(folder, Numbers())
    >>> len(rows), next(iter(rows.skip(750)))
    (1000, {'x': 750})
    """

    name: str
    suffixes: tuple[str, ...] = ("",)
    key: str = ""
    #: What messages call blocks, whether they number them, and whether a state knows the rows of each.
    blocks_called, places_blocks, known_by_blocks = "blocks", False, False
    #: Whether ``fetch`` gets a part of large blocks, so that it can be called for blocks of any size.
    fetches_parts = False
    #: Whether rows can be read by their numbers, by ``take``; and whether that is as good as by blocks.
    random_access = by_number = False
    #: In which files, and the way out for others, as text.
    fit, otherwise = "files that are on this machine", "shuffle within a buffer"

    @abstractmethod
    def scan(self, file: FileBytes) -> Layout:
        """Find the blocks of a file, for the index. Several threads call it.

        Args:
            file: ``file.size``, ``file.name``, ``file.read([(start, stop), ...])``, which returns a
                memoryview for each range, and ``file.stream(start)``, an open file.

        Raises:
            Exception: any, if the file is not of this format; the message should name the file.
        """

    def ranges(self, layout: Layout, block: int, columns: Columns) -> list[tuple[int, int]]:
        """The bytes that ``decode`` reads of a block, by default from ``start`` to ``stop``. Remote ones are
        fetched ahead.

        Args:
            layout: of the file.
            block: number of the block in it.
            columns: names of the wanted columns; None for all.
        """
        return [(int(layout.start[block]), int(layout.stop[block]))]

    @abstractmethod
    def decode(
        self, data: Any, layout: Layout, block: int, columns: Columns
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a block in order, as many as the layout counts.

        Args:
            data: the bytes of the file; ``data.mapped()`` maps a local file.
            layout: of the file.
            block: number of the block in it.
            columns: names of the wanted columns; None for all. Others may come, and are dropped.
        """

    def fingerprint(self) -> Any:
        """What identifies the format in a state, of JSON types."""
        return {"format": self.name, "key": self.key}

    # What most formats leave as it is

    def open(self, data: FileBytes, layout: Layout) -> Any:
        """What ``decode`` gets instead of the bytes, kept while a reader stays in a file; closed if it has
        ``close``.
        """
        return data

    def fetch(
        self, data: FileBytes, layout: Layout, blocks: Sequence[int], columns: Columns
    ) -> Any:
        """``open`` of a remote file, with the bytes of some blocks. Any thread calls it ahead."""
        ranges = [span for block in blocks for span in self.ranges(layout, block, columns)]
        return self.open(FetchedBytes(data, ranges), layout)

    def fetched_bytes(self, layout: Layout, blocks: Sequence[int], columns: Columns) -> float:
        """About how many bytes ``fetch`` gets; 0 to never call it."""
        ranges = [span for block in blocks for span in self.ranges(layout, block, columns)]
        return float(sum(stop - start for start, stop in merged(ranges)))

    def take(self, data: FileBytes, layout: Layout, rows: Any, columns: Columns) -> Any:
        """Rows by number: a record batch, tensors, or a list. ``rows`` is an array or, with ``by_number``, a
        slice.
        """
        raise NotImplementedError

    def unfit(self, layout: Layout, local: bool) -> bool:
        """Whether rows of a file cannot be read by number, as of a compressed file."""
        return not local

    def change(self, data: FileBytes, layout: Layout) -> str:
        """How an unreadable file differs from its scan, beyond size and time; or ""."""
        return ""

    def block_key(self, layout: Layout, blocks: range) -> list[Any]:
        """What identifies the rows of some blocks, besides file and numbers; of JSON types."""
        return []

    def note(self, layout: Layout) -> str:
        """What identifies a file in a state, besides name, size and row count."""
        return ""

    def content(self, layout: Layout) -> str:
        """What ``scan`` read of a file's content, as text such as a checksum: a state knows the file by it.

        By default "", nothing: then a store's ETag counts, or size alone.
        """
        return ""

    def describe(self, layouts: Sequence[Layout]) -> list[tuple[str, str]]:
        """More lines for ``explain()``: pairs of a label and a text."""
        return []


def packed(**values: Any) -> bytes:
    """Values of JSON types and arrays of numbers as bytes, for ``Layout.extra``.

    >>> unpacked(packed(kind="a", at=np.array([1, 2])))
    {'kind': 'a', 'at': array([1, 2])}
    """
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in values.items() if name not in arrays}
    about = [plain, [[name, each.dtype.str, len(each)] for name, each in arrays.items()]]
    head = json.dumps(about, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    parts = [len(head).to_bytes(8, "little"), head, *(each.tobytes() for each in arrays.values())]
    return b"".join(parts)


def unpacked(data: bytes) -> dict[str, Any]:
    at = 8 + int.from_bytes(data[:8], "little")
    values, arrays = json.loads(data[8:at])
    for name, kind, count in arrays:
        values[name] = np.frombuffer(data, kind, count, at)
        at += values[name].nbytes
    named: dict[str, Any] = values
    return named
