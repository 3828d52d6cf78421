"""FLOPs in the closed forms that papers state their figures in; a multiplication and an addition count as two.

What a kernel really computes is counted where it is priced (cost.py); these are for comparing like with like.
"""

from spmdtrain.planner.job import Shape


def sc21_parameters(layers: int, hidden: int, vocab: int, sequence: int) -> float:
    """Narayanan et al., arXiv 2104.04473, equation 2."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + sequence) / (12 * layers * hidden))


def sc21_flops(batch: int, sequence: int, layers: int, hidden: int, vocab: int) -> float:
    """Of one iteration with full recomputation: the same paper, equation 3."""
    work = 1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96 * batch * sequence * layers * hidden**2 * work


def korthikanti_flops(batch: int, sequence: int, layers: int, hidden: int, vocab: int) -> tuple[float, float]:
    """(model FLOPs, hardware FLOPs with selective recomputation) of one iteration: arXiv 2205.05198, equations 7, 8."""
    scale, head = 72 * batch * sequence * layers * hidden**2, vocab / (12 * hidden * layers)
    return scale * (1 + sequence / (6 * hidden) + head), scale * (1 + sequence / (3 * hidden) + head)


def model_flops_per_token(shape: Shape, sequence: int) -> float:
    """Of forward and backward, as `models.size.train_flops_per_token`: causal attention, no recomputation."""
    matrices = shape.layers * shape.layer_matrices + shape.embed * shape.vocab
    return 6 * matrices + 6 * shape.layers * shape.attention_width * sequence
