"""Which implementation runs, and the error where none does; kernels compiled without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels import choose
from pallas_kernels.attention import cudnn
from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.backends import mosaic
from pallas_kernels.calls import NormCall
from pallas_kernels.choose import Refused
from pallas_kernels.chosen import using
from pallas_kernels.norm import triton

ROOT = Path(__file__).parents[2]
REFUSALS = {
    "fast": lambda _: "too odd",
    "plain": lambda interpreted: "not interpreted" if interpreted else "",
}


CALL = NormCall(
    op="op", rows=1, width=1, dtype="float32", scale="float32", bias=None, residual=None
)


def test_the_first_that_does_not_refuse_or_the_named_one():
    assert choose.choose("op", REFUSALS, ("fast", "plain"), None, CALL) == "plain"
    assert choose.choose("op", REFUSALS, ("fast",), "plain", CALL) == "plain"
    with pytest.raises(Refused, match="op: implementation 'fast' refuses: too odd"):
        choose.choose("op", REFUSALS, ("fast", "plain"), "fast", CALL)
    with pytest.raises(Refused, match="not interpreted"):
        choose.choose("op", REFUSALS, ("fast", "plain"), "plain:interpret", CALL)
    with pytest.raises(Refused, match="no implementation runs this call. fast: too odd"):
        choose.choose("op", REFUSALS, ("fast",), None, CALL)


def test_a_decision_comes_before_the_order_and_a_name_before_both():
    def run(asked=None):
        return choose.choose("op", REFUSALS | {"third": lambda _: ""}, ("plain",), asked, CALL)

    with using({CALL.name: "third"}) as decisions:
        assert run("plain") == "plain" and decisions.taken == {}
        assert run() == "third"
        assert decisions.taken == {CALL.name: "third"} and decisions.calls == {CALL.name: CALL}
        assert decisions.missed == {}
    for decided, why in (("fast", "fast: too odd"), ("older", "older: there is no older")):
        with using({CALL.name: decided}) as decisions:
            assert run() == "plain"
            assert decisions.taken == {CALL.name: "plain"}
            assert decisions.missed == {CALL.name: why}
    assert run() == "plain"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("NVIDIA H200", ""),
        ("NVIDIA RTX 2000 Ada Generation", ""),
        ("NVIDIA L4", ""),
        ("NVIDIA A40", ""),
        ("Tesla V100-SXM2-16GB", "needs sm_80"),
        ("Tesla T4", "needs sm_80"),
        ("NVIDIA GeForce RTX 2080 Ti", "needs sm_80"),
        ("NVIDIA GeForce GTX 1080 Ti", "needs sm_80"),
        ("AMD Instinct", "needs an NVIDIA"),
    ],
)
def test_old_and_other_gpus_are_refused(kind, said, monkeypatch):
    monkeypatch.setattr(choose, "device_kind", lambda: kind)
    assert choose.no_gpu(False).startswith(said) and bool(choose.no_gpu(False)) == bool(said)
    assert choose.no_gpu(True) == ""


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="has no Mosaic GPU kernels")
@pytest.mark.parametrize(
    ("version", "said"), [(0, ""), (12070, ""), (12080, "12.9.1"), (12090, "12.9.1"), (13000, "")]
)
def test_a_compiler_that_is_known_to_be_wrong_is_refused(version, said, monkeypatch):
    monkeypatch.setattr(mosaic, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(mosaic, "_cuda_version", lambda: version)
    refused = mosaic.refusal(False)
    assert said in refused and bool(said) == bool(refused)
    assert mosaic.refusal(True) == ""


@pytest.mark.parametrize(
    ("kind", "runs"),
    [("NVIDIA H200", True), ("NVIDIA B200", True), ("NVIDIA A800-SXM4-80GB", False)],
)
def test_wide_heads_run_on_cudnn_from_hopper_on(kind, runs, monkeypatch):
    for module in (cudnn, choose):
        monkeypatch.setattr(module, "device_kind", lambda: kind)
    monkeypatch.setattr(cudnn, "_not_installed", lambda: "")
    q = jax.ShapeDtypeStruct((1, 64, 2, 256), "bfloat16")
    refused = cudnn.refusal(Problem(None, 0, None, 1.0), Inputs(q, q, q), False)
    assert refused == ("" if runs else "one head dim, a multiple of 8 up to 128, not 256 and 256")


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax's version is said first")
def test_kernels_whose_counters_have_32_bits_refuse_64():
    with jax.enable_x64(True):
        for refused in (mosaic.refusal(True), triton.refusal((4, 16), True)):
            assert refused.startswith("no 64 bit numbers (jax_enable_x64)")


def test_a_mesh_in_use_says_what_is_compiled_for():
    mesh = jax.make_mesh((1,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    assert choose.device_kind() == jax.devices()[0].device_kind
    with jax.set_mesh(mesh):
        assert choose.device_kind() == jax.devices()[0].device_kind


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11) or not importlib.util.find_spec("jax_cuda13_plugin"),
    reason="needs jax 0.11 and its CUDA plugin",
)
def test_kernels_go_through_ptxas():
    """The first two cases of each op for sm_80, sm_90a and sm_100a; `make aot` takes all."""
    command = [sys.executable, "-m", "pallas_kernels.aot", "--first", "2", "--jobs", "2"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "PYTHONPATH": path
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for gpu in ("a100-80", "h200", "b200"):
        for op in ("attention", "norm", "grouped"):
            assert f"{gpu} {op} triton {{'compiled': 2, 'refused': 0, 'failed': 0}}" in done.stdout
    assert "h200 attention mosaic {'compiled': 1, 'refused': 1, 'failed': 0}" in done.stdout
    assert "h200 grouped mosaic {'compiled': 1, 'refused': 1, 'failed': 0}" in done.stdout
    assert "b200 attention mosaic refused 1: needs an NVIDIA GPU of sm_90 (Hopper)" in done.stdout
