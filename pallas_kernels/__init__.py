"""Fused attention, norms, grouped matmuls, linear + cross-entropy, and for linear-time mixers the
scan over chunks and the inverse of unit triangles, for JAX. Imports only jax.

    from pallas_kernels.attention import attention
    from pallas_kernels.norm import layernorm, rmsnorm
    from pallas_kernels.grouped import grouped_matmul
    from pallas_kernels.loss import linear_cross_entropy
    from pallas_kernels.recurrence import Chunks, scan_chunks
    from pallas_kernels.inverse import unit_inverse

Each of these rooms has the same files: api.py (what users call; start there), reference.py (the
definition that every implementation must equal), one file or folder per implementation, and
cases.py (calls that tests, aot.py and bench.py share). Beside them:

    choose.py      which implementation runs, and the error if none can
    partition.py   kernels on a mesh
    gpus.py        the table of GPUs
    backends/      the compilers of kernels
    aot.py         compiles every case for absent GPUs
    calls.py       what a call is, apart from its numbers
    chosen.py      decisions made before a program is traced
    tuning/        measures, on a GPU, which implementation is correct and fastest
    bench.py       times every case on the GPU at hand
"""
