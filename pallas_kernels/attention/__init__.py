"""Defines scaled dot-product attention: `attention`, and `saveable`, a policy for `jax.checkpoint`.

`attention_forward` and `attention_backward` are its two passes, for a caller that joins the results
of several sets of keys: parts.py.

`joined_attention`, in joined.py, takes queries, keys and values as parts of one array.

Start with api.py, then problem.py and mask.py, whose words all implementations use:

    xla.py      plain JAX, runs anywhere; the shortest form of the algorithm
    triton.py   kernels for NVIDIA GPUs of sm_80 and later
    hopper/     kernels for sm_90, on Mosaic GPU
    cudnn.py    NVIDIA's own

tiling.py has their tile sizes. The kernels share tile_ranges.py and operands.py.
"""

from pallas_kernels.attention.api import SAVED as SAVED
from pallas_kernels.attention.api import attention as attention
from pallas_kernels.attention.api import saveable as saveable
from pallas_kernels.attention.parts import attention_backward as attention_backward
from pallas_kernels.attention.parts import attention_forward as attention_forward
from pallas_kernels.attention.parts import delta_of as delta_of
