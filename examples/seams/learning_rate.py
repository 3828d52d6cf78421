"""A custom learning-rate schedule: warmup, a constant rate, and decay at the end (WSD).

python examples/seams/learning_rate.py
"""

import jax.numpy as jnp

import spmdtrain as st

CONFIG = st.RunConfig(
    model={"name": "gpt", "layers": 2, "embed": 32},
    mesh={"data": -1},
    train={"steps": 20},
    data={"corpus": "synthetic"},
    checkpoint={"every": 10},
)
PEAK, WARMUP, FALL = 3e-3, 5, 10


def warm_stay_fall(step):
    """Returns the rate of the 0-based step, a traced int32: use jax.numpy, not `if`."""
    rising = (step + 1) / WARMUP
    falling = (CONFIG.train.steps - step) / FALL
    return PEAK * jnp.minimum(1, jnp.minimum(rising, falling))


if __name__ == "__main__":
    st.run(CONFIG, "runs/wsd", learning_rate=warm_stay_fall)
