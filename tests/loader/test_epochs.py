"""What an epoch is: each ``iter()`` is another, in every loader, also after a break."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trainpipes as tp
from drawn import rows_of
from hundred_rows import (
    TABLE,
    given_by,
    in_process,
    is_even,
    ours,
    pipeline,
    plain,
    rank_of_two,
    shuffled_rows,
    stateful,
)
from oracle import Spec, sequence
from ranks import in_worker
from trainpipes.sources.from_dataset import TensorSource

pytestmark = pytest.mark.usefixtures("no_processes_left")

SPEC = Spec((100,), num_shards=4, buffer_size=15, seed=2, batch_size=8)


def epoch(number: int) -> list[list[int]]:
    """An epoch of ``pipeline()``, by the laws."""
    return sequence(SPEC, number)


WAYS = [
    pytest.param(in_process, 0, {}, id="in process"),
    *[
        pytest.param(way, workers, {}, id=f"{way.__name__}, {workers} workers")
        for way, numbers in ((plain, (0, 2)), (stateful, (0, 2)), (ours, (0, 2)))
        for workers in numbers
    ],
    *[
        pytest.param(way, 2, {"persistent_workers": True}, id=f"{way.__name__}, persistent")
        for way in (plain, stateful, ours)
    ],
    *[
        pytest.param(
            way, 2, {"persistent_workers": way is ours, "multiprocessing_context": start},
            id=f"{way.__name__}, {start}",
            marks=pytest.mark.slow if start == "spawn" or way is stateful else (),
        )
        for way in (ours, plain, stateful)
        for start in ("forkserver", "spawn")
    ],
]  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize(("way", "workers", "options"), WAYS)
def test_each_iteration_is_the_next_epoch(way: Any, workers: int, options: Any) -> None:
    """After one that was broken off, too, and with the same global seed before each."""
    run = way(pipeline(), workers, **options)
    assert given_by(run) == epoch(0)
    for number, taken in ((1, 5), (2, 1), (3, 2), (4, None)):
        torch.manual_seed(7)
        assert given_by(run, taken) == epoch(number)[:taken]


def test_epochs_of_a_shuffle_differ_and_those_of_file_order_do_not() -> None:
    assert len({str(epoch(number)) for number in range(5)}) == 5
    pipe = tp.from_arrow(TABLE).batch(8)
    assert given_by(pipe) == given_by(pipe)


def test_a_derived_pipeline_starts_afresh() -> None:
    pipe = pipeline()
    given_by(pipe)
    assert given_by(pipe.take(3)) == epoch(0)[:3]
    assert given_by(pipe) == epoch(1)


# peek


@pytest.mark.parametrize("workers", [0, 2])
def test_peeking_shows_what_the_next_iteration_begins_with_and_moves_nothing(workers: int) -> None:
    run = ours(pipeline(), workers)
    assert rows_of(run.peek()) == rows_of(run.peek()) == epoch(0)[0]
    started = iter(run)
    given_by(started, 5)
    state = run.state_dict()
    assert rows_of(run.peek()) == epoch(1)[0]
    assert run.state_dict() == state
    assert given_by(started) == epoch(0)[5:]
    assert given_by(run, 4) == epoch(1)[:4]
    assert rows_of(run.peek()) == epoch(2)[0]
    assert given_by(run) == epoch(2)
    run.load_state_dict(pipeline().state_at(6, epoch=1))
    assert rows_of(run.peek()) == epoch(1)[6]
    assert given_by(run) == epoch(1)[6:]


@pytest.mark.parametrize("workers", [0, 2])
def test_peeking_into_an_endless_pipeline_shows_what_comes_next(workers: int) -> None:
    run = ours(pipeline().repeat(), workers)
    given_by(run, 5)
    assert rows_of(run.peek()) == epoch(0)[5]
    assert given_by(run, 2) == epoch(0)[5:7]


def test_peeking_at_nothing_says_so() -> None:
    with pytest.raises(tp.DataError, match="that gives nothing"):
        tp.from_arrow(TABLE.slice(0, 0)).batch(4).peek()


# Ends


def test_an_iterator_that_has_ended_stays_ended() -> None:
    for run in (pipeline(), ours(pipeline(), 0), ours(pipeline(), 2)):
        started = iter(run)
        given_by(started)
        for _ in range(3):
            assert next(started, None) is None
        assert given_by(run) == epoch(1)


def test_ranks_that_do_not_divide_an_epoch_leave_out_its_last_batches() -> None:
    for rank in range(4):
        pipe = pipeline().distributed(rank=rank, world_size=4)
        for number in range(3):
            assert given_by(pipe) == epoch(number)[:12][rank::4]
        assert len(pipe) == 3


# repeat


@pytest.mark.parametrize(
    ("way", "workers", "place"),
    [(in_process, 0, "before"), (ours, 0, "after"), (ours, 1, "after"), (ours, 2, "before")],
)
def test_an_endless_pipeline_goes_on_where_it_stands(way: Any, workers: int, place: str) -> None:
    rows = shuffled_rows()
    pipe = rows.repeat().batch(8) if place == "before" else rows.batch(8).repeat()
    run = way(pipe, workers)
    found = []
    for count in (3, 1, 14, 9):
        found += given_by(run, count)
    spec = Spec((100,), num_shards=4, buffer_size=15, seed=2, batch_size=8, repeat=place)
    assert found == sequence(spec, 0, 27)


def nothing(row: Any) -> bool:
    return False


ROWS, NO_ROWS = tp.from_arrow(TABLE).sharding_filter(4), tp.from_arrow(TABLE.slice(0, 0))
ONE_SHARD = tp.from_arrow(TABLE)
#: Pipelines that would look for rows for ever.
ENDLESS_WITH_NOTHING = {
    "filter, batch, repeat": ROWS.shuffle(15).filter(nothing).batch(8).repeat(),
    "filter, repeat, batch": ROWS.shuffle(15).filter(nothing).repeat().batch(8),
    "batch, filter, repeat": ROWS.shuffle(15).batch(8).filter(nothing).repeat(),
    "repeat, batch, filter": ROWS.shuffle(15).repeat().batch(8).filter(nothing),
    "filter, shuffle": ROWS.filter(nothing).shuffle(15).repeat().batch(8),
    "filter, shuffle 2": ROWS.filter(nothing).shuffle(15).batch(8).repeat(),
    "rows": ROWS.shuffle(15).filter(nothing).repeat(),
    "all batches skipped": ROWS.shuffle(15).filter(is_even).batch(8).skip(100).repeat(),
    "all rows skipped": ONE_SHARD.filter(is_even).skip(100).batch(8).repeat(),
    "all rows skipped, rolling": ONE_SHARD.filter(is_even).skip(100).repeat().batch(8),
    "none taken, rolling": ONE_SHARD.shuffle(15).take(0).repeat().batch(8),
    "an empty stream": tp.from_iterable(list).batch(8).repeat(),
    "an empty stream, rolling": tp.from_iterable(list).repeat().batch(8),
    "no rows": NO_ROWS.batch(8).repeat(),
    "no rows, rolling": NO_ROWS.repeat().batch(8),
    "all dropped": tp.from_arrow(TABLE.slice(0, 5)).batch(8, drop_last=True).repeat(),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ENDLESS_WITH_NOTHING)
def test_what_lets_nothing_through_under_repeat_raises(name: str) -> None:
    with pytest.raises(tp.DataError, match=r"forever|nothing|no row|its share"):
        next(iter(ENDLESS_WITH_NOTHING[name]))


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("failed_workers_let_go")
def test_what_lets_nothing_through_raises_from_workers_too() -> None:
    pipe = tp.from_arrow(TABLE).sharding_filter(4).shuffle(15).filter(nothing).batch(8).repeat()
    with pytest.raises(tp.DataError, match="forever"):
        next(iter(ours(pipe, 1)))


@pytest.mark.parametrize("place", ["before", "after"])
def test_rows_taken_of_each_epoch_are_taken_of_each_epoch(place: str) -> None:
    """``take`` counts within an epoch wherever it stands below ``repeat``."""
    for taken in (
        tp.from_arrow(TABLE).take(12),
        tp.from_arrow(TABLE).shuffle(100).take(12),
        tp.from_arrow(TABLE).filter(is_even).take(12),
        tp.from_iterable(lambda: ({"row": row} for row in range(100))).take(12),
        tp.from_iterable(lambda: ({"row": row} for row in range(100))).filter(is_even).take(12),
    ):
        pipe = taken.repeat().batch(6) if place == "before" else taken.batch(6).repeat()
        assert len(given_by(pipe, 10)) == 10


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_iterator_is_not_copied(again: Any) -> None:
    iterator = iter(tp.from_dataset(range(9)))
    next(iterator)
    with pytest.raises(TypeError, match=r"begin another one with iter\(pipe\)"):
        again(iterator)
    assert list(iterator) == list(range(1, 9))


@pytest.mark.sample(4)
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize(("cut", "kept"), [
    (lambda pipe: pipe.skip(3), slice(3, None)),
    (lambda pipe: pipe.skip(1).skip(4), slice(5, None)),
    (lambda pipe: pipe.skip(2).take(7).skip(1), slice(3, 9)),
    (lambda pipe: pipe.take(9).skip(2), slice(2, 9)),
])  # fmt: skip
def test_counted_batches_that_are_skipped_are_left_out_of_each_epoch_wherever_it_is_resumed(
    cut: Any, kept: slice, repeated: bool
) -> None:
    whole = pipeline()
    epochs = [list(whole)[kept], list(whole)[kept]]
    expected = [*epochs[0], *epochs[1]] if repeated else epochs[0]

    def made() -> tp.Pipeline:
        pipe = cut(pipeline())
        return pipe.repeat(2) if repeated else pipe

    assert list(made()) == expected
    for taken in range(len(expected)):
        pipe = made()
        pipe.load_state_dict(pipe.state_at(taken))
        assert list(pipe) == expected[taken:]
        for worker in range(2):  # of a plain DataLoader: they take turns from there on
            pipe = made()
            pipe.load_state_dict(pipe.state_at(taken))
            with in_worker(worker, 2, 1000 * taken, pipe):
                assert list(pipe) == expected[taken:][worker::2]


FIRST_SPAWNED = """
import sys
from multiprocessing import set_forkserver_preload
from torch.utils.data import DataLoader
import trainpipes as tp
if __name__ == "__main__":
    pipe = tp.from_dataset(list(range(12))).shuffle(20, seed=5).batch(4)
    set_forkserver_preload(["torch.utils.data", "trainpipes"])
    loader = DataLoader(pipe, batch_size=None, num_workers=1, multiprocessing_context=sys.argv[1])
    orders = {str(list(loader)) for _ in range(3)}
    print(len(orders))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_are_spawned_before_any_was_forked_begin_another_epoch_each_time(
    method: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(FIRST_SPAWNED)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", tmp_path / "train.py", method],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert ran.stdout == "3\n"


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("way", "workers"), [(in_process, 0), (ours, 0), (plain, 2)])
def test_ranks_that_one_process_starts_count_each_for_itself(
    way: Any, workers: int, start: str
) -> None:
    pipe = pipeline()
    given_by(pipe)  # which is epoch 0
    context, ranks, processes = multiprocessing.get_context(start), [], []
    for rank in range(2):
        here, there = context.Pipe()
        arguments = rank, way, pipe, workers, there
        process = context.Process(target=rank_of_two, args=arguments)  # type: ignore[attr-defined]
        process.start()
        ranks.append(here)
        processes.append(process)
    alone = [pipeline().distributed(rank=rank, world_size=2) for rank in range(2)]
    try:
        for number in (1, 2, 3):
            for here, of_rank in zip(ranks, alone, strict=True):  # the second one after the first
                here.send(True)
                of_rank.set_epoch(number)
                assert sorted(here.recv()) == sorted(given_by(of_rank))
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert given_by(pipe) == epoch(1)


