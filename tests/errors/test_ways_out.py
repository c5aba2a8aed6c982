"""Errors give the rule, the value in one line, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

import trainpipes as tp
from trainpipes.errors import shown


def rows() -> tp.Pipeline:
    return tp.from_dataset(range(3))


def test_a_value_of_several_lines_is_shown_in_one() -> None:
    assert shown(rows().batch(2)) == "from_dataset(range of 3 items).batch(2)"
    assert shown(np.zeros((2, 2))) == "array([[0., 0.], [0., 0.]])"
    assert shown(pa.schema({"a": "int64", "b": "string"})) == "a: int64 b: string"
    assert shown("one\ntwo") == r"'one\ntwo'"
    with pytest.raises(tp.ConfigError) as caught:
        tp.WorkQueue(rows().batch(2))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_of_what_is_nested_some_levels_are_shown() -> None:
    deep: dict[str, Any] = {}
    for _ in range(30):
        deep = {"a": deep}
    assert shown(deep, 1000) == "{'a': " * 8 + "{...}" + "}" * 8


#: What is wrong, the error, and its way out.
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a source in the middle": (
        lambda: list(rows().then(tp.from_dataset([1]).stages[0])), tp.ConfigError,
        "cannot come after from_dataset(): make two pipelines, and join them by concat()",
    ),
    "no batch in an epoch": (
        lambda: list(rows().batch(4, drop_last=True).repeat()), tp.DataError,
        "gives no batch; check that it has rows, and leave out drop_last, take() and skip()",
    ),
    "one state to merge": (
        lambda: tp.merge_states({}), tp.StateError,  # type: ignore[arg-type]
        "must be a list of the states of all ranks, got dict",
    ),
    "no state to merge": (
        lambda: tp.merge_states([]), tp.StateError, "must be the states of all ranks, got none"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_way_out_is_said(name: str) -> None:
    call, kind, way = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    assert way in str(caught.value)


class AskedInWorker(list):  # type: ignore[type-arg]
    """A dataset that asks a Loader for its state."""

    def __init__(self, loader: tp.Loader) -> None:
        super().__init__([0])
        self.loader = loader

    def __getitem__(self, index: Any) -> str:
        next(iter(self.loader))
        try:
            self.loader.state_dict()
        except tp.StateError as error:
            return str(error)
        return "nothing"


def test_a_loader_in_the_worker_of_a_data_loader_says_what_to_give_instead() -> None:
    asked = DataLoader(AskedInWorker(tp.Loader(rows())), batch_size=None, num_workers=1)
    (told,) = asked
    assert "give the pipeline to the DataLoader in place of the Loader" in told
