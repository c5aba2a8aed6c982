"""The images recipe: batches exactly, from every kind of source, and what it refuses."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import trainpipes as tp
from trainpipes.testing import digest
from trainpipes_recipes import images

SIDE, COUNT = 16, 24
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 3, SIDE, SIDE), dtype=np.uint8)
LABELS = [n % 3 for n in range(COUNT)]
CLASSES = ["ant", "bee", "cat"]
SMALL: dict[str, Any] = {"size": SIDE, "batch_size": 5, "num_shards": 4}


def png(pixels: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(out, "PNG")
    return out.getvalue()


FILES = [png(pixels) for pixels in PIXELS]


def in_folders(folder: Path) -> Any:
    for n, content in enumerate(FILES):
        path = folder / "pictures" / CLASSES[LABELS[n]] / f"{n:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder / "pictures"


def in_tar(folder: Path) -> Any:
    with tarfile.open(folder / "pictures.tar", "w") as archive:
        for n, content in enumerate(FILES):
            for kind, data in (("png", content), ("cls", str(LABELS[n]).encode())):
                member = tarfile.TarInfo(f"{n:03}.{kind}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return folder / "pictures.tar"


def in_parquet(folder: Path) -> Any:
    table = pa.table({"image": FILES, "label": LABELS, "more": ["x"] * COUNT})
    pq.write_table(table, folder / "pictures.parquet", row_group_size=7)
    return folder / "pictures.parquet"


def as_hf_stores_them(folder: Path) -> Any:
    pictures = [{"bytes": content, "path": f"{n}.png"} for n, content in enumerate(FILES)]
    table = pa.table({"img": pictures, "fine_label": LABELS})
    pq.write_table(table, folder / "hf.parquet", row_group_size=9)
    return str(folder / "hf*.parquet")


def in_memmap(folder: Path) -> Any:
    tp.write_memmap(folder / "map", tp.from_tensors(image=PIXELS, label=np.array(LABELS)))
    return folder / "map"


def rows(**change: Any) -> tp.Pipeline:
    return tp.from_dataset(
        [{"photo": content, "class": LABELS[n], "n": n} | change for n, content in enumerate(FILES)]
    )


SOURCES: dict[str, Callable[[Path], Any]] = {
    "folders": in_folders,
    "tar": in_tar,
    "Parquet": in_parquet,
    "Parquet of Hugging Face": as_hf_stores_them,
    "memory map": in_memmap,
    "rows": lambda f: rows(),
    "rows, decoded": lambda f: rows().decode_image("photo"),
    "tensors": lambda f: tp.from_tensors(image=torch.from_numpy(PIXELS), label=np.array(LABELS)),
    "filtered": lambda f: rows().filter(lambda row: row["n"] < COUNT),
    "mix": lambda f: tp.mix(
        {"a": rows().take(9), "b": rows().skip(9)}, weights={"a": 1, "b": 1}
    ).drop_columns("n"),
}  # fmt: skip


def known(batch: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Which picture each of a batch of whole ones is, and its label."""
    places = {pixels.tobytes(): n for n, pixels in enumerate(PIXELS)}
    assert (batch["images"].dtype, batch["labels"].dtype) == (torch.uint8, torch.int64)
    found = [places[image.numpy().tobytes()] for image in batch["images"]]
    return list(zip(found, batch["labels"].tolist(), strict=True))


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_every_picture_with_its_label(name: str, tmp_path: Path) -> None:
    given = SOURCES[name](tmp_path)
    pipe = images(given, scale=(1, 1), padding=0, flip=0, normalize=False, drop_last=False, **SMALL)
    batches = list(pipe)
    assert {tuple(batch) for batch in batches} == {("images", "labels")}
    assert len(batches) == 5 or name in ("filtered", "mix"), (
        "where counts are not known, shards end apart"
    )
    found = [one for batch in batches for one in known(batch)]
    once = set if name == "mix" else list  # where the smaller source comes again
    assert sorted(once(found)) == list(enumerate(LABELS))
    assert found != sorted(found)
    if name == "mix":  # which has no order of its own
        return
    evaluated = images(given, train=False, resize=SIDE, normalize=False, **SMALL)
    again = [one for batch in evaluated for one in known(batch)]
    assert sorted(again) == list(enumerate(LABELS))
    if name not in ("folders", "filtered"):  # class by class, shard by shard
        assert again == list(enumerate(LABELS))


