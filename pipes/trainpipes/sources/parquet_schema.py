"""One schema for the rows of many Parquet files, or the first file that does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from trainpipes.errors import SchemaError
from trainpipes.naming import nearest, need_columns

__all__ = ["chosen", "one_schema", "plain"]


def plain(field: pa.Field) -> pa.Field:
    """A field without metadata, dictionaries replaced by their values at every depth."""
    return pa.field(field.name, _plain_type(field.type), field.nullable)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([plain(kind.field(n)) for n in range(kind.num_fields)])
    if types.is_map(kind):
        return pa.map_(plain(kind.key_field), plain(kind.item_field), kind.keys_sorted)
    if types.is_large_list(kind):
        return pa.large_list(plain(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(plain(kind.value_field), kind.list_size)
    if types.is_list(kind):
        return pa.list_(plain(kind.value_field))
    return kind


def chosen(
    schema: pa.Schema, columns: Sequence[str] | None, asker: str, path: str
) -> dict[str, pa.Field]:
    """The chosen columns of one file, in the order asked for.

    Args:
        schema: the file's Arrow schema.
        columns: names; ``"a.b"`` for field b of struct a. None for all.
        asker: the stage, for messages.
        path: the file, for messages.

    Raises:
        SchemaError: a column is missing, or there are two of its name.
    """
    names: list[str] = schema.names
    twice = sorted({n for n in names if names.count(n) > 1 and (columns is None or n in columns)})
    if twice:
        raise SchemaError(
            f"{asker}: {path} has more than one column {twice[0]!r}; choose others by columns=[...]",
            path=path,
            stage=asker,
        )
    if columns is None:
        return {name: plain(schema.field(name)) for name in names}
    wanted: dict[str, list[str]] = {}
    missing = []
    for column in columns:
        top, *inner = [column] if column in names else column.split(".", 1)
        if top not in names or not _has(schema.field(top).type, inner):
            missing.append(column)
            continue
        wanted.setdefault(top, []).extend(inner)
    need_columns(_also_inner(schema, missing), missing, asker, path)
    return {top: _narrow(plain(schema.field(top)), inner) for top, inner in wanted.items()}


def _has(kind: pa.DataType, inner: Sequence[str]) -> bool:
    if not inner:
        return True
    top, *rest = inner[0].split(".", 1)
    return (
        pa.types.is_struct(kind)
        and kind.get_field_index(top) >= 0
        and _has(kind.field(top).type, rest)
    )


def _narrow(field: pa.Field, inner: Sequence[str]) -> pa.Field:
    """A field with only these of its fields; with all if none are named."""
    if not inner:
        return field
    wanted: dict[str, list[str]] = {}
    for name in inner:
        top, *rest = name.split(".", 1)
        wanted.setdefault(top, []).extend(rest)
    parts = [_narrow(field.type.field(top), rest) for top, rest in wanted.items()]
    return pa.field(field.name, pa.struct(parts), field.nullable)


def _also_inner(schema: pa.Schema, missing: Sequence[str]) -> list[str]:
    """Names of columns; of fields of structs too, where such a one was asked for."""
    names = list(schema.names)
    for top in dict.fromkeys(m.split(".", 1)[0] for m in missing if "." in m):
        kind = schema.field(top).type if top in names else None
        if kind is not None and pa.types.is_struct(kind):
            names += [f"{top}.{kind.field(n).name}" for n in range(kind.num_fields)]
    return names


def one_schema(
    files: Sequence[tuple[str, pa.Schema]], columns: Sequence[str] | None, asker: str
) -> pa.Schema:
    """The schema that the chosen columns of all files can be cast to without loss.

    Types that differ are widened by Arrow's permissive promotion (int32 and int64, null and anything,
    string and large_string, …). Metadata is dropped.

    Args:
        files: path and schema of the first file, and of the first file of each other schema.
        columns: names to choose; None for those of the first file, which all must have then.
        asker: the stage, for messages.

    Raises:
        SchemaError: a file lacks a column or has it with another type; names that file and the first.
    """
    first_path, first = files[0]
    fields = chosen(first, columns, asker, first_path)
    for path, schema in files[1:]:
        if columns is None:
            _same_names(first_path, first, path, schema, asker)
        try:
            other = chosen(schema, columns, asker, path)
        except SchemaError as error:
            said = f"{error}; {first_path} has {'them' if len(columns or ()) > 1 else 'it'}"
            raise SchemaError(said, path=path, stage=asker) from None
        for name, field in fields.items():
            fields[name] = _wider(field, other[name], first_path, path, asker)
    return pa.schema(list(fields.values()))


def _same_names(
    first_path: str, first: pa.Schema, path: str, schema: pa.Schema, asker: str
) -> None:
    for has, lacks, there, not_there in (
        (first_path, path, first, schema),
        (path, first_path, schema, first),
    ):
        odd = [name for name in there.names if name not in not_there.names]
        if odd:
            raise SchemaError(
                f"{asker}: {has} has a column {odd[0]!r}{nearest(odd[0], not_there.names)}, and "
                f"{lacks} has not; choose columns that all files have by columns=[...]",
                path=path,
                stage=asker,
            )


def _wider(field: pa.Field, other: pa.Field, first_path: str, path: str, asker: str) -> pa.Field:
    if field.equals(other):
        return field
    pair = [pa.schema([_without_views(f)]) for f in (field, other)]
    if field.type.equals(other.type):
        pair = [pa.schema([f]) for f in (field, other)]
    try:
        return pa.unify_schemas(pair, promote_options="permissive").field(0)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SchemaError(
            f"{asker}: column {field.name!r} is {field.type} in {first_path} and {other.type} in "
            f"{path}, which no one type holds; convert one, leave the column out by columns=[...], or "
            "read the files apart",
            path=path,
            stage=asker,
        ) from error


def _without_views(field: pa.Field) -> pa.Field:
    """A field of text or bytes in the type that promotion knows."""
    kinds = {"string_view": pa.string(), "binary_view": pa.binary()}
    return field.with_type(kinds.get(str(field.type), field.type))
