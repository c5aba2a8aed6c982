"""``trainpipes state``: what it prints of a checkpoint, and whether that would load."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from layouts import of_ranks, save, state
from trainpipes.cli.app import run

RECIPE = ["--recipe", "sft", "--files", "sums.parquet", "--tokenizer", "bytes"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with data and a checkpoint of the recipe sft."""
    rows = {"prompt": [f"{i} +" for i in range(200)], "response": [f"{i}" for i in range(200)]}
    pq.write_table(pa.table(rows), tmp_path / "sums.parquet", row_group_size=50)
    monkeypatch.chdir(tmp_path)
    loader = tp.Loader(tp.recipe("sft", "sums.parquet", tokenizer="bytes"))
    list(islice(loader, 10))
    torch.save({"model": {"w": torch.ones(9)}, "loader": loader.state_dict()}, "checkpoint.pt")
    return tmp_path


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run(["state", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_json_has_names_that_stay(folder, capsys):
    code, out, err = said(capsys, "--json", "checkpoint.pt")
    assert (code, err) == (0, "")
    (one,) = json.loads(out)
    assert set(one) == {
        "where", "problem", "format", "epoch", "batches", "shards", "num_shards", "stages"
    }  # fmt: skip
    assert (one["where"], one["problem"]) == ('checkpoint.pt ["loader"]', None)
    code, out, err = said(capsys, "checkpoint.pt", *RECIPE, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == [{"where": 'checkpoint.pt ["loader"]', "problem": None, "share": 0.4}]


def test_states_of_ranks_are_told_with_what_is_theirs(tmp_path, capsys):
    path = save(of_ranks(2), tmp_path / "ranks.pt", "torch")
    code, out, _ = said(capsys, str(path))
    assert code == 0
    told = " ".join(out.split())
    assert told.count("6 batches of all ranks done, for 6 of 12 shards") == 2


def test_one_that_is_damaged_is_told_beside_the_others(tmp_path, capsys):
    good = state()
    path = save({"a": {**good, "batches": 3}, "b": good}, tmp_path / "x.json", "json")
    code, out, err = said(capsys, str(path))
    assert code == 0
    assert out.startswith(f'{path} ["b"]\n')
    assert 'x.json ["a"]: pipeline: its checksum does not fit' in err
    path = save({"a": {**good, "batches": 3}}, tmp_path / "y.json", "json")
    code, out, _ = said(capsys, str(path), "--json")
    assert code == 1
    assert json.loads(out)[0]["problem"].startswith("pipeline: its checksum")


@pytest.mark.parametrize(
    ("path", "why"), [("nothing.pt", "is not there"), ("evil.pt", "whose code could run")]
)
def test_what_is_no_checkpoint_is_one_sentence(path, why, folder, capsys):
    torch.save({"trainpipes": Path}, "evil.pt")
    for more in ([], ["--json"], RECIPE):
        code, out, err = said(capsys, path, *more)
        assert (code, out) == (1, "")
        assert why in err
        assert err.count("\n") == 1


def test_a_name_cannot_change_the_terminal(tmp_path, capsys):
    path = save({"\x1b[2J": state()}, tmp_path / "a\x1b[1mb.json", "json")
    _, out, _ = said(capsys, str(path))
    assert "\x1b" not in out


# Whether it would load


def test_it_loads_into_its_config(folder, capsys):
    Path("train.yaml").write_text(
        "recipe: sft\noptions:\n  files: sums.parquet\n  tokenizer: bytes\n  batch_size: 8\n"
    )
    assert said(capsys, "checkpoint.pt", "--config", "train.yaml")[0] == 0
    more = ["--set", "options.batch_size=16"]
    code, _, err = said(capsys, "checkpoint.pt", "--config", "train.yaml", *more)
    assert code == 1
    assert "stages/batch/batch_size: saved 8, now 16" in err
    more += ["--allow-changes", "batch_size"]
    assert said(capsys, "checkpoint.pt", "--config", "train.yaml", *more)[0] == 0


@pytest.mark.parametrize(("more", "why"), [
    (["--option", "batch_size=16"], "stages/batch/batch_size: saved 8, now 16"),
    (["--option", "seed=7"], "stages/shuffle/seed: saved 0, now 7"),
    (["--option", "batch-sise=16"], "has no option 'batch_sise' (did you mean 'batch_size'?)"),
    (["--allow-changes", "everything", "--option", "seed=1"], "everything"),
])  # fmt: skip
def test_why_it_would_not_load(more, why, folder, capsys):
    code, out, err = said(capsys, "checkpoint.pt", *RECIPE, *more)
    assert (code, out) == (1, "")
    assert why in err
    code, out, err = said(capsys, "checkpoint.pt", *RECIPE, *more, "--json")
    assert code == 1
    if out:
        (one,) = json.loads(out)
        assert why in one["problem"]


def test_files_of_all_ranks_are_one(folder, capsys):
    os.remove("checkpoint.pt")
    recipe = ["--recipe", "pretrain", "--files", "sums.parquet", "--tokenizer", "bytes"]
    recipe += ["--option", "text=prompt", "--option", "max_length=16"]
    pipe = tp.recipe("pretrain", "sums.parquet", tokenizer="bytes", text="prompt", max_length=16)
    for rank in range(2):
        own = pipe.distributed(rank=rank, world_size=2)
        save(state(own, 3), folder / f"rank-{rank}.pt", "torch")
    code, out, err = said(capsys, ".", *recipe, "--world-size", "3")
    assert (code, err) == (0, "")
    assert out == "rank-0.pt and rank-1.pt\nloads on  3 ranks\n"
    code, _, err = said(capsys, "rank-1.pt", *recipe, "--world-size", "3")
    assert code == 1
    assert "the states of all ranks" in err


def test_what_is_of_a_pipeline_needs_one(folder, capsys):
    for asked in (["--world-size", "5"], ["--allow-changes", "batch_size"]):
        code, out, err = said(capsys, "checkpoint.pt", *asked)
        assert (code, out) == (2, "")
        assert "need --recipe or --config" in err


def test_each_of_several_states_is_tried(folder, capsys):
    train = torch.load("checkpoint.pt", weights_only=True)["loader"]
    torch.save({"train": train, "val": state()}, "both.pt")
    code, out, err = said(capsys, "both.pt", *RECIPE)
    assert code == 0, "one of them loads"
    assert out.startswith('both.pt ["train"]\nloads on  1 rank')
    assert 'both.pt ["val"]: stages: saved' in err
