"""The stages on images: what they give of odd pictures, what they draw, and what they refuse."""

from __future__ import annotations

import hashlib
import io
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

import trainpipes as tp
from resuming import check_resume
from trainpipes.stages.map import RowFunction
from trainpipes.testing import digest

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
RGB = Image.fromarray(PIXELS)


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def decode(content: Any, **options: Any) -> Any:
    (row,) = tp.from_dataset([{"bytes": content}]).decode_image(**options)
    return row["image"]


def chw(image: Any) -> Any:
    """What Pillow alone makes of an image."""
    return np.asarray(image).transpose(2, 0, 1)


def photos(count: int = 12, side: int = 16) -> tp.Pipeline:
    rng = np.random.default_rng(3)
    pictures = rng.integers(0, 256, (count, 3, side, side), dtype=np.uint8)
    return tp.from_dataset([{"image": image, "n": n} for n, image in enumerate(pictures)])


# decode_image


def test_a_picture_comes_as_its_pixels_in_place_of_its_bytes() -> None:
    (row,) = tp.from_dataset([{"a": 1, "bytes": file_of(RGB), "b": 2}]).decode_image()
    assert list(row) == ["a", "image", "b"]
    image = row["image"]
    assert (image.dtype, image.shape) == (np.uint8, (3, 20, 30))
    assert (image == PIXELS.transpose(2, 0, 1)).all()
    assert image.flags.c_contiguous
    assert image.flags.writeable


JPEG = file_of(RGB, "JPEG")
PALETTE = RGB.quantize(8)
DEEP = (np.arange(600, dtype=np.uint16).reshape(20, 30) * 100) + 55

