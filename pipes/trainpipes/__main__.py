"""``python -m trainpipes``: the command ``trainpipes``."""

from trainpipes_cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
