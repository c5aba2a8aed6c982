"""Files that a pipeline's rows are written to, and what does the work."""

from trainpipes.writers.executor import Executor, Processes, Threads
from trainpipes.writers.ray_cluster import Ray

__all__ = ["Executor", "Processes", "Ray", "Threads"]
