"""``trainpipes state``: what it prints of a checkpoint."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from layouts import of_ranks, save, state


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


def test_json_has_names_that_stay(folder, ran):
    code, out, err = ran("state", "--json", "checkpoint.pt")
    assert (code, err) == (0, "")
    (one,) = json.loads(out)
    assert set(one) == {
        "where", "problem", "format", "epoch", "batches", "shards", "num_shards", "stages"
    }  # fmt: skip
    assert (one["where"], one["problem"]) == ('checkpoint.pt ["loader"]', None)


def test_states_of_ranks_are_told_with_what_is_theirs(tmp_path, ran):
    path = save(of_ranks(2), tmp_path / "ranks.pt", "torch")
    code, out, _ = ran("state", path)
    assert code == 0
    told = " ".join(out.split())
    assert told.count("6 batches of all ranks done, for 6 of 12 shards") == 2


def test_one_that_is_damaged_is_told_beside_the_others(tmp_path, ran):
    good = state()
    path = save({"a": {**good, "batches": 3}, "b": good}, tmp_path / "x.json", "json")
    code, out, err = ran("state", path)
    assert code == 0
    assert out.startswith(f'{path} ["b"]\n')
    assert 'x.json ["a"]: pipeline: its checksum does not fit' in err
    path = save({"a": {**good, "batches": 3}}, tmp_path / "y.json", "json")
    code, out, _ = ran("state", path, "--json")
    assert code == 1
    assert json.loads(out)[0]["problem"].startswith("pipeline: its checksum")


@pytest.mark.parametrize(
    ("path", "why"), [("nothing.pt", "is not there"), ("evil.pt", "whose code could run")]
)
def test_what_is_no_checkpoint_is_one_sentence(path, why, folder, ran):
    torch.save({"trainpipes": Path}, "evil.pt")
    for more in ([], ["--json"]):
        code, out, err = ran("state", path, *more)
        assert (code, out) == (1, "")
        assert why in err
        assert err.count("\n") == 1


def test_a_name_cannot_change_the_terminal(tmp_path, ran):
    path = save({"\x1b[2J": state()}, tmp_path / "a\x1b[1mb.json", "json")
    _, out, _ = ran("state", path)
    assert "\x1b" not in out
