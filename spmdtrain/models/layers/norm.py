"""Defines norms of the residual stream, and of queries and keys."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.choose import no_gpu
from pallas_kernels.norm import layernorm, rmsnorm
from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.weights import bias, recomputed

MakeNorm = Callable[[TransformerConfig], nnx.Module]


class Norm(nnx.Module):
    """The norm of x [b, t, e] over e: LayerNorm (arXiv:1607.06450) or RMSNorm (arXiv:1910.07467).

    Statistics are in float32. RMSNorm multiplies by the weight plus `model.norm_offset`.
    """

    any_order = True

    def __init__(self, config: TransformerConfig):
        self.centred = config.norm == "layernorm"
        self.epsilon = config.norm_epsilon
        self.offset = config.norm_offset
        self.scale_e = norm_scale(config, config.embed, "norm")
        self.bias_e = bias(config.embed, "norm") if self.centred and config.bias else None

    @part("norm")
    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
        return self._run(x_bte, ctx)

    @part("norm")
    def with_stream(self, x_bte: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, jax.Array]:
        """Returns the norm of x, and x for what else reads it.

        Where a kernel of ours makes the norm's gradient, it adds to it that of what it returns.
        """
        if no_gpu(False):
            return self._run(x_bte, ctx), x_bte
        return self._run(x_bte, ctx, returns_x=True)

    def _run(self, x_bte: jax.Array, ctx: ForwardContext, *, returns_x: bool = False) -> Any:
        norm = layernorm if self.centred else rmsnorm
        # In float32, because their gradients are summed over the devices that share them.
        scale_e = self.scale_e[...].astype(jnp.float32)
        if self.offset:
            scale_e = scale_e + self.offset
        bias_e = None
        if self.bias_e is not None:
            bias_e = self.bias_e[...].astype(jnp.float32)
        of_x = ("batch", "stream_time", None)
        of_vector = (None,)
        kernel = partial(norm, eps=self.epsilon, returns_x=returns_x)
        names = (of_x, of_vector, of_vector)
        out = (of_x, of_x) if returns_x else of_x
        return ctx.local_map(kernel, (x_bte, scale_e, bias_e), names, out)


def normed(norm: nnx.Module | None, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
    """Returns what a norm makes of x; x itself without a norm."""
    call: Any = norm
    return x_bte if norm is None else call(x_bte, ctx)


def normed_with_stream(
    norm: nnx.Module | None, x_bte: jax.Array, ctx: ForwardContext
) -> tuple[jax.Array, jax.Array]:
    """Returns what `normed` does, and x for what else reads it."""
    if isinstance(norm, Norm):
        return norm.with_stream(x_bte, ctx)
    return normed(norm, x_bte, ctx), x_bte


def norm_scale(config: TransformerConfig, size: int, axis: str) -> nnx.Param:
    """Returns the weight of a norm, which multiplies by 1 at the start."""
    return nnx.Param(jnp.full(size, 1 - config.norm_offset), out_sharding=(axis,))


class QueryKeyNorm(nnx.Module):
    """The RMSNorm of queries and keys (arXiv:2302.05442): of each head, or of all heads at once.

    Their scales are [d] for each head, or [k g d] and [k d] for all heads, which `tensor` may split
    like the heads: the mean over all of them is then a sum over devices.
    """

    any_order = True

    def __init__(self, config: TransformerConfig):
        self.of_all = config.query_norm == "all"
        self.epsilon = config.norm_epsilon
        self.offset = config.norm_offset
        width = config.head_dim
        if self.of_all:
            self.query_scale = norm_scale(config, config.heads * width, "kv_heads")
            self.key_scale = norm_scale(config, config.kv_heads * width, "kv_heads")
        else:
            self.query_scale = norm_scale(config, width, "head_dim")
            self.key_scale = norm_scale(config, width, "head_dim")

    def __call__(self, qk_btknd: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns queries and keys, normalised; the keys of a head are the last of its n slots."""
        queries, keys = jnp.split(qk_btknd, [qk_btknd.shape[-2] - 1], -2)
        queries = self._normed(queries, self.query_scale, ctx)
        keys = self._normed(keys, self.key_scale, ctx)
        return jnp.concatenate((queries, keys), -2)

    def _normed(self, x_btknd: jax.Array, scale: nnx.Param, ctx: ForwardContext) -> jax.Array:
        scale_f32 = scale[...].astype(jnp.float32) + self.offset
        if self.of_all:
            scale_f32 = scale_f32.reshape(x_btknd.shape[2:])
        dims = (2, 3, 4) if self.of_all else (4,)
        return rms_normed(x_btknd, scale_f32, dims, self.epsilon, ctx)


def rms_normed(
    x: jax.Array, scale: jax.Array, dims: tuple[int, ...], epsilon: float, ctx: ForwardContext
) -> jax.Array:
    """Returns x divided by its root mean square along `dims`, times `scale`, in float32."""
    return recomputed(_rms_normed, ctx, static_argnums=(2, 3))(x, scale, dims, epsilon)


def _rms_normed(x: jax.Array, scale: jax.Array, dims: tuple[int, ...], epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, dims, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)
