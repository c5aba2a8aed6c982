"""Private and undocumented names of other packages that the library leans on: all of them, each with a test.

A test fails where the installed version has a name no more, and says what the name is for. Another one
fails where the sources use a private name that is not in this list. Tests of packages that are not installed
are left out: ``make test-frameworks`` and ``make test-ray`` run this file, too.
"""

from __future__ import annotations

import abc
import inspect
import json
import multiprocessing
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

import trainpipes as tp
from private_names import LIST, ROOTS, foreign, name_of, parsed, private, used, written
from trainpipes._internal.locks import ForkLock, start
from trainpipes.columns.content import tensor_digest
from trainpipes.engine.iterating import epoch_counter, epoch_end, epoch_iterator
from trainpipes.integrations import callers
from trainpipes.interfaces.options import instead
from trainpipes.look import read_states
from trainpipes.look.profiling.profile import TORCHS, _torchs
from trainpipes.order.layout import Topology
from trainpipes.stages.device import recorded
from trainpipes.state.merge import PrefixStore, _get_default_store

ROWS = 8


def rows() -> tp.Pipeline:
    return tp.from_arrow(pa.table({"n": list(range(ROWS))}))


# The list and the sources


def test_the_sources_use_no_private_name_that_is_not_in_the_list() -> None:
    listed = {(file, part) for one in LIST for file in one.files for name in one.names
              for part in name.split(".")}  # fmt: skip
    new = sorted(used() - listed)
    assert not new, f"enter {new} in this file, with a test; or find a public way"


def test_the_sources_use_every_name_of_the_list() -> None:
    texts: dict[str, str] = {}
    for path in (path for root in ROOTS for path in root.rglob("*.py")):
        texts[name_of(path)] = texts.get(name_of(path), "") + path.read_text()
    used_by = [(file, name) for one in LIST for name in one.names for file in one.files]
    assert not [(f, n) for f, n in used_by if n.rpartition(".")[2] not in texts.get(f, "")]


@pytest.mark.parametrize(("code", "name"), [
    ("loader._workers", "_workers"),
    ("self._foreign.append(1)", "_foreign"),
    ("super()._prepare(batch)", "_prepare"),
    ("import torch._utils", "_utils"),
    ("from torch import _C", "_C"),
    ("from torch.utils._pytree import tree_map", "_pytree"),
    ("getattr(dataset, '_ex_iterable', None)", "_ex_iterable"),
    ("resolve_name('torch.x:_Y.z')", "_Y"),
    ("setattr(loader, '_shutdown', True)", "_shutdown"),
    ("frame.f_locals['x']", "f_locals"),
    ("sys._getframe()", "_getframe"),
    ("frame.f_code.co_name == 'loop'", "loop"),
    ("type(one).__name__ in ('Buffer', 'Other')", "Other"),
])  # fmt: skip
def test_a_private_name_is_seen(code: str, name: str) -> None:
    assert name in set(foreign(parsed(code), {"_own"}, {"_own"}))


def test_a_name_of_ours_is_none() -> None:
    for code in ("self._own", "self._inherited", "pair._replace(x=1)", "f'_{n}_x'"):
        assert not set(foreign(parsed(code), {"_own"}, {"_own", "_inherited"})), code


# Python's library


@private("python", "_getframe", "callers.py messages.py")
def test_callers_are_read_from_the_stack() -> None:
    """Who asks for rows, and at which line of a user's a warning points."""

    def called() -> list[tuple[str, str]]:
        return list(callers.callers())

    name = test_callers_are_read_from_the_stack.__name__
    assert called()[0] == (__name__, f"{name}.<locals>.called")
    assert called()[1] == (__name__, name)


@private("torch", "__next__", "profile.py")
def test_a_profile_times_the_methods_in_which_a_loop_waits() -> None:
    """How long a loop waits for torch's loaders."""
    assert [*map(import_module, TORCHS)]
    assert {(kind.__name__, name) for kind, name in _torchs()} == {
        ("DataLoader", "__iter__"),
        ("StatefulDataLoader", "__iter__"),
        ("_BaseDataLoaderIter", "__next__"),
        ("_StatefulBaseDataLoaderIter", "__next__"),
    }