@pytest.mark.parametrize(
    "around",
    [
        lambda rows: rows,
        lambda rows: rows.shuffle(4, seed=0).repeat(2),
        lambda rows: rows.shuffle(scope="global", seed=0),
        lambda rows: rows.map(str, num_workers=2),
        lambda rows: tp.concat(rows, tp.from_dataset([5])),
        lambda rows: tp.mix({"a": rows, "b": tp.from_dataset([5])}, weights={"a": 1, "b": 1}),
    ],
    ids=["as they stand", "shuffle", "global", "workers", "concat", "mix"],
)
@pytest.mark.parametrize("way", [iter, tp.Loader], ids=["pipeline", "Loader"])
def test_an_epoch_of_a_list_that_has_other_rows_than_at_first_is_refused(
    way: Any, around: Any
) -> None:
    data = [*range(8)]
    pipe = around(tp.from_dataset(data)).batch(4)
    epoch = iter(pipe)
    next(epoch)
    data += range(8, 16)
    list(epoch)  # goes on to its end
    with pytest.raises(tp.DataChangedError, match="has 16 rows, and had 8 when"):
        list(way(pipe))
    del data[4:]
    with pytest.raises(tp.DataChangedError, match="has 4 rows, and had 8"):
        list(way(pipe))
    assert len(list(tp.from_dataset(data).batch(4))) == 1


def test_the_length_of_a_dataset_is_asked_for_once_a_pass() -> None:
    class Counted(list[int]):
        asked = 0

        def __len__(self) -> int:
            self.asked += 1
            return super().__len__()

    data = Counted(range(100))
    pipe = tp.from_dataset(data).shuffle(20, seed=0).batch(2)
    list(pipe)
    before = data.asked
    list(pipe)
    assert data.asked == before + 1


def test_epochs_without_a_state_hash_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tp.from_tensors(range(10)).batch(4)
    monkeypatch.setattr(TensorSource, "fingerprint", lambda _: pytest.fail("it is hashed"))
    assert [len(batch) for _ in range(3) for batch in pipe] == [4, 4, 2] * 3
