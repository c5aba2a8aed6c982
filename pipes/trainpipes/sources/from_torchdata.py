"""``from_torchdata``, and rows from a torchdata node that is not ours, below a chain of nodes that are."""

from __future__ import annotations

import base64
import json
import threading
import weakref
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torchdata.nodes import BaseNode

from trainpipes.columns.payload import Payload
from trainpipes.errors import ConfigError, StateError
from trainpipes.interfaces.options import instead
from trainpipes.interfaces.source import RowStream, StreamReader
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import Source

if TYPE_CHECKING:
    from torchdata.nodes import BaseNode


_KINDS = ("__tuple__", "__bytes__", "__items__", "__array__", "__tensor__")


def plain(value: Any) -> Any:
    """A copy of a state in JSON types, where they exist."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not is_wrapped(value):
            return {key: plain(inner) for key, inner in value.items()}
        return {"__items__": [[plain(key), plain(inner)] for key, inner in value.items()]}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, tuple):
        return {"__tuple__": [plain(inner) for inner in value]}
    if isinstance(value, bytes):
        return {"__bytes__": _text(value)}
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        # Of at least one dimension, to be viewed as bytes.
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"__tensor__": [dtype, list(value.shape), _text(content)]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcmMSU":
        return {"__array__": [value.dtype.str, list(value.shape), _text(value.tobytes())]}
    return value


def restored(value: Any) -> Any:
    """Undoes ``plain``."""
    if isinstance(value, list):
        return [restored(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if not is_wrapped(value):
        return {key: restored(inner) for key, inner in value.items()}
    [(kind, content)] = value.items()
    if kind == "__tuple__":
        return tuple(restored(inner) for inner in content)
    if kind == "__bytes__":
        return base64.b64decode(content)
    if kind == "__items__":
        return {restored(key): restored(inner) for key, inner in content}
    dtype, shape, text = content
    data = bytearray(base64.b64decode(text))  # writable, as it was
    if kind == "__array__":
        array = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)
        return array if shape else array[()]
    element = getattr(torch, dtype)
    flat = (
        torch.frombuffer(data, dtype=element)
        if data
        else torch.empty(0, dtype=element, device="cpu")
    )
    return flat.reshape(shape)


def is_wrapped(value: Any) -> bool:
    """Whether ``plain`` made this dict for values that JSON cannot hold."""
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _KINDS


def _text(data: Any) -> str:
    return base64.b64encode(data).decode("ascii")


#: Keys of a position at an epoch's start, saved by a position in an epoch before, and by how many epochs
#: follow.
BEFORE, EPOCHS = "trainpipes_before", "trainpipes_epochs"
_places: weakref.WeakKeyDictionary[BaseNode[Any], NodePlace] = weakref.WeakKeyDictionary()
_making = threading.Lock()

#: Why ranks cannot share it.
ALONE = (
    "each of several ranks or workers would have its own copy of the torchdata node, and read "
    "all of its items: read it in one process, or read its data by list_files() or from_dataset()"
)


class FromTorchdata(Source, gives="objects", one_consumer=ALONE):
    """Items of a node of ``torchdata.nodes`` as rows.

    Its state may hold JSON types, tuples, bytes, arrays and tensors. Only for a single rank without workers.

    Args:
        node: of which nothing was read yet.

    Raises:
        ConfigError: it is no node, or a node of trainpipes; or its state holds other types.
        TopologyError: there are several ranks or workers.

    >>> import trainpipes as tp
    >>> from torchdata.nodes import IterableWrapper
    >>> list(tp.from_torchdata(IterableWrapper(range(5))).batch(2))
    [[0, 1], [2, 3], [4]]
    """

    _runs_user_code = True
    free = frozenset({"node"})
    node: BaseNode[Any]

    def check(self) -> None:
        # Here, since to import it takes as long as pyarrow does.
        from torchdata.nodes import BaseNode

        rule = "a node of torchdata or of your own"
        ours = isinstance(getattr(self.node, "stage", None), Stage)
        self._require(not ours, "node", rule, "of trainpipes.nodes, write that as a pipeline")
        good = isinstance(self.node, BaseNode)
        way = "" if good else instead(self.node) or "for any other iterable use from_iterable()"
        self._require(good, "node", "a torchdata.nodes.BaseNode", way)

    def open(self) -> TorchdataStream:
        return TorchdataStream(self.node)

    def __repr__(self) -> str:
        return f"from_torchdata({type(self.node).__name__})"


@dataclass(eq=False)
class TorchdataStream(RowStream):
    """A node as a stream that can go where its state says."""

    node: BaseNode[Any]
    seekable = True

    def open(self, epoch: int, state: dict[str, Any] | None) -> NodeReader:
        with _making:
            if self.node not in _places:
                _places[self.node] = NodePlace(self.node)
            place = _places[self.node]
        first = place.first()
        start = {BEFORE: first, EPOCHS: epoch} if epoch else first
        return NodeReader(place, start if state is None else state)

    def fingerprint(self) -> dict[str, Any]:
        return {"node": type(self.node).__qualname__}

    def describe(self) -> list[tuple[str, str]]:
        name = type(self.node).__name__
        return [("rows", f"items of {name}: their number is unknown; resumed by its state")]


class NodePlace:
    """Where a node stands, in a single place for all that read it, and where its first epoch starts."""

    def __init__(self, node: BaseNode[Any]) -> None:
        self._node = weakref.ref(node)
        self._reader: weakref.ref[NodeReader] | None = None  # whose turn it is
        self._first: dict[str, Any] | None = None
        self.lock = threading.RLock()

    @property
    def node(self) -> BaseNode[Any]:
        node = self._node()
        assert node is not None  # who reads it holds it
        return node

    def first(self) -> dict[str, Any]:
        with self.lock:
            if self._first is None:
                self.node.reset(None)
                self._first = self.state()
            return self._first

    def turn(self, reader: NodeReader) -> None:
        """Have the node stand where a reader stands."""
        before = None if self._reader is None else self._reader()
        if before is not reader:
            if before is not None:
                before.leave()
            self._reader = None
            go_to(self.node, reader.state())
            self._reader = weakref.ref(reader)

    def state(self) -> dict[str, Any]:
        state = plain(self.node.state_dict())
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"from_torchdata(node): the state of {type(self.node).__name__} holds what cannot be kept as "
                f"JSON ({error}); get_state() may return numbers, texts, lists, dicts, tuples, bytes, arrays "
                "and tensors"
            ) from error
        return dict(state)


def go_to(node: BaseNode[Any], state: dict[str, Any]) -> None:
    try:
        node.reset(restored(state.get(BEFORE, state)))
        epochs = int(state[EPOCHS]) if BEFORE in state else 0
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise StateError(
            f"{type(node).__name__} cannot go to the position in the state ({str(error)[:80]}); "
            "load it as it was saved, into the same node"
        ) from error
    for _ in range(epochs):
        next_epoch(node)


def next_epoch(node: BaseNode[Any]) -> None:
    """Go to the next epoch's start, which takes reading an item."""
    with suppress(StopIteration):
        next(node)
    node.reset(None)


