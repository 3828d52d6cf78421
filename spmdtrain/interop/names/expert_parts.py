"""The names of experts and of their routers, in each layout that files may have.

One family has up to three: a tensor for each matrix of each expert, under the newer names or the
older ones (w1 the gate, w3 up, w2 down), or two tensors for all experts of a layer, without
`.weight`. transformers 5 writes a model as it read it. Which layout a directory has is told by the
names in it, never by shapes: with E = 2 F they do not tell.
"""

from functools import partial

from spmdtrain.interop import pieces
from spmdtrain.interop.names.entry import Part, entry

Layouts = tuple[Part, ...]  # the first one is written where nothing was imported
LOAD_BIAS, NO_BIAS = "mlp.router.load_bias_x", entry(pieces.zeros)


def _of_each(place: str, gate: str, up: str, down: str) -> Part:
    """Returns the matrices of experts with a tensor for each matrix of each expert."""
    gate_up = partial(pieces.of_each_expert, rule=pieces.gate_up)
    transposed = partial(pieces.of_each_expert, rule=pieces.transpose)
    prefix = place + ".experts.{x}."
    return {
        "mlp.up_xeu": entry(gate_up, f"{prefix}{gate}.weight", f"{prefix}{up}.weight"),
        "mlp.down_xfe": entry(transposed, f"{prefix}{down}.weight"),
    }


def _newer(place: str) -> Part:
    return _of_each(place, "gate_proj", "up_proj", "down_proj")


def _older(place: str) -> Part:
    return _of_each(place, "w1", "w3", "w2")


def _stacked(place: str) -> Part:
    return {
        "mlp.up_xeu": entry(pieces.gate_up_stacked, f"{place}.experts.gate_up_proj"),
        "mlp.down_xfe": entry(pieces.transpose_stacked, f"{place}.experts.down_proj"),
    }


def _router(name: str, bias: str = "") -> Part:
    """Returns a router, and the bias by which it chooses if the family has one."""
    load_bias = entry(pieces.copy, bias) if bias else NO_BIAS
    return {
        "mlp.router.weight_ex": entry(pieces.transpose, name),
        LOAD_BIAS: load_bias,
    }


