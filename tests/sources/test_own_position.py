"""What has epochs or a state of its own is refused where rows or keys of a plain iterable are taken, with
what to write instead; and what is written instead is exact."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset
from torchdata.nodes import IterableWrapper
from torchdata.nodes import Loader as NodeLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from resuming import check_resume

ROWS = 40


def pipeline() -> tp.Pipeline:
    return tp.from_dataset(list(range(ROWS))).sharding_filter(4).shuffle(8, seed=1)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


#: What is given, and what the message says to write.
GIVEN: dict[str, tuple[Callable[[], Any], str]] = {
    "pipeline": (pipeline, "a pipeline has epochs and a state of its own: use it itself"),
    "Loader": (lambda: tp.Loader(pipeline()), "write loader.pipeline"),
    "iterator": (lambda: iter(pipeline()), "use a pipeline itself"),
    "own node": (lambda: tp.nodes.FromDataset(dataset=[1]), "use a pipeline itself"),
    "DataLoader": (lambda: DataLoader([1, 2]), "write from_dataset(loader.dataset)"),
    "of a stream": (lambda: DataLoader(Stream()), "write from_iterable(loader.dataset)"),
    "of a pipeline": (lambda: DataLoader(pipeline(), batch_size=None), "write loader.dataset"),
    "StatefulDataLoader": (
        lambda: StatefulDataLoader([1, 2]), "write from_dataset(loader.dataset)"
    ),
    "node": (lambda: IterableWrapper([1, 2]), "write from_torchdata(node)"),
    "nodes.Loader": (
        lambda: NodeLoader(IterableWrapper([1, 2])), "write from_torchdata(loader.root)"
    ),
}  # fmt: skip
#: Where it is given.
PLACES: dict[str, Callable[[Any], Any]] = {
    "from_iterable": tp.from_iterable,
    "from_dataset": tp.from_dataset,
    "from_hf": tp.from_hf,
    "from_torchdata": tp.from_torchdata,
    "sampler": lambda given: tp.from_dataset([1, 2], given),
    "batch_sampler": lambda given: tp.from_dataset([1, 2], batch_sampler=given),
    "shuffle": lambda given: tp.from_dataset([1, 2]).shuffle(sampler=given),
    "mix": lambda given: tp.mix({"a": given}),
    "concat": lambda given: tp.concat(pipeline(), given),
    "zip": lambda given: tp.zip(pipeline(), given),
    "Loader": tp.Loader,
}
TAKEN = {(place, "pipeline") for place in ("mix", "concat", "zip", "Loader")} | {
    ("from_torchdata", "node"), ("from_torchdata", "own node"),  # says it otherwise
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_what_has_a_position_of_its_own_is_refused_with_what_to_write(place):
    for given, (make, answer) in GIVEN.items():
        if (place, given) not in TAKEN:
            with pytest.raises(tp.ConfigError, match=re.escape(answer)):
                PLACES[place](make())


@pytest.mark.parametrize("given", GIVEN)
def test_a_function_that_returns_it_is_refused_when_it_is_called(given):
    make, answer = GIVEN[given]
    with pytest.raises(tp.ConfigError) as caught:
        list(tp.from_iterable(make))
    assert answer in str(caught.value) or "use the pipeline itself" in str(caught.value)


def in_a_generator() -> Iterator[int]:
    for row in pipeline():
        yield row + 1


@pytest.mark.parametrize(
    "make",
    [
        in_a_generator,
        lambda: (row + 1 for row in pipeline()),
        lambda: map(str, pipeline()),
        lambda: (row for row in tp.Loader(pipeline())),
    ],
    ids=["function", "expression", "map", "Loader"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_generator_over_a_pipeline_is_refused(make, world):
    """Also on two ranks, where to add sharding_filter() would lose half of the rows."""
    rows = tp.from_iterable(make).sharding_filter(4).repeat()
    with pytest.raises(tp.ConfigError, match="use the pipeline itself"):
        rows.distributed(rank=0, world_size=world).peek()


def test_a_generator_may_read_a_fixed_epoch_on_one_rank():
    def pairs() -> Iterator[tuple[int, int]]:
        rows = iter(tp.Loader(pipeline(), epoch=0))
        yield from zip(rows, rows, strict=True)

    check_resume(lambda: tp.from_iterable(pairs, version="1").batch(4), processes=0)


def test_a_sampler_that_iterates_a_pipeline_is_refused():
    class Keys:
        def __iter__(self) -> Iterator[int]:
            return iter(pipeline())

    with pytest.raises(tp.ConfigError, match="use the pipeline itself"):
        list(tp.from_dataset(list(range(ROWS)), Keys()))


def test_a_stream_of_hugging_face_is_sent_to_from_hf():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": list(range(9))}).to_iterable_dataset()
    for given in (stream, DataLoader(stream)):
        with pytest.raises(tp.ConfigError, match=r"write from_hf\("):
            tp.from_iterable(given)
    with pytest.raises(tp.ConfigError, match=r"write from_hf\(dataset\)"):
        list(tp.from_iterable(lambda: stream))
    check_resume(tp.from_hf(stream).batch(2), processes=0)


def test_an_iterator_that_is_given_twice_is_refused():
    items = iter(range(10))
    pipe = tp.from_iterable(lambda: items)
    assert list(pipe) == list(range(10))
    with pytest.raises(tp.ConfigError, match="the same one again"):
        list(pipe)