class NodeReader(StreamReader):
    """A pass over a node from a state on; ``place`` lets it read when its turn comes."""

    def __init__(self, place: Any, start: dict[str, Any], epoch: int = 0) -> None:
        self._place, self._node, self.epoch = place, place.node, epoch
        self._kept: dict[str, Any] | None = start  # where it stands, unless the node says
        self.has_read = self._ended = False

    def read(self, rows: int) -> Payload | None:
        items: list[Any] = []
        with self._place.lock:
            if not self._ended:
                self._place.turn(self)
                self.has_read, self._kept = True, None
            while len(items) < rows and not self._ended:
                try:
                    items.append(next(self._node))
                except StopIteration:
                    self._ended = True
        return items or None

    def state(self) -> dict[str, Any]:
        with self._place.lock:
            state: dict[str, Any] = self._place.state() if self._kept is None else self._kept
            return state

    def leave(self) -> dict[str, Any]:
        """Where it stands, kept until its next turn."""
        self._kept = self.state()
        return self._kept


#: Epochs of which is known where they start and were left; shards lag behind others by fewer.
_REMEMBERED = 64


class FromNode(Source, gives="objects", read_once=True):
    """Items of a foreign torchdata node as rows."""

    free = frozenset({"node"})

    node: BaseNode[Any]

    _runs_user_code = True

    def open(self) -> NodeStream:
        return NodeStream(self.node)


class NodeStream(RowStream):
    """A foreign node as a stream that can go where its own state says.

    A node has a single place, and begins its next epoch by ``reset()`` after a row of the last epoch was
    read. So its place is changed when another reader's turn comes.
    """

    read_once = True
    lock = nullcontext()  # a single thread reads it

    def __init__(self, node: BaseNode[Any]) -> None:
        self.node = node
        self._reader: NodeReader | None = None  # whose turn it is
        self._left: dict[int, dict[str, Any]] = {}  # by epoch: where it was left
        self._starts: dict[int, dict[str, Any]] = {}  # by epoch

    @property
    def seekable(self) -> bool:
        return True

    def resume(self, places: dict[int, dict[str, Any]], begun: bool) -> None:
        """Say where a run that goes on from a state stands, even if nothing more is read."""
        self._reader = None
        self._left = dict(places)
        self._starts = dict(places) if begun else {}

    def open(self, epoch: int, state: dict[str, Any] | None) -> NodeReader:
        before = self._leave()
        state = self._starts.get(epoch) if state is None else state
        if state is None:
            self._starts[epoch] = state = self._begin(epoch, before)
        else:
            go_to(self.node, state)
        self._left[epoch] = state
        for known in (self._left, self._starts):
            while len(known) > _REMEMBERED:
                del known[min(known)]
        self._reader = NodeReader(self, state, epoch)
        return self._reader

    def turn(self, reader: NodeReader) -> None:
        if self._reader is not reader:
            self._leave()
            go_to(self.node, reader.state())
            self._reader = reader

    def _leave(self) -> NodeReader | None:
        """Note where the reader is whose turn it was."""
        if self._reader is not None:
            self._left[self._reader.epoch] = self._reader.leave()
        left, self._reader = self._reader, None
        return left

    def state(self) -> dict[str, Any]:
        return dict(plain(self.node.state_dict()))

    def _begin(self, epoch: int, last: NodeReader | None) -> dict[str, Any]:
        """Have the node begin an epoch; where that starts."""
        if not self._left:
            self.node.reset(None)
            return self.state()
        lower = max((known for known in self._left if known < epoch), default=None)
        if lower is None:
            raise StateError(
                f"the state has no position of {type(self.node).__name__} before epoch {epoch}, "
                f"only in epochs {sorted(self._left)}: load the state as it was saved, with the "
                "positions of all shards"
            )
        if last is None or last.epoch != lower:
            go_to(self.node, self._left[lower])
        before = self.state()
        if last is None or last.epoch != lower or not last.has_read:
            next_epoch(self.node)
        else:
            self.node.reset(None)
        return {BEFORE: before, EPOCHS: 1}

    def fingerprint(self) -> dict[str, Any]:
        return {"node": type(self.node).__qualname__}
