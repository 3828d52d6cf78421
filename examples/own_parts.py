"""Parts of a run in one file, which a config names: no Python is typed to use them.

    spmdtrain train examples/own_parts.toml --simulate-devices 8

Letters: b batch, t time, v vocabulary.
"""

import csv
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdtrain as st


def lion(path, parameter, decay=0.1):
    """Returns the rule of a parameter; the table of tokens is frozen."""
    if path == "tokens.table_ve":
        return None
    return optax.chain(optax.scale_by_lion(), optax.add_decayed_weights(decay))


def rise_and_fall(step, config, peak=3e-3):
    """Returns the rate of the 0-based step, a traced int32; `config` is the RunConfig."""
    return peak * jnp.minimum((step + 1) / 5, 1 - step / config.train.steps)


def focal(logits_btv, targets_bt, gamma=2.0):
    """Returns the losses of the tokens, with less weight where they are easy to predict."""
    log_bt = jnp.take_along_axis(jax.nn.log_softmax(logits_btv), targets_bt[..., None], -1)[..., 0]
    return -((1 - jnp.exp(log_bt)) ** gamma) * log_bt


def sums(seed, sample, length):
    """Returns the ids [length + 1] of a sample: sums in digits, + and =."""
    random = np.random.default_rng((seed, sample))
    text = ""
    while len(text) <= length:
        a, b = random.integers(0, 50, 2)
        text += f"{a}+{b}={a + b}"
    return np.array(["0123456789+=".index(letter) for letter in text])[: length + 1]


def source(config):
    """Makes the data: it needs nothing but the config, so it is called once, at the start."""
    tokens = partial(sums, length=config.train.sequence_length)
    return st.Source(tokens, lambda seed, sample: tokens(seed + 1, sample), validation_samples=64)


class CsvSink:
    """The file RUN/losses.csv. Process 0 opens it after `step` steps of a run."""

    def __init__(self, directory, config, step, delimiter=","):
        self._file = (directory / "losses.csv").open("a" if step else "w", newline="")
        self._rows = csv.writer(self._file, delimiter=delimiter)

    def metrics(self, step, figures):
        if "loss" in figures:
            self._rows.writerow([step, figures["loss"]])

    def event(self, event, step, values):
        self._file.flush()

    def close(self):
        self._file.close()


def stop_when_good(event, step, figures, enough):
    """Returns True, which stops the run, once the loss is low enough."""
    return event == "step" and figures["loss"] < enough
