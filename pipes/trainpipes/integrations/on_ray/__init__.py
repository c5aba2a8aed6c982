"""Tasks on a Ray cluster. Ray schedules them, runs them again after a crash, and moves them off dead nodes.

messages   what travels between the driver and its tasks, and what a task does in a worker process
running    tasks that run: how many may, how far they are, and how they are ended
cluster    a connection to a cluster: runs tasks, and hands out their results
"""

from trainpipes.integrations.on_ray.cluster import RayCluster

__all__ = ["RayCluster"]
