"""Any half of a scheduler's environment: one process, all that jax needs, or one line."""

import os
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax._src.clusters.ompi_cluster import OmpiCluster
from jax._src.clusters.slurm_cluster import SlurmCluster

from spmdtrain.config.errors import ConfigError
from spmdtrain.launch.place import find_place
from spmdtrain.processes import scheduler

ODD = ("", " ", "x", "-1", "0", "1", "4", "²", "4(x2)", "9" * 30, "1,2")
WHOLE = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[1-2],gpu-7",
    "SLURM_GPUS_PER_TASK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "JAX_LOCAL_DEVICE_IDS": "0,1",
    "JAX_COORDINATOR_PORT": "12345",
}
DETECTIONS = {"slurm": SlurmCluster, "ompi": OmpiCluster}


def environments(names) -> st.SearchStrategy[dict[str, str]]:
    values = {
        name: st.sampled_from([WHOLE[name], WHOLE[name], *ODD, f"{WHOLE[name]}[", None])
        for name in names
    }
    drawn = st.fixed_dictionaries(values)
    return drawn.map(lambda all: {name: value for name, value in all.items() if value is not None})


SLURM = [name for name in WHOLE if not name.startswith("OMPI")]


@settings(max_examples=600, deadline=None)
@given(st.one_of(environments(SLURM), environments(WHOLE)))
@example(WHOLE)
@example(WHOLE | {"OMPI_COMM_WORLD_SIZE": "", "JAX_COORDINATOR_PORT": " "})
@example(WHOLE | {"OMPI_COMM_WORLD_SIZE": "", "JAX_LOCAL_DEVICE_IDS": " "})
@example({name: WHOLE[name] for name in SLURM})
def test_any_part_of_an_environment_is_obeyed_or_refused(environment):
    """And what is obeyed jax's own detection can read: an address, and a process of the run."""
    try:
        arguments = scheduler.arguments_for_jax(environment)
    except ConfigError as refusal:
        assert "\n" not in str(refusal) and len(str(refusal)) < 400
        return
    if arguments is None:
        return
    detection = DETECTIONS[arguments["cluster_detection_method"]]
    with mock.patch.dict(os.environ, environment, clear=True):
        assert detection.is_env_present()
        assert 0 <= detection.get_process_id() < detection.get_process_count()
        port = os.environ.get("JAX_COORDINATOR_PORT")
        host, _, port = detection.get_coordinator_address(300, port).rpartition(":")
        assert host.strip() and 0 < int(port) < 65536
        if "local_device_ids" not in arguments and not environment.get("JAX_LOCAL_DEVICE_IDS"):
            assert detection.get_local_process_id() is not None


@settings(max_examples=300, deadline=None)
@given(environments(WHOLE))
def test_the_launcher_finds_its_place_or_refuses(environment):
    try:
        find_place(environment, 1)
    except ConfigError as refusal:
        assert "\n" not in str(refusal)


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": ""},
        {"OMPI_COMM_WORLD_SIZE": ""},
    ],
)
def test_an_empty_variable_is_one_that_is_not_there(environment):
    assert scheduler.arguments_for_jax(environment) is None
