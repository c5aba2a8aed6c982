"""The suite that compares with others still runs, and what it says is right."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from interpreters import python

pytest.importorskip("tokenizers")
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.alone import ALONE, NEEDS
from benchmarks.check import check, needed, verdict
from benchmarks.contestants import ENTRIES
from benchmarks.corpus import TINY, Data, make
from benchmarks.digest import Tally, of_ragged
from benchmarks.jobs import JOBS, job
from benchmarks.one import run
from benchmarks.promises import PROMISES
from benchmarks.report import lines
from benchmarks.suite import ROOT, Suite
from benchmarks.targets import TARGETS, Target, rates

from benchmarks import environments, storage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("benchmarks")
    make(found / "data-tiny", TINY)
    return found


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each measurement from an interpreter that has torch."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(python())} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr(environments, "python_of", lambda _, name: None if name else program)


def test_every_job_measures_what_its_table_shows(folder: Path) -> None:
    data = folder / "data-tiny"
    for name in JOBS:
        found = run(name, "ours-cache" if name == "epoch_two" else "ours", data, "tiny", 0)
        columns = {key for key, _, _ in job(name).COLUMNS} - {"memory"}
        assert columns <= found.keys(), found
        if name == "whole_epoch":
            assert found["rows"] == TINY.ids_rows
            assert found["same"] == "yes"
        if name == "resume":
            assert found["exact"] == "yes"


def test_a_contestant_that_goes_on_with_other_rows_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = folder / "data-tiny"
    run("whole_epoch", "ours", data, "tiny", 0)
    monkeypatch.setattr(ENTRIES["ours"].load(), "load", lambda self, state: None)
    assert run("resume", "ours", data, "tiny", 0)["exact"] == "no, at 10%, 50%, 90%"


def test_what_a_contestant_cannot_do_fills_its_cell(folder: Path) -> None:
    run("whole_epoch", "blog-workers", folder / "data-tiny", "tiny", 0)
    found = run("resume", "blog-workers", folder / "data-tiny", "tiny", 0)
    assert found == {"cannot": "has no state"}


@pytest.mark.usefixtures("forked")
def test_the_suite_runs_without_peers_and_writes_its_table(folder: Path) -> None:
    suite = Suite("tiny", folder, ["pretokenised"], ["ours", "blog", "grain"])
    suite.load = (0.0, 0.0, 0.0)
    suite.run()
    text = (suite.results / "results.md").read_text()
    assert "| Grain | not installed; python -m benchmarks --install |" in text
    others = "row buffer, nodes, HF, Grain"
    assert f"| pretokenised, against the fastest of {others} | >= 15.00 |" in text
    held = json.loads((suite.results / "results.json").read_text())
    ratio = TARGETS[0].ratio(held["cells"])
    assert ratio is not None
    assert f"| {ratio:.2f} |" in "\n".join(lines(held))


def test_a_target_is_met_or_missed() -> None:
    most, least = Target("", 1.0, 0.2, (), most=True), Target("", 1.0, 5.0, ())
    assert most.verdict(None) == least.verdict(None) == "not measured"
    for found, said in ((0.1, "met, stretch too"), (0.5, "met"), (2.0, "missed")):
        assert most.verdict(found) == least.verdict(1 / found) == said


def test_every_promise_is_of_figures_that_are_measured() -> None:
    jobs, alone = needed(PROMISES)
    for promise in PROMISES:
        assert promise.where.startswith("benchmarks/") or Path(ROOT, promise.where).exists()
        for name, entry, key in promise.above:
            if name in alone:
                continue
            assert entry in jobs[name], promise.what
            assert key in {column for column, _, _ in job(name).COLUMNS} | {"right"}
        others = [entry in jobs[name] for name, entry, _ in promise.below if name not in alone]
        assert any(others) or not others, promise.what


#: Those that start processes of their own.
LONG = ("even", "formats", "imports", "map_workers", "memmap", "packing", "scale", "videos")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in ALONE]
)
def test_a_measurement_beside_the_suite_has_the_figures_that_are_promised(name: str) -> None:
    if name in ("memmap", "map_workers"):
        pytest.importorskip("PIL")
    if name == "tables":
        pytest.importorskip("lance")
    if name in NEEDS:
        pytest.importorskip({"hf": "datasets"}.get(NEEDS[name], NEEDS[name]))
    found = ALONE[name](True)
    figures = [figure for promise in PROMISES for figure in (*promise.above, *promise.below)]
    promised = {key for where, _, key in figures if where == name}
    assert promised
    assert promised <= found.keys()
    assert all(value >= 0 for value in found.values())


@pytest.mark.usefixtures("forked")
def test_a_check_says_which_promises_are_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = (("whole_epoch", "ours", "state"),)
    promises = (
        Target("kept", 0.001, None, size, size, where="README.md"),
        Target("not kept", 0.001, None, size, size, most=True),
        Target("of a peer", 1, None, rates("whole_epoch", "grain")),
        Target("exact", 1, None, (("resume", "ours", "right"),)),
        Target("beside", 1e-9, None, (("samplers", "ours", "ns a row"),)),
    )
    assert check(folder, "tiny", promises) == 2
    text = (folder / "results-tiny" / "promises.md").read_text()
    assert text in capsys.readouterr().out + "\n"
    said = {line.split(" | ")[0]: line.split(" | ")[-1] for line in text.splitlines()}
    assert said["| kept"] == said["| exact"] == said["| beside"] == "ok |"
    assert said["| not kept"] == "BELOW |"
    assert said["| of a peer"] == "not measured |"
    assert "1 below what is promised, 1 not measured" in text


@pytest.mark.parametrize(
    ("found", "most", "word"),
    [
        (10.0, False, "ok"), (9.5, False, "ok, within the noise"), (9.0, False, "BELOW"),
        (10.0, True, "ok"), (10.5, True, "ok, within the noise"), (11.0, True, "BELOW"),
        (None, True, "not measured"),
    ],
)  # fmt: skip
def test_noise_is_no_broken_promise(found: float | None, most: bool, word: str) -> None:
    assert verdict(Target("", 10, None, (), most=most), found) == word


def test_digests_tell_rows_from_their_order(folder: Path) -> None:
    data = Data(folder / "data-tiny", False, 128)
    rows = pq.read_table(data.files[0]).column(0).chunk(0)
    batches = [rows.slice(0, 3).to_pylist(), rows.slice(3, 2).to_pylist()]

    def tally(order: list[list[list[int]]]) -> Tally:
        found = Tally()
        for batch in order:
            ids = pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
            mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in batch])
            found.add({"input_ids": ids, "attention_mask": mask.long()})
        return found

    forward, backward = tally(batches), tally(batches[::-1])
    assert forward.multiset == backward.multiset == f"{of_ragged(rows.slice(0, 5)):016x}"
    assert forward.sequence != backward.sequence
    other = [[row[::-1] for row in batches[0]], batches[1]]
    assert tally(other).multiset != forward.multiset
    with pytest.raises(ValueError, match="int64"):
        forward.add({"input_ids": torch.ones(2, 2)})


def test_slow_storage_takes_its_time(folder: Path) -> None:
    storage.register()
    data = Data(folder / "data-tiny", False, 128, slow=True)
    system, path = fsspec.url_to_fs(data.url)
    name = sorted(system.ls(path, detail=False))[0]
    start = time.perf_counter()
    first, last = system.cat_ranges([name, name], [0, 4], [4, 8])
    assert time.perf_counter() - start >= storage.SECONDS
    assert first == Path(name).read_bytes()[:4] == b"PAR1"
    assert last == Path(name).read_bytes()[4:8]
    assert pq.ParquetFile(system.open(name)).metadata.num_rows == TINY.ids_rows // TINY.files
