"""pandas, which pyarrow imports in 0.1 to 0.3 s where it is installed, stays out of chains of Arrow only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

import trainpipes as tp
from arrow_chains import CHAINS, table
from interpreters import python
from tokenizer_fixtures import bpe_json

#: Stands in for pandas, and writes down who imports it.
STAND_IN = """
import os, traceback
with open(os.environ["PANDAS_LOG"], "a") as log:
    log.write("".join(traceback.format_stack()))
raise ImportError
"""


def run(folder: Path, *command: str) -> tuple[str, Path]:
    """What a fresh process prints that would find pandas, and the file that says whether it did."""
    package, log = folder / "packages" / "pandas", folder / "log"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    here = [str(package.parent), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(here), "PANDAS_LOG": str(log)}
    environment["TRAINPIPES_CACHE"] = str(folder / "kept")
    done = subprocess.run(
        [*python(), *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, log


def test_the_stand_in_is_imported_where_pandas_would_be(tmp_path):
    _, log = run(tmp_path, "-c", "import pyarrow; pyarrow.array([1])")
    assert '"<string>", line 1' in log.read_text()


def test_chains_of_arrow_only_import_no_pandas(tmp_path: Path) -> None:
    folder = tmp_path
    pq.write_table(table().slice(0, 170), folder / "a.parquet", row_group_size=40)
    pq.write_table(table().slice(170), folder / "b.parquet", row_group_size=50)
    tp.write_memmap(folder / "numbers.memmap", table().select(["number", "even"]))
    (folder / "tokenizer.json").write_text(bpe_json())
    found, _ = run(folder, "-m", "arrow_chains", str(folder / "log"), str(folder))
    assert json.loads(found) == dict.fromkeys(CHAINS, "")
