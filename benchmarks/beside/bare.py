"""A training step of GPT-2 or Llama as one writes it by hand in jax: no framework, one jax.jit.

Layers in a scan or one after the other, matmuls in the asked precision over float32 weights,
jax.nn's attention (cuDNN's on a GPU), optax's AdamW. Letters: b batch, t time, e embed, h heads,
d head dim, f hidden, v vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.config.schema import RunConfig

BLOCK = "blocks.layer."


def parameters(given: dict[str, jax.Array], scanned: bool = True) -> dict[str, Any]:
    """Returns the framework's values in shapes chosen by hand; layers are stacked, or in a list."""
    block = {name.removeprefix(BLOCK): x for name, x in given.items() if name.startswith(BLOCK)}
    others = {name: x for name, x in given.items() if not name.startswith("blocks.")}

    def cut(x):
        """[l, ..., kv heads, slots, d] -> [l, ..., all q, all k, all v]."""
        parts = x[..., :-2, :], x[..., -2, :], x[..., -1, :]
        return jnp.concatenate([each.reshape(*x.shape[:-3], -1) for each in parts], -1)

    qkv = block.pop("attention.qkv_eknd")
    layers = {
        "qkv": cut(qkv),
        "out": block.pop("attention.out_kgde"),
        "up": block.pop("mlp.up_ef"),
        "down": block.pop("mlp.down_fe"),
    }
    embed = layers["qkv"].shape[1]
    layers["out"] = layers["out"].reshape(len(layers["out"]), -1, embed)
    layers["up"] = layers["up"].reshape(len(layers["up"]), embed, -1)
    if "attention.qkv_bias" in block:
        bias = block.pop("attention.qkv_bias")
        layers["qkv_bias"] = cut(bias.reshape(len(bias), *qkv.shape[2:]))
        layers["up_bias"] = block.pop("mlp.up_bias").reshape(len(layers["up"]), -1)
    stack = layers | block
    if scanned:
        return others | {"layers": stack}
    each = range(len(stack["out"]))
    return others | {"layers": [{name: x[i] for name, x in stack.items()} for i in each]}


def loss(config: RunConfig, params: dict[str, Any], tokens_bt, targets_bt) -> jax.Array:
    """Returns the mean cross entropy."""
    dtype = jnp.dtype(config.precision.compute)
    x_bte = params["tokens.table_ve"][tokens_bt]
    if "positions_te" in params:
        x_bte += params["positions_te"][: tokens_bt.shape[1]]
    layer = partial(_layer, config.model, dtype)
    x_bte = x_bte.astype(dtype)
    if isinstance(params["layers"], list):
        for one in params["layers"]:
            x_bte, _ = layer(x_bte, one)
    else:
        x_bte, _ = jax.lax.scan(layer, x_bte, params["layers"])
    x_bte = _norm(config.model, x_bte, params, "norm.")
    head_ve = params.get("unembed_ve", params["tokens.table_ve"]).astype(dtype)
    logits_btv = jnp.einsum("bte,ve->btv", x_bte, head_ve).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_btv, targets_bt).mean()


def _layer(model, dtype, x_bte, p):
    b, t, e = x_bte.shape
    p = {name: x if ".scale" in name else x.astype(dtype) for name, x in p.items()}
    h_bte = _norm(model, x_bte, p, "attention_norm.")
    qkv = h_bte @ p["qkv"] + p.get("qkv_bias", 0)
    widths = (model.heads * model.head_dim, model.kv_heads * model.head_dim)
    q, k, v = (
        each.reshape(b, t, -1, model.head_dim)
        for each in jnp.split(qkv, (widths[0], sum(widths)), -1)
    )
    if model.positions == "rope":
        q, k = _rotated(q, model.rope_theta), _rotated(k, model.rope_theta)
    on_gpu = jax.default_backend() == "gpu" and dtype == jnp.bfloat16
    attended = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn" if on_gpu else "xla"
    )
    x_bte += attended.reshape(b, t, -1) @ p["out"] + p.get("attention.out_bias", 0)
    h_btf = _norm(model, x_bte, p, "mlp_norm.") @ p["up"] + p.get("up_bias", 0)
    if model.mlp == "swiglu":
        gate, value = jnp.split(h_btf, 2, -1)
        h_btf = jax.nn.silu(gate) * value
    else:
        h_btf = _gelu(h_btf)
    return x_bte + h_btf @ p["down"] + p.get("mlp.down_bias", 0), None


# As good as by hand gets: one array of this width kept for the backward pass instead of six makes
# the scanned step 7 % faster on a CPU.
_gelu = partial(jax.checkpoint, prevent_cse=False)(jax.nn.gelu)


def _norm(model, x_bte, p, prefix: str):
    x = x_bte.astype(jnp.float32)
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + model.norm_epsilon)
    return (x * p[prefix + "scale_e"] + p.get(prefix + "bias_e", 0)).astype(x_bte.dtype)


def _rotated(x_bthd, theta: float):
    half = x_bthd.shape[-1] // 2
    angle = jnp.arange(x_bthd.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cosine, sine = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second = jnp.split(x_bthd.astype(jnp.float32), 2, -1)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate(turned, -1).astype(x_bthd.dtype)


def make_step(
    config: RunConfig, given: dict[str, jax.Array], scanned: bool = True
) -> tuple[Any, Any]:
    """Returns the jitted `step(state, (tokens, targets)) -> (state, loss)`, and its first state,
    which it donates.
    """
    asked = config.optimizer

    def matrices(params):
        return jax.tree.map_with_path(lambda path, _: _is_matrix(path[-1].key), params)

    adamw = optax.adamw(
        asked.learning_rate,
        asked.beta1,
        asked.beta2,
        asked.epsilon,
        weight_decay=asked.weight_decay,
        mask=matrices,
    )
    clip = [optax.clip_by_global_norm(config.train.clip)] if config.train.clip else []
    transformation = optax.chain(*clip, adamw)

    def step(state, batch):
        params, moments = state
        value, grads = jax.value_and_grad(partial(loss, config))(params, *batch)
        updates, moments = transformation.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    @jax.jit
    def start(given):
        params = parameters(given, scanned)
        # Whoever gave the values donates them to a step of its own.
        return jax.tree.map(jnp.copy, (params, transformation.init(params)))

    return jax.jit(step, donate_argnums=0), start(given)


def compiled_step(
    config: RunConfig, given: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]
) -> tuple[Callable, Any, int]:
    """Returns the step of `make_step`, compiled, its first state, and the bytes that XLA says it
    needs.
    """
    step, state = make_step(config, given)
    compiled = step.lower(state, batch).compile()
    sizes: Any = compiled.memory_analysis()
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return compiled, state, held + sizes.temp_size_in_bytes


def _is_matrix(name: str) -> bool:
    return not name.endswith(("bias", "scale_e", "bias_e"))
