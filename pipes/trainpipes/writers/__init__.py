"""Files that a pipeline's rows are written to, and the executors."""

from trainpipes.engine.processes.executors import Executor, Processes, Threads
from trainpipes.engine.processes.ray_cluster import Ray

__all__ = ["Executor", "Processes", "Ray", "Threads"]
