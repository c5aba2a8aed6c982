"""``trainpipes repack``: the command; what it writes is in tests/prepare/test_repack.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command import START, Ran, environment
from interpreters import pid_of, python


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines(path: str, count: int = 30) -> None:
    rows = ({"text": f"é {n % 20}", "n": n} for n in range(count))
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def numbers(folder: str) -> list[int]:
    paths = sorted(Path(folder).glob("*.parquet"))
    return [n for path in paths for n in pq.read_table(path)["n"].to_pylist()]


def test_json_lines_become_parquet(ran: Ran) -> None:
    Path("my data").mkdir()
    lines("my data/a.jsonl")
    lines("my data/b.jsonl")
    code, out, err = ran("repack", "my data/*.jsonl", "out put", "--shuffle", "--num-files", "2")
    assert (code, err) == (0, "look at it:\n")
    assert re.match(r"files +2\nrows +60\nsize ", out)
    assert f"trainpipes inspect '{Path('out put').absolute()}'" in out
    found = numbers("out put")
    assert sorted(found) == sorted([*range(30)] * 2)
    assert found != [*range(30)] * 2


def test_results_for_a_script(ran: Ran) -> None:
    lines("a.jsonl")
    for kept in (0, 1):  # the second time nothing is left to do
        code, out, err = ran("repack", "a.jsonl", "out", "--columns", "n", "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert 0 <= found.pop("seconds") < 100
        assert found == {
            "folder": str(Path("out").absolute()),
            "files": [str(Path("out/part-00000.parquet").absolute())],
            "columns": {"n": "int64"}, "kept": kept, "rows": 30,
            "bytes": os.path.getsize("out/part-00000.parquet"),
        }  # fmt: skip
    assert numbers("out") == [*range(30)]


def test_an_error_names_the_flag_that_begins_anew(ran: Ran) -> None:
    lines("a.jsonl")
    assert ran("repack", "a.jsonl", "out")[0] == 0
    os.utime("a.jsonl", (1, 1))
    code, _, said = ran("repack", "a.jsonl", "out")
    assert code == 1
    assert said.startswith("error: repack(): the input was changed")
    assert said.endswith("overwrite=True (here: --overwrite)\n")
    assert ran("repack", "a.jsonl", "out", "--overwrite")[0] == 0


def test_any_columns_can_be_named(ran: Ran) -> None:
    rows = [{"a,b": n % 2, 'say "x"': -n, " n": n, "n": n} for n in range(6)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--columns", '"a,b", n', "--columns", '"say ""x""", " n"']
    assert ran("repack", "a.jsonl", "out", *options)[0] == 0
    assert numbers("out") == [*range(6)]
    assert pq.read_schema("out/part-00000.parquet").names == ["a,b", "n", 'say "x"', " n"]


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["a.jsonl"], 2, "Missing argument"),
    (["a.jsonl", "out", "--memory-limit", "much"], 1, "must be a number of bytes"),
    (["a.jsonl", "out", "--columns", "a,,b"], 2, "must be names with commas"),
    (["a.jsonl", "out", "--columns", ""], 2, "must be names with commas"),
    (["a.jsonl", "out", "--storage-options", "x"], 2, "--storage-options must be a JSON object"),
    (["a.jsonl", "out", "--executor", "dask"], 2, "processes:N, ray or ray:ADDRESS, got 'dask'"),
    (["a.jsonl", "out", "--executor", "threads:no"], 2, "got 'threads:no'"),
    (["a.jsonl", "out", "--shared-filesystem"], 2, "--shared-filesystem is of --executor ray"),
    (["nowhere.jsonl", "out"], 1, "nowhere.jsonl"),
    (["a.jsonl", "b.csv", "out"], 1, "b.csv for read_csv, "),
    (["a.jsonl", "."], 1, "holds files that are read"),
    (["a.jsonl", "out", "--columns", "text2"], 1, "no column 'text2' (did you mean 'text'?)"),
    (["a.jsonl", "out", "--num-files", "2", "--rows-per-file", "3"], 1, "rows_per_file"),
    (["a.jsonl", "out", "--memory-limit", "0"], 1, "memory_limit"),
    (["a.jsonl", "out", "--num-files", "99"], 1, "must be at most the number of rows"),
    (["empty.jsonl", "out"], 1, "has no rows"),
    (["bad.jsonl", "out"], 1, "bad.jsonl"),
    (["bad.parquet", "out"], 1, "bad.parquet"),
    (["a.jsonl", "a.jsonl/out"], 1, "cannot be written"),
])  # fmt: skip
def test_errors_are_one_sentence(arguments: list[str], code: int, said: str, ran: Ran) -> None:
    lines("a.jsonl")
    Path("b.csv").write_text("n\n1\n")
    Path("empty.jsonl").write_text("")
    Path("bad.jsonl").write_text('{"n": 1}\n{"n": \n')
    Path("bad.parquet").write_bytes(b"PAR1 no PAR1")
    found, out, err = ran("repack", *arguments)
    assert (found, out) == (code, "")
    assert said in err
    assert "Traceback" not in err
    assert not Path("out").exists()


def test_who_is_stopped_leaves_whole_files_and_goes_on(ran: Ran) -> None:
    table = pa.table({"n": np.arange(100_000), "text": ["some text"] * 100_000})
    pq.write_table(table, "rows.parquet")
    options = ["repack", "rows.parquet", "out", "--shuffle", "--rows-per-file", "5000"]
    running = subprocess.Popen(
        [*python(), "-c", START, *options], stderr=subprocess.PIPE, text=True, env=environment()
    )
    begun = time.monotonic()
    while not list(Path("out").glob("part-*")) and running.poll() is None:
        assert time.monotonic() - begun < 100
        time.sleep(0.01)
    os.kill(pid_of(running), signal.SIGINT)
    said = running.communicate(timeout=100)[1]
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert "the same command goes on" in said
    assert not list(Path("out").rglob("*.part"))
    for path in Path("out").glob("part-*"):
        assert pq.read_metadata(path).num_rows == 5000
    assert ran(*options)[0] == 0
    assert sorted(numbers("out")) == [*range(100_000)]
    others = {path.name for path in Path("out").iterdir() if not path.name.startswith("part-")}
    assert others == {"_manifest.json"}


def test_secrets_of_a_url_are_not_printed(ran: Ran) -> None:
    lines("a.jsonl")
    url = "memory://me:hush7@host"
    ids = ("--recipe", "pretrain", "--tokenizer", "bytes")
    for command in (
        ("repack", "a.jsonl", f"{url}/out"),
        ("tokenize", "a.jsonl", f"{url}/ids", *ids),
    ):
        for how in ((), ("--json",)):
            code, out, err = ran(*command, *how)
            assert (code, "…@host" in out, "hush7" in f"{out}{err}") == (0, True, False)
    fsspec.filesystem("memory").store.clear()
