"""Reads the environment variables that Slurm and Open MPI set for a process that they start.

An empty variable counts as unset. If a scheduler announces several processes, all of its variables
that jax reads are checked here: jax itself would end in a traceback, or wait for processes that
nobody has started.
"""

import importlib.util
import os
import re
from collections.abc import Mapping

from spmdtrain.config.errors import ConfigError

BY_SRUN = "srun spmdtrain ... (or SLURM_NTASKS=1 spmdtrain ... for one process)"
SLURM_NEEDS = ("SLURM_JOB_ID", "SLURM_LOCALID")
NODES = re.compile(r"[\w.-]+(\[[\d,-]+\][\w.-]*)?(,[\w.-]+(\[[\d,-]+\][\w.-]*)?)*", re.A)
ORTE_URI = re.compile(r"\d+\.\d*;.*(tcp://[^,:]+[,:]|tcp6://\[[^],]+[],])", re.A)


def arguments_for_jax(environment: Mapping[str, str]) -> dict | None:
    """Returns arguments of `jax.distributed.initialize`, or None for a single process.

    Open MPI comes first, because mpirun may run inside a Slurm job. Raises ConfigError if the
    environment is incomplete, or holds text in place of a number.
    """
    if (number(environment, "OMPI_COMM_WORLD_SIZE") or 1) > 1:
        return _of_open_mpi(environment)
    if not is_srun_of_several(environment):
        return None
    return _of_slurm(environment)


def starts_every_process(environment: Mapping[str, str]) -> bool:
    """Returns True if this is one of several processes that a scheduler has started."""
    in_slurm = (
        "SLURM_PROCID" in environment and (number(environment, "SLURM_STEP_NUM_TASKS") or 1) > 1
    )
    return in_slurm or (number(environment, "OMPI_COMM_WORLD_SIZE") or 1) > 1


def is_srun_of_several(environment: Mapping[str, str]) -> bool:
    """Returns True if this is one of several Slurm tasks, or the batch script of such a job.

    A shell inside a job has no SLURM_PROCID, and a shell that is itself a step has one task.
    """
    tasks = number(environment, "SLURM_NTASKS") or 1
    of_one = number(environment, "SLURM_STEP_NUM_TASKS") == 1
    return tasks > 1 and bool(environment.get("SLURM_PROCID", "").strip()) and not of_one


def is_first(process: int | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True if this is process 0 of a run, as far as can be known before jax starts.

    `process` is the number from the command's arguments, if any.
    """
    if process is not None:
        return process == 0
    names = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    return all(environment.get(name, "").strip() in ("", "0") for name in names)


def number(environment: Mapping[str, str], name: str) -> int | None:
    """Returns the number that a variable holds, or None if it is empty or unset."""
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ConfigError(
            f"the variable {name} of the environment is not a number",
            found=f"{name}={text!r:.80}",
            fix=f"unset {name}",
        )
    return int(text)


def _of_slurm(environment: Mapping[str, str]) -> dict:
    tasks = number(environment, "SLURM_NTASKS")
    nodes = environment.get("SLURM_STEP_NODELIST", "").strip()
    if not nodes:
        raise ConfigError(
            "a Slurm job of several tasks, but not started by srun",
            found=f"SLURM_NTASKS={tasks}",
            fix=BY_SRUN,
        )
    missing = [name for name in SLURM_NEEDS if number(environment, name) is None]
    if missing:
        raise ConfigError(f"Slurm does not set {' and '.join(missing)} of this task", fix=BY_SRUN)
    if not NODES.fullmatch(nodes):
        variable = f"SLURM_STEP_NODELIST={nodes!r:.80}"
        raise ConfigError("Slurm's list of nodes cannot be read", found=variable, fix=BY_SRUN)
    _check_rank(environment, "SLURM_PROCID", "SLURM_NTASKS", BY_SRUN)
    alone_on_host = number(environment, "SLURM_STEP_NUM_NODES") == tasks
    own_gpus = bool(environment.get("SLURM_GPUS_PER_TASK"))
    return _arguments(environment, "slurm", all_visible=alone_on_host or own_gpus)


def _of_open_mpi(environment: Mapping[str, str]) -> dict:
    size = number(environment, "OMPI_COMM_WORLD_SIZE")
    fix = f"--coordinator HOST:PORT --processes {size} --process I"
    _check_rank(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", fix)
    alone_on_host = number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") == 1
    method = _open_mpi_method(environment)
    if number(environment, "OMPI_COMM_WORLD_LOCAL_RANK") is None and not alone_on_host:
        raise ConfigError("Open MPI does not set OMPI_COMM_WORLD_LOCAL_RANK", fix=fix)
    return _arguments(environment, method, all_visible=alone_on_host)


def _open_mpi_method(environment: Mapping[str, str]) -> str:
    """Returns the detection of jax that works: only Open MPI before 5 says where rank 0 is."""
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    if ORTE_URI.match(uri):
        return "ompi"
    if importlib.util.find_spec("mpi4py"):
        return "mpi4py"
    size = environment["OMPI_COMM_WORLD_SIZE"]
    rank = environment.get("OMPI_COMM_WORLD_RANK", "I")
    raise ConfigError(
        "this Open MPI does not say where rank 0 is "
        "(no OMPI_MCA_orte_hnp_uri; 5 and newer have none)",
        found=f"OMPI_COMM_WORLD_SIZE={size} and no mpi4py",
        fix=f"pip install mpi4py, or --coordinator HOST:PORT --processes {size} --process {rank}",
    )


def _check_rank(environment: Mapping[str, str], rank: str, size: str, fix: str) -> None:
    at, of = number(environment, rank), number(environment, size)
    if at is None or of is None or at >= of:
        both = f"{rank}={environment.get(rank, '')} {size}={environment.get(size, '')}"
        raise ConfigError("the environment names no process of this run", found=both, fix=fix)


def _arguments(environment: Mapping[str, str], method: str, *, all_visible: bool) -> dict:
    """Returns the arguments for jax: how it finds the others, and which GPUs this process has.

    By default jax gives a launched process one GPU, by its local rank. An empty list means all
    visible GPUs. Settings of the user are left alone.
    """
    device_ids = environment.get("JAX_LOCAL_DEVICE_IDS", "")
    if device_ids and not re.fullmatch(r"\d{1,4}(,\d{1,4})*", device_ids.strip(), re.A):
        raise ConfigError(
            "JAX_LOCAL_DEVICE_IDS is not a list of numbers",
            found=f"JAX_LOCAL_DEVICE_IDS={device_ids!r:.80}",
            fix="unset JAX_LOCAL_DEVICE_IDS",
        )
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if address is not None and not re.search(r".:\d{1,5}$", address, re.A):
        raise ConfigError(
            "JAX_COORDINATOR_ADDRESS is not HOST:PORT",
            found=f"JAX_COORDINATOR_ADDRESS={address!r:.80}",
            fix="unset JAX_COORDINATOR_ADDRESS",
        )
    port = number(environment, "JAX_COORDINATOR_PORT")
    if environment.get("JAX_COORDINATOR_PORT") and not (port and port < 65536):
        raise ConfigError(
            "JAX_COORDINATOR_PORT is not a port",
            found=f"JAX_COORDINATOR_PORT={environment['JAX_COORDINATOR_PORT']!r}",
            fix="unset JAX_COORDINATOR_PORT",
        )
    arguments: dict = {"cluster_detection_method": method}
    if all_visible and not device_ids:
        arguments["local_device_ids"] = []
    return arguments
