"""Damaged files of every format: an error that names the file, or the rows that its library reads."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import damaged_formats
import trainpipes as tp
from damaged_files import arrow, footer_of
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
    said = read_damaged(tmp_path, seed=1, count=111)
    assert said["refused"] > 33
    assert said["same"] + said["reference"] > 13


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_thousand_damaged_files_give_the_rows_of_their_reference_or_an_error(
    tmp_path: Path,
) -> None:
    said = read_damaged(tmp_path, seed=int.from_bytes(os.urandom(4), "little"), count=10_000)
    assert said["same"] + said["reference"] > 1000


# Arrow


def header_of(content: bytes) -> range:
    """Of the second record batch: in a file the same messages as in a stream, behind 8 more bytes."""
    stream, first = arrow(True, 1), 0 if content == arrow(True, 1) else 8
    start = stream.rindex(b"\xff\xff\xff\xff", 0, stream.rindex(b"\xff\xff\xff\xff"))
    length = 8 + int.from_bytes(stream[start + 4 : start + 8], "little")
    return range(first + start, first + start + length)


def schema_of(content: bytes) -> range:
    return range(8, 8 + int.from_bytes(content[4:8], "little"))


#: A file, which part of it has a bit flipped, and of how many bits one in an ordinary run.
PARTS = {
    "footer": (arrow(), footer_of, 23),
    "header in a file": (arrow(columns=1), header_of, 19),
    "header in a stream": (arrow(True, 1), header_of, 19),
    "schema": (arrow(True, 1), schema_of, 19),
}


@pytest.mark.parametrize("all_bits", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("part", PARTS)
def test_no_bit_of_an_arrow_file_loses_rows_or_all_columns(
    tmp_path: Path, part: str, all_bits: bool
) -> None:
    content, places, step = PARTS[part]
    bits = [(place, bit) for place in places(content) for bit in range(8)]
    errors = (tp.UnreadableError, *([tp.SchemaError] if part == "schema" else []))
    said: Counter[str] = Counter()
    for place, bit in bits[:: 1 if all_bits else step]:
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        path = tmp_path / f"{place}-{bit}.arrow"
        path.write_bytes(changed)
        try:
            rows = list(tp.read_arrow(path))
        except errors as error:
            said["refused" if str(path) in str(error) else str(error)] += 1
        else:
            assert all(rows), (place, bit)
            assert part == "schema" or len(rows) == 200, (place, bit)
            said["read"] += 1
        path.unlink()
    assert {*said} == {"read", "refused"}
