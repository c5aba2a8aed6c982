"""What is kept on this machine from run to run."""

from trainpipes.cache.entries import CacheInfo, clear, folder, info

__all__ = ["CacheInfo", "clear", "folder", "info"]


def __dir__() -> list[str]:
    return __all__
