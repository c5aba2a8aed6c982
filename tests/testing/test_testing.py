"""check_resume finds what is wrong with a node, a pipeline, or a loader."""

import os
import random
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
import torch
from torchdata.nodes import BaseNode

import trainpipes as tp
from trainpipes import testing
from trainpipes.testing import ResumeError, check_resume, digest


class Counter(BaseNode):
    """A right node: epoch e gives e * 100 + i."""

    def __init__(self, n=5):
        super().__init__()
        self.n = n
        self.epoch, self.i = 0, 0

    def reset(self, initial_state=None):
        super().reset(initial_state)
        if initial_state is not None:
            self.epoch, self.i = initial_state["epoch"], initial_state["i"]
        elif self.i:
            self.epoch, self.i = self.epoch + 1, 0

    def next(self):
        if self.i >= self.n:
            raise StopIteration
        self.i += 1
        return self.epoch * 100 + self.i

    def get_state(self):
        return {"epoch": self.epoch, "i": self.i}


class ForgetsItsEpoch(Counter):
    def get_state(self):
        return {"epoch": 0, "i": self.i}


class NeverAdvances(Counter):
    """Its items depend on how often the object was reset, which no state tells."""

    def reset(self, initial_state=None):
        BaseNode.reset(self, initial_state)
        self.i = 0 if initial_state is None else initial_state["i"]
        self.epoch = getattr(self, "resets", 0)
        self.resets = self.epoch + 1


class SavesAheadByOne(Counter):
    def get_state(self):
        return {"epoch": self.epoch, "i": min(self.n, self.i + 1)}


class KeepsTheState(Counter):
    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.held = initial_state if initial_state is not None else {"epoch": 0, "i": 0}

    def next(self):
        item = super().next()
        self.held.update(i=self.i, epoch=self.epoch)
        return item


def fails(said):
    """A resume fails within, with these words."""
    return pytest.raises(ResumeError, match=said or None)


class LosesItsStart(Counter):
    def get_state(self):
        return {"epoch": 1, "i": 0} if not self.i else super().get_state()


def test_the_first_point_is_among_those_that_are_drawn():
    with fails("epoch 0"):
        check_resume(LosesItsStart, points=2, processes=0)
    assert check_resume(Counter, points=1, processes=0).points == 1


def test_a_right_node_passes():
    report = check_resume(Counter)
    assert report.items == (5, 5, 5)
    assert report.points == 14
    assert report.processes == 2
    assert "15 items in 3 epochs" in str(report)


@pytest.mark.parametrize("node", [ForgetsItsEpoch, NeverAdvances, SavesAheadByOne, KeepsTheState])
def test_a_wrong_node_fails(node):
    said = r"resuming at item 0 of epoch 0, item 0 differs .*: it is 2 instead of 1"
    with fails(said if node is SavesAheadByOne else "") as caught:
        check_resume(node, processes=0)
    assert "look at" not in str(caught.value)


def test_a_state_that_loads_but_once_fails():
    loaded = set()

    class LoadsOnce(Counter):
        def reset(self, initial_state=None):
            super().reset(initial_state)
            if initial_state is not None:
                place = self.epoch, self.i
                self.i = self.n if place in loaded else self.i
                loaded.add(place)

    with fails("at item 0 of epoch 0, epoch 0 has 0 items instead of 3"):
        check_resume(LoadsOnce, processes=0)


def endless():
    return tp.from_dataset(range(3)).repeat().batch(2)


@pytest.mark.parametrize(
    ("subject", "options", "said"),
    [
        (tp.Loader(endless()), {}, r"a pipeline, or a function .*; write check_resume\(lambda: "),
        (
            None,
            {},
            "a pipeline, or a function that makes a fresh pipeline, Loader or node, got None",
        ),
        (lambda: [1, 2], {}, r"each time it is called, got \[1, 2\]"),
        (
            endless(),
            {},
            r"check_resume\(limit\) must be a number of items .*, got None; write limit=100",
        ),
        (lambda: tp.Loader(endless()), {}, r"check_resume\(limit\) must be a number of items"),
        (Counter, {"epochs": 0}, r"epochs\) must be an integer of 1 or more, got 0"),
        (Counter, {"limit": 0}, r"limit\) must be an integer of 1 or more, got 0"),
        (Counter, {"every": 0}, r"every\) must be an integer of 1 or more, got 0"),
        (Counter, {"every": None}, r"every\) must be an integer of 1 or more, got None"),
        (Counter, {"points": 0}, r"points\) must be an integer of 1 or more, got 0"),
        (Counter, {"processes": -1}, r"processes\) must be an integer of 0 or more, got -1"),
        (Counter, {"start_method": "forked"}, r"start_method\) must be one of .*, got 'forked'"),
    ],
)
def test_what_cannot_be_checked_is_refused(subject, options, said):
    with pytest.raises(tp.ConfigError, match=said):
        check_resume(subject, **options)


