"""Each of the three precisions decides what it says, and nothing else: traced, not run."""

import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import gradients, prepared

from spmdtrain.config import ConfigError
from spmdtrain.train import step
from spmdtrain.train.setup import Setup

DTYPES = ("float32", "bfloat16")
LAYOUTS = {
    "one microbatch": (),
    "accumulation": ("train.microbatch=1",),
    "pipeline": ("mesh.pipeline=2", "mesh.data=2", "train.microbatch=2"),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """On CPUs matmuls of 16-bit numbers are computed in float32: see wide_sums.py."""
    monkeypatch.setattr(Setup, "platform", "cuda")


def lowered(what: str, *overrides: str) -> jax.stages.Lowered:
    """`make_gradients` or `make_losses` of the layout."""
    setup = prepared(*overrides)
    function = getattr(step, what)(setup)
    state, batch = setup.state, setup.batch
    given = (state.params, state.step, batch) if what == "make_gradients" else (state.params, batch)
    return jax.jit(function).lower(*given)


def matmuls(what: str, layout: str, params: str, compute: str) -> Counter:
    """How often each kind of matmul stands in the program, by shapes and dtypes."""
    asked = f"precision.params={params}", f"precision.compute={compute}"
    text = lowered(what, *LAYOUTS[layout], *asked).as_text()
    return Counter(re.findall(r"stablehlo\.dot_general .* : (\(.*)", text))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", ["make_gradients", "make_losses"])
@pytest.mark.seconds
def test_matmuls_are_of_compute_precision_however_weights_rest(what, layout):
    narrow, wide = (
        matmuls(what, layout, "float32", compute) for compute in ("bfloat16", "float32")
    )
    assert narrow == matmuls(what, layout, "bfloat16", "bfloat16")
    assert not any("bf16" in kind for kind in wide)
    assert (
        sum(count for kind, count in narrow.items() if kind.count("bf16") >= 2)
        >= sum(wide.values()) / 2
    )


@pytest.mark.seconds
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("accumulate", "compute"), list(itertools.product(DTYPES, DTYPES)))
def test_gradients_add_up_in_the_precision_of_accumulation(layout, accumulate, compute):
    asked = f"precision.accumulate={accumulate}", f"precision.compute={compute}"
    found, sums = lowered("make_gradients", *LAYOUTS[layout], *asked).out_info
    assert {leaf.dtype for leaf in found.values()} == {jnp.dtype(accumulate)}
    assert {leaf.dtype for leaf in sums.values()} == {jnp.dtype("float32")}


def test_more_microbatches_than_bfloat16_sums_are_refused():
    """Of 1,024 equal ones half is lost, and of 256 they are 6 % off."""
    asked = ("train.microbatch=1", "precision.accumulate=bfloat16")
    prepared(*asked, "train.global_batch=64")
    with pytest.raises(ConfigError, match="65 microbatches"):
        prepared(*asked, "train.global_batch=65")


@pytest.mark.long
def test_as_many_microbatches_as_are_taken_have_the_gradient_of_float32():
    batch = ("train.global_batch=64",)
    _, want = gradients(batch)
    _, got = gradients((*batch, "precision.accumulate=bfloat16"), ("train.microbatch=1",))
    for path, x in want.items():
        off = np.linalg.norm(np.float32(got[path]) - x) / np.linalg.norm(x)
        assert off < 0.02, f"{path}: {off:.3f}"


SHAPED = ("train.label_smoothing=0.1", "train.z_loss=1e-4")


@pytest.mark.parametrize(
    "settings",
    [
        ("data.packing=documents", *SHAPED),
        ("mesh.data=2", "train.zero=1", "train.remat=dots"),
        (
            "mesh.fsdp=2",
            "mesh.tensor=2",
            "model.norm=rmsnorm",
            "model.mlp=swiglu",
            "model.positions=rope",
        ),
        ("mesh.pipeline=2", "mesh.context=2", "train.microbatch=2", "model.dropout=0.1"),
    ],
    ids=" ".join,
)
@pytest.mark.seconds
def test_no_value_is_promoted_to_another_dtype_unasked(settings):
    """A float32 that meets a bfloat16 would widen all that follows, in silence and at twice the
    traffic.
    """
    with jax.numpy_dtype_promotion("strict"):
        lowered("make_gradients", *settings, "precision.compute=bfloat16")
        lowered("make_losses", *settings, "precision.compute=bfloat16")
