"""The library's version. The one place where it is written: the package's metadata take it from here."""

__version__ = "0.1.0"
