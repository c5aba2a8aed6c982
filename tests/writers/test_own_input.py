"""What is written is never part of what is read: the next run would read each row twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import ConcatDataset, Subset

import trainpipes as tp
from trainpipes.prepare import repack, tokenize


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parquet files in a folder ``d`` and below it, others in ``elsewhere``, and JSON in ``j``."""
    monkeypatch.chdir(tmp_path)
    for folder in ("d", "d/more", "elsewhere"):
        Path(folder).mkdir()
        table = pa.table({"x": [1, 2], "text": ["a", "b"]})
        pq.write_table(table, f"{folder}/a.parquet")
    Path("link").symlink_to("d")
    Path("j").mkdir()
    Path("j/a.jsonl").write_text('{"x": 1, "text": "a"}\n')
    return tmp_path


def parquet(files: Any, **options: Any) -> tp.Pipeline:
    return tp.list_files(files, **options).read_parquet()


WRITERS: dict[str, Callable[[tp.Pipeline, str], Any]] = {
    "write_parquet": lambda pipe, out: pipe.write_parquet(out),
    "repack": lambda pipe, out: repack(pipe, out),
    "tokenize": lambda pipe, out: tokenize(pipe.tokenize("bytes", columns="text"), out),
}


def everything() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def refused(
    write: Callable[[], Any], match: str = "is within the input .* give a folder beside"
) -> None:
    before = everything()
    with pytest.raises(tp.ConfigError, match=match):
        write()
    assert everything() == before


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_below_the_one_that_is_read_is_refused_by_every_writer(name):
    refused(lambda: WRITERS[name](parquet("d"), "d/out"))
    refused(lambda: WRITERS[name](parquet("d/**/*.parquet"), "d/out"))
    WRITERS[name](parquet("d"), "out")


@pytest.mark.parametrize("name", WRITERS)
def test_names_that_the_writer_gives_are_those_that_a_glob_may_find(name):
    Path("d/a.parquet").rename("d/part-7.parquet")
    refused(lambda: WRITERS[name](parquet("d/**/part-*.parquet"), "d/out"))
    WRITERS[name](parquet("d/**/part-[789]*.parquet"), "d/out")


def test_json_arrow_and_memory_maps_are_refused_too():
    json = tp.list_files("j").read_json()
    refused(lambda: json.write_json("j/out"))
    refused(lambda: json.write_json("j/out", compression="gzip"))
    Path("e").mkdir()
    parquet("d").write_arrow("e/in")
    refused(lambda: tp.list_files("e").read_arrow().write_arrow("e/out"))
    tp.write_memmap("e/map", parquet("d").select("x"))
    numbers = tp.list_files("e/map/part-00000.x.npy").read_numpy()
    tp.write_memmap("e/again", numbers)
    refused(lambda: tp.write_memmap("e/new", tp.list_files("e").read_numpy()))
    refused(lambda: tp.write_memmap("j/new", json.select("x")))


INSIDE: list[tuple[Any, str]] = [
    ("d", "d/out"),
    ("d", "d/deep/er/out"),
    ("./d/", "d/../d/out"),
    ("d", "link/out"),
    ("link", "d/out"),
    ("d/more/..", "d/out"),
    ("d/**", "d/out"),
    ("d/*", "d/out"),
    ("*/*.parquet", "new"),
    ("d/*.parquet", "d/out.parquet"),
    ("d/[mo]*", "d/out"),
    (["elsewhere/a.parquet", "d"], "d/out"),
]


@pytest.mark.parametrize(("files", "out"), INSIDE)
def test_a_folder_whose_files_the_same_listing_would_find_is_refused(files, out):
    refused(lambda: parquet(files).write_parquet(out))
    absolute = [os.path.abspath(one) for one in ([files] if isinstance(files, str) else files)]
    refused(lambda: parquet(absolute).write_parquet(Path(out)))
    refused(lambda: parquet(files).write_parquet(out, overwrite=True))
    refused(lambda: parquet(files).write_parquet("file://" + os.path.abspath(out)))


