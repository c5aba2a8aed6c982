"""``trainpipes run``: a pipeline alone, without a trainer: what it counts, and what it advises."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from command import START, environment
from interpreters import pid_of, python
from trainpipes.cli.measure import measure, report
from trainpipes.cli.run import _lines, advice

PAIRS = [{"prompt": f"{k} + {k} =", "response": f" {2 * k}" * (1 + k % 5)} for k in range(200)]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
CHATS = [{"messages": TALK}] * 32
TEXTS = [{"text": f"text {k} " * (1 + k % 9)} for k in range(100)]
SFT = ["run", "sft", "--files", "chat.parquet", "--tokenizer", "bytes"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist(PAIRS), tmp_path / "chat.parquet", row_group_size=50)
    (tmp_path / "train.yaml").write_text(
        "recipe: sft\noptions:\n  files: chat.parquet\n  tokenizer: bytes\n  batch_size: 8\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def ran(ran):
    """Runs the command; gives exit code, stdout and stderr in one line."""

    def running(*arguments):
        code, out, err = ran(*arguments)
        return code, out, " ".join(err.split())

    return running


@pytest.fixture
def as_json(ran):
    def running(*arguments):
        code, out, err = ran(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return running


# What runs


def test_a_config_is_run_with_changes(as_json):
    found = as_json("run", "train.yaml", "--set", "options.batch_size=20")
    assert (found["steps"], found["rows"]) == (10, 200)


def test_functions_that_a_config_names_are_imported_if_it_may(ran, folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "mine_of_run.py").write_text("def twice(row):\n    return [row, row]\n")
    (folder / "stages.yaml").write_text(
        "stages: [{read_parquet: chat.parquet}, {flat_map: {fn: 'mine_of_run:twice'}}, {batch: 100}]\n"
    )
    assert ran("run", "stages.yaml")[0] == 1
    code, out, _ = ran("run", "stages.yaml", "--allow-imports")
    assert (code, "400" in out) == (0, True)


def test_files_are_run_alone_and_several_by_a_recipe(as_json, ran, folder):
    (folder / "data").mkdir()
    tp.from_dataset(TEXTS).write_parquet(folder / "data")
    code, _, err = ran("run", "data")
    assert (code, "no recipe 'data'" in err) == (1, True)
    assert err.endswith("; the data of that name is written data/")
    found = as_json("run", "data/")
    assert (found["steps"], found["rows"], found["tokens"]) == (2, 100, 0)
    shutil.copy("chat.parquet", "more.parquet")
    assert as_json("run", "chat.parquet", "more.parquet")["rows"] == 400
    assert ran("run", "chat.parquet", "--tokenizer", "bytes")[0] == 2
    options = ["--option", "batch_size=100", "--option", "num_shards=1"]
    files = ["--files", "chat.parquet", "more.parquet"]
    assert as_json("run", "sft", "--tokenizer", "bytes", *files, *options)["rows"] == 400


def test_the_batches_that_are_shown_are_those_that_come(ran):
    _, out, _ = ran(*SFT, "--show", 2, "--option", "batch_size=3")
    pipe = tp.recipe("sft", "chat.parquet", "bytes", batch_size=3)
    assert out.startswith(pipe.show(2).text())
    assert "⟦" in out


def test_workers_give_the_same_batches(as_json, no_processes_left):
    names = ("steps", "rows", "tokens", "padding", "targets")
    one, other = as_json(*SFT, "--num-workers", 2), as_json(*SFT, "--threads", 0)
    assert [one[name] for name in names] == [other[name] for name in names]


def test_ranks_of_the_environment(as_json, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert as_json(*SFT, "--epochs", 1)["steps"] == 12


# How long


def test_100_batches_or_an_epoch_where_nothing_says_how_many(as_json, folder):
    pq.write_table(pa.table({"text": ["a text"] * 300}), "texts.parquet")
    endless = ["run", "pretrain", "--files", "texts.parquet", "--tokenizer", "bytes",
               "--option", "max_length=8", "--option", "batch_size=1"]  # fmt: skip
    assert as_json(*endless)["steps"] == 100
    assert as_json(*SFT)["steps"] == 25
    assert as_json(*SFT, "--steps", 30)["steps"] == 30
    assert as_json(*SFT, "--epochs", 2)["steps"] == 50


# What is wrong


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["run"], 2, "Missing argument 'RECIPE|CONFIG|FILE'"),
    (["run", "sftt"], 1, "no recipe 'sftt' (did you mean 'sft'?)"),
    (["run", "sft"], 1, "missing a required argument: 'files'"),
    ([*SFT, "--option", "batch_siz=2"], 1, "no option 'batch_siz' (did you mean 'batch_size'?)"),
    ([*SFT, "--option", "batch_size=two"], 1, "got 'two'"),
    ([*SFT, "--option", "batch_size"], 2, "--option must be NAME=VALUE"),
    ([*SFT, "--option", "x=[1"], 2, "no YAML"),
    ([*SFT, "--option", "files=x"], 2, "files is given twice: leave --option files=... out"),
    ([*SFT, "--option", "seed=1", "--option", "seed=2"], 2, "seed is given twice: leave one --option"),
    (["run", "train.yaml", "--set", "a.b=3", "--set", "a.b=4"], 2, "a.b is given twice: leave one --set"),
    ([*SFT, "--html", "no/such/x.html"], 2, "must be a file in a folder that can be written to, got no/"),
    ([*SFT, "--option", "x=!!python/object/apply:os.system [ls]"], 2, "python/object"),
    ([*SFT, "--option", "seed=${SEED}"], 2, "variable SEED is not set"),
    ([*SFT, "--set", "options.batch_size=2"], 2, "a recipe takes --option NAME=VALUE, got --set"),
    ([*SFT, "--allow-imports"], 2, "got --allow-imports"),
    ([*SFT, "--steps", "0"], 2, "0 is not in the range x>=1"),
    ([*SFT, "--steps", "1", "--epochs", "1"], 2, "give one of --steps and --epochs"),
    ([*SFT, "--show", "1", "--json"], 2, "give --show or --json, not both"),
    ([*SFT, "--threads", "1", "--num-workers", "1"], 1, "leave one out"),
    ([*SFT, "--simulate-step", "5 minutes"], 2, "is not a valid float"),
    ([*SFT, "--simulate-step", "nan"], 2, "must be a number of seconds, got nan"),
    (["run", "train.yaml", "--files", "chat.parquet"], 2, "change them by --set"),
    (["run", "train.yaml", "--tokenizer", "bytes"], 2, "a config takes --set PATH=VALUE"),
    (["run", "nothing.yaml"], 1, "nothing.yaml"),
    (["run", "sft", "--files", "nowhere/*.parquet", "--tokenizer", "bytes"], 1, "nowhere/*.parquet"),
    (["run", "pretrain", "--files", "chat.parquet", "--option", "text=prompt", "--tokenizer", "bytes",
        "--epochs", "1"], 1, "has no end"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_a_sentence(arguments, code, said, ran):
    found, out, err = ran(*arguments)
    assert (found, out) == (code, ""), err
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("how", [[], ["--num-workers", "1"]], ids=["here", "in a worker"])
def test_a_bad_row_is_named_without_a_traceback(how, ran, folder, failed_workers_let_go):
    rows = pa.table({"prompt": ["a"] * 40, "response": [*["b"] * 39, None]})
    pq.write_table(rows, folder / "nulls.parquet")
    command = ["run", "sft", "--files", "nulls.parquet", "--tokenizer", "bytes"]
    code, out, err = ran(*command, "--option", "num_shards=1", *how)
    assert (code, out) == (1, "")
    assert err.startswith("error: tokenize('bytes'")
    assert "column 'response' is null" in err
    assert "nulls.parquet, row group 0, row 39" in err
    assert "Traceback" not in err


def test_rows_that_give_no_batch_are_an_error(ran, folder):
    empty = pa.table({"prompt": pa.array([], pa.string()), "response": pa.array([], pa.string())})
    pq.write_table(empty, folder / "empty.parquet")
    code, out, err = ran("run", "sft", "--files", "empty.parquet", "--tokenizer", "bytes")
    assert (code, out) == (1, "")
    assert "gives nothing" in err


def test_text_of_the_data_cannot_steer_the_terminal(ran, folder):
    rows = pa.table({"prompt": ["\x1b[2Jclear"] * 8, "response": ["\x1b]0;title\x07"] * 8})
    pq.write_table(rows, folder / "bad.parquet")
    _, out, err = ran("run", "sft", "--files", "bad.parquet", "--tokenizer", "bytes", "--show", 1)
    assert "\\x1b[2Jclear" in out
    assert "\x1b" not in out + err


# Ctrl-C


def test_ctrl_c_gives_what_has_come(folder, no_processes_left):
    pq.write_table(pa.Table.from_pylist(PAIRS * 400), "chat.parquet")
    command = [*python(), "-c", START, *SFT, "--epochs", "1", "--simulate-step", "0.005"]
    child = subprocess.Popen(
        [*command, "--num-workers", "1", "--show", "1"],
        cwd=folder, env=environment({"PYTHONUNBUFFERED": "1"}), stdout=-1, stderr=-1, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()  # of the batch that is shown before the run
    time.sleep(0.7)
    os.killpg(pid_of(child), signal.SIGINT)  # Ctrl-C goes to all processes of a terminal
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    assert re.search(r"batches +[\d,]+; an epoch has 10,000, stopped", out), out


# Counts


def pairs(count=200):
    return tp.from_dataset(PAIRS[:count])


def docs(count=100):
    return tp.from_dataset(TEXTS[:count]).tokenize("bytes")


@pytest.mark.parametrize("pipe", [
    tp.recipe("sft", pairs(), "bytes", batch_size=4, num_shards=4, buffer_size=64),
    docs().shuffle(50).sharding_filter(2).bucket_by_length(4, buffer_size=40).pad_collate(),
    tp.mix({"a": docs(), "b": docs(40)}, weights={"a": 2, "b": 1}).batch(5).pad_collate(),
], ids=["sft", "buckets", "mix"])  # fmt: skip
def test_tokens_padding_and_targets_are_those_of_the_batches(pipe):
    batches = list(tp.Pipeline(pipe.stages))
    counts = measure(tp.Loader(pipe), epochs=1)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    cells = sum(batch["input_ids"].numel() for batch in batches)
    assert counts["steps"] == len(batches)
    assert counts["rows"] == sum(len(batch["input_ids"]) for batch in batches)
    assert [counts[name] for name in ("cells", "tokens", "padding")] == [
        cells,
        tokens,
        cells - tokens,
    ]
    if "labels" in batches[0]:
        assert counts["targets"] == sum(int((batch["labels"] != -100).sum()) for batch in batches)


def test_both_sides_of_preferences_and_the_encoders_mask_count():
    first = {"prompt": "a", "rejected": "c", "response": "d"}
    rows = tp.from_dataset([{**first, "chosen": "b" * k} for k in range(1, 41)])
    pipe = tp.recipe("preference", rows, "bytes", batch_size=4, num_shards=1)
    counts = measure(tp.Loader(pipe), epochs=1)
    assert counts["tokens"] == sum(k + 2 for k in range(1, 41)) + 3 * 40
    pipe = tp.recipe("seq2seq", rows, "bytes", batch_size=4, num_shards=1)
    report = measure(tp.Loader(pipe), epochs=1)
    assert report["tokens"] == sum(int(b["attention_mask"].sum()) for b in tp.Pipeline(pipe.stages))
    assert report["target_share"] == 1.0
    pipe = tp.recipe("seq2seq", tp.from_dataset(PAIRS), "bytes", batch_size=1, num_shards=1)
    widths = {batch["labels"].shape == batch["input_ids"].shape for batch in pipe}
    assert widths == {True, False}  # some are of one shape by chance
    assert measure(tp.Loader(pipe), epochs=1)["target_share"] is None


@pytest.mark.parametrize(("pipe", "steps", "rows", "tokens"), [
    (docs(20).batch(3), 7, 20, 0),
    (docs(20), 20, 20, 0),
    (docs(20).pack(64).batch(2).pad_collate(), 6, 11, sum(len(row["text"]) for row in TEXTS[:20])),
    (tp.from_tensors(x=torch.zeros(10, 2, 2), y=torch.arange(10)).batch(4).collate(), 3, 10, 0),
    (tp.from_tensors(torch.arange(10)).batch(4).collate(), 3, 10, 0),
    (tp.from_dataset([{"items": [n] * n, "y": n} for n in range(5)]).batch(2).collate(ragged="offsets"),
        3, 5, 0),
    (tp.from_tensors(torch.arange(10), torch.zeros(10, 3)).batch(4).collate(), 3, 10, 0),
    (tp.from_iterable(lambda: iter(range(10))).batch(4), 3, 10, 0),
], ids=[
    "rows as dicts", "rows alone", "packed", "by name", "a tensor", "flat lists", "two tensors",
    "numbers",
])  # fmt: skip
def test_rows_of_every_kind_of_batch_count(pipe, steps, rows, tokens):
    counts = measure(tp.Loader(pipe), epochs=1)
    assert (counts["steps"], counts["rows"], counts["tokens"]) == (steps, rows, tokens)
    assert (counts["padding_share"] is None) == (tokens == 0)


def test_of_batches_whose_rows_cannot_be_counted_all_else_is_told():
    pipe = tp.from_dataset(range(60)).batch(2).map(lambda rows: object())
    told = measure(tp.Loader(pipe))
    assert (told["steps"], told["rows"], told["rows_per_second"]) == (30, None, None)
    lines = dict(_lines(told, pipe))
    assert "rows" not in lines
    assert re.fullmatch(r"[\d,.]+ batches/s", lines["then"])


def slow(row):
    time.sleep(0.002)
    return row


def counted(**counts):
    return Counter({"steps": 2, "rows": 8, "seconds": 2, "waited": 0, **counts})


def test_the_start_is_in_no_rate_and_in_no_share():
    first, warm, total = [
        counted(steps=n, rows=8 * n, seconds=s, waited=w)
        for n, s, w in ((1, 9.0, 9.0), (10, 10.0, 9.5), (40, 12.0, 10.0))
    ]
    told = report(total, first, warm, step_seconds=0.05)
    rates = ("steps_per_second", "rows_per_second", "wait_share")
    assert [told[name] for name in rates] == [15, 120, 0.25]
    assert told["tokens_per_second"] is None
    slow_start = tp.from_iterable(starting_slowly).batch(1)
    found = measure(tp.Loader(slow_start), steps=40, step_seconds=0.005)
    assert found["first_batch_seconds"] >= 0.2
    assert (found["warm_up_steps"], found["wait_share"] < 0.5) == (10, True)


def starting_slowly():
    time.sleep(0.2)
    yield from range(100)


def test_waits_are_told_where_a_step_is_simulated():
    told = measure(tp.Loader(pairs(60).map(slow).batch(2), threads=0), step_seconds=0.002)
    assert 0.1 < told["wait_share"] < 1  # a busy machine prolongs steps, too
    assert told["steps_per_second"] < 1 / 0.006
    assert measure(tp.Loader(pairs(60).batch(2)))["wait_share"] is None


def test_a_simulated_step_says_what_bounds_the_run(ran):
    for _ in range(10):  # on a busy machine the cores may bound a run
        code, out, _ = ran(*SFT, "--simulate-step", "0.03")
        assert code == 0
        if re.search(r"verdict +the trainer", out):
            break
    assert re.search(r"waiting +\d+% of [\d.]+ s: the trainer bounds this run", out), out
    assert re.search(r"busy [\s\S]*pad_collate", out), out
    assert out.count("padding  ") == 1
    assert re.search(r"verdict +the trainer", out), out
    for _ in range(10):
        _, out, _ = ran(*SFT, "--simulate-step", "0.03", "--json")
        if (bound := json.loads(out)["profile"]["verdict"]["bound"]) == "padding":
            break
    assert bound == "padding", out
    assert json.loads(ran(*SFT, "--json")[1])["profile"] is None


def test_a_single_batch_has_no_rate():
    told = measure(tp.Loader(pairs(4).batch(4)))
    assert (told["steps"], told["rows_per_second"]) == (1, None)
    assert json.loads(json.dumps(told))["rows"] == 4


# Advice


def of(pipe, **counts):
    first = counted(steps=1, seconds=1)
    total = counted(**{"cells": 100, "tokens": 90, **counts})
    return advice(report(total, first, first, step_seconds=0.1), pipe)


def test_advice_names_what_to_change_first_until_it_has_been_taken():
    padded = docs().batch(8).pad_collate()
    assert "no token is a target, and the loss is NaN: raise max_length" in of(padded, targets=0)
    assert "45% of the cells are padding: write .bucket_by_length()" in of(padded, tokens=55)
    assert of(docs().bucket_by_length(8).pad_collate(), tokens=55) == ""
    assert of(docs().pack(64).batch(8).pad_collate(), tokens=55) == ""


def test_advice_for_pairs_is_what_they_can_stand_before():
    texts = tp.from_dataset([{"prompt": "p" * n, "response": "r"} for n in range(1, 9)])
    pairs = texts.tokenize(
        "bytes", {"prompt": "chosen_input_ids", "response": "rejected_input_ids"}
    )
    said = of(pairs.batch(8).pad_collate(value=0), tokens=55)
    assert "write .bucket_by_length(column='chosen_input_ids') in place of .batch(); of" in said
    assert "pack" not in said
    assert list(pairs.bucket_by_length(4, column="chosen_input_ids").pad_collate(value=0))


def test_advice_stands_below_the_numbers(ran, folder):
    tp.from_dataset([{"prompt": "p" * 100, "response": "r"}] * 8).write_parquet(folder / "long")
    cut = ["--files", "long", "--tokenizer", "bytes", "--option", "max_length=50"]
    _, out, err = ran("run", "sft", *cut, "--option", "num_shards=1")
    assert "0.0% of them targets" in out
    assert "! no token is a target" in err


@pytest.mark.parametrize(("recipe", "rows", "way"), [
    ("sft", CHATS, "use the recipe chat, which takes conversations (messages)"),
    ("sft", TEXTS, "use the recipe pretrain, which takes text (text)"),
    ("chat", PAIRS, "use the recipe sft, which takes prompts and responses (prompt + response)"),
])  # fmt: skip
def test_columns_of_another_recipe_name_that(recipe, rows, way, ran, folder):
    tp.from_dataset(rows).write_parquet(folder / "rows")
    code, _, err = ran("run", recipe, "--files", "rows", "--tokenizer", "bytes")
    assert code == 1
    assert way in err
