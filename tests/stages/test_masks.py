"""Masks: numbers of classes, which no stage may mix, beside the picture that they are of."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import trainpipes as tp

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
    ],
    ids=["palette", "2 bits", "transparent", "GIF", "gray", "16 bits", "1 bit"],
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
