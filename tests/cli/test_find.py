"""``trainpipes find``: the epoch that it looks at."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from command import Ran


def test_it_looks_at_the_epoch_of_the_checkpoint_or_at_the_first(tmp_path: Path, ran: Ran) -> None:
    pq.write_table(pa.table({"x": range(40)}), tmp_path / "a.parquet", row_group_size=10)
    pipe = tp.read_parquet(tmp_path / "a.parquet").shuffle(20, seed=0).batch(4)
    pipe.to_yaml(tmp_path / "train.yaml")
    loader = tp.Loader(pipe)
    list(loader)
    list(islice(loader, 3))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    for epoch, more in ((0, ()), (1, ("--checkpoint", tmp_path / "state.pt"))):
        code, out, _ = ran("find", tmp_path / "train.yaml", "--row", "a.parquet:7", "--json", *more)
        assert code == 0
        (found,) = json.loads(out)["found"]
        (wanted,) = tp.find(pipe, [("a.parquet", 7)], epoch=epoch)
        assert (found["epoch"], found["step"]) == (epoch, wanted.step)


def test_of_several_loaders_in_a_checkpoint_it_takes_that_of_the_pipeline(
    tmp_path: Path, ran: Ran
) -> None:
    for name in ("train", "valid"):
        pq.write_table(pa.table({"x": range(40)}), tmp_path / f"{name}.parquet", row_group_size=10)
    pipes = [tp.read_parquet(tmp_path / f"{name}.parquet").batch(4) for name in ("valid", "train")]
    pipes[1].to_yaml(tmp_path / "train.yaml")
    states = [pipe.state_at(count) for count, pipe in enumerate(pipes, start=2)]
    torch.save({"valid": states[0], "train": states[1]}, tmp_path / "state.pt")
    located = ["locate", tmp_path / "train.yaml", "--json", "--checkpoint", tmp_path / "state.pt"]
    code, out, _ = ran(*located)
    assert (code, json.loads(out)["m"]) == (0, 3)
    states[0]["batches"] += 1
    torch.save(states, tmp_path / "state.pt")
    code, _, said = ran(*located)
    assert code == 1
    assert "its checksum does not fit" in said


def test_rows_are_listed_in_a_file_also_with_a_mark_at_its_start(tmp_path: Path, ran: Ran) -> None:
    pq.write_table(pa.table({"x": range(40)}), tmp_path / "a.parquet")
    tp.read_parquet(tmp_path / "a.parquet").batch(4).to_yaml(tmp_path / "train.yaml")
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "rows.txt").write_text("a.parquet:7\r\n\r\na.parquet:39\r\n", encoding=encoding)
        code, out, _ = ran(
            "find", tmp_path / "train.yaml", "--rows", tmp_path / "rows.txt", "--json"
        )
        assert code == 0
        assert [found["step"] for found in json.loads(out)["found"]] == [1, 9]


def test_ranks_are_those_of_the_environment_as_help_says(
    tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"x": range(40)}), tmp_path / "a.parquet", row_group_size=5)
    pipe = tp.read_parquet(tmp_path / "a.parquet").sharding_filter(4).batch(4)
    pipe.to_yaml(tmp_path / "train.yaml")
    for rank, world in ((0, 1), (1, 4)):
        if world > 1:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(world))
        located = json.loads(ran("locate", tmp_path / "train.yaml", "0", "--json")[1])
        assert (located["rank"], located["world_size"]) == (rank, world)
        found = ran("find", tmp_path / "train.yaml", "--row", "a.parquet:7", "--json")[1]
        assert json.loads(found)["world_size"] == world
    for command in ("locate", "find"):
        said = " ".join(ran(command, "--help")[1].split())
        assert "WORLD_SIZE of the environment, else 1, if left out." in said
