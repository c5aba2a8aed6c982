"""The samples of tar archives, as arrays: found by the headers of their members, and kept for later runs.

Made by the thread that opens a pipeline, before any row is read. Of several processes of a machine that need
the same index one makes it, and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trainpipes._internal.messages import nearest
from trainpipes.columns.arrays import apart, one_chunk, python_to_arrow, to_numpy
from trainpipes.engine.layout import IntArray
from trainpipes.errors import SchemaError
from trainpipes.sources.compressed.streams import kind_by_content, open_stream
from trainpipes.sources.files.each_file import BadFileError, each_file
from trainpipes.sources.files.file_bytes import LocalBytes, open_bytes
from trainpipes.sources.files.index_file import IndexFile, IndexKind
from trainpipes.sources.files.kept_index import KeptIndex
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.remote.retry import Requests
from trainpipes.sources.tar.layout import Forward, Samples, chunks_of, read_samples

KEY = "__key__"
#: Bytes of local archives from which on an index of them is kept.
LARGE = 64 << 20

COLUMNS = pa.schema(
    [
        ("path", pa.string()),
        ("stamp", pa.string()),
        ("size", pa.int64()),
        ("compression", pa.string()),
        ("keys", pa.list_(pa.string())),
        ("kinds", pa.list_(pa.string())),
        *((name, pa.list_(pa.int64())) for name in ("counts", "kind_of", "starts", "sizes")),
    ]
)


@dataclass(frozen=True, eq=False)
class TarIndex:
    """Archives and their samples, in order.

    Args:
        file_sizes: bytes of each archive, int64 ``[files]``.
        compressions: what each is compressed with; "" for nothing.
        first_row: number of each archive's first sample, int64 ``[files + 1]``.
        keys: of the samples, text ``[rows]``.
        columns: names of the columns, ``"__key__"`` among them.
        kinds: extensions among the columns.
        starts: where each sample's member begins in its archive, int64 ``[kinds][rows]``.
        sizes: its bytes; -1 where there is none.
        sample_bytes: bytes of each sample in these columns, int64 ``[rows]``.
        kept_in: the file in which all this is kept, if it is.
    """

    file_sizes: IntArray
    compressions: list[str]
    first_row: IntArray
    keys: pa.Array
    columns: list[str]
    kinds: list[str]
    starts: list[IntArray]
    sizes: list[IntArray]
    sample_bytes: IntArray
    kept_in: str | None = None

    def rows(self, file: int) -> slice:
        """The samples of an archive."""
        return slice(int(self.first_row[file]), int(self.first_row[file + 1]))

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where in their archive the members of samples that follow each other begin and end."""
        low, high = [], []
        for starts, sizes in zip(self.starts, self.sizes, strict=True):
            there = sizes[start:stop] >= 0
            if there.any():
                begins = starts[start:stop][there]
                low.append(int(begins.min()))
                high.append(int((begins + sizes[start:stop][there]).max()))
        return min(low, default=0), max(high, default=0)


def tar_index(
    files: FileList,
    columns: Sequence[str] | None,
    nulls: bool,
    asker: str,
    index: str | bool | None,
) -> TarIndex:
    """The samples of archives.

    Args:
        files: the archives.
        columns: which columns; None for all.
        nulls: whether a sample may lack a member.
        asker: the stage, for messages.
        index: where it is kept; see ``IndexFile.of``.

    Raises:
        UnreadableError: names every file that is no archive, with the reason.
        SchemaError: a sample lacks a member.
        UnreachableError: a server does not answer, or denies access.
    """
    kind = IndexKind(
        "read_webdataset", "samples", {"samples": 1}, COLUMNS, _is_sound, least_bytes=LARGE
    )
    kept = KeptIndex(files, IndexFile.of(files, index, kind), COLUMNS, _table_of)

    def learn(missing: list[int]) -> None:
        def look(file: int, requests: Requests) -> None:
            kept.fresh[file] = _look(files, file, requests)

        job = "reading headers of tar archives"
        each_file(files, look, asker, "tar archives", wanted=missing, job=job)

    kept.complete(learn)
    return _joined(kept.table(), files, columns, nulls, asker, kept.path)


def _look(files: FileList, file: int, requests: Requests) -> tuple[int, str, Samples]:
    data = open_bytes(files, file, requests)
    size = data.size
    if not size:
        raise BadFileError("empty: 0 bytes")
    kind = kind_by_content(bytes(data.read([(0, min(size, 16))])[0]))
    if not kind and isinstance(data, LocalBytes):
        content = memoryview(data.mapped())
        return size, kind, read_samples(Forward(chunks_of(content)))
    with closing(data.stream()) as source:
        return size, kind, read_samples(Forward(open_stream(source, kind)))


def _table_of(
    found: Sequence[tuple[int, str, Samples]], names: Sequence[str], stamps: Sequence[str]
) -> pa.Table:
    values = {
        "path": names,
        "stamp": stamps,
        "size": [size for size, _, _ in found],
        "compression": [kind for _, kind, _ in found],
    }
    for name in COLUMNS.names[4:]:
        values[name] = [getattr(samples, name) for _, _, samples in found]
    columns = {name: python_to_arrow(values[name], COLUMNS.field(name).type) for name in values}
    return pa.table(columns, schema=COLUMNS)