#: Files, and what Pillow alone makes of them by plain steps.
ODD: dict[str, tuple[bytes, Any]] = {
    "one pixel": (file_of(Image.new("RGB", (1, 1), (1, 2, 3))), np.array([[[1]], [[2]], [[3]]])),
    "CMYK": (
        file_of(RGB.convert("CMYK"), "JPEG", quality=100),
        chw(Image.open(io.BytesIO(file_of(RGB.convert("CMYK"), "JPEG", quality=100))).convert("RGB")),
    ),
    "palette": (file_of(PALETTE), chw(PALETTE.convert("RGB"))),
    "palette, one colour clear": (file_of(PALETTE, transparency=3), chw(PALETTE.convert("RGB"))),
    "palette with alpha": (
        file_of(PALETTE, transparency=bytes([0, 128, 255, 0, 9, 9, 9, 9])),
        chw(PALETTE.convert("RGB")),
    ),
    "grey with alpha": (file_of(RGB.convert("LA")), chw(RGB.convert("L").convert("RGB"))),
    "alpha": (file_of(RGB.convert("RGBA")), chw(RGB)),
    "one bit": (file_of(RGB.convert("1")), chw(RGB.convert("1").convert("RGB"))),
    "16 bits": (file_of(Image.fromarray(DEEP)), np.stack([DEEP >> 8] * 3)),
    "16 bits, TIFF": (file_of(Image.fromarray(DEEP), "TIFF"), np.stack([DEEP >> 8] * 3)),
    "16 bits, PGM": (
        b"P5\n30 20\n65535\n" + DEEP.astype(">u2").tobytes(), np.stack([DEEP >> 8] * 3),
    ),
    "10 bits, PGM": (
        b"P5\n30 20\n1023\n" + (DEEP >> 6).astype(">u2").tobytes(), np.stack([DEEP >> 8] * 3),
    ),
    "animated": (
        file_of(PALETTE, "GIF", save_all=True, append_images=[PALETTE.rotate(180)]),
        chw(PALETTE.convert("RGB")),
    ),
    "EXIF that cannot be read": (
        JPEG[:2] + b"\xff\xe1\x00\x10Exif\0\0garbage!" + JPEG[2:],
        chw(Image.open(io.BytesIO(JPEG))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_pictures_become_rgb(name: str) -> None:
    content, expected = ODD[name]
    found = decode(content)
    assert found.dtype == np.uint8
    assert (found == expected).all()
    assert found.shape == expected.shape


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGBA", 4)])
def test_other_modes_have_other_channels(mode: Any, channels: int) -> None:
    for content, expected in ODD.values():
        assert decode(content, mode=mode).shape == (channels, *expected.shape[1:])
    assert (decode(file_of(RGB), mode="L")[0] == np.asarray(RGB.convert("L"))).all()
    clear = decode(file_of(PALETTE, transparency=bytes([0] * 8)), mode="RGBA")
    assert (clear[3] == 0).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_comes_upright(orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        content = file_of(RGB, kind, exif=exif)
        expected = chw(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
        assert np.array_equal(decode(content), expected), kind


def test_a_large_jpeg_may_be_decoded_smaller() -> None:
    photo = RGB.resize((640, 420), Image.Resampling.BICUBIC)
    content = file_of(photo, "JPEG", quality=95)
    assert decode(content, min_size=200).shape == (3, 210, 320)
    assert (3, 53, 80) in [decode(content, min_size=size).shape for size in (52, 53)]
    assert decode(content, min_size=421).shape == (3, 420, 640)
    assert decode(file_of(photo), min_size=8).shape == (3, 420, 640), "a PNG has one size"
    whole = np.asarray(Image.fromarray(decode(content).transpose(1, 2, 0)).resize((320, 210)))
    near = np.abs(decode(content, min_size=200).astype(int) - whole.transpose(2, 0, 1))
    assert near.mean() < 3


def test_bytes_may_stand_in_structs_as_datasets_of_hugging_face_have_them() -> None:
    table = pa.table({"image": [{"bytes": file_of(RGB), "path": "a.png"}], "label": [4]})
    (row,) = tp.from_arrow(table).decode_image("image")
    assert (row["image"] == PIXELS.transpose(2, 0, 1)).all()
    assert row["label"] == 4
    with pytest.raises(tp.errors.UnreadableError, match="it is null"):
        decode({"bytes": None, "path": None})


def test_paths_and_urls_are_read_where_the_folder_says(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(file_of(RGB))
    with fsspec.open("memory://paths/b.png", "wb") as file:
        file.write(file_of(RGB))
    values = [
        "a.png",
        f"{tmp_path}/a.png",
        "memory://paths/b.png",
        {"bytes": None, "path": "a.png"},
    ]
    for value in [*values, values[:2]]:
        image = decode(value, folder=tmp_path)
        for pixels in image if isinstance(image, list) else [image]:
            assert (pixels == PIXELS.transpose(2, 0, 1)).all()


@pytest.mark.parametrize(
    ("value", "options", "said"),
    [
        ("b.png", {}, "b.png: No such file or directory in the folder where the program runs, where"),
        ("b.png", {"folder": "there"}, "in there, where paths begin unless folder= names another"),
        ("/none/b.png", {"folder": "there"}, "/none/b.png: No such file or directory; fix it"),
        ("", {}, "it is empty"),
        ("/9j/4AAQ" * 1000, {}, r"\(8,000 characters\): it is no path; map\(\) makes bytes of base64"),
    ],
)  # fmt: skip
def test_a_path_without_a_picture_says_where_it_was_looked_for(
    value: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(tp.errors.UnreadableError, match=said) as caught:
        decode(value, **options)
    assert len(str(caught.value)) < 400
    rows = tp.from_dataset([{"bytes": value}, {"bytes": file_of(RGB)}])
    assert len(list(rows.decode_image(on_error="skip", **options))) == 1


def test_a_signed_url_of_a_picture_that_is_not_there_shows_no_secret() -> None:
    url = "memory://?X-Amz-Signature=geheim" + "0" * 300
    with pytest.raises(tp.errors.UnreadableError) as caught:
        decode(url)
    assert "geheim" not in str(caught.value)
    assert "base64" not in str(caught.value)


def test_pictures_by_their_paths_resume_exactly_and_a_folder_may_move(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        for n in range(12):
            (tmp_path / name / f"{n}.png").write_bytes(file_of(RGB.rotate(n)))
    rows = tp.from_dataset([{"bytes": f"{n}.png"} for n in range(12)])
    rows = rows.sharding_filter(2).shuffle(4, seed=1)

    def pipe(folder: str) -> tp.Pipeline:
        return rows.decode_image(folder=tmp_path / folder).random_crop(8).batch(2).collate()

    check_resume(pipe("old"))
    loader = tp.Loader(pipe("old"))
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), [digest(batch) for batch in batches]
    moved = tp.Loader(pipe("new"))
    moved.load_state_dict(state)
    assert [digest(batch) for batch in moved] == rest


BROKEN = {
    "cut": (JPEG[: len(JPEG) // 2], "runcated"),
    "cut PNG": (file_of(RGB)[:60], "truncated"),
    "empty": (b"", r"cannot identify image file \(0 bytes\)"),
    "text": (b"hello, world", "cannot identify image file"),
    "a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot identify"),
    "floats": (file_of(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "numbers of 32 bits"),
    "null": (None, "it is null"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_decoded_is_named_by_file_and_row(name: str, tmp_path: Path) -> None:
    content, said = BROKEN[name]
    rows = [{"bytes": file_of(RGB)}] * 5 + [{"bytes": content}] + [{"bytes": file_of(RGB)}] * 4
    path = tmp_path / "pictures.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    pipe = tp.read_parquet(path).decode_image().batch(3).collate()
    batches = iter(pipe)
    assert next(batches)["image"].shape == (3, 3, 20, 30)
    with pytest.raises(tp.errors.UnreadableError, match=said) as caught:
        next(batches)
    assert (caught.value.path, caught.value.row) == (str(path), 5)
    assert "on_error" in str(caught.value)
    kept = tp.read_parquet(path).decode_image(on_error="skip").batch(3).collate()
    assert [len(batch["image"]) for batch in kept] == [3, 3, 3]


def test_what_is_left_out_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"bytes": file_of(RGB) if n % 3 else b"no", "n": n} for n in range(9)]
    pipe = tp.from_dataset(rows).decode_image(on_error="skip")
    assert [row["n"] for row in pipe] == [1, 2, 4, 5, 7, 8]
    assert "1 of 1 image left out: they cannot be decoded" in caplog.text
    assert "3 of 9 images left out" in str(pipe.explain())
    with pytest.raises(TypeError, match="known only at the end"):
        len(pipe)


def threads_that_decode(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """The threads that open pictures, each of which waits until another one does, for a moment."""
    seen = set()
    together = threading.Barrier(2)
    plain = Image.open

    def note(*args: Any, **options: Any) -> Any:
        seen.add(threading.current_thread())
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2 if len(seen) < 2 else 0)
        return plain(*args, **options)

    monkeypatch.setattr(Image, "open", note)
    assert len(list(pipe)) == 10
    return seen


@pytest.mark.parametrize("own", [False, True])
def test_threads_decode_beside_a_users_function(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINPIPES_THREADS", "2")
    callers = set()
    rows = tp.from_arrow(pa.table({"bytes": [file_of(RGB)] * 40})).decode_image()
    rows = rows.map(lambda row: (callers.add(threading.current_thread()), row)[1]) if own else rows
    seen = threads_that_decode(rows.batch(4).collate(), monkeypatch)
    assert len(seen) >= 2
    assert callers <= {threading.current_thread()}


def test_without_threads_the_one_that_iterates_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tp.from_arrow(pa.table({"bytes": [file_of(RGB)] * 40})).decode_image()
    loader = tp.Loader(rows.map(dict).batch(4).collate(), threads=0)
    assert threads_that_decode(loader, monkeypatch) == {threading.current_thread()}


def test_a_look_aside_takes_no_threads_from_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tp.from_arrow(pa.table({"bytes": [file_of(RGB)] * 44})).decode_image()
    loader = tp.Loader(rows.map(dict).batch(4).collate(), threads=2)
    batches = iter(loader)
    next(batches)
    tp.locate(loader, 3)
    loader.peek()
    assert len(threads_that_decode(batches, monkeypatch)) >= 2


def test_an_iterator_without_threads_may_begin_while_another_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ``tp.locate`` does, between two looks at how many threads there are."""
    pipe = tp.from_dataset([{"bytes": file_of(RGB)} for _ in range(6)]).decode_image().batch(2)
    threads_of = RowFunction._workers

    def found(stage: Any) -> Any:
        threads = threads_of(stage)
        stage._settle(0)
        return threads

    monkeypatch.setattr(RowFunction, "_workers", found)
    assert len(list(tp.Loader(pipe, threads=2))) == 3


def test_what_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainpipes._internal.checks.find_spec", lambda name: None)
    rows = photos()
    for step in (rows.decode_image, partial(rows.resize, 3), partial(rows.random_resized_crop, 3)):
        with pytest.raises(tp.errors.MissingExtraError, match=r"pip install pillow$"):
            step()
    rows.random_crop(3).flip().normalize()


# resize, crops, flips


@pytest.mark.parametrize(
    ("size", "shape"), [(10, (10, 15)), (40, (40, 60)), ((7, 9), (7, 9)), ([1, 1], (1, 1)), (20, (20, 30))]
)  # fmt: skip
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_picture_is_resized_as_pillow_does_it(size: Any, shape: Any, channels: int) -> None:
    image = np.random.default_rng(1).integers(0, 256, (channels, 20, 30), dtype=np.uint8)
    (row,) = tp.from_dataset([{"image": image}]).resize(size, interpolation="bicubic")
    by = Image.Resampling.BICUBIC
    alone = [np.asarray(Image.fromarray(plane).resize(shape[::-1], by)) for plane in image]
    assert np.array_equal(row["image"], alone), "no channel has a part in another"


def test_a_high_picture_keeps_its_shape() -> None:
    image = np.zeros((3, 31, 10), np.uint8)
    (row,) = tp.from_dataset([{"image": image}]).resize(7)
    assert row["image"].shape == (3, 21, 7)
    said = "of 1 x 90000 pixels would become 224 x 20,160,000"
    with pytest.raises(tp.errors.DataError, match=said):
        list(tp.from_dataset([{"image": np.zeros((1, 1, 90000), np.uint8)}]).resize(224))


def test_parts_are_cut_everywhere_alike_and_are_parts() -> None:
    image = np.arange(36, dtype=np.uint8).reshape(1, 6, 6)
    rows = tp.from_dataset([{"image": image}] * 1800)
    places = np.array([row["image"][0, 0, 0] for row in rows.random_crop(4)])
    tops, lefts = places // 6, places % 6
    counts = np.zeros((3, 3))
    np.add.at(counts, (tops, lefts), 1)
    assert np.abs(counts - 200).max() < 67  # 5 sigma
    (row,) = rows.take(1).center_crop((2, 4))
    assert row["image"].tolist() == [[[13, 14, 15, 16], [19, 20, 21, 22]]]
    for side, first in ((5, 0), (3, 2), (1, 2)):  # half a pixel goes as torchvision's
        (row,) = rows.take(1).center_crop(side)
        assert np.array_equal(row["image"], image[:, first : first + side, first : first + side])
    padded = [row["image"] for row in rows.take(200).random_crop(6, padding=2, fill=99)]
    assert all(part.shape == (1, 6, 6) for part in padded)
    assert any((part[0, :2] == 99).all() for part in padded)
    assert any((part == image).all() for part in padded)


def test_a_random_part_has_the_area_and_the_ratio_asked_for() -> None:
    y, x = np.mgrid[0:200, 0:240]
    image = np.stack([y, x, y]).astype(np.uint8)
    rows = tp.from_dataset([{"image": image}] * 300)
    areas = []
    for row in rows.random_resized_crop(50, scale=(0.2, 0.6), interpolation="nearest"):
        part = row["image"].astype(int)
        assert part.shape == (3, 50, 50)
        height, width = (np.ptp(part[0]) + 4, np.ptp(part[1]) + 4)
        assert 0.65 < width / height < 1.55
        areas.append(height * width / (200 * 240))
    assert 0.17 < min(areas) < 0.25
    assert 0.55 < max(areas) < 0.68
    narrow = tp.from_dataset([{"image": np.zeros((3, 200, 1), np.uint8)}])
    assert next(iter(narrow.random_resized_crop(8)))["image"].shape == (3, 8, 8)


def test_flips_are_of_the_axis_and_the_share() -> None:
    image = np.array([[[1, 2], [3, 4]]], np.uint8)
    rows = tp.from_dataset([{"image": image}] * 1000)

    def corners(pipe: tp.Pipeline) -> Any:
        return np.bincount([row["image"][0, 0, 0] for row in pipe], minlength=5)[1:]

    assert np.abs(corners(rows.flip(0.25)) - [750, 250, 0, 0]).max() < 70
    assert corners(rows.flip(1, direction="vertical")).tolist() == [0, 0, 1000, 0]
    assert corners(rows.flip(0)).tolist() == [1000, 0, 0, 0]
    # Two flips draw by themselves.
    both = corners(rows.flip().flip(direction="vertical"))
    assert np.abs(both - 250).max() < 70
    assert np.abs(corners(rows.flip().flip()) - [500, 500, 0, 0]).max() < 80


def test_clips_are_normalized_in_rows_and_batches_alike() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (4, 2, 8, 9, 3), dtype=np.uint8)
    clips = tp.from_dataset([{"image": clip} for clip in pixels])
    before = next(iter(clips.normalize().batch(4).collate()))["image"]
    assert before.shape == (4, 2, 3, 8, 9)
    after = next(iter(clips.batch(4).collate().normalize()))["image"]
    assert torch.equal(before, after)
    assert after.is_contiguous()
    with pytest.raises(tp.DataError, match="3 channels, and mean 2 values"):
        list(clips.batch(2).collate().normalize(mean=[0.5, 0.5]))


def test_pixels_are_normalized_in_rows_and_batches_alike() -> None:
    by_row = list(photos().normalize().batch(5).collate())
    by_batch = list(photos().batch(5).collate().normalize())
    for one, other in zip(by_row, by_batch, strict=True):
        assert torch.equal(one["image"], other["image"])
        assert other["image"].dtype == torch.float32
    plain = torch.stack([torch.from_numpy(row["image"]) for row in photos().take(5)])
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    assert torch.equal(by_batch[0]["image"], (plain.to(torch.float32) / 255 - mean) / std)
    floats = [{"image": np.full((1, 2, 2), 0.75, np.float64)}]
    (row,) = tp.from_dataset(floats).normalize(0.5, 0.5)
    assert row["image"].tolist() == [[[0.5, 0.5], [0.5, 0.5]]]
    assert floats[0]["image"][0, 0, 0] == 0.75
    of_255 = [{"image": np.full((1, 2, 2), 191.25, np.float32)}]
    (row,) = tp.from_dataset(of_255).normalize(127.5, 127.5)
    assert row["image"].tolist() == [[[0.5, 0.5], [0.5, 0.5]]]


def test_images_of_bfloat16_are_normalized_in_rows_and_batches_alike() -> None:
    rows = tp.from_tensors(image=torch.rand(4, 3, 2, 2).bfloat16())
    (batch,) = rows.batch(4).collate().normalize()
    (by_row,) = rows.normalize().batch(4).collate()
    assert torch.equal(batch["image"], by_row["image"])
    assert batch["image"].dtype == torch.float32


def test_rows_of_tensors_and_of_memory_maps_are_images_too(tmp_path: Path) -> None:
    images = torch.arange(5 * 3 * 4 * 4, dtype=torch.uint8).reshape(5, 3, 4, 4)
    tp.write_memmap(tmp_path / "m", tp.from_tensors(image=images))
    for rows in (tp.from_tensors(image=images), tp.from_memmap(tmp_path / "m")):
        found = next(iter(rows.flip(1).center_crop(2).batch(5).collate()))["image"]
        assert torch.equal(found, images.flip(3)[:, :, 1:3, 1:3])


def test_stages_may_stand_above_batch() -> None:
    below = [digest(batch) for batch in photos().flip().batch(4).collate()]
    assert [digest(batch) for batch in photos().batch(4).flip().collate()] == below


# Draws


def augmented(rows: tp.Pipeline, seed: int = 0) -> tp.Pipeline:
    rows = rows.random_crop(12, padding=1, seed=seed).flip(seed=seed)
    return rows.flip(0.3, direction="vertical", seed=seed).random_resized_crop(8, seed=seed)


def test_a_row_is_drawn_the_same_in_any_order_and_anew_in_each_epoch(tmp_path: Path) -> None:
    def by_row(pipe: tp.Pipeline) -> dict[int, bytes]:
        return {row["n"]: row["image"].tobytes() for row in pipe}

    pipe = augmented(photos(40))
    first, second = by_row(pipe), by_row(pipe)
    assert sum(first[n] == second[n] for n in first) < 5
    mixed = augmented(photos(40).sharding_filter(4).shuffle(9, seed=3))
    assert by_row(mixed) == first
    assert by_row(mixed) == second
    assert sum(by_row(augmented(photos(40), seed=1))[n] == first[n] for n in first) < 5


def test_draws_are_those_that_earlier_versions_made(golden: Any) -> None:
    def sums(pipe: tp.Pipeline) -> list[str]:
        return [hashlib.sha256(row["image"].tobytes()).hexdigest()[:12] for row in pipe]

    found = {
        "random_crop": sums(photos(6).random_crop(9, padding=2)),
        "random_resized_crop": sums(photos(6).random_resized_crop(5, interpolation="nearest")),
        "flip": sums(photos(6).flip()),
        "flip, two": sums(photos(6).flip(seed=3).flip(seed=3)),
        "third epoch": sums(photos(3).random_crop(9, seed=-1).repeat(3))[6:],
        "normalize": sums(photos(2).normalize()),
    }
    golden("image_draws.json", found)


# image_transform


class Noise(torch.nn.Module):
    """As transforms of torchvision are: it draws from torch's global generator."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if torch.rand(1) < self.p:
            image = image.flip(-1)
        return image + torch.randint(0, 9, (*image.shape[:1], 1, 1), dtype=torch.uint8)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def test_a_transform_draws_by_the_row_and_leaves_torchs_generator_alone() -> None:
    pipe = photos(20).image_transform(Noise())
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = {row["n"]: row["image"] for row in pipe}
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)  # what others draw does not matter
    torch.rand(3)
    shuffled = photos(20).sharding_filter(4).shuffle(7, seed=1).image_transform(Noise())
    again = {row["n"]: row["image"] for row in shuffled}
    assert all(torch.equal(first[n], again[n]) for n in first)
    other = {row["n"]: row["image"] for row in pipe}
    assert not any(torch.equal(first[n], other[n]) for n in first)
    assert isinstance(first[0], torch.Tensor)


def test_stages_of_one_transform_draw_other_numbers_for_each_column() -> None:
    rows = photos(20).map(lambda row: {**row, "other": row["image"]})
    views = [*rows.image_transform(Noise()).image_transform(Noise(), column="other")]
    assert sum(torch.equal(row["image"], row["other"]) for row in views) < 5
    alone = photos(20).image_transform(Noise())
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(alone, views, strict=True))


def test_a_transform_gives_the_same_in_workers_of_its_own() -> None:
    rows = photos(20).sharding_filter(2).shuffle(7).image_transform
    plain, own = (rows(Noise(), num_workers=n).batch(4).collate() for n in (0, 2))
    assert [*map(digest, own)] == [*map(digest, plain)]


def test_a_transform_is_called_by_the_thread_that_iterates() -> None:
    seen = set()

    def note(image: torch.Tensor) -> torch.Tensor:
        seen.add(threading.current_thread())
        return image

    rows = photos(30).shuffle(8).image_transform(note, version="1")
    mixed = tp.mix({"a": rows, "b": photos(30)})
    pipe = rows.batch(2).collate()
    for source in (pipe, tp.Loader(pipe, threads=2), tp.Loader(mixed.batch(2), threads=2)):
        for _ in source:
            sum(k for k in range(20_000))  # a trainer at work
    assert seen == {threading.current_thread()}


def test_a_transform_that_returns_nothing_is_refused() -> None:
    def in_place(image: torch.Tensor) -> None:
        image.add_(1)

    with pytest.raises(tp.DataError, match=r"returned None; return the image.*at row 0\)"):
        list(photos(2).image_transform(in_place))


def test_a_state_knows_a_transform_by_how_it_prints() -> None:
    pipe = photos().image_transform(Noise(0.5)).batch(2)
    rows = iter(pipe)
    next(rows)
    state = rows.state_dict()
    photos().image_transform(Noise(0.5), num_workers=1).batch(2).load_state_dict(state)
    with pytest.raises(tp.StateError, match=r"p=0\.5.*p=0\.25"):
        photos().image_transform(Noise(0.25)).batch(2).load_state_dict(state)


# What is refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: p.collate().normalize(column="picture"), "picture"),
        (lambda p: p.collate().normalize(column="n"), r"of videos .B, T, C, H, W., got \[2\]"),
        (lambda p: p.collate(len).normalize(), "batches that are dicts of tensors, got int"),
        (lambda p: p.collate().normalize(mean=[0.5, 0.5]), "3 channels, and mean 2 values"),
        (
            lambda p: p.collate().normalize((123.7, 116.3, 103.5)),
            r"mean must be up to 1, .*, got \(123.7, .* by 255",
        ),
        (
            lambda p: p.collate().normalize(0, 255),
            r"std must be up to 1, as uint8 is divided by 255 first, got 255",
        ),
    ],
)
def test_wrong_batches_are_refused(make: Any, said: str) -> None:
    with pytest.raises((tp.DataError, tp.ConfigError), match=said):
        list(make(photos().batch(2)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint32])
def test_integers_that_are_no_pixels_are_refused(dtype: torch.dtype) -> None:
    rows = tp.from_dataset([{"image": torch.full((3, 4, 4), 200).to(dtype)}] * 2)
    said = f"holds {str(dtype)[6:]}, and pixels are integers of 8 or 16 bits, .*: make them uint8"
    for pipe in (rows.normalize(), rows.batch(2).collate().normalize()):
        with pytest.raises(tp.SchemaError, match=said) as caught:
            list(pipe)
        assert caught.value.row == 0
    short = rows.map(lambda row: {"image": row["image"].numpy().astype(np.uint16)})
    assert next(iter(short.normalize(0, 1)))["image"].max() == np.float32(200 / 65535)


# Several pictures of a row


def moving(kind: str, rows: int = 12) -> tp.Pipeline:
    """Rows with five frames of 8 x 9 pixels, all alike, whose values say where a pixel was."""
    frame = np.arange(3 * 8 * 9, dtype=np.uint8).reshape(3, 8, 9)
    video = np.stack([frame] * 5)
    images: Any = {"list": [frame] * 5, "TCHW": video, "THWC": video.transpose(0, 2, 3, 1)}[kind]
    return tp.from_dataset([{"image": images, "n": n} for n in range(rows)])


KINDS = ["list", "TCHW", "THWC"]
RANDOM: list[Any] = [
    lambda rows: rows.random_crop((4, 5)),
    lambda rows: rows.random_resized_crop(6),
    lambda rows: rows.flip(),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("augment", RANDOM)
def test_the_pictures_of_a_row_have_one_draw(augment: Any, kind: str) -> None:
    rows = list(augment(moving(kind)))
    for row in rows:
        assert len(row["image"]) == 5
        assert all(np.array_equal(frame, row["image"][0]) for frame in row["image"])
    assert len({np.asarray(row["image"]).tobytes() for row in rows}) > 1
    single = tp.from_dataset([{"image": row["image"][0]} for row in moving("list")])
    for row, one in zip(rows, augment(single), strict=True):
        assert np.array_equal(row["image"][0], one["image"]), "that of a row with one picture"


@pytest.mark.parametrize("kind", KINDS)
def test_videos_become_one_tensor(kind: str) -> None:
    rows = moving(kind).resize((4, 6)).center_crop(4)
    batch = next(iter(rows.batch(3).collate()))
    assert batch["image"].shape == (3, 5, 3, 4, 4)
    by_batch = next(iter(rows.batch(3).collate().normalize()))
    by_row = next(iter(rows.normalize().batch(3).collate()))
    padded = next(iter(rows.batch(3).pad_collate(dtype=torch.uint8).normalize()))
    for other in (by_row, padded):
        assert torch.equal(by_batch["image"], other["image"])
    if kind == "list":
        with pytest.raises(tp.SchemaError, match=r"holds int64.*pad_collate\(dtype=torch.uint8\)"):
            next(iter(rows.batch(3).pad_collate().normalize()))
    check_resume(moving(kind).random_crop(4).shuffle(5).batch(3).collate(), epochs=2, processes=0)


def test_a_video_without_frames_or_channels_is_named() -> None:
    for shape, said in (
        ((0, 3, 8, 9), "has no frames"),
        ((5, 7, 8, 9), r"got an array \[7, 8, 9\]"),
    ):
        with pytest.raises(tp.DataError, match=said) as caught:
            list(tp.from_dataset([{"image": np.zeros(shape, np.uint8)}]).flip())
        assert caught.value.row == 0
        rows = tp.from_dataset([{"image": np.zeros(shape, np.uint8)}])
        with pytest.raises(tp.DataError, match=rf"image_transform.*{said}"):
            list(rows.image_transform(Noise()))


def test_lists_of_arrays_that_differ_are_collated_as_torch_does() -> None:
    one, other = np.zeros((2, 3)), np.zeros((4, 3))
    (batch,) = tp.from_dataset([{"a": [one, other]}] * 2).batch(2).collate()
    assert [tuple(part.shape) for part in batch["a"]] == [(2, 2, 3), (2, 4, 3)]
    (pair,) = tp.from_dataset([[one, one]] * 2).batch(2).collate()  # rows that are lists
    assert [tuple(part.shape) for part in pair] == [(2, 2, 3), (2, 2, 3)]
    (tensors,) = tp.from_dataset([([torch.zeros(3)] * 4, 1)] * 2).batch(2).collate()
    assert tensors[0].shape == (2, 4, 3)
