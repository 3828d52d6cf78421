"""Bounds the kernels of recurrences: the scan over chunks, and the inverse of their triangles.

Nothing here imports jax until a kernel is compiled.
"""

from collections.abc import Iterable, Mapping

from pallas_kernels.assembled.bounds import Streamed, carried, streamed
from pallas_kernels.gpus import Gpu

SCANS = ("chunk_scan_forward", "chunk_scan_backward")
INVERSES = ("unit_inverse_forward", "unit_inverse_backward")
MODELS = ("Qwen3.5 27B", "Kimi Linear 48B", "Nemotron 3 Nano")  # of recurrence/cases.py
WARPS = 4  # that compute, of a program of the scan: a warpgroup
Texts = Iterable[tuple[str, str, str, str]]  # kernel, PTX, ptxas's report, instructions


def scans_of(gpu: Gpu, implementation: str, model: str, texts: Texts) -> Mapping[str, Streamed]:
    """Returns the figures of both kernels of a model's scan."""
    from pallas_kernels.recurrence import mosaic, triton
    from pallas_kernels.recurrence.cases import PUBLISHED

    case = PUBLISHED[model]
    columns = {"mosaic": mosaic.ROWS, "triton": triton.COLUMNS}[implementation]
    programs = case.heads * case.value_dim / columns
    # Elements of a program and chunk: of a factor, of tokens' values, and of a state.
    factors = case.tokens * case.key_dim * (1 + case.corrects)
    values = case.tokens * columns
    state = case.key_dim * columns
    # A program does not read all of a head's factors from memory: the head's others use them too.
    shared = factors * columns / case.value_dim
    moved = {
        # All is in 16 bits, but for what tokens bring: that is in 32.
        "chunk_scan_forward": 2 * (shared + state + values) + 4 * values,
        # The states and their gradients, which come and go; the gradient of what tokens bring.
        "chunk_scan_backward": 2 * (shared + 3 * state + values) + 4 * values,
    }
    products = 1 + case.corrects
    flops = 2.0 * products * case.tokens * case.key_dim * columns
    return {
        name: carried(
            gpu, ptx, report, text, moved=moved[name], grid=programs, flops=flops, warps=WARPS
        )
        for name, ptx, report, text in texts
    }


def inverses_of(gpu: Gpu, matrices: int, size: int, texts: Texts) -> Mapping[str, Streamed]:
    """Returns the figures of both kernels of an inverse."""
    matrix = 4.0 * size**2
    moved = {"unit_inverse_forward": 2 * matrix, "unit_inverse_backward": 3 * matrix}
    return {
        name: streamed(gpu, ptx, report, text, moved[name], matrices)
        for name, ptx, report, text in texts
    }
