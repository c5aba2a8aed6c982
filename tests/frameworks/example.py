"""The scripts in docs/examples as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["EXAMPLES", "example"]

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def example(name: str) -> Any:
    """docs/examples/NAME.py, imported from its path.

    Args:
        name: without ".py"; with its folder, if it has one.
    """
    called = "example_" + name.replace("/", "_")
    spec = importlib.util.spec_from_file_location(called, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[called] = module  # for dataclasses, which look there
    spec.loader.exec_module(module)
    return module
