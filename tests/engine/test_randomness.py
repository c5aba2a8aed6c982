"""Randomness is a pure function of seed and position: no process, hash seed or global generator has
a part in it, and the orders of this version are the orders of all later ones."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import Loader as NodeLoader

import trainpipes as tp
from drawn import Keep, build, table_of_rows
from hundred_rows import given_by
from oracle import Spec, sequence
from trainpipes.nodes import Batch, FromArrow, Shuffle

SPEC = Spec((40, 7, 0, 53), num_shards=4, buffer_size=15, seed=2, batch_size=8)


def pipeline() -> tp.Pipeline:
    return build(SPEC)


def in_process() -> Any:
    return pipeline()


def loader_without_workers() -> Any:
    return tp.Loader(pipeline())


def loader_with_workers() -> Any:
    return tp.Loader(pipeline(), num_workers=2)


def nodes() -> Any:
    source = FromArrow(table=table_of_rows(0, 100))
    shuffled = Shuffle(source, buffer_size=15, seed=2)  # type: ignore[arg-type]
    return NodeLoader(Batch(shuffled, batch_size=8))


WAYS = pytest.mark.parametrize(
    "way", [in_process, loader_without_workers, loader_with_workers, nodes]
)


@contextmanager
def global_generators_untouched() -> Iterator[None]:
    """Fails where Python's, NumPy's or torch's global generator was read or seeded."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    assert random.getstate() == before[0]
    assert str(np.random.get_state()) == str(before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@WAYS
def test_global_generators_are_neither_read_nor_seeded_and_have_no_part_in_the_order(
    way: Callable[[], Any],
) -> None:
    found = []
    for seed in (0, 1):
        seed_everything(seed)
        with global_generators_untouched():
            run = way()
            found.append([given_by(run, 5)])
            run.state_dict()
            found[-1].append(given_by(run))
    assert found[0] == found[1]


def test_states_and_peeks_leave_global_generators_alone() -> None:
    seed_everything(3)
    with global_generators_untouched():
        pipe = pipeline()
        pipe.peek()
        pipe.load_state_dict(pipe.state_at(5, epoch=2))
        given_by(pipe, 3)
        tp.Loader(pipe, num_workers=2).peek()


def test_another_seed_is_another_order() -> None:
    rows = tp.from_arrow(table_of_rows(0, 100))
    assert len({str(given_by(rows.shuffle(100, seed=seed).batch(8))) for seed in range(20)}) == 20


def test_neighboring_windows_spans_and_epochs_are_ordered_independently() -> None:
    # Four windows of 8 rows in each of 30 epochs: no two of these 120 orders are the same.
    pipe = tp.from_arrow(table_of_rows(0, 32)).shuffle(8).batch(8)
    orders = [tuple(row % 8 for row in batch) for _ in range(30) for batch in given_by(pipe)]
    assert len(set(orders)) == len(orders) == 120


def test_the_order_is_the_same_in_another_process_with_another_hash_seed() -> None:
    program = (
        "import json; from engine import test_randomness as t; p = t.pipeline(); "
        "print(json.dumps([[t.given_by(p) for _ in range(2)], p.state_dict()]))"
    )
    here = pipeline()
    epochs = [given_by(here) for _ in range(2)]
    paths = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [epochs, here.state_dict()]
    assert epochs == [sequence(SPEC, 0), sequence(SPEC, 1)]


def test_an_option_that_prints_a_set_is_the_same_in_whatever_order_it_prints() -> None:
    class Keeps:
        def __init__(self, names: str) -> None:
            self.names = names

        def __call__(self, row: int) -> int:
            return row

        def __repr__(self) -> str:
            return f"Keeps(names={self.names})"

    first, second, other = (
        tp.from_dataset(range(4)).map(Keeps(names))
        for names in ("{'a', 'b, c'}", "{'b, c', 'a'}", "{'a', 'c'}")
    )
    state = first.state_dict()
    second.load_state_dict(state)
    with pytest.raises(tp.errors.StateError, match="Keeps"):
        other.load_state_dict(state)


# Golden orders

GOLDEN = {
    "one shard, blocks of row groups": Spec((5, 4, 6, 5), num_shards=None, buffer_size=8, seed=42,
        batch_size=4),
    "four shards": Spec((7, 9, 8, 16, 5), num_shards=4, buffer_size=10, seed=42, batch_size=4),
    "24 shards of one row group": Spec((40,), buffer_size=64, seed=42, batch_size=4),
    "four shards, no shuffle": Spec((30,), num_shards=4, batch_size=4),
    "stride": Spec((20, 10), num_shards=4, stride=True, batch_size=4),
    "a stream": Spec((26,), num_shards=2, buffer_size=8, seed=42, batch_size=4, stream=True),
    "a stream in chunks": Spec((200,), num_shards=2, buffer_size=100, seed=42, batch_size=20, stream=True,
        keep=Keep(7, 2)),
    "a stream in single rows": Spec((60,), num_shards=2, buffer_size=10, seed=42, batch_size=4, stream=True,
        keep=Keep(7, 2)),
    "a negative seed": Spec((12,), num_shards=None, buffer_size=12, seed=-1, batch_size=4),
    "a seed of more than 64 bits": Spec((12,), num_shards=None, buffer_size=12, seed=2**70, batch_size=4),
}  # fmt: skip


def test_orders_are_those_that_earlier_versions_gave_and_those_of_the_laws(golden: Any) -> None:
    orders = {}
    for name, spec in GOLDEN.items():
        pipe = build(spec)
        orders[name] = [given_by(pipe), given_by(pipe)]
        assert orders[name] == [sequence(spec, 0), sequence(spec, 1)], name
    golden("orders.json", orders)
