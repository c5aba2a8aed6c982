"""Copies and pickles of pipelines and loaders: where they stand."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

import trainpipes as tp
from hundred_rows import epochs_of, given_by, pipeline

EPOCHS = epochs_of(8)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_pipeline_counts_for_itself(copied: Callable[[Any], Any]) -> None:
    pipe = pipeline()
    other = copied(pipe)
    assert given_by(pipe) == given_by(other) == EPOCHS[0]
    third = copied(pipe)
    pipe.load_state_dict(pipe.state_at(6))
    assert given_by(third) == EPOCHS[1]
    assert given_by(copied(pipe)) == EPOCHS[0][6:]


@pytest.mark.usefixtures("nothing_warned_of")
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("made", [pipeline, lambda: tp.Loader(pipeline())], ids=["pipe", "loader"])
def test_a_copy_within_an_epoch_is_warned_of(made: Callable[[], Any], copied: Any) -> None:
    original = made()
    batches = iter(original)
    next(batches)
    assert given_by(copied(original)) == EPOCHS[1]  # after a look at an item
    given_by(batches, 2)
    with pytest.warns(UserWarning, match=r"a copy within epoch 0 .* save state_dict\(\)"):
        again = copied(original)
    again.load_state_dict(original.state_dict())
    assert given_by(again) == given_by(batches) == EPOCHS[0][3:]
    given_by(copied(original))


def mixed() -> tp.Pipeline:
    sources = {name: tp.from_dataset([name] * 60) for name in "ab"}
    return tp.mix(sources, weights={"a": 1, "b": 1}).batch(4)


def of_b(batches: Any) -> int:
    return sum(batch.count("b") for batch in batches)


def test_a_copy_has_the_weights_that_later_epochs_of_a_mix_have() -> None:
    loader = tp.Loader(mixed())
    batches = iter(loader)
    next(batches)
    loader.set_weights({"a": 1, "b": 0}, at_step=4)
    list(islice(batches, 5))
    pipe = mixed()
    pipe.load_state_dict(loader.state_dict())
    copies = [pickled(pipe), copy.copy(pipe), DataLoader(pickled(pipe), None, num_workers=1)]
    sent = DataLoader(pipe, None, num_workers=1, multiprocessing_context="forkserver")
    for again in [*copies, sent, pipe]:
        assert [of_b(again) for _ in range(2)] == [0, 0]
