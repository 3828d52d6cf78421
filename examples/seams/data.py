"""Custom samples: sums in digits, made on request from (seed, sample index).

python examples/seams/data.py
"""

import numpy as np

import spmdtrain as st

CONFIG = st.RunConfig(
    model={"name": "gpt", "layers": 2, "embed": 32, "vocab": 12},  # ten digits, + and =
    mesh={"data": -1},
    train={"steps": 20, "sequence_length": 32},
    eval={"every": 10, "batches": 1},
    checkpoint={"every": 10},
)


def sums(seed, index):
    """Returns one sample's ids [sequence_length + 1], which depend only on the arguments."""
    random = np.random.default_rng((seed, index))
    text = ""
    while len(text) <= CONFIG.train.sequence_length:
        a, b = random.integers(0, 50, 2)
        text += f"{a}+{b}={a + b}"
    ids = np.array(["0123456789+=".index(letter) for letter in text])
    return ids[: CONFIG.train.sequence_length + 1]


def held_out(seed, index):
    return sums(seed + 1, index)


if __name__ == "__main__":
    st.run(CONFIG, "runs/sums", data=st.Source(sums, held_out, validation_samples=64))
