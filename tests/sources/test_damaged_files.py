"""Damaged files of every format: an error that names the file, or the rows that its library reads."""

from __future__ import annotations

import io
import os
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

import damaged_formats
import trainpipes as tp
from interpreters import python

#: Seconds that so many damaged files take at most, beside the process's own.
MOST_SECONDS = 900


def read_damaged(folder: Path, seed: int, count: int) -> Counter[str]:
    """How often came what, of damaged files of all formats.

    Raises:
        AssertionError: a file gave other rows than its reference, another error than ours, a crash or a hang.
    """
    said: Counter[str] = Counter()
    wrong: list[str] = []
    first = 0
    while first < count:
        script = Path(damaged_formats.__file__)
        command = [*python(), str(script), str(folder), str(seed), str(first), str(count)]
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
        *lines, last = found.stdout.split("\n")
        for line in lines:
            case, _, came = line.partition(": ")
            said[came.split(" ")[0]] += 1
            wrong += [line] if came.startswith("WRONG") else []
            first = int(case.split(" ")[0]) + 1
        if found.returncode:
            wrong.append(
                f"{last} the process ended with {found.returncode}: {found.stderr[-2000:]}"
            )
            first += 1
    assert not wrong, f"{len(wrong)} of {count} with seed {seed}:\n" + "\n".join(wrong[:20])
    return said


def test_damaged_files_give_the_rows_of_their_reference_or_an_error_that_names_them(
    tmp_path: Path,
) -> None:
    said = read_damaged(tmp_path, seed=1, count=165)
    assert said["refused"] > 50
    assert said["same"] + said["reference"] > 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_thousand_damaged_files_give_the_rows_of_their_reference_or_an_error(
    tmp_path: Path,
) -> None:
    said = read_damaged(tmp_path, seed=int.from_bytes(os.urandom(4), "little"), count=10_000)
    assert said["same"] + said["reference"] > 1000


# Arrow


def arrow(stream: bool = False, columns: int = 2) -> bytes:
    """200 rows in two record batches."""
    table = pa.table({f"c{n}": range(200) for n in range(columns)})
    sink = io.BytesIO()
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return sink.getvalue()


def rows_of_flipped(folder: Path, content: bytes, places: range, every: int) -> Counter[object]:
    """How many rows come of a file with one bit flipped."""
    said: Counter[object] = Counter()
    bits = [(place, bit) for place in places for bit in range(8)][::every]
    for place, bit in bits:
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        path = folder / f"{place}-{bit}.arrow"
        path.write_bytes(changed)
        try:
            said[sum(len(rows) for rows in tp.read_arrow(path).batch(100))] += 1
        except tp.UnreadableError as error:
            said["refused" if str(path) in str(error) else str(error)] += 1
        path.unlink()
    return said


def footer_of(content: bytes) -> range:
    length = int.from_bytes(content[-10:-6], "little")
    return range(len(content) - 10 - length, len(content) - 10)


def header_of(content: bytes) -> range:
    """Of the second record batch of a stream."""
    start = content.rindex(b"\xff\xff\xff\xff", 0, content.rindex(b"\xff\xff\xff\xff"))
    return range(start, start + 8 + int.from_bytes(content[start + 4 : start + 8], "little"))


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_bit_of_an_arrow_footer_loses_rows(tmp_path: Path, every: int) -> None:
    content = arrow()
    said = rows_of_flipped(tmp_path, content, footer_of(content), every)
    assert set(said) == {200, "refused"}


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
def test_no_bit_of_the_header_of_a_record_batch_loses_rows(
    tmp_path: Path, stream: bool, every: int
) -> None:
    content = arrow(stream, columns=1)
    header = header_of(arrow(True, columns=1))
    if not stream:  # the same messages behind 8 more bytes
        header = range(header.start + 8, header.stop + 8)
    said = rows_of_flipped(tmp_path, content, header, every)
    assert set(said) == {200, "refused"}


def test_no_bit_of_a_schema_hides_all_columns(tmp_path: Path) -> None:
    content = arrow(True, columns=1)
    stop = 8 + int.from_bytes(content[4:8], "little")
    for place in range(8, stop):
        for bit in range(2):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path = tmp_path / f"{place}-{bit}.arrows"
            path.write_bytes(changed)
            with suppress(tp.UnreadableError, tp.SchemaError):
                assert all(list(tp.read_arrow(path)))
            path.unlink()
