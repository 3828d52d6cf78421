"""`import --check` tells rounding from a mistake, whatever a model makes of rounding."""

import directories
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain.cli.published import check
from spmdtrain.cli.published.check import TOLERANCE, check_logits, rounded_otherwise
from spmdtrain.config.errors import ConfigError
from spmdtrain.inference.sample import make_logits
from spmdtrain.running.published.import_model import import_model

ENLARGES = "rounding its weights otherwise moves them by"


def test_a_model_that_enlarges_rounding_may_differ_by_more(tmp_path, monkeypatch):
    directories.write(tmp_path / "model", directories.CONFIGS["llama"])
    imported = import_model(tmp_path / "model", tmp_path / "run")

    def differing_by(difference: float) -> str:
        def theirs(_, tokens):
            logits = make_logits(imported.setup)(imported.params, tokens)
            return np.asarray(logits, np.float64) * (1 + difference)

        monkeypatch.setattr(check, "_theirs", theirs)
        return check_logits(tmp_path / "model", imported.setup, imported.params)

    assert ENLARGES not in differing_by(0.9 * TOLERANCE)
    with pytest.raises(ConfigError, match="asked 2e-06"):
        differing_by(2 * TOLERANCE)
    # The weights of a model that enlarges rounding tenfold, whose logits move by about 1e-5.
    moved = {path: x * (1 + 2e-6) for path, x in imported.params.items()}
    monkeypatch.setattr(check, "rounded_otherwise", lambda _: moved)
    assert ENLARGES in differing_by(2 * TOLERANCE)
    with pytest.raises(ConfigError, match=ENLARGES):
        differing_by(100 * TOLERANCE)


def test_a_third_of_the_numbers_each_go_up_and_down_and_stay():
    x = np.random.default_rng(0).standard_normal((300, 7)).astype(np.float32)
    moved = np.asarray(rounded_otherwise({"a": jnp.asarray(x)})["a"])
    up, down = np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))
    for neighbour in (x, up, down):
        assert 600 < np.sum(moved == neighbour) < 800
