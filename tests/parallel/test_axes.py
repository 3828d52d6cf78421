"""Logical axes resolve to what the tables say, or to one line that names the parameter and the
fix.
"""

import jax
import pytest
from helpers import prepared
from jax.sharding import PartitionSpec as P

from spmdtrain.config import ConfigError, RulesConfig
from spmdtrain.parallel.axes import AXES, check_names, make_rules

SIZES = dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 4, "tensor": 2}


def rules(**overrides):
    return make_rules(RulesConfig(**overrides), SIZES)


def test_names_become_mesh_axes_and_axes_of_size_one_are_left_out():
    assert rules().parameter_spec(("vocab", "embed"), (10, 8), "table") == P("tensor", "fsdp")
    assert rules().parameter_spec(("layer", None, "ffn"), (3, 5, 6), "w") == P(None, None, "tensor")
    assert rules().activation_spec(("batch", "time", "embed"), (16, 9, 8)) == P(
        ("data", "fsdp"), None, None
    )


def test_mesh_axes_can_be_dropped():
    assert rules().parameter_spec(("vocab", "embed"), (10, 8), "table", drop=("fsdp",)) == P(
        "tensor", None
    )


def test_a_user_overrides_a_rule_and_adds_axes_of_an_own_model():
    changed = rules(parameters={"vocab": (), "channel": ("tensor", "fsdp")})
    assert changed.parameter_spec(("vocab", "channel"), (11, 16), "w") == P(
        None, ("tensor", "fsdp")
    )


@pytest.mark.parametrize(
    ("names", "shape", "words"),
    [
        (
            ("vocab", "embd"),
            (10, 8),
            ["blocks.w", "'embd'", "did you mean 'embed'?", "--set rules.parameters.embd="],
        ),
        (("ffn", "heads"), (8, 8), ["blocks.w", "'ffn' and 'heads' both use mesh axis 'tensor'"]),
        (
            ("vocab", "embed"),
            (65, 8),
            ["blocks.w", "vocab=65 is not divisible by tensor = 2", "try vocab = 66"],
        ),
        (("embed",), (8, 8), ["blocks.w", "1 logical axes", "2 dims"]),
    ],
    ids=["unknown name", "double use", "not divisible", "wrong rank"],
)
def test_what_cannot_be_resolved_is_refused_by_parameter_path_with_a_fix(names, shape, words):
    with pytest.raises(ConfigError) as error:
        rules().parameter_spec(names, shape, "blocks.w")
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"parameters": {"vocab": ("tensr",)}},
            ["rules.parameters.vocab", "did you mean 'tensor'?"],
        ),
        ({"activations": {"batch": ()}}, ["rules.activations.batch", "always"]),
        *(
            ({"parameters": {dim: ("tensor", axis)}}, [f"rules.parameters.{dim}", "cannot split"])
            for dim in ("layer", "chunk")
            for axis in ("fsdp", "expert")
        ),
    ],
)
def test_a_wrong_rule_is_refused(overrides, words):
    with pytest.raises(ConfigError) as error:
        rules(**overrides)
    assert all(word in str(error.value) for word in words), error.value


def test_a_rule_that_rules_nothing_is_refused_and_names_of_an_own_model_are_not():
    used = {"embed", "vocab", "head", "q_heads"}
    for name in ("vocb", "state"):
        with pytest.raises(ConfigError, match=f"rules.parameters.{name}: no parameter has"):
            check_names(RulesConfig(parameters={name: ("tensor",)}), used, set)
    with pytest.raises(
        ConfigError, match="rules.activations.ffn2: no activation has.*did you mean 'ffn'"
    ):
        check_names(RulesConfig(activations={"ffn2": ()}), used, set)
    own = RulesConfig(
        parameters={"head": (), "q_heads": ()}, activations={"head": (), "ffn2": (), "state": ()}
    )
    check_names(own, used, lambda: {"ffn2"})


def test_an_override_from_the_config_reaches_the_parameters():
    split = prepared("mesh.tensor=2").state.params["tokens.table_ve"].sharding.spec
    whole = (
        prepared("mesh.tensor=2", "rules.parameters.vocab=")
        .state.params["tokens.table_ve"]
        .sharding.spec
    )
    assert split == P("tensor", None) and whole == P(None, None)


def test_every_leaf_of_the_abstract_state_has_a_sharding_and_no_memory():
    leaves = jax.tree.leaves(
        prepared("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.zero=1").state
    )
    assert all(
        isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None for leaf in leaves
    )
