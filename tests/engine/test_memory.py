"""Memory is bounded by what a pipeline says it holds, whatever the size of the data."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

MEASURE = """
import json, re, sys
from itertools import islice
from pathlib import Path
from trainpipes_recipes import seq2seq
pipe = seq2seq(sys.argv[1], sys.argv[2], drop_last=False)
rows = sum(len(batch["input_ids"]) for batch in islice(pipe, int(sys.argv[3])))
# Not ru_maxrss: that of a process starts with the peak of the one that started it.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"rows": rows, "peak": peak}))
"""


def write_pairs(folder, files, rows, words):
    """Files of prompt and response in one row group each, as pyarrow writes them: the same rows again in
    each file but the first, by another name."""
    rng = np.random.default_rng(0)
    vocabulary = [
        "".join(map(chr, rng.integers(97, 123, int(n)))) for n in rng.integers(2, 10, 20_000)
    ]

    def texts(mean):
        counts = rng.integers(mean // 2, mean * 3 // 2, rows)
        drawn = rng.integers(0, len(vocabulary), int(counts.sum())).tolist()
        ends = np.cumsum(counts).tolist()
        found, start = [], 0
        for end in ends:
            found.append(" ".join([vocabulary[i] for i in drawn[start:end]]))
            start = end
        return found

    table = pa.table({"prompt": texts(words), "response": texts(3 * words)})
    first = folder / "part-0.parquet"
    pq.write_table(table, first, compression="none", use_dictionary=False)
    for number in range(1, files):
        os.link(first, folder / f"part-{number}.parquet")
    return first.stat().st_size * files


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_default_recipe_reads_four_gigabytes_within_one_and_a_half(tmp_path):
    from tokenizer_fixtures import bpe_json

    data = tmp_path / "data"
    data.mkdir()
    assert write_pairs(data, files=16, rows=250_000, words=40) > 4e9
    (tmp_path / "tokenizer.json").write_text(bpe_json())
    command = [sys.executable, "-c", MEASURE, str(data), str(tmp_path / "tokenizer.json"), "3000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["rows"] == 96_000
    assert found["peak"] < 1.5 * (1 << 30), f"{found['peak'] / 1e9:.2f} GB"


TOLD = """
import json, re, sys
from pathlib import Path
import psutil
import trainpipes as tp
import trainpipes.loader, torch, fsspec
url, column, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
rows = tp.list_files([f"{url}/{n}.parquet" for n in range(8)]).read_parquet(columns=[column])
pipe = rows.sharding_filter(12).shuffle(2500, seed=1)
if column == "text":
    pipe = pipe.tokenize("bytes", max_length=64)
loader = tp.Loader(pipe.batch(32).pad_collate(), threads=threads)
told = loader.explain().memory_bytes
before = psutil.Process().memory_info().rss
for _ in zip(range(2500), loader):
    pass
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"told": told, "took": peak - before}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of texts and token ids, of about 1 kB a row."""
    found = tmp_path_factory.mktemp("told")
    rng = np.random.default_rng(0)
    for number in range(8):
        edges = np.concatenate([[0], np.cumsum(rng.integers(100, 400, 15_000))]).astype(np.int32)
        ids = pa.array(rng.integers(0, 50_000, int(edges[-1])).astype(np.int32))
        content = pa.py_buffer(rng.integers(97, 123, 4 * int(edges[-1])).astype(np.uint8))
        texts = pa.Array.from_buffers(pa.string(), 15_000, [None, pa.py_buffer(4 * edges), content])
        rows = pa.ListArray.from_arrays(pa.array(edges), ids)
        table = pa.table({"input_ids": rows, "text": texts})
        pq.write_table(table, found / f"{number}.parquet", row_group_size=1000)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("column", ["input_ids", "text"])
@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_process_takes_at_most_one_and_a_half_times_what_explain_says(
    folder, where, column, threads
):
    from faulty_server import serving

    with serving(folder) as server:
        url = server.url if where == "remote" else str(folder)
        command = [sys.executable, "-W", "ignore", "-c", TOLD, url, column, str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["took"] <= 1.5 * found["told"], found


WIDE = """
import json, re, sys, threading, time
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as pq, torch
import trainpipes as tp
folder, shards, threads, rows = sys.argv[1], *map(int, sys.argv[2:])

def taken():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

paths = sorted(map(str, Path(folder).iterdir()))
list(tp.read_parquet(paths[0]).take(8).batch(2).collate())  # imports
pipe = tp.read_parquet(paths).sharding_filter(shards).shuffle(rows, seed=0).batch(256).collate()
loader = tp.Loader(pipe, threads=threads)
told, before, most = loader.explain().memory_bytes, taken(), 0

def watch():
    global most
    while True:
        most = max(most, taken())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
for _ in range(2):
    for batch in loader:
        pass
print(json.dumps({"told": told, "took": most - before}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("shards", [1, 8, 24])
def test_of_tables_of_many_columns_too(tmp_path, shards, threads):
    draw = np.random.default_rng(0)
    for number in range(4):
        columns = {f"c{n}": draw.standard_normal(50_000, dtype=np.float32) for n in range(200)}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet", row_group_size=12_500)
    command = [sys.executable, "-W", "ignore", "-c", WIDE, str(tmp_path), str(shards), str(threads)]
    done = subprocess.run([*command, "25000"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["told"] / 3 <= found["took"] <= 1.5 * found["told"], found
