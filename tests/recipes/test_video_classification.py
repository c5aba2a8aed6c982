"""Clips of videos and their classes, in batches for models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from resuming import check_resume
from trainpipes.testing import digest
from trainpipes_recipes import video_classification
from video_fixtures import video


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for n in range(14):
        path = folder / ["run", "jump", "sit"][n % 3] / f"{'_' * (n == 13)}{n:02}.mp4"
        path.parent.mkdir(exist_ok=True)
        shade = [np.full((24, 32, 3), 12 * n + k, np.uint8) for k in range(12)]
        path.write_bytes(video(shade, codec="mpeg4", rate=10, gop=5))
    (folder / "run" / "notes.txt").write_text("no video")
    for hidden in (".ipynb_checkpoints/00.mp4", "__MACOSX/01.mp4", "run/._00.mp4"):
        (folder / hidden).parent.mkdir(exist_ok=True)
        (folder / hidden).write_bytes(b"no video")
    return folder


SMALL: dict[str, Any] = {
    "num_frames": 3,
    "size": 16,
    "resize": 20,
    "batch_size": 4,
    "num_shards": 2,
}


def test_a_folder_of_classes_is_evaluated_in_its_order(clips: Path) -> None:
    batches = list(video_classification(clips, train=False, mean=0, std=1, **SMALL))
    pixels = torch.cat([batch["pixel_values"] for batch in batches])
    assert (pixels.shape, pixels.dtype) == ((14, 3, 3, 16, 16), torch.float32)
    labels = torch.cat([batch["labels"] for batch in batches]).tolist()
    assert labels == [0] * 5 + [1] * 5 + [2] * 4  # jump, run, sit
    numbers = [1, 4, 7, 10, 13, 0, 3, 6, 9, 12, 2, 5, 8, 11]
    shades = pixels.mean((1, 2, 3, 4)) * 255
    assert (shades - (12 * torch.tensor(numbers) + 6)).abs().max() < 4


def test_training_draws_clips_and_resumes_exactly(clips: Path) -> None:
    pipe = video_classification(clips, seconds=0.5, **SMALL)
    first, second = (sorted(float(b["pixel_values"].sum()) for b in pipe) for _ in range(2))
    assert first != second
    check_resume(pipe, epochs=2, processes=1)


def test_the_same_comes_of_tables_rows_and_servers(clips: Path) -> None:
    paths = sorted(str(path.relative_to(clips)) for path in clips.rglob("[_0-9]*.mp4"))
    paths = [path for path in paths if path[0] not in "._"]
    kinds = [path.partition("/")[0] for path in paths]
    table = tp.from_arrow(pa.table({"path": paths, "class": kinds}))
    names = ["jump", "run", "sit"]
    content = [
        {"video": (clips / path).read_bytes(), "label": names.index(path.split("/")[0])}
        for path in paths
    ]
    for path in paths:
        fsspec.filesystem("memory").pipe_file(f"/clips/{path}", (clips / path).read_bytes())
    options: dict[str, Any] = {"train": False, **SMALL}
    expected = list(video_classification(clips, **options))
    for given in (
        video_classification(table, classes=names, folder=clips, **options),
        video_classification(tp.from_dataset(content), **options),
        video_classification("memory://clips", **options),
    ):
        for batch, same in zip(given, expected, strict=True):
            assert torch.equal(batch["pixel_values"], same["pixel_values"])
            assert torch.equal(batch["labels"], same["labels"])


def test_paths_of_a_table_begin_at_its_folder(clips: Path) -> None:
    lines = [
        f"{path.relative_to(clips)},{path.parent.name}" for path in clips.glob("[a-z]*/[_0-9]*.mp4")
    ]
    (clips / "a.csv").write_text("\n".join(["path,class", *sorted(lines)[:5]]))
    (clips / "b.csv").write_text("\n".join(["path,class", *sorted(lines)[5:]]))
    options = {**SMALL, "train": False, "classes": ["jump", "run", "sit"]}
    wanted = [digest(batch) for batch in video_classification(clips, **options)]
    for files in (clips / "*.csv", [clips / "a.csv", str(clips / "b.csv")]):
        assert [digest(batch) for batch in video_classification(files, **options)] == wanted


def test_classes_of_folders_to_evaluate_are_told_of(
    clips: Path, caplog: pytest.LogCaptureFixture
) -> None:
    video_classification(clips, **SMALL)
    video_classification(clips, train=False, classes=["jump", "run", "sit"], **SMALL)
    assert caplog.messages == []
    video_classification(clips, train=False, **SMALL)
    assert caplog.messages == [
        "video_classification: classes are numbered in the order of the names that are here; where the "
        "training had others, pass its classes=[...]"
    ]


def test_what_is_wrong_is_said(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"no video")
    with pytest.raises(tp.MissingFilesError, match="put each class into a folder of its own"):
        video_classification(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "b.mp4").write_bytes(b"no video")
    with pytest.raises(tp.errors.UnreadableError, match="holds no video that can be decoded"):
        list(video_classification(tmp_path, train=False, **SMALL))
    with pytest.raises(tp.DataError, match=r"video_classification: .* is no class"):
        list(video_classification(clips, classes=["run"], train=False, **SMALL))
    with pytest.raises(tp.ConfigError, match=r"video_classification\(classes\) must be the name"):
        video_classification(clips, classes=["run", "run"], **SMALL)
