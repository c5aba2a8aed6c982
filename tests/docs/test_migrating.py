"""docs/migrating.md: every name has a row, and what stands beside it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from torch.utils.data import DataLoader, IterDataPipe, Subset
from torchdata.nodes import IterableWrapper

import every_stage
import trainpipes as tp
from frameworks.example import example
from state.test_identities import ids

TEXT = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
ROW = re.compile(r"^\| (?!---)(.+) \| (.+) \|$", re.MULTILINE)
#: What is to be written: a function of ours, or a method of a pipeline.
CALL = re.compile(r"`((?:tp)?\.[^`]+)`")
CALLS = list(dict.fromkeys(call for row in ROW.findall(TEXT) for call in CALL.findall(row[1])))


def rows() -> tp.Pipeline:
    first = {"text": "a", "x": 1, "label": "ham", "jpg": b"", "cls": 1, "input_ids": [1]}
    other = {**first, "text": "b", "x": 5, "label": "spam"}
    return tp.from_arrow(pa.Table.from_pylist([first, other]))


def saved(name: str, streaming: bool = False) -> dict[str, Any]:
    return {"train": every_stage.SavedRows(pa.table({"text": [name]}))}


def mine(folder: Path) -> dict[str, Any]:
    """What stands for things of the reader's."""
    return {
        "tp": tp, "pc": pc, "a": rows(), "b": rows(), "c": rows().select("x").rename({"x": "y"}),
        "batches": [[0], [1]], "dataset": [{"x": 1}, {"x": 2}], "fn": len, "folder": str(folder / "new"),
        "items": [1],
        "load_dataset": saved, "loader": DataLoader([1, 2]),
        "make": lambda: iter([1]), "mesh": {"dp": Mesh()}, "name": "words",
        "node": IterableWrapper([1]), "parse": lambda file: [], "pipe": rows().batch(2), "sampler": [1],
        "MosaicShards": example("mds").MosaicShards, "TfRecords": example("mds").MosaicShards,
        "Subset": Subset,
        "table": pa.table({"text": ["a"], "label": ["ham"]}), "tokenizer": "bytes", "x": np.arange(2),
        "y": np.arange(2),
    }  # fmt: skip


class Mesh:
    """One dimension of a DeviceMesh."""

    mesh_dim_names = ("dp",)
    mesh = np.arange(2)

    def get_rank(self) -> int:
        return 0


def beginnings(folder: Path) -> Iterator[tp.Pipeline]:
    """What a method may be called on."""
    yield rows()
    yield rows().select("text", "x", "label")
    yield ids(folder)
    yield rows().batch(2)
    yield tp.list_files("data/*")


