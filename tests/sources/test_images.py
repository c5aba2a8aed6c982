"""Files as rows, images with their classes and labels: in ImageFolder's order, read when they are needed."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
from PIL import Image

import trainpipes as tp
from resuming import check_resume


def tree(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"content of {name}".encode())
    return folder


NAMES = [
    "dog/10.png",
    "dog/9.png",
    "dog/sub/1.JPG",
    "dog-2/1.png",
    "cat/b.jpeg",
    "cat/a.webp",
    "cat/z/0.png",
]


def short(rows: object, folder: Path) -> list[str]:
    return [row["path"].removeprefix(f"{folder}/") for row in rows]  # type: ignore[attr-defined]


def image_folder(folder: Path) -> list[tuple[str, int]]:
    """What torchvision's ImageFolder lists: by its code, which is short."""
    found = []
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    for label, name in enumerate(classes):
        for root, _, files in sorted(os.walk(folder / name, followlinks=True)):
            found += [(os.path.join(root, file), label) for file in sorted(files)]
    return found


# Bytes


def test_each_file_is_a_row_in_natural_order_of_names(tmp_path):
    tree(tmp_path, ["10.bin", "9.bin", "a/1.txt", "_skipped"])
    rows = list(tp.read_bytes(tmp_path))
    assert short(rows, tmp_path) == ["9.bin", "10.bin", "a/1.txt"]
    assert rows[2]["bytes"] == b"content of a/1.txt"
    assert short(tp.list_files(tmp_path, suffix=".txt").read_bytes(), tmp_path) == ["a/1.txt"]


def test_a_file_that_changes_or_goes_is_named(tmp_path):
    tree(tmp_path, ["a.bin", "b.bin"])
    pipe = tp.read_bytes(tmp_path)
    assert len(pipe) == 2
    (tmp_path / "b.bin").write_bytes(b"more than there was before")
    with pytest.raises(tp.DataChangedError, match=r"b\.bin: the file has changed"):
        list(pipe)
    pipe = tp.read_bytes(tmp_path)
    assert len(pipe) == 2
    (tmp_path / "b.bin").unlink()
    with pytest.raises(tp.MissingFilesError, match=r"b\.bin.*no longer is"):
        list(pipe)


def test_an_empty_file_is_a_row_without_bytes_and_a_state_of_other_files_is_refused(tmp_path):
    (tmp_path / "a.bin").touch()
    pipe = tp.read_bytes(tmp_path)
    assert [row["bytes"] for row in pipe] == [b""]
    state = pipe.state_dict()
    (tmp_path / "b.bin").touch()
    with pytest.raises(tp.StateError):
        tp.read_bytes(tmp_path).load_state_dict(state)


# Images


def test_classes_and_order_are_those_of_image_folder(tmp_path):
    tree(tmp_path, NAMES)
    rows = list(tp.read_images(tmp_path))
    assert [(row["path"], row["label"]) for row in rows] == image_folder(tmp_path)
    assert [row["class"] for row in rows] == ["cat"] * 3 + ["dog"] * 3 + ["dog-2"]
    assert rows[0]["bytes"] == b"content of cat/a.webp"


@pytest.mark.parametrize("pattern", ["", "*/*.*", "*/*", "*/*.[jJ]*", "*"])
def test_names_may_begin_as_cameras_and_classes_of_others_do(tmp_path: Path, pattern: str) -> None:
    tree(tmp_path, ["cat/a.jpg", "cat/_DSC1.jpg", "dog/_MG_2.JPG", "_other/_c.jpg"])
    expected = image_folder(tmp_path)
    tree(tmp_path, ["cat/_SUCCESS", "cat/.a.jpg", "__MACOSX/cat/._a.jpg", "_made/_x"])
    tree(tmp_path / "_unfinished", ["x/y.jpg"])
    rows = tp.read_images(f"{tmp_path}/{pattern}")
    assert [(row["path"], row["label"]) for row in rows] == expected
    assert len(list(tp.read_images(f"{tmp_path}/**/*.jpg"))) == 3


