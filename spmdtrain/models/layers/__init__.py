"""Defines the layers of a transformer.

Each names only the logical axes of its weights and activations.

Letters in this room: b batch, t query time, s key time, e embed, k key-value heads, g query heads
per key-value head, d head_dim, f ffn, v vocab.
"""

from spmdtrain.models.layers.attention import Attention as Attention
from spmdtrain.models.layers.cache import Cache as Cache
from spmdtrain.models.layers.cache import empty_cache as empty_cache
from spmdtrain.models.layers.embedding import Embedding as Embedding
from spmdtrain.models.layers.mlp import Mlp as Mlp
from spmdtrain.models.layers.norm import Norm as Norm
from spmdtrain.models.layers.rope import rotate as rotate
from spmdtrain.models.layers.weights import bias as bias
from spmdtrain.models.layers.weights import matmul_weight as matmul_weight
from spmdtrain.models.layers.weights import weight as weight
from spmdtrain.models.projection import Fused as Fused
