"""Masks: numbers of classes, which no stage may mix, beside the picture that they are of."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import trainpipes as tp
from trainpipes.testing import check_resume

IDS = (np.arange(12).reshape(3, 4) % 3).astype(np.uint8)
#: The colors of the first classes of Pascal VOC.
COLORS = [0, 0, 0, 128, 0, 0, 0, 128, 0]


def file_of(ids: Any, mode: str | None = None, kind: str = "PNG", **options: Any) -> bytes:
    image = Image.fromarray(ids).convert(mode or None)
    if mode == "P":
        image = Image.fromarray(ids)
        image.putpalette(COLORS)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def decoded(content: bytes, **options: Any) -> Any:
    (row,) = tp.from_dataset([{"bytes": content}]).decode_image(**options)
    return row["image"]


def gray_png(ids: Any, bits: int) -> bytes:
    """A PNG of gray with few bits, which Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    places = np.unpackbits(ids[..., None], axis=-1)[..., -bits:].reshape(len(ids), -1)
    lines = b"".join(b"\0" + line.tobytes() for line in np.packbits(places, axis=1))
    head = struct.pack(">IIBBBBB", ids.shape[1], len(ids), bits, 0, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def pgm(ids: Any, most: int, plain: bool = False) -> bytes:
    shape = f"{ids.shape[1]} {ids.shape[0]}\n{most}\n"
    if plain:
        return f"P2\n{shape}{' '.join(map(str, ids.ravel().tolist()))}\n".encode()
    return f"P5\n{shape}".encode() + ids.astype(np.uint8 if most < 256 else ">u2").tobytes()


def gray_tiff() -> bytes:
    """Of 4 bits: a tag, its type, how many values, and the value."""
    tags = [
        (256, 2),
        (257, 1),
        (258, 4),
        (259, 1),
        (262, 1),
        (273, 8),
        (277, 1),
        (278, 1),
        (279, 1),
    ]
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    return b"II*\0" + struct.pack("<IB3xH", 12, 0x3F, len(tags)) + entries + bytes(4)


SIXTEEN = np.arange(16, dtype=np.uint8).reshape(2, 8)


@pytest.mark.parametrize("mode", ["P", "I"])
@pytest.mark.parametrize(
    ("content", "ids"),
    [
        (file_of(IDS, "P"), IDS),
        (file_of(IDS, "P", bits=2), IDS),
        (file_of(IDS, "P", transparency=0), IDS),
        (file_of(IDS, "P", "GIF"), IDS),
        (file_of(IDS), IDS),
        (file_of(IDS.astype(np.uint16)), IDS),
        (file_of(IDS > 0), IDS > 0),
        (gray_png(IDS, 2), IDS),
        (gray_png(SIXTEEN, 4), SIXTEEN),
        (gray_tiff(), np.array([[3, 15]])),
        (pgm(SIXTEEN, 20), SIXTEEN),
        (pgm(SIXTEEN, 20, plain=True), SIXTEEN),
        (pgm(SIXTEEN, 255), SIXTEEN),
        (pgm(SIXTEEN, 1000), SIXTEEN),
        (pgm(SIXTEEN, 65_535), SIXTEEN),
    ],
    ids=[
        "palette",
        "2 bits",
        "transparent",
        "GIF",
        "gray",
        "16 bits",
        "1 bit",
        "gray of 2 bits",
        "gray of 4 bits",
        "TIFF of 4 bits",
        "PGM",
        "plain PGM",
        "PGM of 8 bits",
        "PGM of more",
        "PGM of 16 bits",
    ],
)
def test_a_mask_keeps_its_numbers(content: bytes, ids: Any, mode: Any) -> None:
    mask = decoded(content, mode=mode)
    assert mask.dtype == {"P": np.uint8, "I": np.int32}[mode]
    assert np.array_equal(mask, ids[None])


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_numbers_above_255_are_kept_by_mode_i(kind: str) -> None:
    ids = IDS.astype(np.uint16) * 30_000
    assert decoded(file_of(ids, kind=kind), mode="I").tolist() == [ids.tolist()]
    with pytest.raises(tp.DataError, match='numbers up to 60,000, above 255: mode="I" keeps them'):
        decoded(file_of(ids, kind=kind), mode="P")
    of_32 = file_of(IDS.astype(np.int32) * 70_000, kind="TIFF")
    assert decoded(of_32, mode="I").max() == 140_000
    with pytest.raises(tp.DataError, match='no fixed range: mode="I" keeps them'):
        decoded(of_32)


def test_a_picture_of_colors_has_no_numbers() -> None:
    for mode in ("P", "I"):
        with pytest.raises(tp.DataError, match=r"holds colors \(Pillow's mode RGB\)"):
            decoded(file_of(IDS, "RGB"), mode=mode)


def test_masks_are_upright_cut_resized_and_collated() -> None:
    ids = IDS.astype(np.uint16) + 1000
    exif = Image.Exif()
    exif[0x0112] = 6
    rows = [{"bytes": file_of(ids, exif=exif)}] * 2
    masks = tp.from_dataset(rows).decode_image(mode="I")
    assert np.array_equal(next(iter(masks))["image"][0], np.rot90(ids, -1))
    stages = (
        lambda p: p.resize((8, 6), interpolation="nearest"),
        lambda p: p.random_resized_crop(5, interpolation="nearest"),
        lambda p: p.random_crop(2, padding=1),
        lambda p: p.flip().center_crop(2),
    )
    for stage in stages:
        batch = next(iter(stage(masks).batch(2).collate()))["image"]
        assert batch.dtype == torch.int32
        assert {*batch.unique().tolist()} <= {0, *ids.ravel().tolist()}
    assert "image" in str(masks.show())


def pairs(count: int = 8) -> tp.Pipeline:
    """Rows of a picture and its mask, whose numbers say where a pixel was."""
    ids = np.arange(12 * 15, dtype=np.uint8).reshape(1, 12, 15)
    picture = np.concatenate([ids] * 3)
    return tp.from_dataset([{"image": picture, "mask": ids, "n": n} for n in range(count)])


BOTH = ["image", "mask"]
NEAREST = {"image": "bilinear", "mask": "nearest"}
#: Of a column, what a stage is called with for both, and for the picture alone, and for its mask alone.
SHARED: dict[str, Any] = {
    "resize": ((20,), {"interpolation": NEAREST}, {}, {"interpolation": "nearest"}),
    "center_crop": ((4,), {}, {}, {}),
    "random_crop": (
        (9,), {"padding": 3, "fill": {"image": 0, "mask": 255}}, {"padding": 3},
        {"padding": 3, "fill": 255},
    ),
    "random_resized_crop": (
        (9,), {"interpolation": NEAREST}, {}, {"interpolation": "nearest"},
    ),
    "flip": ((), {}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_columns_of_a_stage_have_one_draw_and_options_of_their_own(name: str) -> None:
    arguments, both, of_image, of_mask = SHARED[name]
    pipe = getattr(pairs(), name)(*arguments, column=BOTH, **both)
    image = getattr(pairs(), name)(*arguments, **of_image)
    mask = getattr(pairs(), name)(*arguments, column="mask", **of_mask)
    for _ in range(2):
        for row, first, second in zip(pipe, image, mask, strict=True):
            assert list(row) == ["image", "mask", "n"]
            assert np.array_equal(row["image"], first["image"])
            assert np.array_equal(row["mask"], second["mask"])
    check_resume(pipe.shuffle(4).batch(3), processes=0)


def test_options_of_columns_are_those_of_the_columns() -> None:
    rows = pairs()
    with pytest.raises(tp.ConfigError, match=r"a dict of one for each of \['image', 'mask'\]"):
        rows.resize(4, column=BOTH, interpolation={"mask": "nearest"})
    with pytest.raises(tp.ConfigError, match=r'must be "nearest", .* or "lanczos", got \'near\''):
        rows.resize(4, column=BOTH, interpolation={"image": "bilinear", "mask": "near"})
    with pytest.raises(tp.ConfigError, match=r'must be "nearest", .* or "lanczos", got \'near\''):
        rows.random_resized_crop(4, interpolation="near")
    with pytest.raises(tp.ConfigError, match=r"random_crop\(fill\) must be .*, got 256"):
        rows.random_crop(4, column=BOTH, fill={"image": 256, "mask": 255})
    with pytest.raises(tp.ConfigError, match="name each column once"):
        rows.flip(column=["image", "image"])
    with pytest.raises(tp.SchemaError, match="no column 'masks'"):
        list(rows.flip(column=["image", "masks"]))


def test_random_crop_of_columns_needs_images_of_one_size() -> None:
    image, mask = np.zeros((3, 40, 60), np.uint8), np.zeros((1, 20, 30), np.uint8)
    rows = tp.from_dataset([{"image": image, "mask": image[:1]}, {"image": image, "mask": mask}])
    assert list(rows.take(1).random_crop(8, column=BOTH))
    rule = "need the same size, got image 40 x 60, mask 20 x 30: put resize\\(\\) before"
    with pytest.raises(tp.DataError, match=rule):
        list(rows.random_crop(8, column=BOTH))
    assert len(list(rows.resize((20, 30), column=BOTH).random_crop(8, column=BOTH))) == 2


def test_random_resized_crop_of_columns_needs_images_of_one_shape() -> None:
    image, mask = np.zeros((3, 41, 60), np.uint8), np.zeros((1, 20, 30), np.uint8)
    image[:, 20:], mask[:, 10:] = 255, 255
    rows = tp.from_dataset([{"image": image, "mask": mask}])
    for seed in range(5):  # a mask of half the size has the same parts
        (row,) = rows.random_resized_crop(8, column=BOTH, interpolation="nearest", seed=seed)
        parts = [(row[name][0] > 0).mean() for name in BOTH]
        assert abs(parts[0] - parts[1]) <= 1 / 8
    turned = mask.transpose(0, 2, 1)  # as of an image that was turned upright, and its mask
    rule = "need the same proportions, got image 41 x 60, mask 30 x 20: put resize\\(\\) before"
    with pytest.raises(tp.DataError, match=f"{rule}, or give each column a random_resized_crop"):
        list(
            tp.from_dataset([{"image": image, "mask": turned}]).random_resized_crop(8, column=BOTH)
        )
