"""Defines the attention of a layer: what computes queries, keys and values, and what attends.

Letters as in layers/.
"""

from spmdtrain.models.layers.attention.grouped import Attention as Attention
from spmdtrain.models.layers.attention.latent import LatentAttention as LatentAttention