@pytest.mark.parametrize("folder", ["~/pets", "file://{home}/pets", "{home}/../{name}/pets/"])
def test_a_class_is_a_folder_below_the_listed_one_however_that_is_written(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    tree(tmp_path / "pets", ["cat/in/1.png"])
    (tmp_path / "labels.csv").write_text("file,age\npets/cat/in/1.png,3\n")
    pets = folder.format(home=tmp_path, name=tmp_path.name)
    assert [row["class"] for row in tp.read_images(pets)] == ["cat"]
    csv = pets.rstrip("/").replace("pets", "labels.csv")
    assert [row["age"] for row in tp.read_images(pets, csv)] == [3]


def classes(rows: object, folder: Path) -> list[tuple[str, str, int]]:
    found = {
        (os.path.dirname(row["path"]).removeprefix(f"{folder}/"), row["class"], row["label"])
        for row in rows
    }
    return sorted(found)


def test_folders_of_one_name_below_several_listed_ones_are_one_class(tmp_path, caplog):
    tree(tmp_path, ["a/cat/1.png", "a/dog/in/1.png", "b/cat/1.png", "b/bird/1.png"])
    expected = [
        ("a/cat", "cat", 1),
        ("a/dog/in", "dog", 2),
        ("b/bird", "bird", 0),
        ("b/cat", "cat", 1),
    ]
    both = [tmp_path / "a", tmp_path / "b"]
    assert classes(tp.read_images(both), tmp_path) == expected
    assert classes(tp.read_images(both[::-1]), tmp_path) == expected
    assert len(classes(tp.read_images([f"{one}/*/*.png" for one in both]), tmp_path)) == 3
    assert not caplog.records
    by_class = [row["class"] for row in tp.read_images(both)]
    assert by_class == sorted(by_class)
    check_resume(tp.read_images(both).sharding_filter(2).shuffle(3, seed=1).batch(2), processes=0)


def test_a_list_of_folders_of_classes_has_their_names(tmp_path):
    tree(tmp_path, ["a/cat/1.png", "a/dog/in/1.png", "a/dog/2.png", "b/cat/1.png", "b/bird/1.png"])
    named = [tmp_path / "a/cat", tmp_path / "b/bird", tmp_path / "a/dog"]
    expected = [
        ("a/cat", "cat", 1),
        ("a/dog", "dog", 2),
        ("a/dog/in", "dog", 2),
        ("b/bird", "bird", 0),
    ]
    assert classes(tp.read_images(named), tmp_path) == expected
    files = [tmp_path / "a/cat/1.png", tmp_path / "a/dog/in/1.png"]
    assert [row["class"] for row in tp.read_images(files)] == ["cat", "dog"]
    for mixed in ([tmp_path / "a", tmp_path / "b/cat"], [tmp_path / "b/cat", tmp_path / "a"]):
        with pytest.raises(
            tp.ConfigError, match=r"all must be classes, got .*b/cat/1.png, which lies in"
        ):
            list(tp.read_images(mixed))
        assert len(list(tp.read_images(mixed, None))) == 4


def test_other_files_are_no_images_and_labels_may_be_left_out(tmp_path):
    tree(tmp_path, [*NAMES, "cat/notes.txt", "loose.png"])
    with pytest.raises(
        tp.ConfigError, match=r"loose\.png lies in no folder of a class.*labels=None"
    ):
        list(tp.read_images(tmp_path))
    rows = list(tp.read_images(tmp_path, None))
    assert len(rows) == 8
    assert list(rows[0]) == ["path", "bytes"]
    kept = tp.list_files(tmp_path).filter(lambda path: "loose" not in path).read_images()
    assert len(list(kept)) == 7
    with pytest.raises(tp.MissingFilesError):
        list(tp.read_images(tree(tmp_path / "none", ["a.txt"])))


def test_every_kind_of_image_that_is_decoded_is_listed(tmp_path):
    kinds = ["jpg", "jpe", "jfif", "png", "webp", "gif", "avif", "bmp", "tif", "ppm", "jp2"]
    for label, kind in enumerate(kinds):
        place = tmp_path / f"{label:02} {kind}"
        place.mkdir()
        Image.new("RGB", (8, 4), (label, 0, 0)).save(place / f"a.{kind}", lossless=True)
    rows = list(tp.read_images(tmp_path).decode_image("bytes"))
    assert [row["label"] for row in rows] == [*range(len(kinds))]
    assert [row["image"].shape for row in rows] == [(3, 4, 8)] * len(kinds)


def test_a_folder_without_images_is_said_to_be_no_class(tmp_path, caplog):
    tree(tmp_path, ["ant/1.heic", "bee/1.png", "cat/notes.txt", "_made/a.txt", ".git/x"])
    (tmp_path / "dog").mkdir()
    pipe = tp.read_images(tmp_path)
    assert [row["class"] for row in [*pipe, *pipe]] == ["bee", "bee"]
    said = f"folders of {tmp_path} without an image that it reads are no classes: ant, cat, dog"
    assert [record.message for record in caplog.records] == [f"read_images: {said}"]
    list(tp.list_files(tmp_path).filter(lambda path: "bee" in path).read_images())
    list(tp.read_images(tmp_path, None))
    assert len(caplog.records) == 1


def test_files_of_every_kind_have_the_classes_of_their_folders(tmp_path):
    folder = tree(tmp_path, ["yes/a.wav", "no/b.wav", "no/c.txt"])
    rows = list(tp.list_files(folder).read_bytes(labels="folder"))
    assert short(rows, folder) == ["no/b.wav", "no/c.txt", "yes/a.wav"]
    assert [(row["class"], row["label"]) for row in rows] == [("no", 0), ("no", 0), ("yes", 1)]
    assert rows[0]["bytes"] == b"content of no/b.wav"
    assert set(next(iter(tp.list_files(folder).read_bytes()))) == {"path", "bytes"}
    (folder / "notes").touch()
    with pytest.raises(tp.ConfigError, match=r"read_bytes\('folder'\): .*/notes lies in no folder"):
        list(tp.list_files(folder).read_bytes(labels="folder"))


def test_a_pattern_may_name_a_folder_with_brackets(tmp_path):
    folder = tree(tmp_path / "v[1]", ["yes/a.png", "no/b.png"])
    rows = list(tp.read_images(f"{tmp_path}/v[[]1]/*/*.png"))
    assert [(row["class"], row["label"]) for row in rows] == [("no", 0), ("yes", 1)]
    tree(tmp_path / "w", ["yes/a.png"])
    both = tp.read_images([f"{tmp_path}/v[[]1]/*/*.png", f"{tmp_path}/w/*/*.png"])
    assert [(row["class"], row["label"]) for row in both] == [("no", 0), ("yes", 1), ("yes", 1)]
    assert short(rows, folder) == ["no/b.png", "yes/a.png"]


def test_a_csv_may_name_files_without_their_ends(tmp_path):
    tree(tmp_path, ["train/a.b.jpg", "train/7.png", "train/8.png", "numbers/007.png"])
    (tmp_path / "train.csv").write_text("id,breed\n8,pug\n7,poodle\na.b,boxer\n")
    rows = list(tp.list_files(tmp_path / "train").read_images(labels=tmp_path / "train.csv"))
    assert short(rows, tmp_path) == ["train/7.png", "train/8.png", "train/a.b.jpg"]
    assert [row["breed"] for row in rows] == ["poodle", "pug", "boxer"]
    (tmp_path / "numbers.csv").write_text("id,label\n007,01\n")
    (row,) = tp.list_files(tmp_path / "numbers").read_images(labels=tmp_path / "numbers.csv")
    assert row["label"] == 1


def test_captions_of_a_large_csv_have_line_ends(tmp_path: Path) -> None:
    caption = "one\n" + "and more " * 4000
    lines = ["file_name,caption"]
    for n in range(40):  # above 1 MB, which Arrow reads in parts
        (tmp_path / f"{n:02}.png").write_bytes(b"...")
        lines.append(f'{n:02}.png,"{caption}"')
    (tmp_path / "captions.csv").write_text("\n".join(lines))
    rows = tp.read_images(str(tmp_path / "*.png"), labels=tmp_path / "captions.csv")
    assert [row["caption"] for row in rows] == [caption] * 40


def test_labels_of_a_store_are_opened_by_the_options_of_the_files(s3):
    system, place = fsspec.filesystem("s3", **s3), "test-images/labelled"
    system.pipe({f"{place}/a.png": b"...", f"{place}/labels.csv": b"image,x\na.png,7\n"})
    files = tp.list_files(f"s3://{place}/*.png", storage_options=s3)
    assert [row["x"] for row in files.read_images(labels=f"s3://{place}/labels.csv")] == [7]


def test_classes_on_a_server_are_the_same(tmp_path):
    tree(tmp_path, NAMES)
    memory = fsspec.filesystem("memory")
    for name in NAMES:
        memory.pipe_file(f"/images/{tmp_path.name}/{name}", (tmp_path / name).read_bytes())
    there = tp.read_images(f"memory://images/{tmp_path.name}").select("class", "label", "bytes")
    assert list(there) == list(tp.read_images(tmp_path).select("class", "label", "bytes"))


def test_labels_of_a_csv_come_with_their_images(tmp_path):
    tree(tmp_path / "images", ["a.png", "b.png", "in/c.png"])
    csv = tmp_path / "labels.csv"
    csv.write_text("age,file_name,name\n3,b.png,Bo\n4,a.png,Al\n5,in/c.png,\n6,gone.png,No\n")
    rows = list(tp.read_images(tmp_path / "images", csv))
    assert [(Path(r["path"]).name, r["age"], r["name"]) for r in rows] == [
        ("a.png", 4, "Al"),
        ("b.png", 3, "Bo"),
        ("c.png", 5, ""),
    ]
    csv.write_text("filename,x\nimages/a.png,1\nimages/b.png,2\nimages/in/c.png,3\n")
    pipe = tp.read_images(tmp_path / "images", str(csv))
    assert [row["x"] for row in pipe] == [1, 2, 3]
    state = pipe.state_dict()
    csv.write_text("filename,x\nimages/a.png,1\nimages/b.png,2\nimages/in/c.png,4\n")
    with pytest.raises(tp.StateError):
        tp.read_images(tmp_path / "images", str(csv)).load_state_dict(state)


@pytest.mark.parametrize(
    "content",
    [
        "path,x\n{at}/images/b.png,2\n{at}/images/a.png,1\n",  # whole names
        "file,file_name,x\n1,images/b.png,2\n2,images/a.png,1\n",  # the first of the usual columns
        "image,x\nb.png,2\na.png,1\n",  # names below the folder that was listed
    ],
)
@pytest.mark.parametrize("server", [False, True], ids=["on a disk", "on a server"])
def test_names_in_a_csv_are_whole_or_below_a_folder(content, server, tmp_path):
    tree(tmp_path / "images", ["a.png", "b.png"])
    at = str(tmp_path)
    if server:
        memory, at = fsspec.filesystem("memory"), f"memory:///csv/{tmp_path.name}"
        for name in ("a.png", "b.png"):
            memory.pipe_file(f"{at}/images/{name}", b"...")
        memory.pipe_file(f"{at}/labels.csv", content.format(at=at).encode())
    else:
        (tmp_path / "labels.csv").write_text(content.format(at=at))
    rows = list(tp.read_images(f"{at}/images", f"{at}/labels.csv"))
    assert [(row["path"], row["x"]) for row in rows] == [
        (f"{at}/images/a.png", 1),
        (f"{at}/images/b.png", 2),
    ]


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        ("file_name,x\na.png,1\n", tp.SchemaError, r"no row for .*b\.png"),
        ("file_name,x\na.png,1\na.png,2\nb.png,3\n", tp.SchemaError, r"two rows for 'a\.png'"),
        ("picture,x\na.png,1\n", tp.SchemaError, "needs a column with the files' names"),
        ("file_name,bytes\na.png,1\nb.png,2\n", tp.SchemaError, "rename it"),
        ("file_name,path\na.png,1\nb.png,2\n", tp.SchemaError, "a column 'path'.*rename it"),
        ("file_name,x,x\na.png,1,2\nb.png,1,2\n", tp.SchemaError, "a column 'x' twice"),
        ("file_name,x\na.png,1\nb.png\n", tp.UnreadableError, "cannot be read as CSV"),
        (None, tp.MissingFilesError, "labels.csv"),
    ],
)
def test_labels_that_do_not_fit_are_refused_with_a_way_out(content, error, said, tmp_path):
    tree(tmp_path, ["a.png", "b.png"])
    csv = tmp_path / "labels.csv"
    if content is not None:
        csv.write_text(content)
    with pytest.raises(error, match=said):
        list(tp.read_images(tmp_path, csv))


@pytest.mark.parametrize("reader", ["read_images", "read_bytes"])
def test_files_that_are_rows_are_not_shuffled_before_the_reader(reader, tmp_path):
    files = tp.list_files(tree(tmp_path, NAMES))
    shuffled = getattr(files.shuffle(seed=1), reader)
    with pytest.raises(tp.ConfigError, match=rf"here each file is one.*put it after {reader}\(\)"):
        list(shuffled())
    plain = getattr(files, reader)
    assert list(shuffled().shuffle(3, seed=1)) == list(plain().shuffle(3, seed=1))
    assert short(plain().shuffle(seed=1), tmp_path) != short(plain(), tmp_path)
