"""``read_states`` finds states of ours in any layout, runs nothing, and says what else a file is."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from forked import as_stranger, strangers_folder
from interpreters import python
from layouts import counted, of_ranks, save, state, stateful, uncounted
from trainpipes.errors import TrainpipesError
from trainpipes.look import read_states, summarize


class Trap:
    """What a hostile pickle holds: it writes a file when it is read."""

    path = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, (f"open({type(self).path!r}, 'w').write('sprung')",))


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """The file that a ``Trap`` writes; none may be there at the end."""
    Trap.path = str(tmp_path / "sprung")
    yield tmp_path / "sprung"  # type: ignore[misc]
    assert not (tmp_path / "sprung").exists()


def refused(path: Path) -> str:
    """The one sentence with which a path is refused."""
    with pytest.raises(TrainpipesError) as error:
        read_states(path)
    told = str(error.value)
    assert "\n" not in told
    assert path.name in told
    return told


# Layouts


def test_what_a_state_says() -> None:
    assert summarize(state(steps=7)) == {
        "format": 2, "epoch": 0, "batches": 7, "shards": 0, "num_shards": 12,
        "stages": ["from_tensors", "sharding_filter", "shuffle", "batch", "collate"],
    }  # fmt: skip
    for one in of_ranks(3):
        assert summarize(one)["shards"] == 4
    for damaged in ({"batches": 9}, {"pipeline": "{}"}, {"trainpipes": 99}):
        with pytest.raises(tp.StateError):
            summarize({**state(), **damaged})


def test_a_state_of_an_older_format_is_found_and_refused_by_its_format(tmp_path: Path) -> None:
    old = {**state(), "trainpipes": 1}
    old["m"] = old.pop("batches")
    path = save({"model": 1, "loader": old}, tmp_path / "old.pt", "torch")
    (found,) = read_states(path).values()
    with pytest.raises(
        tp.StateError, match="format must be 2, got 1, in which rows come in another order"
    ):
        summarize(found)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", ["torch", "json", "dcp"])
def test_what_a_stateful_data_loader_keeps_is_refused_with_what_takes_it(workers, layout, tmp_path):
    told = refused(save({"dl": stateful(workers)}, tmp_path / "sdl", layout))
    assert '["dl"]: ' in told
    assert "load it into a StatefulDataLoader with as many workers" in told
    assert "pipe.state_at(batches_delivered_to_each_rank, epoch=...)" in told


@pytest.mark.parametrize("layout", ["torch", "json", "dcp"])
@pytest.mark.parametrize(("wrap", "keys"), [
    (lambda s: s, ""),
    (lambda s: {"step": 3, "loader": s}, '["loader"]'),
    (lambda s: {"a": [1, {"b c": s, "w": [0.5] * 9}]}, '["a"][1]["b c"]'),
])  # fmt: skip
def test_a_state_is_found_under_any_keys(layout, wrap, keys, tmp_path):
    if layout == "dcp" and not keys:
        wrap, keys = (lambda s: {"top": s}), '["top"]'
    saved = state()
    path = save(wrap(saved), tmp_path / "checkpoint", layout)
    ((where, found),) = read_states(path).items()
    assert where == f"{path} {keys}".rstrip()
    assert dict(found) == saved
    loader = tp.Loader(counted())
    loader.load_state_dict(dict(found))
    assert loader.state_dict() == saved


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc for memory")
def test_weights_beside_it_are_not_read(tmp_path):
    weights = {"w": torch.zeros(80_000_000, dtype=torch.uint8), "loader": state()}
    path = save(weights, tmp_path / "large.pt", "torch")
    small = save({"loader": state()}, tmp_path / "small.pt", "torch")
    code = (
        "import re, sys; from trainpipes.look import read_states\n"
        # Not ru_maxrss: that of a process starts with the peak of the one that started it.
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "read_states(sys.argv[2])\n"  # what this imports is not the weights
        "before = peak()\n"
        "(found,) = read_states(sys.argv[1])\n"
        "print(found.split()[-1], peak() - before < 40_000)"
    )
    command = [*python(), "-c", code, str(path), str(small)]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.stdout == '["loader"] True\n', told.stderr


def test_a_folder_is_looked_through(tmp_path):
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        saved = {"step": step, "first_epoch": 0, "loader": state(steps=step)}
        save(saved, tmp_path / f"checkpoint-{step}" / "trainpipes.json", "json")
        save({"w": torch.ones(3)}, tmp_path / f"checkpoint-{step}" / "optimizer.pt", "torch")
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"\x08" + bytes(99))
    save({"run": {"loader": state(steps=4)}}, tmp_path / "dcp", "dcp")
    found = read_states(tmp_path)
    assert {
        one.removeprefix(f"{tmp_path}/"): summarize(state)["batches"]
        for one, state in found.items()
    } == {
        'checkpoint-10/trainpipes.json ["loader"]': 10,
        'checkpoint-2/trainpipes.json ["loader"]': 2,
        'dcp ["run"]["loader"]': 4,
    }


def test_of_a_folder_the_good_files_are_given(tmp_path, sprung):
    torch.save({"trainpipes": Trap()}, tmp_path / "bad.pt")
    assert "whose code could run" in refused(tmp_path / "bad.pt")
    with pytest.raises(tp.StateError, match="whose code could run"):
        read_states(tmp_path)
    save(state(), tmp_path / "good.json", "json")
    (found,) = read_states(tmp_path).values()
    assert summarize(found)["batches"] == 7


# What is no state


def test_nothing_is_there(tmp_path):
    assert "is not there" in refused(tmp_path / "no.pt")
    (tmp_path / "empty").mkdir()
    assert "holds no state of trainpipes" in refused(tmp_path / "empty")
    for path in ("s3://bucket/checkpoint.pt", ""):
        with pytest.raises(TrainpipesError, match="is not there"):
            read_states(path)


@pytest.mark.parametrize("content", [
    b"",
    b"\x00" * 100,
    b"{",
    b"[" * 200_000,
    b'{"a": 1e999999, "b": ' + b"9" * 10_000 + b"}",
    b"PK\x03\x04",
    pickle.dumps({"trainpipes": 2}),
    b"\xff\xfe{",
    struct.pack("<Q", 40) + b'{"w":{"dtype":"F32"}}' + bytes(50),
    gzip.compress(b"{}", mtime=0),
], ids=str)  # fmt: skip
def test_files_of_something_else(content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert "neither JSON nor of torch.save, or is cut short" in refused(path)


@pytest.mark.parametrize(("value", "said"), [
    ({"a": 1}, "a dict without the key 'trainpipes' ('a')"),
    ({"work_queue": 1, "first_epoch": 0}, "the state of a WorkQueue; load it into a WorkQueue"),
    ({"root": {}, "num_yielded": 3}, "the state of a torchdata.nodes.Loader"),
    ([1, 2], "has no state of trainpipes in it: a state must be the dict that state_dict() gave"),
    ({"trainpipes": 2}, "a dict without the key 'batches' ('trainpipes')"),
])  # fmt: skip
def test_what_another_library_saved_is_named(value, said, tmp_path):
    told = refused(save(value, tmp_path / "other.json", "json"))
    assert said in told


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refused(tmp_path / "pipe")
    with pytest.raises(TrainpipesError, match="no regular file"):
        read_states("/dev/zero")
    save(state(), tmp_path / "state.json", "json")
    assert len(read_states(tmp_path)) == 1  # and passed over in a folder


def test_what_may_not_be_read_says_so(tmp_path):
    path = save(state(), tmp_path / "state.json", "json")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert "Permission denied" in refused(path)


@pytest.mark.parametrize("mode", [0o000, 0o333, 0o444], ids=oct)
def test_a_folder_that_may_not_be_listed_or_entered_says_so(mode):
    with strangers_folder() as top:
        closed = top / "closed"
        save(state(), closed / "state.json", "json")
        closed.chmod(mode)

        def said(path: Path) -> tuple[str, str]:
            try:
                return "read", str(len(read_states(path)))
            except TrainpipesError as error:
                return type(error).__name__, str(error)

        found = as_stranger(lambda: [said(closed), said(top), said(closed / "state.json")])
        if mode == 0o333:  # who knows the name may read it
            assert found.pop() == ("read", "1")
        assert {kind for kind, _ in found} == {"UnreadableError"}
        assert all("closed" in text and "Permission denied" in text for _, text in found)


# Hostile files


def test_torch_save_of_objects_is_refused_with_the_way_out(tmp_path, sprung):
    for value, name in ((Trap(), "exec"), (SimpleNamespace(a=1), "SimpleNamespace")):
        path = tmp_path / "evil.pt"
        torch.save({"loader": state(), "args": value}, path)
        told = refused(path)
        assert name in told
        assert "whose code could run" in told
        assert "torch.save(loader.state_dict(), path)" in told


def test_a_dcp_folder_runs_nothing(tmp_path, sprung):
    path = save({"loader": {**state(), "batch_sizes": Trap()}}, tmp_path / "value", "dcp")
    with pytest.raises(tp.StateError, match="holds exec, whose code could run"):
        read_states(path)
    path = save({"loader": state()}, tmp_path / "index", "dcp")
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data = {**index.planner_data, "x": Trap()}
    (path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(tp.StateError, match="exec, whose code could run"):
        read_states(path)


def test_a_dcp_folder_that_was_not_finished_says_so(tmp_path):
    path = save({"loader": state()}, tmp_path / "dcp", "dcp")
    whole = (path / ".metadata").read_bytes()
    for content in (whole[:100], b"", b"nothing like it", pickle.dumps([1])):
        (path / ".metadata").write_bytes(content)
        with pytest.raises(tp.StateError, match=r"no index of torch\.distributed\.checkpoint"):
            read_states(path)
    (path / ".metadata").write_bytes(whole)
    (part,) = path.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(tp.StateError, match="what it cannot read"):
        read_states(path)
    part.rename(tmp_path / "outside")
    index = pickle.loads(whole)
    for place in index.storage_data.values():
        object.__setattr__(place, "relative_path", "../outside")
    (path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(tp.StateError, match="is not there"):
        read_states(path)


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_a_dcp_index_of_any_python_names_its_path_as_that_python_does(tmp_path, module):
    path = save({"loader": state()}, tmp_path / "dcp", "dcp")
    index = pickle.loads((path / ".metadata").read_bytes())
    names = pickle.dumps(index, protocol=2).replace(b"pathlib._local\n", b"pathlib\n")
    assert names.count(b"cpathlib\nPosixPath\n") == 1
    names = names.replace(b"cpathlib\n", b"c" + module + b"\n")
    (path / ".metadata").write_bytes(names)
    (found,) = read_states(path).values()
    assert dict(found) == state()


def test_a_value_that_holds_itself_is_looked_into_once(tmp_path):
    loop: dict[str, Any] = {"loader": state()}
    loop["again"] = [loop, loop]
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb] * 20
    loop["bomb"] = bomb
    (found,) = read_states(save(loop, tmp_path / "loop.pt", "torch"))
    assert found.endswith('loop.pt ["loader"]')


@given(st.data())
def test_a_damaged_file_is_one_sentence_or_a_state_that_is_damaged(data):
    whole, kind = data.draw(st.sampled_from(_saved()))
    content = bytearray(whole)
    cut = data.draw(st.integers(0, len(content)))
    if data.draw(st.booleans()):
        content = content[:cut]
    for _ in range(data.draw(st.integers(0, 3))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = Path(os.environ["TRAINPIPES_CACHE"], f"damaged-{kind}-{os.getpid()}")
    path.write_bytes(content)
    with suppress(TrainpipesError):
        for found in read_states(path).values():
            summarize(found)
    path.unlink()


def _saved() -> list[tuple[bytes, str]]:
    if not _SAVED:
        folder = Path(os.environ["TRAINPIPES_CACHE"])
        value = {"loader": state(uncounted()), "w": torch.arange(4), "l": OrderedDict(a=1)}
        for kind in ("torch", "json"):
            saved = {**value, "w": None} if kind == "json" else value
            path = save(saved, folder / f"saved-{os.getpid()}", kind)
            _SAVED.append((path.read_bytes(), kind))
    return _SAVED


_SAVED: list[tuple[bytes, str]] = []


@pytest.mark.parametrize("name", ["a.pt", "folder/a.pt"])
def test_an_archive_that_would_fill_memory_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/version", "3")
        archive.writestr("archive/byteorder", "little")
        with archive.open("archive/data.pkl", "w") as entry:
            for _ in range(200):
                entry.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(
        tp.StateError, match=r"unpacks to 209,715,2\d\d bytes, of [\d,]+: torch\.save\(\) packs"
    ):
        read_states(path if name == "a.pt" else path.parent)
