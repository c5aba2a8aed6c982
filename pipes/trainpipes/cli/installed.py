"""What is installed, told without importing it: the library's version, and the recipes of all packages with
their files."""

from __future__ import annotations

import ast
import runpy
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

__all__ = ["RecipeFile", "library_version", "recipe_file", "recipe_names"]

#: The entry points that are recipes, as ``trainpipes.recipe_registry`` has it.
GROUP = "trainpipes.recipes"


@dataclass(frozen=True)
class RecipeFile:
    """Where a recipe is written.

    Args:
        name: of the recipe.
        function: its name in the file.
        module: the file's name where it is installed.
        path: the file.
    """

    name: str
    function: str
    module: str
    path: Path


def library_version() -> str:
    """The version of ``trainpipes``, which takes seconds to import."""
    spec = find_spec("trainpipes")
    assert spec is not None
    assert spec.origin is not None
    return str(runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])


def recipe_names() -> list[str]:
    """The names of all recipes."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def recipe_file(name: str) -> RecipeFile:
    """The file of a recipe, found without importing it if it defines the function that is installed.

    Raises:
        ConfigError: there is no such recipe, or no such file.
    """
    points = {point.value: point for point in entry_points(group=GROUP, name=name)}
    if len(points) == 1:
        (point,) = points.values()
        path = _path_of(point.module)
        if path is not None and point.attr in _functions_in(path):
            return RecipeFile(name, point.attr, point.module, path)
    return _imported(name)


def _path_of(module: str) -> Path | None:
    """The file of a module, without importing the packages that it is in."""
    path: list[str] | None = None
    parts = module.split(".")
    for number in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: number + 1]), path)
        if spec is None:
            return None
        path = (
            None if spec.submodule_search_locations is None else [*spec.submodule_search_locations]
        )
        if path is None and number + 1 < len(parts):
            return None
    found = Path(spec.origin or "") if spec else None
    return found if found is not None and found.suffix == ".py" else None


def _functions_in(path: Path) -> set[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def _imported(name: str) -> RecipeFile:
    """The same by importing the recipe."""
    import inspect

    from trainpipes.errors import ConfigError
    from trainpipes.recipe_registry import find, load

    point: EntryPoint = find(name)
    function = inspect.unwrap(load(point))
    try:
        path = inspect.getsourcefile(function)
    except TypeError:
        path = None
    own, module = getattr(function, "__name__", ""), getattr(function, "__module__", "")
    if path is None or own not in _functions_in(Path(path)) or module not in sys.modules:
        raise ConfigError(
            f"recipe {name!r} is installed as {point.value}, which is no function that stands in a file of "
            "Python: look where its package comes from"
        )
    return RecipeFile(name, own, module, Path(path))
