"""What bounds a run, from tables of counts."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from typing import Any

import pytest

from trainpipes._internal.activity import BYTES, TURN, UNROLL, Counts
from trainpipes.look.profiling import facts as seen
from trainpipes.look.profiling.facts import Facts, Measured, StageFacts
from trainpipes.look.profiling.page import text_lines
from trainpipes.look.profiling.verdict import Verdict, verdict

PARQUET = StageFacts("read_parquet()", "read_parquet")
JSON = StageFacts("read_json()", "read_json")
CLEAN = StageFacts("map(clean)", "map", calls=True, in_caller=True)
KEEP = StageFacts("filter(keep)", "filter", calls=True, in_caller=True)
THREADS = StageFacts("map(clean, num_workers=2)", "map", calls=True, workers=2)
TOKENIZE = StageFacts("tokenize('gpt2')", "tokenize", tokenizes=True)
BATCH, PAD = StageFacts("batch(8)", "batch"), StageFacts("pad_collate()", "pad_collate")
CACHE, BUCKETS = (
    StageFacts("cache()", "cache"),
    StageFacts("bucket_by_length(8)", "bucket_by_length"),
)


def test_other_programs_count_where_they_take_cores_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [
        "cpu  900 0 0 9 9 0 0 0 0 0", "cpu0 100 20 30 9 9 4 5 0 0 0", "cpu1 700 0 0 9 9 0 0 0 0 0",
        "cpu10 1 1 1 9 9 1 1 0 0 0", "intr 7 7 7 7 7 7 7 7",
    ]  # fmt: skip
    stat = "\n".join(lines)
    monkeypatch.setattr(seen, "open", lambda path: io.StringIO(stat), raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 10}, raising=False)
    assert seen.busy_seconds() == 164 / os.sysconf("SC_CLK_TCK")


def facts(*stages: StageFacts, **about: Any) -> Facts:
    return Facts((*stages, BATCH, PAD), **{"cores": 4, "threads": 4, "shards": 8, **about})


def counts(seconds: float = 10.0, **groups: dict[str, tuple[float, float]]) -> Counts:
    """``late`` and ``totals`` beside groups of threads."""
    late, totals = groups.pop("late", 0), groups.pop("totals", {})
    times = {group: {k: list(v) for k, v in own.items()} for group, own in groups.items()}
    cpu = sum(v[1] for own in times.values() for v in own.values())
    found = Counts(seconds, times, {"threads": 4}, 100, int(100 * late), cpu)  # type: ignore[operator]
    return replace(found, totals=totals)  # type: ignore[arg-type]


def found(run: Facts, waited: float, seconds: float = 10.0, **about: Any) -> Verdict:
    names = ("start", "workers", "children", "others", "cells", "padding")
    more = {name: about.pop(name) for name in names if name in about}
    own = about.pop("counts", None) or counts(**about)
    return verdict(run, Measured(seconds, waited, 0.1, counts=own, **more))


#: What is found: the verdict's word, what its first line is to say, and the least and most gain.
CASES: dict[str, tuple[Verdict, str, str, float, float]] = {
    "a slow Python function": (
        found(facts(PARQUET, CLEAN), 8.0, iterates={"map(clean)": (7.5, 7.4)}),
        "function", "map(clean, num_workers=4, method='process')", 3.0, 4.1,
    ),
    "threads that tokenize a little, and cores that others take": (
        found(facts(PARQUET, TOKENIZE, cores=2), 2.6, seconds=9.0, threads={"tokenize('gpt2')": (1.2, 0.3)}),
        "tokenizer", "tokenize('gpt2').cache(), or tokenize ahead", 1.1, 1.2,
    ),
    "a slow filter": (
        found(facts(PARQUET, KEEP), 8.0, iterates={"filter(keep)": (7.5, 7.4)}),
        "function", "Loader(pipe, num_workers=4)", 3.0, 4.1,
    ),
    "a function that waits": (
        found(facts(PARQUET, CLEAN), 9.0, iterates={"map(clean)": (8.8, 0.2)}),
        "function waits", "map(clean, num_workers=16)", 5.0, 5.0,
    ),
    "too few threads for a function that waits": (
        found(facts(PARQUET, THREADS), 9.0, iterates={TURN: (8.8, 0.0)}, map={THREADS.text: (19.5, 0.2)}),
        "function", "map(clean, num_workers=8)", 3.0, 4.1,
    ),
    "threads for a function that holds the GIL": (
        found(
            facts(PARQUET, THREADS), 9.0, iterates={TURN: (8.8, 0.0)},
            map={THREADS.text: (19.5, 9.5)}, late=0.9,
        ),
        "function", "map(clean, num_workers=4, method='process')", 3.0, 4.3,
    ),
    "rows to Python": (
        found(facts(PARQUET, CLEAN), 9.0, iterates={UNROLL: (6.0, 6.0), "map(clean)": (2.0, 2.0)}),
        "rows", "map_batches(fn)", 1.5, 2.1,
    ),
    "one thread": (
        found(facts(PARQUET, threads=0), 9.0, iterates={"read_parquet()": (6, 6), "pad_collate()": (3, 3)}),
        "one thread", "Loader(pipe) without threads=0", 3.0, 5.0,
    ),
    "a slow tokenizer": (
        found(
            facts(PARQUET, TOKENIZE), 7.0, iterates={TURN: (6.9, 0.0)},
            threads={"read_parquet()": (2.0, 2.0), "tokenize('gpt2')": (34.0, 34.0)},
        ),
        "tokenizer", "tokenize('gpt2').cache()", 3.0, 3.4,
    ),
    "a slow tokenizer after a shuffle": (
        found(
            facts(PARQUET, StageFacts("shuffle()", "shuffle"), TOKENIZE), 7.0, iterates={TURN: (6.9, 0.0)},
            threads={"tokenize('gpt2')": (34.0, 34.0)},
        ),
        "tokenizer", "tokenize('gpt2').cache() before shuffle(), or tokenize ahead", 3.0, 3.4,
    ),
    "JSON, parsed in every epoch": (
        found(
            facts(JSON, local=True), 7.0, iterates={TURN: (6.9, 0.0)},
            threads={"read_json()": (30.0, 30.0), "pad_collate()": (5.0, 5.0)},
        ),
        "parsing", "repack(files, folder), and read_parquet(folder)", 2.0, 3.4,
    ),
    "small row groups": (
        found(
            facts(PARQUET, group_rows=50), 7.0, iterates={TURN: (6.9, 0.0)},
            threads={"read_parquet()": (30.0, 20.0), "pad_collate()": (5.0, 5.0)},
        ),
        "row groups", "repack(files, folder), which makes larger row groups", 2.0, 3.4,
    ),
    "large row groups": (
        found(
            facts(PARQUET, group_rows=1_000_000, largest_group=1_000_000), 6.0, start=5.5,
            iterates={TURN: (5.5, 0.0)}, threads={"read_parquet()": (5.5, 5.5)},
        ),
        "start", "repack(files, folder), which makes smaller row groups", 1.5, 1.9,
    ),
    "large row groups, until the run ends": (
        found(
            facts(PARQUET, group_rows=1_000_000, largest_group=1_000_000), 9.5, start=9.5,
            iterates={TURN: (9.0, 0.0)}, threads={"read_parquet()": (9.0, 9.0)},
        ),
        "start", "repack(files, folder), which makes smaller row groups", 99.0, 99.0,  # no gain is said
    ),
    "a plain DataLoader": (
        found(
            facts(PARQUET, plain=True, workers=4, threads=0), 7.0, children=12.0,
        ),
        "processes", "tp.Loader(pipe)", 1.5, 3.4,
    ),
    "too few shards for the workers": (
        found(
            facts(PARQUET, CLEAN, plain=True, workers=4, threads=0, shards=1), 9.0,
            iterates={TURN: (9.0, 0.0)},
            workers=counts(iterates={"map(clean)": (9.8, 9.8)}),
        ),
        "shards", "sharding_filter(16)", 3.0, 4.1,
    ),
    "too few workers for the cores": (
        found(
            facts(PARQUET, CLEAN, workers=1, threads=0), 9.0, iterates={TURN: (9.0, 0.0)},
            workers=counts(iterates={"map(clean)": (9.8, 9.8)}),
        ),
        "workers", "Loader(pipe, num_workers=4)", 2.5, 4.1,
    ),
    "latency of a server: small requests": (
        found(
            facts(PARQUET, local=False, group_rows=100, prefetch_bytes=256_000_000), 8.0,
            iterates={TURN: (8.0, 0.0)}, threads={BYTES: (35.0, 0.1)}, requests={BYTES: (310.0, 1.0)},
            totals={"requests": 5000, "bytes": 100_000_000},
        ),
        "latency", "repack(files, folder), which makes larger row groups", 4.0, 5.1,
    ),
    "latency of a server: few requests at a time": (
        found(
            facts(PARQUET, local=False, group_rows=5000, prefetch_bytes=4_000_000), 8.0,
            iterates={TURN: (8.0, 0.0)}, threads={BYTES: (35.0, 0.1)}, requests={BYTES: (20.0, 0.1)},
            totals={"requests": 100, "bytes": 100_000_000},
        ),
        "latency", 'list_files(prefetch_bytes="32MB")', 4.0, 5.1,
    ),
    "bandwidth": (
        found(
            facts(PARQUET, local=False, group_rows=5000, prefetch_bytes=256_000_000), 8.0,
            iterates={TURN: (8.0, 0.0)}, threads={BYTES: (35.0, 0.1)}, requests={BYTES: (300.0, 1.0)},
            totals={"requests": 100, "bytes": 400_000_000},
        ),
        "bandwidth", 'list_files(cache_dir="/local/cache"), from the second epoch on', 4.0, 5.1,
    ),
    "the same bytes again and again": (
        found(
            facts(PARQUET, local=False, group_rows=5000, file_bytes=100_000_000), 8.0,
            iterates={TURN: (8.0, 0.0)}, threads={BYTES: (35.0, 0.1)}, requests={BYTES: (300.0, 1.0)},
            totals={"requests": 100, "bytes": 400_000_000},
        ),
        "bandwidth", 'list_files(cache_dir="/local/cache")', 4.0, 5.1,
    ),
    "padding": (
        found(facts(PARQUET), 0.1, cells=1000, padding=600),
        "padding", "bucket_by_length() in place of batch(), or pack() before it", 2.2, 2.3,
    ),
    "padding of pairs": (
        found(
            facts(PARQUET, pairs=True, lengths_by="column='chosen_input_ids'"), 0.1, cells=1000, padding=600
        ),
        "padding", "bucket_by_length(column='chosen_input_ids') in place of batch()", 2.2, 2.3,
    ),
    "cores taken by others": (
        found(
            facts(PARQUET), 8.0, others=3.0,
            counts=replace(counts(iterates={"pad_collate()": (8.0, 2.0)}), queued=6.0),
        ),
        "cores", "end other programs, or ask for more cores", 1.5, 4.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_bounds_a_run(case: str) -> None:
    said, bound, line, least, most = CASES[case]
    assert said.bound == bound, said
    assert said.changes[0].line.startswith(line), said
    gain = said.changes[0].gain
    assert gain is None or least <= gain <= most
    assert len(said.changes) <= 2
    assert "times as fast" in str(said.changes[0]) or gain is None


@pytest.mark.parametrize("run", [
    found(facts(PARQUET), 0.1),
    found(facts(PARQUET, CLEAN), 0.4, iterates={"map(clean)": (0.4, 0.4)}),
    found(facts(PARQUET, BUCKETS), 0.1, cells=1000, padding=100),
])  # fmt: skip
def test_a_trainer_that_is_slow_needs_no_change(run: Verdict) -> None:
    assert run == Verdict("trainer", "the trainer: data is there when it asks")


def test_a_first_batch_that_was_late_is_no_slow_pipeline() -> None:
    said = verdict(facts(PARQUET), Measured(10.0, 2.1, 2.0))
    assert said == Verdict(
        "trainer", "the trainer: data is there when it asks, but for the first batch after 2.0 s"
    )


def test_what_nothing_explains_is_said_so() -> None:
    assert found(facts(PARQUET), 5.0).bound == "unknown"
    assert not found(facts(PARQUET), 5.0).changes
    assert verdict(facts(), Measured(0.0, 0.0)).bound == "nothing"


def test_the_trainer_bounds_the_gain() -> None:
    """A run is never shorter than what the trainer takes."""
    for waited in (2.0, 5.0, 8.0):
        said = found(
            facts(PARQUET, CLEAN, cores=64), waited, iterates={"map(clean)": (waited, waited)}
        )
        assert said.changes[0].gain == pytest.approx(min(5, 10 / (10 - waited)))


@pytest.mark.parametrize(("shards", "ranks", "text"), [
    (1, 1, "4 workers share 1 shard: each is read 4 times"),
    (2, 1, "4 workers share 2 shards: each is read 2 times"),
    (24, 7, "28 workers share 24 shards: each is read 7 times"),
])  # fmt: skip
def test_workers_that_share_shards_all_have_batches(shards: int, ranks: int, text: str) -> None:
    run = facts(PARQUET, CLEAN, plain=True, workers=4, threads=0, shards=shards, ranks=ranks)
    said = found(run, 9.0, workers=counts(iterates={"map(clean)": (9.8, 9.8)}))
    assert (said.bound, text in said.text) == ("shards", True)


def test_a_kept_tokenizer_is_not_to_be_kept() -> None:
    threads = {"tokenize('gpt2')": (34.0, 34.0)}
    said = found(facts(PARQUET, TOKENIZE, CACHE), 7.0, iterates={TURN: (6.9, 0.0)}, threads=threads)
    assert said.bound != "tokenizer"


def test_a_run_that_is_over_soon_after_its_first_batch_does_not_name_a_bound() -> None:
    ends = {
        first: dict(text_lines(facts(), Measured(1.0, first, first)))["waiting"]
        for first in (0.4, 0.9)
    }
    assert ends[0.4].endswith("40% of 1.0 s: the trainer bounds this run")
    assert "most of it before the first batch" in ends[0.9]


SHUFFLE = StageFacts("shuffle(9)", "shuffle")


@pytest.mark.parametrize(
    ("run", "sizes", "said"),
    [
        (facts(SHUFFLE, ranks=2), {100: 5, 300: 5}, "20% of a step of 2 ranks is waiting"),
        (facts(SHUFFLE, ranks=2), {100: 10}, "0% of a step of 2 ranks"),
        (facts(SHUFFLE, ranks=1), {100: 5, 300: 5}, None),
        (facts(SHUFFLE, ranks=2), {100: 3, 300: 3}, None),
        (facts(SHUFFLE, ranks=2), {}, None),
        (facts(ranks=2), {100: 5, 300: 5}, None),
        (facts(SHUFFLE, BUCKETS, ranks=2), {100: 5, 300: 5}, None),
    ],
)
def test_waiting_for_the_longest_batch_is_said_where_one_rank_can_know(
    run: Facts, sizes: dict[int, int], said: str | None
) -> None:
    text = dict(text_lines(run, Measured(1.0, 0.0, sizes=sizes))).get("ranks")
    assert text is None if said is None else said in str(text)
