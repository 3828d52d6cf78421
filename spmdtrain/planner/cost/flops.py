"""FLOPs of a training step in closed form.

A multiplication and an addition count as two. The FLOPs that a kernel really computes are counted
where its time is estimated (layer_time.py).
"""

from spmdtrain.planner.cost.workload import ModelShape


def model_flops_per_token(model: ModelShape, sequence_length: int) -> float:
    """Returns the FLOPs of forward and backward per token: causal attention, no recomputation.

    Equal to `models.size.train_flops_per_token`, which the metrics of a run use.
    """
    matrices = model.layers * model.layer_matrices + model.embed * model.vocab
    attention = 6 * model.layers * model.attention_width * sequence_length
    attention = attention * model.seen_share(sequence_length)
    return 6 * matrices + attention
