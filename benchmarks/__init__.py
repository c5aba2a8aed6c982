"""Side by side with others, in one run: ``python -m benchmarks --quick`` or ``--full``."""