@pytest.mark.parametrize("call", CALLS)
def test_what_stands_beside_a_name_can_be_written(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if call.startswith("tp."):
        eval(call, mine(tmp_path))
        return
    faults = []
    for number, beginning in enumerate(beginnings(tmp_path)):
        try:
            eval(f"beginning{call}", mine(tmp_path / str(number)) | {"beginning": beginning})
            return
        except (tp.TrainpipesError, TypeError, AttributeError) as error:
            faults.append(error)
    pytest.fail(f"{call}: {faults}")


#: The left side of the table.
THERE = " ".join(left for left, _ in ROW.findall(TEXT))
#: What other libraries call their parts. torch's own datapipes are asked for theirs.
NAMES = {
    "DataPipes": "cycle enumerate flatmap groupby header in_batch_shuffle in_memory_cache mux mux_longest "
    "on_disk_cache parse_csv parse_json_files pin_memory prefetch random_split readlines repeat "
    "sample_multiplex save_to_disk set_length sharding_filter slice to_map_datapipe unbatch unzip webdataset "
    "zip_with_iter zip_with_map DataLoader2 bucketbatch max_token_bucketize threadpool_map rows2columnar",
    "torchdata.nodes": "Batcher IterableWrapper Loader MapStyleWrapper Mapper MultiNodeWeightedSampler "
    "ParallelMapper PinMemory Prefetcher SamplerWrapper StopCriteria Unbatcher",
    "Hugging Face datasets": "load_dataset shuffle map filter select_columns remove_columns rename_column "
    "cast_column train_test_split interleave_datasets stopping_strategy concatenate_datasets with_format "
    "take skip shard split_dataset_by_node set_epoch state_dict save_to_disk batch repeat from_generator",
    "WebDataset": "WebDataset shuffle split_by_node split_by_worker decode to_tuple map_dict batched "
    "RandomMix with_epoch resampled WebLoader ShardWriter handler slice rename",
    "MosaicML Streaming": "MDSWriter StreamingDataset StreamingDataLoader py1e py1br py1b py2s py1s naive "
    "num_canonical_nodes shuffle_block_size shuffle_seed proportion replication predownload cache_limit",
}


@pytest.mark.parametrize("library", NAMES)
def test_each_name_of_another_library_has_a_row(library: str) -> None:
    names = NAMES[library].split()
    assert not [name for name in names if not re.search(rf"\b{name}\b", THERE)]


def test_each_of_torchs_own_datapipes_has_a_row() -> None:
    own = [n for n in IterDataPipe.functions if not n.startswith("_") and n != "trace_as_dataframe"]
    assert len(own) > 10
    assert not [name for name in own if not re.search(rf"\b{name}\b", THERE)]


def test_mux_and_mux_longest_give_what_they_gave_there() -> None:
    a, b = tp.from_dataset([1, 2, 3, 4]), tp.from_dataset([10, 20])
    calls = [call for call in CALLS if '"a": 1, "b": 1}' in call]
    mux, longest = [list(eval(call, {"tp": tp, "a": a, "b": b})) for call in calls]
    for found in mux, longest:  # in turn, until one is read
        assert {found[0] < 10, found[1] < 10} == {found[1] < 10, found[2] < 10} == {True, False}
    assert 3 <= len(mux) <= 5
    assert sorted(longest) == [1, 2, 3, 4, 10, 20]


#: Names on the left that are options, constants or words, which no object is asked for.
NOT_ASKED = {
    "there", "sampler", "batch_sampler", "shuffle_block_size", "shuffle_seed", "naive", "num_canonical_nodes",
    "replication", "num_proc", "fn", "handler", "ignore_and_continue", "drop_last", "delta_timestamps",
    "FIRST_DATASET_EXHAUSTED", "StopCriteria", "epoch_size", "cache_dir", "cache_limit", "predownload",
    "worker_init_fn", "generator", "prefetch_factor",
}  # fmt: skip


def test_each_name_leads_there_from_a_pipeline_and_from_the_module() -> None:
    own_names = TEXT.split("## Grain")[0]  # those of the loaders below are no methods of a pipeline
    codes = (code for left, _ in ROW.findall(own_names) for code in re.findall(r"`([^`]+)`", left))
    found = (re.fullmatch(r"(?:wds\.)?(\w+)(\(.*\))?", code) for code in codes)
    asked = sorted({match[1] for match in found if match} - NOT_ASKED)
    assert {
        "concat",
        "slice",
        "readlines",
        "set_length",
        "fork",
        "demux",
        "groupby",
        "group_by",
    } < {*asked}
    for name in asked:
        for owner, names in ((rows(), dir(tp.Pipeline)), (tp, [*tp.__all__, "zip"])):
            if name not in names:
                with pytest.raises(AttributeError) as caught:
                    getattr(owner, name)
                known = name in dir(tp.Pipeline) or name in [*tp.__all__, "zip"]
                assert known or "(here that is " in str(caught.value), name


def test_a_subset_keeps_its_order() -> None:
    (call,) = (here for there, here in ROW.findall(TEXT) if there.startswith("`Subset("))
    dataset = list("abcdefgh")
    pipe = eval(call.strip("`"), {"tp": tp, "Subset": Subset, "dataset": dataset})
    assert list(pipe) == list(Subset(dataset, [5, 1, 2]))
    (shuffle,) = (call for call in CALLS if call.startswith(".shuffle(scope="))
    shuffled = eval(f"pipe{shuffle}", {"pipe": pipe})
    assert sorted(shuffled) == ["b", "c", "f"]
    assert len(shuffled.batch(1)) == 3


def test_functions_for_rows_keep_the_columns_that_they_kept_there() -> None:
    lines = {there: CALL.findall(here) for there, here in ROW.findall(TEXT)}
    rows = tp.from_arrow(pa.table({"x": ["a", "bb"], "y": [1, 2]}))

    def lengths(row: dict[str, Any]) -> dict[str, Any]:
        return {"n": len(row["x"])}

    def many_lengths(columns: pa.Table) -> dict[str, Any]:
        return {"n": pc.utf8_length(columns["x"])}

    def given(call: str, fn: Any) -> list[Any]:
        return list(eval(f"rows{call}", {"rows": rows, "fn": fn}))

    by_row, by_batch = lines["HF `map`; `batched=True`"]
    kept = [{"x": "a", "y": 1, "n": 1}, {"x": "bb", "y": 2, "n": 2}]
    assert given(by_row, lengths) == given(by_batch, many_lengths) == kept
    bare, bare_batches = lines["`map`, `Mapper`, `map_tuple`, `map_batches`"]
    assert given(bare, lengths) == given(bare_batches, many_lengths) == [{"n": 1}, {"n": 2}]
    (one_key,) = lines['`map_dict(x=fn)`, `map(fn, input_col="x")`']
    assert given(one_key, str.upper) == [{"x": "A", "y": 1}, {"x": "BB", "y": 2}]


def test_users_of_a_fork_get_the_same_rows() -> None:
    (here,) = (here for there, here in ROW.findall(TEXT) if there == "`fork(n)`")
    calls = re.findall(r"`([^`]+)`", here)
    pipe = tp.from_dataset(list(range(50))).shuffle(scope="global", seed=0)
    for call in calls:
        branches = [eval(call, {"tp": tp, "pipe": pipe, "fn": int}) for _ in range(2)]
        assert all(a == b for a, b in zip(*branches, strict=True)), call
    assert not all(a == b for a, b in zip(pipe, pipe, strict=True))  # an epoch and the next


#: Whether a mixture there goes on with the other sources when one has ended.
GOES_ON = {
    "mux": False, "RoundRobin": False, "mux_longest": True, "longest=True": True, "sample_multiplex": True,
    "RandomMix": False, "litdata.CombinedStreamingDataset(weights=)": False,
}  # fmt: skip


@pytest.mark.parametrize("name", GOES_ON)
def test_a_mixture_ends_where_it_ended_there(name: str) -> None:
    (here,) = (here for there, here in ROW.findall(TEXT) if f"`{name}`" in there)
    end = re.findall(r'(?:stop|max_epochs)=(?:"\w+"|1)', here)[0]
    assert end == ("max_epochs=1" if GOES_ON[name] else 'stop="first_exhausted"')
    if GOES_ON[name]:
        a, b = tp.from_dataset(list(range(4))), tp.from_dataset(list(range(4, 40)))
        (call,) = CALL.findall(here)
        assert sorted(eval(call, {"tp": tp, "a": a, "b": b})) == list(range(40))
