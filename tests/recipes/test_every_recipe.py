"""Every recipe resumes exactly, on any topology, and stands in all places where recipes are told."""

from __future__ import annotations

import ast
import importlib
from functools import partial
from pathlib import Path

import pytest

import trainpipes as tp
import trainpipes_recipes
from every_recipe import EVERY
from laws import assert_ranks_agree, assert_resumes_elsewhere
from resuming import check_resume, goes_on_exactly
from trainpipes.testing import digest

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(trainpipes_recipes.__all__)
#: Those that may keep token ids on disk.
KEPT = ("classification", "sft", "seq2seq", "pretrain", "masked_lm", "chat", "preference")


#: Of the variants of a recipe one in two is resumed often.
SELDOM = [name for name in EVERY if " / " in name][::2]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SELDOM else n for n in EVERY]
)
def test_a_resume_is_exact(name: str, folder: Path) -> None:
    pipe = EVERY[name](folder)
    if pipe._iteration.plan.chain.endless:
        check_resume(pipe, points=3, limit=20, epochs=1, every=7, processes=0)
    else:  # before some batches, and of each recipe in the next epoch, too
        goes_on_exactly(lambda: tp.Pipeline(pipe.stages), epochs=1 if " / " in name else 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_resume_before_any_batch_is_exact(name: str, folder: Path) -> None:
    pipe = EVERY[name](folder)
    limit = 20 if pipe._iteration.plan.chain.endless else None
    check_resume(pipe, limit=limit, epochs=2)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", EVERY)
def test_ranks_together_give_the_sequence_of_one_and_others_go_on_with_it(
    name: str, folder: Path
) -> None:
    pipe, turn = EVERY[name](folder), list(EVERY).index(name)
    assert_ranks_agree(pipe, turn)
    assert_resumes_elsewhere(pipe, turn + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_the_laws_hold_for_every_number_of_ranks_in_every_way(name: str, folder: Path) -> None:
    assert_ranks_agree(EVERY[name](folder))
    assert_resumes_elsewhere(EVERY[name](folder))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", KEPT)
def test_token_ids_that_are_kept_give_the_same_batches(
    name: str, folder: Path, tmp_path: Path
) -> None:
    make = partial(EVERY[name], folder)

    def two_epochs(pipe: tp.Pipeline) -> list[list[str]]:
        return [[digest(batch) for batch in pipe] for _ in range(2)]

    fresh = two_epochs(make())
    for _ in range(2):  # cold, then warm
        assert two_epochs(make(cache=str(tmp_path))) == fresh
    assert tp.cache.info(tmp_path).blocks > 0
    pipe = make()
    next(iter(pipe))
    resumed = make(cache=str(tmp_path))
    resumed.load_state_dict(pipe.state_dict() or {})
    assert [digest(batch) for batch in resumed] == fresh[0][1:]


def test_no_recipe_is_missing_here() -> None:
    assert {name.split(" / ")[0] for name in EVERY} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_tell_of_it(name: str) -> None:
    told = (ROOT / "docs" / "recipes.md").read_text()
    assert f"\n## {name}\n" in told
    assert f"trainpipes_recipes/{name}.py" in told


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_its_file_stays_valid(name: str) -> None:
    """It names what is public, and nothing by dots."""
    tree = ast.parse((Path(trainpipes_recipes.__file__).parent / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level
            module = str(node.module)
            if module.startswith("trainpipes"):
                names = {alias.name for alias in node.names}
                assert names <= set(importlib.import_module(module).__all__), module
                assert module == "trainpipes" or module.startswith("trainpipes_recipes.")
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("trainpipes.") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_")
