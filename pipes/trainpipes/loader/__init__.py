from __future__ import annotations

import functools
import inspect
import multiprocessing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec
from weakref import finalize

import torch.distributed as dist

from trainpipes._internal.callers import (
    refuse_in_an_iterable,
    refuse_prepared_by_ray,
    refuse_sampler,
    warn_without_data_module,
)
from trainpipes._internal.checks import copied, flag, require, whole_number, wrong
from trainpipes._internal.messages import OF_LOADERS
from trainpipes.engine.iterating.consumer import RunOptions
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.engine.iterating.iteration_state import MOST_EPOCHS, IterationState
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.processes.channel import pickled
from trainpipes.engine.processes.executor_options import executor_of
from trainpipes.engine.processes.executors import Executor, Processes, Threads
from trainpipes.engine.processes.loader_workers import LoaderWorkers, check_worker_options
from trainpipes.engine.processes.worker_pool import NO_PICKLE
from trainpipes.errors import ConfigError, StateError, shown
from trainpipes.interfaces.options import BATCHES, instead, instead_of_path, refuse_unknown, show
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import stages_within
from trainpipes.loader.in_mid_run import Meter
from trainpipes.pipeline.chain import Pipeline
from trainpipes.sources.from_dataset import packed
from trainpipes.stages.device import Pin, To
from trainpipes.state.merge import TIMEOUT, gather, merge_states

if TYPE_CHECKING:
    from trainpipes.look.explain import Explanation
    from trainpipes.look.show import Preview

P = ParamSpec("P")


def _with_hints(init: Callable[P, None]) -> Callable[P, None]:
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def hinting(*args: P.args, **options: P.kwargs) -> None:
        refuse_unknown(options, known, Loader, "Loader")
        if len(args) > 2:
            got = f"got {shown(args[2])} after the pipeline"
            raise TypeError(f"Loader() takes its options by name, {got}: {BATCHES}")
        init(*args, **{name: copied(value) for name, value in options.items()})

    return hinting


