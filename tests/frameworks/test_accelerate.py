"""Accelerate, with the loader that is made for it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, product
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from frameworks.ranks import Ranks, run
from frameworks.steps import digests_by_step, in_order
from trainpipes.testing import digest

pytest.importorskip("accelerate")

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import trainpipes as tp
from frameworks import accelerate_runs as runs

KINDS = ("counted", "filtered", "packed", "repeated")
#: Optimizer steps of a run that has no end.
STEPS = 30

Found = list[dict[tuple[int, int], list[str]]]


class Whole:
    """An uninterrupted run on two ranks, with a checkpoint after each optimizer step."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.options: dict[str, Any] = {"epochs": 1, "steps": STEPS} if kind == "repeated" else {}
        self.saved = folder / "saved"
        self.synced = train(folder, 2, kind, **self.options)
        self.trained_on = digests_by_step(folder / "log")
        #: Optimizer steps of the first epoch.
        self.first = 1 + max(step for epoch, step in self.trained_on[0] if epoch == 0)


def train(folder: Path, ranks: int, kind: str, **options: Any) -> list[bool]:
    """What every rank said alike of its batches: whether each was the last of a step."""
    arguments = str(folder / "saved"), str(folder / "log"), kind
    said = run(_train, ranks, folder / "ranks", arguments, options)
    assert all(one == said[0] for one in said), "ranks step together"
    return said[0]


