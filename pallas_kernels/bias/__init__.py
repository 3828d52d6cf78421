"""Fuses a bias with the operation after it, so that backward reads each gradient once.

Start with api.py.
"""

from pallas_kernels.bias.api import add_vector as add_vector
from pallas_kernels.bias.api import biased_gelu as biased_gelu
from pallas_kernels.bias.api import biased_heads as biased_heads
from pallas_kernels.bias.api import heads_apart as heads_apart
