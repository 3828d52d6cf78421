"""Maps the names of tensors in files to our parameters, for each family, in both directions.

`{}` stands for the number of the layer, and `{x}` for that of the expert. A parameter that a model
lacks is left out, along with its tensors.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.interop import latent_attention, mxfp4, pieces
from spmdtrain.interop.pieces import Rule

LAYER, EXPERT = "{}", "{x}"
OURS, FIRST, FURTHER = "blocks.layer.", "first_blocks.layer.", "further."
EMBED, HEAD, POSITIONS = "tokens.table_ve", "unembed_ve", "positions_te"


class Entry(NamedTuple):
    """The tensors that one of our parameters is made from, and how.

    `first`: the number, in the files, of the first layer of our stack.
    """

    rule: Rule
    names: tuple[str, ...]
    first: int = 0

    def of_layer(self, layer: int | None) -> tuple[str, ...]:
        """Returns the names of the tensors of one layer of the stack."""
        number = None if layer is None else self.first + layer
        return tuple(name.replace(LAYER, str(number)) for name in self.names)

    def of_all(self, numbers: range) -> "Entry":
        """Returns the entry of a parameter that has all layers of these numbers, stacked."""
        names = (name.replace(LAYER, str(number)) for number in numbers for name in self.names)
        return Entry(partial(pieces.of_each_expert, rule=self.rule), tuple(names))

    def of_experts(self, count: int) -> "Entry":
        """Returns the entry with the names of all experts, one expert after another."""
        if not any(EXPERT in name for name in self.names):
            return self
        names = (name.replace(EXPERT, str(at)) for at in range(count) for name in self.names)
        return self._replace(names=tuple(names))


Table = Mapping[str, Entry]  # by the path of our parameter


def _entry(rule: Rule, *names: str) -> Entry:
    return Entry(rule, names)


def _in_layers(prefix: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the entries of a layer, with prefixes for both their names and ours."""
    return {
        OURS + ours: Entry(entry.rule, tuple(prefix + name for name in entry.names))
        for ours, entry in entries.items()
    }


GPT2: Table = {
    EMBED: _entry(pieces.copy, "transformer.wte.weight"),
    POSITIONS: _entry(pieces.copy, "transformer.wpe.weight"),
    "norm.scale_e": _entry(pieces.copy, "transformer.ln_f.weight"),
    "norm.bias_e": _entry(pieces.copy, "transformer.ln_f.bias"),
    HEAD: _entry(pieces.copy, "lm_head.weight"),
} | _in_layers(
    "transformer.h.{}.",
    {
        "attention_norm.scale_e": _entry(pieces.copy, "ln_1.weight"),
        "attention_norm.bias_e": _entry(pieces.copy, "ln_1.bias"),
        "attention.qkv_eknd": _entry(pieces.qkv_fused_columns, "attn.c_attn.weight"),
        "attention.qkv_bias": _entry(pieces.qkv_bias_fused, "attn.c_attn.bias"),
        "attention.out_kgde": _entry(pieces.heads_out_rows, "attn.c_proj.weight"),
        "attention.out_bias": _entry(pieces.copy, "attn.c_proj.bias"),
        "mlp_norm.scale_e": _entry(pieces.copy, "ln_2.weight"),
        "mlp_norm.bias_e": _entry(pieces.copy, "ln_2.bias"),
        "mlp.up_ef": _entry(pieces.copy, "mlp.c_fc.weight"),
        "mlp.up_bias": _entry(pieces.copy, "mlp.c_fc.bias"),
        "mlp.down_fe": _entry(pieces.copy, "mlp.c_proj.weight"),
        "mlp.down_bias": _entry(pieces.copy, "mlp.c_proj.bias"),
    },
)

