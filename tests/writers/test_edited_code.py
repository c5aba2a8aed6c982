"""Rows of an edited function are not put beside those of the function as it was."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from interpreters import python
from trainpipes.prepare import repack, tokenize

SCRIPT = """
import sys
import trainpipes as tp

def clean(row):
    return {{"y": {rule}}}

done = tp.read_parquet(sys.argv[1]).map(clean).write_parquet(sys.argv[2], rows_per_file=1000)
print(done.rows, done.kept)
"""


class Times:
    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"x": row["x"] * self.k}

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": number * self.k}


def edited(text: str) -> Any:
    """A function of a name that is the same for all texts."""
    space: dict[str, Any] = {"__name__": "a_users_module"}
    exec(text, space)
    return space["function"]


def times(k: int) -> Any:
    return edited(f"def function(row): return {{'x': row['x'] * {k}}}")


def generator(k: int) -> Any:
    return edited(f"def function():\n for n in range(20): yield {{'x': n * {k}}}")


def tokenizer(k: int) -> Any:
    return edited(f"def function(texts): return [[{k}, {k}] for text in texts]")


def rows(folder: Path, count: int = 20) -> tp.Pipeline:
    if not (path := folder / "in.parquet").exists():
        pq.write_table(
            pa.table({"x": range(count), "text": ["a"] * count}), path, row_group_size=500
        )
    return tp.read_parquet(path).select("x", "text")


def of(k: int, pipe: tp.Pipeline) -> tp.Pipeline:
    return pipe.map(times(k))


WRITE: dict[str, Callable[..., Any]] = {
    "map": lambda p, k, out, **o: of(k, p).write_json(out, **o),
    "map of an object": lambda p, k, out, **o: p.map(Times(k)).write_arrow(out, **o),
    "within a mix": lambda p, k, out, **o: tp.concat(of(k, p), of(1, p)).write_parquet(out, **o),
    "from_iterable": lambda _, k, out, **o: tp.from_iterable(generator(k)).write_parquet(out, **o),
    "from_dataset": lambda _, k, out, **o: tp.from_dataset(Times(k)).write_parquet(out, **o),
    "memory map": lambda p, k, out, **o: of(k, p).write_memmap(out, **o),
    "repack": lambda p, k, out, **o: repack(of(k, p), out, shuffle=True, **o),
    "tokenize": lambda p, k, out, **o: tokenize(p.tokenize(tokenizer(k), columns="text"), out, **o),
}


@pytest.mark.parametrize("name", WRITE)
def test_what_an_edited_function_would_not_make_is_not_taken_for_its_rows(name, tmp_path):
    write, out = partial(WRITE[name], rows(tmp_path)), tmp_path / "out"
    write(2, out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    write(2, out)
    for _ in range(2):
        with pytest.raises(tp.DataChangedError, match=r"the code of .*has changed.*overwrite=True"):
            write(3, out)
    assert before == {path: path.read_bytes() for path in out.iterdir()}
    write(3, out, overwrite=True)
    assert before != {path: path.read_bytes() for path in out.iterdir()}
    write(3, out)


def test_a_script_that_was_edited_after_an_error_does_not_mix_rows(tmp_path):
    rows(tmp_path, 3000)
    script = tmp_path / "job.py"

    def run(rule: str) -> subprocess.CompletedProcess[str]:
        script.write_text(SCRIPT.format(rule=rule))
        command = [*python(), str(script), str(tmp_path / "in.parquet"), str(tmp_path / "out")]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert "ZeroDivisionError" in run("0 // (2500 - row['x']) + row['x']").stderr
    said = run("row['x'] * 100").stderr.splitlines()[-1]
    assert "the code of map(clean (job.py:5)), or what it uses, has changed since" in said
    assert 'remove "code" from' in said
    # On purpose, as it says.
    about = tmp_path / "out/_unfinished/about.json"
    content = json.loads(about.read_text())
    assert content.pop("code")
    about.write_text(json.dumps(content))
    assert run("row['x']").stdout == "3000 2\n"
    assert run("row['x']").stdout == "3000 3\n"


def test_code_with_a_version_is_known_by_that(tmp_path):
    pipe = rows(tmp_path).select("x")
    for k in (2, 3):
        done = pipe.map(times(k), version="1").write_json(tmp_path / "out")
    assert done.kept == 1


def test_what_calls_themselves_change_is_not_compared(tmp_path):
    seen: list[int] = []

    def counting(row: dict[str, Any]) -> dict[str, Any]:
        seen.append(row["x"])
        if len(seen) == 2500:
            raise KeyboardInterrupt
        return {"y": row["x"]}

    pipe = rows(tmp_path, 3000).map(counting)
    with pytest.raises(KeyboardInterrupt):
        pipe.write_json(tmp_path / "out", rows_per_file=1000)
    assert pipe.write_json(tmp_path / "out", rows_per_file=1000).kept == 2
    assert pipe.write_json(tmp_path / "out", rows_per_file=1000).kept == 3


@pytest.mark.parametrize("code", [None, {"trainpipes 0.0.1 cpython-300": ["0"]}])
def test_files_of_other_versions_go_on(code, tmp_path):
    of(2, rows(tmp_path)).write_json(tmp_path / "out")
    manifest = tmp_path / "out/_manifest.json"
    content = json.loads(manifest.read_text())
    content["code"] = code
    manifest.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    assert of(3, rows(tmp_path)).write_json(tmp_path / "out").kept == 1


def test_a_function_that_uses_what_cannot_be_pickled_is_seen_by_its_code(tmp_path):
    with open(tmp_path / "log", "w") as log:
        for k in (2, 3):
            function = times(k)
            function.log = log
            pipe = rows(tmp_path).map(function)
            if k == 2:
                pipe.write_json(tmp_path / "out")
        with pytest.raises(tp.DataChangedError, match="the code of map"):
            pipe.write_json(tmp_path / "out")
