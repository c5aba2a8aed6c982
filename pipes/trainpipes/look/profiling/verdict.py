"""The bottleneck of a run, from counts alone, and other causes of waits: each cause with a change and the
seconds it saves.

Gains are arithmetic over measured seconds. A change makes a run as long as the longest of the rest: the
trainer's own time, the work of the thread that iterates, that of each group of threads shared by as many as
there are, and all CPU seconds shared by the cores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from trainpipes._internal.activity import BYTES, ITERATES, UNROLL, WAITING
from trainpipes.look.profiling.facts import Facts, Measured, StageFacts

#: The least part of the waiting, or of the work of threads, that a cause takes.
LEAST_PART = 0.25
#: Shares: of time in line for a core from which on it counts; of CPU in a function's time below which it
#: waits. Cores of other programs from which on they count.
MUCH_QUEUED, COMPUTES, LITTLE_OTHERS = 0.2, 0.5, 0.5
#: Rows of a row group that is small, and of one that is large; bytes of a small request: most of its time is
#: latency. A limit of bytes fetched ahead is near at so many times the bytes under way.
SMALL_GROUP, LARGE_GROUP, SMALL_REQUEST, NEAR_LIMIT = 1000, 100_000, 256 << 10, 8
#: Most requests of a process at a time, and threads for a function that waits.
MOST_REQUESTS, MOST_THREADS = 32, 32
#: Parsed in every epoch, and what part of the time of reading is left for Parquet files of the same rows.
PARSED, LEFT_OF_PARSING = ("read_json", "read_csv", "read_text"), 0.15


@dataclass(frozen=True)
class Cause:
    bound: str
    text: str
    line: str
    seconds: float  # of the run with the change, 0 where that can't be said
    is_sure: bool = True
    is_later: bool = False  # it helps from the second epoch on


def causes(facts: Facts, m: Measured) -> list[Cause]:
    """All that the counts speak for."""
    rules = (_cores, _start, _workers, _in_caller, _in_map, _bytes, _in_threads)
    return [cause for rule in rules for cause in rule(facts, m)]


def _free(facts: Facts, m: Measured) -> float:
    """Cores that the pipeline may have, beside the trainer and other programs."""
    known = sum(v[1] for times in m.counts.times.values() for v in times.values())
    trains = max(0.0, m.counts.cpu - known) / m.seconds
    return max(1.0, facts.cores - m.others - min(1.0, trains))


def _written(text: str) -> str:
    """A stage without where its function is from."""
    return re.sub(r" \([^()]*:\d+\)", "", text)


def _with(text: str, option: str) -> str:
    """A stage as written, with a further option."""
    text = _written(text)
    return f"{text[:-1]}{'' if text.endswith('()') else ', '}{option})"


def _cores(facts: Facts, m: Measured) -> Iterator[Cause]:
    both = (m.counts, m.workers)
    cpu, queued = sum(c.cpu for c in both), sum(c.queued for c in both)
    if m.others < LITTLE_OTHERS or queued < MUCH_QUEUED * (cpu + queued):
        return
    text = f"other programs take {m.others:.1f} of {facts.cores} cores: threads wait for a core"
    work = [
        v for c in both for times in c.times.values() for k, v in times.items() if k not in WAITING
    ]
    took, computed = (sum(v[n] for v in work) for n in (0, 1))
    lost = min(queued, took - computed) / max(1.0, took / m.seconds)  # of each thread at work
    theirs = m.others / (m.others + cpu / m.seconds)
    after = max(m.trainer, m.seconds - theirs * max(0.0, lost))
    yield Cause("cores", text, "end other programs, or ask for more cores", after)


def _start(facts: Facts, m: Measured) -> Iterator[Cause]:
    """Row groups that must be decoded up to where a shard begins."""
    reads = m.of("threads", facts.opener.text)[0] + m.of(ITERATES, facts.opener.text)[0]
    work = m.of("threads")[0] + m.of(ITERATES)[0]
    at_start = m.start >= max(0.5, 0.5 * m.waited) and reads >= 0.5 * work
    if facts.largest_group >= LARGE_GROUP and at_start:
        text = f"the loop waited {m.start:.1f} s at the start: row groups have up to "
        text += f"{facts.largest_group:,} rows, which are decoded up to where a shard begins"
        line = "repack(files, folder), which makes smaller row groups"
        is_over = m.start < 0.9 * m.seconds
        yield Cause(
            "start", text, line, max(m.trainer, m.seconds - 0.8 * min(m.start, m.waited)), is_over
        )


def _workers(facts: Facts, m: Measured) -> Iterator[Cause]:
    """Processes that call functions, of a Loader, or that make batches, of a plain DataLoader."""
    if not facts.workers:
        return
    cpu = m.workers.cpu or m.children
    calls = any(stage.in_caller for stage in facts.stages)
    useful = max(1, facts.shards // facts.ranks)
    if useful < facts.workers and facts.plain:
        readers = facts.workers * facts.ranks
        shards = f"{facts.shards} shard{'s' * (facts.shards != 1)}"
        text = f"{readers} workers share {shards}: each is read {readers // gcd(readers, facts.shards)} times"
        line = f"sharding_filter({4 * facts.workers * facts.ranks})"
        after = max(m.trainer, m.seconds * useful / min(facts.workers, max(facts.cores, useful)))
        yield Cause("shards", text, line, after)
    if facts.plain and not calls and not any(stage.calls for stage in facts.stages):
        text = "a DataLoader's workers send batches of columns, which threads would hand over"
        after = max(m.trainer, cpu / _free(facts, m), 0.5 * m.seconds)
        yield Cause("processes", text, "tp.Loader(pipe)", after)
    elif facts.workers < int(_free(facts, m)):
        number = int(_free(facts, m))
        text = f"{facts.workers} workers are busy, and there are {facts.cores} cores"
        after = max(m.trainer, m.seconds * facts.workers / number)
        yield Cause("workers", text, f"Loader(pipe, num_workers={number})", after)


def _in_caller(facts: Facts, m: Measured) -> Iterator[Cause]:
    """What the thread that iterates does itself while the loop waits."""
    free, left = _free(facts, m), m.trainer
    for stage in facts.stages:
        took, cpu = m.of(ITERATES, stage.text)
        if took < LEAST_PART * m.waited or facts.workers:
            continue
        rest = m.seconds - took
        if not stage.in_caller:
            if facts.threads == 0:
                text = f"one thread does all work: {stage.text} takes {took / m.seconds:.0%} of the time"
                work, _ = m.of(ITERATES)
                after = max(left, left + m.waited - work, work / (max(1, int(free)) + 1))
                yield Cause("one thread", text, "Loader(pipe) without threads=0", after)
        elif cpu + m.counts.queued < COMPUTES * took:  # nor is it in line for a core
            text = (
                f"{stage.text} is called by one thread, and waits {1 - cpu / took:.0%} of its time"
            )
            number = next(
                n for n in (4, 8, 16, MOST_THREADS) if took / n <= left or n == MOST_THREADS
            )
            line = _with(stage.text, f"num_workers={number}")
            after = max(rest, took / number, cpu)
            yield Cause("function waits", text, _movable(stage, line, number), after)
        else:
            text = (
                f"{stage.text} is called by one thread: it takes {took / m.seconds:.0%} of the time"
            )
            number = max(1, round(free))
            line = _with(stage.text, f"num_workers={number}, method='process'")
            after = max(rest, took / number)
            yield Cause("function", text, _movable(stage, line, number), after)
    took, _ = m.of(ITERATES, UNROLL)
    if took >= LEAST_PART * m.waited and not facts.workers:
        text = f"Python objects are made of rows, {took / m.seconds:.0%} of the time, for functions"
        line = "map_batches(fn) in place of map(fn), or Loader(pipe, num_workers=...)"
        yield Cause("rows", text, line, m.seconds - 0.8 * took)


def _movable(stage: StageFacts, line: str, number: int) -> str:
    return line if stage.name == "map" else f"Loader(pipe, num_workers={number})"


def _of_workers(stage: StageFacts, number: int) -> str:
    return _written(stage.text).replace(f"num_workers={stage.workers}", f"num_workers={number}")


def _in_map(facts: Facts, m: Measured) -> Iterator[Cause]:
    """Functions with threads or processes of their own."""
    for stage in facts.stages:
        took, cpu = m.of("map", stage.text)
        if not stage.workers or took < LEAST_PART * m.waited:
            continue
        share = took / m.seconds
        idle = cpu + m.counts.queued < COMPUTES * took
        if not stage.processes and idle and m.late < COMPUTES:  # it waits
            number = min(4 * stage.workers, MOST_THREADS)
            text = f"{stage.text}: its {stage.workers} threads wait all the time"
            line = _of_workers(stage, number)
            after = max(m.trainer, m.seconds * stage.workers / number)
        elif not stage.processes:
            number = max(1, round(_free(facts, m)))
            text = f"{stage.text}: its threads hold the GIL in turn, {share:.1f} of them at work"
            line = _with(_of_workers(stage, number), "method='process'")
            after = max(m.trainer, cpu / number)
        else:
            number = int(_free(facts, m))
            if number <= stage.workers:
                continue
            text = f"{stage.text}: {share:.1f} of {stage.workers} processes at work"
            line = _of_workers(stage, number)
            after = max(m.trainer, m.seconds * stage.workers / number)
        yield Cause("function", text, line, after)


def _bytes(facts: Facts, m: Measured) -> Iterator[Cause]:
    """Storage on a network."""
    held_up, work = 0.0, 0.0
    for group in (ITERATES, "threads"):
        held_up, work = held_up + m.of(group, BYTES)[0], work + m.of(group)[0]
    requests, size = m.totals.get("requests", 0), m.totals.get("bytes", 0)
    part = held_up / max(1e-9, held_up + work)
    if facts.local or not requests or part < LEAST_PART:
        return
    under_way = (m.of("requests", BYTES)[0] + m.of(ITERATES, BYTES)[0]) / m.seconds
    under_way /= max(1, facts.workers)
    each = size / requests
    free = min(max(1, facts.threads), _free(facts, m))
    gone = max(m.trainer, m.seconds - part * m.waited)
    is_limit = facts.prefetch_bytes < NEAR_LIMIT * under_way * each
    bound = "latency"
    if each < SMALL_REQUEST and facts.group_rows < SMALL_GROUP:
        text = f"{requests:,} requests of {each / 1e3:,.0f} kB on average: latency of the server"
        after = max(gone, m.seconds * facts.group_rows / SMALL_GROUP)
        yield Cause(bound, text, "repack(files, folder), which makes larger row groups", after)
    elif under_way < MOST_REQUESTS / 2 and is_limit:
        more = min(8.0, MOST_REQUESTS / max(1.0, under_way))
        text = f"{under_way:.1f} requests are under way at a time: latency of the server"
        line = f'list_files(prefetch_bytes="{more * facts.prefetch_bytes / 1e6:,.0f}MB")'
        after = max(m.trainer, m.first + max((m.seconds - m.first) / more, work / free))
        yield Cause(bound, text, line, after)
    else:
        bound, rate = "bandwidth", f"{size / m.seconds / 1e6:,.1f} MB/s"
        text = f"{rate} come from the server, by {under_way:.1f} requests at a time"
    if not facts.kept_bytes:
        line = 'list_files(cache_dir="/local/cache")'
        is_later = not facts.file_bytes or size < 1.5 * facts.file_bytes
        line += ", from the second epoch on" * is_later
        yield Cause(bound, text, line, gone, is_later=is_later)


def _in_threads(facts: Facts, m: Measured) -> Iterator[Cause]:
    """What the pipeline's threads do while the loop waits for them."""
    group = ITERATES if facts.workers else "threads"
    total = m.of(group)[0]
    if not total or total < LEAST_PART * m.waited:
        return
    opener = facts.opener
    for stage in facts.stages:
        took = m.of(group, stage.text)[0]
        part = took / total
        if part < LEAST_PART:
            continue
        said = f"{stage.text} takes {part:.0%} of the work of threads"
        if stage.tokenizes and not facts.has("cache"):
            place = " before shuffle()" if facts.has("shuffle") else ""
            line = f"{stage.text}.cache(){place}, or tokenize ahead"
            yield Cause("tokenizer", said, line, _rest(m, part, took))
        elif stage is opener and opener.name in PARSED:
            text = f"{said}: files are parsed in every epoch"
            line = "repack(files, folder), and read_parquet(folder)"
            yield Cause("parsing", text, line, _rest(m, part, took, 1 - LEFT_OF_PARSING))
        elif stage is opener and 0 < facts.group_rows < SMALL_GROUP:
            text = f"{said}: row groups have {facts.group_rows:,} rows"
            line = "repack(files, folder), which makes larger row groups"
            yield Cause("row groups", text, line, _rest(m, part, took, 0.8))
        elif stage.calls and not facts.workers and not stage.workers and m.late >= COMPUTES:
            number = max(1, round(_free(facts, m)))
            text = f"{said}, and its calls hold the GIL"
            line = _with(stage.text, f"num_workers={number}, method='process'")
            yield Cause(
                "function",
                text,
                _movable(stage, line, number),
                max(_rest(m, part, took), took / number),
            )
    window = facts.window_bytes
    if window and facts.memory_bytes and window > facts.memory_bytes:
        text = f"shuffle windows of {window / 1e9:.1f} GB don't fit into {facts.memory_bytes / 1e9:.1f} GB"
        yield Cause("memory", text, "a smaller buffer_size in shuffle(), or max_bytes=", 0.0)


