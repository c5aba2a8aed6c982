"""What ``python -m trainpipes_recipes.demo`` runs: a training run that is killed twice and compared with
one that was left alone.

    __main__.py    the runs, and the picture of their losses
    logged.py      a training script with a log of its batches and losses, and how two logs differ
    corpus.py      rows for training that are on every machine: Python's standard library
"""
