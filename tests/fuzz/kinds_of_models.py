"""Settings of [model] that go together, as families of published models have them.

A setting drawn alone seldom meets those that it needs, or that make it show: indexers need a latent
of queries, layers that share keys no other mixer. Each kind is a whole [model], but for its sizes.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

Values = dict[str, Any]  # dotted name -> value
Choices = Mapping[str, Sequence[Any]]  # dotted name -> values

OF_ALL: Choices = {
    "model.name": ("llama",),
    "model.vocab": (33, 48, 64),
    "model.embed": (16, 24),
    "model.heads": (4,),
    "model.norm_epsilon": (1e-3,),
    "model.tied": (False, True),
}
OF_HEADS: Choices = {"model.kv_heads": (1, 2, 4), "model.head_dim": (4, 6, 8)}
LATENT: Choices = {
    "model.latent.rank": (8, 16),
    "model.latent.plain_dim": (4, 6),
    "model.latent.rope_dim": (2, 4),
    "model.latent.value_dim": (3, 8),
}
EXPERTS: Choices = {
    "model.experts.count": (6, 8),
    "model.experts.chosen": (2, 3),
    "model.experts.ffn": (8, 16),
}
BY_SIGMOID: Choices = {
    **EXPERTS,
    "model.experts.score": ("sigmoid",),
    "model.experts.scale": (1.0, 2.5),
    "model.experts.bias_rate": (0.0, 0.01),
}
GEMMA: Choices = {
    **OF_HEADS,
    "model.norm_places": ("both",),
    "model.query_norm": ("head",),
    "model.value_norm": (True,),
    "model.layer_scale": (True, False),
    "model.embed_scale": ("sqrt",),
    "model.score_scale": (1.0, 0.3),
    "model.rope_theta_window": (None, 100.0),
    "model.full.head_dim": (10, 12),
    "model.full.kv_heads": (None, 1, 4),
    "model.mlp": ("geglu", "swiglu"),
}
SSD: Choices = {
    "model.ssd.heads": (4, 8),
    "model.ssd.head_dim": (3, 4),
    "model.ssd.groups": (1, 2, 4),
    "model.ssd.state": (3, 5),
    "model.ssd.taps": (2, 4),
}
DELTA: Choices = {
    "model.delta.key_heads": (2, 4),
    "model.delta.value_heads": (4,),
    "model.delta.key_dim": (4,),
    "model.delta.value_dim": (4, 6),
    "model.delta.taps": (1, 3),
}
KINDS: dict[str, Choices] = {
    "one norm of two parts": {
        **OF_HEADS,
        "model.layers": (2, 4),
        "model.norm": ("layernorm", "rmsnorm"),
        "model.norm_places": ("parallel",),
        "model.windows": ((3, 0),),
        "model.rope_layers": ((True, False),),
        "model.logit_scale": (0.25, 2.0),
    },
    "keys of layers": {
        **GEMMA,
        "model.layers": (3, 5),
        "model.windows": ((3, 0), (3, 3, 0)),
        "model.full.keys_are_values": (True, False),
        "model.token_layers.dim": (3,),
    },
    "shared keys": {
        **GEMMA,
        "model.layers": (4, 5),
        "model.windows": ((3, 0),),
        "model.shared_keys": (1, 2),
        "model.shared_ffn": (None, 20),
        "model.idle_keys": (False, True),
        "model.token_layers.dim": (3,),
    },
    "experts beside": {
        **(GEMMA | EXPERTS),
        "model.layers": (2, 4),
        "model.windows": ((3, 0),),
        "model.experts.shared": (1,),
        "model.experts.shared_ffn": (None, 8, 24),
        "model.experts.own_norms": (True,),
        "model.experts.learned_scale": (True,),
    },
    "blocks of positions": {
        **(OF_HEADS | EXPERTS),
        "model.layers": (2, 4),
        "model.chunks": ((5, 0), (3, 0)),
        "model.rope_layers": ((True, False),),
        "model.query_norm": ("after", "none"),
        "model.temperature.weight": (0.1, 1.0),
        "model.temperature.length": (3, 7),
        "model.temperature.offset": (0, 1),
        "model.temperature.layers": ("no_rope",),
        "model.mlps": (("mlp", "experts"), ("experts",)),
        "model.experts.shared": (0, 1),
        "model.experts.score": ("sigmoid",),
        "model.experts.normalise": (False,),
        "model.experts.gate_input": (True,),
    },
    "indexers": {
        **(LATENT | BY_SIGMOID),
        "model.layers": (2, 3),
        "model.latent.query_rank": (8,),
        "model.indexer.heads": (2, 3),
        "model.indexer.dim": (4, 6),
        "model.indexer.kept": (16, 24),
        "model.indexer.layers": ((), (True, False)),
        "model.experts.first_dense": (0, 1),
    },
    "channels and latents": {
        **(LATENT | DELTA | BY_SIGMOID),
        "model.layers": (2, 4),
        "model.mixers": (("delta", "attention"),),
        "model.delta.key_heads": (4,),
        "model.delta.decay": ("channel",),
        "model.delta.gate": ("sigmoid",),
        "model.delta.gate_rank": (2, 4),
        "model.rope_layers": ((False,),),
        "model.experts.shared": (1,),
    },
    "gates and further tokens": {
        **(OF_HEADS | DELTA),
        "model.layers": (2, 4),
        "model.mixers": (("delta", "attention"),),
        "model.output_gate": ("channel", "head"),
        "model.query_norm": ("head",),
        "model.norm_offset": (1.0,),
        "model.multi_token.depth": (1,),
        "model.multi_token.after_norm": (True,),
        "model.multi_token.frozen": (False, True),
    },
    "side by side": {
        **(OF_HEADS | SSD),
        "model.layers": (2, 3),
        "model.mixers": (("both",),),
        "model.both.in_factor": (1.2,),
        "model.ssd.factors": ((0.7, 1.3, 0.8, 1.2, 0.9),),
        "model.mlp_gate_factor": (1.0, 1.4),
        "model.mlp_out_factor": (0.6, 1.3),
        "model.ssd.norm": ("group", "none"),
    },
    "layers of one part": {
        **(OF_HEADS | SSD | BY_SIGMOID),
        "model.layers": (4,),
        "model.mixers": (("ssd", "none", "attention", "none"), ("ssd", "none")),
        "model.mlps": (("none", "experts"),),
        "model.mlp": ("relu2",),
        "model.experts.width": (None, 8),
        "model.experts.shared": (1,),
        "model.experts.shared_ffn": (None, 8, 24),
    },
    "convolutions": {
        **(OF_HEADS | BY_SIGMOID),
        "model.layers": (3, 5),
        "model.mixers": (("conv", "attention"), ("conv", "conv", "attention")),
        "model.conv.taps": (2, 3),
        "model.conv.bias": (False, True),
        "model.experts.first_dense": (1,),
        "model.experts.sum_epsilon": (1e-6, 0.3),
    },
}


def values_in_kinds(key: str) -> list[Any]:
    """The values that a setting takes in any kind; none where no kind has it."""
    values = (value for kind in KINDS.values() for value in kind.get(key, ()))
    return list(dict.fromkeys(values))


def draw_model(random: random.Random) -> Values:
    """Settings of a whole [model] of a kind drawn at random."""
    choices = {**OF_ALL, **random.choice(list(KINDS.values()))}
    return {key: random.choice(values) for key, values in choices.items()}


def with_model(numbers: Values, model: Values) -> Values:
    """The numbers of a run with another [model]; the vocabulary stays where its data decide it."""
    others = {key: x for key, x in numbers.items() if not key.startswith("model.")}
    if "model.vocab" in numbers and numbers["model.vocab"] is None:
        return others | model | {"model.vocab": None}
    return others | model
