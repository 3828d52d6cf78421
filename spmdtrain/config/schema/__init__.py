"""Every setting of a run: typed, frozen, each with its unit and meaning.

Each section has a file with its name in TOML: train.py has [train]. run.py has `RunConfig`, all
sections together. A class checks what can be known from its own section. Functions beside it,
`refusals` and `refusals_of_...`, yield what it does not go with: islands.py knows what islands
cannot have, [optimizer] knows of none. run.py has them in order. What depends on the machine
(devices, files) is checked where the config meets it. Nothing here imports jax, so `--help` and a
typo cost milliseconds.

Descriptions are read by people: they appear in the JSON schema and in the list of settings.
"""

from spmdtrain.config.schema.checkpoint import CheckpointConfig
from spmdtrain.config.schema.compression import CompressionConfig
from spmdtrain.config.schema.data import DataConfig, MixPhase, MixSource
from spmdtrain.config.schema.distill import DistillConfig
from spmdtrain.config.schema.eval import EvalConfig
from spmdtrain.config.schema.finetune import FinetuneConfig
from spmdtrain.config.schema.guard import GuardConfig
from spmdtrain.config.schema.islands import IslandsConfig
from spmdtrain.config.schema.kernels import KernelsConfig
from spmdtrain.config.schema.log import LogConfig
from spmdtrain.config.schema.mesh import MESH_AXES, MeshConfig
from spmdtrain.config.schema.model import (
    GPT,
    IN_STACK,
    BothConfig,
    ConvConfig,
    DeltaConfig,
    ExpertsConfig,
    FullConfig,
    IndexerConfig,
    LatentConfig,
    LayerKind,
    LayerParts,
    LayerStack,
    Llama,
    Mixer,
    MultiTokenConfig,
    RopeScaling,
    SsdConfig,
    TemperatureConfig,
    TokenLayersConfig,
    TransformerConfig,
)
from spmdtrain.config.schema.optimizer import (
    Adafactor,
    AdamW,
    Lamb,
    Lion,
    Muon,
    OptimizerConfig,
    ParameterGroup,
    ScheduleFreeAdamW,
    Sgd,
    Soap,
)
from spmdtrain.config.schema.own import OwnConfig
from spmdtrain.config.schema.pipeline import PipelineConfig, PipelineSchedule
from spmdtrain.config.schema.precision import Narrow, PrecisionConfig
from spmdtrain.config.schema.rules import RulesConfig
from spmdtrain.config.schema.run import RunConfig, check_config
from spmdtrain.config.schema.sparsity import SparsityConfig
from spmdtrain.config.schema.train import SEEDS, BatchStage, TrainConfig
from spmdtrain.config.settings import Settings

__all__ = [
    "Adafactor",
    "AdamW",
    "BatchStage",
    "CheckpointConfig",
    "DataConfig",
    "DeltaConfig",
    "DistillConfig",
    "EvalConfig",
    "ExpertsConfig",
    "CompressionConfig",
    "BothConfig",
    "ConvConfig",
    "FinetuneConfig",
    "GPT",
    "GuardConfig",
    "IslandsConfig",
    "KernelsConfig",
    "Lamb",
    "FullConfig",
    "TokenLayersConfig",
    "IndexerConfig",
    "LatentConfig",
    "LayerParts",
    "LayerKind",
    "LayerStack",
    "IN_STACK",
    "Lion",
    "Llama",
    "LogConfig",
    "MESH_AXES",
    "MeshConfig",
    "MixPhase",
    "MixSource",
    "Mixer",
    "MultiTokenConfig",
    "Muon",
    "Narrow",
    "OptimizerConfig",
    "OwnConfig",
    "ParameterGroup",
    "PipelineConfig",
    "PipelineSchedule",
    "PrecisionConfig",
    "RopeScaling",
    "RulesConfig",
    "RunConfig",
    "SsdConfig",
    "SEEDS",
    "ScheduleFreeAdamW",
    "Settings",
    "Sgd",
    "Soap",
    "SparsityConfig",
    "TemperatureConfig",
    "TrainConfig",
    "TransformerConfig",
    "check_config",
]

# The sections of a run, by the names of their classes: run.py is the only other file that names a
# new one.
_SECTIONS = {
    field.annotation.__name__: field.annotation
    for field in RunConfig.model_fields.values()
    if isinstance(field.annotation, type)
}
globals().update(_SECTIONS)
__all__ += sorted(_SECTIONS.keys() - set(__all__))  # pyright: ignore[reportUnsupportedDunderAll]
