"""The tolerance rule of all kernel tests, against the definition in float64.

An output may differ from it by `factor` x what the definition differs by when it runs in the
kernel's own dtype, plus twice what it costs in that dtype to add 0.3 to the wanted value and take
it away again. A second bound is on the relative L2 distance.
"""

import jax
import jax.numpy as jnp
import numpy as np

VALUE = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 2e-6}  # relative L2
GRADIENT = {"bfloat16": 8e-3, "float16": 2e-3, "float32": 1e-5}
# What rounding costs, relative.
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def in_float64(function, *arrays):
    """`function` of the arrays as float64; integers stay."""
    with jax.enable_x64(True):
        wide = [None if x is None else np.asarray(x, np.float64) for x in arrays]
        return jax.tree.map(np.asarray, jax.jit(function)(*wide))


def there_and_back(want, dtype) -> float:
    """The largest |x + 0.3 - 0.3 - x| of `want` in `dtype`."""
    x, step = want.astype(jnp.dtype(dtype)), np.asarray(0.3, jnp.dtype(dtype))
    return np.abs((x + step - step).astype(np.float64) - x.astype(np.float64)).max()


def check(name, got, plain, want, dtype, limits=VALUE, factor=2.0, cancelled=0.0):
    """Asserts the rule of this file.

    `cancelled`: where part of `want` is 0 as the difference of two equal float32 sums, the size of
    their terms. Each sum may then be off by EPSILON of its terms; that the plain definition takes
    no such difference is its luck.
    """
    got, plain, want = (np.asarray(x, np.float64) for x in (got, plain, want))
    assert got.shape == want.shape, f"{name}: {got.shape}, not {want.shape}"
    assert np.isfinite(got).all(), f"{name}: not finite"
    slack = 2 * there_and_back(want, dtype) + 2 * EPSILON["float32"] * cancelled
    largest, allowed = np.abs(got - want).max(), factor * np.abs(plain - want).max() + slack
    assert largest <= allowed, f"{name}: off by {largest:.3g}, allowed {allowed:.3g}"
    norm = np.linalg.norm(want)
    distance = np.linalg.norm(got - want)
    assert distance <= limits[dtype] * norm, f"{name}: L2 {distance / max(norm, 1e-30):.3g}"
