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
