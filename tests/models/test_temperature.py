"""Queries grow with the position of their token in its document, in the layers that say so."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny

from spmdtrain.config import ConfigError
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.attention.temperature import make_temperature

LLAMA = ("model.name=llama", "model.layers=3", "model.temperature.weight=0.5")


def factors(*settings: str, positions, layer: int = 0) -> np.ndarray:
    """What a query of each position is multiplied by."""
    model = tiny(*LLAMA, *settings).model
    temperature = make_temperature(model.temperature, model)
    assert temperature is not None
    positions_bt = jnp.array([positions], jnp.int32)
    ctx = ForwardContext(positions_bt, layer=layer)
    return np.asarray(temperature(jnp.ones((1, len(positions), 1, 1, 1)), ctx)).ravel()


def test_the_factor_steps_at_whole_lengths_and_begins_anew_with_a_document():
    got = factors("model.temperature.length=49", positions=(0, 48, 49, 147, 0, 50))
    assert np.allclose(got, 1 + 0.5 * np.log1p([0, 0, 1, 3, 0, 1]))
    later = factors(
        "model.temperature.length=4", "model.temperature.offset=1", positions=(0, 2, 3, 7)
    )
    assert np.allclose(later, 1 + 0.5 * np.log1p([0, 0, 1, 2]))


def test_layers_with_rotary_positions_may_stay_without_it():
    settings = ("model.temperature.length=2", "model.temperature.layers=no_rope")
    turns = ("model.rope_layers=true,false,true",)
    of_layers = [factors(*settings, *turns, positions=(2,), layer=n) for n in range(3)]
    assert np.allclose(np.ravel(of_layers), [1, 1 + 0.5 * np.log(2), 1])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (("model.temperature.length=2", "model.temperature.layers=no_rope"), "all have them"),
        (("model.mlp=xielu", "model.experts.count=4", "model.experts.chosen=2"), "learned slopes"),
        (
            ("model.experts.count=4", "model.experts.chosen=2", "model.experts.shared_gate=true"),
            "model.experts.shared_gate=True is of shared experts; set model.experts.shared=1",
        ),
        (
            (
                *("model.experts.count=4", "model.experts.chosen=2", "model.experts.shared=1"),
                *("model.experts.own_norms=true", "model.norm_places=parallel"),
            ),
            "model.experts.own_norms has no meaning with model.norm_places='parallel'",
        ),
        (
            (
                *("model.latent.rank=8", "model.latent.plain_dim=4", "model.latent.rope_dim=4"),
                *("model.latent.value_dim=4", "model.output_gate=head"),
            ),
            "model.output_gate='head' has no meaning with model.latent",
        ),
    ],
)
def test_a_setting_that_would_change_nothing_is_refused(settings, line):
    base = ("model.name=llama", "model.layers=3")
    weight = ("model.temperature.weight=0.5",) if "temperature" in settings[0] else ()
    with pytest.raises(ConfigError) as refused:
        tiny(*base, *weight, *settings)
    assert line in str(refused.value)
