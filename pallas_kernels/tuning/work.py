"""Compares the work of a call, forward and backward, with its GPU's data sheet."""

from pallas_kernels.calls import AttentionCall, Call, ChunksCall, InverseCall, LossCall, NormCall
from pallas_kernels.counting import seen_pairs
from pallas_kernels.gpus import find

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
DOCUMENTS = (1, 3, 5, 7)  # lengths of those that on_jax.py draws, in sixteenths of a sequence


def share_of_sheet(gpu: str, call: Call, seconds: float) -> float | None:
    """Returns the rate of a call as a share of the data sheet's; None if the GPU is not listed.

    For attention it counts the FLOPs of the visible pairs of query and key, as papers do: two
    matmuls forward, five backward; for a grouped matmul and for a loss one and two; for a scan over
    chunks those of its results forward, and twice as many backward. For a norm and an inverse it
    counts the bytes that must be read and written.
    """
    listed = find(gpu)
    if listed is None or not seconds:
        return None
    if isinstance(call, InverseCall):
        moved = 5 * BYTES[call.dtype] * call.matrices * call.size**2
        return moved / seconds / listed.memory_bandwidth
    if not isinstance(call, NormCall):
        narrow = call.dtype in ("bfloat16", "float16")
        peak = listed.bfloat16 if narrow else listed.float32
        if isinstance(call, AttentionCall):
            flops = 3.5 * forward_flops(call)
        elif isinstance(call, LossCall):
            flops = 6.0 * call.batch * call.time * call.width * call.rows
        elif isinstance(call, ChunksCall):
            flops = 3.0 * scan_flops(call)
        else:
            flops = 6.0 * call.rows * call.width * call.out_width
        return flops / seconds / peak
    return norm_bytes(call) / seconds / listed.memory_bandwidth


def forward_flops(call: AttentionCall) -> float:
    """Returns the FLOPs of the two matmuls of a forward pass."""
    pairs = seen_pairs(call.queries, call.keys, call.right == 0, (call.left, call.right))
    if call.right == 0 and call.left is None:
        pairs = seen_pairs(call.queries, call.keys, True, None)
    if call.segments:
        pairs *= sum((length / 16) ** 2 for length in DOCUMENTS)
    return 2.0 * call.batch * call.heads * pairs * (call.head_dim + call.value_dim)


def scan_flops(call: ChunksCall) -> float:
    """Returns the FLOPs of the matmuls of a forward pass: with the state, and within chunks."""
    with_state = (3 if call.corrects else 2) * call.key_dim
    rows = call.chunks * call.heads * call.tokens
    return 2.0 * rows * call.value_dim * (with_state + call.tokens)


def norm_bytes(call) -> float:
    """Returns the bytes of x, y, dy and dx, of the sum that is read again, and of a residual's four
    arrays.
    """
    size = call.rows * call.width
    of_residual = 4 * BYTES[call.residual] if call.residual else BYTES[call.dtype]
    return float(size * (4 * BYTES[call.dtype] + of_residual))
