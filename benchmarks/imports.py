"""What importing costs: processor time of a fresh process that imports trainpipes, beside one for torch.

    python benchmarks/imports.py [--repeats 10]

In turn, medians; both from bytecode, as an installed package is.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys

__all__ = ["import_times"]

MODULES = ("torch", "trainpipes")


def import_times(repeats: int) -> dict[str, float]:
    """Median processor seconds of a process that imports one module, by module."""
    found: dict[str, list[float]] = {module: [] for module in MODULES}
    for repeat in range(repeats + 1):
        for module, times in found.items():
            seconds = _seconds(f"import {module}")
            if repeat:  # the first one writes the bytecode
                times.append(seconds)
    return {module: statistics.median(times) for module, times in found.items()}


def _seconds(code: str) -> float:
    own = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    begun = _spent()
    subprocess.run([sys.executable, "-c", code], env=own, check=True)
    return _spent() - begun


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    times = import_times(parser.parse_args().repeats)
    print("| import | s | of torch |\n|---|---|---|")
    for module, took in times.items():
        print(f"| {module} | {took:.2f} | {took / times['torch']:.2f} |")


if __name__ == "__main__":
    main()
