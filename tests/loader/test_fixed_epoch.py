"""``Loader(pipe, epoch=0)``: each iteration is that epoch, for evaluation."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from hundred_rows import loaded
from trainpipes import Pipeline
from trainpipes.testing import digest


def jitter(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "noise": rng.random()}


def is_even(row: dict[str, Any]) -> bool:
    return bool(row["x"] % 2 == 0)


def rows() -> Pipeline:
    ids = [list(range(1, 3 + n % 7)) for n in range(90)]
    return tp.from_arrow(pa.table({"x": range(90), "input_ids": ids})).sharding_filter(4)


PIPES = {
    "counted": lambda: rows().map(jitter, rng=True).batch(4),
    "shuffled": lambda: rows().shuffle(20).batch(4),
    "filtered": lambda: rows().filter(is_even).map(jitter, rng=True).batch(4),
    "packed": lambda: rows().shuffle(20).pack(16, buffer_size=8).batch(2).pad_collate(),
    "masked": lambda: (rows().mask_tokens(0.5, mask_token_id=99, vocab_size=9, special_ids=[]).batch(4)
        .pad_collate()),
    "stream": lambda: tp.from_iterable(lambda: iter(range(50))).shuffle(9).batch(4),
    "two epochs": lambda: rows().shuffle(20).batch(16).repeat(2),
    "mixed": lambda: tp.mix({"a": rows_of(40), "b": rows_of(10)}).sharding_filter(4).batch(3),
}  # fmt: skip


def rows_of(count: int) -> Pipeline:
    return tp.from_arrow(pa.table({"x": range(count)})).shuffle(20)


def given_by(run: Any, count: int | None = None) -> list[str]:
    return [digest(item) for item in islice(run, count)]


def epochs(name: str, count: int) -> list[list[str]]:
    pipe = PIPES[name]()
    return [given_by(pipe) for _ in range(count)]


@pytest.mark.parametrize(("name", "options"), [
    ("counted", {}),
    ("packed", {"threads": 0}),
    ("packed", {"num_workers": 2}),
    ("counted", {"num_workers": 2, "persistent_workers": True}),
])  # fmt: skip
def test_each_iteration_is_the_same_epoch(name: str, options: Any) -> None:
    whole = epochs(name, 3)
    assert whole[0] != whole[2]
    loader = tp.Loader(PIPES[name](), epoch=2, **options)
    assert [given_by(loader) for _ in range(3)] == [whole[2]] * 3


@pytest.mark.parametrize("name", PIPES)
def test_a_part_of_an_iteration_changes_nothing_and_nobody_is_warned(name: str) -> None:
    whole = epochs(name, 1)[0]
    loader = tp.Loader(PIPES[name](), epoch=0)
    for count in (1, 2, 3, None, 2):
        assert given_by(loader, count) == whole[:count]


def test_the_pipeline_stays_where_it_stands_and_the_loader_begins_where_it_is_told() -> None:
    whole = epochs("shuffled", 4)
    pipe = PIPES["shuffled"]()
    assert given_by(pipe) == whole[0]
    loader = tp.Loader(pipe, epoch=0)
    assert given_by(loader) == whole[0]
    assert given_by(pipe) == whole[1]
    assert given_by(loader, 3) == whole[0][:3]
    pipe.load_state_dict(PIPES["shuffled"]().state_at(4, epoch=2))
    assert given_by(tp.Loader(pipe, epoch=1)) == whole[1]
    assert given_by(loader) == whole[0]
    assert given_by(pipe) == whole[2][4:]
    assert given_by(tp.Loader(pipe)) == whole[3]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in PIPES), ("counted", 2)])
def test_a_loaded_state_goes_on_there_and_then_comes_the_epoch_again(
    name: str, workers: int
) -> None:
    whole = epochs(name, 3)
    for saving, of in ((None, 2), (0, 0)):  # of any loader
        saver = tp.Loader(PIPES[name](), epoch=saving)
        for _ in range(of):
            given_by(saver)
        batches = iter(saver)
        for at in (3, len(whole[of]) - 1):
            given_by(batches, at - 3 if at > 3 else 3)
            state = saver.state_dict()
            loader = loaded(tp.Loader(PIPES[name](), epoch=0, num_workers=workers), state)
            assert given_by(loader) == whole[of][at:]
            assert given_by(loader) == whole[0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PIPES)
def test_the_state_after_the_last_batch_is_that_of_the_epochs_start(name: str) -> None:
    whole = epochs(name, 1)[0]
    saver = tp.Loader(PIPES[name](), epoch=0)
    states = [saver.state_dict()]
    for _ in saver:
        inside = saver.state_dict()
    states += [inside, saver.state_dict()]
    for state in states:
        for loader in (tp.Loader(PIPES[name](), epoch=0), saver):
            loader.load_state_dict(state)
            assert loader.peek() is not None
            assert [given_by(loader), given_by(loader)] == [whole, whole]


@pytest.mark.parametrize("name", ["counted", "packed", "filtered"])
def test_a_state_of_some_ranks_goes_on_on_others(name: str) -> None:
    pipe = PIPES[name]()
    whole = given_by(pipe)
    ranks = [
        tp.Loader(ragged(name).distributed(rank=rank, world_size=2), epoch=0) for rank in (0, 1)
    ]
    for loader in ranks:
        given_by(loader)
    parts = [given_by(loader, 3) for loader in ranks]
    assert [batch for step in zip(*parts, strict=True) for batch in step] == whole[:6]
    state = tp.merge_states([loader.state_dict() for loader in ranks])
    alone = tp.Loader(ragged(name), epoch=0, num_workers=1)
    if name == "counted":
        alone.load_state_dict(state)
        assert given_by(alone) == whole[6:]
        assert given_by(alone) == whole
    for loader in ranks:
        loader.load_state_dict(loader.state_dict())
    rest = [given_by(loader) for loader in ranks]
    again = [given_by(loader) for loader in ranks]
    for rank in (0, 1):
        assert again[rank] == parts[rank] + rest[rank]


def ragged(name: str) -> Pipeline:
    stages = [
        stage._replaced(tail="uneven") if stage.name == "sharding_filter" else stage
        for stage in PIPES[name]().stages
    ]
    return Pipeline(stages)


@pytest.mark.parametrize("epoch", [-1, True, 1.0, "0", 1 << 60])
def test_what_is_no_epoch_is_refused(epoch: Any) -> None:
    with pytest.raises(tp.ConfigError, match=r"Loader\(epoch\) must be an integer of .*, got "):
        tp.Loader(PIPES["counted"](), epoch=epoch)


def test_a_pipeline_without_an_end_is_refused() -> None:
    endless = tp.mix({"a": rows_of(40)}, stop="repeat", weights={"a": 1}).batch(2)
    for pipe in (PIPES["counted"]().repeat(), rows().repeat().batch(2), endless):
        with pytest.raises(tp.ConfigError, match=r"Loader\(epoch\) needs .*, got epoch=0"):
            tp.Loader(pipe, epoch=0)


def test_set_epoch_is_refused() -> None:
    loader = tp.Loader(PIPES["counted"](), epoch=2)
    with pytest.raises(tp.ConfigError, match=r"epoch must be left .* epoch=2, .* got 1; make"):
        loader.set_epoch(1)


def test_it_is_part_of_what_a_loader_shows_and_pickles() -> None:
    pipe = PIPES["shuffled"]()
    whole = [given_by(pipe) for _ in range(2)]
    loader = tp.Loader(pipe, epoch=1)
    assert "epoch=1" in repr(loader)
    assert loader.explain().to_dict()["loader"]["epoch"] == 1
    assert len(loader) == len(whole[1])
    assert digest(loader.peek()) == whole[1][0]
    batches = iter(loader)
    assert [batches.is_last() for _ in batches].index(True) == len(whole[1]) - 1
    copied = pickle.loads(pickle.dumps(loader))
    assert [given_by(copied), given_by(copied)] == [whole[1], whole[1]]
