"""What training scripts share: checkpoints, logs, losses, small models."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import trainpipes as tp
import trainpipes_recipes
from trainpipes_recipes import train_sft, training
from trainpipes_recipes.demo.corpus import train_tokenizer
from trainpipes_recipes.training import Rank, read_log


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
            *(
                "--checkpoint-dir",
                str(folder / "run"),
                "--device",
                "cpu",
                "--log-every",
                "1",
                *options,
            ),
        ]
    )


@pytest.mark.usefixtures("torch_as_before")
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

    def test_the_log_has_what_it_is_told_to(self, sums: Path) -> None:
        """A hash of a batch, or a loss of each step, is for those who ask for it."""
        log = sums / "run" / "log.jsonl"
        train(sums, "--steps", "7", "--log-every", "3")
        assert [(step.number, step.batch) for step in read_log(log)] == [(3, ""), (6, ""), (7, "")]
        train(sums, "--steps", "4", "--log-every", "2", "--log-batches", "--resume", "never")
        assert len({step.batch for step in read_log(log)} - {""}) == 2

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
        with pytest.raises(SystemExit, match="does not exist"):
            train(sums, "--resume", "must")

    def test_a_tokenizer_of_a_file_says_its_size(self, sums: Path) -> None:
        train_tokenizer([("a b", "c d")], sums / "tokenizer.json", vocabulary=300)
        train(sums, "--steps", "2", "--tokenizer", str(sums / "tokenizer.json"))
        with pytest.raises(SystemExit, match="--vocabulary-size"):
            train(sums, "--steps", "2", "--tokenizer", "tiktoken:gpt2")


SCRIPTS = sorted(Path(trainpipes_recipes.__file__).parent.glob("train_*.py"))

ALONE = Rank(0, 1, torch.device("cpu"))


def arguments(folder: Path, **changed: Any) -> argparse.Namespace:
    args = training.options("train_sft", "").parse_args(["--files", "x"])
    return argparse.Namespace(**{**vars(args), "checkpoint_dir": folder, **changed})


def loader_of(rows: int) -> tp.Loader:
    return tp.Loader(tp.from_dataset(list(range(rows))).batch(2).map(lambda b: {"x": b}))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_fits_on_a_screen_and_says_what_it_trains(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert path.stem.removeprefix("train_") in trainpipes_recipes.__all__
    assert len(path.read_text().splitlines()) <= 80
    script = importlib.import_module(f"trainpipes_recipes.{path.stem}")
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith(f"usage: python -m trainpipes_recipes.{path.stem} ")
    assert script.__doc__.splitlines()[0] in told
    assert "--checkpoint-dir" in told


class TestCheckpoints:
    def test_every_part_and_torchs_random_state_come_back(self, tmp_path: Path) -> None:
        model, loader = nn.Linear(2, 2), loader_of(20)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
        given = training.batches(loader, ALONE, 20)
        for _ in range(3):
            next(given)
            model(torch.randn(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
        training.Checkpoints(arguments(tmp_path), ALONE, loader, **parts).save(3)
        wanted = (model.weight.clone(), schedule.get_last_lr(), next(given), torch.rand(3))

        model, loader = nn.Linear(2, 2), loader_of(20)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        assert training.Checkpoints(arguments(tmp_path), ALONE, loader, **parts).resume() == 3
        assert torch.equal(torch.rand(3), wanted[3])
        assert torch.equal(model.weight, wanted[0])
        assert schedule.get_last_lr() == wanted[1]
        assert next(training.batches(loader, ALONE, 1)) == wanted[2]

    def test_a_save_that_is_cut_short_leaves_the_last_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoints = training.Checkpoints(arguments(tmp_path), ALONE, loader_of(4))
        checkpoints.save(1)

        def cut(content: Any, file: Any) -> None:
            file.write(b"half")
            raise KeyboardInterrupt

        monkeypatch.setattr(torch, "save", cut)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2)
        assert training.Checkpoints(arguments(tmp_path), ALONE, loader_of(4)).resume() == 1


def test_batches_go_on_over_epochs_and_the_loader_stands_after_the_last_one() -> None:
    loader = loader_of(6)
    given = [batch["x"] for batch in training.batches(loader, ALONE, 5)]
    assert given == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    resumed = loader_of(6)
    resumed.load_state_dict(loader.state_dict())
    assert next(iter(resumed))["x"] == [4, 5]
    assert list(training.batches(loader, ALONE, 0)) == []


def test_an_epoch_without_a_batch_ends_the_run() -> None:
    loader = tp.Loader(tp.from_dataset([1]).batch(2, drop_last=True))
    with (
        pytest.warns(UserWarning, match="gives nothing"),
        pytest.raises(SystemExit, match="no batch"),
    ):
        list(training.batches(loader, ALONE, 3))


def test_what_goes_wrong_with_the_data_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"MissingFilesError: .*nothing-here"):
        train_sft.main(["--files", str(tmp_path / "nothing-here"), "--device", "cpu"])


def test_padding_and_prompts_do_not_change_the_loss() -> None:
    torch.manual_seed(0)
    model = training.Transformer(50, 12, 16, 2, 2)
    ids = torch.randint(0, 50, (2, 8))
    labels = ids.clone()
    labels[:, :3] = -100
    padded = nn.functional.pad(ids, (0, 4), value=49)
    unlearnt = nn.functional.pad(labels, (0, 4), value=-100)
    short = training.next_token_loss(model(ids), labels)
    torch.testing.assert_close(training.next_token_loss(model(padded), unlearnt), short)
    wanted = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(short, wanted)


def test_a_batch_without_labels_has_no_loss() -> None:
    nothing = torch.full((2, 8), -100)
    assert training.next_token_loss(torch.randn(2, 8, 50), nothing) == 0


class TestTransformer:
    ids = torch.arange(24).view(2, 12)

    def test_a_causal_one_sees_what_came_before_and_another_sees_all(self) -> None:
        changed = self.ids.clone()
        changed[:, 7] = 40
        for causal in (True, False):
            model = training.Transformer(50, 12, 16, 2, 2, causal=causal)
            for segments in (None, torch.ones_like(self.ids)):
                before, after = model(self.ids, segments), model(changed, segments)
                same = torch.isclose(before, after).all(-1).all(0)
                assert same[:7].all() == causal
                assert not same[7:].any()

    @pytest.mark.parametrize("causal", [True, False])
    def test_documents_in_one_row_are_as_if_each_had_a_row(self, causal: bool) -> None:
        model = training.Transformer(50, 12, 16, 2, 2, causal=causal)
        segments = torch.tensor([[1] * 5 + [2] * 4 + [0] * 3] * 2)
        places = torch.tensor([[*range(5), *range(4), *range(3)]] * 2)
        packed = model(self.ids, segments, places)
        torch.testing.assert_close(packed[:, :5], model(self.ids[:, :5]))
        torch.testing.assert_close(packed[:, 5:9], model(self.ids[:, 5:9]))
