"""The examples in docstrings give what they show."""

import doctest
import importlib
import pkgutil
from contextlib import suppress

import pytest

import trainpipes
import trainpipes_recipes


def modules():
    for package in (trainpipes, trainpipes_recipes):
        yield package.__name__
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if module.name.rsplit(".", 1)[-1] != "__main__":
                yield module.name


@pytest.mark.parametrize("name", sorted(modules()))
def test_examples_of(name):
    try:
        module = importlib.import_module(name)
    except trainpipes.MissingExtraError as error:
        pytest.skip(str(error))
    # The classes of nodes have the texts of the stages' classes, whose examples are theirs.
    finder = doctest.DocTestFinder(recurse=name != "trainpipes.nodes")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in finder.find(module, name):
        assert not runner.run(test).failed


def test_there_are_examples():
    count = 0
    for name in modules():
        with suppress(trainpipes.MissingExtraError):
            found = doctest.DocTestFinder().find(importlib.import_module(name))
            count += sum(bool(test.examples) for test in found)
    assert count > 30
