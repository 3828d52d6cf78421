"""Attention for NVIDIA's Hopper (sm_90), on Mosaic GPU, after FlashAttention-3 (arXiv:2407.08608).

Start with forward_kernel.py, whose first lines say how three warpgroups divide the work. Then:

    backward_pass.py       how the backward pass works: a kernel for dq, then one for dk and dv
    dq_kernel.py           the first
    dkv_kernel.py          the second
    scores.py              scores, softmax and masks in the registers of the backward kernels
    backward_operands.py   their operands and scratch
    masks.py               the mask of a tile of scores
    heads.py               where heads are in memory: q, k and v apart, or in one array
    row_sums.py            the sums of the gradients of such an array over its rows
    programs.py            the grid: which part of the work a program takes
    support.py             which calls run here
"""

from pallas_kernels.attention.hopper.backward_pass import backward as backward
from pallas_kernels.attention.hopper.backward_pass import joined_backward as joined_backward
from pallas_kernels.attention.hopper.forward_kernel import forward as forward
from pallas_kernels.attention.hopper.support import refusal as refusal
