from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pyarrow as pa

from trainpipes._internal.checks import repeated
from trainpipes._internal.messages import nearest, need_columns
from trainpipes.errors import SchemaError
from trainpipes.interfaces.source import Place

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
        top, _, inner = (column, "", "") if column in known else column.partition(".")
        wanted.setdefault(top, []).append(inner)
    return wanted


def _narrow(field: pa.Field, paths: Sequence[str]) -> pa.Field | None:
    """A field with only what these paths lead to; None if one leads nowhere."""
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
    """A list of the same kind as another one."""
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(value, kind.list_size)
    return pa.large_list(value) if pa.types.is_large_list(kind) else pa.list_(value)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _also_inner(schema: pa.Schema, missing: Sequence[str]) -> list[str]:
    """Names of columns, and paths in them that are as long as a missing one, or all."""
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
        if id(schema) in seen:  # files share what an index has read once
            continue
        seen.add(id(schema))
        if not any(schema.equals(other) for _, other in different):
            different.append((name, schema))
    return different


def cast_to(column: pa.Array, field: pa.Field, place: Callable[[], Place]) -> pa.Array:
    if column.type.equals(field.type):
        return column
    try:
        return column.cast(field.type)
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


def unified(field: pa.Field, other: pa.Field) -> pa.Field:
    pair = [pa.schema([_without_views(f)]) for f in (field, other)]
    if field.type.equals(other.type):
        pair = [pa.schema([f]) for f in (field, other)]
    return pa.unify_schemas(pair, promote_options="permissive").field(0)


def wider(
    field: pa.Field,
    other: pa.Field,
    first_path: str,
    path: str,
    caller: str,
    unify: Callable[[pa.Field, pa.Field], pa.Field] = unified,
    way: str = "leave the column out by columns=[...], or read the files in pipelines of their own",
) -> pa.Field:
    """A field that holds the values of both; SchemaError, with both files, if none does."""
    try:
        return field if field.equals(other) else unify(field, other)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        said = (
            f"column {field.name!r} is {field.type} in {first_path} and {other.type} in {path}, and no "
            f"type can hold both: convert one, {way}"
        )
        raise _wrong(said, path, caller) from error


def one_schema(
    files: Sequence[tuple[str, pa.Schema]],
    columns: Sequence[str] | None,
    caller: str,
    unify: Callable[[pa.Field, pa.Field], pa.Field] = unified,
) -> pa.Schema:
    first_path, first = files[0]
    fields = chosen(first, columns, caller, first_path)
    for path, schema in files[1:]:
        if columns is None:
            same_names(first_path, first.names, path, schema.names, caller)
        try:
            other = chosen(schema, columns, caller, path)
        except SchemaError as error:
            said = f"{error}; {first_path} has {'them' if len(columns or ()) > 1 else 'it'}"
            raise SchemaError(said, path=path, stage=caller) from None
        for name, field in fields.items():
            fields[name] = wider(field, other[name], first_path, path, caller, unify)
    return pa.schema(list(fields.values()))


def _without_views(field: pa.Field) -> pa.Field:
    kinds = {"string_view": pa.string(), "binary_view": pa.binary()}
    return field.with_type(kinds.get(str(field.type), field.type))
