"""Stages of one's own: no option of theirs is lost."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torchdata.nodes import BaseNode

import trainpipes as tp
from trainpipes.errors import ConfigError
from trainpipes.runtime.run import Run
from trainpipes.runtime.stage import Stage
from trainpipes.stages.map import Map


class AddSuffix(Stage):
    def __init__(self, source: BaseNode[Any] | None = None, suffix: str = "!") -> None:
        super().__init__(source, suffix=suffix)
        self._suffix = suffix

    def process(self, run: Run) -> Run:
        return run.with_block(run.block.with_data([row + self._suffix for row in run.block.rows()]))


class Forgets(AddSuffix):
    def __init__(self, source: BaseNode[Any] | None = None, suffix: str = "!") -> None:
        Stage.__init__(self, source)
        self._suffix = suffix


class Misspells(Stage):
    def __init__(self, source: BaseNode[Any] | None = None, suffix: str = "!") -> None:
        super().__init__(source, sufix=suffix)


class HasNoSource(Stage):
    def __init__(self, suffix: str = "!") -> None:
        super().__init__(suffix=suffix)


class TakesMany(Stage):
    def __init__(self, source: BaseNode[Any] | None = None, *names: str) -> None:
        super().__init__(source, names=names)


class RecordsTooMuch(Stage):
    def __init__(self, source: BaseNode[Any] | None = None) -> None:
        super().__init__(source, suffix="!")


class AddsLater(Map):
    """Has an option beside those of the stage that it is made of."""

    def __init__(
        self, source: BaseNode[Any] | None = None, *, times: int = 1, **options: Any
    ) -> None:
        super().__init__(source, **options)
        self.options["times"] = times


@pytest.mark.parametrize(
    ("stage", "options", "lost", "handed"),
    [
        (Forgets, {"suffix": "?"}, "suffix", "(source, suffix=suffix)"),
        (Forgets, {}, "suffix", "(source, suffix=suffix)"),
        (Misspells, {"suffix": "?"}, "suffix", "(source, suffix=suffix)"),
        (HasNoSource, {"suffix": "?"}, "source", "(source, suffix=suffix)"),
        (TakesMany, {}, "names", "(source, names=names)"),
        (RecordsTooMuch, {}, "suffix", "(source)"),
    ],
)
def test_an_option_that_is_not_handed_on_is_refused(
    stage: Any, options: dict[str, Any], lost: str, handed: str
) -> None:
    with pytest.raises(ConfigError, match=f"would lose {lost}: ") as caught:
        stage(**options)
    assert f"super().__init__{handed}" in str(caught.value)
    assert stage.__name__ in str(caught.value)


def test_options_that_are_handed_on_are_kept_on_every_way() -> None:
    pipe = tp.from_dataset(["a", "b"]).then(AddSuffix(suffix="?"))
    assert repr(pipe).endswith(".add_suffix('?')")
    assert list(pipe) == list(pickle.loads(pickle.dumps(pipe))) == ["a?", "b?"]
    assert list(tp.from_dataset(["a"]).then(AddSuffix())) == ["a!"]


def test_options_may_be_recorded_after_those_of_the_class_above() -> None:
    stage = AddsLater(fn=str.upper, times=3)
    assert stage.options["times"] == 3
    pipe = tp.from_dataset(["a"]).then(stage)
    assert pipe.stages[-1].options["times"] == 3
    assert list(pipe) == ["A"]
