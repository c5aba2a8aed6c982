"""The training scripts of recipes on real ranks: killed and resumed, they train on one sequence."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic.test_docs_examples import TORCH_ABORTS
from launch import Launch
from recipes.test_speech import small_ears
from trainpipes_recipes import demo, samples
from trainpipes_recipes.demo import Step, log_steps, read_log

EVERY, STEPS = 5, 60


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    prompts = [f"count to {i}:" for i in range(150)]
    responses = ["".join(f" {k}" for k in range(i % 11 + 1)) for i in range(150)]
    texts = [a + b for a, b in zip(prompts, responses, strict=True)]
    table = pa.table({"prompt": prompts, "response": responses, "text": texts})
    pq.write_table(table, path, row_group_size=20)
    samples.write_configs(path.parent)
    return path


def options(script: str, rows: Path, folder: Path, steps: int) -> list[str]:
    return [
        *("--model", str(rows.parent / "model"), "--tokenizer", "bytes"),
        *("--files", str(rows), "--output", str(folder), "--steps", str(steps), "--lr", "0.01"),
        *("--save-every", str(EVERY), "--batch-size", "4", "--max-length", "48"),
        *(["--scratch"] if script == "train_sft" else []),
    ]


def logs(folder: Path) -> list[list[Step]]:
    """What each of two ranks has logged."""
    return [read_log(folder / name) for name in ("log.jsonl", "log-1.jsonl")]


def in_turn(ranks: list[list[Step]]) -> list[str]:
    """The batches of ranks as one sequence."""
    return [step.batch for both in zip(*ranks, strict=True) for step in both]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("torch_as_before")
@pytest.mark.parametrize("script", ["train_sft", "train_pretrain"])
def test_a_script_killed_on_two_ranks_goes_on_on_two_and_on_one(
    script: str, rows: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    asked = options(script, rows, run, STEPS)
    killed = Launch(Path(demo.__file__), 2, tmp_path / "1", script, *asked, trains=True)
    killed.kill_when(
        lambda: (
            all((run / f).exists() for f in ("log.jsonl", "log-1.jsonl", "step-00000005.pt"))
            and all(len(steps) >= EVERY + 3 for steps in logs(run))
        )
    )
    before = logs(run)
    shutil.copytree(run, tmp_path / "one")
    saved = int(max(run.glob("step-*.pt")).stem.removeprefix("step-"))
    assert saved < STEPS - 10

    alone = tmp_path / "alone"
    log_steps(script, options(script, rows, alone, 2 * STEPS))
    whole = [step.batch for step in read_log(alone / "log.jsonl")]
    assert len(set(whole)) > STEPS

    again = Launch(Path(demo.__file__), 2, tmp_path / "2", script, *asked, trains=True)
    assert again.wait(200) == 0 or TORCH_ABORTS in again.said(), again.said()
    assert f"goes on after step {saved}" in again.said()
    after = logs(run)
    assert [[step.number for step in found] for found in after] == [[*range(1, STEPS + 1)]] * 2
    assert in_turn(after) == whole[: 2 * STEPS]
    for had, has in zip(before, after, strict=True):  # losses too, of steps that were made twice
        assert len(had) >= saved
        assert has[: len(had)] == had

    log_steps(script, options(script, rows, tmp_path / "one", STEPS))
    found = read_log(tmp_path / "one" / "log.jsonl")
    assert [step.number for step in found] == [*range(1, STEPS + 1)]
    assert [step.batch for step in found[saved:]] == whole[2 * saved :][: STEPS - saved]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    samples.write_samples(folder, every=40)
    small_ears(layerdrop=0.5).save_pretrained(folder / "drops")
    return folder


def trained(data: Path, folder: Path, script: str, ranks: int, *options: str) -> list[list[Step]]:
    """What ranks log that train on few rows at a time."""
    given = {
        "train_vision": f"--scratch --model {data}/sight --processor {data}/processor --max-length 128 "
        f"--files {data}/scenes.jsonl --steps 6",
        "train_speech": f"--ctc --scratch --model {data}/drops --files {data}/speech.jsonl --steps 20 "
        "--max-seconds 1 --tokenizer characters:ab",
    }[script].split()
    given += ["--batch-size", "1", "--lr", "0.01", "--output", str(folder), *options]
    if ranks == 1:
        log_steps(script, given)
        return [read_log(folder / "log.jsonl")]
    launch = Launch(Path(demo.__file__), ranks, folder / "said", script, *given, trains=True)
    assert launch.wait(200) == 0 or TORCH_ABORTS in launch.said(), launch.said()
    return logs(folder)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("torch_as_before")
@pytest.mark.filterwarnings("ignore:.*no target:UserWarning")
def test_a_rank_whose_rows_have_no_pictures_trains_as_one_process_does(
    data: Path, tmp_path: Path
) -> None:
    two = trained(data, tmp_path / "two", "train_vision", 2, "--accumulate", "2")
    (one,) = trained(data, tmp_path / "one", "train_vision", 1, "--accumulate", "4")
    assert [step.number for step in one] == [*range(1, 7)]
    for whole, *parts in zip(one, *two, strict=True):
        assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("torch_as_before")
def test_ranks_may_drop_other_layers(data: Path, tmp_path: Path) -> None:
    for steps in trained(data, tmp_path / "run", "train_speech", 2):
        assert [step.number for step in steps] == [*range(1, 21)]
        assert all(math.isfinite(step.loss) for step in steps)
