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
from trainpipes.columns.arrays import python_to_arrow
from trainpipes.engine.layout import IntArray
from trainpipes.errors import SchemaError, UnreachableError, UnreadableError
from trainpipes.sources.compressed.streams import kind_by_content, open_stream
from trainpipes.sources.files.each_file import BadFileError
from trainpipes.sources.files.file_bytes import LocalBytes
from trainpipes.sources.files.format import Layout, packed, unpacked
from trainpipes.sources.files.index_store import IndexStore, Scan
from trainpipes.sources.files.list_files import FileList
from trainpipes.sources.tar.layout import (
    BLOCK,
    Forward,
    Samples,
    chunks_of,
    is_header,
    members_of_index,
    read_samples,
    samples_of,
)

KEY = "__key__"
#: Bytes of local archives from which on an index of them is kept.
LARGE = 64 << 20
#: Zeros that end an archive, at most; of more, members may lie between.
MOST_PADDING = 1 << 20
NONE = np.empty(0, dtype=np.int64)


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
        index: where it is kept; see ``IndexStore``.

    Raises:
        UnreadableError: names every file that is no archive, with the reason.
        SchemaError: a sample lacks a member.
        UnreachableError: a server does not answer, or denies access.
    """
    store = IndexStore(files, "read_webdataset", "tar archives", "", index, LARGE)
    job = "reading headers of tar archives"
    store.complete(lambda job: _look(files, job), asker, job=job)
    return _joined(store, columns, nulls, asker)


def _look(files: FileList, job: Scan) -> Layout:
    data = job.data
    if not data.size:
        raise BadFileError("empty: 0 bytes")
    kind = kind_by_content(bytes(data.read([(0, min(data.size, 16))])[0]))
    samples = None if kind else _beside(files, job)
    if samples is not None:
        pass
    elif not kind and isinstance(data, LocalBytes):
        samples = read_samples(Forward(chunks_of(memoryview(data.mapped()))))  # type: ignore[arg-type]
    else:
        with closing(data.stream()) as source:
            samples = read_samples(Forward(open_stream(source, kind)))
    numbers = ("counts", "kind_of", "starts", "sizes")
    extra = packed(
        compression=kind,
        keys=samples.keys,
        kinds=samples.kinds,
        **{name: np.array(getattr(samples, name), dtype=np.int64) for name in numbers},
    )
    rows, first, last = np.array([len(samples.keys)]), np.array([0]), np.array([data.size])
    return Layout(rows, first, last, pa.schema([]), extra)


def _beside(files: FileList, job: Scan) -> Samples | None:
    """The samples of an archive by the index that lies beside it; None if there is none that fits."""
    file, path, data = job.file, files.paths[job.file], job.data
    if not path.endswith(".tar"):
        return None
    try:
        beside = f"{path.removesuffix('.tar')}.idx"
        content: bytes = job.requests.call(files.system(file), "cat_file", beside)
        members = members_of_index(content.decode(), data.size)
    except (OSError, UnreachableError, UnreadableError, UnicodeDecodeError):
        return None
    if not members:
        return None
    _, first, first_size = members[0]
    _, last, last_size = max(members, key=lambda member: member[1])
    end = last + -(-last_size // BLOCK) * BLOCK
    if data.size - end > MOST_PADDING:
        return None
    parts = [(first - BLOCK, first), (last - BLOCK, last), (min(end, data.size), data.size)]
    one, other, rest = map(bytes, data.read(parts))
    fits = is_header(one, first_size) and is_header(other, last_size) and not rest.strip(b"\0")
    return samples_of(members) if fits else None


def _joined(store: IndexStore, columns: Sequence[str] | None, nulls: bool, asker: str) -> TarIndex:
    files = store.files
    archives = [unpacked(layout.extra) for layout in store.layouts()]
    counts, members, starts, sizes = (
        np.concatenate([NONE, *(each[name] for each in archives)])
        for name in ("counts", "kind_of", "starts", "sizes")
    )
    keys = python_to_arrow([key for each in archives for key in each["keys"]], pa.string())
    first_row = np.cumsum([0, *(len(each["keys"]) for each in archives)], dtype=np.int64)
    per_file = [len(each["kind_of"]) for each in archives]
    # Extensions by one number over all archives, in the order in which they are met.
    numbers: dict[str, int] = {}
    shared = []
    for each in archives:
        shared.append([numbers.setdefault(kind, len(numbers)) for kind in each["kinds"]])
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
        file_sizes=store.sizes,
        compressions=[each["compression"] for each in archives],
        first_row=first_row,
        keys=keys,
        columns=chosen,
        kinds=own,
        starts=dense_starts,
        sizes=dense_sizes,
        sample_bytes=total,
        kept_in=store.kept_in,
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
