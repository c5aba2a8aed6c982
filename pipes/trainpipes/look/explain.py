"""What a pipeline will do, said before it does it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainpipes._internal.amount import amount
from trainpipes._internal.checks import whole_number
from trainpipes._internal.secret_text import hidden
from trainpipes.engine.layout import Layout, divisors, slots_before
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.topology import Topology
from trainpipes.kinds.random_access import RandomAccessSource
from trainpipes.kinds.source import RowSource
from trainpipes.look.forecast.estimate import cuts_by_length, ends_short
from trainpipes.look.forecast.shares import Share, reads_per_block, shares
from trainpipes.stages.flat_map import FlatMap
from trainpipes.stages.tokenizing import Tokenizes

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """What will happen in a run. Prints as a table.

    Attributes:
        rows: rows read in an epoch; None where they are not counted in advance.
        batches: items that each rank gets in an epoch; None where that is not known.
        num_shards: S.
        num_spans: G, ranges of the epoch that are read side by side.
        window_rows: rows of the largest window; None where that is not known.
        window_bytes: most memory for the windows of one process, estimated from the file footers;
            None where rows have no known size.
        world_size: ranks asked about.
        num_workers: workers of each rank asked about.
        world_sizes: numbers of ranks that divide ``num_shards``.
        shares: who gets what: of each worker, or of each rank where there are no workers.
        lines: all of it, as label and text.
        notes: what a user may want to change.
    """

    rows: int | None
    batches: int | None
    num_shards: int
    num_spans: int
    window_rows: int | None
    window_bytes: int | None
    world_size: int
    num_workers: int
    world_sizes: tuple[int, ...]
    shares: tuple[Share, ...]
    lines: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.lines)
        table = [f"{label:<{width}}  {text}" for label, text in self.lines]
        return "\n".join([*table, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


def explain(plan: Plan, world_size: int, num_workers: int) -> Explanation:
    """What ``plan`` amounts to on so many ranks with so many workers.

    Raises:
        TopologyError: the ranks do not divide the shards.
    """
    whole_number(world_size, 1, "explain(world_size)", "ranks")
    whole_number(num_workers, 0, "explain(num_workers)", "workers of each rank")
    Topology(0, world_size).check(
        plan.chain.num_shards, plan.chain.shard is not None, plan.chain.opener.one_consumer
    )
    layout = plan.layouts.usual
    lines = [(label, text) for label, text in plan.inputs.source.describe()]
    rows = plan.inputs.epoch_rows
    batches = None
    if plan.counts.known and not plan.chain.endless:
        batches = slots_before(int(plan.counts.end(world_size)), 0, world_size)
    lines.append(("an epoch", _epoch_text(plan, batches, world_size)))
    spans, shards = layout.num_spans, plan.chain.num_shards
    if shards > 1:
        lines.append(
            (
                "shards",
                f"{shards}, which ranks and workers share: always so many, so that a state fits all",
            )
        )
    if spans > 1 and not plan.mixed:
        lines.append(
            (
                "spans",
                f"{spans} parts of the rows, read side by side: batches come from them in turn",
            )
        )
    window_rows = window_bytes = None
    processes = shares(plan, world_size, num_workers)
    if world_size > 1 or num_workers:
        lines += _shared(plan, processes, rows)
    if isinstance(layout, Layout) and rows:
        window_rows = max(_largest(layout, span) for span in {0, spans - 1})
        open_spans = max(len(share.spans) for share in processes)
        said = "none: rows come in file order"
        if plan.chain.shuffle and window_rows < rows:
            said = f"{window_rows:,} rows are mixed at a time, {window_rows / rows:.1%} of all"
        elif plan.chain.shuffle:
            said = f"all {rows:,} rows are mixed together"
        if plan.chain.drawn is not None:
            said = f"every row by its number: {plan.chain.shuffle}"
        lines.append(("shuffle", said))
        assert isinstance(plan.inputs.source, RowSource)
        row_bytes = plan.layouts.window_row_bytes
        if row_bytes and plan.chain.shuffle is not None and plan.chain.drawn is None:
            window_bytes = math.ceil(row_bytes * window_rows * open_spans)
            lines.append(
                (
                    "memory",
                    f"about {amount(window_bytes)} of rows to be mixed, held by each "
                    f"{'worker' if num_workers else 'rank'}",
                )
            )
    window_bytes = _mixed_bytes(plan, processes) or window_bytes
    if plan.mixed and window_bytes:
        who = "worker" if num_workers else "rank"
        lines.append(
            ("memory", f"about {amount(window_bytes)} of all sources' rows, held by each {who}")
        )
    if plan.chain.cache is not None:
        cached = plan.inputs.cached_blocks
        lines.append(("cache", "off" if cached is None else cached.describe()))
    tokenizers = [stage.runs_on() for stage in plan.chain.stages if isinstance(stage, Tokenizes)]
    lines += [("tokenizer", text) for text in tokenizers if text]
    lines += [(stage.name, text) for stage in plan.chain.stages if (text := stage.report())]
    sizes = tuple(divisors(shards))
    said = ", ".join(map(str, sizes))
    if len(sizes) > 1:
        said += ": a run can start on any of these numbers, and go on with any other"
    else:
        said += " only: sharding_filter() lets more ranks share the rows"
    lines.append(("ranks", said))
    notes = _notes(plan, window_rows)
    return Explanation(
        rows, batches, shards, spans, window_rows, window_bytes, world_size, num_workers, sizes,
        tuple(processes), tuple((label, hidden(text)) for label, text in lines), tuple(map(hidden, notes)),
    )  # fmt: skip


def _epoch_text(plan: Plan, batches: int | None, world_size: int) -> str:
    what = "rows" if plan.chain.batch is None else "micro-batches"
    if plan.chain.endless:
        return "no end: repeat()" if plan.chain.repeat is not None else 'no end: mix(stop="repeat")'
    if batches is None:
        if any(map(cuts_by_length, plan.chain.after)):
            return f"how many {what} is known only at the end; estimate_len() says about how many"
        short = plan.chain.num_shards if ends_short(plan) and not plan.chain.drop_last else 0
        known = (
            ""
            if plan.inputs.epoch_rows is None
            else f"at most about {plan.counts.batches_in_epoch + short:,} {what}: "
        )
        return f"{known}how many is known only at the end"
    each = f" for each of {world_size} ranks" if world_size > 1 else ""
    size = "" if plan.chain.batch is None else f", of {plan.chain.batch_size:,} rows each"
    return f"{batches:,} {what}{each}{size}"


def _mixed_bytes(plan: Plan, processes: list[Share]) -> int:
    """Bytes of the windows of all sources of a mix for one process, as far as they are known."""
    found = 0
    for source in plan.mixed.values():
        layout, row_bytes = source.layouts.usual, source.layouts.window_row_bytes
        found += _mixed_bytes(source, processes)
        if row_bytes and isinstance(layout, Layout) and source.chain.buffer is not None:
            spans = max(len({s % layout.num_spans for s in own.shards}) for own in processes)
            rows = max(_largest(layout, span) for span in {0, layout.num_spans - 1})
            found += math.ceil(row_bytes * rows * spans)
    return found


def _largest(layout: Layout, span: int) -> int:
    count = layout.num_windows(span)
    if not count:
        return 0
    start, stop = layout.span(span)
    return -(-(stop - start) // count)


def _shared(plan: Plan, processes: list[Share], rows: int | None) -> list[tuple[str, str]]:
    """Who gets what, and how evenly."""
    what = "worker" if any(share.worker for share in processes) else "process"
    least, most = (f([len(s.shards) for s in processes]) for f in (min, max))
    each = str(least) if least == most else f"{least} to {most}"
    lines = [("each " + what, f"{each} shard{'s' * (most > 1)}")]
    if rows:
        counts = [share.rows for share in processes]
        spread = (max(counts) - min(counts)) / max(1, sum(counts) / len(counts))
        lines.append(("", f"{min(counts):,} to {max(counts):,} rows, {spread:.1%} apart"))
        if plan.chain.drawn is None:
            often = reads_per_block(plan, processes)
            lines.append(
                (
                    "reads",
                    f"each row group {often:.2f} times in an epoch, by all together; 1 is least",
                )
            )
    if len(processes) <= 8:
        for share in processes:
            who = f"rank {share.rank}" + (f", worker {share.worker}" if what == "worker" else "")
            shards, spans = _listed(share.shards), _listed(share.spans)
            count = f"{share.rows:,} rows" if rows else "its part"
            lines.append((f"  {who}", f"{count}: shards {shards}; spans {spans}"))
    return lines


def _listed(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return shown if len(numbers) <= 6 else f"{shown}, … ({len(numbers)})"


def _notes(plan: Plan, window_rows: int | None) -> list[str]:
    notes = []
    chain = plan.chain
    if plan.chain.shuffle is not None and window_rows and plan.chain.drawn is None:
        assert isinstance(plan.inputs.source, RowSource)
        buffer = int(plan.chain.shuffle.buffer_size)
        if window_rows < min(buffer, plan.inputs.blocks.rows):
            notes.append(
                f"max_bytes = {plan.chain.shuffle.max_bytes:,} makes the shuffle's buffer smaller "
                f"than the {buffer:,} rows asked for; raise it in shuffle(max_bytes=...)"
            )
        longest = int(plan.inputs.blocks.lengths.max(initial=0))
        if longest > 2 * window_rows and isinstance(plan.inputs.source, RandomAccessSource):
            notes.append(
                f"rows are mixed within {window_rows:,} consecutive rows; all rows are mixed, at no more "
                'memory, by shuffle(scope="global")'
            )
        elif longest > 2 * window_rows:
            labels = [label for label, _ in plan.inputs.source.describe()]
            what = "blocks" if "blocks" in labels else "row groups"
            cure = f"Write the files with smaller {what}"
            if "block_rows" in chain.opener.options:
                cure = f"Read smaller blocks by {chain.opener.name}(block_rows=...)"
            notes.append(
                f"{what} have up to {longest:,} rows: rows are mixed within {window_rows:,} "
                f"consecutive rows of one. {cure} for a wider shuffle, or give it a larger buffer_size"
            )
    if chain.shuffle is None and any(s.role == "shuffle" for s in chain.file_stages):
        notes.append(
            "shuffle() before the reader changes the order of files only, and rows keep their places in a "
            "file: shuffle() after the reader mixes rows, and files, too"
        )
    several = next((s for s in chain.after if isinstance(s, FlatMap)), None)
    if chain.shuffle is not None and several is not None:
        notes.append(
            f"{several} makes several rows of one after the shuffle, so that these stay together: to mix "
            "them, too, write them to files by write_parquet(folder), and shuffle what is read from there"
        )
    if ends_short(plan):
        short, size = f"up to {chain.num_shards} short batches", chain.batch_size
        what = f"leaves out {short}" if chain.drop_last else f"makes {short}"
        each = f"of up to {size - 1:,} row{'s' * (size > 2)} each"
        notes.append(
            f"{chain.batch} {what} in an epoch, {each}: one for each shard, since how many rows a shard has "
            "is known only at its end. Fewer shards, by sharding_filter(num_shards), have fewer of them, and "
            "with repeat() before batch() there are none between epochs"
        )
    if (
        plan.chain.shard is not None
        and len(divisors(plan.chain.num_shards)) < 6
        and plan.chain.num_shards > 8
    ):
        notes.append(
            f"num_shards = {plan.chain.num_shards} fits few world sizes; 24, 48, 96, 240 or 960 fit many"
        )
    return notes
