"""to: what is asked of a device's streams and events, on a device that only notes it."""

from __future__ import annotations

import pytest
import torch

import trainpipes as tp
from fake_device import Batch, FakeDevice
from trainpipes._internal.messages import _warned


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    found = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: found)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return found


def batches(fake: FakeDevice, count: int = 12) -> tp.Pipeline:
    return tp.from_dataset([Batch(number, fake) for number in range(count)])


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_each_batch_is_copied_on_the_side_and_used_after_its_copy(
    fake: FakeDevice, depth: int
) -> None:
    given = list(batches(fake).to("cuda", depth=depth))
    assert [batch.number for batch in given] == list(range(12))
    assert {str(batch.device) for batch in given} == {"cuda:0"}
    place = {note: n for n, note in enumerate(fake.notes)}
    for number in range(12):
        copies = place["side", "copies", number]
        end = fake.notes[copies + 1]
        assert end[:2] == ("side", "records")
        waits = place["main", "waits for", end[2]]
        assert copies < waits < place["main", "uses", number]


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_no_more_batches_are_on_their_way_than_it_says(fake: FakeDevice, depth: int) -> None:
    """The device never ends anything by itself, and the process queues work and asks for the next batch."""
    most = 0
    for _ in batches(fake, 40).to("cuda", depth=depth):
        most = max(most, fake.copies_on_their_way())
    assert depth < most <= 2 * depth + 2


@pytest.mark.parametrize("depth", [0, 2])
def test_the_process_is_ahead_of_the_device_by_so_many_batches(
    fake: FakeDevice, depth: int
) -> None:
    """When batch k is given, it has waited for the work on batch k - depth - 2, and for none later."""
    waited = []
    for k, _ in enumerate(batches(fake, 20).to("cuda", depth=depth)):
        ends = [note for note in fake.notes if note[1] == "records" and note[0] == "main"]
        before = [note[2] for note in fake.notes if note[:2] == ("process", "waits for")]
        done = [n for n, note in enumerate(ends) if note[2] in before]
        waited.append((k, max(done, default=-1) + 1))
    steady = waited[depth + 2 : 20 - depth]
    assert {k - done for k, done in steady} == {depth + 1}


def test_a_process_that_waits_for_cuda_sleeps_and_xpu_is_not_asked_to(fake: FakeDevice) -> None:
    for device, options in (("cuda", {"blocking": True}), ("xpu", {})):
        list(batches(fake).to(device))
        assert all(event.options == options for event in fake.unended)
        assert fake.unended
        fake.unended.clear()


def test_each_pass_and_each_loader_has_the_same_rules(fake: FakeDevice) -> None:
    pipe = batches(fake, 7).to("cuda", depth=2)
    for _ in range(2):
        assert [batch.number for batch in pipe] == list(range(7))
    interleaved = zip(tp.Loader(pipe), tp.Loader(pipe), strict=True)
    assert [(a.number, b.number) for a, b in interleaved] == [(n, n) for n in range(7)]


def test_a_state_is_of_the_batch_given_whatever_is_copied_ahead(fake: FakeDevice) -> None:
    loader = tp.Loader(batches(fake).to("cuda", depth=4))
    iterator = iter(loader)
    assert [next(iterator).number for _ in range(5)] == [0, 1, 2, 3, 4]
    assert sum(note[1] == "copies" for note in fake.notes) > 5
    resumed = tp.Loader(batches(fake).to("cuda", depth=0))
    resumed.load_state_dict(loader.state_dict())
    assert [batch.number for batch in resumed] == list(range(5, 12))


def test_a_copy_that_fails_is_tried_again_when_its_batch_is_due(fake: FakeDevice) -> None:
    tries: list[int] = []

    class Full(Batch):
        def to(self, device: torch.device, non_blocking: bool) -> Batch:
            tries.append(self.number)
            if self.number == 3 and tries.count(3) < 3:
                raise RuntimeError("out of memory")
            return super().to(device, non_blocking)

    iterator = iter(tp.from_dataset([Full(n, fake) for n in range(6)]).to("cuda", depth=2))
    assert [next(iterator).number for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="out of memory"):
        next(iterator)
    assert [batch.number for batch in iterator] == [3, 4, 5]
    assert fake.used.name == "main"


def test_without_a_number_it_is_the_current_device(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    fake.devices, fake.current = 8, 3
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert {str(batch.device) for batch in batches(fake).to("cuda")} == {"cuda:3"}
    assert {str(batch.device) for batch in batches(fake).to("cuda:5")} == {"cuda:5"}
    fake.devices, fake.current = 1, 0  # each rank sees one
    assert {str(batch.device) for batch in batches(fake).to("cuda")} == {"cuda:0"}
    assert not recwarn.list


def test_a_rank_on_the_device_of_another_is_told_so(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    _warned.clear()
    fake.devices = 8
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.warns(
        UserWarning,
        match=r"current device, cuda:0, and LOCAL_RANK is 3: call torch.cuda.set_device\(3\) before",
    ):
        assert {str(batch.device) for batch in batches(fake).to("cuda")} == {"cuda:0"}


def test_a_device_that_is_not_there_is_one_sentence(fake: FakeDevice) -> None:
    for devices, device in ((0, "cuda"), (2, "cuda:2"), (1, "xpu:9")):
        fake.devices = devices
        with pytest.raises(
            tp.ConfigError, match=rf"there is no device '{device}' here; .*: leave to\(\) out"
        ):
            next(iter(batches(fake).to(device)))
    assert not fake.notes
