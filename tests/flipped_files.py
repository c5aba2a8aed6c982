"""Reads Parquet files of which a few bytes were changed, in a process of its own: it may be what ends.

Run as a script: ``flipped_files.py FOLDER FOOTER SEED COUNT``; FOOTER is 1 to change footers, 0 for what
is before them. Writes the number of the case before it begins, so that the last one is known.
"""

from __future__ import annotations

import faulthandler
import random
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import trainpipes as tp

#: Seconds after which a case hangs.
LONG = 120


def table(rows: int) -> pa.Table:
    numbers = range(rows)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "text": pa.array([f"row {n} " + "é" * (n % 5) if n % 7 else None for n in numbers]),
            "kind": pa.array([("a", "bb", "ccc")[n % 3] for n in numbers]).dictionary_encode(),
            "tokens": pa.array([list(range(n % 4)) for n in numbers], pa.list_(pa.int32())),
            "price": pa.array([Decimal(n) / 100 for n in numbers], pa.decimal128(12, 2)),
            "chat": pa.array([[{"role": "user", "content": f"hi {n}"}] * (n % 3) for n in numbers]),
        }
    )


#: Ways to write it.
WRITTEN: tuple[dict[str, Any], ...] = (
    {},
    {"use_dictionary": False, "compression": "none", "store_schema": False},
    {"data_page_version": "2.0", "compression": "zstd", "write_page_index": True},
    {"write_page_checksum": True, "compression": "gzip", "write_statistics": False},
)


def changed(content: bytes, footer: bool, rng: random.Random) -> bytes:
    """A file with one to four bytes changed."""
    end = len(content) - 8
    start = end - int.from_bytes(content[end : end + 4], "little")
    places = range(start, end) if footer else range(4, start)
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        place = rng.choice(places)
        found[place] = (
            found[place] ^ 1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(256)
        )
    return bytes(found)


def main(folder: Path, footer: bool, seed: int, count: int) -> None:
    good = []
    for number, options in enumerate(WRITTEN):
        path = folder / f"{number}.parquet"
        pq.write_table(table(60), path, row_group_size=20, **options)
        good.append(path.read_bytes())
    path = folder / "changed.parquet"
    refused = 0
    for case in range(count):
        sys.stdout.write(f"{case} ")
        sys.stdout.flush()
        rng = random.Random(f"{seed} {case}")
        path.write_bytes(changed(rng.choice(good), footer, rng))
        columns = rng.choice([None, ["text", "tokens"], ["kind"], ["chat", "id"]])
        faulthandler.dump_traceback_later(LONG, exit=True)
        try:
            pipe = tp.list_files(path).read_parquet(columns=columns, index=False)
            if case % 2:
                pipe = pipe.sharding_filter(num_shards=2).shuffle(buffer_size=16, seed=seed)
            pipe.explain()
            for row in pipe:
                assert isinstance(row, dict)
        except MemoryError:
            refused += 1  # a page's header says how large the page is
        except tp.errors.DataError as error:
            refused += 1
            if str(path) not in str(error) or len(str(error)) > 2000:
                raise RuntimeError("no file is named, or too much said") from error
        faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(f"refused {refused}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1", int(sys.argv[3]), int(sys.argv[4]))
