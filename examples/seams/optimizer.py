"""A custom optimizer with groups of parameters.

Matrices use Lion; norms and biases use the shipped AdamW at a tenth of the rate; the token table is
frozen and keeps no moments.

    python examples/seams/optimizer.py
"""

from dataclasses import replace

import optax

import spmdtrain as st

CONFIG = st.RunConfig(
    model={"name": "gpt", "layers": 2, "embed": 32},
    mesh={"data": -1},
    train={"steps": 20},
    optimizer={"name": "adamw", "learning_rate": 1e-3},
    data={"corpus": "synthetic"},
    checkpoint={"every": 10},
)
shipped = st.make_optimizer(CONFIG.optimizer)


def groups(path, parameter):
    """Returns the rule of one parameter. It sees one layer at a time, whatever the mesh."""
    if path == "tokens.table_ve":
        return None  # frozen
    if "norm" in path or "bias" in path:
        rule = shipped(path, parameter)
        return rule and replace(rule, rate=0.1)
    # No learning rate here: the schedule sets it.
    return optax.chain(optax.scale_by_lion(), optax.add_decayed_weights(0.1))


if __name__ == "__main__":
    st.run(CONFIG, "runs/groups", optimizer=groups)
