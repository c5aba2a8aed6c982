"""The packages that trainpipes needs, with versions and licenses, as CycloneDX: ``python .ci/sbom.py`` writes
sbom.cdx.json, which is in the wheel as PEP 770 says.

Versions are those of constraints.txt, which tests run with; licenses are those that the installed packages
name. It is for Python 3.11 and torch's build for the CPU. It holds neither times nor places, so that the same
packages make the same file.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILE = ROOT / "sbom.cdx.json"
PYTHON = {"python_version": "3.11", "python_full_version": "3.11.0", "extra": ""}
PINNED = {
    canonicalize_name(line.partition("==")[0]): line.strip().partition("==")[2]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if "==" in line
}
CLASSIFIER = "License :: OSI Approved :: "


def needed(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The packages of requirements, and all that these need, by name."""
    found: dict[str, Distribution] = {}
    left = list(requirements)
    while left:
        one = Requirement(left.pop())
        name = canonicalize_name(one.name)
        is_asked_for = one.marker is None or one.marker.evaluate(PYTHON)
        if is_asked_for and name in PINNED and name not in found:  # CUDA's are not pinned
            found[name] = distribution(name)
            left += found[name].requires or []
    return dict(sorted(found.items()))


def license_of(package: Distribution) -> dict[str, Any]:
    """As the package says it: an SPDX expression, or a name."""
    about = package.metadata
    if expression := about.get("License-Expression"):
        return {"expression": expression}
    kinds = [one for one in about.get_all("Classifier") or [] if one.startswith(CLASSIFIER)]
    name = (
        kinds[0].removeprefix(CLASSIFIER)
        if kinds
        else (about.get("License") or "").partition("\n")[0]
    )
    if not name:
        raise ValueError(f"{about['Name']} names no license")
    return {"license": {"name": name}}


def component(name: str, package: Distribution) -> dict[str, Any]:
    url = f"pkg:pypi/{name}@{PINNED[name]}"
    return {
        "type": "library",
        "bom-ref": url,
        "name": name,
        "version": PINNED[name],
        "licenses": [license_of(package)],
        "purl": url,
    }


def sbom() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = re.search(r'= "(.+)"', (ROOT / "pipes/trainpipes/version.py").read_text())
    assert version is not None
    url = f"pkg:pypi/{project['name']}@{version[1]}"
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": url,
                "name": project["name"],
                "version": version[1],
                "licenses": [{"expression": project["license"]}],
                "purl": url,
            }
        },
        "components": [component(*one) for one in needed(project["dependencies"]).items()],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(sbom())
