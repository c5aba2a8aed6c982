"""The demo: killed runs equal the one left alone, and a comparison that would see it if not."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trainpipes_recipes import demo, train_sft
from trainpipes_recipes.comparison import Step, compare, read_log
from trainpipes_recipes.corpus import function_pairs, train_tokenizer, write_parquet
from trainpipes_recipes.progress import Progress

LOG = [Step(n, f"hash-{n}", 5.0 - n / 100) for n in range(1, 101)]


def renumbered(steps: list[Step]) -> list[Step]:
    return [replace(step, number=n) for n, step in enumerate(steps, start=1)]


def test_equal_logs_are_identical() -> None:
    found = compare(LOG, list(LOG))
    assert found.identical
    assert str(found) == "100 batches compared: 0 lost, 0 repeated, 0 changed"


def test_nothing_compared_is_not_identical() -> None:
    assert not compare([], []).identical


def test_a_lost_batch_is_seen() -> None:
    found = compare(LOG, renumbered(LOG[:40] + LOG[41:]))
    assert not found.identical
    assert found.lost == (41,)
    assert found.repeated == found.changed == ()


def test_a_lost_last_batch_is_seen() -> None:
    found = compare(LOG, LOG[:-1])
    assert not found.identical
    assert found.lost == (100,)


def test_a_repeated_batch_is_seen() -> None:
    found = compare(LOG, renumbered(LOG[:41] + LOG[40:]))
    assert not found.identical
    assert found.repeated == (42,)
    assert found.lost == found.changed == ()


def test_a_changed_batch_is_seen() -> None:
    changed = [*LOG[:40], replace(LOG[40], batch="other"), *LOG[41:]]
    found = compare(LOG, changed)
    assert not found.identical
    assert (found.changed, found.lost, found.repeated) == ((41,), (41,), ())


def test_a_batch_out_of_place_is_seen() -> None:
    moved = [*LOG]
    moved[3], moved[7] = moved[7], moved[3]
    found = compare(LOG, renumbered(moved))
    assert not found.identical
    assert found.moved == (4, 8)


def test_another_loss_is_seen_to_the_last_bit() -> None:
    nearly = torch.nextafter(
        torch.tensor(LOG[9].loss, dtype=torch.float64), torch.tensor(9.0).double()
    )
    found = compare(LOG, [*LOG[:9], replace(LOG[9], loss=nearly.item()), *LOG[10:]])
    assert not found.identical
    assert found.losses == (10,)


def test_a_step_that_was_logged_twice_is_seen() -> None:
    found = compare(LOG, [*LOG[:50], LOG[49], *LOG[50:]])
    assert not found.identical
    assert found.repeated == (51,)
    assert found.misnumbered


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "batch": "a", "loss": 2.5}\n{"step": 2, "bat')
    assert read_log(log) == [Step(1, "a", 2.5)]
    assert demo._last_step(log) == 1


def test_the_standard_library_makes_a_corpus(tmp_path: Path) -> None:
    pairs = list(function_pairs(every=4))
    assert len(pairs) > 700
    prompt, response = random.Random(0).choice(pairs)
    assert prompt.startswith(("def ", "async def "))
    assert response
    paths = write_parquet(pairs, tmp_path)
    footers = [pq.read_metadata(path) for path in paths]
    assert sum(footer.num_rows for footer in footers) == len(pairs)
    assert len({footer.num_rows for footer in footers}) == len(paths)
    assert len({footer.row_group(0).num_rows for footer in footers}) == len(paths)


def test_a_small_demo_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "30", "--every", "24", "--batch-size", "16", "--checkpoint-every", "5"]
    assert demo.main(["--output", str(tmp_path), *options]) == 0
    said = capsys.readouterr().out
    assert said.count("killed with SIGKILL") == 2
    assert "All 30 batches are the same, bit for bit" in said
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    lines = (tmp_path / "interrupted" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 31))


def test_the_demo_fails_when_a_batch_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(trainer: object, name: str, legs: Sequence[demo.Leg]) -> list[list[Step]]:
        steps = LOG if len(legs) == 1 else renumbered(LOG[:40] + LOG[41:])
        lines = [
            json.dumps({"step": s.number, "batch": s.batch, "loss": s.loss}) + "\n" for s in steps
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text("".join(lines))
        return [LOG[:30] for leg in legs if leg.until]

    monkeypatch.setattr(demo.Trainer, "run", run)
    assert demo.main(["--output", str(tmp_path), "--steps", "100", "--every", "90"]) == 1
    said = capsys.readouterr().out
    assert "99 batches compared: 1 lost (first at 41)" in said
    assert "FAILED" in said
    assert "All" not in said


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    table = pa.table(
        {"q": [f"{i} + {i} =" for i in range(64)], "a": [f" {2 * i}" for i in range(64)]}
    )
    pq.write_table(table, tmp_path / "sums.parquet")
    return tmp_path


def train(folder: Path, *options: str) -> None:
    train_sft.main(
        [
            *("--files", str(folder / "sums.parquet"), "--prompt", "q", "--response", "a"),
            *("--width", "16", "--layers", "1", "--heads", "2", "--max-length", "32"),
            *("--checkpoint-dir", str(folder / "run"), "--device", "cpu", *options),
        ]
    )


@pytest.fixture
def as_before() -> object:
    """Training sets torch's seed and its deterministic mode."""
    state, deterministic = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_rng_state(state)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.usefixtures("as_before")