def _rest(m: Measured, part: float, took: float, saved: float = 1.0) -> float:
    """Seconds of a run whose threads save so much of a part of their work, which ``took`` so many seconds."""
    return max(m.trainer, m.seconds * (1 - saved * part), m.seconds - saved * took)


#: Shares: of waiting below which the trainer is what bounds a run; of padding from which on it is worth a
#: change. The least gain of a change that is worth its line.
LITTLE_WAITING, MUCH_PADDING, LEAST_GAIN = 0.05, 0.2, 1.1
#: The share of padding that is left with buckets, or in packed rows.
LEFT_PADDING = 0.1
#: Gains beyond this are not said: a little that was counted wrong would change them much.
MOST_GAIN = 5


@dataclass(frozen=True)
class Change:
    """A change, and its gain.

    Attributes:
        line: the code to write.
        gain: about how many times as fast the run is then, 5 for 5 or more; None where that can't be said.
    """

    line: str
    gain: float | None

    def __str__(self) -> str:
        if self.gain is None:
            return self.line
        if self.gain >= MOST_GAIN:
            return f"{self.line}: {MOST_GAIN} times as fast or more"
        return f"{self.line}: about {self.gain:.1f} times as fast"


@dataclass(frozen=True)
class Verdict:
    """The bottleneck of a run, and changes.

    Attributes:
        bound: the bottleneck, in a word.
        text: the same as a sentence.
        changes: at most two, the better first.
    """

    bound: str
    text: str
    changes: tuple[Change, ...] = ()


