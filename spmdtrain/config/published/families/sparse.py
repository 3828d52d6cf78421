"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose attention reads the tokens that an indexer chooses."""

from typing import Any

from spmdtrain.config.published.families.deepseek import DEEPSEEK, read_latent, write_latent
from spmdtrain.config.published.families.expert_keys import (
    experts_of,
    in_layers,
    read_grouped,
    read_sparse,
    write_grouped,
    write_sparse,
)
from spmdtrain.config.published.families.family import Family, ModelSettings
from spmdtrain.config.published.families.further_layers import read_further, write_further
from spmdtrain.config.published.families.layer_windows import shortest
from spmdtrain.config.published.keys import Keys
from spmdtrain.config.schema import IndexerConfig, TransformerConfig

SIZES = {"heads": "index_n_heads", "dim": "index_head_dim", "kept": "index_topk"}
FULL, SHARED = "full", "shared"
LETTERS = {"F": FULL, "S": SHARED}
# Of GLM-5: which layers have an indexer, in three ways.
KINDS, PATTERN, PERIOD = "indexer_types", "index_topk_pattern", "index_topk_freq"
OFFSET = "index_skip_topk_offset"
OLD = DEEPSEEK["deepseek_v3"]


def _common(keys: Keys) -> ModelSettings:
    for name in ("ep_size", "aux_loss_alpha", "seq_aux"):
        keys.take(name)  # of training
    keys.agrees("moe_layer_freq", 1)
    keys.agrees("head_dim", keys.count("qk_rope_head_dim"))
    layers = keys.count("num_hidden_layers")
    keys.agrees("layer_types", ["indexed_attention"] * layers)
    keys.agrees("num_key_value_heads", keys.count("num_attention_heads"))
    indexer = {ours: keys.count(theirs) for ours, theirs in SIZES.items()}
    return {
        **read_latent(keys),
        **read_further(keys),
        **in_layers(read_grouped(keys), read_sparse(keys)),
        "indexer": indexer,
        "max_length": min(keys.count("max_position_embeddings"), indexer["kept"]),
    }


def _write_common(model: TransformerConfig) -> dict[str, Any]:
    if model.latent is None or model.indexer is None:
        return {}
    return {
        **write_latent(model, model.latent),
        **write_grouped(experts_of(model)),
        **write_further(model),
        **{theirs: getattr(model.indexer, ours) for ours, theirs in SIZES.items()},
        **write_sparse(model),
    }


def _glm_moe_dsa(keys: Keys) -> ModelSettings:
    settings = _common(keys)
    has_indexer = [kind == FULL for kind in _kinds(keys)]
    if not all(has_indexer):
        settings["indexer"]["layers"] = shortest(has_indexer)
    return settings


def _kinds(keys: Keys) -> list[str]:
    """Returns whether each layer has an indexer or the choice of an earlier one."""
    layers = keys.count("num_hidden_layers")
    kinds, pattern = keys.take(KINDS), keys.take(PATTERN)
    period, offset = keys.some(PERIOD, 1) or 1, keys.whole(OFFSET, 2) or 0
    for name, value in ((KINDS, kinds), (PATTERN, pattern)):
        if value is None:
            continue
        is_letters = isinstance(value, str)
        named = [LETTERS.get(letter, letter) for letter in value] if is_letters else value
        wanted = f"{FULL!r} or {SHARED!r} for each of {layers} layers, the first {FULL!r}"
        if not isinstance(named, list) or len(named) != layers or named[0] != FULL:
            raise keys.refused(name, value, wanted)
        if not all(kind in (FULL, SHARED) for kind in named):
            raise keys.refused(name, value, wanted)
        return named
    behind = (max(number - offset + 1, 0) for number in range(layers))
    return [SHARED if number % period else FULL for number in behind]


def _write_glm_moe_dsa(model: TransformerConfig) -> dict[str, Any]:
    indexer: IndexerConfig | None = model.indexer
    if indexer is None:
        return {}
    has_indexer = set(model.indexer_layers)
    kinds = [FULL if number in has_indexer else SHARED for number in range(model.layers)]
    letters = {kind: letter for letter, kind in LETTERS.items()}
    written = _write_common(model)
    return written | {KINDS: kinds, PATTERN: "".join(letters[kind] for kind in kinds)}


READS = tuple(key for key in OLD.reads if key not in ("head_dim", "rope_interleave"))
READS += (*SIZES.values(), "mlp_layer_types")
SPARSE = {
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM",
        reads=READS,
        defaults={**OLD.defaults, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
        read=_common,
        write=_write_common,
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM",
        reads=(*READS, KINDS, PATTERN, PERIOD, OFFSET),
        defaults={
            **OLD.defaults,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_group": 1,
            "topk_group": 1,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
        read=_glm_moe_dsa,
        write=_write_glm_moe_dsa,
    ),
}
