"""Fuses the unembedding matmul and its cross-entropy, without ever holding all logits: see
api.py.
"""

from pallas_kernels.loss.api import linear_cross_entropy as linear_cross_entropy
from pallas_kernels.loss.api import shape_logits as shape_logits
from pallas_kernels.loss.distilled import linear_distillation as linear_distillation
from pallas_kernels.loss.likeliest import linear_likeliest as linear_likeliest
from pallas_kernels.loss.own import linear_token_loss as linear_token_loss
from pallas_kernels.loss.own import linear_token_losses as linear_token_losses
from pallas_kernels.loss.saved import linear_saved_distillation as linear_saved_distillation
from pallas_kernels.loss.student import Head as Head
