"""How you look at a pipeline, its rows, its files and its states."""
