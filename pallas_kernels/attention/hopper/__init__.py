"""Attention for NVIDIA's Hopper (sm_90), on Mosaic GPU: after FlashAttention-3 (arXiv:2407.08608).

Start with forward_kernel.py; its first lines say how three warpgroups divide the work. backward_kernels.py has the
kernels for dq and for dk and dv; both passes share programs.py (which part of the work a program takes) and masks.py,
the backward kernels alone scores.py. support.py says which calls run here.
"""

from pallas_kernels.attention.hopper.backward_kernels import backward as backward
from pallas_kernels.attention.hopper.forward_kernel import forward as forward
from pallas_kernels.attention.hopper.support import refusal as refusal
