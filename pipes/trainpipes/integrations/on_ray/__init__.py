"""What ``executor=Ray(address)`` needs.

tasks      what a task does in a worker process, and how those that run are ended
cluster    a connection to a cluster: runs tasks, and hands out their results
"""

from trainpipes.integrations.on_ray.cluster import RayCluster

__all__ = ["RayCluster"]
