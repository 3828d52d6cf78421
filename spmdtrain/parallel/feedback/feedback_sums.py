"""Sums gradients over `data` by codecs with error feedback, once a step.

Their state, by dotted path of parameters, has two parts: `errors`, what a data shard has not sent
yet, float32 [1, *shape] in the region of the step, and `factors`, the right factors of the low-rank
codec, the same on all data shards.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.axes import axes_of_dim, drop_axes
from spmdtrain.parallel.feedback.largest import Largest
from spmdtrain.parallel.feedback.low_rank import LowRank

FeedbackCodec = LowRank | Largest
Codecs = Mapping[str, FeedbackCodec]  # by dotted path of the parameters with compressed gradients


class Feedback(NamedTuple):
    """The state of the codecs between two steps: arrays, or their specs."""

    errors: Mapping[str, Any]
    factors: Mapping[str, Any]


def feedback_sums(
    gradients: Mapping[str, jax.Array],
    feedback: Feedback,
    codecs: Codecs,
    specs: Mapping[str, P],
    manual: tuple[str, ...],
) -> tuple[dict[str, jax.Array], Feedback]:
    """Returns the sums of gradients over `data`, and the new state of the codecs.

    The surrounding region is manual over the mesh axes `manual`, among them `data`. `specs` say how
    mesh axes split each gradient. The axes that the region leaves to XLA are made manual here as
    well, so that a device encodes its own part.
    """
    full = {
        path: P(*specs[path], *[None] * (x.ndim - len(specs[path])))
        for path, x in gradients.items()
    }

    def local(gradients: dict[str, jax.Array], feedback: Feedback):
        return _sums(gradients, feedback, codecs, full)

    automatic = {path: drop_axes(manual, spec) for path, spec in full.items()}
    axes = {axis for spec in automatic.values() for part in spec for axis in axes_of_dim(part)}
    arguments = (dict(gradients), feedback)
    if not axes:
        return local(*arguments)
    of_errors = {path: P(None, *automatic[path]) for path in feedback.errors}
    of_factors = {}
    for path in feedback.factors:
        codec = codecs[path]
        assert isinstance(codec, LowRank), "only it has factors"
        of_factors[path] = codec.factor_spec(automatic[path])
    in_specs = (automatic, Feedback(of_errors, of_factors))
    region = jax.shard_map(
        local, axis_names=axes, in_specs=in_specs, out_specs=in_specs, check_vma=False
    )
    return region(*arguments)


def _sums(
    gradients: Mapping[str, jax.Array],
    feedback: Feedback,
    codecs: Codecs,
    specs: Mapping[str, P],
) -> tuple[dict[str, jax.Array], Feedback]:
    """Computes `feedback_sums` where all mesh axes that split a gradient are manual."""
    sums, errors, factors = {}, {}, {}
    for path, gradient in gradients.items():
        codec, error = codecs[path], feedback.errors[path][0]
        if isinstance(codec, LowRank):
            factor = feedback.factors[path]
            sums[path], error, factors[path] = codec.sum(
                gradient, error, factor, "data", specs[path]
            )
        else:
            sums[path], error = codec.sum(gradient, error, "data")
        errors[path] = error[None]
    return sums, Feedback(errors, factors)
