"""Batches come out of a worker's memory as they went in, and no message is written over before it is read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from trainpipes.runtime.iterating.parcels import OWN_PASSAGE, SLOT_BYTES, Slots, pack, unpack
from trainpipes.testing import digest

BATCHES: list[Any] = [
    {"ids": torch.arange(12).view(3, 4), "text": ["a", "b", "c"], "n": 5},
    {"ids": torch.arange(8).view(4, 2).t(), "half": torch.rand(3).to(torch.bfloat16)},
    (torch.tensor(7.0), torch.zeros(0, 3), [torch.ones(2, dtype=torch.bool)]),
    {"large": torch.zeros(OWN_PASSAGE, dtype=torch.uint8), "array": np.arange(3)},
]


@pytest.mark.parametrize("slots", [None, Slots(2, 1)])
def test_what_is_unpacked_is_what_was_packed(slots: Slots | None) -> None:
    for message in range(5):
        parcel = pack(BATCHES, slots, 1, message)
        assert (parcel.flat is None) == (slots is not None)
        found = unpack(pickle.loads(pickle.dumps(parcel)), slots)
        assert digest(found) == digest(BATCHES)
        assert found[1]["half"].dtype == torch.bfloat16
        found[0]["ids"].add_(1)  # memory of its own
        assert digest(unpack(pack(BATCHES, None, 0, 0), None)) == digest(BATCHES)


def test_a_message_that_is_too_large_for_a_slot_travels_as_torch_sends_it() -> None:
    slots = Slots(1, 1)
    many = [torch.zeros(OWN_PASSAGE // 8 - 1, dtype=torch.int64) for _ in range(9)]
    assert sum(tensor.nbytes for tensor in many) > SLOT_BYTES
    parcel = pack(many, slots, 0, 0)
    assert parcel.flat is not None
    assert digest(unpack(parcel, slots)) == digest(many)


def test_a_slot_is_not_filled_again_before_it_is_read() -> None:
    slots = Slots(1, 2)
    sent = [pack([torch.full((4,), n)], slots, 0, n) for n in range(5)]
    assert [parcel.flat is None for parcel in sent] == [True, True, True, False, False]
    assert [int(unpack(parcel, slots)[0][0]) for parcel in sent] == [0, 1, 2, 3, 4]
    assert pack([torch.zeros(4)], slots, 0, slots.unpacked(0)).flat is None


def test_a_spawned_worker_has_no_slots() -> None:
    assert pickle.loads(pickle.dumps(Slots(1, 1))) is None


def pipeline(rows: int = 4000) -> tp.Pipeline:
    table = pa.table({"input_ids": [[n] * (n % 50) for n in range(rows)]})
    return tp.from_arrow(table).sharding_filter(12).shuffle(200, seed=1).batch(4).pad_collate()


@pytest.mark.parametrize(
    "options", [{}, {"persistent_workers": True}, {"prefetch_factor": 1}, {"prefetch_factor": None}]
)
def test_workers_that_end_at_different_rounds_and_passes_that_are_broken_off(
    options: dict[str, Any],
) -> None:
    whole = tp.Loader(pipeline().filter(lambda b: int(b["input_ids"].sum()) % 3 > 0, version="1"))
    expected = [[digest(batch) for batch in whole] for _ in range(3)]
    pipe = pipeline().filter(lambda b: int(b["input_ids"].sum()) % 3 > 0, version="1")
    loader = tp.Loader(pipe, num_workers=3, **options)
    for epoch in range(3):
        batches = iter(loader)
        for n in range(40 if epoch == 1 else len(expected[epoch])):
            assert digest(next(batches)) == expected[epoch][n]
        del batches


def test_nothing_is_left_in_shared_memory() -> None:
    place = Path("/dev/shm")
    before = set(os.listdir(place)) if place.exists() else set()
    batches = iter(tp.Loader(pipeline(), num_workers=2))
    for _ in range(20):
        next(batches)
    del batches
    after = set(os.listdir(place)) if place.exists() else set()
    assert not {name for name in after - before if "torch" in name}
