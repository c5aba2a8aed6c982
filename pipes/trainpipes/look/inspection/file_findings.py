"""What to know of files before training that can be told without their rows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from trainpipes._internal.amount import amount
from trainpipes._internal.shown import cut
from trainpipes.errors import SchemaError
from trainpipes.look.inspection.given_files import GivenFiles, as_arguments
from trainpipes.look.inspection.inspection import Finding
from trainpipes.look.inspection.part import Found, Part, types_of
from trainpipes.sources.files.listing import is_local
from trainpipes.sources.files.schema import one_schema

__all__ = ["BUFFER_ROWS", "changed_files", "file_findings", "repack"]

#: Rows that ``shuffle`` mixes at a time as README and the recipes have it.
BUFFER_ROWS = 40_960
#: Rows of a row group above which a resume within it is slow, and a shuffle's window lies in one:
#: docs/performance.md.
LARGE_ROWS = 100_000
#: Row groups of fewer rows and bytes cost a seek or a request each, which takes as long as to read some 64
#: KiB (sources/remote/file.py): docs/performance.md. Of few of them it does not matter.
SMALL_ROWS, SMALL_BYTES, MANY = 1000, 1 << 20, 100
#: Bytes of a record batch, or of a compressed block, that is decoded as a whole: a reader of each shard holds
#: one.
LARGE_BLOCK = 256 << 20
#: A compressed block so much larger than 4 MiB is named by ``explain()``, too (sources/text/blocks.py).
ONE_MEMBER = 16 << 20
#: Memory of a shuffle's windows, unless ``max_bytes`` says otherwise.
SHUFFLE_BYTES = 1 << 30
#: A file is uneven if it is so many times as large as the median one, and so large that it matters.
UNEVEN, UNEVEN_BYTES = 10, 64 << 20
#: Bytes of data that is worth compressing, or compressing otherwise.
WORTH_BYTES = 64 << 20
#: Rows of a row group that are good for most data.
GOOD_ROWS = 10_000
#: Files that a finding names.
NAMED = 3


def repack(given: GivenFiles, options: str) -> str:
    """The command that writes the files anew."""
    return f"trainpipes repack {given.data} OUT {options}".rstrip()


def file_findings(given: GivenFiles, found: Found, num_shards: int) -> Iterator[Finding]:
    """Everything that is to be said of the files."""
    yield from _of_listing(given, found)
    yield from _of_schemas(given, found)
    yield from _of_groups(given, found, num_shards)
    yield from _of_sizes(given, found)
    yield from _of_codecs(given, found)


def _of_listing(given: GivenFiles, found: Found) -> Iterator[Finding]:
    if given.unfinished:
        yield Finding(
            "warning",
            "being_written",
            f"{_named(given.unfinished)} {_looks(given.unfinished)} as if it were still being written",
            "wait until it is whole, or remove it",
            given.unfinished[:NAMED],
        )
    for reader, names in given.others.items():
        if given.reader == "read_images" and reader in ("read_csv", "read_json"):
            text = f"{_files(names)} beside the images {_is(names)} not read: {_named(names)}"
            cure = f".read_images(labels={names[0]!r})" if reader == "read_csv" else ""
            yield Finding("note", "other_files", text, cure, tuple(names[:NAMED]))
        elif reader:
            yield Finding(
                "warning",
                "other_formats",
                f"{_files(names)} of another format ({_named(names)}) {_is(names)} not looked at, and "
                f"{given.reader}() does not read {'it' if len(names) == 1 else 'them'}",
                f"trainpipes inspect {as_arguments(names)}",
                tuple(names[:NAMED]),
            )
        else:
            text = f"{_files(names)} that no reader is for {_is(names)} not read: {_named(names)}"
            yield Finding("note", "other_files", text, "", tuple(names[:NAMED]))
    if found.passed_over:
        yield Finding(
            "note",
            "not_looked_at",
            f"{_files(found.passed_over)} can only be read from the start and {_is(found.passed_over)} "
            f"large, so that their rows are not counted: {_named(found.passed_over)}",
            "unpack to .tar, or write more and smaller archives",
            tuple(found.passed_over[:NAMED]),
        )
    empty = [part.name for part in found.parts if not part.rows and part.counted]
    if empty and found.rows:
        yield Finding(
            "warning", "no_rows", f"{_files(empty)} without rows: {_named(empty)}",
            "remove them, if they should not be empty find out why", tuple(empty[:NAMED]),
        )  # fmt: skip


def _of_schemas(given: GivenFiles, found: Found) -> Iterator[Finding]:
    parts = [part for part in found.parts if part.rows] or found.parts
    if not parts:
        return
    first, differ = parts[0], [p for p in parts[1:] if not p.schema.equals(parts[0].schema)]
    names = first.schema.names
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        yield Finding(
            "warning", "same_names", f"{len(twice):,} names are of more than one column: {twice[0]!r}",
            "choose others: .read_parquet(columns=[...])", (first.name,),
        )  # fmt: skip
        return
    if not differ:
        return
    for kind, other in _kinds(first, differ).items():
        where = f"{len(differ):,} of {len(parts):,} files; the first is {other.name}"
        said = _difference(first.schema, other.schema)
        if kind == "widened":
            yield Finding(
                "note", "mixed_schemas",
                f"types differ between files, and are read as one that holds both: {said} ({where})",
                "", (first.name, other.name),
            )  # fmt: skip
        elif kind:
            yield Finding(
                "warning", "mixed_schemas",
                f"files do not have the same columns: {said} ({where})",
                f".{given.reader}(columns=[...]) with what all have, or convert the file"
                if given.reader != "read_text" else "",
                (first.name, other.name),
            )  # fmt: skip
            if {*first.schema.names} != {*other.schema.names}:
                yield from _of_types([first, *differ])


def _of_types(parts: Sequence[Part]) -> Iterator[Finding]:
    """Columns that have one type in some files and another one in others."""
    schemas = list(dict.fromkeys(part.schema for part in parts))
    several: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for schema in schemas for name in schema.names):
        kinds = [kind for kind in types_of(schemas, name) if not pa.types.is_null(kind)]
        if len(kinds) > 1:
            several[_quoted(name)] = list(map(_short, kinds))
    if several:
        told = [f"{name} is {' or '.join(kinds[:NAMED])}" for name, kinds in several.items()]
        more = f" and {len(told) - NAMED:,} more" if told[NAMED:] else ""
        yield Finding(
            "warning", "mixed_types", f"types differ between files: {', '.join(told[:NAMED])}{more}",
            "convert the files to one type",
        )  # fmt: skip


def _kinds(first: Part, differ: Sequence[Part]) -> dict[str, Part]:
    """The first file of each way to differ: its types can be widened, or it cannot be read with the
    others."""
    found: dict[str, Part] = {}
    seen: list[pa.Schema] = []
    for part in differ:
        if any(part.schema.equals(schema) for schema in seen):
            continue
        seen.append(part.schema)
        try:
            one_schema([(first.name, first.schema), (part.name, part.schema)], None, "")
            same = set(map(str, first.schema)) == set(map(str, part.schema))
            found.setdefault("" if same else "widened", part)
        except SchemaError:
            found.setdefault("unlike", part)
            break
    return found


def _difference(first: pa.Schema, other: pa.Schema) -> str:
    """The first column in which two schemas differ."""
    for name in first.names:
        if name not in other.names:
            return f"column {_quoted(name)} is missing"
    for name in other.names:
        if name not in first.names:
            return f"column {_quoted(name)} is new"
    for name in first.names:
        mine, own = first.field(name).type, other.field(name).type
        if not mine.equals(own):
            return f"column {_quoted(name)} is {_short(own)}, and {_short(mine)} before"
    return "the same columns in another order"


def _of_groups(given: GivenFiles, found: Found, num_shards: int) -> Iterator[Finding]:
    lengths, sizes = found.lengths, found.block_bytes
    filled = lengths > 0
    lengths, sizes = lengths[filled], sizes[filled]
    if not len(lengths) or given.reader in ("read_images", "read_numpy", "from_memmap"):
        return
    called, rows = found.called, int(np.median(lengths))
    smaller = repack(given, f"--row-group-size {GOOD_ROWS}")
    if given.reader == "read_parquet" and int(lengths.max()) > LARGE_ROWS:
        yield Finding(
            "warning",
            "large_row_groups",
            f"row groups have up to {int(lengths.max()):,} rows ({amount(float(sizes.max()))}): "
            f".shuffle({BUFFER_ROWS}) mixes within {BUFFER_ROWS:,} consecutive rows of one, and a resume "
            "decodes a row group again from its start",
            smaller,
        )
    elif given.reader == "read_arrow" and float(sizes.max()) > LARGE_BLOCK:
        yield Finding(
            "warning",
            "large_record_batches",
            f"record batches have up to {amount(float(sizes.max()))}: one that is compressed or on a server "
            "is held as a whole",
            smaller,
        )
    elif any(kind not in ("none", "snappy") for kind in found.codecs) and (
        given.reader in ("read_json", "read_csv", "read_text") and float(sizes.max()) > ONE_MEMBER
    ):
        yield Finding(
            "warning",
            "one_member",
            "compressed files can only be read from few places on, up to "
            f"{amount(float(sizes.max()))} apart: each shard, and each resume, reads from the "
            "last such place",
            repack(given, ""),
        )
    small = len(lengths) >= MANY and rows < SMALL_ROWS and float(np.median(sizes)) < SMALL_BYTES
    if small and given.reader == "read_parquet":
        yield Finding(
            "warning",
            "small_row_groups",
            f"half of the {len(lengths):,} row groups have {rows:,} rows or fewer, of "
            f"{amount(float(np.median(sizes)))}: each costs a seek, or a request to a server",
            smaller,
        )
    spans = min(num_shards, found.rows // BUFFER_ROWS)
    if given.reader == "read_parquet" and len(lengths) < spans:
        times = -(-(spans + len(lengths) - 1) // len(lengths))
        yield Finding(
            "warning",
            "few_row_groups",
            f"{len(lengths):,} {called if len(lengths) > 1 else called[:-1]} for {num_shards} shards: each "
            f"is decoded about {times} times in an epoch, by the shards that share it",
            smaller,
        )


def _of_sizes(given: GivenFiles, found: Found) -> Iterator[Finding]:
    sizes = np.array([part.size for part in found.parts])
    if len(sizes) >= 4:
        median, largest = float(np.median(sizes)), int(sizes.argmax())
        if sizes[largest] > max(UNEVEN_BYTES, UNEVEN * median):
            yield Finding(
                "note",
                "uneven_files",
                f"files are of very different sizes: {found.parts[largest].name} has "
                f"{amount(float(sizes[largest]))}, half of them {amount(median)} or less. That is no fault "
                "here, where rows are dealt to ranks and not files",
                "",
                (found.parts[largest].name,),
            )
    row_bytes = found.row_bytes
    window = row_bytes * min(BUFFER_ROWS, found.rows)
    if window > SHUFFLE_BYTES and given.reader != "read_images":
        fit = int(SHUFFLE_BYTES / row_bytes)
        yield Finding(
            "note",
            "wide_rows",
            f"rows have {amount(row_bytes)} in memory: .shuffle({BUFFER_ROWS}) would need {amount(window)}, "
            f"and mixes {fit:,} rows at a time in the {amount(SHUFFLE_BYTES)} that it takes by default",
            f".{given.reader}(columns=[...]) with what is used, or .shuffle({BUFFER_ROWS}, "
            f"max_bytes={int(window * 1.1) >> 30 << 30 or 1 << 30})",
        )


def _of_codecs(given: GivenFiles, found: Found) -> Iterator[Finding]:
    total = sum(found.codecs.values())
    if given.reader != "read_parquet" or total < WORTH_BYTES * found.looked:
        return
    if found.codecs["none"] > total / 2:
        yield Finding(
            "note", "not_compressed", f"{found.codecs['none'] / total:.0%} of the bytes are not compressed",
            repack(given, "--compression zstd"),
        )  # fmt: skip
    if found.codecs["gzip"] > total / 2:
        # Measured on text, one thread: gzip 370 MB/s, zstd 970 MB/s, lz4 1,700 MB/s; zstd's files are 8 %
        # larger.
        yield Finding(
            "note",
            "gzip",
            f"{found.codecs['gzip'] / total:.0%} of the bytes are compressed by gzip, which takes more than "
            "twice as long to decode as zstd, and is hardly smaller",
            repack(given, "--compression zstd"),
        )


def changed_files(given: GivenFiles) -> Iterator[Finding]:
    """Files of this machine that are no longer as they were when they were listed."""
    files, changed = given.files, []
    for file, path in enumerate(files.paths):
        if not is_local(files.system(file)):
            continue
        try:
            stat = os.stat(path)
            same = stat.st_size == files.sizes[file] and str(stat.st_mtime_ns) == files.stamps[file]
        except OSError:
            same = False
        if not same:
            changed.append(files.names[file])
    if changed:
        yield Finding(
            "warning", "being_written", f"{_files(changed)} changed meanwhile: {_named(changed)}",
            "wait until it is whole, and look again", tuple(changed[:NAMED]),
        )  # fmt: skip


def _files(names: Sequence[str]) -> str:
    return f"{len(names):,} file{'s' * (len(names) != 1)}"


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _looks(names: Sequence[str]) -> str:
    return "looks" if len(names) == 1 else "look"


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED:,} more"


def _quoted(name: str) -> str:
    return repr(cut(name, 60))


def _short(kind: pa.DataType) -> str:
    return cut(str(kind), 60)
