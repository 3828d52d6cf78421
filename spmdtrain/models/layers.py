"""The layers of a transformer, each naming the logical axes of its weights and activations and nothing else.

Letters: b batch, t query time, s key time, e embed, k key-value heads, g query heads per key-value head, d head_dim,
f ffn, v vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.attention import attention
from pallas_kernels.choose import Refused
from pallas_kernels.norm import layernorm, rmsnorm
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.parallel.regions import Whole

STREAM = ("batch", "stream_time", "embed")  # the logical axes of the residual stream
INIT_STD = 0.02  # of every weight matrix (GPT-2); residual projections are scaled down by 1 / sqrt(2 layers)


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float = INIT_STD) -> nnx.Param:
    """Normal weights of standard deviation `std`; `axes` are the logical axes of the dims."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape), out_sharding=axes)


def bias(size: int, axis: str) -> nnx.Param:
    return nnx.Param(jnp.zeros(size), out_sharding=(axis,))


class Embedding(nnx.Module):
    """A row of the table per id; the vocabulary may be split."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs):
        self.table_ve = weight(rngs, (vocab, width), ("vocab", "embed"))

    def __call__(self, ids_bt: jax.Array, ctx: ForwardContext) -> jax.Array:
        return ctx.lookup(self.table_ve[...], ids_bt)


class Norm(nnx.Module):
    """LayerNorm (arXiv:1607.06450) or RMSNorm (arXiv:1910.07467) of x [b, t, e] over e, statistics in float32."""

    def __init__(self, config: TransformerConfig):
        self.centred, self.epsilon = config.norm == "layernorm", config.norm_epsilon
        self.scale_e = nnx.Param(jnp.ones(config.embed), out_sharding=("norm",))
        self.bias_e = bias(config.embed, "norm") if self.centred and config.bias else None

    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
        kernel = partial(layernorm if self.centred else rmsnorm, eps=self.epsilon)
        vectors = [None if each is None else each[...].astype(jnp.float32) for each in (self.scale_e, self.bias_e)]
        of_x = "batch", "stream_time", None
        return ctx.local_map(kernel, (x_bte, *vectors), (of_x, (None,), (None,)), of_x)


def rotate(x_btkgd: jax.Array, positions_bt: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (arXiv:2104.09864), halves rotated against each other as in Llama."""
    half = x_btkgd.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (positions_bt[..., None].astype(jnp.float32) * frequency)[:, :, None, None, :]
    first, second = jnp.split(x_btkgd.astype(jnp.float32), 2, axis=-1)
    turned = (first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle))
    return jnp.concatenate(turned, -1).astype(x_btkgd.dtype)


# The backward pass starts from the input again, a pass over memory, instead of keeping several arrays as wide as f.
recomputed = partial(jax.checkpoint, prevent_cse=False)  # layers run in a scan: there is nothing to merge with


