"""The one class that every stage is: a step of a pipeline, and a torchdata node.

As a step it is a record of options, and ``begin`` puts it above a shard's rows. As a node it can
stand alone, below or above torchdata's own nodes, and in ``torchdata.nodes.Loader``; the chain
that ends in it then runs exactly as the pipeline of the same stages would.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from torchdata.nodes import BaseNode

from trainpipes.errors import ConfigError, DataError
from trainpipes.runtime.drought import MOST_DRY_EPOCHS
from trainpipes.runtime.rows.row_types import written
from trainpipes.runtime.rows.utf8 import naming_bad_text
from trainpipes.runtime.run import Run, RunSource, round_of
from trainpipes.runtime.source import RowSource, RowStream
from trainpipes.shown import shown

__all__ = ["OpenState", "Role", "Stage", "identify"]

Role = Literal[
    "files",  # lists files; first in a chain
    "reader",  # turns files into a source of rows
    "source",  # rows from elsewhere; first in a chain
    "rows",  # each row by itself: may stand before or after a shuffle, and above batches
    "shuffle",
    "shard",
    "pack",  # makes rows of several others, after they are dealt
    "batch",  # cuts rows into micro-batches
    "finish",  # micro-batches to what the training loop gets
    "cache",
    "repeat",
    "take",
    "skip",
    "place",  # where finished batches lie: pinned memory, a device
]

#: Opens the rows below a stage at a state of theirs.
OpenState = Callable[[dict[str, Any]], RunSource]


class Stage(BaseNode[Any]):
    """One step of a pipeline.

    A stage of your own with role "rows" or "finish" defines ``process``. Its options go to
    ``super().__init__`` by name, all of them: they are what the pipeline records, prints, compares and
    pickles, and makes its stages of.

    Args:
        source: the node below, or None as a step of a pipeline.
        options: the options as given.

    Raises:
        ConfigError: an option of a stage of your own is not among these.

    Attributes:
        role: what the stage is to the plan.
        keeps_rows: whether as many rows come out as go in, each made of the one it stands for.
        share: the part of the rows that it lets through on average, where that is known beforehand.
        per_row: whether it calls Python for each row, so that it is given few at a time.
        free: options that change how the stage runs and not what comes out of it.
        has_workers: whether it has workers that can begin with a run before it is due.
        by_row: whether what becomes of a row depends on its number, too, as random choices do.
        finds_types: whether types of columns that come out are those of the data's first rows.
        by_epoch: whether it depends on the epoch: then nothing above it can be kept in a ``cache()``.
        has_blocks: of a reader or source, whether its rows are Arrow, in blocks that can be told from
            others by what they hold.
        needs_columns: whether it works on Arrow columns, which rows that are Python objects are turned
            into below it.
        takes_objects: of one that does, whether it also takes rows of which Arrow can't make columns.
        makes_objects: whether rows that come out are Python objects.
        cursor_keys: where it has a position of its own, the counts that it adds to a cursor beside "below",
            the cursor of what is below.
    """

    role: ClassVar[Role] = "rows"
    keeps_rows: bool = True
    share: float | None = None
    per_row: bool = False
    has_workers: bool = False
    by_row: bool = False
    finds_types: bool = False
    by_epoch: bool = False
    has_blocks: bool = False
    needs_columns: bool = False
    takes_objects: bool = False
    makes_objects: bool = False
    free: ClassVar[frozenset[str]] = frozenset()
    cursor_keys: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, source: BaseNode[Any] | None = None, **options: Any) -> None:
        super().__init__()
        if source is not None and not isinstance(source, BaseNode):
            raise ConfigError(
                f"{type(self).__name__}(source, ...) stands above a node, got {shown(source)}; "
                "options are given by name"
            )
        self.source = source
        self.options = options
        self._iterator: Any = None

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "__init__" in vars(cls):
            cls.__init__ = checked_init(cls.__init__)  # type: ignore[method-assign]

    # As a step

    @property
    def runs_user_code(self) -> bool:
        """Whether functions that are not ours are called, so that it is not known whether several
        threads may call them at once, or any but the one that iterates."""
        own = type(self).__module__.split(".")[0] == "trainpipes"
        return not own or any(callable(value) for value in self.options.values())

    @property
    def name(self) -> str:
        """The stage's name in a chain: its class in snake case."""
        return snake_case(type(self).__name__)

    def process(self, run: Run) -> Run:
        """What comes out for what goes in; for stages without a place of their own.

        Rows may be dropped (``run.pick``) if ``keeps_rows`` is False, never added or reordered.
        """
        raise ConfigError(f"{self} has neither process() nor begin()")

    def hand_over(self, run: Run) -> Callable[[], Run] | None:
        """Have workers of the stage begin with a run, and what waits for them and gives what ``process``
        would; None where there are none."""
        return None

    def begin(self, open_below: OpenState, state: dict[str, Any]) -> RunSource:
        """The runs of one shard from this stage, opened at ``state``.

        Args:
            open_below: opens the rows below at a state of theirs.
            state: a state that a run of this stage gave, or one of the rows' own at the start.
        """
        return _Processed(self, open_below(state))

    def bind(self, below: Sequence[Stage]) -> None:
        """Look at the stages below, first one first, before anything runs."""

    def settle(self, threads: int) -> None:
        """Get ready to be called by so many threads at once; 0 for none but the one that iterates."""

    def identity(self) -> dict[str, Any]:
        """The stage's name and the options that shape rows or their order, of JSON types."""
        shaped = {k: identify(v) for k, v in self.options.items() if k not in self.free}
        return {"stage": self.name, **{k: v for k, v in shaped.items() if v is not None}}

    def open_source(self, files: Any = None) -> RowSource | RowStream:
        """The rows of a stage with role "reader" (of these files) or "source"."""
        raise ConfigError(f"{self} does not read rows")

    def place(self, item: Any) -> Any:
        """A finished batch where it is to lie; for stages with role "place"."""
        return item

    def report(self) -> str:
        """What it has left out so far in this process, in words, for ``explain()``; nothing if nothing."""
        return ""

    def late(self) -> Stage | None:
        """What turns the source's keys into rows, as late as it can: after they are dealt."""
        return None

    def __repr__(self) -> str:
        """The stage as it is written in a chain; options left at their defaults are left out."""
        parameters = inspect.signature(type(self)).parameters
        shown = []
        for name, value in self.options.items():
            parameter = parameters.get(name)
            default = inspect.Parameter.empty if parameter is None else parameter.default
            if value is None or (type(value) is type(default) and value == default):
                continue
            by_name = parameter is None or parameter.kind is parameter.KEYWORD_ONLY
            shown.append(f"{name}={show(value)}" if by_name else show(value))
        return f"{self.name}({', '.join(shown)})"

    # As a node

    def chain(self) -> list[BaseNode[Any]]:
        """The nodes that end in this one, first one first; a foreign node ends the walk down."""
        nodes: list[BaseNode[Any]] = [self]
        while isinstance(nodes[-1], Stage) and nodes[-1].source is not None:
            nodes.append(nodes[-1].source)
        return nodes[::-1]

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        # Here, so as not to go up: a node runs what it is the end of.
        from trainpipes.runtime.iterating.node import NodeIterator

        if self._iterator is None:
            self._iterator = NodeIterator(self.chain())
        self._iterator.reset(initial_state)

    def next(self) -> Any:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._iterator.state_dict()
        return state


