"""What a pipeline will do: ``Pipeline.explain`` and ``Loader.explain``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa

from trainpipes._internal.checks import whole_number
from trainpipes._internal.messages import Report
from trainpipes._internal.pool import default_threads
from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.engine.planning.chain import Chain
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.processes.loader_workers import is_worth_it
from trainpipes.engine.processes.stage_calls import steps_of
from trainpipes.engine.record import Record
from trainpipes.engine.shards.shard_rows import Memory, maker_of
from trainpipes.errors import amount, cut, hidden
from trainpipes.interfaces.quarantine import leaves_out
from trainpipes.interfaces.source import RandomAccessSource
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import PackingStage, ShuffleStage
from trainpipes.look.lengths import ends_apart, ends_short, exact_length, expected_items, left_open
from trainpipes.look.record import mermaid, record, written
from trainpipes.order.layout import Topology, divisors
from trainpipes.stages.pack import Pack

__all__ = ["Explanation", "explain"]

Line = tuple[str, str]
Lines = Sequence[Line]
#: Columns, and characters of a stage, that a text shows.
MOST_COLUMNS, MOST_WIDE = 16, 110


@dataclass(frozen=True, repr=False, eq=False)
class Explanation(Report):
    """What will happen in a run. ``print`` gives it as text; a notebook shows the stages as a diagram.

    Attributes:
        rows: rows read in an epoch, once where ``repeat`` reads them again; None where they are not counted
            in advance.
        num_batches: items that each rank gets in an epoch, with tail="uneven" at most; None where that is not
            known in advance.
        num_shards: that ranks and workers share.
        world_sizes: numbers of ranks that share no shard; a run can have any other, and reads more then.
        window_rows: rows that a shuffle mixes with each other, or None.
        window_bytes: most memory for such rows in a process, estimated, or None.
        memory_bytes: the same, and rows that are read ahead, decoded and made into batches, estimated: what a
            process takes on top of its imports, or None. Without what functions make: ``notes`` say where
            such rows are held, and how many.
        lines: the text, as label and text.
        notes: changes to consider.
    """

    rows: int | None
    num_batches: int | None
    num_shards: int
    world_sizes: tuple[int, ...]
    window_rows: int | None
    window_bytes: int | None
    memory_bytes: int | None
    lines: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    _pipeline: Record
    _iteration: IterationState
    _world_size: int
    _loader: Mapping[str, Any] | None

    @property
    def columns(self) -> dict[str, str]:
        """Types of the columns of the rows, before they are batched: Arrow's, torch's, or else Python's.
        Empty if rows have no names, or if there are none. May read the first row, and call the pipeline's
        functions for it.

        >>> import trainpipes as tp
        >>> tp.from_tensors(x=range(3), y=range(3)).rename({"y": "label"}).explain().columns
        {'x': 'int64', 'label': 'int64'}
        """
        return self._iteration.plan.types.columns()

    @property
    def mermaid(self) -> str:
        """The stages as a diagram in ``mermaid``, which GitHub, GitLab and mkdocs draw."""
        return mermaid(self._pipeline)

    def to_dict(self) -> dict[str, Any]:
        """What a run trains on, to be logged with it: plain JSON types. Reads nothing more.

        - ``fingerprint``: equal for pipelines that take each other's states, and for no others.
        - ``pipeline``: the stages as text, with the options that were given.
        - ``stages``: each with the options that batches depend on. Functions by module and name, tokenizers
          and arrays by their content.
        - ``data``: files, rows, a fingerprint, and what it is made of.
        - ``epoch_rows``, ``epoch_batches``: read in an epoch, without repeats, and given to each rank; None
          where unknown in advance. ``num_shards``, ``batch_size``, ``world_size``.
        - ``loader``: its options, if a ``Loader`` was asked.
        - ``versions``: of the library, its states, Python, and packages that it works with.

        There are no ``storage_options``, no credentials of a URL, and no values under names such as
        ``api_key``. Where a run stands is in its ``state_dict()``.
        """
        return record(self._pipeline, self._iteration, self._world_size, self._loader)

    def _rows(self) -> Lines:
        return self.lines

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"note: {note}" for note in self.notes)])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/vnd.mermaid": self.mermaid}


def explain(
    pipeline: Record,
    iteration: IterationState,
    world_size: int,
    num_workers: int,
    loader: Mapping[str, Any] | None = None,
    threads: int | None = None,
) -> Explanation:
    whole_number(world_size, 1, "explain(world_size)", "ranks")
    whole_number(num_workers, 0, "explain(num_workers)", "workers of each rank")
    plan, chain = iteration.plan, iteration.plan.chain
    Topology(0, world_size).check(
        chain.num_shards, chain.shard is not None, chain.opener.traits.one_consumer
    )
    memory, held_by = Memory(plan, world_size * max(1, num_workers)), "rank"
    if num_workers:
        threads, held_by = 1 if threads is None else threads, "worker"
    batches, held = exact_length(plan, 0, world_size), memory.held or None
    whole = held and held + memory.beside(default_threads() if threads is None else threads)
    lines = [
        *_lines(iteration, batches, memory.window_rows, world_size),
        *_memory(plan, held, whole, held_by),
        *_work(plan, loader or {}),
    ]
    sizes = tuple(divisors(chain.num_shards))
    more = " only: sharding_filter() lets more ranks share the rows"
    if len(sizes) > 1:
        more = ": a run can start on any of these numbers, and go on with any other"
    lines.append(("ranks", ", ".join(map(str, sizes)) + more))
    return Explanation(
        plan.inputs.epoch_rows, batches, chain.num_shards, sizes,
        memory.window_rows if chain.shuffle else None, held, whole,
        tuple((label, hidden(text)) for label, text in lines),
        tuple(map(hidden, [*_notes(plan, memory.window_rows, world_size), *_unknown_sizes(memory)])),
        pipeline, iteration, world_size, loader,
    )  # fmt: skip


def _lines(
    iteration: IterationState, batches: int | None, window: int | None, world_size: int
) -> Iterator[Line]:
    """What is read, and how it is cut and mixed."""
    plan, chain, shards = iteration.plan, iteration.plan.chain, iteration.plan.chain.num_shards
    yield from _under("stages", (cut(written(stage), MOST_WIDE) for stage in chain.stages))
    source_lines = plan.inputs.source.describe()
    yield from source_lines
    yield from _under("weights", _new_weights(iteration))
    if "columns" not in dict(source_lines):
        yield from _column_lines(plan)
    yield "an epoch", _epoch(plan, batches, world_size)
    if what := left_open(plan):
        whose = "of a source " if chain.mixes else ""
        who = "each shard has" if shards > 1 else "there is"
        said = f"{who} at most one open {what}, which rows of the next one fill"
        yield "joints", f"where an epoch {whose}ends, {said}"
    if shards > 1:
        said = "which ranks and workers share: always so many, so that a state fits all"
        yield "shards", f"{shards}, {said}"
    label = "shuffle"
    if shuffled := _shuffled(plan, window):
        yield label, shuffled
        label = ""
    for again in (stage for stage in chain.after if isinstance(stage, ShuffleStage)):
        yield label, f"{again}: so many of a shard are mixed then"


def _under(label: str, texts: Iterable[str]) -> Iterator[Line]:
    for text in texts:
        yield label, text
        label = ""


def _memory(plan: Plan, held: int | None, whole: int | None, who: str) -> Lines:
    if held is None or whole is None:
        return []
    what = "of all sources' rows" if plan.mixed else "of rows to be mixed"
    said = f"{amount(whole)} with what is read ahead and in work"
    return [("memory", f"about {amount(held)} {what}, held by each {who}; {said}")]


def _work(plan: Plan, loader: Mapping[str, Any]) -> Iterator[Line]:
    """Who does the work, and what stages say of themselves and have counted."""
    if loader.get("num_workers") or loader.get("executor"):
        tasks, processes = f"tasks of {loader['executor']}", f"{loader['num_workers']} processes"
        yield "workers", _workers(plan, processes if loader["num_workers"] else tasks)
    if plan.chain.cache is not None:
        cached = plan.inputs.cached_blocks
        yield from [("cache", "off")] if cached is None else cached.describe()
    stages: Sequence[Stage] = plan.chain.stages
    for stage in stages:
        yield from stage._describe()
    for _, tallies in groupby(plan.tallies, key=lambda tally: id(tally.stage)):
        counted = [(tally.stage.name, str(tally)) for tally in tallies if str(tally)]
        yield from [(name, "; ".join(said for _, said in counted)) for name, _ in counted[:1]]


def _workers(plan: Plan, who: str) -> str:
    called = [str(stage) for stage in steps_of(plan) if is_worth_it(stage)]
    if not called:
        none = "there are none, or these have workers of their own"
        return f"none is started: they would call functions, and {none}; threads do all work"
    return f"{who}, which call {', '.join(called)}; all else is done in this one"


def _new_weights(iteration: IterationState) -> Iterator[str]:
    """Of a mix, where ``set_weights`` has changed them."""
    for new in iteration.reweighed():
        shares = ", ".join(f"{name}={weight}" for name, weight in new.weights.items())
        yield f"set_weights(): from batch {new.batch:,} of the pass on {shares}"


def _column_lines(plan: Plan) -> Lines:
    known, more, source = plan.types.columns_if_known(), "", plan.inputs.source
    schema = getattr(source, "rows_schema", None) or getattr(source, "schema", None)
    if not known and isinstance(schema, pa.Schema):
        known, more = {field.name: str(field.type) for field in schema}, ", as they are read"
    named = [f"{name}: {cut(kind, 40)}" for name, kind in known.items()]
    if len(named) > MOST_COLUMNS:
        named[MOST_COLUMNS - 1 :] = [f"and {len(named) - MOST_COLUMNS + 1:,} more"]
    return [("columns", ", ".join(named) + more)] if named else []


def _epoch(plan: Plan, batches: int | None, world_size: int) -> str:
    chain = plan.chain
    rows = chain.batch is None and not chain.opener.traits.makes_batches
    unit = "rows" if rows else "batches"
    if chain.has_no_end:
        return "no end: repeat()" if chain.repeat is not None else 'no end: mix(stop="repeat")'
    if batches is not None:
        most = "up to " if ends_apart(plan, world_size) else ""
        each = f" for each of {world_size} ranks" if world_size > 1 else ""
        size = "" if chain.batch is None else f", of {_size(chain)} each"
        return f"{most}{batches:,} {unit}{each}{size}"
    if plan.inputs.epoch_rows is None and not chain.endless:
        return "how many is known only at the end"
    if (count := expected_items(plan)) is not None:
        return f"about {round(count):,} {unit}, over all ranks: exactly how many is known only at the end"
    measure = "Loader(pipe).estimate_len() reads some rows to say about how many"
    return f"how many is known only at the end; {measure}"


def _size(chain: Chain) -> str:
    size = f"{chain.batch_size:,} rows"
    for stage in chain.groups:
        size = f"{stage.batch_size:,} batches of {size}"
    return size


def _shuffled(plan: Plan, window: int | None) -> str:
    rows, shuffle = plan.inputs.epoch_rows, plan.chain.shuffle
    if plan.chain.drawn is not None and window is not None:
        return f"every row by its number: {shuffle}"
    if not rows or window is None:
        return ""
    if not shuffle:
        return "none: rows come in file order"
    if window < rows:
        return f"{window:,} rows are mixed at a time, {window / rows:.1%} of all"
    return f"all {rows:,} rows are mixed together"


def _left_out_by_pack(plan: Plan) -> Iterator[str]:
    steps = [*plan.chain.before, *plan.chain.after_on_rows]
    for place, pack in enumerate(steps):
        if isinstance(pack, Pack):
            schema = plan.types.known(steps[:place])
            if said := pack.others(None if schema is None else schema.names):
                yield said


def _unknown_sizes(memory: Memory) -> Iterator[str]:
    """What is held besides, of a size that is not known."""
    for part in memory.parts:
        yield from _unknown_sizes(part)
    chain, said = (
        memory.plan.chain,
        "whose size is not known: the memory said above is without them",
    )
    if (maker := maker_of(chain.before)) is not None and memory.window_rows:
        count = memory.window_rows * memory.spans
        yield f"{chain.shuffle or chain.opener} holds up to {count:,} rows that {maker.name}() makes, {said}"
    for stage, rows, maker in memory.buffers:
        if maker is None and memory.row_bytes:
            continue
        whose = "rows" if maker is None else f"rows that {maker.name}() makes"
        way = ""
        if maker is not None and maker.traits.keeps_rows:
            way = f"; {maker.name}() after {stage.name}() makes them when they are due"
        elif (
            maker is not None and "buffer_size" in stage.options
        ):  # it mixes the rows that are made
            way = "; a smaller buffer_size holds fewer"
        yield f"{stage} holds up to {rows:,} {whose}, {said}{way}"


def _notes(plan: Plan, window_rows: int | None, world_size: int) -> Iterator[str]:
    chain = plan.chain
    if ends_apart(plan, world_size):
        yield (
            'by tail="uneven" ranks may end a step or more apart: put no collective call into the loop. A '
            "forward pass of FSDP is one: let a rank that has ended repeat its last batch, without counting "
            'it, or leave out the last few batches by tail="even"'
        )
    if chain.shuffle is not None and window_rows and chain.drawn is None:
        blocks = plan.inputs.blocks
        buffer, longest = int(chain.shuffle.buffer_size), int(blocks.lengths.max(initial=0))
        if window_rows < min(buffer, blocks.rows):
            yield (
                f"max_bytes = {chain.shuffle.memory:,} makes the shuffle's buffer smaller "
                f"than the {buffer:,} rows asked for; raise it in shuffle(max_bytes=...)"
            )
        if longest > 2 * window_rows:
            text = f"rows are mixed within {window_rows:,} consecutive rows"
            unit = "blocks" if "blocks" in dict(plan.inputs.source.describe()) else "row groups"
            cure = f"write the files with smaller {unit}, or give it a larger buffer_size"
            if "block_rows" in chain.opener.options:
                cure = f"read smaller blocks by {chain.opener.name}(block_rows=...)"
            if isinstance(plan.inputs.source, RandomAccessSource):
                yield f'{text}; all are, at no more memory, by shuffle(scope="global")'
            else:
                yield f"{unit} have up to {longest:,} rows: {text} of one; {cure}"
    if chain.shuffle is None and any(isinstance(s, ShuffleStage) for s in chain.file_stages):
        yield (
            "shuffle() before the reader changes the order of files only, and rows keep their places in a "
            "file: shuffle() after the reader mixes rows, and files, too"
        )
    dropping = [s for s in chain.stages if leaves_out(s.options.get("on_error"))]
    dropping = [s for s in dropping if not s.traits.keeps_rows]
    if dropping and not any(isinstance(s, PackingStage) for s in chain.stages):
        yield (
            f"{' and '.join(s.name for s in dropping)} may leave out rows by on_error: how many an epoch has "
            "is known only at its end, and a state keeps where each shard stands in place of one count"
        )
    yield from _left_out_by_pack(plan)
    if ends_short(plan):
        short, size = f"up to {chain.num_shards} short batches", chain.batch_size
        habit = f"leaves out {short}" if chain.drop_last else f"makes {short}"
        if (plan.inputs.epoch_rows or math.inf) < chain.num_shards * size:
            habit = f"never fills a batch, since a shard has fewer rows, and {habit}"
        yield (
            f"{chain.batch} {habit} in an epoch, of up to {size - 1:,} row{'s' * (size > 2)} each: one for "
            "each shard, since how many rows a shard has is known only at its end. Fewer shards make fewer, "
            f"one for each rank by sharding_filter(num_shards={world_size}), and with repeat() before "
            "batch() there are none between epochs"
        )
