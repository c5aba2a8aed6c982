"""Several processes make the same files as one; whoever is killed, the next call ends with the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from interpreters import pid_of, python
from trainpipes.prepare import tokenize, tokenize_files
from trainpipes.writers import Processes, Threads
from unfinished import contents, noted

FILES = 12


def write_texts(folder: Path, size: int, files: int = FILES, group: int = 500) -> str:
    """Files of texts of about so many bytes in all."""
    rng = np.random.default_rng(5)
    words = np.array(["the ", "row ", "é ", "goes ", "on ", "and ", "on.\n", "12345 "])
    line = "".join(words[rng.integers(0, len(words), 40_000)])
    folder.mkdir()
    for number in range(files):
        texts, left = [], size // files
        while left > 0:
            start, length = (int(n) for n in rng.integers(0, 100_000, 2))
            texts.append(line[start : start + length % 4000])
            left -= len(texts[-1].encode())
        table = pa.table({"text": texts})
        pq.write_table(table, folder / f"text-{number}.parquet", row_group_size=group)
    return str(folder)


def command(files: str, out: Path, processes: int, *more: str) -> list[str]:
    return [
        *python(), "-m", "trainpipes", "tokenize", files, str(out), "--recipe", "pretrain",
        "--tokenizer", "bytes", "--executor", f"processes:{processes}", "--json", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_texts(tmp_path_factory.mktemp("texts") / "in", 8_000_000)


@pytest.fixture(scope="module")
def whole(texts: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process makes that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = tokenize(tp.recipe("pretrain", texts, "bytes"), out, executor=Threads(1))
    assert len(done.files) == FILES
    return contents(out)


def below(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    try:
        return psutil.Process(pid_of(process)).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_for(out: Path, files: int, process: subprocess.Popen[Any]) -> None:
    """Until so many files have been begun or are whole."""
    while process.poll() is None:
        work = os.listdir(out / "_unfinished") if (out / "_unfinished").exists() else []
        begun = [name for name in work if ".parquet." in name]
        if len(begun) >= files:
            return
        time.sleep(0.002)


@pytest.mark.parametrize("executor", [Processes(3), Threads(2)], ids=str)
def test_any_number_of_workers_makes_the_same_bytes(executor, texts, whole, tmp_path):
    done = tokenize(tp.recipe("pretrain", texts, "bytes"), tmp_path / "out", executor=executor)
    assert contents(tmp_path / "out") == whole
    done.verify()


def test_the_file_of_a_process_that_is_killed_is_made_again(texts, whole, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(texts, out, 2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(out, 3, process)
    children = below(process)
    worker = max(children, key=psutil.Process.create_time)
    worker.kill()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert "Traceback" not in said
    assert "error" not in said
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert contents(out) == whole


def fatal(texts: list[str]) -> list[list[int]]:
    if any("12345" in text for text in texts):
        os._exit(3)
    return [[1] for _ in texts]


def test_a_file_at_which_processes_die_again_and_again_is_named(tmp_path):
    for number, text in enumerate(["a", "b", "12345"]):
        pq.write_table(pa.table({"text": [text] * 9}), tmp_path / f"t-{number}.parquet")
    pipe = tp.list_files(f"{tmp_path}/t-*.parquet").read_parquet().tokenize(fatal)
    said = r"has ended with exit code 3 while making part-00002.parquet of .*Processes\(n\)$"
    with pytest.raises(tp.WorkerError, match=said):
        tokenize(pipe, tmp_path / "out", executor=Processes(2))
    assert not [name for name in os.listdir(tmp_path / "out") if name.endswith(".part")]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(15, marks=pytest.mark.slow)])
def test_where_the_program_is_killed_all_end_and_the_next_call_goes_on(
    kills, texts, whole, tmp_path
):
    out = tmp_path / "out"
    for number in range(kills):
        process = subprocess.Popen(command(texts, out, 2), stdout=subprocess.DEVNULL)
        wait_for(out, 2 + number % FILES, process)
        children = below(process)
        is_killed = process.poll() is None
        if is_killed:
            os.kill(pid_of(process), signal.SIGKILL)
        assert is_killed or kills > 1
        process.wait()
        assert not psutil.wait_procs(children, timeout=20)[1]
        left = contents(out) if out.exists() else {}
        assert all(whole[name] == content for name, content in left.items())
    tokenize(tp.recipe("pretrain", texts, "bytes"), out, executor=Threads(1))
    assert contents(out) == whole


def test_ctrl_c_leaves_nothing_half_written(texts, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(texts, out, 2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(out, 2, process)
    children = below(process)
    os.kill(pid_of(process), signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in said
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert not list(out.rglob("*.part"))
    if out.exists():  # a folder without a whole file goes, too
        assert noted(out)


def failing(texts: list[str]) -> list[list[int]]:
    if any("12345" in text for text in texts):
        raise ZeroDivisionError("no numbers, please")
    return [[1] for _ in texts]


def test_a_function_of_the_users_fails_in_a_process_with_its_own_error(tmp_path):
    for number in range(3):
        pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / f"t-{number}.parquet")
    pq.write_table(pa.table({"text": ["a"] * 30 + ["12345"]}), tmp_path / "t-3.parquet")
    pipe = tp.list_files(f"{tmp_path}/t-*.parquet").read_parquet().tokenize(failing)
    with pytest.raises(ZeroDivisionError, match="no numbers") as caught:
        tokenize(pipe, tmp_path / "out", executor=Processes(2))
    notes = " ".join(caught.value.__notes__)
    assert "t-3.parquet, row group 0, row 30" in notes
    assert "while making part-00003.parquet of" in notes


def test_a_pipeline_that_cannot_leave_this_process_is_tokenized_here(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_files, "WORTH_BYTES", 1)
    monkeypatch.setattr(tokenize_files, "cores", lambda: 2)
    files = tp.list_files(write_texts(tmp_path / "in", 20_000, 3)).read_parquet()
    pipe = files.map(lambda row: {"text": row["text"].upper()}).tokenize("bytes")
    with pytest.raises(tp.ConfigError, match=r"must pickle.*or use executor=Threads\(1\)$"):
        tokenize(pipe, tmp_path / "out", executor=Processes(2))
    assert tokenize(pipe, tmp_path / "out").rows == len(list(files))


def test_in_a_session_without_a_file_what_it_defines_is_tokenized_here(tmp_path):
    files = write_texts(tmp_path / "in", 20_000, 3)
    code = """if True:
        import sys, trainpipes as tp
        from trainpipes.prepare import tokenize, tokenize_files
        tokenize_files.WORTH_BYTES, tokenize_files.cores = 1, lambda: 2
        def upper(row): return {"text": row["text"].upper()}
        pipe = tp.list_files(sys.argv[1]).read_parquet().map(upper).tokenize("bytes")
        print(tokenize(pipe, sys.argv[2]).rows > 0)
    """
    command = [*python(), "-c", code, files, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_pipeline_that_leaves_no_rows_is_refused(overwrite, tmp_path):
    files = tp.list_files(write_texts(tmp_path / "in", 20_000, 3)).read_parquet()
    pipe = files.filter(lambda row: row["text"] is None).tokenize("bytes")
    with pytest.raises(tp.ConfigError, match="has no rows, and nothing was written: check what"):
        tokenize(pipe, tmp_path / "out", overwrite=overwrite, executor=Threads(1))
    assert not (tmp_path / "out").exists()


SCRIPT = """
import sys
import trainpipes as tp
from trainpipes.prepare import tokenize
from trainpipes.writers import Processes
tokenize(tp.recipe("pretrain", sys.argv[1], "bytes"), sys.argv[2], executor=Processes(2))
"""


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path):
    files = write_texts(tmp_path / "in", 20_000, 3)
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run(
        [*python(), str(tmp_path / "script.py"), files, str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 1
    assert 'its pipeline below `if __name__ == "__main__":`' in ended.stderr.splitlines()[-1]