ATTENTION = {
    "attention.qkv_eknd": _entry(
        pieces.qkv,
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "attention.qkv_bias": _entry(
        pieces.qkv_bias, "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
    ),
    "attention.out_kgde": _entry(pieces.heads_out, "self_attn.o_proj.weight"),
    "attention.out_bias": _entry(pieces.copy, "self_attn.o_proj.bias"),
}
MLP = {
    "mlp.up_ef": _entry(pieces.gate_up, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.up_bias": _entry(pieces.gate_up_bias, "mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.down_fe": _entry(pieces.transpose, "mlp.down_proj.weight"),
    "mlp.down_bias": _entry(pieces.copy, "mlp.down_proj.bias"),
}
NORMS_BEFORE = {
    "attention_norm.scale_e": _entry(pieces.copy, "input_layernorm.weight"),
    "mlp_norm.scale_e": _entry(pieces.copy, "post_attention_layernorm.weight"),
}

# In Llama, the norm before the mlp has the name that other families give to the norm after
# attention.
NORMS_BOTH = {
    "attention_norm.scale_e": _entry(pieces.copy, "input_layernorm.weight"),
    "attention_out_norm.scale_e": _entry(pieces.copy, "post_attention_layernorm.weight"),
    "mlp_norm.scale_e": _entry(pieces.copy, "pre_feedforward_layernorm.weight"),
    "mlp_out_norm.scale_e": _entry(pieces.copy, "post_feedforward_layernorm.weight"),
}
NORMS_AFTER = {
    "attention_out_norm.scale_e": _entry(pieces.copy, "post_attention_layernorm.weight"),
    "mlp_out_norm.scale_e": _entry(pieces.copy, "post_feedforward_layernorm.weight"),
}
QUERY_NORMS = {
    "attention.query_key_norm.query_scale": _entry(pieces.copy, "self_attn.q_norm.weight"),
    "attention.query_key_norm.key_scale": _entry(pieces.copy, "self_attn.k_norm.weight"),
}
FUSED = {
    "attention.qkv_eknd": _entry(pieces.qkv_fused, "self_attn.qkv_proj.weight"),
    "attention.out_kgde": _entry(pieces.heads_out, "self_attn.o_proj.weight"),
    "mlp.up_ef": _entry(pieces.gate_up_fused, "mlp.gate_up_proj.weight"),
    "mlp.down_fe": _entry(pieces.transpose, "mlp.down_proj.weight"),
}


def _like_llama(*parts: Mapping[str, Entry]) -> Table:
    """Returns the table of a family that uses Llama's names, given the parts of its layers."""
    entries = {
        EMBED: _entry(pieces.copy, "model.embed_tokens.weight"),
        "norm.scale_e": _entry(pieces.copy, "model.norm.weight"),
        HEAD: _entry(pieces.copy, "lm_head.weight"),
    }
    for part in parts:
        entries |= _in_layers("model.layers.{}.", part)
    return entries


LLAMA = _like_llama(ATTENTION, MLP, NORMS_BEFORE)
OLMO = _like_llama(ATTENTION, MLP, NORMS_AFTER, QUERY_NORMS)


def _experts(router: str, gate: str, up: str, down: str) -> Mapping[str, Entry]:
    """Returns the entries of experts with a tensor for each matrix of each expert."""
    gate_up = partial(pieces.of_each_expert, rule=pieces.gate_up)
    transposed = partial(pieces.of_each_expert, rule=pieces.transpose)
    return {
        "mlp.router.weight_ex": _entry(pieces.transpose, router),
        "mlp.router.load_bias_x": _entry(pieces.zeros),
        "mlp.up_xeu": _entry(gate_up, gate, up),
        "mlp.down_xfe": _entry(transposed, down),
    }


MIXTRAL = _experts(
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{x}.w1.weight",
    "block_sparse_moe.experts.{x}.w3.weight",
    "block_sparse_moe.experts.{x}.w2.weight",
)
QWEN_EXPERTS = _experts(
    "mlp.gate.weight",
    "mlp.experts.{x}.gate_proj.weight",
    "mlp.experts.{x}.up_proj.weight",
    "mlp.experts.{x}.down_proj.weight",
)

GPT_OSS = {
    "attention.sinks": _entry(pieces.copy, "self_attn.sinks"),
    "mlp.router.weight_ex": _entry(pieces.transpose, "mlp.router.weight"),
    "mlp.router.logit_bias_x": _entry(pieces.copy, "mlp.router.bias"),
    "mlp.router.load_bias_x": _entry(pieces.zeros),
    "mlp.up_xeu": _entry(pieces.gate_up_interleaved, "mlp.experts.gate_up_proj"),
    "mlp.up_bias": _entry(pieces.gate_up_interleaved, "mlp.experts.gate_up_proj_bias"),
    "mlp.down_xfe": _entry(pieces.copy, "mlp.experts.down_proj"),
    "mlp.down_bias": _entry(pieces.copy, "mlp.experts.down_proj_bias"),
}

LATENT = {
    "attention.down_eu": _entry(
        latent_attention.down, "self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"
    ),
    "attention.query_scale": _entry(pieces.copy, "self_attn.q_a_layernorm.weight"),
    "attention.query_rkd": _entry(latent_attention.queries, "self_attn.q_b_proj.weight"),
    "attention.latent_scale": _entry(pieces.copy, "self_attn.kv_a_layernorm.weight"),
    "attention.key_value_ckd": _entry(
        latent_attention.keys_and_values, "self_attn.kv_b_proj.weight"
    ),
    "attention.out_kgde": _entry(pieces.heads_out, "self_attn.o_proj.weight"),
}
# If queries are computed from the stream.
PLAIN_QUERIES = {
    "attention.down_eu": _entry(latent_attention.down, "self_attn.kv_a_proj_with_mqa.weight"),
    "attention.query_rkd": _entry(latent_attention.queries, "self_attn.q_proj.weight"),
}
DEEPSEEK_EXPERTS = dict(QWEN_EXPERTS) | {
    "mlp.router.load_bias_x": _entry(pieces.copy, "mlp.gate.e_score_correction_bias"),
    "mlp.shared.up_ef": _entry(
        pieces.gate_up, "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"
    ),
    "mlp.shared.down_fe": _entry(pieces.transpose, "mlp.shared_experts.down_proj.weight"),
}
# Parameters of a further token, in the layer that follows the last one.
FURTHER_TOKEN = {
    "token_norm.scale_e": _entry(pieces.copy, "enorm.weight"),
    "stream_norm.scale_e": _entry(pieces.copy, "hnorm.weight"),
    "join_2ee": _entry(latent_attention.joined, "eh_proj.weight"),
    "norm.scale_e": _entry(pieces.copy, "shared_head.norm.weight"),
}
# Copies, in a further token's layer, of tensors that it shares with the model.
SHARED_COPIES = {EMBED: "embed_tokens.weight", HEAD: "shared_head.head.weight"}
PREFIX = "model.layers.{}."

TABLES: Mapping[str, Table] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": _like_llama(ATTENTION, MLP, NORMS_BEFORE, QUERY_NORMS),
    "gemma2": _like_llama(ATTENTION, MLP, NORMS_BOTH),
    "gemma3_text": _like_llama(ATTENTION, MLP, NORMS_BOTH, QUERY_NORMS),
    "phi3": _like_llama(FUSED, NORMS_BEFORE),
    "olmo2": OLMO,
    "olmo3": OLMO,
    "smollm3": LLAMA,
    "granite": LLAMA,
    "deepseek_v3": _like_llama(LATENT, DEEPSEEK_EXPERTS, NORMS_BEFORE),
    "gpt_oss": _like_llama(ATTENTION, GPT_OSS, NORMS_BEFORE),
    "mixtral": _like_llama(ATTENTION, MIXTRAL, NORMS_BEFORE),
    "qwen3_moe": _like_llama(ATTENTION, QWEN_EXPERTS, NORMS_BEFORE, QUERY_NORMS),
}


def table_of(family: str, model: TransformerConfig) -> Table:
    """Returns the table of a family, for a model with as many experts and layers."""
    table = dict(TABLES[family])
    dense: Mapping[str, Entry] = {}
    if family == "deepseek_v3":
        changed = {} if model.latent and model.latent.query_rank else PLAIN_QUERIES
        table |= _in_layers(PREFIX, changed)
        dense = _in_layers(PREFIX, LATENT | changed | MLP | NORMS_BEFORE)
        table |= _further(table, model)
    first = model.layers - model.stack_layers
    for path, entry in dense.items():
        table[path.replace(OURS, FIRST)] = entry.of_all(range(first))
    for path, entry in table.items():
        if path.startswith(OURS):
            table[path] = entry._replace(first=first)
    count = model.experts.count if model.experts else 0
    return {path: entry.of_experts(count) for path, entry in table.items()}


def _further(table: Table, model: TransformerConfig) -> Table:
    """Returns the entries of model.multi_token, whose blocks are layers after the last one."""
    count = model.experts.count if model.experts else 0
    entries = {}
    for number in numbers_of_further(model):
        ours = f"{FURTHER}{number - model.layers}."
        for path, entry in table.items():
            if path.startswith(OURS):
                of_block = entry.of_experts(count).of_all(range(number, number + 1))
                entries[ours + path.replace(OURS, "block.layer.")] = of_block
        for path, entry in FURTHER_TOKEN.items():
            names = tuple(PREFIX.replace(LAYER, str(number)) + name for name in entry.names)
            entries[ours + path] = Entry(entry.rule, names)
    return entries


def numbers_of_further(model: TransformerConfig) -> range:
    """Returns the numbers, in the files, of the layers of model.multi_token."""
    depth = model.multi_token.depth if model.multi_token else 0
    return range(model.layers, model.layers + depth)


def in_mxfp4(table: Table) -> Table:
    """Returns the table of files in which the matrices of experts are MXFP4."""
    packed = dict(table)
    for ours in ("mlp.up_xeu", "mlp.down_xfe"):
        rule, (name,), first = table[OURS + ours]
        names = (name + mxfp4.BLOCKS, name + mxfp4.SCALES)
        packed[OURS + ours] = Entry(mxfp4.of_blocks(rule), names, first)
    return packed


# Tensors that no parameter needs: masks and frequencies of older versions, and vision towers.
SAY_NOTHING = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
    r"|.*\.rotary_emb\.inv_freq"
    r"|(model\.)?(vision_tower|multi_modal_projector)\..*"
)
# Other spellings of the same names: (our prefix, the prefix in other files).
SPELLINGS: Sequence[tuple[str, str]] = (
    ("", ""),
    ("transformer.", ""),
    ("", "language_model."),
    ("model.", "model.language_model."),
)


def spelled(name: str, spelling: tuple[str, str]) -> str:
    """Returns a name of a table as a file spells it."""
    written, instead = spelling
    return instead + name.removeprefix(written) if name.startswith(written) else name