def _is_sound(table: pa.Table) -> bool:
    """Whether a table can be what archives say: counts that fit, no member outside of its archive."""
    if not table.schema.equals(COLUMNS) or any(c.null_count for c in table.columns):
        return False
    table.validate(full=True)
    lengths = {
        name: to_numpy(one_chunk(table.column(name)).value_lengths()).astype(np.int64)
        for name in COLUMNS.names[4:]
    }
    members = lengths["kind_of"]
    if not all((lengths[name] == members).all() for name in ("starts", "sizes")):
        return False
    numbers = {name: _flat(table, name) for name in ("counts", "kind_of", "starts", "sizes")}
    if any((values < 0).any() for values in numbers.values()):
        return False
    ends = np.cumsum(lengths["counts"])
    counted = np.append(0, np.cumsum(numbers["counts"]))[np.append(0, ends)]
    sizes = np.repeat(to_numpy(one_chunk(table.column("size"))), members)
    plain = np.repeat([kind == "" for kind in table.column("compression").to_pylist()], members)
    inside = numbers["starts"] + numbers["sizes"] <= sizes
    return bool(
        (lengths["keys"] == lengths["counts"]).all()
        and (np.diff(counted) == members).all()
        and (numbers["kind_of"] < np.repeat(lengths["kinds"], members)).all()
        and (inside | ~plain).all()
    )


def _flat(table: pa.Table, name: str) -> IntArray:
    """All numbers of a column of lists, int64."""
    return to_numpy(apart(one_chunk(table.column(name)))[0]).astype(np.int64)


def _joined(
    table: pa.Table,
    files: FileList,
    columns: Sequence[str] | None,
    nulls: bool,
    asker: str,
    kept_in: str | None,
) -> TarIndex:
    keys, first_row = apart(one_chunk(table.column("keys")))
    counts, members = _flat(table, "counts"), _flat(table, "kind_of")
    starts, sizes = _flat(table, "starts"), _flat(table, "sizes")
    ends = apart(one_chunk(table.column("kind_of")))[1].astype(np.int64)
    per_file = ends[1:] - ends[:-1]
    # Extensions by one number over all archives, in the order in which they are met.
    numbers: dict[str, int] = {}
    shared = []
    for kinds in table.column("kinds").to_pylist():
        shared.append([numbers.setdefault(kind, len(numbers)) for kind in kinds])
    firsts = np.cumsum([0, *map(len, shared)])
    flat_shared = np.array([n for one in shared for n in one], dtype=np.int64)
    kind_of = flat_shared[members + np.repeat(firsts[:-1], per_file)] if len(members) else members
    row_of = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    names = list(numbers)
    first_kinds = [names[k] for k in kind_of[row_of == 0].tolist()]
    whole = names if nulls else first_kinds
    chosen = [KEY, *whole] if columns is None else list(columns)
    for name in chosen:
        if name != KEY and name not in numbers and len(counts):
            raise SchemaError(
                f"{asker}: no sample has a member {name!r}{nearest(name, names)}; there are {names}, and "
                f"{KEY!r}",
                path=files.names[0],
                stage=asker,
            )
    own = [name for name in chosen if name != KEY]
    dense_starts, dense_sizes = [], []
    for name in own:
        at, of = np.zeros(len(counts), dtype=np.int64), np.full(len(counts), -1, dtype=np.int64)
        which = np.flatnonzero(kind_of == numbers.get(name, -1))
        at[row_of[which]], of[row_of[which]] = starts[which], sizes[which]
        dense_starts.append(at)
        dense_sizes.append(of)
    first_row = first_row.astype(np.int64)
    if not nulls:
        for name, of in zip(own, dense_sizes, strict=True):
            _refuse(np.flatnonzero(of < 0), "has no member", name, files, first_row, keys, asker)
        if columns is None:
            for name in [name for name in names if name not in own]:
                rows = row_of[kind_of == numbers[name]]
                _refuse(rows, "alone has a member", name, files, first_row, keys, asker)
    total = np.zeros(len(counts), dtype=np.int64)
    for of in dense_sizes:
        total += np.maximum(of, 0)
    return TarIndex(
        file_sizes=to_numpy(one_chunk(table.column("size"))).astype(np.int64),
        compressions=table.column("compression").to_pylist(),
        first_row=first_row,
        keys=keys,
        columns=chosen,
        kinds=own,
        starts=dense_starts,
        sizes=dense_sizes,
        sample_bytes=total,
        kept_in=kept_in,
    )


def _refuse(
    rows: IntArray,
    what: str,
    name: str,
    files: FileList,
    first_row: IntArray,
    keys: pa.Array,
    asker: str,
) -> None:
    """Raise if there are samples that differ from the others."""
    if not len(rows):
        return
    row = int(rows[0])
    file = int(np.searchsorted(first_row, row, side="right")) - 1
    path, key = files.names[file], keys[row].as_py()
    more = f", and {len(rows) - 1:,} more" if len(rows) > 1 else ""
    raise SchemaError(
        f"{asker}: sample {key!r} of {path} {what} {name!r}{more}: choose with columns=[...] what "
        "all samples have, or pass missing="
        '"null"',
        path=path,
        row=row - int(first_row[file]),
        stage=asker,
    )
