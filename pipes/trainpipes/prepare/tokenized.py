"""Rows of files that ``tokenize`` has written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError, SchemaError
from trainpipes.filesystems.places import MANIFEST, Place
from trainpipes.interfaces.quarantine import OnError
from trainpipes.pipeline.chain import Pipeline
from trainpipes.sources.files.file_reader import FileBlocks
from trainpipes.stages.chat_template import ChatTemplate
from trainpipes.stages.tokenize import Tokenize
from trainpipes.stages.tokenizing import TokenizedBy
from trainpipes.state.identity import said
from trainpipes.tokenizers.load import load
from trainpipes.writers.output_folder import ABOUT

#: The stages that make ids, by their names in a manifest.
MAKERS: dict[str, Any] = {"tokenize": Tokenize, "chat_template": ChatTemplate}


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
    folders = _folders(source)
    about: Any = next(filter(None, folders.values()), None)
    if about is None:
        return None
    stages = about["pipeline"]["stages"]
    for folder, manifest in folders.items():
        if manifest is None or manifest["pipeline"]["stages"] != stages:
            raise ConfigError(
                f"{caller}: {folder} and {next(iter(folders))} were not tokenized by the same pipeline: "
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
    for stage in stages:
        if stage["stage"] in made_by and "tokenizer" in stage:
            _check(caller, stage, tokenizer, made_by[stage["stage"]])
    return rows.then(TokenizedBy(tokenizer, about["tokenized"]["ids"], on_error=on_error))


def _check(
    caller: str, saved: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any]
) -> None:
    """Raise ConfigError for the first option that differs; one of ``...`` may be anything but None."""
    given = {name: value for name, value in options.items() if value is not ...}
    now = {"tokenizer": load(tokenizer).fingerprint()}
    if saved["tokenizer"] == json.loads(json.dumps(now["tokenizer"])):
        now = MAKERS[saved["stage"]](tokenizer, **given).identity()
    now = json.loads(json.dumps(now))
    for name in ("tokenizer", *options):
        before, present = saved.get(name), now.get(name)
        if options.get(name) is ...:
            if before is None:
                raise ConfigError(
                    f"{caller}: the files were tokenized without {name}, for another recipe: tokenize the "
                    "texts for this one"
                )
        elif before != present:
            raise ConfigError(
                f"{caller}({name}): the files were tokenized with {said(before)}, and now it is "
                f"{said(present)}: give the same, or tokenize the texts again"
            )


def _folders(source: FileBlocks) -> dict[str, dict[str, Any] | None]:
    """What is said of the files in each folder; None of those that ``tokenize`` has not written."""
    abouts: dict[str, dict[str, Any] | None] = {}
    files = source.files
    for number, (name, path) in enumerate(zip(files.names, files.paths, strict=True)):
        folder = str(name).rpartition("/")[0]
        if folder in abouts:
            continue
        place = Place(folder, "tokenize", files.system(number), str(path).rpartition("/")[0])
        abouts[folder] = _about(place, MANIFEST)
        if abouts[folder] is None and _about(place, ABOUT):
            raise ConfigError(
                f"{folder} is not finished: some of its files are still to be made; tokenize again, which "
                "goes on where it was",
                path=folder,
            )
    return abouts


def _about(place: Place, name: str) -> dict[str, Any] | None:
    about: Any = None
    with suppress(OSError, ValueError, RecursionError):
        about = json.loads(place.read(name))
    ours = isinstance(about, dict) and {"tokenized", "pipeline"} <= about.keys()
    return about if ours else None
