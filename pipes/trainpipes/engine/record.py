"""A chain of stages as a value, and where its own iteration stands: the object that is looked at, written,
and loaded.

``trainpipes.Pipeline`` is a record with a ``Method`` for each stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from torch.utils.data import IterableDataset, get_worker_info

from trainpipes._internal import callers
from trainpipes._internal.checks import require, whole_number
from trainpipes.engine.iterating.consumer import RunOptions
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.engine.planning.inputs import of_files
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError
from trainpipes.interfaces.options import same
from trainpipes.interfaces.stage import Stage, enter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AnyRecord = TypeVar("AnyRecord", bound="Record")


class Record(IterableDataset[Any]):
    """An immutable tuple of stages: it prints, compares and pickles as that. Each object also knows where its
    own iteration stands.

    Args:
        stages: the first stage first.
        ranks: rank and world size, if they are not those of the process.
        members: global ranks that read the pipeline together with this rank, if not all do.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        ranks: tuple[int, int] | None = None,
        members: tuple[int, ...] | None = None,
    ) -> None:
        require(
            isinstance(stages, Sequence) and stages and all(isinstance(s, Stage) for s in stages),
            "Pipeline(stages)", "a list of stages, the first a source", stages,
        )  # fmt: skip
        self._stages = tuple(stages)
        self._ranks = ranks
        self._members = members
        # Not of this object's methods: without a circle its rows are let go with it.
        self._iteration = IterationState(
            partial(_plan_of, self._stages), partial(_own_ranks, ranks)
        )
        self._iteration.members = members

    # The record

    @property
    def stages(self) -> tuple[Stage, ...]:
        """New copies of this chain's stages, the first stage first."""
        return _fresh(self._stages)

    def then(self, stage: Stage) -> Self:
        """Add a stage, such as one of your own.

        Args:
            stage: such as an instance of your ``TableStage``, ``RowStage`` or ``BatchStage``.

        Raises:
            ConfigError: ``stage`` is no stage, or cannot stand here.

        >>> import trainpipes as tp
        >>> class Double(tp.RowStage):
        ...     def apply(self, row):
        ...         return 2 * row
        >>> list(tp.from_dataset([1, 2]).then(Double()))
        [2, 4]
        """
        rule = "a stage, such as one of your own class of trainpipes.RowStage"
        is_class = isinstance(stage, type) and issubclass(stage, Stage)
        way = f"write then({stage.__name__}(...))" if is_class else ""  # type: ignore[attr-defined]
        require(isinstance(stage, Stage), "then(stage)", rule, stage, way)
        record = type(self)((*self._stages, stage), self._ranks, self._members)
        record._recipe = self._recipe
        record._plan()  # says now what does not fit
        return record

    def __repr__(self) -> str:
        lines = [repr(stage) for stage in self.stages]
        return "\n".join([lines[0], *(f"  .{line}" for line in lines[1:])])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return self._ranks == other._ranks and same(self._stages, other._stages)

    def __hash__(self) -> int:
        return hash((tuple(map(type, self._stages)), self._ranks))

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker must not take itself for rank 0 of 1.
        ranks = self._data_parallel()
        self._iteration.warn_of_copy()
        return {
            "stages": self._stages,
            "ranks": None if self._ranks is None else ranks,
            "members": self._members,
            "seen_ranks": ranks,
            "place": self._iteration.place_at_hand,
            "recipe": self._recipe,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["stages"], state["ranks"], state["members"])  # type: ignore[misc]
        self._recipe = state["recipe"]
        self._iteration.own_ranks = partial(_own_ranks, state["ranks"], state["seen_ranks"])
        self._iteration.stand_at(state["place"])

    def __copy__(self) -> Self:
        state = self.__getstate__()
        record = type(self).__new__(type(self))
        record.__setstate__({**state, "place": deepcopy(state["place"])})
        return record

    #: The recipe that made the first stages, its options, and how many stages these are.
    _recipe: tuple[str, dict[str, Any], int] | None = None

    def _data_parallel(self) -> tuple[int, int]:
        return self._iteration.ranks()

    def _batching(self) -> Stage | None:
        return self._iteration.batching()

    def _need_batches(self, option: str, way: str = "end it with .batch(32).pad_collate()") -> None:
        if self._batching() is None:
            raise ConfigError(f"{option} must make batches, got single rows; {way}:\n{self}")

    def _plan(self, files: Sequence[Sequence[str] | None] | None = None) -> Plan:
        return _plan_of(self._stages, files)

    def __bool__(self) -> bool:
        return True  # without len(), which reads the files

    def distributed(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> Self:
        """Read as a rank of several data-parallel ranks. You need this only if these are not all
        processes of ``torch.distributed``, or of ``RANK`` and ``WORLD_SIZE`` in the environment.

        Args:
            rank: from 0.
            world_size: number of ranks.
            mesh: instead of both, the data-parallel part of a ``DeviceMesh``: one dimension, such
                as ``mesh["dp"]``, or several that are data parallel together, such as
                ``mesh["replicate", "shard"]`` of HSDP. Processes that differ in other dimensions
                (tensor, pipeline parallel) get the same batches.

        Raises:
            ConfigError: ``rank`` is not below ``world_size``, or ``mesh`` has a dimension that is
                not data parallel by its name, such as "tp", or does not hold this process.

        >>> import trainpipes as tp
        >>> pipe = tp.from_dataset(range(8)).sharding_filter(num_shards=2).batch(2)
        >>> list(pipe.distributed(rank=1, world_size=2))
        [[4, 5], [6, 7]]
        """
        if mesh is not None:
            if rank is not None or world_size is not None:
                raise ConfigError(
                    "distributed(mesh) must be given without rank and world_size, got "
                    f"rank={rank} and world_size={world_size}; leave these out"
                )
            return type(self)(self._stages, *callers.in_mesh(mesh))
        known = rank is not None and world_size is not None
        for name, value in (("rank", rank), ("world_size", world_size)):
            if known:
                whole_number(value, 0, f"distributed({name})", "0 <= rank < world_size")
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise ConfigError(
                f"distributed(rank, world_size) must have 0 <= rank < world_size, got {rank} and {world_size}"
            )
        return type(self)(self._stages, (int(rank), int(world_size)))  # of NumPy's, too

    # Iteration

    def __iter__(self) -> EpochIterator:
        callers.refuse_in_an_iterable()
        self._data_parallel()  # says now, on all ranks, what does not fit
        batching = self._batching()
        if batching is not None and callers.batched_outside():
            raise ConfigError(
                f"this pipeline makes batches itself ({batching}), and the DataLoader "
                f"would batch them again: {callers.in_trainer() or 'pass batch_size=None to the DataLoader'}"
            )
        callers.warn_without_data_module()
        return EpochIterator(self._iteration, RunOptions(threads=None, places=True))

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state after the last item that an iterator of this pipeline gave, or at the
        start of the next epoch. None in a DataLoader's worker, where only the iterator has a state.

        Raises:
            StateError: a ``Loader`` or DataLoader workers iterated the pipeline, and only they know
                where they are.

        >>> import trainpipes as tp
        >>> pipe = tp.from_dataset(range(5)).batch(2)
        >>> first = next(iter(pipe))
        >>> again = tp.from_dataset(range(5)).batch(2)
        >>> again.load_state_dict(pipe.state_dict())
        >>> list(again)
        [[2, 3], [4]]
        """
        return self._iteration.state()

    def load_state_dict(
        self, state: dict[str, Any], *, allow_changes: Collection[str] = ()
    ) -> None:
        """Let the next ``iter()`` continue where ``state`` was taken, also in workers.

        Args:
            state: of this pipeline, from any loader.
            allow_changes: options that may differ from the pipeline that saved it; see
                ``Loader.load_state_dict``.

        Raises:
            StateError: the state does not fit this pipeline.

        >>> import trainpipes as tp
        >>> pipe = tp.from_dataset(range(5)).batch(2)
        >>> pipe.load_state_dict(pipe.state_at(1))
        >>> next(iter(pipe))
        [2, 3]
        """
        self._iteration.load(state, allow_changes)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``, also in workers, for frameworks that call this. Without it,
        each ``iter()`` is the next epoch.

        Nothing changes under an endless ``repeat``. A loaded position stays: the first number after
        a load names the loaded epoch, and later numbers count from there.

        Args:
            epoch: from 0.

        Raises:
            ConfigError: ``epoch`` is no integer of 0 or more.

        >>> import trainpipes as tp
        >>> pipe = tp.from_dataset(range(4)).shuffle(4, seed=0)
        >>> first, second = list(pipe), list(pipe)
        >>> pipe.set_epoch(1)
        >>> list(pipe) == second
        True
        """
        self._data_parallel()  # refuses frameworks that would share out batches again
        self._iteration.set_epoch(epoch)


def _fresh(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    return tuple(stage._fresh() for stage in stages)


def _plan_of(stages: Sequence[Stage], files: Sequence[Sequence[str] | None] | None = None) -> Plan:
    fresh = _fresh(stages)
    return Plan.of(fresh if files is None else of_files(fresh, files))


def _own_ranks(
    given: tuple[int, int] | None, seen: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Rank and world size: given, or in a DataLoader's worker as the process saw them that started it."""
    there = given or (seen if get_worker_info() is not None else None)
    return there or callers.data_parallel()


P = ParamSpec("P")


def written_as(
    function: Callable[..., Any], stage: Any, name: str, *first: inspect.Parameter
) -> Callable[..., Any]:
    """A function that makes a stage, with the parameters and the text of the stage's class."""
    enter(stage)
    named: Any = function
    named.__name__, named.__qualname__ = name.rsplit(".", 1)[-1], name
    named.__doc__, named.__module__ = stage.__doc__, stage.__module__
    taken = inspect.signature(stage).parameters.values()
    named.__signature__ = inspect.Signature([*first, *taken], return_annotation="Pipeline")
    return function


class Method(Generic[P]):
    """A method that adds a stage, with the parameters and the text of its class."""

    def __init__(self, stage: Callable[P, Stage]) -> None:
        self._stage = stage

    def __set_name__(self, owner: type, name: str) -> None:
        stage: Any = self._stage

        def add(record: Record, *args: Any, **options: Any) -> Record:
            return record.then(stage(*args, **options))

        receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        self._add = written_as(add, stage, f"{owner.__name__}.{name}", receiver)

    @overload
    def __get__(
        self, instance: None, owner: type[AnyRecord]
    ) -> Callable[Concatenate[AnyRecord, P], AnyRecord]: ...
    @overload
    def __get__(self, instance: AnyRecord, owner: Any) -> Callable[P, AnyRecord]: ...
    def __get__(self, instance: Record | None, owner: Any) -> Any:
        return self._add if instance is None else MethodType(self._add, instance)


def is_pipeline_or_loader(value: Any) -> bool:
    if isinstance(value, Record):
        return True
    stands = isinstance(getattr(value, "_iteration", None), IterationState)
    return stands and isinstance(getattr(value, "pipeline", None), Record)


def of_recipe(record: AnyRecord, name: str, options: dict[str, Any]) -> AnyRecord:
    """A chain that a recipe made with these options, as ``to_yaml()`` writes it."""
    copy = type(record)(record._stages, record._ranks, record._members)
    copy._recipe = name, options, len(copy._stages)
    return copy