def _train(arguments: tuple[str, str, str], options: dict[str, Any]) -> list[bool]:
    return runs.train(*arguments, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    made: dict[str, Whole] = {}

    def of(kind: str) -> Whole:
        if kind not in made:
            made[kind] = Whole(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return of


def from_step(found: Found, step: int) -> Found:
    return [{key: had for key, had in rank.items() if key[1] >= step} for rank in found]


def sequence(kind: str, epoch: int = 0) -> list[str]:
    """The digests of an epoch's micro-batches, in the order of m; of an endless one, of the first few."""
    pipe = runs.pipeline(kind)
    for _ in range(epoch):
        next(iter(pipe))
    return [digest(batch["input_ids"]) for batch in islice(pipe, 10 * STEPS)]


def position(checkpoint: Path) -> tuple[int, int]:
    state = torch.load(checkpoint / "custom_checkpoint_0.pkl", weights_only=True)
    return state["epoch"], state["batches"]


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *product(("counted",), ("in epoch 0", "at its end", "at its start", "in epoch 1")),
        *product(("filtered",), ("at its end", "in epoch 1")),
        ("packed", "in epoch 1"),
        ("repeated", "in epoch 0"),
    ],
)
def test_a_run_that_is_killed_goes_on_with_the_same_batches(
    kind: str, where: str, whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    full = whole(kind)
    step = {"in epoch 0": 3, "at its end": full.first, "at its start": full.first + 1}.get(
        where, full.first + 4
    )
    saved = tmp_path / "killed" / "saved"
    endless = {"epochs": 1, "steps": 1000} if kind == "repeated" else {"epochs": 50}
    victim = Ranks(
        _train,
        2,
        tmp_path / "ranks",
        (str(saved), str(tmp_path / "killed" / "log"), kind),
        {**endless, "pause": 0.03},
    )
    victim.kill_when(lambda: (saved / f"step-{step + 2}").exists())
    before = digests_by_step(tmp_path / "killed" / "log")
    assert max(key[1] for key in before[0]) > step, "it had gone on"

    resume = str(saved / f"step-{step}")
    synced = train(tmp_path / "resumed", 2, kind, resume=resume, **full.options)
    assert digests_by_step(tmp_path / "resumed" / "log") == from_step(full.trained_on, step)
    assert synced == full.synced[-len(synced) :]


def test_a_short_accumulation_at_the_end_is_stepped_also_after_a_resume(tmp_path: Path) -> None:
    for kind in ("counted", "filtered"):
        folder = tmp_path / kind
        synced = train(folder, 2, kind, accumulate=4)
        count = len(synced) // 2
        epoch = [number % 4 == 0 or number == count for number in range(1, count + 1)]
        assert synced == epoch * 2
        assert count % 4, "the last one is short"
        for step in (1, count // 4):
            resume = str(folder / "saved" / f"step-{step}")
            again = train(tmp_path / f"{kind}-{step}", 2, kind, accumulate=4, resume=resume)
            assert again == synced[4 * step :]


@pytest.mark.parametrize(
    ("kind", "epoch"), [*((kind, 0) for kind in KINDS), ("counted", 1), ("filtered", 1)]
)
def test_two_ranks_go_on_as_one(
    kind: str, epoch: int, whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    full = whole(kind)
    checkpoint = full.saved / f"step-{3 if epoch == 0 else full.first + 4}"
    saved_epoch, m = position(checkpoint)
    assert (saved_epoch, m % 2) == (epoch, 0)
    train(tmp_path, 1, kind, resume=str(checkpoint), **full.options)
    (found,) = digests_by_step(tmp_path / "log")
    rest = in_order([found], epoch)
    had = in_order(full.trained_on, epoch)[:m]
    expected = sequence(kind, epoch)
    # Of an epoch that ends, all that was left: every row once.
    assert had + rest == (expected[: m + len(rest)] if kind == "repeated" else expected)
    assert rest


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_goes_on_as_two(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate": 1, "epochs": 1, "steps": STEPS}
    train(tmp_path / "one", 1, kind, **options)
    checkpoint = tmp_path / "one" / "saved" / "step-5"
    assert position(checkpoint) == (0, 5)
    train(tmp_path / "two", 2, kind, resume=str(checkpoint), **options)
    first, second = digests_by_step(tmp_path / "two" / "log")
    rest = in_order([second, first], 0)  # number 5 is the second rank's
    expected = sequence(kind)[5:]
    assert rest == expected[: len(rest)]
    if kind != "repeated":  # what no longer makes a step of both is left out
        assert len(expected) - len(rest) < (2 if kind == "counted" else 8)


def test_metrics_have_every_row_once(tmp_path: Path) -> None:
    sizes = (101, 96, 100, 7, 4, 3, 1)
    cases = [(rows, 4, 0) for rows in sizes] + [(101, 4, 2), (9, 1, 0), (5, 100, 0)]
    ranks = run(runs.evaluated, 2, tmp_path / "ranks", cases)
    for number, (rows, batch_size, _) in enumerate(cases):
        for found in (rank[number] for rank in ranks):
            steps = ceil(ceil(rows / batch_size) / 2)
            assert found["len"] == steps
            assert len(found["passes"]) == 2
            for epoch, one in enumerate(found["passes"]):
                assert sorted(one["rows"]) == list(range(rows)), f"{rows} rows"
                assert one["names"] == [f"row {row}" for row in one["rows"]]
                assert len(one["sizes"]) == steps
                assert one["last"] == [[epoch + 1, 0]]
            # The evaluation within it changes nothing for the training around it.
            assert found["synced"] == [False, True, False, True, True]
            assert not found["in"]
        both = [rank[number]["passes"][0]["sizes"] for rank in ranks]
        assert both[0] == both[1], "ranks gather as many rows"


def test_without_even_batches_ranks_end_apart(tmp_path: Path) -> None:
    first, second = run(runs.apart, 2, tmp_path / "ranks")
    assert (first["sizes"], second["sizes"]) == ([4, 4, 2], [4, 4])
    assert (first["len"], second["len"]) == (3, 2)
    assert first["even sizes"] == second["even sizes"] == [4, 4, 2]


def test_an_evaluation_does_not_drop_the_wrong_rows(tmp_path: Path) -> None:
    for told in run(runs.half_way, 2, tmp_path / "ranks", ""):
        assert "start it anew" in told


def test_all_ranks_write_the_same_bytes(tmp_path: Path) -> None:
    for rank in run(runs.same_bytes, 2, tmp_path / "ranks", str(tmp_path)):
        assert rank[0] == rank[1]


def test_bad_uses_are_told_what_to_write(tmp_path: Path) -> None:
    for told in run(runs.bad_uses, 2, tmp_path / "ranks", str(tmp_path)):
        for name, parts in {
            "batches, dispatch None": [
                "DataLoaderDispatcher shares out rows among 2 ranks",
                "batch(4)",
            ],
            "batches, dispatch True": ["DataLoaderDispatcher shares out rows among 2 ranks"],
            "batches, dispatch False": ["IterableDatasetShard shares out rows among 2 ranks"],
            "prepare_data_loader of a pipeline": ["DataLoaderDispatcher shares out rows"],
            "skip_first_batches": ["skip_first_batches()", "leave these out"],
            "prepare_data_loader": ["prepare_data_loader()", "leave these out"],
            "no accelerator": ["must be an accelerate.Accelerator, got 2; write loader(pipe, acc"],
            "split_batches": [".batch(n // 2)"],
            "uncounted": ["counted in advance", "even_batches=False"],
            "no rows": ["pad_collate()"],
            "single rows": ["got single rows", ".batch(32).pad_collate()"],
        }.items():
            for part in parts:
                assert part in told[name], name
            if name.startswith(("batches", "prepare_data_loader of")):
                assert "loader(pipe, accelerator)" in told[name]


def test_ranks_that_are_not_the_processes_are_refused(tmp_path: Path) -> None:
    for told in run(runs.other_ranks, 2, tmp_path / "ranks"):
        assert "write loader(pipe.distributed(rank=0, world_size=1), accelerator)" in told[0]
        assert "got 2 ranks and 1 replicas" in told[2]
        assert "pipe.distributed(rank=..., world_size=...)" in told[2]
        assert told[1::2] == ["38", "38"]


def test_batches_come_where_the_accelerator_says(tmp_path: Path) -> None:
    (found,) = run(runs.sent, 1, tmp_path / "ranks")
    on, off = [0, 1, "cpu", False], [0, 1]
    assert found == [on, [0, 1, "cpu", True], off]


def test_prepare_leaves_it_as_it_is_and_another_number_of_loaders_is_refused(
    tmp_path: Path,
) -> None:
    for found in run(runs.kept, 2, tmp_path / "ranks", str(tmp_path / "saved")):
        assert found["same"]
        assert found["len"] == [19, 3, 19]
        assert found["epochs"] == [True, False]
        assert found["left"] == [False, 1]
        assert "does not match the number of registered objects" in found["fewer"]


def test_another_batch_size_goes_on_if_allowed(
    whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    resume = str(whole("counted").saved / "step-3")
    with pytest.raises(AssertionError, match="stages/batch/batch_size: saved 4, now 2"):
        train(tmp_path / "refused", 2, "counted", resume=resume, batch_size=2)
    allowed = {"batch_size": 2, "allow_changes": ("batch_size",)}
    synced = train(tmp_path / "allowed", 2, "counted", resume=resume, epochs=1, **allowed)
    assert len(synced) == (runs.ROWS - 12 * 4) // 2 // 2


def example(folder: Path, ranks: int, name: str, *, kill_at: int | None = None) -> list[list[str]]:
    """Run the script of the docs; the digests that each rank trained on."""
    log = folder / name
    files = ("--train", str(folder / "train.parquet"), "--valid", str(folder / "valid.parquet"))
    saved = folder / "run"
    started = Ranks(
        runs.example, ranks, folder / f"{name}-ranks", str(log), *files, "--folder", str(saved)
    )
    if kill_at is None:
        started.wait()
        assert (folder / f"{name}-ranks" / "rank-0.txt").read_text().count("of 37 rows") >= 1
    else:
        started.kill_when(lambda: (saved / f"step-{kill_at:08}").exists())
    return [had[0, 0] for had in digests_by_step(log)]


def test_the_script_of_the_docs_is_killed_and_goes_on_on_other_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    for name, rows in (("train", 160), ("valid", 37)):
        texts = [f"{name} {row} " + "and more " * (row % 7) for row in range(rows)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet", row_group_size=20)
    dealt = tp.list_files(tmp_path / "train.parquet").read_parquet().sharding_filter(24)
    pipe = dealt.shuffle(10_000, seed=0).tokenize("bytes").batch(4).pad_collate(max_length=64)
    expected = [digest(batch["input_ids"]) for _ in range(2) for batch in pipe]

    def position() -> int:
        last = sorted((tmp_path / "run").glob("step-*"))[-1]
        state = torch.load(last / "custom_checkpoint_0.pkl", weights_only=True)
        return 40 * state["epoch"] + state["batches"]

    first = example(tmp_path, 2, "first", kill_at=3)
    m = position()
    assert 24 <= m < 40, "in epoch 0"
    assert [d for turn in zip(*first, strict=False) for d in turn][:m] == expected[:m]
    second = example(tmp_path, 2, "second", kill_at=7)
    then = position()
    assert 56 <= then < 80, "in epoch 1"
    turns = [d for turn in zip(*second, strict=False) for d in turn]
    assert turns[: then - m] == expected[m:then]
    (third,) = example(tmp_path, 1, "third")
    assert third == expected[then:]


def test_batches_are_filled_up_with_their_own_rows() -> None:
    from trainpipes.integrations.accelerate import _filled, _rows_in

    pair = [torch.arange(2), torch.arange(4).reshape(2, 2)]
    assert [part.tolist() for part in _filled(pair, 3)] == [[0, 1, 0], [[0, 1], [2, 3], [0, 1]]]
    assert _filled([{"x": 1}, {"x": 2}], 5) == [{"x": 1}, {"x": 2}, {"x": 1}, {"x": 2}, {"x": 1}]
    batch = {"x": torch.arange(2), "names": ["a", "b"], "scale": torch.tensor(3.0), "of": ("y", 1)}
    assert _rows_in(batch) == 2
    more = _filled(batch, 4)
    assert (more["x"].tolist(), more["names"]) == ([0, 1, 0, 1], ["a", "b", "a", "b"])
    assert (more["scale"], more["of"]) == (batch["scale"], ("y", 1))
    with pytest.raises(tp.ConfigError, match=r"lists of rows, got \{'x'"):
        _rows_in({"x": torch.tensor(1.0)})
