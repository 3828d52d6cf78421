"""What `show` says of layers that differ."""

from spmdtrain.config.schema import Llama
from spmdtrain.show.layer_list import describe_experts, describe_layers, layer_rows

GEMMA = Llama(
    layers=7,
    windows=(512,) * 5 + (0,),
    rope_theta=1e6,
    rope_theta_window=1e4,
    rope_scaling={"kind": "linear", "factor": 8.0},
)


def test_a_line_for_each_kind_with_the_numbers_of_its_layers():
    assert describe_layers(GEMMA).splitlines() == [
        "layers 0-4, 6 see the last 512 tokens, theta 10,000",
        "layers 5 see all tokens, theta 1,000,000, linear x 8",
    ]
    rows = layer_rows(GEMMA)
    assert sorted(number for row in rows for number in row["layers"]) == list(range(7))


def test_experts_are_a_line_with_the_numbers_of_their_layers():
    experts = {"count": 8, "chosen": 2, "ffn": 24, "first_dense": 1, "every": 2, "shared": 1}
    assert describe_experts(Llama(layers=5, experts=experts)) == (
        "layers 2, 4 have 8 experts of width 24, 2 for a token, 1 more for all tokens"
    )
    assert describe_experts(GEMMA) == ""
    line = describe_experts(Llama(layers=5, experts=experts | {"own_norms": True}))
    assert line.endswith("1 more for all tokens, both with norms of their own")


def test_layers_of_other_mixers_and_of_one_part_are_named():
    ssd = {"heads": 4, "head_dim": 8}
    patterns = {"mixers": ("ssd", "none", "both", "attention"), "mlps": ("none", "mlp")}
    assert describe_layers(Llama(layers=5, ssd=ssd, **patterns)).splitlines() == [
        "layers 0, 4 mix tokens by ssd, no mlp",
        "layers 1 mix no tokens",
        "layers 2 see all tokens beside ssd, no mlp, theta 10,000",
        "layers 3 see all tokens, theta 10,000",
    ]


def test_heads_of_their_own_are_said_of_the_layers_that_have_them():
    full = {"head_dim": 512, "kv_heads": 1, "keys_are_values": True}
    lines = describe_layers(Llama(layers=2, windows=(512, 0), full=full)).splitlines()
    assert "heads" not in lines[0]
    assert lines[1].endswith("heads of 512, 1 of keys, which are values")


def test_layers_that_share_keys_are_named():
    lines = describe_layers(Llama(layers=4, windows=(512, 0), shared_keys=2)).splitlines()
    assert [line.endswith("keys and values of an earlier layer") for line in lines] == [
        *(False, False),
        *(True, True),
    ]


def test_a_layer_without_rotary_positions_is_named_and_layers_alike_are_not():
    smol = Llama(layers=4, rope_layers=(True, True, True, False))
    assert describe_layers(smol).splitlines()[1] == "layers 3 see all tokens, no rotary positions"
    assert describe_layers(Llama(layers=4)) == ""
