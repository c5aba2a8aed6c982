"""Lightning: pipelines by ``PipelineDataModule``, resumed by Lightning's own checkpoints."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("lightning")

from frameworks import lightning_runs as runs
from frameworks.ranks import Ranks, run
from frameworks.runs import (
    Start,
    check_global_batches,
    check_resumes,
    finish,
    in_order,
    pipeline,
    plain,
)  # fmt: skip

#: Steps of a run on 2 ranks. An epoch of the counted kinds has 6.
KINDS = {"counted": 18, "filtered": 17, "repeated": 18, "packed repeated": 18}
#: Checkpoints of the first: within epochs, at their ends and starts, and as Lightning saves by itself.
NAMES = [2, 6, "end-6", 7, 12, "end-12", 17]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    names = NAMES if kind == "counted" else []
    found = check_resumes(
        runs.train, tmp_path, kind, every=3, holds=(5, 10), at=names, moved=names,
        expected=plain(pipeline(kind, 8)), ends=kind == "counted",
    )  # fmt: skip
    assert [len(rank) for rank in found["whole"].notes()] == [KINDS[kind]] * 2


def test_global_batches_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    check_global_batches(runs.train, tmp_path, ["counted", "filtered"])


def test_a_rank_that_fails_alone_is_told_that_it_cannot_save(tmp_path: Path) -> None:
    kind, folder = "packed repeated", tmp_path / "a"
    ranks = Ranks(runs.fails_on, 2, folder, tmp_path / "run", kind, [0], 2.0)
    said = folder / "returned-00"
    # The other one waits for its gradients.
    ranks.kill_when(lambda: said.exists() and said.read_text() != "")
    told = said.read_text()
    assert "StateError: no checkpoint was saved on this exception" in told
    assert "rank 1 did not ask within 2 s" in told
    assert "resume from the last one that all ranks have saved" in told
    assert "| a bad batch" in told


@pytest.mark.parametrize("kind", ["counted", "packed repeated"])
def test_where_all_ranks_fail_the_checkpoint_goes_on_with_the_batch_that_failed(
    tmp_path: Path, kind: str
) -> None:
    told = run(runs.fails_on, 2, tmp_path / "a", tmp_path / "failed", kind, [0, 1], 30.0)
    assert told == ["RuntimeError: a bad batch | None"] * 2
    whole = Start(tmp_path / "whole", tmp_path / "saved", kind)
    saved = tmp_path / "failed" / "checkpoints"
    resumed = Start(tmp_path / "resumed", saved, kind, resume="on_exception")
    finish(runs.train, 2, whole, resumed)
    for got, of in zip(resumed.notes(), whole.notes(), strict=True):
        contents = [content for _, content in sorted(of.items())]
        assert [content for _, content in sorted(got.items())] == contents[4:]


def test_every_row_is_evaluated_once_and_each_pass_is_the_same(tmp_path: Path) -> None:
    told = run(runs.evaluations, 2, tmp_path / "a", tmp_path / "run", {"tail": "uneven"})
    rows = list(range(17))
    assert [passes for passes, *_ in told] == [[True, True]] * 2
    for which in (1, 2):  # validated and tested
        logged, evaluated = zip(*(of_rank[which] for of_rank in told), strict=True)
        assert [len(batches) for batches in evaluated] == [3, 2]
        assert sorted(row for batches in evaluated for batch in batches for row in batch) == rows
        assert list(logged) == [{"rows": 17.0, "total": 136.0}] * 2
    assert sorted(row for *_, predicted in told for batch in predicted for row in batch) == rows


def test_ranks_that_share_a_model_read_the_same_rows_or_are_told_how(tmp_path: Path) -> None:
    told = run(runs.in_parts, 4, tmp_path / "a", tmp_path / "run")
    for rank, (train, val, (trained, evaluated), same) in enumerate(told):
        for error, stage, ranks in ((train, "train", 4), (val, "val", 4), (same, "train", 1)):
            place = f"got rank {rank % ranks} of {ranks} where the strategy has replica {rank // 2} of 2"
            assert f"PipelineDataModule({stage})" in error
            assert place in error
            assert (
                f'self.{stage} = pipe.distributed(mesh=self.trainer.strategy.device_mesh["data_'
                in error
            )
        assert len(trained) == 6
        assert trained == told[rank // 2 * 2][2][0] != told[(rank + 2) % 4][2][0]
        assert len(evaluated) == 5


def test_the_script_of_the_docs_is_killed_and_goes_on_with_another_number_of_devices(
    tmp_path: Path,
) -> None:
    rows = pa.table({"text": [f"row {i} " + "x" * (i % 9) for i in range(96)]})
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=20)
    pq.write_table(rows.slice(0, 21), tmp_path / "held-out.parquet")

    def started(name: str, saved: str, devices: int) -> tuple[Start, Ranks]:
        start = Start(tmp_path / name, tmp_path / saved)
        arguments = [f"--files={tmp_path}/rows.parquet", f"--held-out={tmp_path}/held-out.parquet"]
        arguments += [f"--checkpoints={start.saved}", f"--devices={devices}"]
        return start, Ranks(runs.script, devices, tmp_path / f"{name} ranks", start, arguments)

    whole, ranks = started("whole", "other", 1)
    ranks.wait()
    killed, ranks = started("killed", "saved", 2)
    ranks.kill_when(lambda: [len(of) > 15 for of in killed.notes()] == [True] * 2)
    resumed, ranks = started("resumed", "saved", 1)
    ranks.wait()
    sequence, rest = [
        list(chain.from_iterable(in_order(start.notes(), epoch) for epoch in range(3)))
        for start in (whole, resumed)
    ]
    assert rest == sequence[len(sequence) - len(rest) :]
    assert in_order(killed.notes(), 0) == sequence[:24]
    assert 0 < len(rest) < len(sequence) - 24
