"""``trainpipes run``: a pipeline alone, without a trainer."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import trainpipes as tp
from cli.command import START, environment, trainpipes
from trainpipes.cli.app import run
from trainpipes.cli.run_summary import run_line


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    chat = {
        "prompt": [f"{k} + {k} =" for k in range(200)],
        "response": [f" {2 * k}" * (1 + k % 5) for k in range(200)],
    }
    pq.write_table(pa.table(chat), tmp_path / "chat.parquet", row_group_size=50)
    texts = {"text": [f"text {k} " * (k % 9) for k in range(100)]}
    pq.write_table(pa.table(texts), tmp_path / "texts.parquet")
    (tmp_path / "train.yaml").write_text(
        "recipe: sft\noptions:\n  files: chat.parquet\n  tokenizer: bytes\n  batch_size: 8\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


SFT = ["run", "sft", "--files", "chat.parquet", "--tokenizer", "bytes"]
PRETRAIN = [
    "run", "pretrain", "--files", "texts.parquet", "--tokenizer", "bytes", "--option", "max_length=64",
    "--option", "num_shards=2", "--option", "window=16",
]  # fmt: skip


def ran(capsys, *arguments):
    """Exit code, stdout and stderr."""
    code = run(list(map(str, arguments)))
    found = capsys.readouterr()
    return code, found.out, found.err


def as_json(capsys, *arguments):
    code, out, _ = ran(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


# What runs


def test_a_recipe_is_run_and_summed_up(capsys):
    code, out, err = ran(capsys, *SFT, "--option", "batch_size=10", "--option", "num_shards=4")
    assert (code, err) == (0, "")
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines() if "  " in line)
    assert lines["steps"] == "20 of 20 in an epoch (100.0%)"
    assert lines["rows"] == "200"
    assert lines["tokens"].endswith("of them targets")
    assert "MiB at most" in lines["memory"]
    assert "tokenize" in out


def test_a_config_is_run_with_changes(capsys):
    found = as_json(capsys, "run", "train.yaml", "--set", "options.batch_size=20")
    assert (found["steps"], found["rows"]) == (10, 200)


def test_json_is_one_value_with_names_that_stay(capsys):
    found = as_json(capsys, *SFT, "--steps", 3, "--show", 2)
    assert set(found) == {
        "advice", "cells", "ended", "epoch_steps", "epochs", "first_batch_seconds", "learnt_share",
        "loading_thread_seconds",
        "longest_wait_seconds",
        "memory_peak_bytes", "memory_start_bytes", "num_workers", "padding_share", "rank", "rows",
        "rows_per_second", "seconds", "shown", "simulated_seconds", "stage_thread_seconds", "steps",
        "steps_per_second", "threads", "tokens", "tokens_per_second", "wait_seconds", "wait_share",
        "world_size",
    }  # fmt: skip
    assert (found["steps"], found["ended"], len(found["shown"])) == (3, "steps", 2)


def test_the_batches_that_are_shown_are_those_that_come(capsys):
    _, out, _ = ran(capsys, *SFT, "--show", 2, "--option", "batch_size=3")
    pipe = tp.recipe("sft", "chat.parquet", "bytes", batch_size=3)
    assert out.startswith(pipe.show(2).text())
    assert "⟦" in out


def test_several_files_and_a_glob_of_the_shell(capsys):
    shutil.copy("chat.parquet", "more.parquet")
    found = as_json(capsys, "run", "sft", "--tokenizer", "bytes", "--files", "chat.parquet", "more.parquet",
                    "--option", "batch_size=100", "--option", "num_shards=1")  # fmt: skip
    assert found["rows"] == 400


@pytest.mark.parametrize("value", ["1", "0", "true"])
def test_values_of_options_are_yaml(value, capsys):
    code, out, _ = ran(capsys, *SFT, "--option", f"drop_last={value}")
    assert code == (0 if value == "true" else 1) or out


def test_workers_and_threads(capsys, no_processes_left):
    assert as_json(capsys, *SFT, "--num-workers", 2)["num_workers"] == 2
    assert as_json(capsys, *SFT, "--threads", 0)["threads"] == 0


def test_ranks_of_the_environment_and_one_that_is_played(capsys, monkeypatch):
    played = as_json(capsys, *SFT, "--rank", 1, "--world-size", 2, "--epochs", 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = as_json(capsys, *SFT, "--epochs", 1)
    for report in (played, found):
        assert (report["rank"], report["world_size"], report["steps"]) == (1, 2, 12)


def test_a_rank_alone_of_those_that_agree_where_an_epoch_ends_runs_on(capsys):
    code, out, err = ran(
        capsys, *PRETRAIN, "--option", "epochs=1", "--rank", 0, "--world-size", 2, "--steps", 30
    )
    assert code == 0
    assert "the run has no end" in err
    assert "steps        30" in out


# How long


def test_what_has_no_end_runs_100_steps_and_says_so(capsys):
    code, out, err = ran(capsys, *PRETRAIN)
    assert code == 0
    assert "this pipeline has no end: 100 steps; --steps says how many" in err
    assert "steps        100" in out


def test_epochs(capsys):
    found = as_json(capsys, *SFT, "--epochs", 2)
    assert (found["steps"], found["epochs"]) == (50, 2)


def test_a_state_is_saved_and_gone_on_from(capsys, folder):
    code, _, _ = ran(capsys, *SFT, "--steps", 5, "--save-state", "state.json")
    assert code == 0
    pipe = tp.recipe("sft", "chat.parquet", "bytes")
    state = json.loads((folder / "state.json").read_text())
    assert {key: state[key] for key in ("epoch", "m")} == {"epoch": 0, "m": 5}
    pipe.load_state_dict(state)
    _, out, _ = ran(capsys, *SFT, "--steps", 1, "--resume", "state.json", "--show", 1)
    assert out.startswith(pipe.show(1).text())
    assert [path.name for path in folder.iterdir() if "unfinished" in path.name] == []


def test_a_simulated_step_tells_of_waits(capsys):
    found = as_json(capsys, *SFT, "--simulate-step", "2ms", "--steps", 10)
    assert found["simulated_seconds"] >= 9 * 0.002
    assert 0 <= found["wait_share"] <= 1
    _, out, _ = ran(capsys, *SFT, "--simulate-step", "0.001s", "--steps", 10)
    assert "waits" in out


# What is wrong


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run"], 2, "Missing argument 'CONFIG|RECIPE'"),
        (["run", "sftt"], 1, "no recipe 'sftt' (did you mean 'sft'?)"),
        (["run", "sft"], 1, "recipe 'sft' needs files and tokenizer"),
        ([*SFT, "--option", "batch_siz=2"], 1, "no option 'batch_siz' (did you mean 'batch_size'?)"),
        ([*SFT, "--option", "batch_size=two"], 1, "got 'two'"),
        ([*SFT, "--option", "batch_size"], 2, "--option is NAME=VALUE"),
        ([*SFT, "--option", "x=[1"], 2, "is no YAML value"),
        ([*SFT, "--option", "x=!!python/object/apply:os.system [ls]"], 2, "is no YAML value"),
        ([*SFT, "--set", "options.batch_size=2"], 2, "options are given as --option NAME=VALUE"),
        ([*SFT, "--steps", "0"], 2, "0 is not in the range x>=1"),
        ([*SFT, "--steps", "1", "--epochs", "1"], 2, "not both"),
        ([*SFT, "--rank", "1"], 2, "--rank and --world-size go together"),
        ([*SFT, "--rank", "2", "--world-size", "2"], 2, "0 <= rank < world_size"),
        ([*SFT, "--rank", "0", "--world-size", "5"], 1, "must divide num_shards = 24"),
        ([*SFT, "--threads", "1", "--num-workers", "1"], 2, "not both"),
        ([*SFT, "--simulate-step", "5 minutes"], 2, "a time such as 5ms"),
        ([*SFT, "--storage-options", "secret"], 2, "takes a JSON object"),
        ([*SFT, "--resume", "chat.parquet"], 1, "--resume takes a state as JSON"),
        ([*SFT, "--resume", "nowhere.json"], 1, "No such file"),
        ([*SFT, "--save-state", "/proc/x.json"], 1, "--save-state /proc/x.json cannot be written: No"),
        ([*SFT, "--option", "files=texts.parquet"], 2, "files is given twice"),
        ([*SFT, "--option", "tokenizer=gpt2"], 2, "tokenizer is given twice"),
        ([*SFT, "--option", "batch-size=2", "--option", "batch_size=3"], 2, "batch_size is given twice"),
        (["run", "train.yaml", "--set", "options.batch_size=2", "--set", "options['batch_size']=3"], 2,
         "--set options['batch_size'] is given twice"),
        (["run", "train.yaml", "--set", "=3"], 2, "a change is path=value"),
        ([*SFT, "--save-state", "nowhere/state.json"], 2, "there is no such folder"),
        ([*PRETRAIN, "--epochs", "1"], 1, "this pipeline has no end"),
        (["run", "train.yaml", "--files", "chat.parquet"], 2, "changed by --set"),
        (["run", "nothing.yaml"], 1, "nothing.yaml"),
        (["run", "./sft"], 1, "sft"),
        (["run", "sft", "--files", "nowhere/*.parquet", "--tokenizer", "bytes"], 1, "nowhere/*.parquet"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_sentence(arguments, code, said, capsys):
    found, out, err = ran(capsys, *arguments)
    assert (found, out) == (code, ""), err
    assert said in " ".join(err.split())
    assert "Traceback" not in err
    assert ".unfinished" not in err


def test_storage_options_are_never_shown(capsys):
    for given in ("hunter2", '["hunter2"]', '{"token": hunter2}'):
        _, out, err = ran(capsys, *SFT, "--storage-options", given)
        assert "hunter2" not in out + err


def test_a_file_with_the_name_of_a_recipe_changes_nothing(capsys, folder):
    (folder / "sft").write_text((folder / "train.yaml").read_text())
    assert as_json(capsys, *SFT)["steps"] == 24 + 1
    assert as_json(capsys, "run", "./sft")["steps"] == 25


def test_a_file_with_a_name_alone_is_pointed_at(capsys, folder):
    (folder / "train").write_text((folder / "train.yaml").read_text())
    code, _, err = ran(capsys, "run", "train")
    assert code == 2
    assert "for the file write ./train" in " ".join(err.split())


def test_rows_that_give_no_batch_are_an_error(capsys, folder):
    empty = pa.table({"prompt": pa.array([], pa.string()), "response": pa.array([], pa.string())})
    pq.write_table(empty, folder / "empty.parquet")
    code, out, err = ran(capsys, "run", "sft", "--files", "empty.parquet", "--tokenizer", "bytes")
    assert (code, out) == (1, "")
    assert "gives nothing" in " ".join(err.split())


@pytest.mark.parametrize("how", [[], ["--num-workers", "1"]], ids=["here", "in a worker"])
def test_a_bad_row_is_named_without_a_traceback(how, capsys, folder, failed_workers_let_go):
    rows = pa.table({"prompt": ["a"] * 40, "response": [*["b"] * 39, None]})
    pq.write_table(rows, folder / "nulls.parquet")
    command = ["run", "sft", "--files", "nulls.parquet", "--tokenizer", "bytes"]
    code, out, err = ran(capsys, *command, "--option", "num_shards=1", *how)
    assert (code, out) == (1, "")
    assert err.startswith("error: tokenize('bytes'")
    assert "column 'response' is null" in err
    assert "nulls.parquet, row group 0, row 39" in " ".join(err.split())
    assert "Traceback" not in err


def test_a_damaged_file_is_named(capsys, folder):
    (folder / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    code, _, err = ran(capsys, "run", "sft", "--files", "bad.parquet", "--tokenizer", "bytes")
    assert code == 1
    assert "bad.parquet" in err


# As a process


def test_the_command_itself(folder):
    found = trainpipes(*SFT, "--steps", "2", cwd=folder)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("steps        2 of 25")
    assert found.stderr == ""


@pytest.mark.parametrize(
    ("how", "number"),
    [([], signal.SIGINT), (["--num-workers", "2"], signal.SIGINT), ([], signal.SIGTERM)],
    ids=["here", "in workers", "by SIGTERM"],
)
def test_a_signal_gives_what_has_come(how, number, folder, no_processes_left):
    (folder / "marker.py").write_text(
        "from pathlib import Path\n"
        "def touch(row):\n"
        "    if row['prompt'].startswith('30 '):\n"
        "        Path('started').touch()\n"
        "    return row\n"
    )
    (folder / "endless.yaml").write_text(
        "stages:\n- read_parquet: chat.parquet\n- sharding_filter: 2\n- map: {fn: 'marker:touch'}\n"
        "- batch: 2\n- repeat\n"
    )
    child = subprocess.Popen(
        [
            *(sys.executable, "-c", START, "run", "endless.yaml", "--allow-imports", "--show", "1"),
            *("--steps", "100000", "--simulate-step", "5ms", "--save-state", "state.json", *how),
        ],
        start_new_session=True,  # Ctrl-C goes to all processes of a terminal
        cwd=folder, env=environment({"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}),
        stdout=-1, stderr=-1, text=True,
    )  # fmt: skip
    while not (folder / "started").exists() and child.poll() is None:
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(child.pid, number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 128 + number, err
    assert ", stopped" in out
    assert "Traceback" not in err
    steps = int(re.search(r"steps +([\d,]+)", out)[1].replace(",", ""))
    assert steps >= 15
    assert json.loads((folder / "state.json").read_text())["m"] in (steps, steps + 1)


def test_progress_is_for_terminals():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, legacy_windows=False)
    with run_line(4, 25, console) as see:
        from trainpipes.look.trial.trial import trial

        pipe = tp.recipe("sft", "chat.parquet", "bytes", batch_size=8, num_shards=1)

        def slowly(item, progress):
            time.sleep(0.12)
            see(item, progress)

        trial(pipe, steps=4, see=slowly)
    shown = console.file.getvalue()
    assert "step 4 of 4" in shown or "step 3 of 4" in shown
    assert "tokens/s" in shown
    assert "epoch 16%" in shown or "epoch 12%" in shown
    assert "padding" in shown
    with run_line(4, None, Console(file=io.StringIO())) as see:
        assert see is None


def test_names_of_files_and_text_of_the_data_cannot_steer_the_terminal(capsys, folder):
    rows = pa.table({"prompt": ["\x1b[2Jclear"] * 8, "response": ["\x1b]0;title\x07"] * 8})
    pq.write_table(rows, folder / "bad.parquet")
    command = ["run", "sft", "--files", "bad.parquet", "--tokenizer", "bytes", "--show", "1"]
    _, out, err = ran(capsys, *command)
    assert "\\x1b[2Jclear" in out
    assert "\x1b" not in out + err
