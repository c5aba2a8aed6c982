"""Scripts for classification and tables, stopped and started again, train as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trainpipes_recipes import train_classification, train_tabular
from trainpipes_recipes.training.log import read_log

SCRIPTS: dict[str, tuple[Callable[[list[str]], None], list[str]]] = {
    "classification": (
        train_classification.main,
        ["--width", "16", "--layers", "1", "--heads", "2", "--max-length", "32"],
    ),
    "tabular": (train_tabular.main, []),
}


@pytest.fixture
def as_before() -> Iterator[None]:
    """Training sets torch's seed and its deterministic mode."""
    state, deterministic = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_rng_state(state)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_goes_on_where_it_was_stopped(name: str, tmp_path: Path) -> None:
    """Made rows: short texts, and which of two words each begins with."""
    words = ["cat" if k % 3 else "bread" for k in range(96)]
    columns = {"text": [f"{word} {k}" for k, word in enumerate(words)], "label": words}
    pq.write_table(pa.table({**columns, "size": list(range(96))}), tmp_path / "rows.parquet")
    main, options = SCRIPTS[name]
    options = [*options, "--files", str(tmp_path / "rows.parquet"), "--device", "cpu"]
    main([*options, "--steps", "12", "--checkpoint-dir", str(tmp_path / "whole")])
    for steps in ("5", "12"):
        main([*options, "--steps", steps, "--checkpoint-dir", str(tmp_path / "twice")])
    whole = read_log(tmp_path / "whole" / "log.jsonl")
    assert [step.number for step in whole] == list(range(1, 13))
    assert read_log(tmp_path / "twice" / "log.jsonl") == whole


@pytest.mark.usefixtures("as_before")
def test_a_label_that_cannot_be_one_ends_a_script_with_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "label": ["x", None]}), tmp_path / "rows.parquet")
    with pytest.raises(SystemExit, match=r"^DataError: .*a null.*rows\.parquet.*row 1\)$"):
        train_classification.main(
            ["--files", str(tmp_path / "rows.parquet"), "--checkpoint-dir", str(tmp_path)]
        )
