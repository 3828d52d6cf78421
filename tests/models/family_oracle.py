"""The logits of every shipped model, computed once more: numpy, float64, one formula after another.

Nothing here is taken from `spmdtrain`: it reads the settings of [model] and the parameters by their
dotted paths, layers in front. Letters: b batch, t query, s key, e embed, k key-value heads, g query
heads of each, d head_dim, f ffn, v vocab.
"""

import math
from typing import Any

import numpy as np

Params = dict[str, np.ndarray]


def logits(model: Any, params: Params, tokens_bt: np.ndarray) -> np.ndarray:
    """[b, t, v] of whole sequences that begin at position 0."""
    p = {path: np.asarray(x, np.float64) for path, x in params.items()}
    x = p["tokens.table_ve"][tokens_bt]
    x = x * (math.sqrt(model.embed) if model.embed_scale == "sqrt" else model.embed_scale)
    if model.positions == "learned":
        x = x + p["positions_te"][: tokens_bt.shape[1]]
    for number in range(model.layers):
        prefix = "blocks.layer."
        layer = {
            path.removeprefix(prefix): w[number] for path, w in p.items() if path.startswith(prefix)
        }
        y = attention(model, layer, normed(model, layer, "attention_norm", x), number)
        x = x + model.residual_scale * normed(model, layer, "attention_out_norm", y)
        y = mlp(model, layer, normed(model, layer, "mlp_norm", x))
        x = x + model.residual_scale * normed(model, layer, "mlp_out_norm", y)
    x = normed(model, p, "norm", x)
    table = p["tokens.table_ve" if model.tied else "unembed_ve"]
    return capped(x @ table.T * model.logit_scale, model.logit_cap)


def capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def normed(model: Any, p: Params, name: str, x: np.ndarray) -> np.ndarray:
    """LayerNorm or RMSNorm over e; x itself where the layer has no norm of this name."""
    if f"{name}.scale_e" not in p:
        return x
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_epsilon)
    x = x * (model.norm_offset + p[f"{name}.scale_e"])
    return x + p.get(f"{name}.bias_e", 0)


def attention(model: Any, p: Params, x: np.ndarray, number: int) -> np.ndarray:
    heads, kv_heads = model.heads, model.kv_heads or model.heads
    group, dim = heads // kv_heads, model.head_dim or model.embed // heads
    qkv = np.einsum("bte,eknd->btknd", x, p["attention.qkv_eknd"])
    if "attention.qkv_bias" in p:
        qkv = qkv + p["attention.qkv_bias"].reshape(qkv.shape[2:])
    q, k, v = qkv[..., :group, :], qkv[..., group, :], qkv[..., group + 1, :]
    q = q.reshape(*q.shape[:2], heads, dim)
    if model.query_norm != "none":
        q = query_normed(model, q, p["attention.query_key_norm.query_scale"])
        k = query_normed(model, k, p["attention.query_key_norm.key_scale"])
    window = model.windows[number % len(model.windows)] if model.windows else 0
    if model.positions == "rope" and (
        not model.rope_layers or model.rope_layers[number % len(model.rope_layers)]
    ):
        q, k = (turned(model, each, window) for each in (q, k))
    k, v = (np.repeat(each, group, axis=2) for each in (k, v))
    scale = dim**-0.5 if model.score_scale is None else model.score_scale
    scores = capped(scale * np.einsum("bthd,bshd->bhts", q, k), model.score_cap)
    place = np.arange(x.shape[1])
    distance = place[:, None] - place[None]
    seen = (distance >= 0) & (distance < (window or x.shape[1]))
    scores = np.where(seen, scores, -np.inf)
    sinks = np.full(heads, -np.inf)
    if model.sinks:
        sinks = p["attention.sinks"]
    column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    scores = np.concatenate((scores, column), -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :-1]
    y = np.einsum("bhts,bshd->bthd", weights, v).reshape(*x.shape[:2], kv_heads, group, dim)
    y = np.einsum("btkgd,kgde->bte", y, p["attention.out_kgde"])
    return y + p.get("attention.out_bias", 0)


def query_normed(model: Any, x_bthd: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """RMSNorm of queries or keys: of each head, or of all heads as one vector."""
    x = x_bthd
    if model.query_norm == "all":
        x = x.reshape(*x.shape[:2], -1)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_epsilon)
    return (x * (model.norm_offset + scale)).reshape(x_bthd.shape)


def turned(model: Any, x_bthd: np.ndarray, window: int) -> np.ndarray:
    """The first channels of each head turned: pair i is the channels i and i + half."""
    channels = int(x_bthd.shape[-1] * model.rope_share)
    theta = model.rope_theta
    scaling = model.rope_scaling
    if window and model.rope_theta_window is not None:
        theta, scaling = model.rope_theta_window, None
    frequency = theta ** (-2 * np.arange(channels // 2) / channels)
    size = 1.0
    if scaling is not None:
        frequency, size = scaled(scaling, frequency, theta)
    angle = np.arange(x_bthd.shape[1])[:, None, None] * frequency
    turning = size * np.exp(1j * angle)
    pairs = x_bthd[..., : channels // 2] + 1j * x_bthd[..., channels // 2 : channels]
    pairs = pairs * turning
    return np.concatenate((pairs.real, pairs.imag, x_bthd[..., channels:]), -1)


def scaled(scaling: Any, frequency: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
    """(slower frequencies, what cosines and sines are multiplied by)."""
    length, factor = scaling.original_length, scaling.factor
    size = 1.0
    if scaling.kind == "linear":
        frequency = frequency / factor
    elif scaling.kind == "llama3":
        wave = 2 * np.pi / frequency
        share = (length / wave - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
        share = share.clip(0, 1)
        frequency = (1 - share) * frequency / factor + share * frequency
    elif scaling.kind == "yarn":
        channels = 2 * len(frequency)

        def pair(turns: float) -> float:
            return channels * np.log(length / (2 * np.pi * turns)) / (2 * np.log(theta))

        low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
        if scaling.truncate:
            low, high = np.floor(low), np.ceil(high)
        low, high = max(low, 0), min(high, channels - 1)
        high += 0.001 * (low == high)
        ramp = ((np.arange(len(frequency)) - low) / (high - low)).clip(0, 1)
        frequency = ramp * frequency / factor + (1 - ramp) * frequency
        size = 0.1 * np.log(factor) + 1
    else:
        frequency = frequency / np.array(scaling.long if scaling.use == "long" else scaling.short)
        size = np.sqrt(1 + np.log(factor) / np.log(length))
    return frequency, size if scaling.scale is None else scaling.scale


def mlp(model: Any, p: Params, x: np.ndarray) -> np.ndarray:
    up = np.tensordot(x, p["mlp.up_ef"], 1) + p.get("mlp.up_bias", 0)
    if model.mlp == "gelu":
        hidden = gelu_tanh(up)
    elif model.mlp == "gelu_exact":
        hidden = up * np.vectorize(lambda y: 0.5 * (1 + math.erf(y / math.sqrt(2))))(up)
    else:
        gate, value = up[:, :, 0], up[:, :, 1]
        silu = gate / (1 + np.exp(-gate))
        hidden = (silu if model.mlp == "swiglu" else gelu_tanh(gate)) * value
    return hidden @ p["mlp.down_fe"] + p.get("mlp.down_bias", 0)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
