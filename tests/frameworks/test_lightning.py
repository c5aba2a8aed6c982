"""Lightning: pipelines by ``PipelineDataModule``, resumed by Lightning's own checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("lightning")

from frameworks.lightning_runs import after_epochs, after_steps, evaluations, fails_on, fits, script
from frameworks.ranks import Ranks, run
from frameworks.steps import digests_by_step, in_order

#: On 2 ranks, an epoch of the counted kinds has 6 steps for each.
KINDS = ["counted", "filtered", "repeated", "packed"]
SAVES = (after_steps, after_epochs)


def limits(kind: str) -> dict[str, Any]:
    """How long a run is: three epochs, or as many steps."""
    endless = kind in ("repeated", "packed")
    return {"max_steps": 18, "max_epochs": -1} if endless else {"max_epochs": 3}


def rest(
    folder: Path, whole: list[dict[tuple[int, int], list[str]]]
) -> list[dict[tuple[int, int], list[str]]]:
    """What a run trained on, which is the end of a whole run, on each rank."""
    got = digests_by_step(folder)
    first = min(got[0])
    assert got == [{key: of[key] for key in sorted(of) if key >= first} for of in whole]
    return got


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("killed_after", [3, 8])
def test_a_killed_run_goes_on_with_the_batch_that_would_have_come(
    tmp_path: Path, kind: str, killed_after: int
) -> None:
    whole, killed, resumed = (tmp_path / name for name in ("whole", "killed", "resumed"))
    run(fits, 2, tmp_path / "a", [(whole, kind, limits(kind))])
    ranks = Ranks(
        fits, 2, tmp_path / "b", [(killed, kind, {**limits(kind), "saves": [after_steps]})]
    )
    saved = killed / "checkpoints" / f"step-{killed_after}.ckpt"
    ranks.kill_when(
        lambda: saved.exists() and all(len(of) > killed_after + 1 for of in digests_by_step(killed))
    )
    told = {**limits(kind), "checkpoint": str(saved)}
    run(fits, 2, tmp_path / "c", [(resumed, kind, told)])

    expected = digests_by_step(whole)
    assert [len(of) for of in expected] == [18, 18]
    for of, at in zip(digests_by_step(killed), expected, strict=True):
        assert of.items() <= at.items()
    assert min(rest(resumed, expected)[0])[1] == killed_after


def test_a_checkpoint_of_two_ranks_goes_on_at_every_step_on_one_and_on_two(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run(fits, 2, tmp_path / "a", [(whole, "counted", {"max_epochs": 3, "saves": SAVES})])
    expected = digests_by_step(whole)
    sequence = [content for epoch in range(3) for content in in_order(expected, epoch)]
    assert len(set(sequence)) == len(sequence) == 36
    names = ["step-2", "step-6", "end-6", "step-7", "step-12", "end-12", "step-17"]
    for ranks in (1, 2):
        saved = {name: str(whole / f"checkpoints/{name}.ckpt") for name in names}
        runs = [
            (tmp_path / f"{name}-on-{ranks}", "counted", {"checkpoint": path})
            for name, path in saved.items()
        ]
        run(fits, ranks, tmp_path / f"on-{ranks}", runs)
        for (folder, _, _), name in zip(runs, names, strict=True):
            got = digests_by_step(folder)
            epochs = sorted({epoch for epoch, _ in got[0]})
            again = [content for epoch in epochs for content in in_order(got, epoch)]
            assert again == sequence[2 * int(name.partition("-")[2]) :], name
            if ranks == 2:
                rest(folder, expected)


def test_a_rank_that_fails_alone_is_told_that_it_cannot_save(tmp_path: Path) -> None:
    ranks = Ranks(fails_on, 2, tmp_path / "a", tmp_path / "run", "packed", [0], 2.0)
    said = tmp_path / "a" / "returned-00"
    # The other one waits for its gradients.
    ranks.kill_when(lambda: said.exists() and said.read_text() != "")
    told = said.read_text()
    assert "StateError: no checkpoint was saved on this exception" in told
    assert "rank 1 did not ask within 2 s" in told
    assert "resume from the last one that all ranks have saved" in told
    assert "| a bad batch" in told


@pytest.mark.parametrize("kind", ["counted", "packed"])
def test_where_all_ranks_fail_the_checkpoint_goes_on_with_the_batch_that_failed(
    tmp_path: Path, kind: str
) -> None:
    told = run(fails_on, 2, tmp_path / "a", tmp_path / "failed", kind, [0, 1], 30.0)
    assert told == ["RuntimeError: a bad batch | None"] * 2
    at = str(tmp_path / "failed/checkpoints/on_exception.ckpt")
    runs = [
        (tmp_path / "whole", kind, limits(kind)),
        (tmp_path / "resumed", kind, {**limits(kind), "checkpoint": at}),
    ]
    run(fits, 2, tmp_path / "b", runs)
    expected = digests_by_step(tmp_path / "whole")
    for got, of in zip(digests_by_step(tmp_path / "resumed"), expected, strict=True):
        contents = [content for _, content in sorted(of.items())]
        assert [content for _, content in sorted(got.items())] == contents[4:]


def test_every_row_is_evaluated_once_and_each_pass_is_the_same(tmp_path: Path) -> None:
    told = run(evaluations, 2, tmp_path / "a", tmp_path / "run", {"tail": "uneven"})
    rows = list(range(17))
    assert [passes for passes, *_ in told] == [[True, True]] * 2
    for which in (1, 2):  # validated and tested
        logged, evaluated = zip(*(of_rank[which] for of_rank in told), strict=True)
        assert [len(batches) for batches in evaluated] == [3, 2]
        assert sorted(row for batches in evaluated for batch in batches for row in batch) == rows
        assert list(logged) == [{"rows": 17.0, "total": 136.0}] * 2
    assert sorted(row for *_, predicted in told for batch in predicted for row in batch) == rows


def test_the_script_of_the_docs_is_killed_and_goes_on_with_another_number_of_devices(
    tmp_path: Path,
) -> None:
    rows = pa.table({"text": [f"row {i} " + "x" * (i % 9) for i in range(96)]})
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=20)
    pq.write_table(rows.slice(0, 21), tmp_path / "held-out.parquet")

    def arguments(checkpoints: str, devices: int) -> list[str]:
        return [
            *("--files", str(tmp_path / "rows.parquet")),
            *("--held-out", str(tmp_path / "held-out.parquet")),
            *("--checkpoints", str(tmp_path / checkpoints)),
            *("--devices", str(devices)),
        ]

    whole, killed, resumed = (tmp_path / name for name in ("whole", "killed", "resumed"))
    run(script, 1, tmp_path / "a", whole, arguments("other", 1))
    ranks = Ranks(script, 2, tmp_path / "b", killed, arguments("saved", 2))
    ranks.kill_when(lambda: [len(of) > 15 for of in digests_by_step(killed)] == [True] * 2)
    run(script, 1, tmp_path / "c", resumed, arguments("saved", 1))

    (expected,), (got,) = digests_by_step(whole), digests_by_step(resumed)
    sequence = [content for _, (content,) in sorted(expected.items())]
    rest = [content for _, (content,) in sorted(got.items())]
    assert rest == sequence[len(sequence) - len(rest) :]
    assert in_order(digests_by_step(killed), 0) == sequence[:24]
    assert 0 < len(rest) < len(sequence) - 24
