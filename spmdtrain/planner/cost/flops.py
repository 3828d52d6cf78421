"""FLOPs of a training step in the closed forms that papers use for their figures.

A multiplication and an addition count as two. The FLOPs that a kernel really computes are counted
where its time is estimated (layer_time.py); these forms compare like with like.
"""

from spmdtrain.planner.cost.workload import ModelShape


def sc21_parameters(layers: int, embed: int, vocab: int, sequence_length: int) -> float:
    """Returns the parameters of a GPT: Narayanan et al., arXiv 2104.04473, equation 2."""
    outside = (vocab + sequence_length) / (12 * layers * embed)
    return 12 * layers * embed**2 * (1 + 13 / (12 * embed) + outside)


def sc21_flops(batch: int, sequence_length: int, layers: int, embed: int, vocab: int) -> float:
    """Returns the FLOPs of one step with full recomputation: the same paper, equation 3."""
    attention = sequence_length / (6 * embed)
    head = vocab / (16 * layers * embed)
    return 96 * batch * sequence_length * layers * embed**2 * (1 + attention + head)


def korthikanti_flops(
    batch: int, sequence_length: int, layers: int, embed: int, vocab: int
) -> tuple[float, float]:
    """Returns (model FLOPs, hardware FLOPs with selective recomputation) of one step.

    Korthikanti et al., arXiv 2205.05198, equations 7 and 8.
    """
    matrices = 72 * batch * sequence_length * layers * embed**2
    head = vocab / (12 * embed * layers)
    model = matrices * (1 + sequence_length / (6 * embed) + head)
    hardware = matrices * (1 + sequence_length / (3 * embed) + head)
    return model, hardware


def model_flops_per_token(model: ModelShape, sequence_length: int) -> float:
    """Returns the FLOPs of forward and backward per token: causal attention, no recomputation.

    Equal to `models.size.train_flops_per_token`, which the metrics of a run use.
    """
    matrices = model.layers * model.layer_matrices + model.embed * model.vocab
    attention = 6 * model.layers * model.attention_width * sequence_length
    attention = attention * model.seen_share(sequence_length)
    return 6 * matrices + attention