OUTSIDE: list[tuple[Any, str]] = [
    ("d", "out"),
    ("d", "d-out"),
    ("d", "d/_out"),
    ("d", "d/.out"),
    ("d/*.parquet", "d/out"),
    ("d/more", "d/out"),
    ("d/more/*", "d/out"),
    ("d/*/a.parquet", "d/out"),
    ("d/*/[a-m]*.parquet", "d/out"),
    ("d/a.parquet", "d/out"),
    (["d/a.parquet", "d/more/a.parquet"], "d/out"),
]


@pytest.mark.parametrize(("files", "out"), OUTSIDE)
def test_a_folder_that_the_same_listing_does_not_find_is_written_to(files, out):
    rows = list(parquet(files))
    parquet(files).write_parquet(out)
    assert list(parquet(files)) == rows


def test_files_of_another_format_are_not_found_by_the_same_listing():
    rows = list(tp.list_files("j").read_json())
    tp.list_files("j").read_json().write_parquet("j/out")
    assert list(tp.list_files("j").read_json()) == rows
    both = tp.list_files("d", suffix=[".parquet", "l"]).read_parquet()
    refused(lambda: both.write_json("d/out"))


def test_what_repack_finds_by_itself_is_of_any_format():
    refused(lambda: repack("j", "j/out"))
    repack(tp.list_files("j").read_json(), "j/out")


def test_a_link_within_the_input_leads_to_what_is_read():
    Path("d/other").symlink_to("../elsewhere")
    refused(lambda: parquet("d").write_parquet("elsewhere/out"))
    refused(lambda: parquet("d/*/*").write_parquet("elsewhere/out"))
    parquet("d/*.parquet").write_parquet("elsewhere/out")


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_folder_that_is_read_is_not_written_to(overwrite):
    parquet("d").write_parquet("first")
    for files in ("first", "first/*.parquet", ["first/part-00000.parquet", "d"]):
        refused(
            lambda files=files: parquet(files).write_parquet("first", overwrite=overwrite),
            "holds files that are read|is within",
        )


@pytest.mark.parametrize("how", ["mix", "concat", "zip", "concat in mix", "mix in mix"])
def test_inputs_of_several_sources_are_looked_at(how):
    other, own = parquet("elsewhere"), parquet("d/more")
    both, even = {"a": other, "b": own}, {"a": 1, "b": 1}
    pipe = {
        "mix": lambda: tp.mix(both),
        "concat": lambda: tp.concat(other, own),
        "zip": lambda: tp.zip(other, own.rename({"x": "y", "text": "t"})),
        "concat in mix": lambda: tp.mix({"a": other, "b": tp.concat(other, own)}),
        "mix in mix": lambda: tp.mix({"a": other, "b": tp.mix(both, weights=even)}, weights=even),
    }[how]()
    refused(lambda: pipe.write_parquet("d/more/out"))
    pipe.write_parquet("d/out")


def test_rows_that_are_read_from_no_files_are_written_anywhere():
    tp.from_dataset([{"x": 1}]).write_parquet("d/out")
    tp.write_memmap("d/map", tp.from_dataset([{"x": 1}]))


def _mapped_by_hugging_face(path: str) -> tp.Pipeline:
    """What ``datasets.Dataset.from_file`` is made of."""
    file = f"{path}/part-00000.arrow"
    data = SimpleNamespace(table=pa.ipc.open_file(pa.memory_map(file)).read_all())
    files = [{"filename": file}]
    return tp.from_hf(SimpleNamespace(data=data, _indices=None, format={}, cache_files=files))


MAPPED: dict[str, Callable[[Any], Any]] = {
    "from_memmap": lambda p: tp.from_memmap(p).map(dict).write_memmap(p, overwrite=True),
    "from_memmap, by a link": lambda p: tp.from_memmap("map-link").write_memmap(p, overwrite=True),
    "another writer": lambda p: tp.from_memmap(p).write_parquet(p, overwrite=True),
    "repack": lambda p: repack(tp.from_memmap(p), p, overwrite=True),
    "concat": lambda p: tp.concat(tp.from_memmap(p)).write_memmap(p, overwrite=True),
    "from_dataset": lambda p: tp.from_dataset(tp.read_memmap(p)).write_json(p, overwrite=True),
    "subset": lambda p: tp.from_dataset(Subset(tp.read_memmap(p), [0])).write_json(
        p, overwrite=True
    ),
    "from_hf": lambda p: _mapped_by_hugging_face("arrow").write_arrow("arrow", overwrite=True),
    "of read_memmap": lambda p: tp.write_memmap(p, tp.read_memmap(p), overwrite=True),
    "datasets in a row": lambda p: tp.write_memmap(
        p, ConcatDataset([tp.read_memmap(p)]), overwrite=True
    ),
    "of an array": lambda p: tp.write_memmap(
        p, {"x": np.load(f"{p}/part-00000.x.npy", mmap_mode="r")[:1]}, overwrite=True
    ),
    "not overwritten": lambda p: tp.from_memmap(p).write_memmap(p),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPPED)
