"""What is installed, by which names, and what importing it brings."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import trainpipes as tp
from trainpipes._internal.checks import pip_install

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
SOURCES = [
    path for place in ("pipes", "recipes", ".ci") for path in sorted((ROOT / place).rglob("*.py"))
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

WITH_EXTRAS = re.compile(r"\[([a-z0-9_, -]+)\]")
INSTALLS = re.compile(r"pip install ([^`#\n]+)")


def name_of(requirement: str) -> str:
    return re.split(r"[<>=\[;]", requirement.strip("'\""))[0].strip().lower()


REQUIRED = {name_of(one) for one in PROJECT["dependencies"]}
OFFERED = {name_of(one) for several in EXTRAS.values() for one in several}


def test_the_version_is_that_of_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", tp.__version__)
    text = (ROOT / "CHANGELOG.md").read_text()
    named = re.findall(r"^## \[(.+)\]", text, re.MULTILINE)
    assert named[:2] == ["Unreleased", tp.__version__]
    assert f"\nversion: {tp.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_all_extras_are_in_all() -> None:
    (requirement,) = EXTRAS["all"]
    named = requirement[requirement.index("[") + 1 : -1].split(",")
    assert len(named) == len(set(named))
    brought = {one for extra in named for one in EXTRAS[extra]}
    assert brought == {one for extra in EXTRAS if extra != "all" for one in EXTRAS[extra]}


def test_what_is_to_be_installed_can_be() -> None:
    lines = [
        (path.relative_to(ROOT), line)
        for path in [*SOURCES, *PAGES]
        for line in INSTALLS.findall(path.read_text())
    ]
    assert len(lines) > 5
    named = 0
    for place, line in lines:
        assert not re.match(r"['\"]?trainpipes\b", line), (
            f"{place}: on no index: pip install {line}"
        )
        for extras in WITH_EXTRAS.findall(line):
            named += 1
            assert {one.strip() for one in extras.split(",")} <= EXTRAS.keys(), f"{place}: {line}"
    assert named


def calls_of(path: Path, *names: str) -> list[ast.Call]:
    """The calls of functions of these names in a file."""
    text = path.read_text()
    if not any(f"{name}(" in text for name in names):
        return []
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [one for one in calls if ast.unparse(one.func) in names]


def packages_asked_for() -> set[str]:
    """The packages of all ``need(...)`` and ``pip_install(...)`` in the source."""
    calls = [call for path in SOURCES for call in calls_of(path, "need", "pip_install")]
    return {str(one.args[0].value) for one in calls if isinstance(one.args[0], ast.Constant)}


#: What an extra would bring a second build of torch for.
BY_HAND = {"torchvision"}


def test_what_an_error_says_to_install_an_extra_brings() -> None:
    asked = packages_asked_for()
    assert len(asked) > 5
    for package in asked | {"s3fs", "gcsfs", "adlfs"}:
        line = pip_install(package)
        name = name_of(line.removeprefix("pip install "))
        assert name in OFFERED | REQUIRED | BY_HAND, line
        if line.count("'") == 2:  # with versions: those of the extra
            assert line.split("'")[1] in {one for several in EXTRAS.values() for one in several}


#: What ``import torch`` does not bring, and this may: all else takes its time, and is for later.
MAY_IMPORT = {"trainpipes", "pyarrow", "fsspec", "numpy", *sys.stdlib_module_names}
#: What fsspec imports wherever it is installed.
MAY_IMPORT |= {"backports", "zstandard", "lz4", "snappy", "isal", "lzmaffi"}
NOT_AT_ONCE = {
    "pyarrow.dataset", "pyarrow.flight", "pyarrow.substrait", "fsspec.implementations.http",
    "trainpipes.look.explain", "numpy.testing",
}  # fmt: skip


def test_importing_brings_nothing_that_takes_its_time() -> None:
    code = (
        "import json, sys, torch; before = set(sys.modules); import trainpipes;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = set(json.loads(done.stdout))
    tops = {name.split(".")[0] for name in brought if not name.startswith(("_", "cython"))}
    assert tops <= MAY_IMPORT
    assert not brought & NOT_AT_ONCE


# Extras


INTEGRATIONS = {
    "accelerate": ["accelerate.py"],
    "hf": ["../writers/hf_dataset.py", "transformers/__init__.py"],
    "lightning": ["lightning.py"],
    "ray": ["ray.py", "../writers/ray_dataset.py"],
    "transformers": ["transformers/__init__.py"],
    "trl": ["trl.py", "transformers/__init__.py"],
}


@pytest.mark.parametrize("extra", INTEGRATIONS)
def test_an_extra_brings_what_its_integration_asks_for(extra: str) -> None:
    folder = ROOT / "pipes" / "trainpipes" / "integrations"
    calls = [call for name in INTEGRATIONS[extra] for call in calls_of(folder / name, "need")]
    assert calls
    assert {ast.literal_eval(call.args[0]) for call in calls} <= set(map(name_of, EXTRAS[extra]))


def refused_below() -> dict[str, str]:
    """The oldest version that is not refused, of packages for which there is one."""
    calls = [call for path in SOURCES for call in calls_of(path, "need")]
    pairs = [(call.args[0], word.value) for call in calls for word in call.keywords]
    return {ast.literal_eval(package): ast.literal_eval(oldest) for package, oldest in pairs}


@pytest.mark.parametrize("package", ["transformers", "datasets", "accelerate"])
def test_no_extra_brings_a_version_that_is_refused(package: str) -> None:
    brought = [one for several in EXTRAS.values() for one in several if name_of(one) == package]
    assert brought
    for one in brought:
        oldest = re.search(r">=([\d.]+)", one)
        assert oldest is not None, one
        assert numbers_of(oldest[1]) >= numbers_of(refused_below()[package]), one


def test_the_docs_name_the_oldest_version_that_is_not_refused() -> None:
    table = (ROOT / "docs" / "frameworks.md").read_text().split("## Versions")[1]
    named = re.findall(r"^\| (\w+)[^|]*\|[^|]*\| ([\d.]+) or later", table, re.MULTILINE)
    oldest = refused_below()
    said = {name.lower(): version for name, version in named if name.lower() in oldest}
    assert said == {name: oldest[name] for name in ("transformers", "accelerate")}


def numbers_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_every_extra_is_tried_alone() -> None:
    (uses,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / ".ci" / "each_extra.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "USES"
    )
    assert uses.keys() == EXTRAS.keys() - {"all"}
    assert ".ci/each_extra.py" in (ROOT / ".ci" / "run").read_text()


def test_s3fs_and_moto_that_are_tested_fit_one_botocore() -> None:
    """docs/servers.md sends readers to these versions."""
    lines = (ROOT / "constraints.txt").read_text().split()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    assert pinned["boto3"] == pinned["botocore"]
    assert {"s3fs", "aiobotocore", "moto"} <= pinned.keys()
    assert "-c constraints.txt" in (ROOT / "docs/servers.md").read_text()


def test_the_list_of_what_is_needed_is_that_of_what_is_tested() -> None:
    made = runpy.run_path(str(ROOT / ".ci" / "sbom.py"))
    assert made["FILE"].read_text() == made["sbom"](), "python .ci/sbom.py writes it"
    listed = json.loads(made["FILE"].read_text())
    versions = {one["name"]: one["version"] for one in listed["components"]}
    assert {"torch", "torchdata", "pyarrow", "numpy", "fsspec", "sympy"} <= versions.keys()
    assert all(one["licenses"] for one in listed["components"])
    for name, version in versions.items():
        assert metadata.version(name).partition("+")[0] == version


def test_the_list_is_in_the_wheel() -> None:
    built = SETTINGS["tool"]["hatch"]["build"]["targets"]
    assert built["wheel"]["sbom-files"] == ["sbom.cdx.json"]
    assert "sbom.cdx.json" in built["sdist"]["only-include"]


HASHED = re.compile(r"^([\w-]+)==(\S+) \\\n    --hash=sha256:([0-9a-f]{64})$", re.MULTILINE)


def test_all_that_builds_the_wheel_is_known_by_its_content() -> None:
    text = (ROOT / ".ci" / "dist.txt").read_text()
    found = {name: version for name, version, _ in HASHED.findall(text)}
    assert len(found) == text.count("==") == text.count("sha256")
    made = runpy.run_path(str(ROOT / ".ci" / "sbom.py"))
    assert {"build", "hatchling"} <= found.keys()  # what these need, a build asks for
    for name, version in found.items():
        assert made["PINNED"][canonicalize_name(name)] == version
    assert "--require-hashes -r .ci/dist.txt" in (ROOT / "Makefile").read_text()
