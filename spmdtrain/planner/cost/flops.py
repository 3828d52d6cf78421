"""Counts the FLOPs of a training step in closed form.

A multiplication and an addition count as two. The FLOPs that a kernel really computes are counted
where its time is estimated (layer_time.py).
"""

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.trained_weights import Trained


def model_flops_per_token(
    model: TransformerConfig, sequence_length: int, trained: Trained | None = None
) -> float:
    """Returns the FLOPs of forward and backward per token: causal attention, no recomputation.

    These are two for a multiplication by a weight, two for the gradient of its input, and two for
    the weight's own gradient if it is trained, as those of adapters are. Frozen first layers have
    only the first two. Only the experts that a token goes through count. Equal to what the metrics
    of a run use, `models.size.train_flops_per_token` and, if weights are frozen,
    `models.counted_flops.counted_flops_per_token`.
    """
    trained = trained or Trained()
    matrices = model.layers * shape.active_matrices(model) + model.embed * shape.vocab(model)
    matrices += shape.further_matrices(model)
    attention = 6 * model.heads * shape.mean_dim(model) * sequence_length
    attention *= model.layers * shape.visible_share(model, sequence_length) + shape.further_tokens(
        model
    )
    adapters = 6 * model.layers * trained.adapter_matrices(model)
    whole = (4 + 2 * trained.of_matrices) * matrices + adapters + attention
    of_layer = 4 * (shape.active_matrices(model) + trained.adapter_matrices(model))
    of_layer += (
        4
        * model.heads
        * shape.mean_dim(model)
        * sequence_length
        * shape.visible_share(model, sequence_length)
    )
    return whole - trained.frozen_layers * of_layer


def forward_flops_per_token(model: TransformerConfig, sequence_length: int) -> float:
    """Returns the FLOPs of a forward pass alone per token, a third of a training step's."""
    return model_flops_per_token(model, sequence_length) / 3
