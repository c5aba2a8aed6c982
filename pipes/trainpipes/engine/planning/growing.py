"""Folders and tables that grow: the files of an epoch, or the version of a run, as rank 0 found them and as a
state keeps them.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from typing import Any

from trainpipes.engine.planning.inputs import Inputs
from trainpipes.errors import ConfigError, StateError, shown
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import CombiningSource, RepeatStage, stages_within

#: The key of a state that has the files.
FILES = "files"
#: Most characters of that key.
MOST_TEXT = 1 << 20
#: Most bytes of names that are unpacked from it.
MOST_NAMES = 256 << 20


def grows(stages: Sequence[Stage]) -> bool:
    """Whether an epoch has the files that stand there when it begins."""
    return any(stage.traits.grows for stage in stages_within(stages))


def kept_in_states(stages: Sequence[Stage]) -> list[Stage]:
    """The sources of which states name the files of an epoch, or the version."""
    return [s for s in stages_within(stages) if s.traits.grows or s.traits.pins]


def refuse_repeat(stages: Sequence[Stage]) -> None:
    """Raise ConfigError where files are listed for each epoch, and epochs have no end of their own."""
    listing = next((s for s in stages_within(stages) if s.traits.grows), None)
    rolls = (s for s in stages_within(stages) if isinstance(s, RepeatStage) or s.traits.endless)
    if listing is not None and (repeat := next(rolls, None)) is not None:
        raise ConfigError(
            f"{listing} lists files when an epoch begins, and {repeat} makes one iteration of several "
            "epochs: leave it out, and iterate the Loader once for each epoch; or leave out refresh"
        )


def of_files(stages: Sequence[Stage], files: Sequence[Sequence[str] | None]) -> list[Stage]:
    """The stages, with the files of an epoch in place of the present files; None leaves that."""
    return _given(stages, iter(files))


def _given(stages: Sequence[Stage], files: Iterator[Sequence[str] | None]) -> list[Stage]:
    found: list[Stage] = []
    for stage in stages:
        if isinstance(stage, CombiningSource):
            stage = stage.of_chains([_given(chain, files) for chain in stage.chains])
        elif kept_in_states([stage]) and (names := next(files)) is not None:
            stage = stage._resolved(only=tuple(names))
        found.append(stage)
    return found


def listed_files(inputs: Inputs) -> str:
    """The files of growing folders, for a state. Opens the source."""
    names = [source.epoch_files for source in _lists(inputs)]
    text = b64encode(zlib.compress(json.dumps(names).encode(), 9)).decode()
    if len(text) > MOST_TEXT:
        raise ConfigError(
            f"list_files(refresh) must be left out where a state has no room for the names of the files, "
            f"got {sum(map(len, names)):,} files; write the rows to fewer files, or make a pipeline of the "
            "files of each epoch, list_files(names), and keep the names beside the checkpoint"
        )
    return text


def versions(inputs: Inputs) -> list[Any]:
    """What tells the files of growing folders from others of the same names."""
    lists = [getattr(source, "files", None) for source in _lists(inputs)]
    return [None if f is None else [f.names, f.sizes.tolist(), f.stamps] for f in lists]


def _lists(inputs: Inputs) -> Iterator[Any]:
    opener: Any = inputs.chain.stages[0]
    if isinstance(opener, CombiningSource):
        # A mix has its parts in the order of their names, not of its chains.
        names = getattr(opener, "sources", ())
        for part in [inputs.mixed[name] for name in names] or inputs.parts:
            yield from _lists(part)
    elif kept_in_states([opener]):
        yield inputs.source


def of_run(files: Sequence[Sequence[str]], stages: Sequence[Stage]) -> list[Sequence[str] | None]:
    """What all epochs of a run have of these; None for what each epoch lists."""
    sources = kept_in_states(stages)
    return [None if s.traits.grows else names for s, names in zip(sources, files, strict=True)]


def files_of(text: Any, count: int) -> list[list[str]]:
    """The files in a state, those of ``count`` growing folders."""
    try:
        unpack = zlib.decompressobj()
        found = json.loads(unpack.decompress(b64decode(text, validate=True), MOST_NAMES))
        good = unpack.eof and all(isinstance(names, list) for names in found)
        good &= all(
            isinstance(name, str) and "/" in name for source_names in found for name in source_names
        )
    except (ValueError, TypeError, zlib.error):
        good = False
    if not good:
        raise StateError(f"{FILES}: damaged, got {shown(text)}; load the state as it was saved")
    if len(found) != count:
        raise StateError(
            f"{FILES}: saved of {len(found)} folders with refresh, now there are {count}; build the pipeline "
            "as it was when the state was saved, or load the state of an epoch's start"
        )
    return found  # type: ignore[no-any-return]
