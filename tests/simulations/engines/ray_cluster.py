"""A Ray cluster of several raylets on this machine, each with an environment of its own.

`ray_cluster` runs this file as a script, which holds the cluster: whoever holds it has joined it.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from flwr_privacy.simulations.engines.process_supervisor import ProcessSupervisor

__all__ = ["ray_cluster"]

TIMEOUT = 60.0


@contextmanager
def ray_cluster(
    folder: Path, environments: Sequence[Mapping[str, str]]
) -> Iterator[tuple[str, ProcessSupervisor]]:
    """Hold a cluster; yield its address, and what holds all of its processes.

    Parameters
    ----------
    folder : Path
        Where the log lies.
    environments : sequence of mapping
        What the environment of each raylet has more than ours. Each raylet has one CPU.
    """
    ready, log = folder / "ray-is-ready", folder / "ray.log"
    command = [sys.executable, "-P", __file__, str(ready), json.dumps([*map(dict, environments)])]
    # A short folder, because of the sockets in it, and not the one where a plain Ray looks.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as files:
        environment = {**os.environ, "RAY_TMPDIR": files, "RAY_USAGE_STATS_ENABLED": "0"}
        holder = ProcessSupervisor([command], environment=environment, log=log)
        try:
            deadline = time.monotonic() + TIMEOUT
            while not (ready.exists() and (address := ready.read_text())):
                assert holder.alive, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield address, holder
        finally:
            holder.stop()


def _hold() -> None:
    from ray.cluster_utils import Cluster

    ready, environments = sys.argv[1:]
    cluster = Cluster()
    for environment in json.loads(environments):
        cluster.add_node(num_cpus=1, env_vars=environment)
    Path(ready).write_text(cluster.address)
    signal.pause()


if __name__ == "__main__":
    _hold()
