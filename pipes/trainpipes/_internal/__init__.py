"""Small things that any room may use: checks of options, texts, progress."""
