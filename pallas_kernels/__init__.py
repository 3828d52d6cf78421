"""Fused attention, norms and linear + cross-entropy for JAX. Stands alone: imports jax and nothing else.

from pallas_kernels.attention import attention
from pallas_kernels.norm import layernorm, rmsnorm
from pallas_kernels.loss import linear_cross_entropy
"""
