"""An environment for each peer, so that none constrains another.

Each is a venv that sees the packages of the interpreter that runs the suite, and has the peer's own in front
of them: torch, pyarrow, numpy and tokenizers are the same for all and are not installed again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from benchmarks.contestants import ENVIRONMENTS

__all__ = ["install", "python_of"]

SHARED = ("torch", "pyarrow", "numpy", "tokenizers")


def python_of(folder: Path, name: str | None) -> Path | None:
    """The interpreter of an environment; None if it is not installed."""
    if name is None:
        return Path(sys.executable)
    found = folder / name / "bin" / "python"
    return found if (folder / name / "installed").exists() else None


def install(folder: Path, name: str) -> str | None:
    """Make an environment, unless it is there as required. Says what went wrong."""
    wanted = ENVIRONMENTS[name]
    stamp = folder / name / "installed"
    text = repr((wanted, sys.executable))
    if stamp.exists() and stamp.read_text() == text:
        return None
    shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "constraints.txt"
    pins = [f"{package}=={version(package).split('+')[0]}" for package in SHARED]
    constraints.write_text("\n".join(pins))
    python = folder / name / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / name], check=True)
    paths = sysconfig.get_paths(vars={"base": str(folder / name), "platbase": str(folder / name)})
    Path(paths["purelib"], "shared.pth").write_text(sysconfig.get_paths()["purelib"])
    command = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    command += [] if wanted.with_dependencies else ["--no-deps"]
    done = subprocess.run([*command, *wanted.requires], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return (errors or done.stderr.strip().splitlines() or ["pip failed"])[0]
    stamp.write_text(text)
    return None
