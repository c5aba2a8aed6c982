"""Where rows end: the same however a file comes in parts, and as whoever parses it sees it."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trainpipes as tp
from trainpipes.sources import compressed as compress
from trainpipes.sources import text_pieces
from trainpipes.sources.compressed import Stream
from trainpipes.sources.files.formats import BadFileError
from trainpipes.sources.text_format import TextFormat
from trainpipes.sources.text_pieces import TextLayout, check_of, scan


def parts(data: bytes, sizes: list[int]) -> Stream:
    """A stream that gives some bytes in parts."""
    file, left = io.BytesIO(data), [*sizes]
    return Stream(lambda size: file.read(left.pop(0) if left else size), "")


@contextmanager
def small(piece: int, head: int = 4) -> Iterator[None]:
    kept = text_pieces.PIECE_BYTES, text_pieces.HEAD_BYTES, text_pieces.END_BYTES
    text_pieces.PIECE_BYTES, text_pieces.HEAD_BYTES, text_pieces.END_BYTES = piece, head, 5
    try:
        yield
    finally:
        text_pieces.PIECE_BYTES, text_pieces.HEAD_BYTES, text_pieces.END_BYTES = kept


sizes = st.lists(st.integers(1, 9), max_size=60)
piece_bytes = st.integers(1, 40)
block_rows = st.none() | st.integers(1, 5)


def form_of(pipe: tp.Pipeline) -> TextFormat:
    reader: Any = pipe.stages[-1]
    form: TextFormat = reader.form
    return form


JSON, CSV = form_of(tp.read_json("x")), form_of(tp.read_csv("x"))


def rows_of(form: TextFormat, data: bytes, found: TextLayout) -> list[dict[str, object]]:
    """What the pieces hold, each parsed by itself; of which each is found to be what was noted."""
    rows: list[dict[str, object]] = []
    at = found.head.at
    for n, stop in enumerate(found.stop.tolist()):
        piece = data[at:stop]
        table = form.parse(piece, found.head, form.schema)
        assert len(table) == found.rows[n] > 0
        assert check_of(piece) == found.checks[n]
        assert data.count(b"\n", 0, at) == found.lines[n]
        assert (found.start[n], found.entries[n], found.places[n]) == (at, at, at)
        rows += table.to_pylist()
        at = stop
    return rows


def cut(
    form: TextFormat, data: bytes, sizes: list[int], piece: int, rows: int | None
) -> list[dict[str, object]]:
    with small(piece):
        form.block_rows = rows
        found = TextLayout.of(scan(parts(data, sizes), "", form, "x", len(data)))
        if rows is not None:
            whole = np.cumsum(found.rows)
            assert set(range(rows, sum(found.rows), rows)) <= set(whole.tolist())
        return rows_of(form, data, found)


text = st.text(st.sampled_from('ab é,;"\\{}[]\n\t '), max_size=12)


@given(
    rows=st.lists(st.fixed_dictionaries({"a": st.integers(-9, 9), "b": text}), max_size=12),
    blank=st.lists(st.sampled_from(["", " ", "\t \r", "\r"]), max_size=12),
    sizes=sizes,
    piece=piece_bytes,
    cut_by=block_rows,
    ended=st.booleans(),
    bom=st.booleans(),
)
def test_json_lines_are_cut_between_objects(rows, blank, sizes, piece, cut_by, ended, bom):
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    for n, line in enumerate(blank):
        lines.insert(min(len(lines), 2 * n), line)
    data = ("\ufeff" * bom + "\n".join(lines) + "\n" * ended).encode()
    assert cut(JSON, data, sizes, piece, cut_by) == rows


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"a": text, "b": st.lists(st.fixed_dictionaries({"c": text}), min_size=1, max_size=2)}
        ),
        max_size=10,
    ),
    indent=st.none() | st.integers(0, 2),
    sizes=sizes,
    piece=piece_bytes,
    cut_by=block_rows,
    white=st.sampled_from(["", "\n", " \r\n\n"]),
)
def test_an_array_is_cut_between_its_objects(rows, indent, sizes, piece, cut_by, white):
    data = (white + json.dumps(rows, indent=indent, ensure_ascii=False) + white).encode()
    assert cut(JSON, data, sizes, piece, cut_by) == rows


@given(
    rows=st.lists(st.tuples(text, st.text("xy", min_size=1, max_size=3)), max_size=12),
    end=st.sampled_from(["\n", "\r\n"]),
    sizes=sizes,
    piece=piece_bytes,
    cut_by=block_rows,
    blank=st.booleans(),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
)
def test_csv_is_cut_between_records(rows, end, sizes, piece, cut_by, blank, quoting):
    sink = io.StringIO(newline="")
    writer = csv.writer(sink, lineterminator=end * (2 if blank else 1), quoting=quoting)
    writer.writerow(["a", "b"])
    writer.writerows(rows)
    found = cut(CSV, sink.getvalue().encode(), sizes, piece, cut_by)
    assert [(row["a"] or "", row["b"]) for row in found] == rows


@given(
    cells=st.lists(
        st.lists(st.text(st.sampled_from('ab" '), min_size=1, max_size=4), min_size=2, max_size=2),
        max_size=10,
    ),
    sizes=sizes,
    piece=piece_bytes,
)
def test_quotes_within_cells_that_are_not_quoted_are_letters_as_for_arrow(cells, sizes, piece):
    """Such as inches: 5" x 7"."""
    kept = [row for row in cells if not any(cell.startswith('"') for cell in row)]
    data = ("a,b\n" + "".join(",".join(row) + "\n" for row in kept)).encode()
    assert [[row["a"], row["b"]] for row in cut(CSV, data, sizes, piece, None)] == kept


@pytest.mark.parametrize("unit", ["line", "paragraph", "document"])
@given(
    data=st.text(st.sampled_from("aé \t\n"), max_size=50),
    end=st.booleans(),
    sizes=sizes,
    piece=piece_bytes,
    cut_by=block_rows,
)
@example(data="aaaa\n\nb\n\nb", end=False, sizes=[5], piece=1, cut_by=None)
def test_text_is_cut_as_python_splits_it(unit, data, end, sizes, piece, cut_by):
    written = data.replace("\n", "\r\n") if end else data
    found = cut(form_of(tp.read_text("x", unit)), written.encode(), sizes, piece, cut_by)
    lines = data.split("\n")
    if unit == "line":
        expected = lines[:-1] if lines[-1] == "" else lines
    elif unit == "document":
        expected = [written]
    else:
        filled = [line if line.strip(" \t") else "" for line in lines]
        blocks = "\n".join(filled).split("\n\n")
        expected = [block.strip("\n") for block in blocks if block.strip("\n")]
    assert [row["text"] for row in found] == expected


@given(
    parts=st.lists(st.binary(max_size=30), min_size=1, max_size=8),
    kind=st.sampled_from(["gzip", "zstd", "bzip2", "xz"]),
    chunk=st.integers(1, 50),
)
def test_compressed_bytes_can_be_entered_at_every_member(parts, kind, chunk):
    packed = [packers()[kind](part) for part in parts]
    whole, data = b"".join(packed), b"".join(parts)
    kept = compress.INPUT_BYTES, compress.OUTPUT_BYTES
    compress.INPUT_BYTES = compress.OUTPUT_BYTES = chunk
    try:
        stream = Stream(io.BytesIO(whole).read, kind)
        assert b"".join(iter(stream.read, b"")) == data
        starts = np.cumsum([0, *map(len, packed)])[:-1].tolist()
        places = np.cumsum([0, *map(len, parts)])[:-1].tolist()
        assert stream.entries == list(zip(starts, places, strict=True))
        for start, place in stream.entries:
            source = io.BytesIO(whole)
            source.seek(start)
            again = Stream(source.read, kind, (start, place))
            assert b"".join(iter(again.read, b"")) == data[place:]
    finally:
        compress.INPUT_BYTES, compress.OUTPUT_BYTES = kept


def packers():
    import bz2
    import lzma

    return {
        "gzip": gzip.compress,
        "zstd": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
        "bzip2": bz2.compress,
        "xz": lzma.compress,
    }


@pytest.mark.parametrize("kind", ["gzip", "zstd", "bzip2", "xz"])
def test_compressed_bytes_that_end_early_are_found_out(kind):
    whole = packers()[kind](bytes(range(256)) * 50)
    for size in range(12, len(whole) - 1, max(1, len(whole) // 20)):
        stream = Stream(io.BytesIO(whole[:size]).read, kind)
        with pytest.raises(BadFileError, match=r"cut off|damaged"):
            b"".join(iter(stream.read, b""))
