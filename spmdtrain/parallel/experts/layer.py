"""Makes the experts of a layer, on the devices of a mesh, one function of a model's activations.

b: sequences, t: tokens, e: width of the stream, k: choices of a token.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.counting import is_counted, marked
from pallas_kernels.partition import locally
from spmdtrain.parallel.axes import Rules
from spmdtrain.parallel.tensor_matmul import SAVED

if TYPE_CHECKING:
    from spmdtrain.parallel.experts.expert_weights import Activation, ExpertWeights
    from spmdtrain.parallel.experts.places import Places

BUCKET_FACTOR = 1.25


class Experts(Protocol):
    """The function that `make_experts` returns."""

    def __call__(
        self,
        x_bte: jax.Array,
        gates_btk: jax.Array,
        ids_btk: jax.Array,
        weights: "ExpertWeights",
        *,
        activation: "Activation",
    ) -> jax.Array: ...


def make_experts(
    rules: Rules | None = None, manual: Sequence[str] = (), factor: float = BUCKET_FACTOR
) -> Experts:
    """Returns `experts(x_bte, gates_btk, ids_btk, weights, activation=...) -> y_bte`.

    y is the sum over a token's choices of the gate times the expert's output for x. Gates travel in
    float32. An id is the number of an expert among all, or -1 for a choice that is not made; the
    ids of a token are distinct. Weights are those of the experts that the device has, or copies of
    them, with one more leading dim (`copies.py`).

    rules: None for one device.
    manual: the manual axes of the surrounding region.
    factor: the rows that a round sends from one device to another, as a multiple of the even share.
    """

    def experts(
        x_bte: jax.Array,
        gates_btk: jax.Array,
        ids_btk: jax.Array,
        weights: "ExpertWeights",
        *,
        activation: "Activation",
    ) -> jax.Array:
        if is_counted():
            return _counted(x_bte, ids_btk, weights)
        from spmdtrain.parallel.experts.places import find_places, on_one_device

        places = on_one_device(factor, activation)
        if rules is not None:
            places = find_places(rules, manual, x_bte.shape, weights, places.exchange)
        # Named, so that a backward pass that keeps matmuls does not repeat the exchange.
        arguments = (x_bte, gates_btk.astype(jnp.float32), ids_btk, weights)
        y_bte = checkpoint_name(_run(*arguments, places), SAVED)
        if places.results == places.stream:
            return y_bte
        return jax.lax.with_sharding_constraint(y_bte, places.stream)

    return experts


def _counted(x_bte: jax.Array, ids_btk: jax.Array, weights: "ExpertWeights") -> jax.Array:
    """Returns a marker with the FLOPs of the rows, without padding."""
    of_row = 2.0 * (weights.up[0].size + weights.down[0].size)
    return marked(x_bte.shape, x_bte.dtype, of_row * ids_btk.size)


# The derivative is not left to XLA, which would sum over axes that it knows nothing about. Both
# directions are separate regions.


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _run(x_bte, gates_btk, ids_btk, weights: "ExpertWeights", places: "Places") -> jax.Array:
    from spmdtrain.parallel.experts.rounds import forward

    def local(x_bte, gates_btk, ids_btk, weights):
        x_ne, gates_nk = places.own_tokens(x_bte), places.own_tokens(gates_btk)
        ids_nk = places.own_tokens(ids_btk, -1)
        y_ne = forward(places.exchange, x_ne, gates_nk, ids_nk, places.own_weights(weights))
        return places.sum_results(places.join_tokens(y_ne.astype(x_bte.dtype), x_bte.shape))

    in_specs = (places.tokens, places.tokens, places.tokens, places.weight_specs)
    return locally(local, in_specs, places.results)(x_bte, gates_btk, ids_btk, weights)


def _run_forward(x_bte, gates_btk, ids_btk, weights, places: "Places"):
    arguments = (x_bte, gates_btk, ids_btk, weights)
    return _run(*arguments, places), arguments


def _run_backward(places: "Places", arguments, dy_bte: jax.Array):
    from spmdtrain.parallel.experts.rounds import backward

    def local(x_bte, gates_btk, ids_btk, weights, dy_bte):
        x_ne, gates_nk = places.own_tokens(x_bte), places.own_tokens(gates_btk)
        ids_nk = places.own_tokens(ids_btk, -1)
        dx_ne, dgates_nk, dweights = backward(
            places.exchange,
            x_ne,
            gates_nk,
            ids_nk,
            places.own_weights(weights),
            places.own_tokens(dy_bte),
        )
        dx_bte = places.join_tokens(dx_ne.astype(x_bte.dtype), x_bte.shape)
        dgates_btk = places.join_tokens(dgates_nk, gates_btk.shape)
        return (
            places.sum_results(dx_bte),
            places.sum_gates(dgates_btk),
            places.sum_weights(dweights, weights),
        )

    in_specs = (places.tokens, places.tokens, places.tokens, places.weight_specs, places.tokens)
    out_specs = (places.results, places.tokens, places.weight_specs)
    dx_bte, dgates_btk, dweights = locally(local, in_specs, out_specs)(*arguments, dy_bte)
    return dx_bte, dgates_btk, None, dweights


_run.defvjp(_run_forward, _run_backward)