class _Processed:
    """The runs below, each put through a stage."""

    def __init__(self, stage: Stage, below: RunSource) -> None:
        self._stage = stage
        self._below = below

    def next_run(self) -> Run:
        epochs = set()  # of which nothing was let through
        while True:
            below = self._below.next_run()
            with naming_bad_text(below.block, self._stage):
                run = self._stage.process(below)
            if len(run):
                return run
            epochs.add(round_of(below.cursors.state(0)))
            if len(epochs) > MOST_DRY_EPOCHS + 1:
                raise DataError(
                    f"{self._stage} let no row of {MOST_DRY_EPOCHS} whole epochs through, and under "
                    "repeat() would look for one for ever: check its condition",
                    stage=str(self._stage),
                )


def checked_init(init: Callable[..., None]) -> Callable[..., None]:
    """A stage's ``__init__`` that refuses to lose an option."""

    @functools.wraps(init)
    def checked(self: Stage, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if type(self).__init__ is checked:  # all the stage's classes have had their turn
            check_recorded(self)

    return checked


def check_recorded(stage: Stage) -> None:
    """Raise unless a stage can be made anew of the options that it has recorded."""
    own = type(stage)
    parameters = inspect.signature(own).parameters
    names = [p.name for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_place = [p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    lost = [*by_place, *(name for name in names if name not in (*stage.options, "source"))]
    unknown = [] if open_ended else [name for name in stage.options if name not in names]
    if names[:1] == ["source"] and not lost and not unknown:
        return
    wanted = [name for name in names if name != "source"] + by_place
    said = ", ".join(["self", "source=None", *(f"{name}=..." for name in wanted)])
    handed = ", ".join(["source", *(f"{name}={name}" for name in wanted)])
    raise ConfigError(
        f"{own.__name__}: a pipeline makes its stages anew of their options, and would lose "
        f"{', '.join(lost or unknown) or 'source'}: write def __init__({said}), and in it "
        f"super().__init__({handed})"
    )


def snake_case(name: str) -> str:
    """``PadCollate`` -> ``pad_collate``."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def show(value: Any) -> str:
    """A short form of an option for ``repr``: functions by name, file and line."""
    code = getattr(value, "__code__", None)
    if code is not None:
        name = getattr(value, "__qualname__", "?").replace("<locals>.", "")
        return f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    text = written(value) if isinstance(value, pa.Schema) else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({type(value).__name__})"


def identify(value: Any) -> Any:
    """What stands for an option in a fingerprint: plain values as they are, functions by module
    and qualified name, arrays and bytes by their content, other objects by what their
    ``fingerprint()`` says, else by their type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): identify(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [identify(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((identify(v) for v in value), key=repr)
    if isinstance(value, bytes):
        return f"sha256:{hashlib.sha256(value).hexdigest()[:16]}"
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        return f"{value.dtype}{list(value.shape)}:{digest}"
    if hasattr(value, "fingerprint"):
        return json.loads(json.dumps(value.fingerprint()))
    qualified = getattr(value, "__qualname__", None)
    if qualified is not None:
        return f"{getattr(value, '__module__', '?')}.{qualified}"
    inner = getattr(value, "func", None)  # functools.partial
    if inner is not None:
        return {"function": identify(inner), "arguments": identify([value.args, value.keywords])}
    return f"{type(value).__module__}.{type(value).__qualname__}: {stable_text(value)}"


def stable_text(value: Any) -> str:
    """``str`` of a value whose class defines one (a dtype, an expression), else nothing."""
    named = any({"__repr__", "__str__"} & vars(c).keys() for c in type(value).__mro__[:-1])
    return str(value) if named else ""
