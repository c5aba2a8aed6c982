"""What reading each format costs beside the bare reader, and what the index of text costs.

    python benchmarks/formats.py [--rows 60000] [--repeats 5]

Writes the same rows in each format, and reads all of them in one thread: by a pipeline's source, block by
block, and by what reads the format alone. In turn, each in a process in which nothing was read before;
ratios of medians of processor time. Files are open, and indexes there, before the clock starts, for both.
Bytes of Arrow's own map are copied out once: until then, a file that is mapped into memory is not read.

The index of text is made anew each time, and found by a second run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.json as pj
import pyarrow.parquet as pq

import trainpipes as tp
from benchmarks.fresh import Opener, medians

__all__ = ["measured"]

BLOCK = 4 << 20
#: Rows of a record batch and of a row group.
GROUP = 10_000
#: How often a file of text has the rows where its index is made: about 130 MB of JSON.
LONGER = 4
#: Rows for each image, and bytes of one.
PER_IMAGE, IMAGE_BYTES = 20, 20_000


@dataclass(frozen=True)
class Kind:
    """A format.

    Args:
        place: the file or folder.
        read: our reader.
        bare: opens it without us.
        text: whether it has an index of blocks.
        each: rows for each of its own.
    """

    place: str
    read: Callable[..., tp.Pipeline]
    bare: Callable[[Path], Callable[[], int]]
    text: bool = False
    each: int = 1


def write(folder: Path, rows: int) -> None:
    """The same rows in each format, of 400 to 500 bytes, 400 more of token ids in Arrow and Parquet."""
    draw, numbers = random.Random(0), np.random.default_rng(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(5000)]
    found: list[dict[str, Any]] = []
    for number in range(rows):
        text, score = " ".join(draw.choices(words, k=draw.randint(20, 100))), draw.random()
        chat = [{"role": "user", "content": text[:50]}]
        found.append({"id": number, "text": text, "score": score, "messages": chat})
    with (
        open(folder / "rows.jsonl", "w") as lines,
        open(folder / "rows.csv", "w") as cells,
        open(folder / "rows.txt", "w") as texts,
    ):
        cells.write("id,text,score\n")
        for row in found:
            lines.write(json.dumps(row) + "\n")
            cells.write(f'{row["id"]},"{row["text"]}",{row["score"]}\n')
            texts.write(f"{row['text']}\n")
    ends = np.append(0, np.cumsum(numbers.integers(20, 180, rows))).astype(np.int32)
    ids = pa.array(numbers.integers(0, 32_000, ends[-1]).astype(np.int32))
    table = pa.Table.from_pylist(found)
    table = table.append_column("input_ids", pa.ListArray.from_arrays(pa.array(ends), ids))
    pq.write_table(table, folder / "rows.parquet", row_group_size=GROUP)
    for packed in (None, "lz4", "zstd"):
        options = pa.ipc.IpcWriteOptions(compression=packed)
        with pa.ipc.new_file(folder / f"{packed}.arrow", table.schema, options=options) as file:
            file.write_table(table, max_chunksize=GROUP)
    np.save(folder / "rows.npy", numbers.random((rows, 128), dtype=np.float32))
    for number in range(rows // PER_IMAGE):
        path = folder / "images" / f"{number % 10}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(numbers.bytes(IMAGE_BYTES))


# Without us


def bare_json(path: Path) -> Callable[[], int]:
    options = pj.ReadOptions(use_threads=False, block_size=BLOCK)
    return lambda: len(pj.read_json(path, read_options=options))


def bare_csv(path: Path) -> Callable[[], int]:
    options = pcsv.ReadOptions(use_threads=False, block_size=BLOCK)
    return lambda: len(pcsv.read_csv(path, read_options=options))


def bare_text(path: Path) -> Callable[[], int]:
    def read() -> int:
        count, rest = 0, b""
        with open(path, "rb") as file:
            while data := file.read(BLOCK):
                *lines, rest = (rest + data).split(b"\n")
                count += len(lines)
        return count

    return read


def bare_parquet(path: Path) -> Callable[[], int]:
    file = pq.ParquetFile(path, pre_buffer=False)
    groups = range(file.num_row_groups)
    return lambda: sum(len(file.read_row_group(n, use_threads=False)) for n in groups)


def bare_arrow(path: Path) -> Callable[[], int]:
    options = pa.ipc.IpcReadOptions(use_threads=False)
    file = pa.ipc.open_file(pa.memory_map(str(path)), options=options)
    batches, mapped = range(file.num_record_batches), path.name.startswith("None")
    taken = used if mapped else lambda rows: rows  # others are unpacked into memory
    return lambda: sum(len(taken(file.get_batch(n))) for n in batches)


def bare_numpy(path: Path) -> Callable[[], int]:
    rows = np.load(path, mmap_mode="r")
    step = (1 << 20) // rows[0].nbytes
    return lambda: sum(len(np.array(rows[n : n + step])) for n in range(0, len(rows), step))


def bare_images(folder: Path) -> Callable[[], int]:
    paths = sorted(map(str, folder.glob("*/*.jpg")))

    def read() -> int:
        count = 0
        for path in paths:
            with open(path, "rb") as file:
                count += len(file.read()) == IMAGE_BYTES
        return count

    return read


def used(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Arrow rows, their bytes copied once."""
    for column in rows.columns:
        for buffer in column.buffers():
            if buffer is not None:
                buffer.to_pybytes()
    return rows