def test_a_batch_is_the_normalized_pixels() -> None:
    whole: dict[str, Any] = {"padding": 0, "flip": 0, **SMALL}
    floats = next(iter(images(rows(), **whole)))
    pixels = next(iter(images(rows(), normalize=False, **whole)))
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    assert torch.equal(floats["images"], (pixels["images"].float() / 255 - mean) / std)
    assert torch.equal(floats["labels"], pixels["labels"])
    half = next(iter(images(rows(), mean=0.5, std=0.5, **whole)))
    assert torch.equal(half["images"], (pixels["images"].float() / 255 - 0.5) / 0.5)


def test_augmentations_are_of_the_row_and_the_epoch() -> None:
    def by_label(pipe: tp.Pipeline) -> dict[int, str]:
        found = {}
        for batch in pipe:
            for image, label in zip(batch["images"], batch["labels"].tolist(), strict=True):
                found[label] = digest(image)
        return found

    numbered = tp.from_tensors(image=PIXELS, label=np.arange(COUNT))
    options = SMALL | {"size": 8, "drop_last": False}
    pipe = images(numbered, **options)
    first, second = by_label(pipe), by_label(pipe)
    assert first.keys() == set(range(COUNT))
    assert sum(first[n] == second[n] for n in first) == 0
    other = images(numbered, **(options | {"batch_size": 7, "buffer_size": 6, "num_shards": 6}))
    assert by_label(other) == first
    assert sum(by_label(images(numbered, seed=1, **options))[n] == first[n] for n in first) == 0


