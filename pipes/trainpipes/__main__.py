"""``python -m trainpipes``: the command ``trainpipes``."""

from trainpipes.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
