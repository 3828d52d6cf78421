import importlib.util
import json
import os
import socket
import subprocess
import sys
import types

import jax
import pytest

from spmdtrain.config.errors import ConfigError, PeerLostError
from spmdtrain.processes import processes
from spmdtrain.processes.processes import simulate_devices, start

pytestmark = pytest.mark.long

simulate_devices(8)

LAUNCHER = ("SLURM_", "OMPI_", "JAX_")


@pytest.fixture
def launched(monkeypatch):
    """What `start` asks of jax under a given environment: its keyword arguments, or None when it
    asks nothing.
    """

    def launch(environment=(), **given):
        for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
            monkeypatch.delenv(name)
        for name, value in dict(environment).items():
            monkeypatch.setenv(name, value)
        calls = []
        monkeypatch.setattr(processes.peers, "join", lambda **arguments: calls.append(arguments))
        monkeypatch.setattr(jax.config, "update", lambda *_: None)
        start(**given)
        return calls[0] if calls else None

    return launch


TOLD = {"coordinator": "node1:1234", "processes": 4, "process": 3}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3",
}


def test_told_by_flags_no_launcher_is_asked_and_timeouts_are_short(launched):
    assert launched(SRUN, **TOLD) == {
        "coordinator_address": "node1:1234",
        "num_processes": 4,
        "process_id": 3,
        "cluster_detection_method": "deactivate",
        "heartbeat_timeout_seconds": 30,
        "shutdown_timeout_seconds": 15,
    }


ALL_VISIBLE = {"local_device_ids": []}
LAUNCHERS = {
    "srun, several tasks on a node: one GPU each": (SRUN, {"cluster_detection_method": "slurm"}),
    "srun, one task on a node: all of its GPUs": (
        SRUN | {"SLURM_STEP_NUM_NODES": "4"},
        {"cluster_detection_method": "slurm"} | ALL_VISIBLE,
    ),
    "srun --gpus-per-task: those": (
        SRUN | {"SLURM_GPUS_PER_TASK": "2"},
        {"cluster_detection_method": "slurm"} | ALL_VISIBLE,
    ),
    "JAX_LOCAL_DEVICE_IDS is left to jax": (
        SRUN | {"SLURM_STEP_NUM_NODES": "4", "JAX_LOCAL_DEVICE_IDS": "0,1"},
        {"cluster_detection_method": "slurm"},
    ),
    "mpirun": (MPIRUN, {"cluster_detection_method": "ompi"}),
    "mpirun inside a Slurm job": (
        MPIRUN | {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"cluster_detection_method": "ompi"} | ALL_VISIBLE,
    ),
}


@pytest.mark.parametrize("case", LAUNCHERS)
def test_a_launcher_is_detected(launched, case):
    environment, expected = LAUNCHERS[case]
    timeouts = {"heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 15}
    assert launched(environment) == expected | timeouts


def test_open_mpi_5_goes_through_mpi4py_where_it_is_installed(launched, monkeypatch):
    environment = {key: value for key, value in MPIRUN.items() if "uri" not in key}
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: types.SimpleNamespace())
    assert launched(environment)["cluster_detection_method"] == "mpi4py"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "4"},  # an allocation's shell
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},  # a shell that is itself a step
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_process_starts_nothing(launched, environment):
    assert launched(environment) is None
    assert launched(environment, coordinator="node1:1234", processes=1, process=0) is None


REFUSALS = [
    (
        {},
        {"processes": 2},
        "--coordinator and --process missing: all three are needed together; asked --processes 2; "
        "try --coordinator HOST:PORT --processes N --process I",
    ),
    (
        {},
        TOLD | {"process": None},
        "--process missing: all three are needed together; "
        "asked --coordinator node1:1234 --processes 4; "
        "try --coordinator HOST:PORT --processes N --process I",
    ),
    (
        {},
        TOLD | {"process": 4},
        "no such process; asked --coordinator node1:1234 --processes 4 --process 4; "
        "try --processes 4 --process 0 to 3",
    ),
    (
        {},
        TOLD | {"process": -1},
        "no such process; asked --coordinator node1:1234 --processes 4 --process -1; "
        "try --processes 4 --process 0 to 3",
    ),
    (
        {},
        TOLD | {"processes": 0, "process": 0},
        "no such process; asked --coordinator node1:1234 --processes 0 --process 0; "
        "try --processes 1 --process 0",
    ),
    (
        {},
        TOLD | {"coordinator": "node1"},
        "the coordinator has no port; asked --coordinator node1 --processes 4 --process 3; "
        "try --coordinator node1:12345",
    ),
    (
        {},
        TOLD | {"coordinator": "node1:99999"},
        "the coordinator has no port; asked --coordinator node1:99999 --processes 4 --process 3; "
        "try --coordinator node1:12345",
    ),
    (
        {"SLURM_JOB_NUM_NODES": "2"},
        TOLD | {"coordinator": "localhost:1234"},
        "other hosts cannot reach a coordinator at localhost; "
        "asked --coordinator localhost:1234 --processes 4 --process 3; found 2 nodes; "
        "try --coordinator NAME_OF_FIRST_NODE:1234",
    ),
    (
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {},
        "a Slurm job of several tasks, but not started by srun; found SLURM_NTASKS=4; "
        "try srun spmdtrain ... (or SLURM_NTASKS=1 spmdtrain ... for one process)",
    ),
    (
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
        {},
        "this Open MPI does not say where rank 0 is "
        "(no OMPI_MCA_orte_hnp_uri; 5 and newer have none); "
        "found OMPI_COMM_WORLD_SIZE=4 and no mpi4py; "
        "try pip install mpi4py, or --coordinator HOST:PORT --processes 4 --process 1",
    ),
]