def test_what_is_mapped_into_memory_is_not_written_to(name):
    parquet("d").select("x").write_memmap("map")
    parquet("d").write_arrow("arrow")
    Path("map-link").symlink_to("map")
    refused(lambda: MAPPED[name]("map"), "holds files that are read: give a folder beside")
    assert [int(row["x"]) for row in tp.from_memmap("map")] == [1, 2] * 2
    tp.from_memmap("map").write_memmap("beside")


def test_bare_files_that_are_mapped_are_not_written_to():
    np.arange(4, dtype=np.uint16).tofile("elsewhere/a.bin")
    read = tp.from_memmap("elsewhere/*.bin", dtype="uint16", length=2)
    refused(lambda: read.write_memmap("elsewhere", overwrite=True), "holds files that are read")


@pytest.mark.parametrize(
    ("read", "out"),
    [
        ("e/rows.arrow", "e/rows.arrow"),
        ("rows-link.arrow", "e/rows.arrow"),
        ("e/rows.arrow", "e-link/rows.arrow"),
        ("e", "e/more.arrow"),
        ("e-link", "e/more.arrow"),
    ],
)
def test_a_data_set_of_rows_is_not_written_over_what_is_read(read, out):
    parquet("d").to_map_dataset("e/rows.arrow")
    Path("e-link").symlink_to("e")
    Path("rows-link.arrow").symlink_to("e/rows.arrow")
    files = tp.read_arrow(read)
    refused(lambda: files.take(1).to_map_dataset(out), "is read: give a path|is within the input")
    refused(lambda: tp.concat(parquet("d"), files).to_map_dataset(out), "is read|is within")
    assert len(files.take(1).to_map_dataset("beside.arrow")) == 1


def test_a_data_set_that_rows_come_from_is_not_written_over():
    data = parquet("d").to_map_dataset("e/rows.arrow")
    refused(lambda: tp.from_dataset(data).to_map_dataset("e/rows.arrow"), "rows.arrow is read")
    assert len(tp.read_arrow("e/rows.arrow").to_map_dataset("e/more.arrow")) == len(data)


LINKED: dict[str, Callable[[str], Any]] = {
    "a link to a file": lambda out: tp.read_parquet("latest.parquet").write_parquet(
        out, overwrite=True
    ),
    "a folder of links": lambda out: parquet("links").write_json(out, overwrite=True),
    "repack": lambda out: repack("links", out, shuffle=True, overwrite=True),
    "tokenize": lambda out: tokenize(
        tp.read_parquet("hard.parquet").tokenize("bytes", columns="text"), out, overwrite=True
    ),
    "mapped": lambda out: tp.from_memmap("*.bin", dtype="uint8", length=2).write_memmap(
        out, overwrite=True
    ),
}


@pytest.mark.parametrize("name", LINKED)
def test_links_to_files_lead_to_what_is_read(name):
    parquet("d").write_parquet("v1")
    Path("latest.parquet").symlink_to("v1/part-00000.parquet")
    Path("hard.parquet").hardlink_to("v1/part-00000.parquet")
    Path("mapped.bin").hardlink_to("v1/part-00000.parquet")
    Path("links").mkdir()
    Path("links/a.parquet").symlink_to("../v1/part-00000.parquet")
    refused(lambda: LINKED[name]("v1"), "v1 holds files that are read: give a folder beside")
    assert tp.read_parquet("latest.parquet").write_parquet("v2").rows == 4
