"""Frozen weights of few bits: the numbers that are kept, and how far they are from the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny
from jax.scipy.stats import norm

import spmdtrain as st
from spmdtrain.models.adapters.by_path import merged
from spmdtrain.models.adapters.quantised import NF4, dequantised, quantised
from spmdtrain.train.external_arrays.check_arrays import check_params


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.seconds
def test_the_levels_of_nf4_are_quantiles_as_published():
    """arXiv:2305.14314, section 3: 8 above zero, 7 below, and zero; the largest is one."""
    tail = 0.9677083
    above = norm.ppf(np.linspace(tail, 0.5, 9)[:-1])
    below = -norm.ppf(np.linspace(tail, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([above, [0], below])) / np.max(above)
    assert np.allclose(levels, NF4, atol=1e-6)


@pytest.mark.seconds
def test_nf4_has_the_nearest_level_of_each_block_of_the_input():
    """One block after another, in numpy, with the scales as they are kept."""
    w = normal(2, 128, 3, 512) * np.float32(0.02)  # two layers, and scales of two groups
    arrays = quantised(jnp.asarray(w), "nf4", 1, 1, "w")
    assert {name: (str(x.dtype), x.shape) for name, x in arrays.items()} == {
        "codes": ("uint8", (2, 64, 3, 512)),
        "scales": ("uint8", (2, 2, 3, 512)),
        "group_scales": ("uint32", (2, 2, 3, 2)),
    }
    got = np.asarray(dequantised(arrays, "nf4", 1, 1))
    blocks = w.reshape(2, 2, 64, 3, 512)
    largest = np.abs(blocks).max(2, keepdims=True)
    nearest = np.abs((blocks / largest)[..., None] - NF4).argmin(-1)
    groups = largest.reshape(2, 2, 1, 3, 2, 256)
    unit = groups.max(-1, keepdims=True) / 255
    scale = (np.round(groups / unit) * unit).reshape(largest.shape)
    assert np.allclose(got.reshape(blocks.shape), NF4[nearest] * scale, rtol=1e-6, atol=0)
    off = np.linalg.norm(got - w) / np.linalg.norm(w)
    assert 0.08 < off < 0.10  # of normal weights


def test_int8_is_within_half_a_step_of_each_output():
    w = normal(6, 2, 5, 8)  # [*i, o]
    arrays = quantised(jnp.asarray(w), "int8", 0, 3, "w")
    assert arrays["integers"].dtype == jnp.int8
    assert arrays["scales"].shape == (8,)
    step = np.abs(w).max((0, 1, 2)) / 127
    assert np.all(np.abs(dequantised(arrays, "int8", 3) - w) <= step / 2 * 1.0001)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_weights_of_zero_stay_zero(kind):
    """Those of layers that pad a pipeline are."""
    arrays = quantised(jnp.zeros((64, 4)), kind, 0, 1, "w")
    assert np.array_equal(dequantised(arrays, kind, 1), np.zeros((64, 4)))


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.seconds
def test_public_functions_take_the_integers_of_a_quantised_base(base):
    setup = st.shard(tiny("finetune.kind=lora", f"finetune.base={base}"), devices=jax.devices()[:1])
    params = {path: np.zeros(x.shape, x.dtype) for path, x in setup.state.params.items()}
    check_params(setup, params)
    path = next(path for path, x in params.items() if x.dtype.kind in "iu")
    with pytest.raises(st.UserError, match="is float32"):
        check_params(setup, params | {path: params[path].astype(np.float32)})


def test_what_was_quantised_is_not_merged():
    finetune = tiny("finetune.kind=lora", "finetune.base=nf4").finetune
    with pytest.raises(st.UserError, match="finetune.base='nf4': adapters are merged with the or"):
        merged({}, finetune, tiny().model)


def test_what_gives_no_blocks_is_refused():
    with pytest.raises(st.UserError, match="attention.out_kgde contracts 13 numbers.*base=int8"):
        asked = ("model.embed=65", "model.heads=5", "finetune.kind=lora", "finetune.base=nf4")
        st.shard(tiny(*asked), devices=jax.devices()[:1])


def test_an_output_that_pruning_has_left_without_weights_stays_zero():
    """Its norm is 0, and so is the magnitude with which DoRA begins."""
    finetune = tiny("finetune.kind=dora", "finetune.rank=2").finetune
    path = "blocks.layer.mlp.down_fe"
    w = normal(1, 6, 4)
    w[..., 1] = 0
    norms = np.linalg.norm(w, axis=1)
    adapter = {"a": normal(1, 6, 2), "b": np.zeros((1, 2, 4), np.float32), "magnitude": norms}
    arrays = {f"{path}.down.{name}": x for name, x in adapter.items()}
    plain = merged({path: w, **arrays}, finetune, tiny().model)
    assert plain.keys() == {path}
    np.testing.assert_allclose(plain[path], w, rtol=1e-6)