def _shared(name: str) -> Part:
    """Returns the experts that all tokens go through, which are one mlp."""
    gate_up = (f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
    return {
        "mlp.shared.up_ef": entry(pieces.gate_up, *gate_up),
        "mlp.shared.down_fe": entry(pieces.transpose, f"{name}.down_proj.weight"),
    }


def _layouts(*parts: Part) -> Layouts:
    """Returns the layouts of experts in `mlp`, beside their router and what all tokens share."""
    others = {path: entry for part in parts for path, entry in part.items()}
    return tuple({**others, **matrices("mlp")} for matrices in (_newer, _stacked, _older))


def _renamed(published: Part, *parts: Part) -> Layouts:
    """Returns the layouts of a family that transformers 5 gives other names in memory, which it
    also writes: `published`, and then those of `parts`.
    """
    return (published, *_layouts(*parts))


BIAS = "e_score_correction_bias"


def _with_row_of_biases(place: str) -> Layouts:
    """Returns the layouts of ERNIE, whose biases are a matrix of one row."""
    router = {
        **_router("mlp.gate.weight"),
        LOAD_BIAS: entry(pieces.one_row, f"{place}.{BIAS}"),
    }
    return _layouts(router, _shared("mlp.shared_experts"))


QWEN = _layouts(_router("mlp.gate.weight"))
DEEPSEEK = _layouts(_router("mlp.gate.weight", f"mlp.gate.{BIAS}"), _shared("mlp.shared_experts"))
BESIDE_ROUTER = _router("mlp.gate.weight", f"mlp.{BIAS}")  # its bias is a tensor of the mlp
MIXTRAL = _renamed(
    {**_router("block_sparse_moe.gate.weight"), **_older("block_sparse_moe")},
    _router("mlp.gate.weight"),
)
MINIMAX = _renamed(
    {
        **_router("block_sparse_moe.gate.weight", f"block_sparse_moe.{BIAS}"),
        **_older("block_sparse_moe"),
    },
    BESIDE_ROUTER,
)
EXAONE = _layouts(BESIDE_ROUTER, _shared("mlp.shared_experts")) + DEEPSEEK
HUNYUAN = _layouts(
    _router("mlp.router.gate.weight", "mlp.expert_bias"), _shared("mlp.shared_mlp")
) + _layouts(BESIDE_ROUTER, _shared("mlp.shared_experts"))
AFMOE = _layouts(
    _router("mlp.router.gate.weight", "mlp.expert_bias"), _shared("mlp.shared_experts")
)
MISTRAL = _layouts(_router("mlp.gate.weight"), _shared("mlp.shared_experts"))
MISTRAL = (MISTRAL[1], MISTRAL[0], MISTRAL[2])  # stacked, wherever it came from
GATED_SHARED = _layouts(
    _router("mlp.gate.weight"),
    _shared("mlp.shared_expert"),
    {"mlp.shared_gate_e1": entry(pieces.transpose, "mlp.shared_expert_gate.weight")},
)
GRANITE = tuple(
    {
        **_router(f"block_sparse_moe.{router}.weight"),
        "mlp.up_xeu": entry(pieces.gate_up_stacked, f"block_sparse_moe.{gate_up}"),
        "mlp.down_xfe": entry(pieces.transpose_stacked, f"block_sparse_moe.{down}"),
    }
    for router, gate_up, down in (
        ("router.layer", "input_linear.weight", "output_linear.weight"),
        ("router", "experts.gate_up_proj", "experts.down_proj"),  # in memory
    )
)
ERNIE = _with_row_of_biases("mlp.moe_statics") + _with_row_of_biases("mlp.gate.moe_statics")
KIMI = _renamed(
    {
        **_router("block_sparse_moe.gate.weight", f"block_sparse_moe.gate.{BIAS}"),
        **_older("block_sparse_moe"),
        **_shared("block_sparse_moe.shared_experts"),
    },
    _router("mlp.gate.weight", f"mlp.gate.{BIAS}"),
    _shared("mlp.shared_experts"),
)
LFM = tuple(
    {
        **_router("feed_forward.gate.weight", "feed_forward.expert_bias"),
        **matrices("feed_forward"),
    }
    for matrices in (_older, _stacked, _newer)
)
LLAMA4 = (  # in x out, unlike others
    {
        **_router("feed_forward.router.weight"),
        "mlp.up_xeu": entry(pieces.gate_up_stacked_columns, "feed_forward.experts.gate_up_proj"),
        "mlp.down_xfe": entry(pieces.copy, "feed_forward.experts.down_proj"),
        **_shared("feed_forward.shared_expert"),
    },
)
GEMMA4 = (  # beside the mlp, which is the shared expert
    {
        **_router("router.proj.weight"),
        "mlp.router.scale_e": entry(pieces.copy, "router.scale"),
        "mlp.router.scale_x": entry(pieces.copy, "router.per_expert_scale"),
        "mlp.up_xeu": entry(pieces.gate_up_stacked, "experts.gate_up_proj"),
        "mlp.down_xfe": entry(pieces.transpose_stacked, "experts.down_proj"),
        "mlp.norm.scale_e": entry(pieces.copy, "pre_feedforward_layernorm_2.weight"),
        "mlp.out_norm.scale_e": entry(pieces.copy, "post_feedforward_layernorm_2.weight"),
        **_shared("mlp"),
        "mlp.shared_norm.scale_e": entry(pieces.copy, "pre_feedforward_layernorm.weight"),
        "mlp.shared_out_norm.scale_e": entry(pieces.copy, "post_feedforward_layernorm_1.weight"),
    },
)
GPT_OSS = (
    {
        "mlp.router.weight_ex": entry(pieces.transpose, "mlp.router.weight"),
        "mlp.router.logit_bias_x": entry(pieces.copy, "mlp.router.bias"),
        LOAD_BIAS: NO_BIAS,
        "mlp.up_xeu": entry(pieces.gate_up_interleaved, "mlp.experts.gate_up_proj"),
        "mlp.up_bias": entry(pieces.gate_up_interleaved, "mlp.experts.gate_up_proj_bias"),
        "mlp.down_xfe": entry(pieces.copy, "mlp.experts.down_proj"),
        "mlp.down_bias": entry(pieces.copy, "mlp.experts.down_proj_bias"),
    },
)
