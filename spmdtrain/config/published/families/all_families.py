"""Joins the families of all lineages, in the order in which an export looks for one."""

from collections.abc import Mapping

from spmdtrain.config.published.families.afmoe import AFMOE
from spmdtrain.config.published.families.apertus import APERTUS
from spmdtrain.config.published.families.arcee import ARCEE
from spmdtrain.config.published.families.cohere import COHERE
from spmdtrain.config.published.families.cwm import CWM
from spmdtrain.config.published.families.deepseek import DEEPSEEK
from spmdtrain.config.published.families.ernie import ERNIE
from spmdtrain.config.published.families.exaone import EXAONE
from spmdtrain.config.published.families.falcon import FALCON
from spmdtrain.config.published.families.family import Family
from spmdtrain.config.published.families.gemma import GEMMA
from spmdtrain.config.published.families.gemma4 import GEMMA4
from spmdtrain.config.published.families.glm import GLM
from spmdtrain.config.published.families.gpt2 import GPT2
from spmdtrain.config.published.families.gpt_oss import GPT_OSS
from spmdtrain.config.published.families.granite import GRANITE
from spmdtrain.config.published.families.granite_hybrid import GRANITE_HYBRID
from spmdtrain.config.published.families.hunyuan import HUNYUAN
from spmdtrain.config.published.families.kimi import KIMI
from spmdtrain.config.published.families.lfm import LFM
from spmdtrain.config.published.families.llama import LLAMA
from spmdtrain.config.published.families.llama4 import LLAMA4
from spmdtrain.config.published.families.minimax import MINIMAX
from spmdtrain.config.published.families.mistral import MISTRAL
from spmdtrain.config.published.families.nemotron import NEMOTRON
from spmdtrain.config.published.families.olmo import OLMO
from spmdtrain.config.published.families.olmo_hybrid import OLMO_HYBRID
from spmdtrain.config.published.families.phi import PHI
from spmdtrain.config.published.families.qwen import QWEN
from spmdtrain.config.published.families.qwen_linear import QWEN_LINEAR
from spmdtrain.config.published.families.seed_oss import SEED_OSS
from spmdtrain.config.published.families.smollm import SMOLLM
from spmdtrain.config.published.families.sparse import SPARSE
from spmdtrain.config.published.families.starcoder import STARCODER
from spmdtrain.config.published.families.youtu import YOUTU

FAMILIES: Mapping[str, Family] = {
    **GPT2,
    **LLAMA,
    **DEEPSEEK,  # before Mistral 4, whose dense layers are the same but for a temperature
    **MISTRAL,
    **QWEN,
    **GEMMA,
    **GEMMA4,
    **PHI,
    **OLMO,
    **SMOLLM,
    **GRANITE,
    **GPT_OSS,
    **GLM,
    **HUNYUAN,
    **MINIMAX,
    **SEED_OSS,
    **EXAONE,
    **ARCEE,
    **AFMOE,
    **APERTUS,
    **ERNIE,
    **COHERE,
    **QWEN_LINEAR,
    **LLAMA4,
    **LFM,
    **OLMO_HYBRID,
    **KIMI,
    **NEMOTRON,
    **GRANITE_HYBRID,
    **FALCON,
    **SPARSE,
    **CWM,
    **STARCODER,
    **YOUTU,
}
