"""Defines the attention of a layer: the projections to queries, keys and values, and attention.

Letters as in layers/.
"""

from spmdtrain.models.layers.attention.grouped import Attention as Attention