class TestTrainSft:
    def test_goes_on_by_itself_where_it_was_stopped(self, sums: Path) -> None:
        train(sums, "--steps", "20", "--checkpoint-every", "4")
        whole = read_log(sums / "run" / "log.jsonl")
        train(sums, "--steps", "7", "--checkpoint-every", "4", "--resume", "never")
        train(sums, "--steps", "20", "--checkpoint-every", "4")
        assert read_log(sums / "run" / "log.jsonl") == whole
        assert whole[-1].loss < whole[0].loss

    def test_steps_after_the_last_checkpoint_are_forgotten(self, sums: Path) -> None:
        train(sums, "--steps", "5")
        log = sums / "run" / "log.jsonl"
        with open(log, "a") as file:
            file.write('{"step": 6, "batch": "x", "loss": 1.0}\n{"step": 7, "ba')
        train(sums, "--steps", "8")
        steps = read_log(log)
        assert [step.number for step in steps] == list(range(1, 9))
        assert "x" not in {step.batch for step in steps}

    def test_a_run_that_is_done_does_nothing(self, sums: Path) -> None:
        train(sums, "--steps", "3")
        before = (sums / "run" / "log.jsonl").read_text()
        train(sums, "--steps", "3")
        assert (sums / "run" / "log.jsonl").read_text() == before

    def test_a_resume_with_another_model_is_refused(self, sums: Path) -> None:
        train(sums, "--steps", "2")
        with pytest.raises(SystemExit, match="--width 16, this one has 32"):
            train(sums, "--steps", "4", "--width", "32")

    def test_a_resume_without_a_checkpoint_is_refused_where_one_must_be(self, sums: Path) -> None:
        with pytest.raises(SystemExit, match="there is no"):
            train(sums, "--resume", "must")

    def test_a_tokenizer_of_a_file_says_its_size(self, sums: Path) -> None:
        train_tokenizer([("a b", "c d")], sums / "tokenizer.json", vocabulary=300)
        train(sums, "--steps", "2", "--tokenizer", str(sums / "tokenizer.json"))
        with pytest.raises(SystemExit, match="--vocabulary-size"):
            train(sums, "--steps", "2", "--tokenizer", "tiktoken:gpt2")


def test_padding_and_prompts_do_not_change_the_loss() -> None:
    torch.manual_seed(0)
    model = train_sft.CausalTransformer(50, 12, 16, 2, 2)
    ids = torch.randint(0, 50, (2, 8))
    labels = ids.clone()
    labels[:, :3] = -100
    padded = torch.nn.functional.pad(ids, (0, 4), value=49)
    unlearnt = torch.nn.functional.pad(labels, (0, 4), value=-100)
    short = train_sft.response_loss(model, ids, labels)
    torch.testing.assert_close(train_sft.response_loss(model, padded, unlearnt), short)
    logits = model(ids)[:, :-1] @ model.tokens.weight.T
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(short, wanted)


def test_a_batch_without_labels_has_no_loss() -> None:
    model = train_sft.CausalTransformer(50, 12, 16, 1, 2)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    assert train_sft.response_loss(model, ids, torch.full_like(ids, -100)) == 0


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def test_progress_is_one_line_on_a_terminal_and_plain_lines_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = Terminal()
    progress = Progress(terminal)  # type: ignore[arg-type]
    progress.show("step 1")
    progress.say("done")
    assert terminal.text.startswith("\rstep 1")
    assert terminal.text.endswith("\rdone\n")
    assert terminal.text.count("\n") == 1
    progress = Progress()
    progress.show("step 1")
    progress.show("step 2")  # too soon after the other
    assert capsys.readouterr().out == "step 1\n"
