"""The layers of a transformer. Each names the logical axes of its weights and activations, and
nothing else.

Letters: b batch, t query time, s key time, e embed, k key-value heads, g query heads per key-value
head, d head_dim, f ffn, v vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.attention import attention
from pallas_kernels.choose import Refused
from pallas_kernels.norm import layernorm, rmsnorm
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.projection import MatmulWeight
from spmdtrain.parallel.regions import Whole

# The standard deviation of every weight matrix, as in GPT-2; residual projections divide it by
# sqrt(2 layers).
INIT_STD = 0.02


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float = INIT_STD
) -> nnx.Param:
    """Draws weights from the normal distribution; `axes` are the logical axes of the dims."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape), out_sharding=axes)


def matmul_weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float = INIT_STD
) -> MatmulWeight:
    """`weight`, for `ctx.column_parallel` or `ctx.row_parallel` alone."""
    return MatmulWeight(std * jax.random.normal(rngs.params(), shape), out_sharding=axes)


def bias(size: int, axis: str) -> nnx.Param:
    return nnx.Param(jnp.zeros(size), out_sharding=(axis,))


class Embedding(nnx.Module):
    """A table with a row per id, whose vocabulary may be split over devices."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs):
        self.table_ve = weight(rngs, (vocab, width), ("vocab", "embed"))

    def __call__(self, ids_bt: jax.Array, ctx: ForwardContext) -> jax.Array:
        return ctx.lookup(self.table_ve[...], ids_bt)


class Norm(nnx.Module):
    """LayerNorm (arXiv:1607.06450) or RMSNorm (arXiv:1910.07467) of x [b, t, e] over e.

    Statistics are in float32.
    """

    def __init__(self, config: TransformerConfig):
        self.centred = config.norm == "layernorm"
        self.epsilon = config.norm_epsilon
        self.scale_e = nnx.Param(jnp.ones(config.embed), out_sharding=("norm",))
        self.bias_e = bias(config.embed, "norm") if self.centred and config.bias else None

    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
        norm = layernorm if self.centred else rmsnorm
        # In float32, because their gradients are summed over the devices that share them.
        scale_e = self.scale_e[...].astype(jnp.float32)
        bias_e = None
        if self.bias_e is not None:
            bias_e = self.bias_e[...].astype(jnp.float32)
        of_x = ("batch", "stream_time", None)
        of_vector = (None,)
        kernel = partial(norm, eps=self.epsilon)
        return ctx.local_map(kernel, (x_bte, scale_e, bias_e), (of_x, of_vector, of_vector), of_x)


def rotate(x_btkgd: jax.Array, positions_bt: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (arXiv:2104.09864). Dim i is rotated with dim i + d / 2, as in Llama."""
    half = x_btkgd.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (positions_bt[..., None].astype(jnp.float32) * frequency)[:, :, None, None, :]
    first, second = jnp.split(x_btkgd.astype(jnp.float32), 2, axis=-1)
    turned_first = first * jnp.cos(angle) - second * jnp.sin(angle)
    turned_second = second * jnp.cos(angle) + first * jnp.sin(angle)
    return jnp.concatenate((turned_first, turned_second), -1).astype(x_btkgd.dtype)


# Computes a function again in the backward pass, from its input: one more pass over memory, instead
# of keeping several arrays as wide as f.
# prevent_cse is off: in a scan over layers, XLA has no forward beside it to merge with.
recomputed = partial(jax.checkpoint, prevent_cse=False)


