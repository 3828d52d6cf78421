"""The tolerance rule of all kernel tests: against the definition in float64, no worse than twice the plain one.

For an output: largest difference <= factor x that of the definition run in the kernel's own dtype, plus what adding
0.3 and taking it away again costs; and a bound on the relative L2 distance.
"""

import jax
import numpy as np

VALUE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 2e-6}  # relative L2
GRADIENT = {"bfloat16": 8e-3, "float16": 2e-3, "float32": 1e-5}
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def in_float64(function, *arrays):
    """`function` of the arrays as float64; integers stay."""
    with jax.enable_x64(True):
        wide = [None if x is None else np.asarray(x, np.float64) for x in arrays]
        return jax.tree.map(np.asarray, jax.jit(function)(*wide))


def check(name, got, plain, want, dtype, limits=VALUE, factor=2.0):
    got, plain, want = (np.asarray(x, np.float64) for x in (got, plain, want))
    assert got.shape == want.shape, f"{name}: {got.shape}, not {want.shape}"
    assert np.isfinite(got).all(), f"{name}: not finite"
    slack = 2 * EPSILON[dtype] * (np.abs(want).max() + 0.3)
    largest, allowed = np.abs(got - want).max(), factor * np.abs(plain - want).max() + slack
    assert largest <= allowed, f"{name}: off by {largest:.3g}, allowed {allowed:.3g}"
    norm = np.linalg.norm(want)
    distance = np.linalg.norm(got - want)
    assert distance <= limits[dtype] * factor / 2 * norm + slack * 1e-3, f"{name}: L2 {distance / max(norm, 1e-30):.3g}"