@pytest.mark.parametrize("environment, given, message", REFUSALS)
def test_a_wrong_launch_is_refused_in_one_line(launched, monkeypatch, environment, given, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as refusal:
        launched(environment, **given)
    assert str(refusal.value) == message


def test_simulated_devices_need_a_number():
    with pytest.raises(ConfigError, match="a run needs a device; asked --simulate-devices 0; try"):
        simulate_devices(0)


def test_once_jax_has_looked_another_number_is_refused_and_the_same_is_fine():
    there = jax.local_device_count()
    flags = os.environ.get("XLA_FLAGS")
    simulate_devices(there)
    with pytest.raises(
        ConfigError, match=f"asked {there + 1} simulated devices; found {there} x cpu"
    ):
        simulate_devices(there + 1)
    assert os.environ.get("XLA_FLAGS") == flags


def python(code, *arguments, **environment):
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith((*LAUNCHER, "XLA_"))
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=inherited | environment,
    )


def ended(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


SIMULATE = """
import json, os, sys
if sys.argv[1] == "jax": import jax
from spmdtrain.processes.processes import simulate_devices
simulate_devices(3)
early = "jax" in sys.modules
import jax
print(json.dumps([jax.device_count(), jax.default_backend(), os.environ["XLA_FLAGS"], early]))
"""


@pytest.mark.parametrize("first", ["nothing", "jax"])
def test_simulated_devices_replace_the_count_and_keep_the_other_flags(first):
    before, count, after = (
        "--xla_cpu_enable_fast_math=false",
        "--xla_force_host_platform_device_count",
        "--xla_dump_to=",
    )
    flags = f"{before} {count}=2 {after}"
    seen = ended(
        python(SIMULATE, first, XLA_FLAGS=flags, JAX_NUM_CPU_DEVICES="5", JAX_PLATFORMS="cuda")
    )
    assert seen == [3, "cpu", f"{before} {after} {count}=3", first == "jax"]


# Two processes of two devices. Rank 1 gets SIGTERM, its Python handler runs, both sum over all
# devices and end.
WORKER = """
import json, os, signal, sys
caught = []
def handle(number, frame): caught.append(signal.Signals(number).name)
if sys.argv[1] == "before": signal.signal(signal.SIGTERM, handle)
from spmdtrain.processes.processes import simulate_devices, start
simulate_devices(2)
start(**json.loads(sys.argv[2]))
if sys.argv[1] == "after": signal.signal(signal.SIGTERM, handle)
import jax, numpy as np
from spmdtrain.config.schema import MeshConfig
from spmdtrain.parallel.mesh import build_mesh
mesh = build_mesh(MeshConfig(data=-1, tensor=2))
if jax.process_index() == 1: os.kill(os.getpid(), signal.SIGTERM)
sharding = jax.NamedSharding(mesh, jax.P(("data", "tensor")))
x = jax.make_array_from_callback((4,), sharding, lambda at: np.arange(4.0)[at])
total = float(jax.jit(lambda x: (x * x).sum())(x))
ranks = [[device.process_index for device in row] for row in mesh.devices.reshape(2, 2)]
print(json.dumps([jax.process_index(), total, ranks, caught]))
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def told(port, rank):
    return {"coordinator": f"127.0.0.1:{port}", "processes": 2, "process": rank}, {}


def slurm(port, rank):
    return {}, {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "localhost",
        "JAX_COORDINATOR_PORT": str(port),
    }


@pytest.mark.core
@pytest.mark.parametrize("launch, handler", [(told, "before"), (slurm, "after")])
def test_two_processes_share_a_mesh_and_a_python_handler_gets_sigterm(launch, handler):
    port = free_port()
    launches = [launch(port, rank) for rank in (0, 1)]
    workers = [
        python(WORKER, handler, json.dumps(given), **environment) for given, environment in launches
    ]
    try:
        ranks = [[0, 0], [1, 1]]
        assert [ended(worker) for worker in workers] == [
            [0, 14.0, ranks, []],
            [1, 14.0, ranks, ["SIGTERM"]],
        ]
    finally:
        for worker in workers:
            worker.kill()


ALONE = """
import sys
from spmdtrain.processes import peers, processes
peers.SILENT_SECONDS, peers.START_SECONDS = 0.5, 1.5
processes.start(sys.argv[1], 2, 1)
"""


@pytest.mark.parametrize(
    "host, said", [("127.0.0.1", "has waited 1.5 s"), ("no.such.host.invalid", "knows no host")]
)
def test_processes_that_never_come_are_named_in_a_line(host, said):
    """jax itself aborts with a stack of C++, minutes later."""
    worker = python(ALONE, f"{host}:{free_port()}")
    output, errors = worker.communicate(timeout=60)
    assert worker.returncode == PeerLostError.exit_code, errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("spmdtrain: process 1 ") and said in last
