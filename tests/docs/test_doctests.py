"""The examples in docstrings give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import trainpipes
import trainpipes_recipes


def modules():
    """Those that have examples."""
    for package in (trainpipes, trainpipes_recipes):
        root = Path(package.__file__).parent
        for path in sorted(root.rglob("*.py")):
            if ">>> " in path.read_text():
                parts = (package.__name__, *path.relative_to(root).with_suffix("").parts)
                yield ".".join(part for part in parts if part != "__init__")


MODULES = list(modules())


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name):
    try:
        module = importlib.import_module(name)
    except trainpipes.MissingExtraError as error:
        pytest.skip(str(error))
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    # The classes of nodes have the texts of the stages' classes, whose examples are theirs.
    finder = doctest.DocTestFinder(recurse=name != "trainpipes.nodes")
    for test in finder.find(module, name):
        assert not runner.run(test).failed


def test_there_are_examples():
    assert len(MODULES) > 30