Position = Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values seen so far, of one layer or with a leading layer dim.

    The first `length` of the s places are filled.
    """

    k_bskd: jax.Array
    v_bskd: jax.Array
    length: jax.Array

    def extended(self, k_btkd: jax.Array, v_btkd: jax.Array) -> "Cache":
        start = (0, self.length, 0, 0)
        put = jax.lax.dynamic_update_slice
        k_bskd = put(self.k_bskd, k_btkd, start)
        v_bskd = put(self.v_bskd, v_btkd, start)
        return Cache(k_bskd, v_bskd, self.length + k_btkd.shape[1])


class Attention(nnx.Module):
    """Grouped-query attention within segments: to the tokens before, or without `causal` to all.

    One fused projection makes queries, keys and values. `position(x_btkgd, positions_bt)` marks
    queries and keys with the position of their token; default: `rotate` if `model.positions` is
    rope.
    """

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        *,
        position: Position | None = None,
        causal: bool = True,
    ):
        self.position = position
        self.causal = causal
        self.heads = config.key_value_heads
        self.dim = config.width_per_head
        self.group = config.heads // self.heads
        self.theta = config.rope_theta if config.positions == "rope" else None
        self.implementation = None if config.attention == "auto" else config.attention
        # The slots of a key-value head: its group of query heads, its keys, its values.
        slots = self.group + 2
        qkv_shape = (config.embed, self.heads, slots, self.dim)
        out_shape = (self.heads, self.group, self.dim, config.embed)
        out_std = INIT_STD * (2 * config.layers) ** -0.5
        self.qkv_eknd = matmul_weight(rngs, qkv_shape, ("embed", "kv_heads", None, "head_dim"))
        out_axes = ("kv_heads", None, "head_dim", "embed")
        self.out_kgde = matmul_weight(rngs, out_shape, out_axes, out_std)
        self.qkv_bias = bias(self.heads * slots * self.dim, "kv_heads") if config.bias else None
        self.out_bias = bias(config.embed, "norm") if config.bias else None

    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        of_qkv = ("kv_heads", None, "head_dim")
        qkv = ctx.column_parallel(x_bte, self.qkv_eknd, of_qkv)
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias[...].reshape(qkv.shape[2:])
        qkv = ctx.constrain(qkv, "batch", "time", *of_qkv)
        position = self.position
        if position is None and self.theta:
            position = partial(rotate, theta=self.theta)
        if position is not None:
            turned = position(qkv[..., :-1, :], ctx.positions_bt)
            q = turned[..., :-1, :]
            k = turned[..., -1, :]
        else:
            q = qkv[..., :-2, :]
            k = qkv[..., -2, :]
        v = qkv[..., -1, :]
        if cache is not None:
            if not self.causal:
                what = "a key-value cache holds the tokens before; attention here is not causal"
                raise ConfigError(what, fix="Attention(causal=True)")
            cache = cache.extended(k, v)
            k = cache.k_bskd
            v = cache.v_bskd
        attended = self._attend(q, k, v, ctx, cache)
        attended = ctx.constrain(attended, "batch", "time", *of_qkv)
        y = ctx.row_parallel(attended, self.out_kgde, of_qkv)
        if self.out_bias is not None:
            y = y + self.out_bias[...]
        return y, cache

    def _attend(
        self, q_btkgd, k_bskd, v_bskd, ctx: ForwardContext, cache: Cache | None
    ) -> jax.Array:
        """Attends on each device from its own heads and queries to all keys: [b, t, k, g, d]."""
        places_bs = jnp.broadcast_to(jnp.arange(k_bskd.shape[1]), k_bskd.shape[:2])
        places_bt = places_bs if cache is None else ctx.positions_bt

        def local(q, k, v, q_segments, k_segments, q_places, k_places):
            # With all queries on this device, the mask is known while tracing.
            aligned = not self.causal or (cache is None and q.shape[1] == k.shape[1])
            q_bthd = q.reshape(*q.shape[:2], -1, self.dim)
            options = {
                "causal": self.causal,
                "segment_ids": None if q_segments is None else (q_segments, k_segments),
                "positions": None if aligned else (q_places, k_places),
                "implementation": self.implementation,
            }
            try:
                y_bthd: Any = attention(q_bthd, k, v, **options)
            except Refused as refused:
                asked = f"model.attention={self.implementation!r}"
                what = f"{asked} cannot run: {refused.reason}"
                raise ConfigError(what, fix="--set model.attention=auto") from None
            return y_bthd.reshape(q.shape)

        # Keys are split over time as queries are, and gathered here. A cache is not split.
        key_time = Whole("time") if cache is None else None
        of_q = ("batch", "time", "kv_heads", None, None)
        of_k = ("batch", key_time, "kv_heads", None)
        of_q_token = ("batch", "time")
        of_k_token = ("batch", key_time)
        segments = ctx.segment_ids_bt if cache is None else None
        arrays = (q_btkgd, k_bskd, v_bskd, segments, segments, places_bt, places_bs)
        names = (of_q, of_k, of_k, of_q_token, of_k_token, of_q_token, of_k_token)
        return ctx.local_map(local, arrays, names, of_q)


@recomputed
def gelu(h_btf: jax.Array) -> jax.Array:
    """GELU (arXiv:1606.08415) in its tanh form, as GPT-2 has it."""
    return jax.nn.gelu(h_btf)


@recomputed
def swiglu(h_bt2f: jax.Array) -> jax.Array:
    """SwiGLU (arXiv:2002.05202) of gate and value."""
    return jax.nn.silu(h_bt2f[:, :, 0]) * h_bt2f[:, :, 1]


class Mlp(nnx.Module):
    """GELU mlp, or SwiGLU with gate and value in one projection, a dim of two before f."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.gated = config.mlp == "swiglu"
        hidden = config.hidden
        if self.gated:
            self.up_shape = (2, hidden)
            self.up_axes = (None, "ffn")
        else:
            self.up_shape = (hidden,)
            self.up_axes = ("ffn",)
        down_std = INIT_STD * (2 * config.layers) ** -0.5
        up_shape = (config.embed, *self.up_shape)
        self.up_ef = matmul_weight(rngs, up_shape, ("embed", *self.up_axes))
        self.down_fe = matmul_weight(rngs, (hidden, config.embed), ("ffn", "embed"), down_std)
        if config.bias:
            self.up_bias = nnx.Param(jnp.zeros(self.up_shape), out_sharding=self.up_axes)
            self.down_bias = bias(config.embed, "norm")
        else:
            self.up_bias = None
            self.down_bias = None

    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
        h = ctx.column_parallel(x_bte, self.up_ef, self.up_axes)
        if self.up_bias is not None:
            h = h + self.up_bias[...]
        h = ctx.constrain(h, "batch", "time", *self.up_axes)
        h = swiglu(h) if self.gated else gelu(h)
        y = ctx.row_parallel(h, self.down_fe, ("ffn",))
        if self.down_bias is not None:
            y = y + self.down_bias[...]
        return y
