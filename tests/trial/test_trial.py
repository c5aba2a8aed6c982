"""A pipeline run alone: what it measures, and that it changes nothing."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

import trainpipes as tp
from trainpipes.look.trial.memory import MemoryPeak, resident
from trainpipes.look.trial.stage_clock import StageClock, labels_of
from trainpipes.look.trial.trial import trial


def pairs(rows=200):
    return tp.from_dataset(
        [{"prompt": f"{k} + {k} =", "response": f" {2 * k}" * (k % 7 + 1)} for k in range(rows)]
    )


def doubled(row):
    return {**row, "x": 2}


def slow(row):
    time.sleep(0.002)
    return row


def slow_in_workers(row):
    assert get_worker_info() is not None
    time.sleep(0.002)
    return row


def short(row):
    return len(row["response"]) < 12


def nothing(row):
    return False


def docs(n=100):
    return tp.from_dataset([{"text": f"text {k} " * (k % 9)} for k in range(n)]).tokenize("bytes")


def tables(tmp_path, n=300):
    path = tmp_path / "rows.parquet"
    if not path.exists():
        tp.from_dataset([{"text": f"row {k}" * (k % 5)} for k in range(n)]).write_parquet(path)
    return tp.list_files(str(path)).read_parquet()


def pipelines(tmp_path):
    return {
        "sft": tp.recipe("sft", pairs(), "bytes", batch_size=4, num_shards=4, buffer_size=64),
        "packed": tp.recipe("pretrain", tables(tmp_path), "bytes", max_length=64, epochs=1, num_shards=4),
        "buckets": docs().shuffle(50).sharding_filter(2).bucket_by_length(4, buffer_size=40).pad_collate(),
        "filter and map": pairs().filter(short).map(doubled).batch(4),
        "map in threads": pairs(40).map(doubled, num_workers=2, method="thread").batch(4),
        "map above batches": docs().batch(8).pad_collate().map(dict),
        "cache": tables(tmp_path).tokenize("bytes").cache(str(tmp_path / "kept")).shuffle(50).batch(4),
        "mix": tp.mix({"a": docs(), "b": docs(40)}, weights={"a": 2, "b": 1}).batch(5).pad_collate(),
        "zip": docs(30).zip(pairs(30)).batch(3),
        "concat": tp.concat(docs(30), docs(20)).shuffle(10).batch(3).pad_collate(),
        "stream": tp.from_iterable(lambda: iter(range(50))).shuffle(10).batch(4),
        "drawn": tp.from_tensors(x=torch.arange(60)).shuffle(scope="global").batch(4).collate(),
        "rows": tables(tmp_path).shuffle(40),
    }  # fmt: skip


KINDS = [
    "sft", "packed", "buckets", "filter and map", "map in threads", "map above batches", "cache", "mix",
    "zip", "concat", "stream", "drawn", "rows",
]  # fmt: skip


def plain(item):
    if isinstance(item, dict):
        return {key: plain(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [plain(one) for one in item]
    return item.tolist() if isinstance(item, torch.Tensor | np.ndarray) else item


# What is measured changes nothing


def run(pipe, **options):
    """All items of an epoch with the state after each."""
    items = iter(tp.Loader(pipe, **options))
    return [(plain(item), items.state_dict()) for item in items]


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_states_are_the_same_with_and_without_a_clock(kind, threads, tmp_path):
    made = pipelines(tmp_path)[kind]
    expected = run(made, threads=threads)
    measured = tp.Pipeline(made.stages)
    plan = measured._session.plan
    clock = StageClock(plan, seconds := np.zeros(len(labels_of(plan))))
    assert run(measured, threads=threads) == expected
    assert seconds.sum() > 0
    assert seconds.min() > -1e-6
    clock.stop()
    before = seconds.copy()
    assert run(measured, threads=threads)
    assert np.array_equal(seconds, before), "nothing is measured after stop()"


@pytest.mark.parametrize("kind", ["sft", "packed", "mix", "zip"])
def test_what_a_trial_sees_is_what_a_trainer_would_get(kind, tmp_path, no_processes_left):
    made = pipelines(tmp_path)[kind]
    expected = [plain(item) for item in tp.Loader(made)]
    for num_workers in (0, 2):
        seen = []
        report = trial(
            made,
            epochs=1,
            num_workers=num_workers,
            see=lambda item, _, to=seen: to.append(plain(item)),
        )
        assert seen == expected
        assert report.steps == len(expected)


def test_the_pipeline_does_not_move(tmp_path):
    made = pipelines(tmp_path)["sft"]
    expected = [plain(batch) for batch in tp.Pipeline(made.stages)]
    trial(made, steps=3)
    assert [plain(batch) for batch in made] == expected


# Where the time goes


def test_the_time_of_a_stage_is_without_that_of_those_below_it():
    pipe = docs(60).map(slow).bucket_by_length(4, buffer_size=20).pad_collate().map(dict)
    report = trial(pipe, epochs=1, threads=0)
    assert [name for name in report.stages if "as_columns" not in name] == [
        "from_dataset", "fetch", "tokenize", "map", "bucket_by_length", "pad_collate", "map (2)"
    ]  # fmt: skip
    assert report.stages["map"] >= 60 * 0.002
    assert sum(report.stages.values()) - report.stages["map"] < report.stages["map"]
    assert sum(report.stages.values()) <= report.seconds * 1.05


def test_batches_that_are_made_when_they_are_taken_count_for_the_stage_that_makes_them(tmp_path):
    report = trial(pipelines(tmp_path)["sft"], epochs=1)
    assert report.stages["pad_collate"] > 0


def test_workers_measure_their_stages(no_processes_left):
    pipe = pairs(40).map(slow_in_workers).sharding_filter(2).batch(4)
    report = trial(pipe, epochs=1, num_workers=2)
    assert report.stages["map"] >= 40 * 0.002
    assert report.steps == 10


@pytest.mark.slow
def test_workers_that_are_spawned_measure_too(no_processes_left, monkeypatch):
    import torch.multiprocessing as mp

    from trainpipes import loader as module

    made = module.Loader.__init__

    def spawning(self, pipeline, **options):
        made(self, pipeline, multiprocessing_context=mp.get_context("spawn"), **options)

    monkeypatch.setattr(module.Loader, "__init__", spawning)
    report = trial(docs(20).batch(4).pad_collate(), epochs=1, num_workers=1)
    assert report.stages["tokenize"] > 0


def test_rows_that_a_cache_gives_count_for_it(tmp_path):
    made = pipelines(tmp_path)["cache"]
    first, later = trial(made, epochs=1), trial(made, epochs=1)
    assert first.stages["tokenize"] > 0
    assert later.stages["tokenize"] == 0
    assert later.stages["cache"] > 0


def test_sources_of_a_mix_are_told_apart(tmp_path):
    report = trial(pipelines(tmp_path)["mix"], epochs=1)
    assert {"a: tokenize", "b: tokenize", "a: from_dataset"} <= set(report.stages)


# How long


def test_a_hundred_steps_or_an_epoch_where_nothing_says_how_many():
    rows = tp.from_tensors(x=torch.arange(300))
    assert trial(rows.batch(1).collate()).steps == 100
    assert trial(rows.batch(10).collate()).steps == 30
    assert trial(rows.batch(10).collate().repeat()).steps == 100


def test_steps_go_on_into_the_next_epoch():
    report = trial(tp.from_tensors(x=torch.arange(10)).batch(4).collate(), steps=8)
    assert (report.steps, report.rows, report.epochs, report.ended) == (8, 28, 3, "steps")


def test_a_state_says_where_to_start():
    pipe = tp.from_tensors(x=torch.arange(20)).batch(4).collate()
    seen = []
    trial(pipe, epochs=1, state=pipe.state_at(3), see=lambda b, _: seen.append(b["x"].tolist()))
    assert seen == [[12, 13, 14, 15], [16, 17, 18, 19]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 1, "epochs": 1}, "takes steps or epochs"),
        ({"steps": 0}, r"trial\(steps\)"),
        ({"epochs": True}, r"trial\(epochs\)"),
        ({"simulate_step": -1}, r"trial\(simulate_step\)"),
    ],
)
def test_options_are_checked(options, said):
    with pytest.raises(tp.ConfigError, match=said):
        trial(docs().batch(1), **options)


def test_epochs_of_what_has_no_end_are_refused():
    with pytest.raises(tp.ConfigError, match="has no end"):
        trial(docs().repeat().batch(1), epochs=1)


@pytest.mark.parametrize("rows", [docs(10).filter(nothing), tp.from_dataset([])])
def test_a_pipeline_that_gives_nothing_is_an_error(rows):
    with pytest.raises(tp.DataError, match="gives nothing"):
        trial(rows.batch(2))


def test_an_interrupt_gives_what_has_come():
    def see(_, progress):
        if progress.counts.items == 3:
            raise KeyboardInterrupt

    report = trial(docs().batch(2).pad_collate(), see=see)
    assert (report.steps, report.ended) == (3, "interrupted")


def test_an_error_of_the_pipeline_is_raised():
    with pytest.raises(ZeroDivisionError):
        trial(tp.from_dataset([{"x": 1}]).map(broken).batch(1))


def broken(row):
    return row["x"] / 0


# Counts


def test_waits_are_told_where_a_step_is_simulated():
    report = trial(pairs(60).map(slow).batch(2), simulate_step=0.002, threads=0)
    assert 0.4 < report.wait_share < 1
    assert report.step_seconds >= 29 * 0.002
    assert trial(pairs(60).batch(2)).wait_share is None


@pytest.mark.parametrize("kind", ["sft", "packed", "buckets", "mix"])
def test_tokens_and_padding_are_what_the_masks_say(kind, tmp_path):
    made = pipelines(tmp_path)[kind]
    report = trial(made, epochs=1)
    share = made.padding(10**6)
    assert (report.cells, report.cells - report.tokens) == (share.cells, share.padding)


def test_both_sides_of_preferences_and_of_an_encoder_decoder_count():
    rows = tp.from_dataset(
        [{"prompt": "a", "chosen": "b" * k, "rejected": "c"} for k in range(1, 41)]
    )
    preference = tp.recipe("preference", rows, "bytes", batch_size=4, num_shards=1)
    report = trial(preference, epochs=1)
    assert report.tokens == sum(k + 2 for k in range(1, 41)) + 3 * 40
    pipe = tp.recipe("seq2seq", pairs(40), "bytes", batch_size=4, num_shards=1)
    found = trial(pipe, epochs=1)
    batches = list(tp.Pipeline(pipe.stages))
    assert found.tokens == sum(
        int(b["input_mask"].sum() + (b["target_ids"] != 257).sum()) for b in batches
    )
    assert found.cells == sum(b["input_ids"].numel() + b["target_ids"].numel() for b in batches)


def test_rows_that_nothing_collates_count_too():
    report = trial(docs(20).batch(3))
    assert (report.steps, report.rows) == (7, 20)
    assert report.tokens == sum(len(f"text {k} " * (k % 9)) for k in range(20))
    assert report.padding_share == 0


def test_the_share_that_is_learnt():
    rows = tp.from_dataset([{"prompt": "abc", "response": "d"}] * 16)
    report = trial(tp.recipe("sft", rows, "bytes", batch_size=4, num_shards=1))
    assert report.learnt_share == pytest.approx(2 / 5)


def test_the_memory_of_workers_counts():
    before = resident()
    code = "x = bytearray(80 << 20); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1)
    with child, MemoryPeak() as memory:
        child.stdout.readline()
        assert resident() > before + (80 << 20)
        child.communicate(b"\n")
    assert memory.peak >= memory.start >= 0


def test_the_report_is_plain_json(tmp_path):
    import json

    report = trial(pipelines(tmp_path)["sft"], steps=3)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


# Advice


def advice(pipe, **options):
    return " ".join(trial(pipe, epochs=1, **options).advice)


def test_much_padding_names_buckets_with_their_column():
    lengths = [{"input_ids": [1] * (100 if k % 4 == 0 else 1)} for k in range(64)]
    said = advice(tp.from_dataset(lengths).batch(8).pad_collate())
    assert ".bucket_by_length(8) in place of .batch(8)" in said
    rows = tp.from_dataset([{"a": "x" * (100 if k % 4 == 0 else 1)} for k in range(64)])
    named = (
        rows.tokenize("bytes", {"a": "ids"}).batch(8).pad_collate(mask={"ids": "attention_mask"})
    )
    assert "column='ids'" in advice(named)


def test_buckets_that_are_there_are_not_named():
    lengths = [{"input_ids": [1] * (100 if k % 4 == 0 else 1)} for k in range(64)]
    pipe = tp.from_dataset(lengths).bucket_by_length(8, boundaries=[200]).pad_collate()
    assert "bucket_by_length" not in advice(pipe)


def test_waits_name_workers_where_functions_run_in_the_loop():
    said = advice(pairs(120).map(slow).batch(4), simulate_step=0.001)
    assert "--num-workers 2" in said
    assert "map takes" in said


def test_online_tokenizing_names_the_command_that_prepares():
    rows = tp.from_dataset([{"text": "a"}] * 400)
    assert "trainpipes tokenize" in advice(rows.tokenize(slowly).batch(20))


def slowly(texts):
    time.sleep(0.001 * len(texts))
    return [[1]] * len(texts)


def test_what_is_well_says_nothing():
    assert advice(tp.from_tensors(x=torch.arange(100)).batch(10).collate()) == ""


# Loading


class Loads(tp.RowStage):
    """Takes half a second for the first row in each process, as an import does."""

    def apply(self, row):
        if not LOADED:
            time.sleep(0.5)
            LOADED.append(row)
        return row


LOADED = []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_first_call_loads_is_no_share_of_its_stage(num_workers, no_processes_left):
    LOADED.clear()
    rows = tp.from_dataset([{"text": f"row {k}"} for k in range(400)])
    pipe = rows.then(Loads()).map(slow).batch(4)
    report = trial(pipe, steps=60, num_workers=num_workers)
    assert 0.4 < report.loading_seconds < 0.9
    assert report.stages["loads"] < 0.1
    assert report.stages["map"] > 0.3
    assert not any(said.startswith("loads takes") for said in report.advice)
    assert any(said.startswith("map takes") for said in report.advice)


def test_a_stage_that_is_always_slow_keeps_its_time():
    report = trial(pairs(120).map(slow).batch(4), epochs=1)
    assert report.stages["map"] > 0.2
    assert report.loading_seconds < 0.1
