"""How one run becomes several processes, and how one process pretends to have many devices.

Both are decided before jax looks for devices, so the command line calls them first.
"""

import importlib.util
import os
import re
import sys

from spmdtrain.config.errors import ConfigError
from spmdtrain.parallel import peers

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
MOST_SIMULATED = 4096
HEARTBEAT_SECONDS = 30  # jax waits 100 before it calls a silent process dead
SHUTDOWN_SECONDS = 15  # and 300 for the others when one ends with an exception


def simulate_devices(count: int) -> None:
    """Makes this process see `count` CPU devices. ConfigError once jax has looked and found another number."""
    if count < 1:
        raise ConfigError("a run needs a device", asked=f"--simulate-devices {count}", fix="--simulate-devices 8")
    if count > MOST_SIMULATED:
        fix = f"1 to {MOST_SIMULATED}"
        raise ConfigError("too many devices to simulate", asked=f"--simulate-devices {count}", fix=fix)
    if "jax" in sys.modules:
        import jax

        # No public way asks without starting it (jax 0.10 to 0.12).
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
    os.environ.pop("JAX_NUM_CPU_DEVICES", None)  # would win over the flag
    flags = re.sub(rf"{DEVICE_COUNT_FLAG}=?\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), f"{DEVICE_COUNT_FLAG}={count}"])
    os.environ["JAX_PLATFORMS"] = "cpu"


def start(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Joins the other processes of this run, if there are any: as told, as Slurm or Open MPI tell, else alone.

    Told (all three), a process uses every GPU it sees. Under Slurm and Open MPI it does so too where it is the only one
    on its host or Slurm gave it its own GPUs; otherwise it takes the one that its local rank says.
    """
    if (coordinator, processes, process) != (None, None, None):
        arguments = _told(coordinator, processes, process)
    else:
        arguments = _from_launcher()
    if arguments is None:
        return
    import jax

    # Its C++ handler would swallow SIGTERM: the loop installs one that finishes the step and saves.
    jax.config.update("jax_enable_preemption_service", False)
    arguments["heartbeat_timeout_seconds"] = HEARTBEAT_SECONDS
    arguments["shutdown_timeout_seconds"] = SHUTDOWN_SECONDS
    peers.join(**arguments)


def _told(coordinator: str | None, processes: int | None, process: int | None) -> dict | None:
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    asked = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
    if missing := [flag for flag, value in given.items() if value is None]:
        raise ConfigError(
            f"{' and '.join(missing)} missing: all three are needed together",
            asked=asked,
            fix="--coordinator HOST:PORT --processes N --process I",
        )
    if processes < 1 or not 0 <= process < processes:
        last = f"0 to {processes - 1}" if processes > 0 else "0"
        raise ConfigError("no such process", asked=asked, fix=f"--processes {max(processes, 1)} --process {last}")
    name, _, port = coordinator.rpartition(":")
    if not name or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        bare = coordinator.removesuffix(f":{port}") if name else coordinator.rstrip(":")
        raise ConfigError("the coordinator has no port", asked=asked, fix=f"--coordinator {bare}:12345")
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", 1))
    if nodes > 1 and re.fullmatch(r"localhost|127\..*|\[::1\]|0\.0\.0\.0|\[::\]", name):
        raise ConfigError(
            f"other hosts cannot reach a coordinator at {name}",
            asked=asked,
            found=f"{nodes} nodes",
            fix=f"--coordinator NAME_OF_FIRST_NODE:{port}",
        )
    if processes == 1:
        return None
    return {
        "coordinator_address": coordinator,
        "num_processes": processes,
        "process_id": process,
        "cluster_detection_method": "deactivate",
    }


def _from_launcher() -> dict | None:
    """What Slurm or Open MPI (also mpirun inside Slurm, hence first) left in the environment, or None: one process."""
    environment = os.environ
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        alone = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
        return {"cluster_detection_method": _open_mpi()} | _devices(all_visible=alone)
    tasks = int(environment.get("SLURM_NTASKS", 1))
    if tasks == 1 or "SLURM_PROCID" not in environment or environment.get("SLURM_STEP_NUM_TASKS") == "1":
        return None
    if "SLURM_STEP_NODELIST" not in environment:
        raise ConfigError(
            "a Slurm job of several tasks, but not started by srun",
            found=f"SLURM_NTASKS={tasks}",
            fix="srun spmdtrain ... (or SLURM_NTASKS=1 spmdtrain ... for one process)",
        )
    alone = environment.get("SLURM_STEP_NUM_NODES", "") == str(tasks)
    return {"cluster_detection_method": "slurm"} | _devices(all_visible=alone or "SLURM_GPUS_PER_TASK" in environment)


def _open_mpi() -> str:
    """Which of jax's detections can serve: only Open MPI before 5 says itself where rank 0 is."""
    if "OMPI_MCA_orte_hnp_uri" in os.environ:
        return "ompi"
    if importlib.util.find_spec("mpi4py"):
        return "mpi4py"
    size, rank = os.environ["OMPI_COMM_WORLD_SIZE"], os.environ.get("OMPI_COMM_WORLD_RANK", "I")
    raise ConfigError(
        "this Open MPI does not say where rank 0 is (no OMPI_MCA_orte_hnp_uri; 5 and newer have none)",
        found=f"OMPI_COMM_WORLD_SIZE={size} and no mpi4py",
        fix=f"pip install mpi4py, or --coordinator HOST:PORT --processes {size} --process {rank}",
    )


def _devices(all_visible: bool) -> dict:
    """jax gives a launched process one GPU, by its local rank; an empty list means all it can see."""
    return {"local_device_ids": []} if all_visible and "JAX_LOCAL_DEVICE_IDS" not in os.environ else {}
