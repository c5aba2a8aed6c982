"""``train_grpo``: each prompt is trained on once an epoch, over stops and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from interpreters import pid_of, python
from torch_settings import torch_as_before
from trained import TRAINER
from trainpipes_recipes import samples, train_grpo

ROWS = 40


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    pairs = list(samples.function_pairs(every=60))
    samples.write_tokenizer(folder / "tokenizer", pairs)
    samples.write_configs(folder)
    sums = {"prompt": [f"{k} + {k} =" for k in range(ROWS)], "answer": [2 * k for k in range(ROWS)]}
    pq.write_table(pa.table(sums), folder / "sums.parquet")
    return folder


def options(data: Path, output: Path, steps: int) -> list[str]:
    return [
        "--model", f"{data}/model", "--scratch", "--tokenizer", f"{data}/tokenizer", "--files",
        f"{data}/sums.parquet", "--output", str(output), "--steps", str(steps), "--batch-size", "4",
        "--generations", "4", "--max-tokens", "4", "--save-every", "2", "--latency", "0.02",
    ]  # fmt: skip


def letters(text: str, row: Any) -> float:
    return text.count("e") + 0.01 * len(text)


def train(
    data: Path, output: Path, steps: int, *words: str, **more: Any
) -> list[tuple[int, list[Any]]]:
    """The keys of each step."""
    found: list[tuple[int, list[Any]]] = []

    def note(step: int, groups: Any, _: float) -> None:
        found.append((step, [work.key for work, *_ in groups]))

    with torch_as_before():
        torch.set_num_threads(1)
        train_grpo.main([*options(data, output, steps), *words], on_step=note, **more)
    return found


def test_a_stopped_run_goes_on_with_prompts_that_were_not_trained_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    every = train(data, output, 2, reward=letters)
    every += train(data, output, 5, reward=letters)  # 5 steps of 4 prompts of 40
    assert "goes on after step 2" in capsys.readouterr().out
    keys = [key for _, keys in every for key in keys]
    assert [step for step, _ in every] == [*range(1, 6)]
    assert len(keys) == len(set(keys)) == 20
    assert sorted(path.name for path in output.iterdir()) == [
        "model", "step-00000004.pt", "step-00000005.pt",
    ]  # fmt: skip


def test_prompts_that_are_always_answered_do_not_come_again(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: Counter[int] = Counter()

    def solved(text: str, row: Any) -> float:
        seen[row["answer"]] += 1
        return 1.0

    train(data, tmp_path / "run", 3, "--retire", reward=solved)
    assert "nothing is left to train on" in capsys.readouterr().out
    assert (tmp_path / "run" / "model").is_dir()
    assert len(seen) == ROWS
    again = [times for times in seen.values() if times > 4]
    assert len(again) <= 4 * 4 + 4  # those that were under way when the next epoch began


def test_prompts_that_cannot_be_read_end_the_run(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "sums.parquet"
    table = pa.table({"prompt": [f"{k} + {k} =" for k in range(ROWS)], "answer": range(ROWS)})
    pq.write_table(table, path, row_group_size=ROWS // 2, compression="NONE", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"30 + 30 =", b"\xff" * 9))
    with pytest.raises(tp.UnreadableError, match=r"sums.parquet"):
        train(data, tmp_path / "run", 3, "--files", str(path), reward=letters)
    assert not (tmp_path / "run" / "model").exists()


def test_one_answer_to_a_prompt_teaches_nothing_and_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train(data, tmp_path / "run", 2, "--generations", "1")
    assert "--generations must be 2 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_goes_on(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [
        *python(*TRAINER),
        "-m",
        "trainpipes_recipes.train_grpo",
        *options(data, output, 1000),
    ]
    process = subprocess.Popen(command)
    while process.poll() is None and not list(output.glob("step-*.pt")):
        time.sleep(0.01)
    os.kill(pid_of(process), signal.SIGKILL)
    process.wait()
    newest = max(output.glob("step-*.pt"))
    step = torch.load(newest, weights_only=True)["step"]
    every = train(data, output, step + 3)
    assert [number for number, _ in every] == [step + 1, step + 2, step + 3]


def test_a_reward_may_be_an_integer(data: Path, tmp_path: Path) -> None:
    found = train(data, tmp_path / "run", 1, reward=lambda text, _: len(text))
    assert [step for step, _ in found] == [1]
