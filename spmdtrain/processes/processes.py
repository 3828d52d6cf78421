"""Joins the processes of a run, and simulates several devices in one process.

Both must happen before jax looks for devices, so the command line calls these functions first.
"""

import contextlib
import contextvars
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from spmdtrain.config.arguments import as_whole
from spmdtrain.config.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    StorageError,
    UserError,
)
from spmdtrain.processes import peers, scheduler

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
MOST_SIMULATED = 4096
HEARTBEAT_SECONDS = 30  # jax waits 100 before it declares a silent process dead
SHUTDOWN_SECONDS = 15  # jax waits 300 for the others when one ends with an exception
GOOD = "good"  # of a process that has raised nothing
APART: contextvars.ContextVar[bool] = contextvars.ContextVar("apart", default=False)
KINDS = (CheckpointError, ConfigError, DamagedError, StorageError)  # that processes share


def simulate_devices(count: int) -> None:
    """Makes this process see `count` CPU devices.

    Raises ConfigError if the count is out of range, or if jax has already found another number.
    """
    count = as_whole(count, "count", -sys.maxsize)
    typed = f"--simulate-devices {count}"
    if count < 1:
        raise ConfigError("a run needs a device", asked=typed, fix="--simulate-devices 8")
    if count > MOST_SIMULATED:
        fix = f"1 to {MOST_SIMULATED}"
        raise ConfigError("too many devices to simulate", asked=typed, fix=fix)
    if "jax" in sys.modules:
        import jax

        # There is no public API to ask without starting the backends (jax 0.10 to 0.12).
        if sys.modules["jax._src.xla_bridge"].backends_are_initialized():
            if (jax.default_backend(), jax.local_device_count()) != ("cpu", count):
                raise ConfigError(
                    "jax has already looked for devices",
                    asked=f"{count} simulated devices",
                    found=f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}",
                    fix="calling simulate_devices before anything that touches a device",
                )
            return
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    # Set in the environment as well, for a jax that is imported later and for child processes.
    os.environ.pop("JAX_NUM_CPU_DEVICES", None)  # would override the flag
    flags = re.sub(rf"{DEVICE_COUNT_FLAG}=?\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), f"{DEVICE_COUNT_FLAG}={count}"])
    os.environ["JAX_PLATFORMS"] = "cpu"


def start(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Joins the other processes of this run, if there are any.

    They are named by the arguments (all three, or none), else by Slurm or Open MPI; otherwise this
    process is alone.

    If the arguments name them, a process uses every GPU that it sees. Under Slurm and Open MPI it
    does so too if it is the only one on its host, or if Slurm assigned GPUs to it. Otherwise it
    takes the GPU whose number is its local rank.

    Raises ConfigError if these settings are inconsistent or the coordinator cannot be reached.
    """
    if (coordinator, processes, process) != (None, None, None):
        arguments = _from_arguments(coordinator, processes, process)
    else:
        arguments = scheduler.arguments_for_jax(os.environ)
    if arguments is None:
        return
    import jax

    # Its C++ handler would swallow SIGTERM: the loop installs one that finishes the step and saves.
    jax.config.update("jax_enable_preemption_service", False)
    arguments["heartbeat_timeout_seconds"] = HEARTBEAT_SECONDS
    arguments["shutdown_timeout_seconds"] = SHUTDOWN_SECONDS
    peers.join(**arguments)


def this_process() -> tuple[int, int]:
    """Returns the number of this process and how many there are; (0, 1) in a block of `apart`."""
    import jax

    return (0, 1) if APART.get() else (jax.process_index(), jax.process_count())


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Makes the collectives of this file local in the block: this thread acts alone."""
    before = APART.set(True)
    try:
        yield
    finally:
        APART.reset(before)


def any_process(flag: bool) -> bool:
    """Returns True if `flag` is set in any process. A collective: every process must call it."""
    import numpy as np
    from jax.experimental import multihost_utils

    if this_process()[1] == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def of_process_0(number: int) -> int:
    """Returns process 0's number in every process. A collective: every process must call it."""
    import numpy as np
    from jax.experimental import multihost_utils

    if this_process()[1] == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def by_process_0(make: Callable[[], Any]) -> Any:
    """Returns, in every process, what `make` returns in process 0, the only one that calls it.

    The value must be one that JSON can hold. A UserError that `make` raises is raised in every
    process. A collective: every process must call it.
    """
    process, count = this_process()
    if count == 1:
        return make()
    text = ""
    with together():
        if process == 0:
            text = json.dumps(make())
    return json.loads(gather_texts(text)[0])


def gather_texts(text: str) -> list[str]:
    """Returns the text of each process, in order. A collective: every process must call it."""
    import numpy as np
    from jax.experimental import multihost_utils

    if this_process()[1] == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(mine.size, np.int32))
    row = np.zeros(sizes.max(), np.uint8)
    row[: mine.size] = mine
    rows = multihost_utils.process_allgather(row)
    pairs = zip(np.asarray(rows), sizes.tolist(), strict=True)
    return [bytes(one[:size]).decode() for one, size in pairs]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raises in every process a UserError that any process raises in the block.

    If several do, it is the first process's error. A collective: every process must enter it.
    """
    mine = None
    try:
        yield
    except UserError as error:
        mine = error
    outcomes = gather_texts(f"{type(mine).__name__} {mine.what}" if mine else GOOD)
    if mine:
        raise mine
    for process, (name, _, what) in enumerate(text.partition(" ") for text in outcomes):
        if name != GOOD:
            kind = next((kind for kind in KINDS if kind.__name__ == name), UserError)
            raise kind(what, found=f"in process {process}")


def _from_arguments(
    coordinator: str | None, processes: int | None, process: int | None
) -> dict | None:
    """Returns arguments of `jax.distributed.initialize`, or None for a single process."""
    flags = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    typed = " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)
    missing = [flag for flag, value in flags.items() if value is None]
    if coordinator is None or processes is None or process is None:
        raise ConfigError(
            f"{' and '.join(missing)} missing: all three are needed together",
            asked=typed,
            fix="--coordinator HOST:PORT --processes N --process I",
        )
    if processes < 1 or not 0 <= process < processes:
        last = f"0 to {processes - 1}" if processes > 0 else "0"
        fix = f"--processes {max(processes, 1)} --process {last}"
        raise ConfigError("no such process", asked=typed, fix=fix)
    _check_address(coordinator, typed)
    if processes == 1:
        return None
    return {
        "coordinator_address": coordinator,
        "num_processes": processes,
        "process_id": process,
        "cluster_detection_method": "deactivate",
    }


def _check_address(coordinator: str, typed: str) -> None:
    """Refuses HOST:PORT without a legal port, and a host that means "this one" on several nodes."""
    host, _, port = coordinator.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        bare = coordinator.removesuffix(f":{port}") if host else coordinator.rstrip(":")
        fix = f"--coordinator {bare}:12345"
        raise ConfigError("the coordinator has no port", asked=typed, fix=fix)
    nodes = scheduler.number(os.environ, "SLURM_JOB_NUM_NODES") or 1
    if nodes > 1 and re.fullmatch(r"localhost|127\..*|\[::1\]|0\.0\.0\.0|\[::\]", host):
        raise ConfigError(
            f"other hosts cannot reach a coordinator at {host}",
            asked=typed,
            found=f"{nodes} nodes",
            fix=f"--coordinator NAME_OF_FIRST_NODE:{port}",
        )
