"""Counts the FLOPs of a training step in closed form.

A multiplication and an addition count as two. The FLOPs that a kernel really computes are counted
where its time is estimated (layer_time.py).
"""

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.mixer_sizes import chunk_of
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.trained_weights import Trained


def model_flops_per_token(
    model: TransformerConfig, sequence_length: int, trained: Trained | None = None
) -> float:
    """Returns the FLOPs of forward and backward per token: causal attention, no recomputation.

    These are two for a multiplication by a weight, two for the gradient of its input, and two for
    the weight's own gradient if it is trained, as those of adapters are. Frozen first layers have
    only the first two. Only what a router chooses for a token counts. Equal to what the metrics
    of a run use, `models.size.train_flops_per_token` and, if weights are frozen,
    `models.counted_flops.counted_flops_per_token`.
    """
    trained = trained or Trained()
    matrices = model.layers * shape.active_matrices(model) + model.embed * shape.vocab(model)
    matrices += shape.further_matrices(model)
    further = shape.further_tokens(model) * _attention_flops(model, sequence_length)
    mixing = 3 * (model.layers * _mixing_flops(model, sequence_length) + further)
    adapters = 6 * model.layers * trained.adapter_matrices(model)
    whole = (4 + 2 * trained.of_matrices) * matrices + adapters + mixing
    of_layer = 4 * (shape.active_matrices(model) + trained.adapter_matrices(model))
    of_layer += 2 * _mixing_flops(model, sequence_length)
    return whole - trained.frozen_layers * of_layer


def _mixing_flops(model: TransformerConfig, sequence_length: int) -> float:
    """Returns the forward FLOPs of a layer that mix tokens, beside projections: the mean over the
    layers.
    """

    def of_layer(alike: TransformerConfig) -> float:
        if sizes := shape.linear_mixer(alike):
            return sizes.flops(chunk_of(sequence_length))
        share = shape.visible_share(
            alike if model.full or model.shared_keys else model, sequence_length
        )
        return _attention_flops(alike, sequence_length) * share

    return shape.mean_of_mixers(model, of_layer)


def _attention_flops(model: TransformerConfig, sequence_length: int) -> float:
    """Returns the forward FLOPs of a layer's causal attention without a window."""
    return 2 * model.heads * shape.mean_dim(model) * sequence_length


def forward_flops_per_token(model: TransformerConfig, sequence_length: int) -> float:
    """Returns the FLOPs of a forward pass alone per token, a third of a training step's."""
    return model_flops_per_token(model, sequence_length) / 3
