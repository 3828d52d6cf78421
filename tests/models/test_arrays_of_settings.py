"""A section says which of its settings shape no array: exactly those with which a checkpoint fits.

Whoever resumes with a model of other arrays reads which settings differ, and only those that can be
the cause.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from fuzz.settings import text_of, values_of
from helpers import tiny

from spmdtrain.config import ConfigError, RunConfig
from spmdtrain.config.sections import is_among, listed, tables
from spmdtrain.models.abstract import build_model
from spmdtrain.models.choose import choose_model

BASE = {
    **{"model.name": "llama", "model.layers": "4", "model.embed": "16", "model.heads": "4"},
    **{"model.kv_heads": "2", "model.vocab": "32", "train.sequence_length": "8"},
}
# Table -> the settings with which a model has it, in several ways where one does not show all.
WITH: dict[str, tuple[dict[str, str], ...]] = {
    "model": ({}, {"model.name": "gpt"}, {"model.windows": "2,0"}, {"model.shared_keys": "2"}),
    "model.experts": (
        {"model.experts.count": "4", "model.experts.chosen": "2", "model.experts.shared": "1"},
        {"model.experts.count": "4", "model.experts.chosen": "2", "model.experts.groups": "2"},
    ),
    "model.latent": (
        {f"model.latent.{name}": "4" for name in ("rank", "plain_dim", "rope_dim", "value_dim")}
        | {"model.kv_heads": "4"},
    ),
    "model.indexer": (
        {f"model.latent.{name}": "4" for name in ("rank", "plain_dim", "rope_dim", "value_dim")}
        | {"model.kv_heads": "4", "model.latent.query_rank": "4", "model.indexer.kept": "16"}
        | {"model.indexer.heads": "2", "model.indexer.dim": "2"},
    ),
    "model.full": (
        {"model.windows": "2,0", "model.full.head_dim": "6"},
        {"model.windows": "2,0", "model.full.kv_heads": "1"},
    ),
    "model.token_layers": (
        {"model.mlp": "geglu", "model.token_layers.dim": "2", "model.token_layers.vocab": "40"},
    ),
    "model.multi_token": ({"model.multi_token.depth": "1"},),
    "model.delta": (
        {"model.mixers": "delta,attention", "model.delta.decay": "channel"}
        | {f"model.delta.{name}": "2" for name in ("key_heads", "value_heads", "key_dim")}
        | {"model.delta.value_dim": "2"},
    ),
    "model.ssd": (
        {"model.mixers": "ssd,attention", "model.ssd.heads": "4", "model.ssd.head_dim": "2"},
    ),
    "model.both": (
        {"model.mixers": "both", "model.ssd.heads": "4", "model.ssd.head_dim": "2"}
        | {"model.both.in_factor": "2"},
    ),
    "model.conv": ({"model.mixers": "conv,attention", "model.conv.taps": "2"},),
    "model.temperature": ({"model.temperature.weight": "0.2", "model.temperature.length": "2"},),
    "model.rope_scaling": (
        {"model.rope_scaling.kind": "yarn", "model.rope_scaling.factor": "2"}
        | {"model.rope_scaling.original_length": "4"},
    ),
    "finetune": ({}, {"finetune.kind": "lora", "finetune.rank": "2"}),
}
UNTRIED = {
    "finetune.frozen_layers",  # decides what the optimizer keeps
    *("model.name", "model.make", "model.extra", "finetune.targets", "finetune.also_train"),
    "model.mlps",  # asks for experts, or a mixer in each layer without one
    "model.mixers",  # asks for a table of each, which those of the tables below have
    *(f"model.rope_scaling.{name}" for name in ("kind", "short", "long", "use")),
}
# For settings that nobody draws.
OTHERS = (
    "1",
    "3",
    "4",
    "8",
    "0.1",
    "1.5",
    "true",
    "false",
    "head",
    "none",
    "silu",
    "sigmoid",
    "after",
    "1,2,3,4,5",
)
TRIED = 2  # values that change no array, of a setting that should not


@cache
def made(settings: tuple[tuple[str, str], ...]) -> tuple[RunConfig, dict[str, Any]]:
    """The run, and path -> shape and axes of an array, and whether it is trained."""
    config = tiny(*(f"{name}={text}" for name, text in settings))
    parameters = build_model(*choose_model(config)).parameters
    return config, {path: (x.shape, x.axes, x.is_trained) for path, x in parameters.items()}


def changes(name: str, table: str) -> Iterator[bool]:
    """Yields for each other value of a setting that is accepted whether it changes an array."""
    try:
        drawn = [text_of(name, value) for value in dict.fromkeys(values_of(name))]
    except KeyError:
        drawn = []
    for more in WITH[table]:
        settings = BASE | more
        config, arrays = made(tuple(settings.items()))
        for text in dict.fromkeys((*drawn, *OTHERS)):
            try:
                other, others = made(tuple((settings | {name: text}).items()))
            except ConfigError:
                continue
            if other != config:
                yield others != arrays


@pytest.mark.seconds
@pytest.mark.parametrize("table", WITH)
def test_a_checkpoint_fits_with_other_values_of_exactly_these_settings(table):
    (kind, *_) = [kind for name, kind in tables() if name == table]
    inside = {name for name, _ in tables()}
    for name in (f"{table}.{setting}" for setting in kind.model_fields):
        if name in inside | UNTRIED:
            continue
        if is_among(name, listed("of_no_array")):
            seen = [change for change, _ in zip(changes(name, table), range(TRIED), strict=False)]
            assert seen and not any(seen), name
        else:
            assert any(changes(name, table)), name


def test_every_table_of_a_model_is_tried():
    of_models = {name for name, _ in tables() if name.partition(".")[0] in ("model", "finetune")}
    assert of_models == WITH.keys()
