"""Ray Train: workers each read their own rows, and a run goes on through Ray's checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.train
from ray.train import Checkpoint

import trainpipes as tp
from trainpipes.integrations.ray import load, loader, save
from trainpipes.testing import digest

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # Ray warns of its own options

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "ray_train.py"


def example(notes: Path) -> Any:
    """The script of the docs, whose workers write into files what they print. One of the first two is killed
    within a step.

    Args:
        notes: the folder.
    """
    spec = importlib.util.spec_from_file_location("example_ray_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def noted(said: str, flush: bool = True) -> None:
        with open(notes / f"worker-{os.getpid()}.txt", "a") as file:
            file.write(said + "\n")
        if said.startswith("step 5, 7 on 2 ") and not (notes / "killed").exists():
            (notes / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    module.print = noted
    return module


def noted(notes: Path) -> dict[int, list[tuple[int, int, int, str]]]:
    """By process: step, number in the step, workers, and digest of each batch."""
    found = {}
    for path in notes.glob("worker-*.txt"):
        lines = [line for line in path.read_text().split("\n") if line]
        told = []
        for line in lines:
            place, _, content = line.partition(": ")
            step, number, workers = (
                int(word) for word in place.replace(",", "").split() if word.isdigit()
            )
            told.append((step, number, workers, content))
        found[int(path.stem.partition("-")[2])] = told
    return found


def tell(folder: Path, given: tp.Pipeline) -> None:
    """What a worker meets, as a file.

    Args:
        folder: for it.
        given: a pipeline that was made by the driver.
    """
    from ray.train.torch import prepare_data_loader

    told: dict[str, Any] = {"batches": list(loader(few())), "of the driver": list(loader(given))}
    for name, options in (("sampler", {}), ("iterated", {"add_dist_sampler": False})):
        try:
            list(prepare_data_loader(tp.Loader(few()), **options))
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    rank = ray.train.get_context().get_world_rank()
    (folder / f"told-{rank}.json").write_text(json.dumps(told))


def few() -> tp.Pipeline:
    return tp.from_dataset(range(24)).sharding_filter(num_shards=12).batch(2)


@pytest.mark.timeout(580)
def test_a_killed_worker_is_replaced_and_the_run_goes_on_exactly_on_two_and_on_one(
    tmp_path: Path, cluster: None
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    texts = [f"row {i} " + "and more " * (i % 7) for i in range(600)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet", row_group_size=50)
    script = example(notes)
    given, train = few(), script.train_loop_per_worker

    def told_and_trained(config: dict[str, Any]) -> None:
        tell(tmp_path, given)
        train(config)

    arguments = ["--files", str(tmp_path / "rows.parquet"), "--storage", str(tmp_path / "runs")]
    script.train_loop_per_worker = told_and_trained
    result = script.main([*arguments, "--workers", "2", "--steps", "12"])
    assert result.error is None
    of_two = noted(notes)
    assert (notes / "killed").exists()
    assert len(of_two) == 4  # two workers, and two in their place
    script.train_loop_per_worker = train
    assert script.main([*arguments, "--workers", "1", "--steps", "16"]).error is None
    (alone,) = [told for process, told in noted(notes).items() if process not in of_two]

    count = script.MICRO_BATCHES
    whole = [
        digest(batch)
        for batch in islice(script.pipeline(str(tmp_path / "rows.parquet")), count * 16)
    ]
    assert len(set(whole)) == len(whole)
    for told in noted(notes).values():
        for step, number, workers, content in told:
            assert content == whole[step * count + number], f"step {step}, {number} on {workers}"
    starts = sorted(told[0][0] for told in of_two.values())
    assert starts[:2] == [0, 0]
    assert starts[2:] in ([2, 2], [4, 4])  # from the last checkpoint that Ray has heard of
    assert {(step, number) for told in of_two.values() for step, number, _, _ in told} == {
        (step, number) for step in range(12) for number in range(count)
    }
    assert [(step, number) for step, number, _, _ in alone] == [
        (step, number) for step in range(12, 16) for number in range(count)
    ]

    batches = list(few())
    for rank in range(2):
        worker = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert worker["batches"] == worker["of the driver"] == batches[rank::2]
        for name in ("sampler", "iterated"):
            assert worker[name].startswith("ConfigError: a trainpipes.Loader reads the rows of its")
            assert "leave that out, and write pipe.to(ray.train.torch.get_device())" in worker[name]


def shuffled(seed: int = 0) -> tp.Pipeline:
    return tp.from_dataset(range(24)).shuffle(seed=seed).batch(2)


def test_a_position_is_saved_into_a_folder_and_loaded_from_a_checkpoint(tmp_path: Path) -> None:
    data = tp.Loader(shuffled())
    batches = iter(data)
    first = [next(batches) for _ in range(3)]
    save(data, tmp_path)
    save(data, tmp_path, name="other été.json")
    checkpoint = Checkpoint.from_directory(tmp_path)
    rest = list(batches)
    for options in ({}, {"name": "other été.json"}):
        resumed = tp.Loader(shuffled())
        assert load(resumed, checkpoint, **options)
        assert list(resumed) == rest
    fresh = tp.Loader(shuffled())
    assert not load(fresh, None)
    assert list(fresh) == [*first, *rest]


def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path: Path) -> None:
    data = tp.Loader(shuffled())
    with pytest.raises(tp.ConfigError, match=r"elsewhere write trainpipes.Loader\(pipe\)"):
        loader(shuffled())
    with pytest.raises(tp.ConfigError, match=r"must be a trainpipes.Loader, got from_"):
        save(shuffled(), tmp_path)  # type: ignore[arg-type]
    checkpoint = Checkpoint.from_directory(tmp_path)
    with pytest.raises(tp.StateError, match=r"has no trainpipes\.json: call"):
        load(data, checkpoint)
    with pytest.raises(tp.ConfigError, match=r"for a folder write ray\.train\.Checkpoint"):
        load(data, str(tmp_path))  # type: ignore[arg-type]
    for damaged in ("", "{", "[1]"):
        (tmp_path / "trainpipes.json").write_text(damaged)
        with pytest.raises(tp.StateError):
            load(data, checkpoint)
    save(data, tmp_path)
    with pytest.raises(tp.StateError, match="stages/shuffle/seed: saved 0, now 1"):
        load(tp.Loader(shuffled(seed=1)), checkpoint)
