"""Numbers this host among the hosts of a run, and makes the flags that join its processes.

Slurm and Open MPI start a launcher for each process, and `spmdtrain train` reads their environment
itself. Elsewhere, e.g. under Kubernetes, one launcher is started on each host, with this in its
environment:

    SPMDTRAIN_HOSTS        the number of hosts
    SPMDTRAIN_HOST         the number of this one, from 0
    SPMDTRAIN_COORDINATOR  HOST:PORT of the first one
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from spmdtrain.config.errors import ConfigError
from spmdtrain.processes.scheduler import starts_every_process

HOSTS = "SPMDTRAIN_HOSTS"
HOST = "SPMDTRAIN_HOST"
COORDINATOR = "SPMDTRAIN_COORDINATOR"


@dataclass(frozen=True)
class Place:
    """The number of this host among all, and the address of the coordinator.

    `coordinator` is None on a single host, which takes a free port, or if a scheduler started this
    process and numbers them all (`by_scheduler`).
    """

    hosts: int = 1
    host: int = 0
    coordinator: str | None = None
    by_scheduler: bool = False

    def flags(self, processes: int) -> dict[int, list[str]]:
        """Returns, by number of each process of this host, the flags that join it to the others."""
        total = self.hosts * processes
        if self.by_scheduler or total == 1:
            return {0: []}
        address = self.coordinator or f"localhost:{_free_port()}"
        first = self.host * processes
        return {
            number: [
                *("--coordinator", address),
                *("--processes", str(total)),
                *("--process", str(number)),
            ]
            for number in range(first, first + processes)
        }


def find_place(environment: Mapping[str, str], processes: int) -> Place:
    """Returns the place of this launcher, which is to start `processes`. Raises ConfigError."""
    if starts_every_process(environment):
        if processes > 1:
            raise ConfigError(
                "Slurm and Open MPI start a launcher for each process",
                asked=f"--local-processes {processes}",
                fix="srun --ntasks-per-node=N spmdtrain launch ..., without --local-processes",
            )
        return Place(by_scheduler=True)
    variables = [environment.get(name, "") for name in (HOSTS, HOST, COORDINATOR)]
    if not any(variables):
        return Place()
    hosts, host, coordinator = variables
    numbers = hosts.isdecimal() and host.isdecimal()
    if not numbers or not coordinator or int(host) >= int(hosts):
        assignments = " ".join(
            f"{name}={environment.get(name)}" for name in (HOSTS, HOST, COORDINATOR)
        )
        raise ConfigError(
            "the environment does not name this host's place",
            found=assignments,
            fix=f"{HOSTS}=2 {HOST}=0 {COORDINATOR}=NAME:12345, all three",
        )
    return Place(int(hosts), int(host), coordinator)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
