"""A custom loss: focal loss, with the accuracy as a second figure.

Focal loss gives less weight to tokens that are easy to predict (arXiv:1708.02002).

    python examples/seams/loss.py
"""

import jax
import jax.numpy as jnp

import spmdtrain as st

CONFIG = st.RunConfig(
    model={"name": "gpt", "layers": 2, "embed": 32},
    mesh={"data": -1},
    train={"steps": 20},
    data={"corpus": "synthetic"},
)
GAMMA = 2.0


def focal(logits, targets):
    """Returns the losses of the tokens, [b, t], by name.

    Takes float32 logits [b, t, vocab] and targets [b, t].
    """
    log_probability = jax.nn.log_softmax(logits)
    of_target = jnp.take_along_axis(log_probability, targets[..., None], -1)[..., 0]
    right = (logits.argmax(-1) == targets).astype(jnp.float32)
    return {
        "loss": -((1 - jnp.exp(of_target)) ** GAMMA) * of_target,
        "accuracy": jax.lax.stop_gradient(right),  # shown, not trained on
    }


if __name__ == "__main__":
    st.run(CONFIG, "runs/focal", loss=focal)