class Loader:
    """Runs a pipeline for training, in threads or worker processes, and saves and restores its position.

    A ``Loader`` starts where its pipeline stands when it is made. Each ``iter()`` starts the next
    epoch; after ``load_state_dict`` the next one continues there. A pass moves the pipeline on, so that
    a new ``Loader`` begins with the next epoch; using the pipeline does not move the ``Loader``. The
    state counts delivered batches, not prefetched ones, and loads with any ``num_workers``.

    Args:
        pipeline: the pipeline to run.
        executor: where functions are called: ``tp.Threads(n)``, ``tp.Processes(n)``, or ``tp.Ray(...)`` for
            the machines of a Ray cluster. All else stays in this process with any of them. For functions
            at once, threads need ``thread_safe=True`` of their stages; or give ``map`` the executor.
            ``num_workers=4`` is short for ``tp.Processes(4)``, ``threads=4`` for ``tp.Threads(4)``.
        num_workers: worker processes, which call the functions of the pipeline, those of its stages on
            pictures, and ``__getitem__`` of a dataset. All else stays in this process and its threads, so
            that there is one shuffle buffer. A worker that dies is replaced, and its rows are done again. 0
            calls functions here; where there are none, no worker is started.
        prefetch_factor: batches, or runs of rows, that each worker is given ahead; 2 if None.
        persistent_workers: keep the processes from one epoch to the next.
        worker_init_fn: called with the worker's id in each worker; on Ray in each process, where ids may
            repeat. Global generators are seeded after it, before each task, by its rows and the seeds of
            the pipeline: other draws come by another ``seed=`` there.
        timeout: seconds that a call may take, at least: then its worker is ended, and another worker tries
            the row once more. A second time it is a ``WorkerError`` that names the row, or the row is left
            out where ``on_error`` says so. 0 for no end.
        multiprocessing_context: "fork", "spawn", "forkserver", or a context.
        pin_memory: does what ``.pin()`` does at the end of the pipeline, or before its
            ``.to(device)``.
        threads: without workers, threads of this process that read and work ahead; 0 for none, as
            for a debugger. By default one for each core (at most 8, shared with the other ranks of
            the machine; the environment variable ``TRAINPIPES_THREADS`` sets another number), and
            the thread that trains calls your functions. With a number, these threads do all work;
            a single thread does, if there are functions of yours that are not ``thread_safe``. The order of
            batches is always the same.
        epoch: for evaluation, the epoch that each ``iter()`` is, wherever the pipeline stands, so
            that the same batches come each time. The pipeline does not move. After
            ``load_state_dict`` the next iteration continues there, and the one after it is this
            epoch again. Not for a pipeline without an end, and not with ``set_epoch``.

    Raises:
        ConfigError: an option is out of range, or options exclude each other; in an iteration, a function or
            a row does not pickle.
        WorkerError: in an iteration, three workers died at one row, which it names.

    >>> import trainpipes as tp
    >>> loader = tp.Loader(tp.from_iterable(lambda: range(10)).batch(4))
    >>> for batch in loader:
    ...     state = loader.state_dict()
    ...     break
    >>> resumed = tp.Loader(loader.pipeline)
    >>> resumed.load_state_dict(state)
    >>> list(resumed)
    [[4, 5, 6, 7], [8, 9]]
    """

    @_with_hints
    def __init__(
        self,
        pipeline: Pipeline,
        *,
        executor: Executor | str | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = 2,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
        multiprocessing_context: Any = None,
        pin_memory: bool = False,
        threads: int | None = None,
        epoch: int | None = None,
    ) -> None:
        options = dict(locals())
        del options["self"], options["pipeline"]
        if not isinstance(pipeline, Pipeline):
            way = instead(pipeline) or instead_of_path(pipeline)
            raise ConfigError(
                f"Loader(pipeline) must be a trainpipes Pipeline, got {type(pipeline).__name__}; "
                f"{way or 'for a torch Dataset start with trainpipes.from_dataset(dataset)'}"
            )
        whole_number(num_workers, 0, "Loader(num_workers)", "worker processes")
        if threads is not None:
            whole_number(threads, 0, "Loader(threads)", "threads")
        if executor is not None:
            executor = executor_of(executor, "Loader(executor)")
            short = ("num_workers", "threads", "multiprocessing_context")
            others = [name for name in short if options[name]]
            rule = (
                f"None where {' and '.join(others)} is given: the number stands in tp.Processes(n), "
                "tp.Threads(n) or tp.Ray(num_workers=n)"
            )
            require(not others, "Loader(executor)", rule, executor)
            if isinstance(executor, Threads):
                options["threads"], threads, executor = executor.n, executor.n, None
            elif isinstance(executor, Processes):
                options["num_workers"] = num_workers = executor.workers
                multiprocessing_context, executor = executor.start_method, None
            options["executor"] = executor
        if threads and num_workers:
            raise ConfigError(
                f"Loader works in threads or in worker processes, got threads={threads} and "
                f"num_workers={num_workers}; leave one out"
            )
        prefetch_factor = 2 if prefetch_factor is None else prefetch_factor
        whole_number(prefetch_factor, 1, "Loader(prefetch_factor)", "messages that are made ahead")
        if epoch is not None:
            _check_epoch(epoch, pipeline)
        source = pipeline._iteration
        if flag(pin_memory, "Loader(pin_memory)"):
            pipeline = _pinned(pipeline)
        self.pipeline = pipeline
        plan = functools.partial(_plan, pipeline)
        if epoch is None:
            self._iteration = IterationState(plan, source.own_ranks, source)
        else:  # wherever the pipeline stands
            self._iteration = IterationState(plan, source.own_ranks, fixed=epoch)
            self._iteration.members = source.members
            source.derived.add(self._iteration)
        context, there = multiprocessing_context, multiprocessing.get_all_start_methods()
        named = isinstance(context, str) and context in there
        if not (named or context is None or hasattr(context, "get_start_method")):
            raise wrong("Loader(multiprocessing_context)", f"one of {there} here", context)
        if executor is None and num_workers:
            executor = Processes(num_workers, context)
        workers = num_workers or int(executor is not None)  # a cluster may have any number
        check_worker_options(persistent_workers, worker_init_fn, timeout, workers)
        self._iteration.how = {"threads": threads, "workers": workers}
        self._meter = Meter(self._iteration)
        self.num_workers = num_workers
        self.threads = threads
        self._options = {**options, "prefetch_factor": prefetch_factor}
        #: Batches of a step of all ranks, where an integration counts in these; see ``RunOptions``.
        self._step = 0
        self._workers: LoaderWorkers | None = None
        if executor is not None:
            self._workers = LoaderWorkers(
                functools.partial(packed_stages, pipeline),
                functools.partial(check_pickles, pipeline),
                executor,
                prefetch_factor,
                persistent_workers,
                worker_init_fn,
                timeout,
            )
            # Processes do not wait for a garbage collection.
            finalize(self, self._workers.shut).atexit = False

    def _given(self) -> list[str]:
        parameters = inspect.signature(Loader).parameters
        return [f"{k}={show(v)}" for k, v in self._options.items() if v != parameters[k].default]

    def __repr__(self) -> str:
        options = self._given()
        chain = "\n".join(f"  {line}" for line in repr(self.pipeline).splitlines())
        return f"Loader({', '.join(options)}) over\n{chain}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {**self.pipeline._repr_mimebundle_(), "text/plain": repr(self)}

    def __bool__(self) -> bool:
        return True  # its length may not be known

    def __len__(self) -> int:
        from trainpipes.look.lengths import length_of

        refuse_sampler()
        return length_of(self._iteration, self._step)

    def estimate_len(self) -> int:
        """Estimate ``len()``, for learning rate schedules; exact where the length is known. ``sample`` and
        ``split`` count by their fraction. Where other stages change the number of rows, the first 2,048
        rows go through the pipeline, which calls your functions for them.

        Raises:
            TypeError: the pipeline has no end, or its rows cannot be counted.

        >>> import trainpipes as tp
        >>> tp.Loader(tp.from_dataset(range(100)).filter(lambda n: n % 2 == 0).batch(5)).estimate_len()
        10
        """
        from trainpipes.look.lengths import estimated_length

        return estimated_length(self._iteration.plan, *self._iteration.ranks())

    def peek(self) -> Any:
        """Return the first batch of the next iteration, without starting it.

        Raises:
            DataError: the pipeline gives nothing.

        >>> import trainpipes as tp
        >>> tp.Loader(tp.from_dataset(range(5)).batch(2)).peek()
        [0, 1]
        """
        from trainpipes.look.show import peek

        return peek(self._iteration)

    def show(self, n: int = 1, *, rows: int = 4) -> Preview:
        """Show the next batches, without starting an iteration: see ``Pipeline.show``. For a batch
        that you have, use ``trainpipes.show(batch)``.

        Args:
            n: number of batches.
            rows: of each batch, rows whose text is shown.

        Raises:
            DataError: there is no batch.
        """
        from trainpipes.look.show import show_next

        return show_next(self._iteration, n, rows)

    if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

        def __getattr__(self, name: str) -> Any:
            refuse_prepared_by_ray()
            hint = f" (here that is {OF_LOADERS[name]})" if name in OF_LOADERS else ""
            said = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise AttributeError(said, name=name)

    def __iter__(self) -> EpochIterator:
        return self._begin_pass(self._step)

    def _begin_pass(self, step: int, holds: bool = False) -> EpochIterator:
        warn_without_data_module()
        refuse_prepared_by_ray()
        if self._options["epoch"] is None or self._iteration.ranks()[1] > 1:
            refuse_in_an_iterable()
        options = RunOptions(self.threads, self._workers, places=True, step=step, holds=holds)
        return EpochIterator(self._iteration, options)

    @property
    def wait_seconds(self) -> float:
        """Seconds that loops over this loader have waited for batches, in all epochs together.

        >>> import trainpipes as tp
        >>> loader = tp.Loader(tp.from_tensors(range(8)).batch(4))
        >>> batches = list(loader)
        >>> 0 < loader.wait_seconds < 60
        True
        """
        return self._iteration.wait_seconds

    def metrics(self) -> dict[str, float]:
        """Return where the run stands in numbers, for a line of its log. Call it between batches; nothing is
        counted while these are made, and no rank asks another.

        Returns:
            ``data/epoch`` and ``data/batch``: as in ``state_dict()``; batches count over all ranks. After an
            epoch's last batch these are the next epoch, and 0, where it is known to be the last.
            ``data/waiting``: the share of the time since the last call (or since the loader was made) in
            which the loop waited for batches, 0 to 1. ``data/wait_seconds``: as ``wait_seconds``.

            ``data/rows``: of the batches of all ranks in all epochs, where that follows from the
            position, also after a resume: where batches are counted, but for later epochs of a folder that
            grows; and within an epoch, or an endless one, where all are full. Not with ``epoch=``. With
            another batch size, number of ranks or size of ``steps`` in epochs before, about so many; where
            batches are not counted, all are taken to have the present size, also those before
            ``allow_changes=["batch_size"]``. ``data/tokens``: of these rows, where ``pack`` makes them:
            ``max_length`` each, padding included. ``data/mix/NAME``: the share of a source of a mix that
            holds now, where no schedule changes it.

        Raises:
            StateError: in a DataLoader's worker.

        >>> import trainpipes as tp
        >>> loader = tp.Loader(tp.from_dataset(range(10)).batch(4))
        >>> for batch in loader:
        ...     metrics = loader.metrics()
        ...     break
        >>> metrics["data/epoch"], metrics["data/batch"], metrics["data/rows"]
        (0, 1, 4)
        """
        return self._meter.read()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch delivered: a flat dict of integers and strings.
        Where batches are counted it is the same on all ranks; otherwise it covers this rank's
        shards only.

        Raises:
            StateError: in a DataLoader's worker.
        """
        state = self._iteration.state()
        if state is None:
            raise StateError(
                "state_dict() of a Loader must be called in the process that iterates it, got a call in a "
                "DataLoader's worker; give the pipeline to the DataLoader in place of the Loader"
            )
        return state

    def gather_state(self, group: Any = None, *, timeout: float = TIMEOUT) -> dict[str, Any]:
        """Return the states of all ranks as a single state, which any number of ranks can load. A collective:
        all ranks call it after the same step.

        Args:
            group: a process group; the default group if None.
            timeout: seconds to wait for the other ranks.

        Raises:
            StateError: ranks stand at different steps, or one did not call it in time.
        """
        return self._gathered(self.state_dict(), group, timeout)

    def _gathered(self, state: dict[str, Any], group: Any, timeout: float) -> dict[str, Any]:
        if not (dist.is_available() and dist.is_initialized()):
            return merge_states([state])
        rank, _ = self._iteration.ranks()
        members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        states = gather((rank, state), members, timeout, "the state")
        return merge_states(dict(states).values())  # processes of a rank have the same

    def full_state_dict(self, group: Any = None, *, timeout: float = TIMEOUT) -> dict[str, Any]:
        """Return the state of all ranks, which any number of ranks can load. All ranks call it after the
        same step, and one may save it.

        Where batches are counted it is ``state_dict()``, and asks no other rank; else it is
        ``gather_state()``.

        Args:
            group: as for ``gather_state``.
            timeout: as for ``gather_state``.

        Raises:
            StateError: as ``gather_state`` does.
        """
        return self._whole(self.state_dict(), group, timeout)

    def _whole(self, state: dict[str, Any], group: Any, timeout: float) -> dict[str, Any]:
        return state if self._iteration.plan.counted else self._gathered(state, group, timeout)

    def explain(self) -> Explanation:
        """Describe the plan of this loader: ``Pipeline.explain`` on its ranks.
        ``to_dict()`` also has its options."""
        from trainpipes.look.explain import explain

        _, world = self._iteration.ranks()
        executor = self._options["executor"]
        said = {**self._options, "executor": None if executor is None else str(executor)}
        options = said, self.threads
        return explain(self.pipeline, self._iteration, world, 0, *options)

    def load_state_dict(
        self, state: dict[str, Any], *, allow_changes: Collection[str] = ()
    ) -> None:
        """Let the next iteration continue where ``state`` was taken, on any number of ranks and workers.

        Args:
            state: a state of this pipeline. Where batches are counted, that of any rank; otherwise
                that of all ranks merged, or this rank's own if the number of ranks is the same.
            allow_changes: options that may differ from the pipeline that saved the state. "batch_size":
                batches have the new size from here on; each row comes at most once in this
                epoch, and a few at its end may be left out. "data": the files hold something else,
                with the same names and rows. "filter": ``filter`` keeps other rows from here on; within
                an epoch only between ``shuffle`` and ``batch``. "pack_length": packed rows have the
                new length; only for states from the start of an epoch. "mix": sources of
                ``mix`` may come and go, and their weights, schedule and max_epochs may change;
                sources that stay continue where they stand. "version": another version of a table;
                only for states from the start of an epoch.

        Raises:
            StateError: the state does not fit the pipeline.

        >>> import trainpipes as tp
        >>> small, large = (tp.Loader(tp.from_dataset(range(9)).batch(size)) for size in (2, 4))
        >>> first = next(iter(small))
        >>> large.load_state_dict(small.state_dict(), allow_changes=["batch_size"])
        >>> next(iter(large))
        [2, 3, 4, 5]
        """
        self._iteration.load(state, allow_changes)

    def set_weights(self, weights: Mapping[str, float], *, at_step: int | None = None) -> int:
        """Change the weights of the pipeline's ``mix`` from a batch on, as for a curriculum by loss.

        Batches before it are those of the old weights, and sources go on where they stand. It is what a
        state saved at that batch gives where it is loaded into a mix of the new weights: shares count from
        there. The state notes the change, so that a resume, before or after it and on any number of ranks
        and workers, goes on exactly; later epochs have the last weights. Batches that were made ahead are
        made again, which takes as long as a resume.

        On several ranks call it on all of them after the same step.

        Args:
            weights: of some sources, by name; 0 leaves a source out. Others keep their weights, and shares
                are the weights' parts of their sum, as in ``mix``.
            at_step: the number of the first batch of the new shares in this epoch, over all ranks, as
                "batches" of the state counts. By default the next multiple of 64 that no rank has passed,
                on which ranks agree; with it no rank asks another. With ``balance`` a multiple of its window
                in all shards.

        Returns:
            The number of that batch.

        Raises:
            ConfigError: the pipeline does not start with a mix that has weights, a stage after the mix holds
                or drops rows, a name is unknown, a weight is negative or all are 0, or the batch was given.
            TopologyError: ranks cannot agree.

        >>> import trainpipes as tp
        >>> sources = {name: tp.from_dataset([name] * 9) for name in ("easy", "hard")}
        >>> mixed = tp.mix(sources, weights={"easy": 1, "hard": 0}, stop="repeat").batch(4)
        >>> loader = tp.Loader(mixed)
        >>> loader.set_weights({"hard": 1}, at_step=1)
        1
        >>> batches = iter(loader)
        >>> next(batches), next(batches)
        (['easy', 'easy', 'easy', 'easy'], ['hard', 'easy', 'hard', 'easy'])
        """
        from trainpipes.loader.in_mid_run import set_weights

        return set_weights(self._iteration, copied(weights), copied(at_step))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, for frameworks that call this. See
        ``Pipeline.set_epoch``.

        Raises:
            ConfigError: ``epoch`` is no integer of 0 or more.
        """
        self._iteration.set_epoch(epoch)


