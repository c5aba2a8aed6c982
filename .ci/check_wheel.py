"""What a wheel must hold, and must not: ``python check_wheel.py trainpipes-….whl``."""

# ruff: noqa: T201

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

LARGEST = 1_000_000
PACKAGES = ("trainpipes", "trainpipes_recipes")


def faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        points = next((n for n in names if n.endswith(".dist-info/entry_points.txt")), None)
        offered = archive.read(points).decode() if points else ""
    found = []
    for package in PACKAGES:
        found += [
            f"{package}/{name} is not there"
            for name in ("py.typed", "__init__.py")
            if f"{package}/{name}" not in names
        ]
    for name in names:
        top, *rest = name.split("/")
        if top not in PACKAGES and not top.endswith(".dist-info"):
            found.append(f"{name} belongs to no package")
        elif top in PACKAGES and (Path(name).suffix not in (".py", ".typed") or "tests" in rest):
            found.append(f"{name} is no code of the library")
    if not any(n.endswith("/licenses/LICENSE") for n in names):
        found.append("the licence is not there")
    if "[trainpipes.recipes]" not in offered:
        found.append("the recipes are not offered as entry points")
    if wheel.stat().st_size > LARGEST:
        found.append(f"{wheel.stat().st_size:,} bytes are more than {LARGEST:,}")
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    wrong = faults(path)
    for fault in wrong:
        print(f"{path.name}: {fault}")
    if not wrong:
        print(f"{path.name}: {path.stat().st_size:,} bytes, holds what it should")
    sys.exit(bool(wrong))
