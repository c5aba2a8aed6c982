"""What a wheel and an sdist must hold, and must not, beyond what twine and check-wheel-contents look at:
``python check_packages.py trainpipes-….whl trainpipes-….tar.gz``, in the repository's root."""

# ruff: noqa: T201

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

#: Bytes, at most.
LARGEST = {".whl": 1_500_000, ".gz": 2_500_000}
PACKAGES = ("trainpipes", "trainpipes_recipes")


def faults_of_wheel(wheel: Path) -> Iterator[str]:
    """What is wrong with a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        points = next((n for n in names if n.endswith(".dist-info/entry_points.txt")), None)
        offered = archive.read(points).decode() if points else ""
    for package in PACKAGES:
        if f"{package}/py.typed" not in names:
            yield f"{package}/py.typed is not there"
    for name in names:
        top, *rest = name.split("/")
        if top in PACKAGES and (Path(name).suffix not in (".py", ".typed") or "tests" in rest):
            yield f"{name} is no code of the library"
    if not any(n.endswith("/licenses/LICENSE") for n in names):
        yield "the licence is not there"
    if not any(n.endswith(".dist-info/sboms/sbom.cdx.json") for n in names):
        yield "the list of what it needs is not there"
    if "[trainpipes.recipes]" not in offered:
        yield "the recipes are not offered as entry points"
    if "trainpipes = trainpipes.cli:main" not in offered:
        yield "the command is not offered"


def faults_of_sdist(sdist: Path) -> Iterator[str]:
    """What is wrong with an sdist: it is the repository, as git knows it, and its metadata."""
    with tarfile.open(sdist) as archive:
        held = {n.partition("/")[2] for n in archive.getnames() if not archive.getmember(n).isdir()}
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    tracked = {name for name in listed.stdout.splitlines() if Path(name).exists()}
    yield from (f"{name} is not there" for name in sorted(tracked - held))
    yield from (
        f"{name} is not in the repository" for name in sorted(held - tracked - {"PKG-INFO"})
    )


def faults(path: Path) -> list[str]:
    """What is wrong with one of them."""
    found = list(faults_of_wheel(path) if path.suffix == ".whl" else faults_of_sdist(path))
    if path.stat().st_size > LARGEST[path.suffix]:
        found.append(f"{path.stat().st_size:,} bytes are more than {LARGEST[path.suffix]:,}")
    return found


if __name__ == "__main__":
    wrong = 0
    for path in map(Path, sys.argv[1:]):
        for fault in (found := faults(path)):
            print(f"{path.name}: {fault}")
        wrong += len(found)
        if not found:
            print(f"{path.name}: {path.stat().st_size:,} bytes, holds what it should")
    sys.exit(bool(wrong))