@private("python", "_forkserver _preload_modules", "executors.py")
def test_the_fork_server_says_what_it_imports() -> None:
    """The fork server imports what workers need once, unless the program has said what it imports."""
    assert forkserver.ForkServer()._preload_modules == ["__main__"]  # type: ignore[attr-defined]
    before = forkserver._forkserver._preload_modules
    try:
        multiprocessing.set_forkserver_preload(["json"])
        assert forkserver._forkserver._preload_modules == ["json"]
    finally:
        multiprocessing.set_forkserver_preload(before)


@private("python", "SENDER", "epoch_iterator.py")
def test_a_queue_names_the_thread_that_sends() -> None:
    """A worker's end does not wait for the thread that sends batches which nobody takes."""
    queue: Any = multiprocessing.get_context("fork").Queue()
    queue.put(1)
    assert epoch_iterator.SENDER in {thread.name for thread in threading.enumerate()}
    assert queue.get() == 1
    queue.close()
    queue.join_thread()


@private("python", "_at_fork_reinit", "locks.py")
def test_a_lock_can_be_made_free_in_a_forked_child() -> None:
    """A lock that a thread held as its process was forked is free in the child."""
    lock = ForkLock()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lock.acquire).result()
        assert not lock.acquire(blocking=False)
        lock._at_fork_reinit()
        assert lock.acquire(blocking=False)


@private("python", "get_spawning_popen", "epoch_counter.py")
def test_what_is_pickled_for_a_process_can_be_told_from_a_copy() -> None:
    """A pipeline that goes to a spawned process shares its count of epochs; a copy does not."""
    assert multiprocessing.context.get_spawning_popen() is None
    assert "stands" in epoch_counter.EpochCounter().__getstate__()
    assert written("multiprocessing.popen_spawn_posix:Popen._launch", "set_spawning_popen(self)")


@private("python", "_thread", "locks.py")
def test_threads_are_started_by_a_call_of_c() -> None:
    """Which Ctrl-C does not leave half done, as it may ``Thread.start``."""
    import _thread

    assert type(_thread.start_new_thread) is type(len)
    done = threading.Event()
    start(threading.Thread(target=done.set))
    assert done.wait(20)


@private("python", "_thread _weakrefset _abc_impl", "contents.py")
def test_what_holds_no_values_is_known_by_its_module() -> None:
    """Locks, weak references and caches of abstract classes are no part of what a function does."""
    from trainpipes.interfaces import contents

    class Abstract(abc.ABC):
        @abc.abstractmethod
        def x(self) -> None: ...

    kinds = [threading.Lock(), threading.RLock(), threading.Event(), weakref.ref(Abstract)]
    assert {type(one).__module__ for one in [*kinds, weakref.WeakSet()]} == contents.HOLD_NOTHING
    assert "_abc_impl" in vars(Abstract)
    assert contents.Contents("cache()", strict=True).digest(Abstract, "a class")


# torch


class Marks(IterableDataset[Any]):
    """What each worker knows its pass by."""

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        yield epoch_counter.shared_by_workers(get_worker_info(), 0)


@pytest.mark.parametrize("start", ["fork", "forkserver"])
@private("torch", "current_process", "epoch_counter.py")
def test_workers_of_a_pass_know_each_other_by_the_names_of_their_processes(start: str) -> None:
    """The workers of a pass of a plain DataLoader claim its number once, by the number of their first
    process, which torch leaves in the names of processes."""
    loader = DataLoader(Marks(), batch_size=None, num_workers=2, multiprocessing_context=start)
    passes = []
    for _ in range(2):
        torch.manual_seed(7)
        passes.append({tuple(mark) for mark in loader})
    assert list(map(len, passes)) == [1, 1]
    assert passes[0] != passes[1]


