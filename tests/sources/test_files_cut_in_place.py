"""A local file that is cut or rewritten in place while it is read: an error that names it, never a signal."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

import trainpipes as tp
from interpreters import python
from trainpipes.sources import arrow_layout

#: Of each case reads five batches, says so, and waits until the file has been changed.
READ = """
import gc, sys, time, torch.utils.data, trainpipes as tp
if __name__ == "__main__":
    for line in sys.stdin:
        folder, reader, way = line.split()
        rows = tp.read_arrow(folder) if reader == "arrow" else tp.from_memmap(f"{folder}/rows.map")
        rows = rows.sharding_filter(4)
        pipe = (rows.shuffle(scope="global") if way == "global" else rows.shuffle(2000)).batch(32)
        if reader == "memmap":
            pipe = pipe.collate()
        workers, threads = 2 * (way == "workers"), 2 * (way == "threads")
        loader = tp.Loader(pipe, num_workers=2) if workers else tp.Loader(pipe, threads=threads)
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        spent = -1.0  # a map cut while a thread copies from it is a signal: wait until all is read ahead
        while reader == "memmap" and time.process_time() > spent + 0.01:
            spent = time.process_time()
            time.sleep(0.3)
        print("reading", flush=True)
        sys.stdin.readline()
        try:
            print(sum(1 for _ in batches), "more batches", flush=True)
        except tp.DataChangedError as error:
            print("changed:", " ".join(str(error).split()), flush=True)
        del loader, batches
        gc.collect()
"""


def written(folder: Path, form: str) -> Path:
    rows = 40_000
    table = pa.table({"x": np.arange(rows), "text": ["some text " * 20] * rows})
    if form in ("lz4", "zstd", "uncompressed"):
        path = folder / "rows.feather"
        pyarrow.feather.write_feather(table, path, compression=form, chunksize=1000)
    elif form == "memmap":
        tp.write_memmap(folder / "rows.map", {"x": np.zeros((rows, 32))})
        [path] = (folder / "rows.map").glob("*.npy")
    else:
        path, new = folder / "rows.arrow", {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}
        size = rows if form == "one batch" else 1000
        with new.get(form, pa.ipc.new_file)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=size)
    return path


#: What lies in the file, who reads it, and how it is changed.
CASES = [
    *((form, way, "wb") for form, way in zip(
        ("file", "stream", "one batch", "uncompressed", "lz4", "zstd"), ("alone", "threads") * 3, strict=True
    )),
    ("file", "workers", "wb"), ("file", "global", "cut"), ("file", "threads", "cut"),
    ("file", "alone", "cut"), ("memmap", "alone", "cut"), ("memmap", "threads", "wb"),
]  # fmt: skip


def test_a_file_changed_in_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*python(), "-c", READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(200, process.kill)
    timer.start()
    with process:
        for number, (form, way, how) in enumerate(CASES):
            folder = tmp_path / str(number)
            folder.mkdir()
            path = written(folder, form)
            process.stdin.write(f"{folder} {'memmap' if form == 'memmap' else 'arrow'} {way}\n")
            assert process.stdout.readline() == "reading\n", (form, way, how)
            with open(path, "r+b" if how == "cut" else how) as file:
                file.truncate(5000 if how == "cut" else 0)
            process.stdin.write("\n")
            said = process.stdout.readline()
            assert said.startswith("changed: "), (form, way, how, said, process.poll())
            assert path.name in said
        process.stdin.close()
    timer.cancel()
    assert process.returncode == 0


# Pieces of a record batch


def every_type(rows: int) -> pa.Table:
    """Columns of all types that are cut, with nulls, also inside lists, structs and maps."""
    rng = np.random.default_rng(0)

    def some(make):
        return [make(n) if rng.random() < 0.8 else None for n in range(rows)]

    return pa.table(
        {
            "bool": pa.array(some(lambda n: n % 3 == 0)),
            "i8": pa.array(some(lambda n: n % 100), pa.int8()),
            "f": pa.array(some(float)),
            "decimal": pa.array(some(int), pa.decimal128(20, 2)),
            "four": pa.array(some(lambda n: b"%04d" % (n % 9999)), pa.binary(4)),
            "text": pa.array(some(lambda n: "é" * (n % 7))),
            "large": pa.array(some(lambda n: b"x" * (n % 5)), pa.large_binary()),
            "lists": pa.array(some(lambda n: [None if k == 2 else k for k in range(n % 6)])),
            "flags": pa.array(
                some(lambda n: [k % 2 == 0 for k in range(n % 11)]), pa.large_list(pa.bool_())
            ),
            "pairs": pa.array(some(lambda n: [n % 2 == 0, None, True]), pa.list_(pa.bool_(), 3)),
            "chat": pa.array(some(lambda n: [{"role": "user", "n": k} for k in range(n % 4)])),
            "map": pa.array(some(lambda n: [("k", n)] * (n % 3)), pa.map_(pa.string(), pa.int64())),
            "none": pa.nulls(rows),
            "plain": np.arange(rows),
        }
    )


@pytest.mark.parametrize("sliced", [0, 13])
def test_pieces_are_the_rows_that_pyarrow_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sliced: int
) -> None:
    monkeypatch.setattr(arrow_layout, "PIECE", 1000)
    monkeypatch.setattr(arrow_layout, "SHARE", 0)
    monkeypatch.setattr("trainpipes.sources.read_arrow.WHOLE", 0)
    table = every_type(1003 + sliced).slice(sliced).combine_chunks()
    path = tmp_path / "rows.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    for columns in (None, ["flags", "text"], *([name] for name in table.column_names)):
        rows = list(tp.read_arrow(path, columns=columns))
        assert rows == table.select(columns or table.column_names).to_pylist()
