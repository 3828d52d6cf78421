"""XLA's flags: known to the installed jaxlib, never against what a person said, only where GPUs
will be used.
"""

import os
import pkgutil
import subprocess
import sys
from types import SimpleNamespace

import jaxlib
import pytest
from absent_gpu import needs_compiler, printed
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

import spmdtrain as st
from spmdtrain.config import ConfigError
from spmdtrain.planner.cost.memory import SAFE_SHARE
from spmdtrain.processes import xla_flags

JAXLIB = tuple(map(int, jaxlib.__version__.split(".")[:2]))
ALL = [str(flag) for flag in xla_flags.FLAGS if flag.first <= JAXLIB and not flag.alone]
ALONE = [str(flag) for flag in xla_flags.FLAGS if flag.alone]
ONE = xla_flags.FLAGS[0]


@pytest.fixture
def gpu_plugin(monkeypatch):
    """As on a machine whose jax has a GPU plugin and has not started yet."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    monkeypatch.setattr(pkgutil, "iter_modules", lambda _: [SimpleNamespace(name="xla_cuda13")])
    found = SimpleNamespace(submodule_search_locations=["somewhere"])
    monkeypatch.setattr(xla_flags.importlib.util, "find_spec", lambda _: found)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", None)


def test_the_installed_jaxlib_knows_every_flag():
    """XLA ends the process at one that it does not know."""
    every = " ".join(map(str, xla_flags.FLAGS))
    environment = os.environ | {"XLA_FLAGS": every, "JAX_PLATFORMS": "cpu"}
    program = "import jax; print(jax.numpy.ones(3).sum())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3.0\n"


@pytest.mark.usefixtures("gpu_plugin")
def test_flags_are_added_once():
    assert list(st.set_xla_flags()) == ALL
    assert os.environ["XLA_FLAGS"].split() == ["--xla_dump_to=here", *ALL]
    assert st.set_xla_flags() == ()
    assert len(os.environ["XLA_FLAGS"].split()) == 1 + len(ALL)


@pytest.mark.usefixtures("gpu_plugin")
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_flags_for_one_gpu_are_set_where_there_is_one(monkeypatch, tmp_path, gpus):
    for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))]:
        (tmp_path / name).touch()
    monkeypatch.setattr(xla_flags, "DEVICES", tmp_path)
    assert ALONE, "there is none to test"
    assert list(st.set_xla_flags()) == ALL + (ALONE if gpus == 1 else [])


@pytest.mark.usefixtures("gpu_plugin")
def test_programs_for_absent_gpus_get_no_flags_for_one(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(xla_flags, "DEVICES", tmp_path)
    assert list(st.set_xla_flags(deviceless=True)) == ALL


@pytest.mark.usefixtures("gpu_plugin")
def test_an_older_jaxlib_gets_those_that_are_safe_with_it(monkeypatch):
    monkeypatch.setattr(xla_flags.importlib.metadata, "version", lambda _: "0.10.2")
    assert list(st.set_xla_flags()) == [
        "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false",
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        "--xla_gpu_memory_limit_slop_factor=100",
        "--xla_gpu_enable_command_buffer=-CUDNN",
    ]


@pytest.mark.usefixtures("gpu_plugin")
@pytest.mark.parametrize("given", [f"--{ONE.name}=true", f"--xla_dump_to=x --{ONE.name}"])
def test_what_a_person_said_wins(monkeypatch, given):
    monkeypatch.setenv("XLA_FLAGS", given)
    assert str(ONE) not in st.set_xla_flags()
    assert os.environ["XLA_FLAGS"].startswith(given)
    assert f"{ONE}   (left to you)" in xla_flags.as_comment()


@pytest.mark.usefixtures("gpu_plugin")
def test_a_file_of_flags_is_left_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "/etc/flags.txt")
    assert st.set_xla_flags() == ()
    assert os.environ["XLA_FLAGS"] == "/etc/flags.txt"


@pytest.mark.usefixtures("gpu_plugin")
@pytest.mark.parametrize("version", ["0.9.2", "0.13.0", "1.0"])
def test_another_jaxlib_gets_none(monkeypatch, version):
    monkeypatch.setattr(xla_flags.importlib.metadata, "version", lambda _: version)
    assert st.set_xla_flags() == ()


@pytest.mark.usefixtures("gpu_plugin")
@pytest.mark.parametrize(
    ("platforms", "added"), [("cpu", False), ("tpu,cpu", False), ("cuda", True), ("", True)]
)
def test_only_where_a_gpu_run_starts(monkeypatch, platforms, added):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert bool(st.set_xla_flags()) == added


@pytest.mark.usefixtures("gpu_plugin")
def test_a_compile_for_absent_gpus_has_them_too(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert list(st.set_xla_flags(deviceless=True)) == ALL


@pytest.mark.usefixtures("gpu_plugin")
def test_without_a_plugin_there_are_none(monkeypatch):
    monkeypatch.setattr(pkgutil, "iter_modules", lambda _: [])
    assert st.set_xla_flags() == ()
    monkeypatch.setattr(xla_flags.importlib.util, "find_spec", lambda _: None)
    assert st.set_xla_flags() == ()


@pytest.mark.usefixtures("gpu_plugin")
def test_a_started_jax_is_refused(monkeypatch):
    started = SimpleNamespace(backends_are_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", started)
    with pytest.raises(
        ConfigError, match="jax has already started.*before anything that touches a device"
    ):
        st.set_xla_flags()


def test_flags_are_tried_in_a_process_of_its_own_only_until_jax_has_started(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    monkeypatch.setattr(xla_flags, "jax_has_started", lambda: False)
    with pytest.raises(ConfigError, match="xla_no_such_flag"):
        xla_flags.check_xla_flags()
    monkeypatch.setattr(xla_flags, "jax_has_started", lambda: True)
    xla_flags.check_xla_flags()


SHARE = "XLA_CLIENT_MEM_FRACTION"
OLD_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture
def nothing_said_of_memory(monkeypatch):
    for name in (SHARE, OLD_SHARE):
        monkeypatch.setenv(name, "")  # so that it is undone after the test, whatever sets it
        del os.environ[name]


@pytest.mark.usefixtures("gpu_plugin", "nothing_said_of_memory")
def test_jax_takes_what_the_planner_calls_safe():
    assert f"# {SHARE}=0.85\n" in xla_flags.as_comment()
    xla_flags.set_memory_share()
    assert os.environ[SHARE] == "0.85"
    assert OLD_SHARE not in os.environ
    assert xla_flags.MEMORY_SHARE > SAFE_SHARE > xla_flags.JAX_MEMORY_SHARE
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == xla_flags.memory_share()


@pytest.mark.usefixtures("gpu_plugin", "nothing_said_of_memory")
@pytest.mark.parametrize("name", [SHARE, OLD_SHARE])
def test_jax_takes_what_a_person_said(monkeypatch, name):
    monkeypatch.setenv(name, "0.5")
    xla_flags.set_memory_share()
    # jax refuses to start where both are set.
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.5
    assert xla_flags.memory_share() == 0.5
    assert f"# {name}=0.85   (left to you)\n" in xla_flags.as_comment()


@pytest.mark.usefixtures("gpu_plugin", "nothing_said_of_memory")
def test_without_gpus_nothing_is_said_of_their_memory(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    xla_flags.set_memory_share()
    assert SHARE not in os.environ


LONE_SUM = """
from spmdtrain.processes.xla_flags import set_xla_flags
set_xla_flags(deviceless=True)
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.deviceless import described_devices
mesh = Mesh(np.array(described_devices(hardware("h100"), 64)), "x")
whole = PartitionSpec()
total = jax.shard_map(
    lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
)
x = jax.ShapeDtypeStruct((2,), np.float32, sharding=NamedSharding(mesh, whole))
print(jax.jit(total).lower(x).compile().as_text())
"""


@pytest.mark.seconds
@needs_compiler
def test_a_lone_sum_over_64_devices_compiles():
    """Without our flag its kernel of XLA ends the process (jaxlib 0.12)."""
    assert "all-reduce-start" in printed(LONE_SUM)
