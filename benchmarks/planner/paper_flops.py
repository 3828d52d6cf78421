"""FLOPs and parameters in the closed forms that papers use for their figures."""


def sc21_parameters(layers: int, embed: int, vocab: int, sequence_length: int) -> float:
    """The parameters of a GPT: Narayanan et al., arXiv 2104.04473, equation 2."""
    outside = (vocab + sequence_length) / (12 * layers * embed)
    return 12 * layers * embed**2 * (1 + 13 / (12 * embed) + outside)


def sc21_flops(batch: int, sequence_length: int, layers: int, embed: int, vocab: int) -> float:
    """The FLOPs of one step with full recomputation: the same paper, equation 3."""
    attention = sequence_length / (6 * embed)
    head = vocab / (16 * layers * embed)
    return 96 * batch * sequence_length * layers * embed**2 * (1 + attention + head)


def korthikanti_flops(
    batch: int, sequence_length: int, layers: int, embed: int, vocab: int
) -> tuple[float, float]:
    """(model FLOPs, hardware FLOPs with selective recomputation) of one step.

    Korthikanti et al., arXiv 2205.05198, equations 7 and 8.
    """
    matrices = 72 * batch * sequence_length * layers * embed**2
    head = vocab / (12 * embed * layers)
    model = matrices * (1 + sequence_length / (6 * embed) + head)
    hardware = matrices * (1 + sequence_length / (3 * embed) + head)
    return model, hardware
