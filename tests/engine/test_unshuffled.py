"""Without a shuffle every pass gives the same batches, whatever the stages are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

import trainpipes as tp
from every_stage import ENDLESS, FINITE, files
from resuming import check_resume
from trainpipes import Pipeline
from trainpipes.interfaces.stage import Stage
from trainpipes.testing import digest

pytestmark = pytest.mark.filterwarnings("ignore:pin.. does nothing here:UserWarning")

#: Whose batches differ from pass to pass without a shuffle, and why.
EXCEPTIONS = {
    "map / rng": "draws for each row and epoch",
    "map / rng before": "draws for each row and epoch",
    "map / rng, endless": "draws for each row and epoch",
    "map / threads": "draws for each row and epoch",
    "mask_tokens": "masks other tokens in each epoch",
    "mask_tokens / packed": "masks other tokens in each epoch",
    "mask_tokens / endless across": "masks other tokens in each epoch",
    "sample_by": "keeps other rows in each epoch",
    "sample_by / classes before": "keeps other rows in each epoch",
    "sample_by / endless": "keeps other rows in each epoch",
    "mask_spans": "masks other spans in each epoch",
    "mask_spans / samples": "masks other spans in each epoch",
    "decode_audio / crop": "crops at another place in each epoch",
    "decode_video / crop": "crops at another place in each epoch",
    "random_crop": "crops at another place in each epoch",
    "random_crop / endless across": "crops at another place in each epoch",
    "random_resized_crop": "crops at another place in each epoch",
    "flip": "flips other images in each epoch",
    "image_transform": "the transform draws for each row and epoch",
    "from_dataset / sampler": "its sampler shuffles",
    "from_dataset / batches": "its sampler shuffles",
}
#: Those that are tried with worker processes each time; all are where slow tests are asked for.
WITH_WORKERS = [
    "pack / across", "bucket_by_length", "mix / nested", "filter",
]  # fmt: skip
#: Whose variants keep rows back, each in another way.
KEEP = ("pack", "bucket_by_length", "mix", "repeat", "batch", "cache")
#: Of pipelines without an end.
MOST = 25


def unshuffled(pipe: Pipeline) -> Pipeline:
    """A pipeline without its shuffles and samplers, also in those that it is made of; two epochs in a pass
    where it has no end."""
    stages: list[Stage] = []
    for stage in pipe.stages:
        if stage.name == "shuffle":
            continue
        if stage.name == "mix":
            sources = {name: unshuffled(part) for name, part in stage.options["sources"].items()}
            stage = stage._replaced(sources=sources)
        if stage.name == "repeat" and stage.options["times"] is None:
            stage = stage._replaced(times=2)
        stages.append(stage)
    return Pipeline(stages)


def given_by(run: Iterable[Any]) -> list[str]:
    return [digest(item) for item in islice(run, MOST)]


def is_endless(pipe: Pipeline) -> bool:
    return any(stage.options.get("stop") == "repeat" for stage in pipe.stages)


def variants(quick: Callable[[str], bool]) -> list[Any]:
    """All pipelines, most of them where slow tests are asked for."""
    names = [*FINITE, *ENDLESS]
    return [pytest.param(n, marks=() if quick(n) else pytest.mark.slow) for n in names]


@pytest.mark.sample(30)
@pytest.mark.parametrize(
    "name", variants(lambda n: " / " not in n or n in EXCEPTIONS or n.startswith(KEEP))
)
def test_every_pass_gives_the_same(name: str, folder: Path) -> None:
    make = {**FINITE, **ENDLESS}[name]
    pipe = unshuffled(make(folder))
    first = given_by(pipe)
    assert len(first) > 2
    if is_endless(pipe):  # another pass goes on where this one stands
        pipe = unshuffled(make(folder))
    assert (given_by(tp.Loader(pipe)) == first) is (name not in EXCEPTIONS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", variants(WITH_WORKERS.__contains__))
def test_every_pass_of_workers_gives_the_same(name: str, folder: Path) -> None:
    make = {**FINITE, **ENDLESS}[name]
    pipe = unshuffled(make(folder))
    first = given_by(pipe)
    if is_endless(pipe):
        pipe = unshuffled(make(folder))
    loader = tp.Loader(pipe, num_workers=2, persistent_workers=True)
    for _ in range(1 if is_endless(pipe) else 3):
        assert given_by(loader) == first or name in EXCEPTIONS


def lengths(rows: int = 96) -> Pipeline:
    sizes = np.random.default_rng(1).integers(1, 30, rows)
    ids = [[n + 1] * size for n, size in enumerate(sizes.tolist())]
    return tp.from_arrow(pa.table({"input_ids": ids}))


def packed(rows: Pipeline) -> Pipeline:
    return rows.pack(32, buffer_size=20).batch(2).pad_collate()


SHUFFLED = {
    "a shuffle": lambda f: lengths().shuffle(30),
    "a shuffle within a mix": lambda f: tp.mix({"a": lengths(40).shuffle(30), "b": lengths(20)}),
    "a shuffle of files": lambda f: (
        tp.list_files(files(f)).shuffle(seed=1).read_parquet().rename({"tokens": "input_ids"})
    ),
    "a sampler that shuffles": lambda f: lengths().shuffle(sampler=tp.samplers.RandomSampler()),
    "a sampler of torch that shuffles": lambda f: lengths().shuffle(sampler=SubsetRandomSampler(range(90))),
    "a dataset with such a sampler": lambda f: tp.from_dataset(ROWS, SubsetRandomSampler(range(60))),
}  # fmt: skip
UNSHUFFLED = {
    "rows": lambda f: lengths(),
    "a sampler in order": lambda f: lengths().shuffle(sampler=tp.samplers.SequentialSampler()),
    "a sampler of torch in order": lambda f: lengths().shuffle(
        sampler=SequentialSampler(range(96))
    ),
    "parts in order": lambda f: lengths().shuffle(
        sampler=DistributedSampler(range(96), 2, 0, shuffle=False)
    ),  # type: ignore[arg-type]
    "our parts in order": lambda f: lengths().shuffle(
        sampler=tp.samplers.DistributedSampler(96, 2, 0, shuffle=False)
    ),
    "a list of numbers": lambda f: tp.from_dataset(ROWS, list(range(60))),
    "a mix": lambda f: tp.mix({"a": lengths(40), "b": lengths(20)}),
    "a packed part of a mix": lambda f: tp.mix(
        {
            name: lengths(n).pack(16, buffer_size=9).select("input_ids")
            for name, n in (("a", 40), ("b", 9))
        },
        weights={"a": 1, "b": 2},
    ),
}
ROWS = [{"input_ids": [n + 1] * (n % 9 + 1)} for n in range(60)]


@pytest.mark.parametrize("name", SHUFFLED)
def test_with_a_shuffle_every_pass_is_another(name: str, folder: Path) -> None:
    pipe = packed(SHUFFLED[name](folder))
    passes = [given_by(pipe) for _ in range(3)]
    assert len({tuple(one) for one in passes}) == 3


@pytest.mark.parametrize("name", UNSHUFFLED)
@pytest.mark.parametrize("cut", ["pack", "bucket"])
def test_an_order_that_is_given_stays(name: str, cut: str, folder: Path) -> None:
    rows = UNSHUFFLED[name](folder)
    pipe = packed(rows) if cut == "pack" else rows.bucket_by_length(3, buffer_size=18)
    passes = [given_by(pipe) for _ in range(3)]
    assert passes[0] == passes[1] == passes[2]


def test_batches_of_a_sampler_in_order_come_again() -> None:
    batches = BatchSampler(SequentialSampler(ROWS), 4, False)
    pipe = tp.from_dataset(ROWS, batch_sampler=batches).pad_collate()
    assert given_by(pipe) == given_by(pipe)


def test_what_is_packed_without_a_shuffle_resumes_in_any_epoch() -> None:
    bucketed = lengths().sharding_filter(4).bucket_by_length(3, buffer_size=9)
    for pipe in (packed(lengths().sharding_filter(4)), bucketed):
        check_resume(pipe, processes=0, every=7, epochs=3)


def test_what_is_packed_without_a_shuffle_is_the_same_on_two_ranks() -> None:
    endless = packed(lengths().sharding_filter(4).repeat())
    whole = given_by(tp.Loader(endless))
    ranks = [tp.Loader(endless.distributed(rank=rank, world_size=2)) for rank in range(2)]
    parts = [given_by(islice(rank, MOST // 2 + 1)) for rank in ranks]
    both = [batch for step in zip(*parts, strict=True) for batch in step]
    assert both[:MOST] == whole


class Numbers(tp.Format):
    """Numbers of 8 bytes in one block, which counts how often it is decoded."""

    name, suffixes, schema = "numbers", (".i8",), pa.schema([("x", pa.int64())])
    decoded: ClassVar[list[int]] = []

    def scan(self, file: Any) -> tp.Layout:
        return tp.Layout([file.size // 8], [0], [file.size], self.schema)

    def decode(self, data: Any, layout: tp.Layout, block: int, columns: Any) -> Iterator[Any]:
        self.decoded.append(block)
        [content] = data.read(self.ranges(layout, block, columns))
        time.sleep(0.02)  # as long as decoding takes, for other threads to begin
        yield pa.record_batch({"x": np.frombuffer(content, "<i8")})


def test_shards_of_one_block_share_what_is_decoded(tmp_path: Path) -> None:
    """Without a shuffle each of 24 shards is a span of its own."""
    (tmp_path / "a.i8").write_bytes(np.arange(4800, dtype="<i8").tobytes())
    pipe = tp.read_files(tmp_path, Numbers()).sharding_filter().batch(10)
    assert sorted(row["x"] for batch in pipe for row in batch) == list(range(4800))
    Numbers.decoded.clear()
    for _ in tp.Loader(pipe, threads=3):
        pass
    assert len(Numbers.decoded) <= 6