@pytest.mark.parametrize("workers", [0, 1])
@private("torch", "f_locals auto_collation __init__", "callers.py")
def test_a_data_loader_that_would_batch_again_is_known(workers: int) -> None:
    """A pipeline of batches is refused by a DataLoader that would batch them again."""
    pipe = rows().sharding_filter().batch(2).collate()
    with pytest.raises(tp.ConfigError, match="batch_size=None"):
        list(DataLoader(pipe, batch_size=2, num_workers=workers))
    assert len(list(DataLoader(pipe, batch_size=None, num_workers=workers))) == ROWS // 2


@private("torch", "_utils _worker_info", "stage_calls.py ray_worker.py callers.py")
def test_workers_of_a_loader_know_which_they_are() -> None:
    """``get_worker_info()`` answers in the worker processes of a ``Loader``."""
    pipe = tp.from_dataset(range(ROWS)).map(who, version="1").batch(2)
    found = {info for batch in tp.Loader(pipe, num_workers=2) for info in batch}
    assert found
    assert found <= {(0, 2), (1, 2)}


@private("torch", "default_collate_fn_map collate_tensor_fn", "stage_calls.py")
def test_a_worker_of_a_loader_stacks_into_its_own_memory() -> None:
    """``default_collate`` makes no file of torch's for each batch, which would be copied once more."""
    pipe = tp.from_dataset(range(ROWS)).batch(2).map(stacks, version="1")
    assert list(tp.Loader(pipe, num_workers=2)) == [False] * (ROWS // 2)


def test_a_worker_collates_tensors_as_the_program_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def added(tensors: Any, *, collate_fn_map: Any) -> Any:
        return sum(tensors)

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, added)
    pipe = tp.from_dataset(range(ROWS)).batch(2).collate(of_tensors)
    loader = tp.Loader(pipe, num_workers=2, multiprocessing_context="fork")
    assert list(loader) == [1, 5, 9, 13]


def of_tensors(batch: list[int]) -> Any:
    return default_collate([torch.tensor(n) for n in batch])


def stacks(batch: list[int]) -> bool:
    assert torch.utils.data.get_worker_info() is not None
    return any(
        stacked["x"].is_shared()
        for stacked in (
            default_collate([{"x": torch.full((4,), n)} for n in batch]),
            default_collate([{"x": np.full(4, n)} for n in batch]),
        )
    )


def who(_: int) -> tuple[int, int]:
    info = torch.utils.data.get_worker_info()
    return info.id, info.num_workers


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    epoch_end._groups.clear()
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@private("torch", "_get_default_store PrefixStore ProcessGroupGloo AllreduceOptions BroadcastOptions",
    "epoch_end.py")  # fmt: skip
def test_ranks_agree_by_the_store_of_the_default_group() -> None:
    """Ranks whose batches are not counted agree where an epoch ends, in a group of their own."""
    assert epoch_end.agreement_over(Topology())(5, True) == 5
    assert epoch_end.from_first_rank(Topology(), lambda: "some", *"123") == "some"


@pytest.mark.usefixtures("group")
@private("torch", "_get_default_store PrefixStore", "merge.py")
def test_the_default_group_has_a_store() -> None:
    """States of all ranks come together without a collective, which a rank that has ended would
    hang."""
    PrefixStore("trainpipes", _get_default_store()).set("a", "1")
    assert PrefixStore("trainpipes", _get_default_store()).get("a") == b"1"


@private("torch", "_indices _values", "device.py")
def test_the_memory_of_a_sparse_tensor_is_noted_as_used() -> None:
    """Also of one whose indices come twice, of which ``coalesce`` would give a copy."""
    parts = torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0])
    twice = torch.sparse_coo_tensor(*parts, (2,), check_invariants=True)
    held = {twice._indices().data_ptr(), twice._values().data_ptr()}
    assert {part.data_ptr() for part in recorded([twice])} == held