def _check_epoch(epoch: Any, pipeline: Pipeline) -> None:
    whole_number(epoch, 0, "Loader(epoch)", "the number of an epoch", MOST_EPOCHS - 1)
    if pipeline._iteration.plan.chain.has_no_end:
        raise ConfigError(
            f"Loader(epoch) needs a pipeline whose epochs end, got epoch={epoch} and one without an end: "
            'leave out repeat() and stop="repeat", or write repeat(times), or take(n) after mix()'
        )


def _pinned(pipeline: Pipeline) -> Pipeline:
    stages = pipeline.stages
    if any(isinstance(stage, Pin) for stage in stages):
        return pipeline
    place = next((n for n, stage in enumerate(stages) if isinstance(stage, To)), len(stages))
    return Pipeline((*stages[:place], Pin(), *stages[place:]), pipeline._ranks, pipeline._members)


def _plan(pipeline: Pipeline, files: Sequence[Sequence[str] | None] | None) -> Plan:
    plan = pipeline._iteration.plan
    return pipeline._plan(files) if plan.grows or files is not None else plan


def packed_stages(pipeline: Pipeline) -> list[Stage]:
    return [packed(stage) for stage in pipeline.stages]


def check_pickles(pipeline: Pipeline) -> None:
    """Raise unless all functions of a pipeline can be sent to a spawned process."""
    for stage in stages_within(pipeline.stages):
        for name, value in stage.options.items():
            if not callable(value):
                continue
            try:
                pickled(value)  # as it will travel
            except (*NO_PICKLE, RuntimeError) as error:
                raise ConfigError(
                    f"{stage}: {name} must pickle to reach a spawned worker, and does not ({error}); use a "
                    'function defined at the top of a module, or multiprocessing_context="fork"',
                    stage=str(stage),
                ) from error
