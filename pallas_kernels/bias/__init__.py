"""Fuses a bias with the operation after it, so that backward reads each gradient once.

Start with api.py.
"""

from pallas_kernels.bias.api import biased_gelu as biased_gelu
from pallas_kernels.bias.api import biased_heads as biased_heads
