"""The names of experts and of their routers."""

from functools import partial

from spmdtrain.interop import pieces
from spmdtrain.interop.names.entry import Part, entry


def of_each(router: str, gate: str, up: str, down: str) -> Part:
    """Returns the entries of experts with a tensor for each matrix of each expert."""
    gate_up = partial(pieces.of_each_expert, rule=pieces.gate_up)
    transposed = partial(pieces.of_each_expert, rule=pieces.transpose)
    return {
        "mlp.router.weight_ex": entry(pieces.transpose, router),
        "mlp.router.load_bias_x": entry(pieces.zeros),
        "mlp.up_xeu": entry(gate_up, gate, up),
        "mlp.down_xfe": entry(transposed, down),
    }


MIXTRAL = of_each(
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{x}.w1.weight",
    "block_sparse_moe.experts.{x}.w3.weight",
    "block_sparse_moe.experts.{x}.w2.weight",
)
QWEN = of_each(
    "mlp.gate.weight",
    "mlp.experts.{x}.gate_proj.weight",
    "mlp.experts.{x}.up_proj.weight",
    "mlp.experts.{x}.down_proj.weight",
)
DEEPSEEK = dict(QWEN) | {
    "mlp.router.load_bias_x": entry(pieces.copy, "mlp.gate.e_score_correction_bias"),
    "mlp.shared.up_ef": entry(
        pieces.gate_up, "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"
    ),
    "mlp.shared.down_fe": entry(pieces.transpose, "mlp.shared_experts.down_proj.weight"),
}
GPT_OSS = {
    "mlp.router.weight_ex": entry(pieces.transpose, "mlp.router.weight"),
    "mlp.router.logit_bias_x": entry(pieces.copy, "mlp.router.bias"),
    "mlp.router.load_bias_x": entry(pieces.zeros),
    "mlp.up_xeu": entry(pieces.gate_up_interleaved, "mlp.experts.gate_up_proj"),
    "mlp.up_bias": entry(pieces.gate_up_interleaved, "mlp.experts.gate_up_proj_bias"),
    "mlp.down_xfe": entry(pieces.copy, "mlp.experts.down_proj"),
    "mlp.down_bias": entry(pieces.copy, "mlp.experts.down_proj_bias"),
}
