"""FLOPs counted in a model's program: the formula's on the shipped models, and right inside loops
and kernels.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, family_config
from flax import nnx
from helpers import prepared, tiny

from pallas_kernels.attention import attention
from pallas_kernels.counting import counted, seen_pairs
from spmdtrain.models.abstract import build_model
from spmdtrain.models.counted_flops import (
    UncountableError,
    counted_flops_per_token,
    flops_of,
)
from spmdtrain.models.size import train_flops_per_token
from spmdtrain.models.transformer import Transformer
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.flops import model_flops_per_token
from spmdtrain.planner.cost.trained_weights import trained_part
from spmdtrain.planner.cost.workload import model_of
from spmdtrain.running.report import metrics
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_gradients


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("model.name=llama", "model.kv_heads=2"),
        ("model.layers=3", "model.tied=false", "model.head_dim=16"),
        ("model.layers=5", "model.windows=7,20,0,64", "model.mlp=geglu"),
        ("model.layers=5", "model.chunks=7,20,0,64"),
        ("model.heads=4", "model.kv_heads=2", "model.output_gate=channel"),
        ("model.heads=4", "model.kv_heads=2", "model.output_gate=head"),
        (
            *("model.layers=5", "model.experts.count=4", "model.experts.chosen=2"),
            *("model.experts.first_dense=1", "model.experts.every=2", "model.experts.shared=1"),
            *("model.experts.shared_ffn=48", "model.experts.shared_gate=true"),
        ),
        (
            *("model.layers=3", "model.mlp=swiglu", "model.windows=7,0", "model.shared_keys=1"),
            *("model.shared_ffn=80", "model.token_layers.dim=6", "model.experts.count=4"),
            *("model.experts.chosen=2", "model.experts.shared=1", "model.experts.own_norms=true"),
            "model.experts.learned_scale=true",
        ),
        (
            *("model.name=llama", "model.latent.rank=16", "model.latent.query_rank=24"),
            *("model.latent.plain_dim=8", "model.latent.rope_dim=4", "model.latent.value_dim=6"),
        ),
        (
            *("model.layers=3", "model.multi_token.depth=2"),
            *("model.experts.count=4", "model.experts.chosen=2", "model.experts.first_dense=1"),
        ),
    ],
)
def test_the_shipped_models_have_the_flops_of_the_formula(settings):
    config = tiny("model.vocab=64", *settings, "train.sequence_length=64")
    want = train_flops_per_token(config.model, 64)
    assert counted_flops_per_token(config, build_model(config)) == pytest.approx(want, rel=1e-6)


@pytest.mark.seconds
@pytest.mark.parametrize("name", FAMILIES)
def test_the_planner_knows_parameters_and_flops_of_a_family(name):
    config = family_config(name)
    length = 64  # whole chunks: the program computes those of a part whole
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"sequence_length": length})}
    )
    model = build_model(config)
    assert shape.parameters(config.model) == model.size
    counted = counted_flops_per_token(config, model)
    assert train_flops_per_token(config.model, length) == pytest.approx(counted, rel=1e-4)
    assert model_flops_per_token(config.model, length) == pytest.approx(counted, rel=1e-4)


LORA = ("finetune.kind=lora", "finetune.rank=4", "finetune.targets=q,out,up,down")


ONE_LAYER = ("model.layers=1", "train.sequence_length=64", "train.remat=none")


def of_gradients(*settings: str) -> tuple[Any, tuple, float, float]:
    """(what makes a step's gradients, its abstract arguments, FLOPs counted, tokens)."""
    setup = prepared(*ONE_LAYER, *settings)
    counted = counted_flops_per_token(setup.config, setup.model)
    assert counted is not None
    arguments = (setup.state.params, 0, setup.batch)
    tokens = setup.batch["tokens"].size
    return jax.jit(make_gradients(setup)), arguments, counted * tokens, tokens


@pytest.mark.seconds
def test_a_frozen_weight_has_no_gradient_in_the_compiled_step():
    """A text has the body of a loop once: there is one layer."""
    (full, of_full, all_counted, tokens), (lora, of_lora, counted, _) = (
        of_gradients(*settings) for settings in ((), LORA)
    )
    assert counted / tokens == pytest.approx(planned(*ONE_LAYER, *LORA), rel=1e-6)
    all_done, done = (
        flops_of_text(step.lower(*arguments).compile().as_text())
        for step, arguments in ((full, of_full), (lora, of_lora))
    )
    # Attention is the same in both, and counts half of what the program computes. Below the only
    # layer is a frozen embedding, so its input has no gradient either: by q, k, v and q's adapter.
    of_input = 2 * tokens * 32 * (3 * 32 + 4)
    assert all_done - done == pytest.approx(all_counted - counted + of_input, rel=1e-6)


def flops_of_text(hlo_text: str) -> float:
    """Returns the FLOPs of the matmuls in a compiled text, each counted once."""
    typed = re.findall(r"(%[\w.-]+) = \w+\[([\d,]*)\]", hlo_text)
    shapes = {name: [int(size) for size in sizes.split(",") if size] for name, sizes in typed}
    dots = re.findall(
        r"(%[\w.-]+) = \S+ dot\((%[\w.-]+),.*?lhs_contracting_dims=\{([\d,]*)\}", hlo_text
    )
    assert dots
    return sum(
        2 * math.prod(shapes[y]) * math.prod(shapes[x][int(dim)] for dim in dims.split(","))
        for y, x, dims in dots
    )


def test_an_adapter_has_its_own_matmuls_and_what_else_is_trained_its_gradient():
    """In the program of a step, to the last one."""
    also = (*LORA[:2], "finetune.targets=up,down", "finetune.also_train=tokens.*,*.qkv_eknd")
    (full, of_full, all_counted, tokens), (lora, of_lora, counted, _) = (
        of_gradients(*settings) for settings in ((), also)
    )
    assert counted / tokens == pytest.approx(planned(*ONE_LAYER, *also), rel=1e-6)
    all_done, done = (
        flops_of(step.trace(*arguments).jaxpr.jaxpr)
        for step, arguments in ((full, of_full), (lora, of_lora))
    )
    assert all_counted - counted == pytest.approx(all_done - done, rel=1e-6)


def planned(*settings: str) -> float:
    config = tiny("train.sequence_length=64", *settings)
    return model_flops_per_token(model_of(config), 64, trained_part(config))


def test_few_bits_and_magnitudes_are_no_matmuls_of_a_token():
    few = tiny("train.sequence_length=64", *LORA, "finetune.kind=dora", "finetune.base=nf4")
    assert counted_flops_per_token(few, build_model(few)) == pytest.approx(planned(*LORA), rel=1e-6)


class OwnAttention(nnx.Module):
    """Plain attention: its square counts whole, as it is written."""

    def __init__(self, config, rngs):
        del config, rngs

    def __call__(self, x_bte, ctx, cache):
        del ctx
        scores = jax.nn.softmax(jnp.einsum("bte,bse->bts", x_bte, x_bte))
        return jnp.einsum("bts,bse->bte", scores, x_bte), cache


def test_a_model_of_ones_own_counts_what_it_multiplies(monkeypatch):
    def make(config, rngs):
        return Transformer(config, rngs, attention=OwnAttention)

    config = tiny("model.layers=2", "model.embed=32", "model.ffn=48", "train.sequence_length=16")
    mlp = 2 * 32 * 48
    squares = 2 * 16 * 32  # two matmuls of a token with all others
    want = 3 * 2 * (2 * (mlp + squares) + 64 * 32)
    setup = shard(config, make, jax.devices()[:1])
    assert counted_flops_per_token(config, setup.model) == want
    monkeypatch.setattr(metrics, "peak_flops", lambda _: 1e12)
    taken = {"tokens": np.float32(10), "loss": np.float32(1)}
    processed = config.train.global_batch * 16  # whatever has a loss
    want_mfu = want * processed / 0.5 / 1e12
    assert metrics.make_figures(setup)(1, taken, 0.5)["mfu"] == pytest.approx(want_mfu)
    few = prepared("train.sequence_length=64", *LORA)
    want_mfu = planned(*LORA) * few.batch["tokens"].size / 0.5 / 1e12
    assert metrics.make_figures(few)(1, taken, 0.5)["mfu"] == pytest.approx(want_mfu)


def test_a_convolution_a_branch_and_a_loop_of_unknown_length():
    x = jnp.zeros((1, 8, 4))
    w = jnp.zeros((3, 4, 6))
    conv = lambda x, w: jax.lax.conv_general_dilated(  # noqa: E731
        x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    assert flops_of(jax.make_jaxpr(conv)(x, w).jaxpr) == 2 * 8 * 6 * 3 * 4
    m = jnp.zeros((4, 4))
    branch = lambda m: jax.lax.cond(m[0, 0] > 0, lambda m: m @ m, lambda m: m @ m @ m, m)  # noqa: E731
    assert flops_of(jax.make_jaxpr(branch)(m).jaxpr) == 2 * 2 * 64
    loop = lambda m: jax.lax.while_loop(lambda m: m[0, 0] < 9, lambda m: m @ m, m)  # noqa: E731
    with pytest.raises(UncountableError):
        flops_of(jax.make_jaxpr(loop)(m).jaxpr)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(2, 0), (None, 1), (3, 2), (1, None)])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 7)])
def test_pairs_of_a_window_are_those_that_a_mask_shows(queries, keys, causal, window):
    place = np.arange(queries)[:, None] + keys - queries
    key = np.arange(keys)
    seen = np.ones((queries, keys), bool)
    if causal:
        seen &= key <= place
    left, right = window
    if left is not None:
        seen &= key >= place - left
    if right is not None:
        seen &= key <= place + right
    assert seen_pairs(queries, keys, causal, window) == seen.sum()


def test_only_inside_is_a_kernel_a_mark():
    q = jnp.ones((1, 4, 2, 8))
    with counted():
        assert not attention(q, q, q).any()
    assert attention(q, q, q).any()
