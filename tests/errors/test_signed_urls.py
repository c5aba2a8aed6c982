"""A URL that is signed, or has a user and a password: nothing that is printed, logged or written holds a
value of its query, and a state loads when only the signature is another one."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pytest

import trainpipes as tp
from faulty_server import Fault, FaultyServer, serving, write_each_format
from s3_store import address_of, s3_store
from trainpipes._internal.messages import clean
from trainpipes.filesystems import retry
from trainpipes.look import inspect_files
from trainpipes.prepare import repack, tokenize
from trainpipes.sources.files import file_bytes

pytest.importorskip("aiohttp")

#: Stands in every place of a URL where a secret may stand.
MARK = "hush7"
QUERY = (
    f"?key={MARK}A&code={MARK}B/x,y;z&pwd={MARK}C)'d&Policy={MARK}D~_-&X-Amz-Signature={MARK}E%2F%2B"
    f"&versionId={MARK}F&se={MARK}G&{MARK}H&={MARK}I#access_token={MARK}J"
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(file_bytes, "SMALL_FILE", 0)  # small ones are not asked for again
    monkeypatch.setattr(retry, "_last_message", -1e9)
    monkeypatch.setenv("TRAINPIPES_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "data"
    found.mkdir()
    write_each_format(found)
    return found


@pytest.fixture
def server(folder: Path) -> Iterator[FaultyServer]:
    with serving(folder) as found:
        yield found


READERS: dict[str, Callable[..., tp.Pipeline]] = {
    "a.parquet": tp.Pipeline.read_parquet,
    "a.arrow": tp.Pipeline.read_arrow,
    "a.jsonl": partial(tp.Pipeline.read_json, index=True),
    "a.csv": partial(tp.Pipeline.read_csv, index=True),
    "a.txt": partial(tp.Pipeline.read_text, index=True),
    "a.npy": tp.Pipeline.read_numpy,
    "a.tar": partial(tp.Pipeline.read_webdataset, index=True),
    "a.bin": tp.Pipeline.read_bytes,
}


def signed(server: FaultyServer, name: str, query: str = QUERY) -> str:
    host = server.url.removeprefix("http://")
    return f"http://{MARK}user:{MARK}pa:ss@{host}/{name}{query}"


#: For requests of which none succeeds.
SHORT = tp.Retry(20, max_attempts=3)


def pipeline(
    server: FaultyServer, name: str, tries: tp.Retry | None = None, query: str = QUERY
) -> Any:
    names = ("a.txt", "a.csv") if name == "a.bin" else (name,)
    urls = [signed(server, one, query) for one in names]
    return READERS[name](tp.list_files(urls, retry=tries or tp.Retry(20)))


def printed(error: BaseException) -> str:
    """All that is told of an error and of what led to it: as printed, and as attributes."""
    texts = ["".join(traceback.format_exception(error))]
    todo, seen = [error], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        told = (one, one.args, vars(one), getattr(one, "filename", ""))
        texts += [str(one), *map(repr, told), *getattr(one, "__notes__", [])]
        todo += [e for e in (one.__cause__, one.__context__) if e is not None]
        todo += getattr(one, "exceptions", ())
    # Lines of this file are what a user has written.
    return "\n".join(texts)


def written(folder: Path) -> list[str]:
    """Files below a folder whose name or content has the mark."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(p) for p in files if MARK in str(p) or MARK.encode() in p.read_bytes()]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", READERS)
