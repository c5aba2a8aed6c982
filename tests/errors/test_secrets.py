"""What others read (a repr, an error, a log, a picture, a state) holds no password and no key."""

import functools
import json
import logging
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

import trainpipes as tp
from trainpipes.errors import hidden, without_query
from trainpipes.filesystems import retry

SECRET = "hunter2SECRET"


def fetch(row: Any, api_key: str | None = None, times: int = 1) -> Any:
    return row


@dataclass
class Client:
    api_key: str


class Fetch(tp.RowStage):
    address: str
    api_key: str

    def apply(self, row: Any) -> Any:
        raise ValueError("cannot fetch")


def rows(tmp_path: Path) -> tp.Pipeline:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c", "d"]}), path)
    return tp.list_files(str(path)).read_parquet()


def pipelines(tmp_path: Path) -> dict[str, tp.Pipeline]:
    plain = rows(tmp_path)
    return {
        "named": plain.map(functools.partial(fetch, api_key=SECRET, times=3)),
        "by position": plain.map(functools.partial(fetch, {}, SECRET)),
        "nested": plain.map(functools.partial(functools.partial(fetch, api_key=SECRET), times=3)),
        "in a dict": plain.map(functools.partial(fetch, {"api_key": SECRET})),
        "in an object": plain.map(functools.partial(fetch, Client(SECRET))),
        "own stage": plain.then(Fetch("https://host/x", api_key=SECRET)),
        "own address": plain.then(Fetch(f"https://me:{SECRET}@host/x", api_key="")),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "named",
        "by position",
        "nested",
        "in a dict",
        "in an object",
        "own stage",
        "own address",
    ],
)
def test_an_argument_that_is_a_secret_is_in_no_text_of_a_pipeline(
    tmp_path: Path, kind: str
) -> None:
    pipe = pipelines(tmp_path)[kind].batch(2)
    loader = tp.Loader(pipe)
    texts = [
        repr(pipe), repr(loader), str(pipe.explain()), pipe.explain().mermaid,
        json.dumps(pipe.state_dict()), json.dumps(loader.state_dict()), json.dumps(pipe.explain().to_dict()),
    ]  # fmt: skip
    assert not [text for text in texts if SECRET in text]
    with pytest.raises(tp.ConfigError) as caught:
        pipe.to_yaml()
    assert SECRET not in str(caught.value)


def test_other_arguments_of_a_partial_are_shown(tmp_path: Path) -> None:
    pipe = pipelines(tmp_path)["named"]
    assert "map(partial(fetch (test_secrets.py:" in repr(pipe)
    assert repr(pipe).endswith("api_key='…', times=3))")


def test_a_state_loads_with_the_same_secret_and_with_no_other(tmp_path: Path) -> None:
    def piped(key: str) -> tp.Pipeline:
        return rows(tmp_path).map(functools.partial(fetch, api_key=key)).batch(2)

    state = piped(SECRET).state_dict()
    assert state is not None
    tp.Loader(piped(SECRET)).load_state_dict(state)
    with pytest.raises(tp.StateError, match="stages/map/fn/arguments/1/api_key") as caught:
        tp.Loader(piped("another")).load_state_dict(state)
    assert SECRET not in str(caught.value)
    assert "another" not in str(caught.value)


URL = f"memory://key:{SECRET}/with/slash@folder/*.parquet"


def test_a_url_with_a_password_is_in_no_repr_and_in_no_error() -> None:
    pipe = tp.list_files(URL)
    assert repr(pipe) == "list_files('memory://…@folder/*.parquet')"
    with pytest.raises(tp.MissingFilesError) as caught:
        pipe.explain()
    error = caught.value
    for text in (str(error), repr(error), error.message, str(pickle.loads(pickle.dumps(error)))):
        assert SECRET not in text
    with pytest.raises(tp.ConfigError) as refused:
        pipe.to_yaml()
    assert SECRET not in str(refused.value)


def test_a_row_that_is_an_address_is_shown_without_its_password() -> None:
    shown = tp.from_dataset([{"image": f"https://me:{SECRET}@host/a.jpg"}]).show(1)
    assert "https://…@host/a.jpg" in repr(shown)
    assert SECRET not in repr(shown) + shown._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(("text", "told"), [
    ("https://TOKEN@host/a.git", "https://…@host/a.git"),
    ("hf://datasets/org/name@main/a.parquet", "hf://datasets/org/name@main/a.parquet"),
    ("abfs://container@account/x", "abfs://container@account/x"),
    ("http://host:8080/a@b", "http://host:8080/a@b"),
    ("https://h/a?X-Amz-Signature=abc&page=2", "https://h/a?X-Amz-Signature=…&page=…"),
    ("s3://bucket/part-?.parquet", "s3://bucket/part-?.parquet"),
    ("zip://*.csv::https://me:pw@host/a.zip", "zip://*.csv::https://…@host/a.zip"),
    ("give api_key=... or password=None", "give api_key=... or password=None"),
    ("Client(api_key='abc', region='eu')", "Client(api_key='…', region='eu')"),
    ('{"secret": "abc", "secrets": 3}', '{"secret": \'…\', "secrets": 3}'),
    ("ünïcode://ü:p@h", "ünïcode://…@h"),
    ("GET /a?sig=abc&page=2 was refused", "GET /a?sig=…&page=… was refused"),
    ("https://h/a?to=https://k/b&sig=abc", "https://h/a?to=…&sig=…"),
    ("https://me:pw@h/x: me:pw@h is refused", "https://…@h/x: …@h is refused"),
    ("", ""),
])  # fmt: skip
def test_only_what_is_secret_is_hidden(text: str, told: str) -> None:
    assert hidden(text) == told
    assert hidden(told) == told


def test_a_url_within_a_query_is_part_of_the_query() -> None:
    assert without_query("https://me@host/a?of=https://other/b") == "https://host/a"


class Flaky(LocalFileSystem):  # type: ignore[misc]
    """A file system that does not answer the first time, and whose names hold a password."""

    cachable = False
    protocol = "flaky"
    tries = 0

    def unstrip_protocol(self, name: str) -> str:
        return f"http://me:{SECRET}@host/{name}"

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        Flaky.tries += 1
        if Flaky.tries == 1:
            raise ConnectionResetError("reset")
        return {"name": path}


def test_a_server_that_does_not_answer_is_logged_without_password(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "_last_message", 0.0)
    with caplog.at_level(logging.WARNING, "trainpipes"):
        retry.Requests(tp.Retry(10)).call(Flaky(), "info", "a.parquet")
    assert "http://…@host/a.parquet" in caplog.text
    assert SECRET not in caplog.text
