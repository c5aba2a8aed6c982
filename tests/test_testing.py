"""check_resume finds what is wrong with a node, a pipeline, or a loader."""

import pytest
from torchdata.nodes import BaseNode

import trainpipes as tp
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


def test_a_right_node_passes():
    report = check_resume(Counter)
    assert report.items == (5, 5, 5)
    assert report.points == 14
    assert report.processes == 2
    assert "15 items in 3 epochs" in str(report)


@pytest.mark.parametrize("node", [ForgetsItsEpoch, NeverAdvances, SavesAheadByOne, KeepsTheState])
def test_a_wrong_node_fails(node):
    with pytest.raises(ResumeError):
        check_resume(node, processes=0)


def test_the_message_names_where_it_went_wrong():
    with pytest.raises(
        ResumeError, match=r"resumed before item 0 of epoch 0: epoch 0 went on with 4"
    ):
        check_resume(SavesAheadByOne, processes=0)


def test_a_row_function_with_memory_fails():
    def make():
        seen = []

        def number(x):
            seen.append(x)
            return len(seen)

        return tp.from_iterable(lambda: range(6)).map(number)

    with pytest.raises(ResumeError):
        check_resume(make, processes=0)


def test_a_loader_with_workers_passes():
    pipe = tp.from_tensors(list(range(12))).sharding_filter(4).shuffle(4).batch(2).collate()
    report = check_resume(
        lambda: tp.Loader(pipe.take(6), num_workers=1), every=3, processes=0, epochs=2
    )
    assert report.items == (6, 6)


def test_a_spawned_process_resumes_too():
    pipe = tp.from_tensors(list(range(12))).sharding_filter(4).shuffle(4).batch(2).collate()
    assert check_resume(pipe, processes=1, start_method="spawn").processes == 1


def test_digests_tell_types_shapes_and_bytes_apart():
    import numpy as np
    import torch

    items = [
        [1, 2], (1, 2), [1.0, 2.0], torch.tensor([1, 2]), torch.tensor([[1, 2]]),
        torch.tensor([1, 2], dtype=torch.int32), np.array([1, 2]), {"a": 1}, {"b": 1}, "1", b"1", None,
    ]  # fmt: skip
    assert len({digest(item) for item in items}) == len(items)
    assert digest({"a": torch.zeros(3)}) == digest({"a": torch.zeros(3)})


def test_an_epoch_in_the_middle_may_give_nothing():
    def sums_above(least, seed):
        rows = tp.from_dataset(range(5)).shuffle(5, seed=seed)
        return rows.batch(2).filter(lambda batch: sum(batch) > least)

    for seed, items in ((0, (0, 0, 1, 0)), (3, (1, 0, 0, 0)), (2, (0, 1, 0, 0))):
        report = check_resume(lambda seed=seed: sums_above(6, seed), epochs=4, processes=0)
        assert report.items == items