KINDS = {
    "JSON lines": Kind("rows.jsonl", tp.read_json, bare_json, text=True),
    "CSV": Kind("rows.csv", tp.read_csv, bare_csv, text=True),
    "text": Kind("rows.txt", tp.read_text, bare_text, text=True),
    "Parquet": Kind("rows.parquet", tp.read_parquet, bare_parquet),
    "Arrow": Kind("None.arrow", tp.read_arrow, bare_arrow),
    "Arrow, lz4": Kind("lz4.arrow", tp.read_arrow, bare_arrow),
    "Arrow, zstd": Kind("zstd.arrow", tp.read_arrow, bare_arrow),
    "NumPy": Kind("rows.npy", tp.read_numpy, bare_numpy),
    "images": Kind("images", tp.read_images, bare_images, each=PER_IMAGE),
}


# Ours


def opened(pipe: tp.Pipeline) -> tp.RowSource:
    """The source of a pipeline's rows."""
    *below, reader = pipe.stages
    source: tp.RowSource = reader._open_on(below)  # type: ignore[attr-defined]
    return source


def ours(pipe: tp.Pipeline) -> Callable[[], int]:
    """Rows of all blocks, one after the other."""
    source = opened(pipe)

    def read() -> int:
        reader, lengths = source.reader(), enumerate(source.lengths.tolist())
        return sum(len(reader.read(block, 0, rows)) for block, rows in lengths)

    return read


def measured(rows: int, repeats: int) -> dict[str, float]:
    """Of each format the processor time beside that of the bare reader; of text also seconds of an index for
    each GB, and what is left of these where the index is there."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, rows)
        for kind, form in KINDS.items():
            path = folder / form.place
            index = {"index": str(folder / f"{kind}.index.arrow")} if form.text else {}
            pipe = form.read(str(path), **index)
            len(pipe)
            ways: dict[str, Opener] = {
                "ours": lambda pipe=pipe: ours(pipe),  # type: ignore[misc]
                "bare": lambda form=form, path=path: form.bare(path),  # type: ignore[misc]
            }
            took = medians(ways, rows // form.each, repeats)
            found[kind] = took["ours"] / took["bare"]
            if form.text:
                found |= {
                    f"{kind}: {what}": value for what, value in of_index(form, path, index, repeats)
                }
    return found


def of_index(
    form: Kind, path: Path, index: dict[str, str], repeats: int
) -> Iterator[tuple[str, float]]:
    """What it costs to make the index of a file of text, and to find it: of the rows ``LONGER`` times, since
    types are found in the first MB of a file, however long it is."""
    longer = path.with_name(f"longer{path.suffix}")
    head, rows = path.read_bytes().split(b"\n", 1)
    longer.write_bytes(head + b"\n" + rows * LONGER)
    times: dict[str, list[float]] = {"made": [], "found": []}
    len(form.read(str(longer), **index))
    for _ in range(repeats):
        for what, options in (("made", {"index": False}), ("found", index)):
            begun = time.process_time()
            len(form.read(str(longer), **options))
            times[what].append(time.process_time() - begun)
    made, again = (statistics.median(times[what]) for what in ("made", "found"))
    yield "index, s a GB", made / (longer.stat().st_size / 1e9)
    yield "index found, of made", again / made
    longer.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for what, value in measured(args.rows, args.repeats).items():
        print(f"{what:<36} {value:.2f}")


if __name__ == "__main__":
    main()
