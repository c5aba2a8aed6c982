"""Rows of files that ``tokenize`` has written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.pipeline import Pipeline
from trainpipes.sources.files.file_reader import FileBlocks
from trainpipes.sources.files.folders import MANIFEST
from trainpipes.sources.remote.retry import Requests
from trainpipes.stages.chat_template import ChatTemplate
from trainpipes.stages.targets import OnError
from trainpipes.stages.tokenize import Tokenize
from trainpipes.stages.tokenizing import TokenizedBy
from trainpipes.state.identity import said
from trainpipes.storage.output_folder import ABOUT
from trainpipes.tokenizers.load import load


def tokenized_rows(
    rows: Pipeline,
    tokenizer: Any,
    columns: Sequence[str],
    *,
    caller: str,
    made_by: Mapping[str, Mapping[str, Any]],
    on_error: OnError | None = None,
) -> Pipeline | None:
    """Rows of token ids with the tokenizer that made them; None where the files are not of ``tokenize``."""
    source = Plan.of(rows.stages, quiet=True).inputs.source
    if not isinstance(source, FileBlocks) or source.schema is None:
        return None
    manifests = _manifests(source)
    about = next((found for found in manifests.values() if found is not None), None)
    if about is None:
        return None
    for folder, found in manifests.items():
        if found is None or found["pipeline"]["stages"] != about["pipeline"]["stages"]:
            raise ConfigError(
                f"{caller}: {folder} and {next(iter(manifests))} were not tokenized by the same pipeline: "
                "give files of one",
                path=folder,
            )
    lacking = [name for name in columns if name not in source.schema.names]
    if lacking:
        raise SchemaError(
            f"{caller} needs a column {lacking[0]!r}, and the files that were tokenized have "
            f"{source.schema.names}: tokenize them for this recipe, trainpipes tokenize ... --recipe "
            f"{caller}",
            stage=caller,
        )
    for stage in about["pipeline"]["stages"]:
        if stage["stage"] in made_by and "tokenizer" in stage:
            _check(caller, stage, tokenizer, made_by[stage["stage"]])
    return rows.then(TokenizedBy(tokenizer, about["tokenized"]["ids"], on_error=on_error))


def _check(
    caller: str, saved: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any]
) -> None:
    kinds: Mapping[str, Any] = {"tokenize": Tokenize, "chat_template": ChatTemplate}
    for name in [name for name, value in options.items() if value is ...]:
        if saved.get(name) is None:
            raise ConfigError(
                f"{caller}: the files were tokenized without {name}, for another recipe: tokenize the texts "
                "for this one"
            )
    options = {name: value for name, value in options.items() if value is not ...}
    now: dict[str, Any] = {"tokenizer": load(tokenizer).fingerprint()}
    if saved["tokenizer"] == json.loads(json.dumps(now["tokenizer"])):
        now = kinds[saved["stage"]](tokenizer, **options).identity()
    for name in ("tokenizer", *options):
        before, present = saved.get(name), json.loads(json.dumps(now.get(name)))
        if before != present:
            raise ConfigError(
                f"{caller}({name}): the files were tokenized with {said(before)}, and now it is "
                f"{said(present)}: give the same, or tokenize the texts again"
            )


def _manifests(source: FileBlocks) -> dict[str, dict[str, Any] | None]:
    """What is said of the files in each folder; None of those that ``tokenize`` has not written."""
    found: dict[str, dict[str, Any] | None] = {}
    files = source.files
    for number, (name, path) in enumerate(zip(files.names, files.paths, strict=True)):
        folder, beside = (str(one).rpartition("/")[0] for one in (name, path))
        if folder in found:
            continue
        found[folder] = None
        for mark in (MANIFEST, ABOUT):
            about: Any = None
            with suppress(OSError, ValueError, RecursionError):
                requests = Requests(files.retry_seconds)
                about = json.loads(
                    requests.call(files.system(number), "cat_file", f"{beside}/{mark}")
                )
            if isinstance(about, dict) and "tokenized" in about:
                if mark == ABOUT:
                    raise ConfigError(
                        f"{folder} is not finished: some of its files are still to be made; tokenize again, "
                        "which goes on where it was",
                        path=folder,
                    )
                found[folder] = about
                break
    return found
