"""list_files(refresh="epoch"): each epoch has the files that stand there when it begins."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import trainpipes as tp
from resuming import check_resume

ROWS = 24
FIXED = tp.from_arrow(pa.table({"x": range(1000, 1030)}))


def write(folder: Path, number: int) -> None:
    rows = pa.table({"x": range(ROWS * number, ROWS * (number + 1))})
    pq.write_table(rows, folder / f"day-{number}.parquet", row_group_size=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, 0)
    return tmp_path


def listed(folder: Path) -> tp.Pipeline:
    return tp.list_files(folder / "*.parquet", refresh="epoch").read_parquet()


def growing(folder: Path) -> tp.Pipeline:
    return listed(folder).sharding_filter(4).shuffle(20, seed=0)


def counted(folder: Path) -> tp.Pipeline:
    return growing(folder).batch(4)


def filtered(folder: Path) -> tp.Pipeline:
    return growing(folder).filter(lambda row: row["x"] % 3 > 0).batch(4)


def packed(folder: Path) -> tp.Pipeline:
    return growing(folder).map(lambda row: {"input_ids": [row["x"]] * 3}).pack(7).batch(2)


def mixed(folder: Path) -> tp.Pipeline:
    pipe = tp.mix({"z": listed(folder).shuffle(20), "a": FIXED}, weights={"z": 1, "a": 1})
    return pipe.sharding_filter(2).batch(4)


def joined(folder: Path) -> tp.Pipeline:
    return (FIXED + listed(folder)).sharding_filter(2).shuffle(20).batch(4)


def cached(folder: Path) -> tp.Pipeline:
    return listed(folder).map(lambda row: {"x": row["x"]}).cache().shuffle(20).batch(4)


Make = Callable[[Path], tp.Pipeline]
ALL = [counted, filtered, packed, mixed, joined, cached]


def numbers(batches: Any) -> list[int]:
    return sorted({row["x"] for batch in batches for row in batch} - set(range(1000, 1030)))


def after_a_batch(folder: Path, make: Make = counted) -> dict[str, Any]:
    loader = tp.Loader(make(folder))
    next(iter(loader))
    return loader.state_dict()


def resumed_from(state: dict[str, Any], folder: Path, make: Make = counted) -> tp.Loader:
    loader = tp.Loader(make(folder))
    loader.load_state_dict(state)
    return loader


def test_each_of_ten_epochs_has_the_files_that_stood_there_when_it_began(folder: Path) -> None:
    loader = tp.Loader(counted(folder))
    for epoch in range(10):
        seen = []
        for step, batch in enumerate(loader):
            if not step:
                write(folder, epoch + 1)
            seen.append(batch)
        assert numbers(seen) == list(range(ROWS * (epoch + 1)))
        assert len(loader) == len(seen) == 6 * (epoch + 1)
    assert loader.peek() == next(iter(loader))


@pytest.mark.parametrize("make", ALL)
def test_a_resume_reads_the_files_of_its_epoch_and_the_next_epoch_lists_again(
    folder: Path, make: Make
) -> None:
    write(folder, 1)
    loader = tp.Loader(make(folder))
    list(loader)
    write(folder, 2)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    write(folder, 3)
    rest, after = list(batches), list(loader)
    if make is counted:
        assert 3 * ROWS not in numbers(rest)
        assert numbers(after) == list(range(4 * ROWS))
    workers = 1 if make in (filtered, joined) else 0
    for resumed in (tp.Loader(make(folder), num_workers=workers), make(folder)):
        resumed.load_state_dict(state)
        assert list(resumed) == rest
        assert list(resumed) == after


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", ALL)
def test_check_resume_passes(folder: Path, make: Make) -> None:
    write(folder, 1)
    check_resume(make(folder), epochs=2, processes=0, every=5)


@pytest.mark.usefixtures("failed_workers_let_go")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_persistent_workers_of_the_epoch_before_are_not_used_with_new_files(
    folder: Path, method: str
) -> None:
    loader = tp.Loader(
        counted(folder).map(list),
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    assert numbers(loader) == list(range(ROWS))
    idle: Any = loader._workers._idle
    assert numbers(loader) == list(range(ROWS))
    kept: Any = loader._workers._idle
    assert kept[0] is idle[0]  # no file came: the same processes go on
    write(folder, 1)
    assert numbers(loader) == list(range(2 * ROWS))


def test_an_end_of_an_epoch_loads_though_its_files_are_gone(folder: Path) -> None:
    loader = tp.Loader(counted(folder))
    list(loader)
    state = loader.state_dict()
    write(folder, 1)
    (folder / "day-0.parquet").unlink()
    resumed = resumed_from(state, folder)
    assert numbers(resumed) == list(range(ROWS, 2 * ROWS))
    assert resumed.state_dict()["epoch"] == 2


def test_the_end_of_an_epoch_without_counts_goes_on_with_new_files(folder: Path) -> None:
    loader = tp.Loader(filtered(folder))
    list(loader)
    state = loader.state_dict()
    assert state["batches"] > 0
    write(folder, 1)
    resumed = resumed_from(state, folder, filtered)
    assert numbers(resumed) == [x for x in range(2 * ROWS) if x % 3]
    assert resumed.state_dict()["epoch"] == 1


def test_a_file_of_the_epoch_that_is_gone_is_named(folder: Path) -> None:
    state = after_a_batch(folder)
    write(folder, 1)
    (folder / "day-0.parquet").unlink()
    with pytest.raises(tp.MissingFilesError, match=r"1 of 1 are not there, such as 'day-0"):
        resumed_from(state, folder)


def test_a_file_of_the_epoch_that_has_changed_is_refused(folder: Path) -> None:
    state = after_a_batch(folder)
    pq.write_table(pa.table({"x": range(30)}), folder / "day-0.parquet")
    with pytest.raises(tp.StateError, match="data"):
        resumed_from(state, folder)


def test_a_file_that_is_rewritten_between_epochs_is_read_as_it_is(folder: Path) -> None:
    loader = tp.Loader(counted(folder))
    assert numbers(loader) == list(range(ROWS))
    pq.write_table(pa.table({"x": range(100, 130)}), folder / "day-0.parquet")
    assert numbers(loader) == list(range(100, 130))


def test_the_folder_may_move_between_saving_and_loading(folder: Path, tmp_path: Path) -> None:
    loader = tp.Loader(counted(folder))
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), list(batches)
    moved = tmp_path / "moved"
    moved.mkdir()
    for number in range(3):
        write(moved, number)
    assert list(resumed_from(state, moved)) == rest


def packed(content: bytes) -> str:
    return b64encode(zlib.compress(content)).decode()


@pytest.mark.parametrize(
    "files",
    [
        "?",
        packed(b'{"a": "b"}'),
        packed(b'[["a.parquet", 1]]'),
        packed(b'["a.parquet"]'),
        packed(b'[["a.parquet"]]'),
        packed(b'[["a.parquet"]]')[:-8],
        packed(b'[["a.parquet"]]' + b" " * (1 << 21)),  # small until it is unpacked
    ],
    ids=["no base64", "a dict", "a number", "a text", "no folder", "cut", "a bomb"],
)
def test_a_damaged_list_in_a_state_is_refused(
    folder: Path, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.engine.planning.inputs.MOST_NAMES", 1 << 20)
    with pytest.raises(tp.StateError, match="files: damaged"):
        resumed_from({**after_a_batch(folder), "files": files}, folder)


def test_two_iterators_keep_the_files_of_their_own_epochs(folder: Path) -> None:
    loader = tp.Loader(counted(folder))
    first = iter(loader)
    seen = [next(first)]
    write(folder, 1)
    second = iter(loader)
    other = [next(second)]
    state = first.state_dict()
    seen += first
    assert numbers(seen) == list(range(ROWS))
    assert numbers([*other, *second]) == list(range(2 * ROWS))
    assert list(resumed_from(state, folder)) == seen[1:]


@pytest.mark.parametrize("make", [counted, filtered])
def test_a_batch_of_an_earlier_epoch_is_found_among_its_files_and_the_run_keeps_its_own(
    folder: Path, make: Make
) -> None:
    loader = tp.Loader(make(folder))
    batches = iter(loader)
    next(batches)
    state, expected = loader.state_dict(), next(batches)
    list(batches)
    write(folder, 1)
    batches = iter(loader)
    first = next(batches)
    for _ in range(2):
        assert tp.locate(loader, state).batch == expected
        row = expected[0]["x"]
        assert tp.find(loader, [("day-0.parquet", row)], state=state)[0].m == 1
        assert tp.locate(loader, 0).batch == first
    assert len(tp.find(loader, ["day-1.parquet"])) > 0
    if make is counted:
        assert len(loader) == len(list(batches)) + 1


def test_a_state_that_is_refused_leaves_the_files_of_the_run(folder: Path) -> None:
    other = after_a_batch(folder, lambda folder: growing(folder).batch(5))
    write(folder, 1)
    loader = tp.Loader(counted(folder))
    first = next(iter(loader))
    with pytest.raises(tp.StateError, match="batch_size"):
        loader.load_state_dict(other)
    assert len(loader) == 2 * ROWS // 4
    assert tp.locate(loader, 0).batch == first


REFUSED: dict[str, tuple[Make, type[Exception], str]] = {
    "repeat": (lambda f: growing(f).repeat().batch(4), tp.ConfigError, r"refresh='epoch'.*repeat\("),
    "batches": (lambda f: growing(f).batch(4).repeat(2), tp.ConfigError, r"refresh='epoch'.*repeat\("),
    "a mix": (lambda f: mixed(f).repeat(), tp.ConfigError, r"refresh='epoch'.*(repeat|mix)\("),
    "a mix without an end": (
        lambda f: tp.mix({"a": tp.list_files(f, refresh="epoch").read_parquet()}, stop="repeat").batch(2),
        tp.ConfigError, r"refresh='epoch'.*mix\(",
    ),
    "ranks without a process group": (
        lambda f: next(iter(counted(f).distributed(rank=0, world_size=2))),
        tp.TopologyError, r"list_files\(refresh\).*init_process_group",
    ),
    "nodes": (
        lambda f: tp.nodes.ReadParquet(tp.nodes.ListFiles(str(f), refresh="epoch")).reset(),  # type: ignore
        tp.ConfigError, r"list_files\(refresh\).*nodes",
    ),
    "another value": (lambda f: tp.list_files("x", refresh="step"), tp.ConfigError, "refresh"),  # type: ignore
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_grow_is_refused_by_name(folder: Path, what: str) -> None:
    make, error, said = REFUSED[what]
    with pytest.raises(error, match=said):
        make(folder)


@pytest.mark.usefixtures("failed_workers_let_go")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_workers_of_a_plain_loader_are_refused_by_name(folder: Path, kind: Any) -> None:
    with pytest.raises(tp.TopologyError, match=r"list_files\(refresh\).*trainpipes.Loader"):
        list(kind(counted(folder), batch_size=None, num_workers=1))


def test_a_position_can_be_computed_and_explained(folder: Path) -> None:
    write(folder, 1)
    pipe = counted(folder)
    assert "refresh='epoch'" in str(pipe.explain())
    batches = list(pipe)
    resumed = counted(folder)
    resumed.load_state_dict(pipe.state_at(3))
    assert list(resumed) == batches[3:]


def test_the_option_is_written_to_a_config(folder: Path) -> None:
    path = folder / "pipeline.yaml"
    assert "refresh: epoch" in counted(folder).to_yaml(path)
    assert tp.load(path) == counted(folder)


def test_names_that_a_state_has_no_room_for_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.engine.planning.inputs.MOST_TEXT", 10)
    with pytest.raises(
        tp.ConfigError, match=r"list_files\(refresh\).*1 files; .*list_files\(names\)"
    ):
        next(iter(counted(folder)))


def test_states_of_ranks_merge_with_their_files(folder: Path) -> None:
    state = after_a_batch(folder, filtered)
    merged = tp.merge_states([state])
    assert merged["files"] == state["files"]
    write(folder, 1)
    assert resumed_from(merged, folder, filtered).state_dict()["files"] == state["files"]


def pictures(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def classes_of(loader: tp.Loader[Any]) -> dict[str, int]:
    return {row["class"]: row["label"] for batch in loader for row in batch}


def of_pictures(folder: Path) -> tp.Pipeline:
    return tp.list_files(folder, refresh="epoch").read_images().shuffle(3, seed=0).batch(2)


def test_files_that_are_rows_are_named_by_a_state(tmp_path: Path) -> None:
    pictures(tmp_path, *(f"{name}/{n}.png" for name in ("ant", "cat") for n in range(4)))
    loader = tp.Loader(of_pictures(tmp_path))
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), list(batches)
    pictures(tmp_path, "ant/9.png", "bee/0.png")
    resumed = resumed_from(state, tmp_path, of_pictures)
    assert list(resumed) == rest


def test_each_epoch_has_the_classes_of_the_first(tmp_path: Path) -> None:
    loader = tp.Loader(of_pictures(pictures(tmp_path, "ant/0.png", "cat/0.png")))
    assert classes_of(loader) == {"ant": 0, "cat": 1}
    pictures(tmp_path, "ant/1.png")
    assert classes_of(loader) == {"ant": 0, "cat": 1}
    state = loader.state_dict()
    pictures(tmp_path, "bee/0.png")
    for _ in range(2):
        with pytest.raises(tp.DataChangedError, match=r"all epochs must have .*'bee' more; take"):
            classes_of(loader)
        with pytest.raises(tp.DataChangedError, match=r"all epochs must have .*'bee' more; take"):
            resumed_from(state, tmp_path, of_pictures)
    (tmp_path / "bee/0.png").unlink()
    assert classes_of(loader) == classes_of(resumed_from(state, tmp_path, of_pictures))
    (tmp_path / "cat/0.png").unlink()
    with pytest.raises(tp.DataChangedError, match="got no 'cat'"):
        classes_of(loader)
    # Before the first epoch, and of the next run, any will do.
    assert classes_of(tp.Loader(of_pictures(tmp_path))) == {"ant": 0}


def test_in_a_mix_each_epoch_has_the_classes_of_the_first(tmp_path: Path) -> None:
    def make(folder: Path) -> tp.Pipeline:
        read = tp.list_files(folder, refresh="epoch").read_bytes(labels="folder")
        return tp.mix({"a": tp.read_bytes(fixed, labels="folder"), "b": read}).batch(4)

    fixed = pictures(tmp_path / "fixed", "ant/0.png")
    loader = tp.Loader(make(pictures(tmp_path / "more", "ant/0.png", "cat/0.png")))
    assert list(loader)
    pictures(tmp_path / "more", "bee/0.png")
    with pytest.raises(tp.DataChangedError, match="'bee' more"):
        list(loader)