@private("torch", "_version", "content.py")
def test_a_tensor_counts_its_changes() -> None:
    """The digest of a tensor is kept until its numbers change."""
    tensor = torch.arange(ROWS)
    before = tensor_digest(tensor)
    tensor.add_(1)
    assert tensor_digest(tensor) != before


@private("torch", "_get_layout _StorageInfo _local BytesStorageMetadata", "checkpoint.py")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_are_found_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    """States in a folder of torch.distributed.checkpoint are found without running what it names."""
    import torch.distributed.checkpoint as dcp

    whole = {"loader": rows().batch(2).state_dict(), "weights": torch.zeros(2), "path": tmp_path}
    dcp.save(whole, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert list(read_states(tmp_path / "saved").values()) == [whole["loader"]]


@private("torchdata", "_snapshot", "format.py checkpoint.py")
def test_the_state_of_a_stateful_data_loader_is_known() -> None:
    """The state of a StatefulDataLoader is told from one of a pipeline, with what to load it into."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(rows().sharding_filter().batch(2), batch_size=None, num_workers=1)
    next(iter(loader))
    state = loader.state_dict()
    assert "_snapshot" in state
    with pytest.raises(tp.StateError, match="StatefulDataLoader"):
        rows().batch(2).load_state_dict(state)


@private("torchdata", "StatefulDataLoader BaseNode", "options.py")
def test_loaders_and_nodes_of_torchdata_are_known_by_their_names() -> None:
    """From_dataset() says what to write in place of a loader or a node."""
    from torchdata.nodes import IterableWrapper
    from torchdata.stateful_dataloader import StatefulDataLoader

    assert "a StatefulDataLoader has an order" in instead(StatefulDataLoader([1]))
    assert "from_torchdata(node)" in instead(IterableWrapper([1]))


# Tokenizers


@private("tiktoken", "_pat_str _mergeable_ranks _special_tokens", "adapters.py")
def test_an_encoding_is_known_by_its_content() -> None:
    """A state knows an encoding by its content; tiktoken's README shows these to extend one."""
    import tiktoken

    from trainpipes.tokenizers.adapters import Tiktoken

    whole = {"pat_str": r"\w+", "mergeable_ranks": {bytes([n]): n for n in range(256)},
             "special_tokens": {"<|endoftext|>": 256}}  # fmt: skip
    others = {"pat_str": r"\S+", "special_tokens": {}, "mergeable_ranks": {
        bytes([n]): 255 - n for n in range(256)}}  # fmt: skip
    kinds = [whole, *({**whole, name: other} for name, other in others.items())]
    prints = {Tiktoken(tiktoken.Encoding("one", **kind)).fingerprint() for kind in kinds}
    assert len(prints) == 4


# File systems


@private("fsspec", "_strip_protocol", "folders.py")
def test_a_file_system_says_what_its_paths_are() -> None:
    """A glob begins at its folder's path."""
    assert fsspec.filesystem("memory")._strip_protocol("memory://a/b/") == "/a/b"


@private("s3fs", "_find async_impl", "folders.py")
def test_stores_that_list_all_levels_at_once_are_known() -> None:
    """Stores that know no folders list all levels at once, side by side."""
    from trainpipes.filesystems.retry import Requests
    from trainpipes.sources.files.folders import StoreFolders

    assert StoreFolders(fsspec.filesystem("s3", anon=True), Requests())._finds
    http = StoreFolders(fsspec.filesystem("http"), Requests())
    assert (http._finds, http.many > 1) == (False, True)


@private("s3fs", "__wrapped__ call_s3 split_path retries", "request.py")
def test_s3_has_coroutines_and_a_number_of_tries() -> None:
    """A request can be cancelled, asks for one version of an object, and is tried again by one rule."""
    request = _request()
    system = fsspec.filesystem("s3", anon=True, skip_instance_cache=True)
    for method in ("call_s3", "cat_file", "cat_ranges", "info"):
        assert inspect.iscoroutinefunction(inspect.unwrap(getattr(system, method)))
        assert request._coroutine(system, method) is not None
    assert system.split_path("bucket/a/b") == ("bucket", "a/b", None)
    assert system.retries > 1
    request.try_once(system)
    assert system.retries == 1
    assert "self.retries" in inspect.getsource(type(system)._call_s3)
    assert request.is_checked(system, "ETag=1")


@private("aiohttp", "set_session encode_url system.kwargs", "request.py")
def test_http_has_a_session_and_options() -> None:
    """A request over HTTP asks for one version of a file."""
    request = _request()
    system = fsspec.filesystem("http", headers={"a": "b"}, skip_instance_cache=True)
    assert inspect.iscoroutinefunction(system.set_session)
    assert system.encode_url("http://a/b c") is not None
    assert system.kwargs == {"headers": {"a": "b"}}
    assert request.is_checked(system, "Last-Modified=1")


def _request() -> ModuleType:
    from trainpipes.sources.files import remote_bytes

    return import_module(remote_bytes.is_checked.__module__)


#: Where packages have the classes of their errors.
ERRORS = {
    "aiohttp": ["aiohttp"], "botocore": ["botocore.exceptions", "botocore.parsers"],
    "google": ["google.auth.exceptions"],
    "azure": ["azure.core.exceptions", "azure.identity"], "paramiko": ["paramiko"], "httpx": ["httpx"],
    "requests": ["requests.exceptions"], "socket": ["socket"], "urllib3": ["urllib3.exceptions"],
}  # fmt: skip
NAMED = sorted(_request().PASSING_NAMES | _request().ACCESS_NAMES | _request().REJECTED_NAMES)


@private("fsspec", "PASSING_NAMES ACCESS_NAMES REJECTED_NAMES", "request.py")
def test_errors_that_are_known_by_their_names_are_there() -> None:
    """An error says whether a request may be tried again."""
    seen = set()
    for name in NAMED:
        package, _, kind = name.partition(".")
        if find_spec(package) is not None and all(map(_is_there, ERRORS[package])):
            kinds = [getattr(import_module(place), kind, None) for place in ERRORS[package]]
            assert package in {one.__module__.partition(".")[0] for one in kinds if one}, name
            seen.add(package)
    assert "socket" in seen


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# Hugging Face's datasets


@private("datasets", "_indices _distributed", "from_hf.py")
def test_a_dataset_has_its_order() -> None:
    """Rows of a Dataset are read as Arrow, in the order that it chose; one that was cut is refused."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    whole = datasets.Dataset.from_dict({"n": list(range(ROWS))})
    assert list(tp.from_hf(whole.select([5, 2, 7]))) == [{"n": 5}, {"n": 2}, {"n": 7}]
    assert whole._indices is None
    with pytest.raises(tp.ConfigError, match="split_dataset_by_node"):
        tp.from_hf(split_dataset_by_node(whole.to_iterable_dataset(), 0, 2))


STEPS = "_ex_iterable ex_iterable ex_iterables BufferShuffled generator iter_arrow is_typed"


@private("datasets", STEPS, "from_hf.py")
@pytest.mark.filterwarnings("ignore:from_hf.*shuffles")
def test_a_stream_has_its_steps() -> None:
    """A stream that shuffles cannot go on from its state; a state knows the steps and their seeds. Rows of a
    step without Arrow are joined here.
    """
    import datasets

    from trainpipes.sources.from_hf import HFStream, shuffles

    stream = datasets.Dataset.from_dict({"n": list(range(ROWS))}).to_iterable_dataset(2)
    one, other = stream.shuffle(seed=1, buffer_size=4), stream.shuffle(seed=2, buffer_size=4)
    joined = datasets.concatenate_datasets([stream, one])
    assert not shuffles(stream)
    assert stream._ex_iterable.iter_arrow
    assert stream.filter(bool)._ex_iterable.iter_arrow is None
    assert stream.filter(bool)._ex_iterable.is_typed
    assert not stream.remove_columns("n")._ex_iterable.is_typed
    assert all(map(shuffles, (one, one.skip(2), joined)))
    assert HFStream(one).fingerprint() != HFStream(other).fingerprint()


OVERRIDDEN = (
    "load_state_dict _init_state_dict shard_data_sources reshard_data_sources shuffle_data_sources "
    "num_shards is_typed features"
)
ASKED = "_BaseExamplesIterable _ex_iterable ex_iterable _state_dict shift_rngs _sleep_on_threads_shutdown"


@private("datasets", f"{OVERRIDDEN} {ASKED}", "hf_dataset.py")
def test_a_source_of_datasets_has_what_is_overridden() -> None:
    """Pipe.to_hf() is a source of datasets, with a state."""
    import datasets
    from datasets.iterable_dataset import _BaseExamplesIterable

    from trainpipes.writers.hf_dataset import pipeline_of

    for name in OVERRIDDEN.split():
        assert hasattr(_BaseExamplesIterable, name), name
    where = "datasets.iterable_dataset"
    assert written(f"{where}:_BaseExamplesIterable.__init__", "self._state_dict")
    assert written(f"{where}:_BaseExamplesIterable", "_sleep_on_threads_shutdown")
    assert written(f"{where}:shift_ex_examples_rngs", "ex_iterable.shift_rngs(value)")
    pipe = rows()
    made = pipe.to_hf()
    assert pipeline_of(made.map(dict).filter(bool).take(3)) is pipe
    assert pipeline_of(datasets.Dataset.from_dict({"n": [1]}).to_iterable_dataset()) is None


@private("datasets", "_data_files", "read_arrow.py")
def test_a_saved_dataset_names_its_files(tmp_path: Path) -> None:
    """Read_arrow() reads the files that save_to_disk() wrote, and no others."""
    import datasets

    datasets.Dataset.from_dict({"n": list(range(ROWS))}).save_to_disk(tmp_path)
    assert json.loads((tmp_path / "state.json").read_text())["_data_files"]
    assert len(tp.read_arrow(tmp_path)) == ROWS


# The Trainer, TRL and Accelerate


@private("accelerate", "IterableDatasetShard DataLoaderDispatcher", "callers.py")
def test_accelerate_shares_out_rows_in_classes_of_these_names() -> None:
    """A DataLoader that Accelerate prepares shares rows out by itself: ranks must not do so, too."""
    from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard

    class Asked(IterableDataset[Any]):
        def __iter__(self) -> Iterator[str | None]:
            yield callers._who_shares()

    assert next(iter(IterableDatasetShard(Asked(), num_processes=2))) == "IterableDatasetShard"
    fetches = "_fetch_batches"
    assert written("accelerate.data_loader:DataLoaderDispatcher.__iter__", fetches)
    assert {*callers.SHARING} == {IterableDatasetShard.__name__, DataLoaderDispatcher.__name__}


@private("accelerate", "DataLoaderStateMixin GradientState remainder end_of_dataloader begin end",
    "accelerate.py")  # fmt: skip
def test_accelerate_knows_the_loader_at_work() -> None:
    """Gradients are applied at an epoch's last batch, and repeated rows do not count."""
    from accelerate.data_loader import DataLoaderStateMixin

    class Loader(DataLoaderStateMixin):
        gradient_state = resolve_name("accelerate.state:GradientState")()
        dataset = range(ROWS)

    loader: Any = Loader()
    loader.begin()
    loader.remainder, loader.end_of_dataloader = 3, True
    assert loader.gradient_state.in_dataloader
    assert (loader.gradient_state.remainder, loader.gradient_state.end_of_dataloader) == (3, True)
    loader.end()
    assert not loader.gradient_state.in_dataloader
    assert written("accelerate:Accelerator.gather_for_metrics", "self.gradient_state.remainder")


@private("transformers", "_get_num_multimodal_tokens", "vision.py")
def test_processors_count_the_tokens_of_pictures() -> None:
    """The length of a row is known from the sizes of its pictures."""
    families = "llava:Llava llava_next:LlavaNext idefics3:Idefics3 qwen2_vl:Qwen2VL"
    for name in f"{families} qwen2_5_vl:Qwen2_5_VL paligemma:PaliGemma".split():
        module, _, family = name.partition(":")
        kind = resolve_name(f"transformers.models.{module}:{family}Processor")
        assert "image_sizes" in inspect.signature(kind._get_num_multimodal_tokens).parameters


@private("transformers", "_switch_to_target_mode", "engine.py hf.py")
def test_tokenizers_of_translation_have_a_mode_for_labels() -> None:
    """Labels of a model of translation are in the language that is written."""
    pytest.importorskip("sentencepiece")  # without it there are none
    for name in ("MarianTokenizer", "NllbTokenizer", "MBartTokenizer", "M2M100Tokenizer"):
        assert callable(resolve_name(f"transformers:{name}")._switch_to_target_mode), name


@private("transformers", "TRAINER", "callers.py")
def test_the_trainer_is_in_a_module_that_is_known() -> None:
    """The error of a pipeline in the HF Trainer says which Trainer takes it."""
    pytest.importorskip("accelerate")
    assert resolve_name("transformers:Trainer").__module__ == callers.TRAINER


SIZES = "get_total_train_batch_size get_tp_size get_cp_size get_sp_size"
OF_THE_TRAINER = (
    "_internal_call label_names gather_function callback_handler ignore_data_skip EpochLength"
)


@private("transformers", f"set_initial_training_values {SIZES} {OF_THE_TRAINER}",
    "transformers/__init__.py")  # fmt: skip
def test_the_trainer_has_what_is_overridden() -> None:
    """A resumed run goes on with the batch that would have come, and ends where it would have."""
    pytest.importorskip("accelerate")
    trainer = resolve_name("transformers:Trainer")
    for name in ("set_initial_training_values", *SIZES.split()):
        assert callable(getattr(trainer, name)), name
    for place, text in {
        "save_model": "_internal_call",
        "_save_checkpoint": "self.save_model(output_dir, _internal_call=True)",
        "_run_epoch": "(step + 1) == steps_in_epoch",
        "add_callback": "self.callback_handler",
        "evaluation_loop": "self.gather_function(",
        "__init__": "self.label_names",
    }.items():
        assert written(f"transformers:Trainer.{place}", text), place
    whole = "int(self.state.global_step // num_update_steps_per_epoch)"
    assert written("transformers:Trainer", whole)


@private("transformers", "find_batch_size DataLoaderStateMixin", "loaders.py")
def test_the_trainer_counts_rows_of_a_batch() -> None:
    """Rows of an evaluation's batch are counted as the Trainer counts them."""
    pytest.importorskip("accelerate")
    count = resolve_name("transformers.trainer_pt_utils:find_batch_size")
    assert count({"x": torch.zeros(3, 2), "y": [1]}) == 3


@private("trl", "_prepare_dataset _prepare_inputs", "trl.py")
def test_trainers_of_trl_have_what_is_overridden() -> None:
    """TRL's trainers take pipelines that make batches."""
    for name in ("SFTTrainer", "DPOTrainer", "RewardTrainer"):
        trainer = resolve_name(f"trl:{name}")
        assert written(f"trl:{name}.__init__", "train_dataset = self._prepare_dataset(")
        _, *names = inspect.signature(trainer._prepare_dataset).parameters
        assert names[:3] == ["dataset", "processing_class", "args"]
    assert written("transformers:Trainer.training_step", "self._prepare_inputs(inputs)")


@private("trl", "_metrics _total_train_tokens _tp_size", "trl.py")
def test_the_trainer_of_trl_counts_tokens() -> None:
    """``num_tokens`` in TRL's logs counts all packed rows of a batch."""
    counts = "self._total_train_tokens += num_tokens_in_batch // self._tp_size"
    noted = '_metrics[mode]["num_tokens"] = [self._total_train_tokens]'
    assert written("trl:SFTTrainer.compute_loss", counts)
    assert written("trl:SFTTrainer.compute_loss", noted)


@private("trl", "_metrics gather", "trl.py")
def test_the_trainers_of_trl_note_metrics_where_they_are_known() -> None:
    """Metrics of an evaluation on several ranks are of each batch, without those that fill in."""
    assert written("accelerate:Accelerator.gather_for_metrics", "self.gather(input_data)")
    for name in "SFTTrainer.compute_loss", "DPOTrainer._compute_loss", "RewardTrainer.compute_loss":
        assert written(f"trl:{name}", "self._metrics[mode]")
        assert written(f"trl:{name}", "self.accelerator.gather")


# Lightning and Ray


@private("lightning", "_FitLoop.setup_data", "callers.py")
def test_lightning_asks_for_batches_where_that_is_known() -> None:
    """A pipeline in Lightning without the data module is warned of."""
    loop = resolve_name("lightning.pytorch.loops.fit_loop:_FitLoop")
    assert loop.setup_data.__qualname__ == callers.FITS
    assert loop.__module__.startswith(callers.LIGHTNING)


@private("lightning", "_mode flattened", "lightning.py")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_combined_loader_has_its_mode() -> None:
    """A CombinedLoader of mode "max_size" has loaders that have ended, without a position."""
    combined = resolve_name("lightning.pytorch.utilities.combined_loader:CombinedLoader")
    made = combined([[1], [2, 3]], "max_size")
    assert made._mode == "max_size"
    assert made.flattened == [[1], [2, 3]]
    made.flattened = [[4], [5]]
    assert made.iterables == [[4], [5]]


@private("lightning", "restarting restarted_mid_epoch epoch_progress batch_progress is_last_batch "
    "overfit_batches ckpt_path _combined_loader _checkpoint_connector _loaded_checkpoint", "lightning.py",
)  # fmt: skip
def test_lightning_counts_the_batches_that_were_trained_on() -> None:
    """The position saved is that of the last batch trained on; it is loaded once Lightning has its counts."""
    trainer = resolve_name("lightning.pytorch:Trainer")(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    assert (trainer.overfit_batches, trainer.ckpt_path) == (0.0, None)
    loop = trainer.fit_loop
    assert (loop.restarting, loop.restarted_mid_epoch) == (False, False)
    assert loop._combined_loader is None
    assert trainer._checkpoint_connector._loaded_checkpoint == {}
    assert written("lightning.pytorch:Trainer._run", "self._checkpoint_connector.resume_end()")
    assert (loop.epoch_progress.total.started, loop.epoch_progress.current.processed) == (0, 0)
    batches = loop.epoch_loop.batch_progress
    assert batches.is_last_batch is False
    for event in ("ready", "started", "processed", "completed"):
        assert (getattr(batches.total, event), getattr(batches.current, event)) == (0, 0)


@private("ray", "_TorchAccelerator.prepare_data_loader _WrappedDataLoader.__iter__ prepare_data_loader",
    "callers.py")  # fmt: skip
def test_ray_prepares_loaders_where_that_is_known() -> None:
    """Ray's prepare_data_loader() would take a batch ahead of a Loader's position: it is refused."""
    modules = [import_module(one) for one in callers.RAY]
    assert all(callable(one.prepare_data_loader) for one in modules)  # type: ignore[attr-defined]
    assert callable(resolve_name(f"{callers.RAY[0]}:_TorchAccelerator.prepare_data_loader"))
    wrapped: Any = modules[0]._WrappedDataLoader  # type: ignore[attr-defined]
    with pytest.raises(tp.ConfigError, match="prepare_data_loader"):
        list(wrapped(tp.Loader(rows().sharding_filter().batch(2)), torch.device("cpu"), False))


@private("pyiceberg", "_read_all_delete_files", "read_iceberg.py")
def test_rows_that_an_iceberg_table_has_deleted_are_read_by_its_library() -> None:
    """Position deletes and deletion vectors are read as pyiceberg's own scan reads them."""
    from pyiceberg.io.pyarrow import _read_all_delete_files

    assert _read_all_delete_files(None, []) == {}  # type: ignore[arg-type]
