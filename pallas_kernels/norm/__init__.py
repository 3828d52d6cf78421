"""Computes LayerNorm and RMSNorm over the last dim, with an optional residual.

Start with api.py.
"""

from pallas_kernels.norm.api import layernorm as layernorm
from pallas_kernels.norm.api import rmsnorm as rmsnorm
