"""``python -m trainpipes.cli``: the command ``trainpipes``, without importing the library first."""

from trainpipes.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
