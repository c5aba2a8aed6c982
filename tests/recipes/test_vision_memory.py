"""Memory of vision_chat stays as it is, however many pictures there are."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flat_memory

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

SUPPORT = Path(flat_memory.__file__).parent
ROWS_OF_A_FILE = 20
MEASURE = """
import ctypes, gc, json, sys
import pyarrow as pa
import torch
import trainpipes as tp
from flat_memory import LIBC, held
from visions import processor_of
torch.set_num_threads(1)
pipe = tp.recipe(
    "vision_chat", sys.argv[1], processor_of("llava"), packed=sys.argv[2] == "packed",
    batch_size=4 if sys.argv[2] == "batches" else 1, max_length=300, buffer_size=16, num_shards=2,
)
found, rows = [], 0
for number, batch in enumerate(tp.Loader(pipe)):
    rows += len(batch["pixel_values"])
    if number % 3 == 0:
        gc.collect()
        pa.default_memory_pool().release_unused()  # what allocators keep free is nobody's
        if hasattr(LIBC, "malloc_trim"):
            LIBC.malloc_trim(0)
        found.append(held())
print(json.dumps({"held": found, "pictures": rows}))
"""


def write_pictures(folder: Path, files: int) -> None:
    """Conversations with a picture of 2 MB each: the same rows in each file, by another name."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (760, 760, 3), dtype=np.uint8)
    rows = []
    for number in range(ROWS_OF_A_FILE):
        if number % 5 == 0:  # the same in a row group
            out = io.BytesIO()
            Image.fromarray(pixels + number).save(out, "JPEG", quality=99, subsampling=0)
            assert out.tell() > 1_900_000
        row = {"prompt": f"What is {number}?", "response": "It." * 9, "image": out.getvalue()}
        rows.append(row)
    first = folder / "000.parquet"
    pq.write_table(pa.Table.from_pylist(rows), first, row_group_size=5, use_dictionary=False)
    for number in range(1, files):
        os.link(first, folder / f"{number:03}.parquet")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["packed", "batches"])
def test_memory_is_flat_over_pictures_of_two_megabytes(kind: str, tmp_path: Path) -> None:
    count = 5000
    write_pictures(tmp_path / "rows", count // ROWS_OF_A_FILE)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, str(tmp_path / "rows"), kind],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    held = found["held"]
    assert found["pictures"] > 0.97 * count
    half = len(held) // 2
    assert max(held[half:]) < max(held[:half]) + 100e6, held
    assert max(held) < 1e9, held
