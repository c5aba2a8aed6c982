"""``explain().to_dict()``: what a run trained on, as plain JSON."""

from __future__ import annotations

import functools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from every_stage import ENDLESS, FINITE
from tokenizer_fixtures import bpe_json

ROWS = 60


def write(folder: Path, rows: int = ROWS) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        texts = [f"row {number} {i} " * 3 for i in range(rows // 2)]
        pq.write_table(pa.table({"text": texts}), folder / f"{number}.parquet", row_group_size=10)
    return str(folder)


def pipeline(
    files: str,
    tokenizer: Any = "bytes",
    *,
    seed: int = 5,
    batch_size: int = 4,
    num_shards: int = 12,
) -> tp.Pipeline:
    rows = tp.list_files(files).read_parquet(columns=["text"])
    shuffled = rows.sharding_filter(num_shards).shuffle(20, seed=seed)
    return shuffled.tokenize(tokenizer, max_length=16).batch(batch_size).pad_collate()


def stage(record: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in record["stages"] if one["stage"] == name)


@pytest.mark.sample(30)
@pytest.mark.filterwarnings(r"ignore:pin\(\) does nothing")
@pytest.mark.parametrize("name", [*FINITE, *ENDLESS])
def test_every_pipeline_has_a_diagram_and_a_record_of_json_that_moves_nothing(
    name: str, folder: Path
) -> None:
    pipe = {**FINITE, **ENDLESS}[name](folder)
    told = pipe.explain()
    record = told.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["pipeline"] == repr(pipe)
    assert record["stages"]
    assert all(f'"{own.name}(' in told.mermaid for own in pipe.stages)
    items = iter(pipe)
    next(items)
    assert pipe.explain().to_dict() == record


def test_the_record_says_what_was_trained_on_and_with_which_options(tmp_path: Path) -> None:
    record = pipeline(write(tmp_path)).explain().to_dict()
    assert f"list_files('{tmp_path}')" in record["pipeline"]
    assert stage(record, "shuffle") == {
        "stage": "shuffle", "buffer_size": 20, "seed": 5, "max_bytes": 1 << 30, "scope": "buffer",
    }  # fmt: skip
    assert stage(record, "tokenize")["tokenizer"] == "bytes"
    assert stage(record, "pad_collate")["value"] == 257, "the tokenizer's pad token"
    assert stage(record, "pad_collate")["padding_side"] == "right"
    assert (record["data"]["files"], record["data"]["rows"]) == (2, ROWS)
    assert (record["epoch_rows"], record["epoch_batches"]) == (ROWS, 15)
    assert (record["num_shards"], record["batch_size"], record["world_size"]) == (12, 4, 1)
    on_ranks = pipeline(tmp_path).explain(world_size=4)
    record = on_ranks.to_dict()
    assert (record["epoch_batches"], record["world_size"]) == (on_ranks.num_batches, 4) == (3, 4)


def test_the_same_files_elsewhere_give_the_same_but_for_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # long paths are cut
    write(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "deeper")
    here, there = (pipeline(folder).explain().to_dict() for folder in ("here", "there/deeper"))
    assert here != there
    for record in (here, there):
        record.pop("pipeline")
    assert here == there


def accepts(saved: tp.Pipeline, loading: tp.Pipeline) -> bool:
    try:
        loading.load_state_dict(saved.state_dict() or {})
    except tp.StateError:
        return False
    return True


def variants(folder: Path) -> dict[str, tp.Pipeline]:
    here, there, more = write(folder / "a"), write(folder / "b"), write(folder / "c", 80)
    (folder / "tokenizer.json").write_text(bpe_json())
    os.makedirs(folder / "moved")
    shutil.copy(folder / "tokenizer.json", folder / "moved" / "renamed.json")
    rows = tp.list_files(here).read_parquet(columns=["text"])

    def chain(rows: tp.Pipeline, pad: dict[str, Any] | None = None, **options: Any) -> tp.Pipeline:
        tokens = rows.tokenize("bytes", max_length=16, **options)
        return tokens.batch(4).pad_collate(**pad or {})

    def shuffled(rows: tp.Pipeline, **options: Any) -> tp.Pipeline:
        return rows.sharding_filter(12, **options).shuffle(20, seed=5)

    before = rows.sharding_filter(12).tokenize("bytes", max_length=16).shuffle(20, seed=5)
    defaults = rows.sharding_filter(12).shuffle(20, seed=5, scope="buffer")
    return {
        "plain": pipeline(here),
        "other folder": pipeline(there),
        "more rows": pipeline(more),
        "other seed": pipeline(here, seed=6),
        "other batch size": pipeline(here, batch_size=5),
        "other shards": pipeline(here, num_shards=24),
        "tokenizer": pipeline(here, folder / "tokenizer.json"),
        "tokenizer moved": pipeline(here, folder / "moved" / "renamed.json"),
        "tokenized before the shuffle": before.batch(4).pad_collate(),
        "pinned": pipeline(here).pin(),
        "cached": chain(shuffled(rows.cache(folder / "cache"))),
        "ragged": chain(shuffled(rows, tail="uneven")),
        "explicit default": chain(defaults, {"mask": None}, add_eos=False, labels=None),
    }


def test_fingerprints_are_equal_where_states_fit_and_only_there(tmp_path: Path) -> None:
    pipes = variants(tmp_path)
    prints = {name: pipe.explain().to_dict()["fingerprint"] for name, pipe in pipes.items()}
    assert len(set(prints.values())) == 6
    for one, saved in pipes.items():
        for other, pipe in pipes.items():
            loading = tp.Pipeline(pipe.stages)
            assert (prints[one] == prints[other]) == accepts(saved, loading), (one, other)


# Secrets


def fetch(row: dict[str, Any], api_key: str, times: int) -> dict[str, Any]:
    return row


@dataclass
class Caller:
    api_key: str
    times: int = 2

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row


def test_storage_options_are_not_told(tmp_path: Path) -> None:
    options = {"key": "SECRET1", "auto_mkdir": True}
    pipe = tp.list_files("memory://x/*.parquet", storage_options=options).read_parquet()
    with fsspec.open("memory://x/0.parquet", "wb") as file:
        pq.write_table(pa.table({"x": [1, 2, 3]}), file)
    assert "SECRET" not in json.dumps(pipe.explain().to_dict())


def test_values_under_secret_names_are_left_out() -> None:
    rows = tp.from_tensors(range(8))
    for function in (functools.partial(fetch, api_key="SECRET", times=3), Caller("SECRET", 3)):
        record = rows.map(function).explain().to_dict()
        assert "SECRET" not in json.dumps(record)
        assert "3" in json.dumps(stage(record, "map")["fn"])


# Where it is asked


def test_a_loader_tells_its_options(tmp_path: Path) -> None:
    pipe = pipeline(write(tmp_path))
    loader = tp.Loader(pipe, num_workers=2, multiprocessing_context="fork")
    before = pipe.explain().to_dict()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    record = loader.explain().to_dict()
    assert record["loader"]["num_workers"] == 2
    assert record["loader"]["prefetch_factor"] == 2
    assert record["fingerprint"] == before["fingerprint"]
    assert record["stages"] == before["stages"]
    assert pipe.explain().to_dict() == before
    del batches


def test_nothing_is_read_but_footers_and_no_function_is_called(tmp_path: Path) -> None:
    folder = Path(write(tmp_path))
    for path in folder.glob("*.parquet"):  # the rows are gone, the footer is not
        content = bytearray(path.read_bytes())
        footer = int.from_bytes(content[-8:-4], "little") + 8
        content[4:-footer] = bytes(len(content) - 4 - footer)
        path.write_bytes(bytes(content))
    pipe = tp.list_files(str(folder)).read_parquet().map(no_function).batch(4)
    assert pipe.explain().to_dict()["data"]["rows"] == ROWS
    with pytest.raises(tp.TrainpipesError):
        next(iter(pipe))


def no_function(row: dict[str, Any]) -> dict[str, Any]:
    raise AssertionError("was called")


# What options are


def test_functions_are_told_by_module_and_name_and_by_their_version(tmp_path: Path) -> None:
    pipe = tp.list_files(write(tmp_path)).read_parquet().map(no_function).filter(len, version="2")
    record = pipe.explain().to_dict()
    assert stage(record, "map")["fn"] == f"{__name__}.no_function"
    assert stage(record, "filter")["predicate"] == "version 2"


def test_rows_and_long_options_are_told_by_their_content_or_number() -> None:
    long, other = ([f"class {n}" for n in range(start, start + 2000)] for start in (0, 1))
    rows = tp.from_dataset([{"label": "class 5"}] * 3000)
    told = [rows.encode_labels("label", classes=one).explain().to_dict() for one in (long, other)]
    assert stage(told[0], "encode_labels") != stage(told[1], "encode_labels")
    assert all(len(json.dumps(one)) < 3000 for one in told)
    assert "list of 3,000 items" in told[0]["pipeline"]


def test_a_mix_tells_its_parts_with_their_rows_and_options(tmp_path: Path) -> None:
    parts = {
        name: tp.list_files(write(tmp_path / name, rows)).read_parquet().shuffle(8, seed=seed)
        for name, rows, seed in (("web", 40, 1), ("code", 20, 2))
    }
    record = tp.mix(parts, weights={"web": 3, "code": 1}).batch(4).explain().to_dict()
    assert (record["data"]["files"], record["data"]["rows"]) == (4, 60)
    inner = stage(record, "mix")["sources"]
    assert [one["stage"] for one in inner["web"]] == ["read_parquet", "shuffle"]
    assert (inner["web"][1]["seed"], inner["code"][1]["seed"]) == (1, 2)
    joined = tp.concat(*(tp.Pipeline(part.stages[:2]) for part in parts.values()))
    record = joined.shuffle(8, seed=3).explain().to_dict()
    assert (record["data"]["files"], record["data"]["rows"]) == (4, 60)


def test_where_counts_are_not_known_none_is_told() -> None:
    record = tp.from_iterable(lambda: iter(range(9))).batch(2).explain().to_dict()
    assert (record["data"]["rows"], record["data"]["files"]) == (None, None)
    assert (record["epoch_rows"], record["epoch_batches"]) == (None, None)
    endless = tp.from_tensors(range(9)).batch(2).repeat().explain().to_dict()
    assert (endless["data"]["rows"], endless["epoch_batches"]) == (9, None)


def test_versions_are_those_that_are_installed(tmp_path: Path) -> None:
    versions = pipeline(write(tmp_path)).explain().to_dict()["versions"]
    assert versions["trainpipes"] == tp.__version__
    assert versions["torch"] == torch.__version__
    assert versions["pyarrow"] == pa.__version__
    assert versions["state_format"] == pipeline(str(tmp_path)).state_dict()["trainpipes"]  # type: ignore[index]
