"""The training scripts: what they learn, where they go on, and what they leave."""

from __future__ import annotations

import ast
import importlib
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image

import trainpipes as tp
import trainpipes_recipes
from torch_settings import torch_as_before
from trainpipes.testing import digest
from trainpipes_recipes import samples, training

#: Those that train on the batches of a recipe.
SCRIPTS = sorted(
    path
    for path in Path(trainpipes_recipes.__file__).parent.glob("train_*.py")
    if path.stem != "train_grpo"
)
Steps = list[tuple[int, str, float]]
#: How far losses differ by rounding; the scripts compute in bfloat16 on a GPU.
EXACT = 1e-3 if training.BF16 else 1e-4
Train = Callable[..., Steps]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    samples.write_samples(folder, every=40)
    for channel, name in enumerate(("red", "green", "blue")):
        (folder / "colors" / name).mkdir(parents=True)
        for n in range(16):
            color = [10 * n] * 3
            color[channel] += 90
            Image.new("RGB", (20, 20), tuple(color)).save(folder / "colors" / name / f"{n}.png")
    (folder / "beeps" / "5.wav").write_bytes(b"damaged")
    return folder


@pytest.fixture
def train(data: Path, tmp_path: Path) -> Train:
    def run(script: str, *options: str) -> Steps:
        """The steps that a script makes: number, hash of the batches, loss."""
        found: Steps = []
        given = {
            "train_sft": ["--scratch", "--files", f"{data}/functions", "--max-length", "64"],
            "train_pretrain": ["--files", f"{data}/texts", "--max-length", "64"],
            "train_vision": ["--scratch", "--files", f"{data}/scenes.jsonl", "--packed"],
            "train_speech": ["--files", f"{data}/speech.jsonl", "--scratch", "--max-seconds", "1"],
            "train_video": ["--files", f"{data}/videos", "--classes", "3", "--seconds", "1"],
            "train_tabular": [
                "--files",
                f"{data}/purchases",
                "--categories",
                "user",
                "item",
                "seen",
                "--valid",
                "day",
                ">=",
                "2026-03-25",
            ],
            "train_images": ["--files", f"{data}/colors", "--classes", "3", "--size", "16"],
        }[script]
        if script == "train_images":
            given += ["--model", f"{data}/vision"]
        elif script == "train_tabular":
            pass
        elif script == "train_video":
            given += ["--model", f"{data}/eyes"]
        elif script == "train_speech":
            given += ["--model", f"{data}/ears", "--tokenizer", "bytes"]
        elif script == "train_vision":
            given += ["--model", f"{data}/sight", "--processor", f"{data}/processor"]
            given += ["--max-length", "128"]
        else:
            given += ["--model", f"{data}/model", "--tokenizer", f"{data}/tokenizer"]
        given += ["--batch-size", "4", "--lr", "0.005", "--output", str(tmp_path / "run"), *options]
        with torch_as_before():
            torch.set_num_threads(1)
            torch.use_deterministic_algorithms(True)
            importlib.import_module(f"trainpipes_recipes.{script}").main(
                given,
                lambda step, batches, loss: found.append((step, digest(batches), loss.item())),
            )
        return found

    return run


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:.*no target:UserWarning")
@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS])
def test_a_script_learns_and_goes_on_where_it_was_stopped(
    script: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ("train_images", "train_speech", "train_tabular", "train_video")
    several = [] if script in alone else ["--accumulate", "2"]
    whole = train(script, "--steps", "12", "--save-every", "3", "--keep", "2", *several)
    assert [step for step, _, _ in whole] == [*range(1, 13)]
    assert sum(loss for *_, loss in whole[-4:]) < sum(loss for *_, loss in whole[:4])
    kept = sorted(path.name for path in (tmp_path / "run").iterdir())
    if script == "train_tabular":
        assert kept.pop(0) == "columns.json"
    assert kept == ["model", "step-00000009.pt", "step-00000012.pt"]
    assert "step 10: loss " in capsys.readouterr().out

    (tmp_path / "run" / "step-00000012.pt").unlink()  # as if killed before it
    (tmp_path / "run" / "new").write_bytes(b"half")
    assert train(script, "--steps", "12", "--num-workers", "1", *several) == whole[9:]
    assert "goes on after step 9" in capsys.readouterr().out
    assert train(script, "--steps", "12", *several) == []  # it is done


@pytest.mark.filterwarnings("ignore:.*no target:UserWarning")
def test_evaluation_is_over_every_row_and_draws_nothing(
    train: Train, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaForCausalLM

    plain = train("train_sft", "--steps", "2")
    shutil.rmtree(tmp_path / "run")
    files = [f"{data}/functions"]
    assert train("train_sft", "--steps", "2", "--save-every", "1", "--eval-files", *files) == plain
    said = capsys.readouterr().out
    assert said.count("evaluation loss") == 2
    model = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    held_out = tp.recipe(
        "sft", files, str(data / "tokenizer"), train=False, batch_size=16, max_length=64
    )
    with torch.no_grad():
        total = sum(training.loss_sum(model, batch) for batch in held_out)
    wanted = total / sum(training.targets_of(batch) for batch in held_out)
    found = float(said.rsplit("evaluation loss ", 1)[1].split()[0])
    assert found == pytest.approx(float(wanted), rel=EXACT)


def test_pictures_to_evaluate_have_the_classes_of_the_training(
    train: Train, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainpipes_recipes import train_images

    names = sorted(path.name for path in (data / "colors").iterdir())
    shutil.copytree(data / "colors" / names[2], tmp_path / "later" / names[2])
    labels: list[int] = []

    def evaluate(_: Any, held_out: tp.Pipeline) -> float:
        labels.extend(label for batch in held_out for label in batch["labels"].tolist())
        return 0.0

    monkeypatch.setattr(train_images, "evaluate", evaluate)
    train("train_images", "--steps", "1", "--eval-files", str(tmp_path / "later"))
    assert labels == [2] * 16
    shutil.copytree(tmp_path / "later" / names[2], tmp_path / "later" / "others")
    with pytest.raises(tp.DataError, match="holds 'others', which is no class"):
        train("train_images", "--steps", "2", "--eval-files", str(tmp_path / "later"))


def test_the_classes_of_folders_are_listed_by_a_picture_of_each(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainpipes_recipes import train_images

    pipe, opened, opening = tp.recipe("images", f"{data}/colors", size=16), [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, *a, **k: opened.append(str(path)) or opening(path, *a, **k)
    )
    assert train_images.folders_of(pipe, [f"{data}/colors"]) == ["blue", "green", "red"]
    assert sum(path.endswith(".png") for path in opened) == 3


def test_an_evaluation_counts_millions_exactly_and_none_is_an_error() -> None:
    sums = training.sums()
    sums[1] += 2**25
    sums += torch.tensor([2.0, 1.0])
    assert training.mean_over_ranks(sums) == 2 / (2**25 + 1)
    with pytest.raises(tp.DataError, match="no rank has a row with a target: look at what holds"):
        training.mean_over_ranks(training.sums())


def test_batches_of_a_step_weigh_as_their_targets_do(train: Train, tmp_path: Path) -> None:
    """Four rows at once, or two and two: the same gradients but for rounding."""
    together = train("train_sft", "--steps", "6")
    shutil.rmtree(tmp_path / "run")
    apart = train("train_sft", "--steps", "6", "--batch-size", "2", "--accumulate", "2")
    assert together[0][2] == pytest.approx(math.log(2048), rel=0.1)  # the mean over targets
    for (_, _, one), (_, _, other) in zip(together, apart, strict=True):
        assert one == pytest.approx(other, rel=EXACT)


def small_model(attention: str) -> Any:
    """A model in training, where transformers would keep a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    sizes |= {"vocab_size": 300, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, attn_implementation=attention)
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_document_sees_no_other_one(attention: str) -> None:
    from trainpipes_recipes import train_pretrain

    model = small_model(attention)
    texts = ["one text", "two", "a third text", "and four"]
    rows = tp.from_dataset([{"text": text} for text in texts])
    batch = tp.recipe(
        "pretrain", rows, "bytes", train=False, max_length=24, batch_size=2, num_shards=1
    ).peek()
    assert batch["segment_ids"].max() > 1
    total, count = torch.zeros(()), 0
    for text in texts:
        ids = torch.tensor([[*text.encode(), 256]])
        total = total + model(ids, labels=ids).loss * (ids.numel() - 1)
        count += ids.numel() - 1
    torch.testing.assert_close(train_pretrain.loss_of(model, batch), total / count)


def test_packed_pairs_have_the_loss_that_each_has_alone() -> None:
    """Of each response, given its own prompt: no pair sees another one."""
    from trainpipes_recipes import train_pretrain

    model = small_model("sdpa")
    pairs = [{"prompt": f"{n} + {n} =", "response": f" {2 * n}" * (1 + n % 3)} for n in range(12)]
    options: dict[str, Any] = {"max_length": 48, "num_shards": 1, "buffer_size": 12}
    rows = tp.from_dataset(pairs)
    (batch,) = tp.recipe("sft", rows, "bytes", packed=True, batch_size=12, **options)
    assert len(batch["input_ids"]) < 12
    total, count = torch.zeros(()), 0
    for alone in tp.recipe("sft", rows, "bytes", batch_size=1, **options):
        total, count = (
            total + training.loss_sum(model, alone),
            count + training.targets_of(alone),
        )
    assert (batch["labels"] != -100).sum() == count
    torch.testing.assert_close(train_pretrain.loss_of(model, batch), total / count)


def test_gradients_that_are_not_finite_end_a_run_before_it_is_saved(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainpipes_recipes import train_images

    plain, losses = train_images.loss_of, iter([1.0, 1.0, math.nan, 1.0])
    monkeypatch.setattr(train_images, "loss_of", lambda *given: plain(*given) * next(losses))
    with pytest.raises(FloatingPointError, match=r"finite, got a norm of nan by step 4; go on fro"):
        train("train_images", "--steps", "4", "--save-every", "2")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002.pt"]


def test_ranks_let_go_of_their_model_before_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that holds the group last may wait for its threads for ever."""
    given = ["--files", "none", "--output", f"{tmp_path}/run"]
    args = training.parser_of("", 0.1, 1, model=False).parse_args(given)
    monkeypatch.setattr(training, "RANKS", 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = training.Training(args, small_model("sdpa"), tp.from_dataset([1]).batch(1))
    run.end()
    assert not dist.is_initialized()
    assert not {"logger", "reducer"} & vars(run.parallel).keys()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_copied_with_one_more_file_and_says_what_it_trains(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {"train_vision": "vision_chat", "train_video": "video_classification"}.get(
        path.stem, path.stem.removeprefix("train_")
    )
    assert recipe in trainpipes_recipes.__all__
    tree = ast.parse(path.read_text())
    found = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    found |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    ours = {name for name in found if name and name.startswith("trainpipes")}
    assert ours == {"trainpipes", "trainpipes_recipes"}
    others = {(name or "").split(".")[0] for name in found - ours}
    assert others <= {"collections", "json", "pathlib", "time", "torch", "transformers", "typing"}
    main: Any = importlib.import_module(f"trainpipes_recipes.{path.stem}").main
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--save-every" in capsys.readouterr().out
    for option in ("--steps", "--batch-size", "--save-every", "--keep"):
        with pytest.raises(SystemExit):
            main([option, "0"])
        assert f"{option}: must be 1 or more, got 0" in capsys.readouterr().err