def verdict(facts: Facts, measured: Measured) -> Verdict:
    """The bottleneck of a run, and changes.

    >>> from trainpipes._internal.activity import Counts
    >>> from trainpipes.look.profiling.facts import StageFacts
    >>> stage = StageFacts("map(clean)", "map", calls=True, in_caller=True)
    >>> counts = Counts(10.0, {"iterates": {"map(clean)": [9.0, 9.0]}})
    >>> found = verdict(Facts((stage,), cores=4), Measured(10.0, 9.2, counts=counts))
    >>> found.bound, str(found.changes[0])
    ('function', "map(clean, num_workers=4, method='process'): about 4.4 times as fast")
    """
    m = measured
    if m.seconds <= 0:
        return Verdict("nothing", "nothing was counted")
    by_gain = sorted(causes(facts, m), key=lambda c: max(c.seconds, m.seconds / MOST_GAIN))
    if m.steady < LITTLE_WAITING and not any(cause.bound == "start" for cause in by_gain):
        if m.padded >= MUCH_PADDING and (line := _less_padding(facts)):
            text = f"the trainer: {m.padded:.0%} of the cells it computes are padding"
            return Verdict("padding", text, (Change(line, (1 - LEFT_PADDING) / (1 - m.padded)),))
        text = "the trainer: data is there when it asks"
        late = f", but for the first batch after {m.first:.1f} s" * (m.waiting >= LITTLE_WAITING)
        return Verdict("trainer", text + late)
    best = [c for c in by_gain if m.seconds >= LEAST_GAIN * c.seconds]
    if not best:
        text = "no single cause: the waiting is spread over what the table shows"
        return Verdict("unknown", text)
    bound = best[0].bound
    best.sort(key=lambda c: (c.bound != bound, c.is_later))
    lines: dict[str, Change] = {}
    for c in best:
        gain = min(MOST_GAIN, m.seconds / c.seconds) if c.seconds and c.is_sure else None
        lines.setdefault(c.line, Change(c.line, gain))
    return Verdict(best[0].bound, best[0].text, tuple(lines.values())[:2])


def _less_padding(facts: Facts) -> str:
    if facts.has("batch") and not facts.has("pack"):
        line = f"bucket_by_length({facts.lengths_by}) in place of batch()"
        return line if facts.pairs else f"{line}, or pack() before it"
    return ""