def test_what_is_printed_and_kept_of_a_pipeline_has_no_value_of_a_query(
    server: FaultyServer,
    tmp_path: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(logging.DEBUG, "trainpipes"), warnings.catch_warnings(record=True) as told:
        pipe = pipeline(server, name)
        cached = pipe if name in ("a.npy", "a.bin") else pipe.cache(tmp_path / "rows")
        cached = cached.batch(4)
        loader = tp.Loader(cached)
        batches = list(loader)
        again = list(tp.Loader(cached))
        places = tp.locate(cached, 0).places
        texts = [
            repr(pipe), str(pipe), *map(repr, pipe.stages), repr(loader), str(pipe.explain()),
            pipe.explain().mermaid, repr(cached.show(1)), str(pipe.show(1)),
            pipe.show(1)._repr_mimebundle_()["text/html"], json.dumps(loader.state_dict()),
            json.dumps(pipeline(server, name).state_dict()), json.dumps(pipe.explain().to_dict()),
            str(places), repr(places), str(list(places)),

        ]  # fmt: skip
    assert len(batches) == len(again) > 0
    with pytest.raises(tp.ConfigError, match=r"\$\{") as refused:
        pipe.to_yaml()
    texts.append(printed(refused.value))
    out, err = capfd.readouterr()
    texts += [out, err, caplog.text, *(str(one.message) for one in told)]
    assert [text for text in texts if MARK in text] == []
    assert written(tmp_path) == []
    assert "key=…" in repr(pipe)


NEVER: dict[str, Fault] = {
    **{str(status): (status, {}) for status in (403, 404, 410, 412, 416, 500, 301)},
    "301 in a circle": (301, {"Location": f"/a.txt?x={MARK}"}),
    "close": "close",
    "half": "half, then close",
    "garbage": (200, {"body": "garbage " * 9000}),
}


def faults() -> Iterator[Any]:
    """Each fault for each format; those of one format each, in turn, take seconds."""
    names = ["a.parquet", "a.jsonl", "a.tar", "a.bin", "a.arrow", "a.npy"]
    for number, (fault, when) in enumerate(product(NEVER, ["listing", "reading"])):
        for name in names:
            quick = name == names[number % len(names)]
            yield pytest.param(name, when, fault, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.sample(11)
@pytest.mark.parametrize(("name", "when", "fault"), list(faults()))
def test_what_is_printed_of_an_error_has_no_value_of_a_query(
    server: FaultyServer, name: str, when: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = pipeline(server, name, SHORT).batch(4)
    if when == "reading":
        pipe.explain()
    server.fault = lambda *_: NEVER[fault]
    caught: BaseException | None = None
    with caplog.at_level(logging.DEBUG, "trainpipes"):
        try:
            rows = list(pipe)
        except Exception as error:
            caught = error
    if caught is None:  # rows as they are in the answer
        assert (name, fault) == ("a.bin", "garbage")
        assert sum(map(len, rows)) == 2
        return
    assert MARK not in printed(caught), printed(caught)
    assert MARK not in caplog.text
    assert isinstance(caught, tp.TrainpipesError)
    assert f"/{'a.txt' if name == 'a.bin' else name}" in str(caught)
    assert MARK not in str(pickle.loads(pickle.dumps(caught)))
    assert str(caught.path).endswith("#…")


def test_what_led_to_an_error_is_told_with_its_class_and_its_traceback(
    server: FaultyServer,
) -> None:
    server.fault = lambda *_: (403, {})
    with pytest.raises(tp.UnreachableError) as caught:
        list(pipeline(server, "a.parquet", SHORT))
    text = printed(caught.value)
    assert "ClientResponseError: 403, message='Forbidden', url=" in text
    assert "fsspec/implementations/http.py" in text


@pytest.mark.parametrize(("num_workers", "fault"), [(2, "403"), (0, "close"), (2, "garbage")])
def test_errors_of_worker_processes_have_no_value_of_a_query(
    server: FaultyServer, capfd: pytest.CaptureFixture[str], num_workers: int, fault: str
) -> None:
    pipe = pipeline(server, "a.jsonl", SHORT).sharding_filter(2).batch(4)
    len(pipe)
    server.fault = lambda *_: NEVER[fault]
    with pytest.raises(tp.TrainpipesError) as caught:
        list(tp.Loader(pipe, num_workers=num_workers))
    out, err = capfd.readouterr()
    assert MARK not in printed(caught.value) + out + err


def test_an_error_of_a_users_function_is_told_without_the_query_of_its_file(
    server: FaultyServer,
) -> None:
    def fails(row: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        list(pipeline(server, "a.jsonl").map(fails))
    assert "a.jsonl?key=…" in "".join(caught.value.__notes__)
    assert MARK not in printed(caught.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.tar", "a.bin"])
def test_a_state_loads_with_another_signature_of_the_same_file(
    server: FaultyServer, name: str
) -> None:
    def batches(signature: str, version: str = "3") -> tp.Pipeline:
        query = f"?X-Amz-Signature={signature}/b%2F&versionId={version}#{signature}"
        found: tp.Pipeline = pipeline(server, name, query=query)
        if name == "a.bin":
            return found.select("bytes")
        return found.shuffle(20, seed=1).sample(0.8, seed=2).batch(4)

    first = batches("a/c")
    iterator = iter(first)
    wanted = [next(iterator)]
    state = json.loads(json.dumps(first.state_dict()))
    wanted += iterator
    second = batches("another/one")
    assert second.state_dict() == batches("a/c").state_dict()
    second.load_state_dict(state)
    assert list(map(str, second)) == list(map(str, wanted[1:]))
    with pytest.raises(tp.StateError, match="data/digests"):
        batches("a/c", version="4").load_state_dict(state)


def test_files_that_a_query_tells_apart_are_different_data(server: FaultyServer) -> None:
    def rows(*queries: str) -> tp.Pipeline:
        urls = [f"{server.url}/a.parquet?{query}" for query in queries]
        return tp.list_files(urls).read_parquet().batch(4)

    for one, other in [("file=1", "file=2"), ("key=1", "key=2")]:
        state = rows(one, other).state_dict()
        assert state == rows(one, other).state_dict()
        with pytest.raises(tp.StateError, match="data/digests"):
            rows(other, one).load_state_dict(state)


def test_an_index_is_used_again_only_for_the_same_url(server: FaultyServer, tmp_path: Path) -> None:
    def asked(query: str) -> int:
        server.asked.clear()
        len(tp.list_files(f"{server.url}/a.jsonl{query}").read_json(index=str(tmp_path / "at")))
        return sum(one.startswith("GET") for one in server.asked)

    assert asked(f"?key={MARK}") > asked(f"?key={MARK}")
    assert asked(f"?key={MARK}2") > 0
    assert written(tmp_path) == []


@pytest.mark.parametrize("kind", ["value", "user"])
def test_a_config_is_not_written_with_a_secret_and_reads_it_from_the_environment(
    server: FaultyServer, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = f"{server.url}/a.parquet?v={MARK}"
    url = value if kind == "value" else signed(server, "a.parquet", "")
    pipe = tp.list_files([url]).read_parquet()
    with pytest.raises(tp.ConfigError, match=r"write \$\{VARIABLE\} there, by hand") as refused:
        pipe.to_yaml(tmp_path / "c.yaml")
    assert MARK not in printed(refused.value)
    monkeypatch.setenv("DATA_URL", url)
    text = "stages:\n- list_files: ${DATA_URL}\n- read_parquet\n"
    (tmp_path / "c.yaml").write_text(f"{text}- take: x\n")
    with pytest.raises(tp.ConfigError) as caught:
        tp.load(tmp_path / "c.yaml")
    assert MARK not in printed(caught.value)
    (tmp_path / "c.yaml").write_text(text)
    assert list(tp.load(tmp_path / "c.yaml")) == list(pipe)
    assert written(tmp_path) == []


def test_what_is_written_of_a_signed_source_has_no_value_of_its_query(
    server: FaultyServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = pipeline(server, "a.parquet")
    pipe.write_parquet(tmp_path / "copy")
    repack(pipe, tmp_path / "packed", seed=1)
    found = inspect_files(signed(server, "a.parquet"))
    out, err = capfd.readouterr()
    assert MARK not in str(found) + repr(found) + out + err
    assert written(tmp_path) == []


class Fetch(tp.RowStage):
    addresses: list[str]

    def apply(self, row: Any) -> Any:
        return row


def test_urls_in_an_option_of_an_own_stage_are_in_no_text_and_in_no_state() -> None:
    def pipe(signature: str, version: str) -> tp.Pipeline:
        url = f"https://host/a?versionId={version}&sig={signature}"
        return tp.from_dataset([{"a": 1}]).then(Fetch([url, f"{url}&x=1"]))

    one = pipe(f"{MARK}A", f"{MARK}B")
    state = one.state_dict()
    assert MARK not in repr(one) + json.dumps(state) + json.dumps(one.explain().to_dict())
    assert pipe(f"{MARK}C", f"{MARK}B").state_dict() == state
    assert pipe(f"{MARK}A", f"{MARK}D").state_dict() != state


@pytest.mark.parametrize("long", [100, 1000, 100_000])
def test_a_long_value_is_cut_only_after_its_secrets_are_hidden(long: int) -> None:
    url = f"https://host/{'p' * long}?sig={'s' * 50}{MARK}"
    with pytest.raises(tp.ConfigError) as caught:
        tp.list_files("x").take(url)  # type: ignore[arg-type]
    shown = tp.from_dataset([{"a": url, "b": [url], "c": {"d": url}}]).show(1)
    assert MARK not in str(caught.value) + repr(shown) + shown._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(
    ("what", "fault"),
    [("tokenizer", "403"), ("labels", "404"), ("tokenizer", "garbage"), ("labels", "close")],
)
def test_other_files_than_those_of_rows_are_told_without_their_secrets_too(
    server: FaultyServer, monkeypatch: pytest.MonkeyPatch, what: str, fault: str
) -> None:
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.4)
    monkeypatch.setattr(retry.Requests.__init__, "__defaults__", (SHORT, retry.READING))
    server.fault = lambda _, name, __: NEVER[fault] if "beside" in name else None
    url = signed(server, "beside.json")
    files = tp.list_files(signed(server, "a.jsonl"), retry=SHORT)
    reads: dict[str, Callable[[], tp.Pipeline]] = {
        "labels": lambda: files.read_images(labels=url),
        "tokenizer": lambda: files.read_json().tokenize(url, columns="text"),
    }
    with pytest.raises(tp.TrainpipesError) as caught:
        list(reads[what]())
    assert MARK not in printed(caught.value)


def test_errors_of_s3_hold_no_storage_options_and_no_version(
    folder: Path, server: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with s3_store("told") as found:
        server.upstream = address_of(found)
        options = {"endpoint_url": server.url, "key": f"{MARK}key", "secret": f"{MARK}secret"}
        fsspec.filesystem("s3", **options).put(str(folder / "a.parquet"), "told/a.parquet")
        server.asked.clear()
        texts = []
        for name in (f"a.parquet?versionId={MARK}", "a.parquet", "*.parquet"):
            for fault in ("403", "404", "500", "close"):
                server.fault = partial(lambda found, *_: found, NEVER[fault])
                given = {"storage_options": options, "retry": SHORT}
                pipe = tp.list_files(f"s3://told/{name}", **given)
                with pytest.raises(tp.TrainpipesError) as caught:
                    list(pipe.read_parquet())
                texts += [repr(pipe), printed(caught.value)]
        server.fault = lambda *_: None
        pipe = tp.list_files("s3://told/*", storage_options=options).read_parquet()
        len(pipe)
        texts += [str(pipe.explain()), json.dumps(pipe.state_dict()), pipe.to_yaml()]
    assert [text for text in [*texts, caplog.text] if MARK in text] == []


def test_what_stands_for_an_error_keeps_its_kind_its_notes_and_what_led_to_it() -> None:
    class Odd(ConnectionError):
        request = f"https://host/?sig={MARK}"

    error = Odd(f"https://host/?sig={MARK}")
    error.add_note(f"https://host/?{MARK}")
    error.__cause__ = FileNotFoundError(2, "no", f"https://host/?a={MARK}")
    error.__context__ = UnicodeDecodeError("utf-8", b"a", 0, 1, f"https://host/?a={MARK}")
    error.__context__.__context__ = ExceptionGroup(f"s3://a:{MARK}@b", [KeyError(MARK)])
    found = clean(error)
    assert MARK not in printed(found)
    assert isinstance(found, ConnectionError)
    assert str(found) == "Odd: https://host/?sig=…"
    assert (found.__cause__.errno, found.__cause__.filename) == (2, "https://host/?a=…")  # type: ignore[union-attr]
    assert found.__notes__ == ["https://host/?…"]


def late(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": "a" * (1 // (row["id"] < 20))}


def test_a_writer_tells_none(server, tmp_path):
    with pytest.raises(ZeroDivisionError) as caught:
        tokenize(pipeline(server, "a.jsonl").map(late).tokenize("bytes"), tmp_path / "ids")
    assert "while making part-00000.parquet of http://" in printed(caught.value)
    assert MARK not in printed(caught.value)
    assert written(tmp_path / "ids") == []
    done = tp.from_dataset([{"x": 1}]).write_json(f"memory://me:{MARK}@host/out")
    assert MARK not in f"{done} {done!r}"
    assert done.files == (f"memory://me:{MARK}@host/out/part-00000.jsonl",)
    fsspec.filesystem("memory").store.clear()
