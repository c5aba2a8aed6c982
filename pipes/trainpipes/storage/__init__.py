"""What is kept and written: files of rows, memory maps, the cache; and what does the work of writing."""

from trainpipes.storage.executor import Executor, Processes, Threads
from trainpipes.storage.ray_cluster import Ray

__all__ = ["Executor", "Processes", "Ray", "Threads"]