def test_what_is_augmented_follows_the_options() -> None:
    flipped = next(iter(images(rows(), padding=0, flip=1, normalize=False, **SMALL)))
    straight = next(iter(images(rows(), padding=0, flip=0, normalize=False, **SMALL)))
    assert torch.equal(flipped["images"], straight["images"].flip(3))
    moved = next(iter(images(rows(), padding=4, flip=0, normalize=False, **SMALL)))
    assert not torch.equal(moved["images"], straight["images"])
    assert (moved["images"] == 0).any(dim=1).any()
    dark = images(rows(), transform=darker, normalize=False, **SMALL)
    assert torch.equal(next(iter(dark))["images"], straight["images"] // 2)
    middle = next(iter(images(rows(), train=False, resize=SIDE, normalize=False, size=8)))
    assert torch.equal(middle["images"][0], torch.from_numpy(PIXELS[0][:, 4:12, 4:12]))
    assert "resize(18, " in repr(images(rows(), train=False, **SMALL))


def darker(image: torch.Tensor) -> torch.Tensor:
    return image // 2


@pytest.mark.parametrize(
    ("label", "classes", "number"),
    [
        ("bee", CLASSES, 1), (2, CLASSES, 2), (7, None, 7), (b"3", None, 3), (b"cat\n", CLASSES, 2),
        ("12", None, 12), (True, None, 1), ("7", ["7", "1"], 0),
        (2.0, None, 2), (np.float32(2), CLASSES, 2),
    ],
)  # fmt: skip
def test_classes_are_numbers_or_names(label: Any, classes: Any, number: int) -> None:
    batch = next(iter(images(rows(**{"class": label}), classes=classes, **SMALL)))
    assert batch["labels"].tolist() == [number] * 5


# What is refused


@pytest.mark.parametrize("classes", [None, CLASSES])
def test_a_label_that_is_an_array_of_several_numbers_is_no_class(classes: Any) -> None:
    several = rows(**{"class": np.array([0, 1, 0])})
    with pytest.raises(tp.DataError, match=r"holds \[0, 1, 0\], which is no class"):
        next(iter(images(several, classes=classes, **SMALL)))


@pytest.mark.parametrize(("good", "bad", "classes", "said"), [
    ("ant", "dog", CLASSES, "holds 'dog', which is no class: the classes are 3: ant, bee, cat ("),
    (0, 3, CLASSES, "holds 3, which is no class: the classes are 3: ant, bee, cat ("),
    (0, -1, None, "holds -1, which is no class: the classes are numbers from 0 on"),
    ("1", "dog", None, "holds 'dog', which is no class: the classes are numbers from 0 on, or names"),
    (0, None, None, "holds None, which is no class"),
    (1.0, 1.5, None, "holds 1.5, which is no class"),
    (b"c1", b"\xff", [f"c{n}" for n in range(12)], "are 12: c0, c1, c2, c3, c4, c5, c6, c7, c8, … ("),
])  # fmt: skip
def test_an_unknown_label_names_its_file_and_row(
    good: Any, bad: Any, classes: Any, said: str, tmp_path: Path
) -> None:
    labels = [good] * 13 + [bad] + [good] * 10
    path = tmp_path / "pictures.parquet"
    pq.write_table(pa.table({"image": FILES, "label": labels}), path)
    pipe = images(path, classes=classes, train=False, size=8, batch_size=4, num_shards=4)
    with pytest.raises(tp.errors.DataError) as caught:
        list(pipe)
    assert said in str(caught.value)
    assert (caught.value.path, caught.value.row) == (str(path), 13)


def test_a_broken_picture_names_its_file_and_row(tmp_path: Path) -> None:
    folder = in_folders(tmp_path)
    (folder / "bee" / "04.png").write_bytes(FILES[4][:80])
    with pytest.raises(tp.errors.UnreadableError, match="no picture that can be decoded") as caught:
        list(images(folder, **SMALL))
    assert caught.value.path == str(folder / "bee" / "04.png")
    kept = images(folder, on_error="skip", drop_last=False, **SMALL)
    assert sum(len(batch["labels"]) for batch in kept) == COUNT - 1
    table = pa.table({"image": [*FILES[:9], b"no", *FILES[10:]], "label": LABELS})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    with pytest.raises(tp.errors.UnreadableError) as caught:
        list(images(tmp_path / "a.parquet", **SMALL))
    assert (caught.value.path, caught.value.row) == (str(tmp_path / "a.parquet"), 9)


@pytest.mark.parametrize(("given", "options", "error", "said"), [
    (lambda: tp.from_dataset([{"x": 1, "label": 2}]), {}, tp.SchemaError, "names tried were image, img"),
    (lambda: tp.from_dataset([{"image": b"", "x": 2}]), {}, tp.SchemaError, "tried were label, lab"),
    (lambda: rows().batch(2), {}, tp.ConfigError, "got one that batches"),
    (lambda: 7, {}, tp.ConfigError, "got int"),
    (rows, {"classes": ["a", "a"]}, tp.ConfigError, "each class once, got"),
    (rows, {"classes": 2}, tp.ConfigError, "must be the name of each class once, got"),
    (rows, {"classes": "cat"}, tp.ConfigError, "must be the name of each class once, got"),
    (rows, {"on_error": "drop"}, tp.ConfigError, '"raise" or "skip"'),
    (rows, {"size": 0}, tp.ConfigError, "random_resized_crop"),
    (rows, {"image": "pictures"}, tp.SchemaError, "no column 'pictures', only"),
])  # fmt: skip
def test_what_is_no_use_is_refused(given: Any, options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        images(given(), **(SMALL | options))


def test_classes_say_the_numbers_of_folders(tmp_path: Path) -> None:
    for name in ("10", "2", "cat"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "a.png")
    options: dict[str, Any] = {"train": False, "size": 4, "num_shards": 1}
    found = images(tmp_path, **options, classes=["1", "10", "2", "cat"]).peek()["labels"]
    assert found.tolist() == [1, 2, 3]
    assert images(tmp_path, **options).peek()["labels"].tolist() == [0, 1, 2]
    with pytest.raises(tp.DataError, match="'10', which is no class"):
        images(tmp_path, **options, classes=["a", "b", "cat"]).peek()


@pytest.mark.parametrize("column", ["image", "file_name", "image_id", "path"])
def test_a_table_of_paths_gives_its_pictures(column: str, tmp_path: Path) -> None:
    in_folders(tmp_path)
    names = [f"{CLASSES[label]}/{n:02}.png" for n, label in enumerate(LABELS)]
    lines = [f"{name},{label}\n" for name, label in zip(names, LABELS, strict=True)]
    (tmp_path / "train.csv").write_text(f"{column},label\n" + "".join(lines))
    (tmp_path / "pictures/beside.csv").write_text(f"{column},label\n" + "".join(lines))
    options: dict[str, Any] = {**SMALL, "train": False, "normalize": False, "resize": SIDE}
    for files, folder in [
        (tmp_path / "train.csv", tmp_path / "pictures"),
        (tmp_path / "pictures/beside.csv", None),
        ([tmp_path / "pictures/beside.csv"], None),
        (tp.read_csv(str(tmp_path / "train.csv")), str(tmp_path / "pictures")),
    ]:
        batches = list(images(files, folder=folder, **options))
        pixels = torch.cat([batch["images"] for batch in batches])
        labels = torch.cat([batch["labels"] for batch in batches])
        order = [digest(picture) for picture in pixels]
        expected = {digest(torch.from_numpy(p)): n for p, n in zip(PIXELS, LABELS, strict=True)}
        assert dict(zip(order, labels.tolist(), strict=True)) == expected
    with pytest.raises(tp.errors.UnreadableError, match=f"in {tmp_path}, where paths begin"):
        images(tmp_path / "train.csv", **options).peek()


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_folder_with_a_table_of_its_pictures(kind: str, tmp_path: Path) -> None:
    in_folders(tmp_path)
    names = [f"{CLASSES[label]}/{n:02}.png" for n, label in enumerate(LABELS)]
    table = pa.table({"file_name": names, "label": LABELS})
    path = tmp_path / f"pictures/metadata.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "csv":
        csv.write_csv(table, path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    options: dict[str, Any] = {**SMALL, "train": False, "normalize": False, "resize": SIDE}
    folder = tmp_path / "pictures"
    for files in (folder, str(folder), f"file://{folder}", [folder], (str(folder),)):
        batches = list(images(files, **options))
        assert torch.cat([batch["images"] for batch in batches]).equal(torch.from_numpy(PIXELS))
        assert torch.cat([batch["labels"] for batch in batches]).tolist() == LABELS


def test_classes_of_folders_to_evaluate_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = in_folders(tmp_path)
    images(folder, **SMALL)
    images(folder, train=False, classes=CLASSES, **SMALL)
    images(in_parquet(tmp_path), train=False, **SMALL)
    assert caplog.messages == []
    images(folder, train=False, **SMALL)
    images(tp.read_images(str(folder)), train=False, **SMALL)
    said = "images: classes are numbered in the order of the names that are here; where the training had "
    assert caplog.messages == [f"{said}others, pass its classes=[...]"] * 2


def test_structs_with_paths_alone_begin_at_their_file(tmp_path: Path) -> None:
    in_folders(tmp_path)
    names = [f"{CLASSES[label]}/{n:02}.png" for n, label in enumerate(LABELS)]
    table = pa.table(
        {"image": [None, *({"bytes": None, "path": name} for name in names)], "label": [0, *LABELS]}
    )
    pq.write_table(table, tmp_path / "pictures/a.parquet")
    for files in (tmp_path / "pictures/a.parquet", [tmp_path / "pictures/a.parquet"]):
        pipe = images(files, on_error="skip", **SMALL)
        assert sum(len(batch["labels"]) for batch in pipe) >= COUNT - 4
