"""[model]: the shape of a transformer, and the families that preset it."""

from spmdtrain.config.schema.model.both import BothConfig as BothConfig
from spmdtrain.config.schema.model.conv import ConvConfig as ConvConfig
from spmdtrain.config.schema.model.delta import DeltaConfig as DeltaConfig
from spmdtrain.config.schema.model.experts import ExpertsConfig as ExpertsConfig
from spmdtrain.config.schema.model.full import FullConfig as FullConfig
from spmdtrain.config.schema.model.indexer import IndexerConfig as IndexerConfig
from spmdtrain.config.schema.model.latent import LatentConfig as LatentConfig
from spmdtrain.config.schema.model.layer_kinds import IN_STACK as IN_STACK
from spmdtrain.config.schema.model.layer_kinds import LayerKind as LayerKind
from spmdtrain.config.schema.model.layer_kinds import LayerParts as LayerParts
from spmdtrain.config.schema.model.layer_kinds import LayerStack as LayerStack
from spmdtrain.config.schema.model.layer_kinds import Mixer as Mixer
from spmdtrain.config.schema.model.multi_token import MultiTokenConfig as MultiTokenConfig
from spmdtrain.config.schema.model.rope_scaling import RopeScaling as RopeScaling
from spmdtrain.config.schema.model.ssd import SsdConfig as SsdConfig
from spmdtrain.config.schema.model.temperature import TemperatureConfig as TemperatureConfig
from spmdtrain.config.schema.model.token_layers import TokenLayersConfig as TokenLayersConfig
from spmdtrain.config.schema.model.transformer import GPT as GPT
from spmdtrain.config.schema.model.transformer import Llama as Llama
from spmdtrain.config.schema.model.transformer import TransformerConfig as TransformerConfig
