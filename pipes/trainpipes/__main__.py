"""``python -m trainpipes``: the command ``trainpipes``."""

from trainpipes.cli import main

if __name__ == "__main__":
    main()
