"""Where files are written, as ``repack`` still says it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from trainpipes._internal.checks import flag
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError
from trainpipes.integrations.on_ray import RayCluster


@dataclass(frozen=True)
class Cluster:
    """Where files are written.

    Args:
        engine: "ray", or ``here``.
        address: of the cluster; see ``RayCluster``.
        shared_filesystem: whether every node sees this machine's paths.
        here: what the engine is called that is this process and no cluster.
    """

    engine: str | None = None
    address: str | None = None
    shared_filesystem: bool = False
    here: str | None = None

    def checked(self, asker: str) -> Cluster:
        """This one.

        Raises:
            ConfigError: there is no such engine, or an option is of another.
        """
        flag(self.shared_filesystem, f"{asker}(shared_filesystem)")
        if self.engine not in (self.here, "ray"):
            known = (
                '"ray", or None for this process'
                if self.here is None
                else f'"{self.here}" or "ray"'
            )
            raise ConfigError(f"{asker}(engine) is {known}, got {shown(self.engine)}")
        if self.engine != "ray" and (self.address is not None or self.shared_filesystem):
            name = "address" if self.address is not None else "shared_filesystem"
            raise ConfigError(f'{asker}({name}) is of engine="ray": give that, or leave it out')
        return self

    def enter(self, stack: ExitStack, asker: str) -> RayCluster | None:
        """Connect to the cluster; None for this process."""
        if self.checked(asker).engine != "ray":
            return None
        cluster = RayCluster(
            self.address, asker=f"{asker}()", shared_filesystem=self.shared_filesystem
        )
        return stack.enter_context(cluster)