def project(equation: str, x_bte: jax.Array, weight: jax.Array, ctx: ForwardContext) -> jax.Array:
    """`einsum(equation, x, weight)` of a residual stream x, with its tokens brought together.

    Where the stream is split over `tensor` too (sequence parallelism), a device keeps its own tokens
    for the backward pass and gathers again there (arXiv:2205.05198, section 4.2.2).
    """

    def whole(x_bte: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum(equation, ctx.constrain(x_bte, "batch", "time", "embed"), weight)

    if ctx.stream_is_split and ctx.remat in ("none", "weights"):
        whole = recomputed(whole)
    return whole(x_bte, weight)


Position = Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values seen so far, of one layer or with a leading layer dim; `length` of the s places are filled."""

    k_bskd: jax.Array
    v_bskd: jax.Array
    length: jax.Array

    def extended(self, k_btkd: jax.Array, v_btkd: jax.Array) -> "Cache":
        start = (0, self.length, 0, 0)
        put = jax.lax.dynamic_update_slice
        return Cache(put(self.k_bskd, k_btkd, start), put(self.v_bskd, v_btkd, start), self.length + k_btkd.shape[1])


class Attention(nnx.Module):
    """Causal grouped-query attention within segments.

    One fused projection makes queries, keys and values. `position(x_btkgd, positions_bt)` turns
    queries and keys by the place of their token; default: `rotate` if `model.positions` is rope.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, *, position: Position | None = None):
        self.position = position
        self.heads, self.dim = config.key_value_heads, config.width_per_head
        self.group = config.heads // self.heads
        self.theta = config.rope_theta if config.positions == "rope" else None
        self.implementation = None if config.attention == "auto" else config.attention
        slots, std = self.group + 2, INIT_STD * (2 * config.layers) ** -0.5
        self.qkv_eknd = weight(
            rngs, (config.embed, self.heads, slots, self.dim), ("embed", "kv_heads", None, "head_dim")
        )
        self.out_kgde = weight(
            rngs, (self.heads, self.group, self.dim, config.embed), ("kv_heads", None, "head_dim", "embed"), std
        )
        self.qkv_bias = bias(self.heads * slots * self.dim, "kv_heads") if config.bias else None
        self.out_bias = bias(config.embed, "norm") if config.bias else None

    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        qkv = project("bte,eknd->btknd", x_bte, self.qkv_eknd[...], ctx)
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias[...].reshape(qkv.shape[2:])
        qkv = ctx.constrain(qkv, "batch", "time", "kv_heads", None, "head_dim")
        if self.position or self.theta:
            position = self.position or partial(rotate, theta=self.theta)
            turned = position(qkv[..., :-1, :], ctx.positions_bt)
            q, k, v = turned[..., :-1, :], turned[..., -1, :], qkv[..., -1, :]
        else:
            q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        if cache is not None:
            cache = cache.extended(k, v)
            k, v = cache.k_bskd, cache.v_bskd
        y = ctx.constrain(self._attend(q, k, v, ctx, cache), "batch", "time", "kv_heads", None, "head_dim")
        y = ctx.constrain(jnp.einsum("btkgd,kgde->bte", y, self.out_kgde[...]), *STREAM)
        return (y if self.out_bias is None else y + self.out_bias[...]), cache

    def _attend(self, q_btkgd, k_bskd, v_bskd, ctx: ForwardContext, cache: Cache | None) -> jax.Array:
        """[b, t, k, g, d], each device its own heads and queries; the keys come whole."""
        places_bs = jnp.broadcast_to(jnp.arange(k_bskd.shape[1]), k_bskd.shape[:2])
        places_bt = places_bs if cache is None else ctx.positions_bt

        def local(q, k, v, q_segments, k_segments, q_places, k_places):
            aligned = cache is None and q.shape[1] == k.shape[1]  # all queries are here: what each sees is known now
            options = {
                "causal": True,
                "segment_ids": None if q_segments is None else (q_segments, k_segments),
                "positions": None if aligned else (q_places, k_places),
                "implementation": self.implementation,
            }
            try:
                return attention(q.reshape(*q.shape[:2], -1, self.dim), k, v, **options).reshape(q.shape)
            except Refused as refused:
                asked = f"model.attention={self.implementation!r}"
                raise ConfigError(f"{asked} cannot run: {refused.reason}", fix="--set model.attention=auto") from None

        # Keys rest split over time as queries do, and come whole. A cache rests whole.
        key_time = Whole("time") if cache is None else None
        of_q = ("batch", "time", "kv_heads", None, None)
        of_k = ("batch", key_time, "kv_heads", None)
        pairs = ("batch", "time"), ("batch", key_time)
        segments = ctx.segment_ids_bt if cache is None else None
        arrays = q_btkgd, k_bskd, v_bskd, segments, segments, places_bt, places_bs
        return ctx.local_map(local, arrays, (of_q, of_k, of_k, *pairs, *pairs), of_q)


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
        hidden, std = config.hidden, INIT_STD * (2 * config.layers) ** -0.5
        self.up_shape, self.up_axes = ((2, hidden), (None, "ffn")) if self.gated else ((hidden,), ("ffn",))
        self.up_ef = weight(rngs, (config.embed, *self.up_shape), ("embed", *self.up_axes))
        self.down_fe = weight(rngs, (hidden, config.embed), ("ffn", "embed"), std)
        self.up_bias = nnx.Param(jnp.zeros(self.up_shape), out_sharding=self.up_axes) if config.bias else None
        self.down_bias = bias(config.embed, "norm") if config.bias else None

    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
        h = project("bte,e...f->bt...f", x_bte, self.up_ef[...], ctx)
        h = ctx.constrain(h if self.up_bias is None else h + self.up_bias[...], "batch", "time", *self.up_axes)
        h = (swiglu if self.gated else gelu)(h)
        y = ctx.constrain(jnp.einsum("btf,fe->bte", h, self.down_fe[...]), *STREAM)
        return y if self.down_bias is None else y + self.down_bias[...]
