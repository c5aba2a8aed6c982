"""What a path, folder, glob, URL or list stands for, and what is said when it stands for nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pickle
import zipfile
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fsspec.asyn import AsyncFileSystem

import trainpipes as tp
from s3_store import s3_store
from trainpipes.errors import (
    ConfigError,
    MissingExtraError,
    MissingFilesError,
    UnreadableError,
)
from trainpipes.prepare import repack
from trainpipes.sources.files.file_reader import READERS, reader_by_name, suffixes_of
from trainpipes.sources.files.folders import LocalFolders
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.sources.read_parquet import ReadParquet
from trainpipes.stages.filter import Filter


def make(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * len(name))
    return folder


def listed(urls: object, root: Path | str, **options: object) -> list[str]:
    names = ListFiles(urls=urls, **options).files().names  # type: ignore[arg-type]
    return [name.removeprefix(f"{root}/") for name in names]


def test_a_path_stands_for_its_file_as_text_or_path(tmp_path):
    make(tmp_path, "a.parquet")
    for url in (
        tmp_path / "a.parquet",
        str(tmp_path / "a.parquet"),
        f"file://{tmp_path}/a.parquet",
    ):
        files = ListFiles(urls=url).files()
        assert files.names == [str(tmp_path / "a.parquet")]
        assert files.sizes.tolist() == [9]


def test_a_path_may_have_any_name(tmp_path):
    names = ["data[1].parquet", "rows.bin", "a::b.parquet", "_hidden.parquet", "ü .parquet", "p#1.bin",
             "q%20.bin", "c d/e f.parquet"]  # fmt: skip
    make(tmp_path, *names)
    for name in names:
        path = tmp_path / name
        for url in (path, f"file://{path}", path.as_uri()):
            assert listed(url, tmp_path) == [name]
    assert listed((tmp_path / "c d").as_uri(), tmp_path) == ["c d/e f.parquet"]


def test_relative_paths_and_tilde_come_out_absolute(tmp_path, monkeypatch):
    make(tmp_path, "d/a.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in ("d/a.parquet", "d/*.parquet", "./d", "~/d"):
        assert ListFiles(urls=url).files().names == [str(tmp_path / "d/a.parquet")]


MANY = (
    "b.parquet a/x.PARQUET a/deep/y.pq _lang=en/z.parquet notes.txt _SUCCESS _metadata "
    "_common_metadata.parquet .hidden.parquet .cache/c.parquet _log/1.checkpoint.parquet "
    "_temporary/0/t.parquet"
)
PARTS = "part-2.parquet part-10.parquet part-1.parquet 10/x.pq 9/x.pq part-01.parquet"
SPARK = "spark.parquet/part-0.parquet spark.parquet/_SUCCESS one.parquet"
#: Files, what is listed below their folder with which options, and what is found.
LISTED: list[tuple[str, Any, dict[str, Any], str]] = [
    (MANY, "", {}, "_lang=en/z.parquet a/deep/y.pq a/x.PARQUET b.parquet"),
    (SPARK, "", {}, "one.parquet spark.parquet/part-0.parquet"),
    (SPARK, "*.parquet", {}, "one.parquet spark.parquet/part-0.parquet"),
    (SPARK, "**/*.parquet", {}, "one.parquet spark.parquet/part-0.parquet"),
    ("a.parquet b.snappy c.txt", "", {"suffix": ".snappy"}, "b.snappy"),
    ("a.parquet b.snappy c.txt", "", {"suffix": [".txt", ".parquet"]}, "a.parquet c.txt"),
    ("a.parquet b.snappy c.txt", "", {"suffix": ""}, "a.parquet b.snappy c.txt"),
    (PARTS, "", {}, "9/x.pq 10/x.pq part-01.parquet part-1.parquet part-2.parquet part-10.parquet"),
    ("a/2.pq a/10.pq b/1.pq", ["b", "a/*.pq"], {}, "b/1.pq a/2.pq a/10.pq"),
    ("a/2.pq a/10.pq b/1.pq", ("a/*.pq", "b"), {}, "a/2.pq a/10.pq b/1.pq"),
]


@pytest.mark.parametrize(("names", "urls", "options", "found"), LISTED)
def test_a_folder_stands_for_the_files_of_its_format_in_natural_order(
    tmp_path, names, urls, options, found
):
    make(tmp_path, *names.split())
    asked = f"{tmp_path}/{urls}"
    if not isinstance(urls, str):
        asked = type(urls)(f"{tmp_path}/{url}" for url in urls)
    assert listed(asked, tmp_path, **options) == found.split()


def test_a_glob_stands_for_what_it_matches(tmp_path):
    make(
        tmp_path, "a/1.parquet", "a/2.bin", "b/1.parquet", "b/c/3.parquet", ".h/1.parquet", "_x.pq"
    )
    expected = {
        "a/*": ["a/1.parquet", "a/2.bin"],
        "*/1.parquet": ["a/1.parquet", "b/1.parquet"],
        "[bc]/*.parquet": ["b/1.parquet"],
        "[!b]/?.parquet": ["a/1.parquet"],
        "**/*.parquet": ["a/1.parquet", "b/1.parquet", "b/c/3.parquet"],
        "b/**": ["b/1.parquet", "b/c/3.parquet"],
        "**/c/*": ["b/c/3.parquet"],
        "_*": ["_x.pq"],
        ".h/*": [".h/1.parquet"],
        "b*": ["b/1.parquet", "b/c/3.parquet"],
    }
    memory = fsspec.filesystem("memory")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            memory.pipe(f"/globs/{path.relative_to(tmp_path)}", path.read_bytes())
    try:
        for pattern, names in expected.items():
            assert listed(f"{tmp_path}/{pattern}", tmp_path) == names, pattern
            assert listed(f"memory://globs/{pattern}", "memory:///globs") == names, pattern
        assert listed("memory://globs/b", "memory:///globs") == ["b/1.parquet", "b/c/3.parquet"]
    finally:
        memory.rm("/globs", recursive=True)


class TalkingStore(AsyncFileSystem):
    """A store that answers for folders whose names begin with "a" once all four are asked for."""

    protocol = "talking"
    asked: ClassVar[list[str]] = []

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        self.asked.append(path)
        for _ in range(1000):
            if "/a" not in path or sum("/a" in other for other in self.asked) == 4:
                return fsspec.filesystem("memory").ls(path, detail=detail)
            await asyncio.sleep(0.01)
        raise ValueError("nobody else is asked")


def test_in_stores_only_folders_that_match_are_listed_and_many_at_once():
    memory = fsspec.filesystem("memory")
    fsspec.register_implementation("talking", TalkingStore, clobber=True)
    for name in ("a1/x.pq", "a2/x.pq", "a3/x.pq", "a4/.h/x.pq", "b1/x.pq", "_a/x.pq"):
        memory.pipe(f"/many/{name}", b"x")
    try:
        found = listed("talking://many/a*/*.pq", "talking:///many")
        assert found == ["a1/x.pq", "a2/x.pq", "a3/x.pq"]
        asked = [path.strip("/") for path in TalkingStore.asked]
        assert sorted(asked) == ["many", "many/a1", "many/a2", "many/a3", "many/a4"]
    finally:
        memory.rm("/many", recursive=True)


def test_archives_are_listed_by_the_same_rules(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("a/1.pq", "a/b/2.pq", "a/b/.3.pq", "_x/3.pq", "c.pq", "n.txt"):
            archive.writestr(name, "x")
    expected = {
        "": ["a/1.pq", "a/b/2.pq", "c.pq"],
        "a": ["a/1.pq", "a/b/2.pq"],
        "*.pq": ["c.pq"],
        "**/*.pq": ["a/1.pq", "a/b/2.pq", "c.pq"],
        "[a_]*/*.pq": ["a/1.pq"],
        "_*": ["_x/3.pq"],
    }
    for pattern, names in expected.items():
        assert listed(f"zip://{pattern}::{tmp_path}/a.zip", "zip:/") == names, pattern


def test_a_file_named_twice_is_refused(tmp_path):
    make(tmp_path, "1.pq", "2.pq")
    with pytest.raises(ConfigError, match=r"2\.pq is named twice, by .*\*.* and by .*mix\(\)"):
        ListFiles(urls=[f"{tmp_path}/*.pq", f"{tmp_path}/2.pq"]).files()


def test_links_are_followed_and_a_link_back_is_not(tmp_path):
    make(tmp_path, "real/a.parquet", "data/b.parquet")
    (tmp_path / "data/link").symlink_to(tmp_path / "real")
    (tmp_path / "data/c.parquet").symlink_to(tmp_path / "real/a.parquet")
    (tmp_path / "data/loop").symlink_to(tmp_path / "data")
    wanted = ["b.parquet", "c.parquet", "link/a.parquet"]
    assert listed(tmp_path / "data", tmp_path / "data") == wanted
    assert listed(tmp_path / "data/**/*.parquet", tmp_path / "data") == wanted


def test_folders_with_links_to_each_other_are_gone_through_once(tmp_path):
    make(tmp_path, "a/1.parquet", "b/2.parquet")
    (tmp_path / "a/b").symlink_to(tmp_path / "b")
    (tmp_path / "b/a").symlink_to("../a")
    assert listed(tmp_path / "a", tmp_path) == ["a/1.parquet", "a/b/2.parquet"]
    assert listed(tmp_path / "b/**/*.parquet", tmp_path) == ["b/2.parquet", "b/a/1.parquet"]


def test_a_broken_link_is_named(tmp_path):
    make(tmp_path, "a.parquet")
    (tmp_path / "b.parquet").symlink_to(tmp_path / "gone.parquet")
    with pytest.raises(
        MissingFilesError, match=r"b\.parquet is a link to .*gone\.parquet, which does not"
    ):
        ListFiles(urls=tmp_path).files()


@pytest.mark.parametrize("pattern", ["b.parquet", "*.parquet", ""])
def test_a_pipe_by_the_name_of_a_file_is_refused_and_not_waited_for(tmp_path, pattern):
    make(tmp_path, "a.parquet")
    os.mkfifo(tmp_path / "b.parquet")
    with pytest.raises(UnreadableError, match=r"b\.parquet must be a file, got a pipe"):
        ListFiles(urls=tmp_path / pattern).files()


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_what_lies_beside_the_data_is_not_waited_for(tmp_path):
    names = [f"{name}/{file}" for name in ("images/cat", "saved") for file in ("1.png", "1.arrow")]
    make(tmp_path, *names)
    tp.write_memmap(tmp_path / "map", pa.table({"x": [1, 2]}))
    reads: dict[str, Any] = {
        "labels.csv": lambda: tp.read_images(tmp_path / "images", tmp_path / "labels.csv"),
        "saved/state.json": lambda: tp.read_arrow(tmp_path / "saved"),
        "map/_manifest.json": lambda: tp.from_memmap(tmp_path / "map"),
        "bare.bin": lambda: tp.read_memmap(tmp_path / "bare.bin", dtype="uint16", length=2),
    }
    for name, read in reads.items():
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        with pytest.raises(UnreadableError, match=rf"{name} must be a file, got a pipe"):
            list(read())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["x.txt", "x.npy", "x.bin"])
def test_a_pipe_that_takes_the_place_of_a_listed_file_is_not_waited_for(tmp_path, name):
    np.save(tmp_path / "x.npy", np.arange(8))
    (tmp_path / "x.txt").write_text("a\nb\n")
    (tmp_path / "x.bin").write_bytes(b"...")
    files = tp.list_files(tmp_path / name)
    read = {"x.txt": files.read_text, "x.npy": files.read_numpy, "x.bin": files.read_bytes}
    pipe = read[name]()
    len(pipe)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(tp.DataChangedError, match=name):
        list(pipe)


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_output_below_a_folder_of_files_is_not_taken_for_input(tmp_path, scheme):
    root = f"{scheme}{tmp_path}"
    system, path = fsspec.url_to_fs(root)

    def rows(*urls: str) -> list[int]:
        files = tp.list_files([f"{root}/{url}" for url in urls]) if urls else tp.list_files(root)
        return [row["x"] for row in files.read_parquet()]

    def write(name: str, start: int) -> None:
        table = pa.table({"x": range(start, start + 4)})
        tp.from_arrow(table).write_parquet(f"{root}/{name}", num_files=2)

    write("en", 0)
    write("more/de", 4)
    assert rows() == rows("en", "more") == [*range(8)]  # several outputs are what is meant
    with system.open(f"{path}/a.parquet", "wb") as file:
        pq.write_table(pa.table({"x": [8]}), file)
    with pytest.raises(
        ConfigError, match=r"list_files: below the folder .* trainpipes in .*/en: list"
    ):
        rows()
    assert rows("*.parquet", "en") == [8, *range(4)]
    system.rm(f"{path}/en/_manifest.json")
    system.rm(f"{path}/more", recursive=True)
    assert rows() == [8, *range(4)]  # files of unknown origin


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_output_that_is_not_finished_is_read_and_logged(tmp_path, scheme, caplog):
    root = f"{scheme}{tmp_path}/out"
    system, path = fsspec.url_to_fs(root)
    pipe = tp.from_arrow(pa.table({"x": range(8)}))
    pipe.write_parquet(root, num_files=4)
    assert len(list(tp.read_parquet(root))) == 8
    assert not caplog.records
    system.makedirs(f"{path}/_unfinished")  # as a kill leaves it
    system.mv(f"{path}/_manifest.json", f"{path}/_unfinished/about.json")
    system.rm(f"{path}/part-00003.parquet")
    assert [row["x"] for row in tp.read_parquet(root)] == [*range(6)]
    (said,) = [r.getMessage() for r in caplog.records]
    assert f"{tmp_path}/out is not finished: 3 files are there so far" in said


def test_readers_and_names_of_files_agree(tmp_path):
    for reader in READERS:
        for end in suffixes_of(reader):
            assert reader_by_name(f"a{end}") == reader
            files = tp.list_files(make(tmp_path / end, f"x/a{end}", "other.zip"))
            stages: Any = getattr(files, reader)().stages
            with suppress(tp.DataError):  # it is none of its format, but it is found
                stages[1]._open_on(stages[:1])
            assert [name.rpartition("/")[2] for name in found(stages[0])] == [f"a{end}"], reader


def test_what_one_reader_lists_repack_reads(tmp_path):
    for name, content in (("a.md", "one\ntwo\n"), ("b.tab", "x\ty\n1\t2\n")):
        folder = tmp_path / name[0]
        folder.mkdir()
        (folder / name).write_text(content)
        repack(str(folder), tmp_path / f"{name}-out")
    assert [row["text"] for row in tp.read_parquet(tmp_path / "a.md-out")] == ["one", "two"]
    assert list(tp.read_parquet(tmp_path / "b.tab-out")) == [{"x": 1, "y": 2}]
    (tmp_path / "b" / "README.md").write_text("what is here")
    repack(str(tmp_path / "b"), tmp_path / "again")
    assert list(tp.read_parquet(tmp_path / "again")) == [{"x": 1, "y": 2}]


def found(stage: Any) -> list[str]:
    """The names that a stage has listed for the reader that asked."""
    (listed,) = stage._listed.values()
    return list(listed.names)


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path, monkeypatch):
    make(tmp_path, "a.parquet", "secret/b.parquet")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for url in (tmp_path, tmp_path / "**/*.parquet"):
        with pytest.raises(
            UnreadableError, match=r"permission to list .*secret is denied"
        ) as caught:
            ListFiles(urls=url).files()
        assert str(caught.value.path).endswith("secret")


def test_a_file_that_another_program_renames_meanwhile_is_passed_over(tmp_path, monkeypatch):
    make(tmp_path, "a.parquet", "tmp_b.parquet")
    entries = LocalFolders.entries

    def and_rename(tree: Any, folder: str, all_below: bool = False) -> Any:
        found = entries(tree, folder, all_below)
        with suppress(FileNotFoundError):
            (tmp_path / "tmp_b.parquet").rename(tmp_path / "b.parquet")
        return found

    monkeypatch.setattr(LocalFolders, "entries", and_rename)
    assert listed(tmp_path, tmp_path) == ["a.parquet"]
    assert listed(tmp_path / "*.parquet", tmp_path) == ["a.parquet", "b.parquet"]


#: Files, what is listed of their folder, and what is said, to its end.
NOT_THERE: list[tuple[str, str, str]] = [
    ("train/a.parquet train/b.csv valid/c.parquet", "/trian/*.parquet",
     "no file matches '{d}/trian/*.parquet' (did you mean 'train'?); the nearest folder that exists is {d}, "
     "with: train/, valid/"),
    ("train/a.parquet train/b.csv", "/train/*.json",
     "no file matches '{d}/train/*.json'; the nearest folder that exists is {d}/train, with: a.parquet, "
     "b.csv"),
    ("train/a.parquet", "/train/a.parqet",
     "there is no file or folder '{d}/train/a.parqet' (did you mean 'a.parquet'?); the nearest folder that "
     "exists is {d}/train, with: a.parquet"),
    ("a.csv b.json more/c.csv", "",
     "no file that ends in .parquet or .pq in the folder '{d}' or below it; there are: a.csv, b.json, more/. "
     "Name others by list_files(folder, suffix=...), or a glob such as '{d}/*'"),
    (" ".join(f"{n}.csv" for n in range(40)), "/*.parquet",
     "no file matches '{d}/*.parquet'; the nearest folder that exists is {d}, with: 0.csv, 1.csv, 2.csv, "
     "3.csv, 4.csv, 5.csv, … (40 in all)"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "url", "said"), NOT_THERE)
def test_no_match_names_the_nearest_folder_and_what_is_in_it(tmp_path, names, url, said):
    make(tmp_path, *names.split())
    with pytest.raises(MissingFilesError) as caught:
        ListFiles(urls=f"{tmp_path}{url}").files()
    assert str(caught.value) == said.format(d=tmp_path)
    assert isinstance(caught.value, FileNotFoundError)


def test_no_match_elsewhere_is_said_in_the_same_words():
    memory = fsspec.filesystem("memory")
    memory.pipe("/nomatch/train/a.csv", b"x")
    try:
        with pytest.raises(MissingFilesError, match=r"exists is memory:///nomatch, with: train/"):
            ListFiles(urls="memory://nomatch/test/*.parquet").files()
        with pytest.raises(MissingFilesError, match=r"in the folder .* there are: a\.csv"):
            ListFiles(urls="memory://nomatch/train").files()
    finally:
        memory.rm("/nomatch", recursive=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": None}, "got None"),
        ({"urls": {"a"}}, "or a list of them, got {'a'}"),
        ({"urls": 3}, "got 3"),
        ({"urls": ["a", 3]}, r"as text or Path, or a list of them, got \['a', 3\]"),
        ({"urls": [["a"]]}, r"got \[\['a'\]\]"),
        ({"urls": b"a"}, "got b'a'"),
        ({"urls": ""}, "must be a path, folder, glob or URL .*, got ''"),
        ({"suffix": [1]}, r"an end of names such as '\.parquet', .*, got \[1\]"),
        (
            {"storage_options": "anon"},
            r"list_files\(storage_options\) must be a dict of .*, got 'str'",
        ),
    ],
)
def test_options_of_the_wrong_kind_are_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        ListFiles(**{"urls": "a", **options})
    with pytest.raises(MissingFilesError, match="empty list"):
        ListFiles(urls=[])


def test_an_archive_that_is_not_there_or_is_none_is_named(tmp_path):
    with pytest.raises(MissingFilesError, match=r"'zip://\*::.*' cannot be opened: .*gone\.zip"):
        ListFiles(urls=f"zip://*::{tmp_path}/gone.zip").files()
    (tmp_path / "a.zip").write_text("no archive")
    with pytest.raises(
        tp.errors.UnreadableError, match=r"cannot be opened: BadZipFile: .*address right"
    ):
        ListFiles(urls=f"zip://*::{tmp_path}/a.zip").files()


def test_an_unknown_protocol_is_named_with_its_nearest():
    with pytest.raises(
        ConfigError,
        match=r"fsspec has no file system for the protocol 'memori' \(did you mean 'memory'",
    ):
        ListFiles(urls="memori://x").files()


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    def absent(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs") from ModuleNotFoundError("No module", name="s3fs")

    monkeypatch.setattr(fsspec, "url_to_fs", absent)
    with pytest.raises(MissingExtraError, match=r"s3fs, which .*: pip install s3fs$"):
        ListFiles(urls="s3://bucket/x.parquet").files()


def test_nothing_is_listed_before_it_is_needed_and_then_once(tmp_path):
    stage = ListFiles(urls=tmp_path / "*.parquet")
    make(tmp_path, "a.parquet")
    files = stage.files()
    make(tmp_path, "b.parquet")
    assert stage.files() is files
    assert len(files) == 1


def test_the_record_is_text_and_keeps_secrets_to_itself(tmp_path):
    stage = ListFiles(urls=[tmp_path / "a", "b"], storage_options={"secret": "hush"})
    assert stage.options["urls"] == [str(tmp_path / "a"), "b"]
    assert "hush" not in repr(stage)
    assert "'secret': '…'" in repr(stage)
    assert "hush" not in repr(ReadParquet(storage_options={"secret": "hush"}))
    again = ListFiles(**stage.options)
    assert again.options == stage.options
    assert repr(ListFiles(urls="data/*.parquet")) == "list_files('data/*.parquet')"


def test_alone_its_rows_are_the_names(tmp_path):
    make(tmp_path, "2.pq", "10.pq")
    source = ListFiles(urls=tmp_path).open()
    assert source.lengths.tolist() == [2]
    assert source.reader().read(0, 0, 2) == [f"{tmp_path}/2.pq", f"{tmp_path}/10.pq"]
    assert source.place(0, 1).path == f"{tmp_path}/10.pq"
    assert list(source.fingerprint()) == ["files", "bytes", "digests"]


def test_a_fingerprint_knows_names_below_the_common_root_and_sizes(tmp_path):
    def print_of(folder: Path) -> dict[str, object]:
        return ListFiles(urls=folder).open().fingerprint()

    one = print_of(make(tmp_path / "here", "a/1.pq", "b/2.pq"))
    assert print_of(make(tmp_path / "some/where/else", "a/1.pq", "b/2.pq")) == one
    renamed = print_of(make(tmp_path / "renamed", "a/1.pq", "b/3.pq"))
    assert renamed["digests"][0] == one["digests"][0]  # type: ignore[index]
    assert renamed["digests"][1] != one["digests"][1]  # type: ignore[index]
    many = print_of(make(tmp_path / "many", *(f"{n}.pq" for n in range(100))))
    assert many["files"] == 100
    assert len(many["digests"]) == 16  # type: ignore[arg-type]


def test_a_list_of_files_can_be_picked_from_and_pickled(tmp_path):
    make(tmp_path, "1.pq", "2.pq", "3.pq")
    files = ListFiles(urls=tmp_path).files().pick(np.array([2, 0], dtype=np.int64))
    files = pickle.loads(pickle.dumps(files))
    assert files.relative_names() == ["3.pq", "1.pq"]
    assert files.system(0).exists(files.paths[0])


def test_a_filter_on_paths_needs_a_function_and_leaves_some(tmp_path):
    make(tmp_path, "1.pq")
    files = ListFiles(urls=tmp_path)
    with pytest.raises(MissingFilesError, match=r"keeps none of the 1 files, for example .*1\.pq"):
        ReadParquet()._open_on([files, Filter(predicate=lambda path: "train" in path)])
    with pytest.raises(ConfigError, match="an expression needs columns"):
        ReadParquet()._open_on([files, Filter(predicate=pc.field("x") > 1)])
    with pytest.raises(ConfigError, match=r"put it after list_files"):
        ReadParquet()._open_on([])


def test_a_file_whose_name_is_no_text_is_refused_by_its_name(tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet")
    try:
        Path(odd).touch()
    except OSError:
        pytest.skip("this file system has no such names")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")
    listed = tp.list_files(tmp_path)
    assert odd in list(listed)
    with pytest.raises(
        tp.ConfigError, match=r"read_parquet\(\): the name of the file .*is not UTF-8"
    ):
        next(iter(listed.read_parquet()))
    left = listed.filter(lambda path: not path.endswith(odd[-9:])).read_parquet()
    assert [row["x"] for row in left] == [1]


@pytest.mark.parametrize("store", ["here", "memory", "s3"])
def test_a_file_that_is_there_by_its_exact_name_is_no_pattern(store, tmp_path):
    names = ["v[1].jsonl", "v1.jsonl", "what?.jsonl", "whatx.jsonl", "a*.jsonl", "ab.jsonl", "d[2]/x.jsonl",
             "d2/x.jsonl"]  # fmt: skip
    with s3_store("exact") if store == "s3" else nullcontext({}) as options:
        root = {"here": str(tmp_path), "memory": "memory://exact", "s3": "s3://exact"}[store]
        system = fsspec.filesystem({"here": "file"}.get(store, store), **options)
        for name in names:
            path = f"{root}/{name}"
            if store == "here":
                os.makedirs(os.path.dirname(path), exist_ok=True)
            system.pipe_file(path, json.dumps({"name": name}).encode())

        def read(name: str) -> list[str]:
            found = tp.list_files(f"{root}/{name}", storage_options=options).read_json()
            return [row["name"] for row in found]

        for name in names:
            assert read(name) == [name]
        assert read("d[2]") == ["d[2]/x.jsonl"]
        assert read("v[12].jsonl") == ["v1.jsonl"]
        assert read("v?.jsonl") == ["v1.jsonl"]
        with pytest.raises(
            MissingFilesError, match=r"very name, which as a pattern is '.*/w\[\[\]1\]'"
        ):
            read("w[1]")
        assert read("v[[]1].jsonl") == ["v[1].jsonl"]


def test_a_link_to_itself_does_not_stop_a_glob_that_leaves_it_out(tmp_path):
    make(tmp_path, "a.parquet")
    os.symlink("loop", tmp_path / "loop")
    os.symlink("b.txt", tmp_path / "b.txt")
    for urls in (tmp_path, f"{tmp_path}/*.parquet", f"{tmp_path}/**/*.parquet"):
        assert list(tp.list_files(urls)) == [str(tmp_path / "a.parquet")]
    with pytest.raises(
        MissingFilesError, match=r"b\.txt is a link to b\.txt, which leads back to it; repair"
    ):
        list(tp.list_files(f"{tmp_path}/*.txt"))


# Splits


def splits(folder: Path, names: Any) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"n": 1}\n')
    return folder


@pytest.mark.parametrize(
    ("names", "told", "way"),
    [
        (["data/train-00000.jsonl", "data/test-00000.jsonl"], "train, test", "data/train*"),
        (["train/a.jsonl", "val/a.jsonl", "dev/b.jsonl"], "train, validation", "train"),
        (["ultra_train_sft.jsonl", "ultra_test_sft.jsonl"], "train, test", "ultra_train*"),
        (["train-clean/1/a.jsonl", "eval-clean/1/a.jsonl"], "train, validation", "train*"),
        (
            ["Training.jsonl", "Testing.jsonl", "valid.jsonl"],
            "train, test, validation",
            "Training*",
        ),
    ],
)
def test_files_of_several_splits_that_are_read_together_are_told_of(
    names: list[str], told: str, way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = splits(tmp_path, names)
    assert len(list(tp.read_json(folder))) == len(names)
    assert caplog.messages == [
        f"read_json: files of several splits in {folder} are read together: {told}; "
        f"to train on one, name it, as by {folder}/{way}"
    ]
    (row,) = tp.read_json(f"{folder}/{way}")
    list(tp.read_json(folder))
    assert (row, len(caplog.messages)) == ({"n": 1}, 1)
    list(tp.read_json(f"{folder}/**/*.jsonl"))
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    "names",
    [
        ["train/a.jsonl", "train/b.jsonl"],
        ["test/a.jsonl", "val/a.jsonl"],
        ["a/latest.jsonl", "a/trainer.jsonl", "a/contest.jsonl"],
        ["train.jsonl", "test.jsonl", *(f"{n}.jsonl" for n in range(9))],
    ],
)
def test_names_that_tell_no_splits_are_read_without_a_word(
    names: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(list(tp.read_json(splits(tmp_path / "train_test", names)))) == len(names)
    assert not caplog.messages


def test_files_that_are_there_compressed_too_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    splits(tmp_path, ["a.jsonl", "b.jsonl"])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"n": 1}\n'))
    assert len(list(tp.read_json(tmp_path))) == 3
    assert caplog.messages == [
        "read_json: files that are there compressed, too, are read twice: 1, such as "
        f"{tmp_path}/b.jsonl.gz; leave one of each out"
    ]
    (tmp_path / "b.jsonl").unlink()
    list(tp.read_json(tmp_path))
    assert len(caplog.messages) == 1


def test_splits_that_are_named_or_picked_are_read_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = splits(tmp_path, ["train.jsonl", "test.jsonl"])
    list(tp.read_json([f"{folder}/train.jsonl", f"{folder}/test.jsonl"]))
    list(tp.list_files(folder).filter(lambda path: "train" in path).read_json())
    list(tp.list_files([folder], suffix=".jsonl").filter(lambda path: "train" in path).read_json())
    assert not caplog.messages
    list(tp.read_json([folder]))
    assert len(caplog.messages) == 1