def counted_calls():
    seen = []

    def number(row):
        seen.append(row)
        return {**row, "seen": len(seen)}

    return number


def rows(count=8):
    return tp.from_arrow(pa.table({"x": range(count)}))


DIFFERENT = {
    "a row": (lambda: rows().map(counted_calls()), "column 'seen' is 1 instead of 2"),
    "a batch": (lambda: rows().batch(2)
        .map(lambda b, own=[]: own.append(0) or [*b[:-1], {"x": len(own)}]),
        "row 1, column 'x' is 1 instead of 2"),
    "tensors": (lambda: rows().map(counted_calls()).batch(2).collate(),
        r"column 'seen' at \[0\] is 1 instead of 3"),
    "a shape": (lambda: rows().map(lambda r, own=[]: own.append(0) or {"x": torch.zeros(len(own), 2)}),
        r"column 'x' is a tensor float32 \[1, 2\] instead of float32 \[2, 2\]"),
    "the columns": (lambda: rows().map(lambda r, own=[]: own.append(0) or {f"x{len(own)}": 0}),
        r"it has \['x1'\] instead of \['x2'\]"),
    "a type": (lambda: rows().map(lambda r, own=[]: own.append(0) or ("1" if len(own) == 1 else 1)),
        r"it is '1' \(str\) instead of 1 \(int\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_message_says_what_differs_in_the_item(name):
    make, said = DIFFERENT[name]

    def fresh():
        own = make()
        for stage in own.stages:  # a list that a default keeps
            for value in stage.options.values():
                for default in getattr(value, "__defaults__", None) or ():
                    default.clear()
        return own

    with fails(f"after resuming at item 1 of epoch 0, item 1 .*: {said}"):
        check_resume(fresh, processes=0)


def test_the_message_says_how_many_items_are_missing():
    def make():
        own = []
        return rows(6).filter(lambda row: own.append(0) or len(own) < 4)

    with fails(r"item 1 of epoch 0, .* epoch 0 has .* instead of 2 items"):
        check_resume(make, processes=0, epochs=1)


def test_the_message_names_the_function_that_may_be_to_blame():
    with fails(r"; look at map\(counted_calls.number .*keeps nothing from"):
        check_resume(lambda: rows().map(counted_calls()), processes=0)


def flat(row):
    return {**row, "n": 0.5}


def drawn(row):
    return {**row, "n": random.random()}


def test_the_message_names_the_function_that_draws_from_a_global_generator():
    inside = tp.mix({"a": rows().map(drawn), "b": rows().map(flat)})
    other = rows().map(lambda row: {**row, "n": random.random()})  # each is warned of once
    for made, said in (
        (other.batch(2), r"column 'n' is 0.* instead of 0.*; map\(.*pass rng=True"),
        (lambda: tp.Loader(inside), "pass rng=True"),
    ):
        with pytest.warns(UserWarning, match="draws from Python's global generator"), fails(said):
            check_resume(made, processes=0)


def test_items_that_are_too_large_to_keep_are_told_by_their_number(monkeypatch):
    monkeypatch.setattr(testing, "KEPT_BYTES", 10)
    with fails("item 1 differs from the uninterrupted run; look at"):
        check_resume(lambda: rows().map(counted_calls()), processes=0)


def test_a_difference_in_a_fresh_process_is_told_as_such():
    home = os.getpid()
    with fails("resuming in a fresh process at item 0 of epoch 0, item 0 "):
        check_resume(rows().map(lambda row: os.getpid() == home), processes=1)


def test_a_fresh_process_that_dies_is_told_by_its_exit_code():
    home = os.getpid()
    with fails("the run failed: it ended with exit code 3 and no answer"):
        check_resume(rows().map(lambda row: row if os.getpid() == home else os._exit(3)))


def test_a_loader_with_workers_and_a_spawned_process_resume_too():
    pipe = tp.from_tensors(list(range(12))).sharding_filter(4).shuffle(4).batch(2).collate()
    assert check_resume(pipe, processes=1, start_method="forkserver").processes == 1

    def loader():
        return tp.Loader(pipe.take(6), num_workers=1)

    assert check_resume(loader, every=3, processes=0, epochs=2).items == (6, 6)


def test_digests_tell_types_shapes_and_bytes_apart():
    items = [
        [1, 2], (1, 2), [1.0, 2.0], torch.tensor([1, 2]), torch.tensor([[1, 2]]),
        torch.tensor([1, 2], dtype=torch.int32), np.array([1, 2]), {"a": 1}, {"b": 1}, "1", b"1", None,
        pa.table({"x": [1, 2]}), pa.table({"x": pa.array([1, 2], pa.int8())}),
    ]  # fmt: skip
    assert len({digest(item) for item in items}) == len(items)
    assert digest({"a": torch.zeros(3)}) == digest({"a": torch.zeros(3)})


@pytest.mark.parametrize(
    ("item", "other", "said"),
    [
        ([1, 23], [12, 3], "row 0 is 1 instead of 12"),
        ([1, 11], [11, 1], "row 0 is 1 instead of 11"),
        ([{"x": 1}, {"x": 11}], [{"x": 11}, {"x": 1}], "row 0, column 'x' is 1 instead of 11"),
        ({1: 23}, {12: 3}, "it has [1] instead of [12]"),
        ([1, 23], [1, 23], ""),
    ],
)
def test_numbers_of_the_same_digits_differ(item, other, said):
    assert testing.difference(item, other) == said


def test_rows_of_the_same_digits_in_another_order_are_found():
    calls = iter(range(99))
    pipe = tp.from_dataset([1, 11]).batch(2).map(lambda b: b if next(calls) < 3 else b[::-1])
    with fails("row 0 is 11 instead of 1"):
        check_resume(pipe, processes=0)


@dataclass
class Ids:
    input_ids: torch.Tensor


def test_objects_hold_the_tensors_they_show():
    assert digest(Ids(torch.arange(9)[2:4])) == digest(Ids(torch.tensor([2, 3])))
    assert digest(Ids(torch.tensor([2, 4]))) != digest(Ids(torch.tensor([2, 3])))
    pipe = tp.from_dataset([{"input_ids": [*range(n % 5 + 1)]} for n in range(30)])
    check_resume(
        pipe.batch(2).pad_collate().map(lambda b: Ids(b["input_ids"])), processes=0, epochs=2
    )


def test_an_epoch_in_the_middle_may_give_nothing():
    def sums_above(least, seed):
        rows = tp.from_dataset(range(5)).shuffle(5, seed=seed)
        return rows.batch(2).filter(lambda batch: sum(batch) > least)

    for seed, items in ((0, (0, 0, 1, 0)), (3, (1, 0, 0, 0)), (2, (0, 1, 0, 0))):
        report = check_resume(lambda seed=seed: sums_above(6, seed), epochs=4, processes=0)
        assert report.items == items


def test_a_limit_looks_at_the_beginning_of_each_epoch_that_ends():
    pipe = tp.from_dataset(range(40)).shuffle(10).batch(4)
    report = check_resume(pipe, limit=3, processes=1)
    assert report.items == (3, 3, 3)
    assert report.points == 5  # 0, 1, 2, and 1, 2: an epoch's start is not seen where one was left
    assert check_resume(pipe, limit=10, processes=0).items == (10, 10, 10)


@pytest.mark.parametrize("limit", [6, 8])
def test_an_epoch_may_end_before_the_limit(limit):
    pipe = tp.from_dataset(range(10)).shuffle(4).batch(2)
    report = check_resume(lambda: tp.Loader(pipe), limit=limit, processes=1)
    assert report.items == (5, 5, 5)
    assert report.points == report.possible == 5 + 1 + 5 + 1 + 2


def test_a_limit_finds_a_function_with_memory_in_an_epoch_that_ends():
    counts = iter(range(1000))
    pipe = tp.from_dataset(range(40)).map(lambda row: row + next(counts)).batch(4)
    with fails("after resuming at item"):
        check_resume(pipe, limit=3, processes=0)
