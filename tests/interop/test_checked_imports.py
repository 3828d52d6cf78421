"""`import --check` tells rounding from a mistake, whatever a model makes of rounding."""

import sys
import types

import directories
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.cli import main
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


@pytest.mark.parametrize("fault", ["logits", "transformers", "ctrl-c"])
def test_a_check_that_fails_leaves_no_run_behind(fault, tmp_path, monkeypatch, capfd):
    """The same command without --check then makes it."""

    def theirs(_, tokens):
        if fault == "ctrl-c":
            raise KeyboardInterrupt
        if fault == "transformers":
            raise ConfigError("transformers 0 does not load it", fix=check.UNCHECKED)
        return np.ones((*tokens.shape, 131))

    monkeypatch.setattr(check, "_theirs", theirs)
    monkeypatch.setattr(check, "require_transformers", lambda: None)
    directories.write(tmp_path / "model", directories.CONFIGS["llama"])
    typed = ["import", str(tmp_path / "model"), "--out", str(tmp_path / "run")]
    assert main([*typed, "--check"]) == (130 if fault == "ctrl-c" else 4)
    assert not (tmp_path / "run").exists()
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert fault == "ctrl-c" or "or no --check to import it all the same" in said.err
    assert main(typed) == 0
    assert "run: step 0; next: spmdtrain train" in capfd.readouterr().out


def test_what_transformers_does_not_load_is_one_line(tmp_path, monkeypatch):
    class Model:
        @staticmethod
        def from_pretrained(*_, **__):
            raise KeyError("a\nkey")

    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setattr(check, "class_in_transformers", lambda _: Model)
    monkeypatch.setattr(check, "version", lambda _: "0.1")
    with pytest.raises(ConfigError) as refused:
        check._theirs(tmp_path, np.zeros((1, 3), int))
    assert f"transformers 0.1 does not load {tmp_path}; found KeyError: " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_import_that_was_interrupted_is_typed_again(tmp_path, monkeypatch, capfd):
    def interrupted(*_):
        raise KeyboardInterrupt

    directories.write(tmp_path / "model", directories.CONFIGS["llama"])
    typed = ["import", str(tmp_path / "model"), "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", interrupted)
        assert main(typed) == 130
    assert main(typed) == 0
    assert "run: step 0; next: spmdtrain train" in capfd.readouterr().out
