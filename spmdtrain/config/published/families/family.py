"""Defines what is known of a family of published models.

A family has the defaults for absent keys (those of its class in transformers, not ours), the
settings shared by all of its models, and two functions that read and write its own keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdtrain.config.published.families.activations import GATED
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import TransformerConfig

ModelSettings = dict[str, Any]  # of [model]

# Keys that the classes of most families read.
SIZES = ("head_dim", "intermediate_size", "num_key_value_heads")
USUAL = (*SIZES, "rms_norm_eps", "tie_word_embeddings")
WITH_SILU = (*USUAL, "hidden_act")


def _none(keys: Keys) -> ModelSettings:  # noqa: ARG001 - as the others
    return {}


def _no_keys(model: TransformerConfig) -> dict[str, Any]:  # noqa: ARG001 - as the others
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models. `read` and `write` handle the keys that not all families have.

    `reads` are the keys of config.json that change what its class in transformers computes, but
    for those of sizes and rotary positions that all have. They were found by running the class of
    4.57 and 5.24 with another value of each key: it counts as read if both then compute something
    else. `tests/interop/test_class_keys.py` measures them again.
    """

    architecture: str  # the class of transformers
    reads: tuple[str, ...] = WITH_SILU
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Keys], ModelSettings] = _none
    write: Callable[[TransformerConfig], dict[str, Any]] = _no_keys
    # The keys under the names, and with the values, that `read` knows.
    as_usual: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    activation: str = "hidden_act"  # the key of the mlp's
    longest: str = "max_position_embeddings"  # the key of the longest sequence
    epsilon: str = "rms_norm_eps"  # the key of the norms'
    activations: Mapping[str, str] = field(default_factory=lambda: GATED)  # which it may have
    renamed: tuple[str, ...] = ()  # other names of its keys, in files of transformers 5
    rope_by_kind: bool = False  # layers with a window have another theta
    rope_in_tables: bool = False  # of the kinds of layers, and nowhere else
    default_rope: Mapping[str, Any] = field(default_factory=dict)  # if a file says nothing of it
    rope_keys: tuple[str, ...] = ()  # of rotary positions, which `read` takes
    rope_kinds: tuple[str, ...] = ()  # the scalings that its class accepts; none: all
    # The scalings that its class in transformers 4 accepts, if version 5 accepts more.
    rope_kinds_in_4: tuple[str, ...] = ()
    # All that `rope_scaling` may hold beside its type, if its class in transformers 4 is strict.
    strict_scaling: tuple[str, ...] = ()
    is_gpt2: bool = False
    # The layers `mtp.layers.N` that are the block of a further token; 0: it follows the last layer.
    further_apart: int = 0
    packing: str = ""  # in which its experts may be quantised: "mxfp4"
