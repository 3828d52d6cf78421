"""The linear-time mixers by their definitions: numpy in float64, one token after another.

Letters as in spmdtrain/models/layers/mixers.
"""

from typing import NamedTuple

import numpy as np


class Drawn(NamedTuple):
    """Tokens for `recur`, in float32, in the order of `Tokens`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    rate: np.ndarray
    starts: np.ndarray


def drawn_tokens(
    tokens: int,
    *,
    per_channel: bool = False,
    decay: float = 0.02,
    rate: float = 1.0,
    alike: bool = False,
    documents: bool = False,
    sizes: tuple[int, int, int, int] = (2, 2, 5, 6),
) -> Drawn:
    """Tokens of two rows, which differ. `sizes`: h, r, k, v.

    `decay`: the scale of log decays; `rate`: the largest rate; `alike`: keys of a head are nearly
    equal; `documents`: rows with starts at different places.
    """
    rng = np.random.default_rng(tokens)
    h, r, k, v = sizes

    def unit(x):
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    keys = rng.normal(size=(2, tokens, h, k))
    if alike:
        keys = keys[:, :1] + 0.05 * keys
    decays = np.log1p(np.exp(rng.normal(size=(2, tokens, h, r, k if per_channel else 1))))
    starts = np.zeros((2, tokens), bool)
    if documents:
        starts[0, [0, 13, 14, 16, 90]] = True
        starts[1, [64, 65, 99]] = True
    made = Drawn(
        q=unit(rng.normal(size=(2, tokens, h, k))) * k**-0.5,
        k=unit(keys),
        v=rng.normal(size=(2, tokens, h, r, v)),
        log_decay=-decay * decays,
        rate=rate / (1 + np.exp(-rng.normal(size=(2, tokens, h, r)))),
        starts=starts,
    )
    return Drawn(*(x.astype(np.float32) for x in made[:-1]), starts)


def recurrence(tokens, state=None, *, corrects: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """(outputs [b, t, h, r, v], the state [b, h, r, k, v] behind the last token)."""
    q, k, v, log_decay, rate = (np.asarray(x, np.float64) for x in tokens[:5])
    b, t, h, r, width = v.shape
    s = np.zeros((b, h, r, k.shape[-1], width)) if state is None else np.float64(state)
    o = np.zeros(v.shape)
    for at in range(t):
        s = np.where(tokens.starts[:, at, None, None, None, None], 0, s)
        s = s * np.exp(log_decay[:, at])[..., None]
        new = v[:, at]
        if corrects:
            new = new - np.einsum("bhrkv,bhk->bhrv", s, k[:, at])
        s = s + np.einsum("bhk,bhrv->bhrkv", k[:, at], rate[:, at, :, :, None] * new)
        o[:, at] = np.einsum("bhrkv,bhk->bhrv", s, q[:, at])
    return o, s


def convolution(x_btn, taps_nw, starts_bt=None, before_bwn=None) -> np.ndarray:
    """The causal convolution of each channel, which no tap takes over a start."""
    x, taps = np.float64(x_btn), np.float64(taps_nw)
    count = taps.shape[-1]
    before = np.zeros_like(x[:, : count - 1]) if before_bwn is None else np.float64(before_bwn)
    extended = np.concatenate((before, x), 1)
    y = np.zeros_like(x)
    for row in range(x.shape[0]):
        first = 0  # the place in `extended` from which on taps may read
        for at in range(x.shape[1]):
            place = at + count - 1
            if starts_bt is not None and starts_bt[row, at]:
                first = place
            for tap in range(count):
                source = place - (count - 1 - tap)
                if source >= first:
                    y[row, at] += taps[..., tap] * extended[row, source]
    return y


def error(found, expected) -> float:
    """The root mean square of the error over that of what is expected."""
    expected = np.asarray(expected, np.float64)
    apart = np.asarray(found, np.float64) - expected
    return float(np.sqrt(np.mean(apart**2) / np.mean(expected**2)))


# Layers. `weight(name)` returns a weight of the mixer by its path, in float64.


def sigmoid(y):
    return 1 / (1 + np.exp(-y))


def softplus(y):
    return np.log1p(np.exp(y))


def unit(y):
    return y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)


def normed_then_gated(o, gate, scale, epsilon) -> np.ndarray:
    """The output of a head over its size, times that of a gate."""
    return o / np.sqrt((o * o).mean(-1, keepdims=True) + epsilon) * scale * gate


def delta_layer(config, weight, x, starts, *, gated=normed_then_gated, unit=unit) -> np.ndarray:
    """The output [b, t, e] of the mixer of [model.delta]."""
    delta = config.delta

    def project(name):
        return np.einsum("bte,ehn->bthn", x, weight(name))

    def narrow(name):
        low = np.einsum("bte,el->btl", x, weight(f"{name}.down_el"))
        return np.einsum("btl,lhn->bthn", low, weight(f"{name}.up_lhn"))

    heads = (*x.shape[:2], delta.key_heads, delta.group)
    width = 2 * delta.key_dim + delta.group * delta.value_dim
    fused = project("qkvz_ehn")
    y = convolution(fused[..., :width], weight("taps_hnw"), starts)
    q, k, v = np.split(y * sigmoid(y), [delta.key_dim, 2 * delta.key_dim], -1)
    numbers = project("rates_ehn")
    rate, decay = numbers[..., : delta.group], numbers[..., delta.group :]
    gate = fused[..., width:]
    if delta.decay == "channel":
        decay, gate = narrow("narrow_decay"), narrow("narrow_gate")
    decay = decay.reshape(*heads, -1)
    step = softplus(decay + weight("decay_bias").reshape(decay.shape[2:]))
    log_decay = -np.exp(weight("decay_log")).reshape(*heads[2:], 1) * step
    tokens = Drawn(
        unit(q) * delta.key_dim**-0.5,
        unit(k),
        v.reshape(*heads, -1),
        log_decay,
        delta.rate * sigmoid(rate),
        starts,
    )
    o, _ = recurrence(tokens)
    epsilon = delta.epsilon or config.norm_epsilon
    gate = gate.reshape(o.shape)
    gate = (gate if delta.gate == "silu" else 1) * sigmoid(gate)
    o = gated(o, gate, weight("norm_scale_v"), epsilon)
    return np.einsum("bthrv,hrve->bte", o, weight("out_hrve"))


def ssd_layer(config, weight, x, starts) -> np.ndarray:
    """The output [b, t, e] of the mixer of [model.ssd]."""
    ssd = config.ssd
    of_gate, of_value, of_key, of_query, of_time = ssd.factors
    own = np.einsum("bte,ehrn->bthrn", x * ssd.in_factor, weight("zxt_ehrn"))
    shared = np.einsum("bte,ehn->bthn", x * ssd.in_factor, weight("kq_ehn"))
    gate, value, time = np.split(own, [ssd.head_dim, 2 * ssd.head_dim], -1)
    shared = shared * np.repeat([of_key, of_query], ssd.state)
    value = convolution(value * of_value, weight("taps_hrvw"), starts)
    shared = convolution(shared, weight("taps_hnw"), starts)
    if ssd.taps_bias:
        value, shared = value + weight("taps_bias_hrv"), shared + weight("taps_bias_hn")
    value, shared = value * sigmoid(value), shared * sigmoid(shared)
    heads = (ssd.groups, ssd.group)
    step = softplus(time[..., 0] * of_time + weight("time_bias").reshape(heads))
    step = np.clip(step, ssd.smallest_step, ssd.largest_step)
    log_decay = (-np.exp(weight("decay_log")).reshape(heads) * step)[..., None]
    k, q = np.split(shared, 2, -1)
    o, _ = recurrence(Drawn(q, k, value, log_decay, step, starts), corrects=False)
    o = o + weight("skip").reshape(*heads, 1) * value
    gate = gate * of_gate

    def normed(y):
        if ssd.norm == "none":
            return y
        epsilon = ssd.epsilon or config.norm_epsilon
        scale = weight("norm_scale").reshape(y.shape[2:])
        return y / np.sqrt((y * y).mean((3, 4), keepdims=True) + epsilon) * scale

    gate = gate * sigmoid(gate)
    o = normed(o) * gate if ssd.norm_first else normed(o * gate)
    return ssd.out_factor * np.einsum("bthrv,hrve->bte", o, weight("out_hrve"))


def conv_layer(config, weight, x, starts) -> np.ndarray:
    """The output [b, t, e] of the mixer of [model.conv]."""
    has_bias = config.conv.bias
    parts = np.einsum("bte,enc->btnc", x, weight("in_e3c"))
    parts = parts + weight("in_bias_3c") if has_bias else parts
    before, after, value = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
    y = convolution(before * value, weight("taps_cw"), starts)
    y = y + weight("taps_bias_c") if has_bias else y
    y = np.einsum("btc,ce->bte", after * y, weight("out_ce"))
    return y + weight("out_bias") if has_bias else y
