"""Counts the FLOPs of a training step in closed form.

A multiplication and an addition count as two. The FLOPs that a kernel really computes are counted
where its time is estimated (layer_time.py).
"""

from spmdtrain.planner.cost.workload import ModelShape, Trained


def model_flops_per_token(
    model: ModelShape, sequence_length: int, trained: Trained | None = None
) -> float:
    """Returns the FLOPs of forward and backward per token: causal attention, no recomputation.

    These are two for a multiplication by a weight, two for the gradient of its input, and two for
    the weight's own gradient if it is trained, as those of adapters are. Frozen first layers have
    only the first two. Only the experts that a token goes through count. Equal to what the metrics
    of a run use, `models.size.train_flops_per_token` and, if weights are frozen,
    `models.counted_flops.counted_flops_per_token`.
    """
    trained = trained or Trained()
    matrices = model.layers * model.active_matrices + model.embed * model.vocab
    matrices += model.further_matrices
    attention = 6 * model.heads * model.mean_dim * sequence_length
    attention *= model.layers * model.seen_share(sequence_length) + model.further
    adapters = 6 * model.layers * trained.adapter_matrices(model)
    whole = (4 + 2 * trained.of_matrices) * matrices + adapters + attention
    of_layer = 4 * (model.active_matrices + trained.adapter_matrices(model))
    of_layer += (
        4 * model.heads * model.mean_dim * sequence_length * model.seen_share(sequence_length)
    )
    return whole - trained.frozen_layers * of_layer


def teacher_flops_per_token(teacher: ModelShape | None, sequence_length: int) -> float:
    """Returns the FLOPs of a teacher's forward pass per token, a third of a training step's."""
    return model_flops_per_token(teacher, sequence_length) / 3 if teacher else 0.0
