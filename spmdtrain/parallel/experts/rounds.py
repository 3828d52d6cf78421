"""Runs the rounds of a layer's experts, forward and backward, on each device's own tokens.

Every mesh axis that splits experts or their tokens must be manual. The backward pass repeats every
round, so it needs only the inputs of the forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.parallel.experts.expert_weights import Activation, ExpertWeights, multiply
from spmdtrain.parallel.experts.receiving import Arrived, lay_out
from spmdtrain.parallel.experts.sending import (
    Bucket,
    Outbox,
    Shipment,
    bucket_of,
    cut_round,
    look_up,
    sort_rows,
)

TILE = 128  # rows of a tile, if experts get many
LEAST_TILE = 16


@dataclass(frozen=True)
class Exchange:
    """The exchange of a layer's rows between devices.

    axes: the mesh axes that split experts, major first; () for one device.
    devices: the number of devices along them.
    factor: the rows of a bucket, as a multiple of its even share.
    """

    axes: tuple[str, ...]
    devices: int
    factor: float
    activation: Activation


@dataclass(frozen=True)
class _Shape:
    """The sizes of a layer's rounds."""

    bucket: Bucket
    own: int  # experts of a device
    choices: int
    tile: int
    is_one_round: bool

    @property
    def message_rows(self) -> int:
        """The largest number of rows of a message: its choices are distinct experts."""
        return min(self.choices, self.own)


def forward(
    how: Exchange,
    x_ne: jax.Array,
    gates_nk: jax.Array,
    ids_nk: jax.Array,
    weights: ExpertWeights,
) -> jax.Array:
    """Returns for each token the sum of its experts' outputs times their gates, float32 [n, e].

    gates_nk: float32. ids_nk: int32, the experts of all devices numbered in order.
    weights: those of this device's experts.
    """
    shape = _shape(how, ids_nk, weights)

    def once(cut: Shipment) -> jax.Array:
        arrived = _send_rows(how, shape, cut, gates_nk, ids_nk)
        got = _send_messages(how, x_ne, cut)
        x_pe = look_up(got, arrived.message_p, 0)
        y_pe = multiply(weights, how.activation, x_pe, arrived.gate_p, arrived.expert_of_tile_t)
        return _return_messages(how, y_pe, arrived, cut)

    return _over_rounds(how, shape, sort_rows(ids_nk, how.devices, shape.own), once)


def backward(
    how: Exchange,
    x_ne: jax.Array,
    gates_nk: jax.Array,
    ids_nk: jax.Array,
    weights: ExpertWeights,
    dy_ne: jax.Array,
) -> tuple[jax.Array, jax.Array, ExpertWeights]:
    """Returns the gradients of x [n, e], gates [n, k] and weights; sums of rounds are float32."""
    shape = _shape(how, ids_nk, weights)

    def once(cut: Shipment) -> tuple[jax.Array, jax.Array, ExpertWeights]:
        arrived = _send_rows(how, shape, cut, gates_nk, ids_nk)
        x_pe = look_up(_send_messages(how, x_ne, cut), arrived.message_p, 0)
        dy_pe = look_up(_send_messages(how, dy_ne, cut), arrived.message_p, 0)

        def of_rows(weights, x_pe, gate_p):
            return multiply(weights, how.activation, x_pe, gate_p, arrived.expert_of_tile_t)

        dweights, dx_pe, dgate_p = jax.vjp(of_rows, weights, x_pe, arrived.gate_p)[1](dy_pe)
        dx_ne = _return_messages(how, dx_pe, arrived, cut)
        dgate_dc = look_up(dgate_p, arrived.place_q, 0.0).reshape(cut.row_dc.shape)
        returned = _swap(how, dgate_dc).reshape(-1)
        return dx_ne, look_up(returned, cut.place_nk, 0.0), dweights

    return _over_rounds(how, shape, sort_rows(ids_nk, how.devices, shape.own), once)


def _shape(how: Exchange, ids_nk: jax.Array, weights: ExpertWeights) -> _Shape:
    tokens, choices = ids_nk.shape
    own = weights.up.shape[0]
    bucket = bucket_of(tokens, choices, how.devices, own, how.factor)
    of_expert = tokens * choices // own  # if balanced: as many send as own experts
    return _Shape(
        bucket=bucket,
        own=own,
        choices=choices,
        tile=tile_of(of_expert),
        is_one_round=bucket.holds_all(tokens, choices, own),
    )


def tile_of(rows: int) -> int:
    """Returns the number of rows in a tile if an expert gets `rows`: a power of two, at most half
    of them.
    """
    half = max(rows // 2, 1)
    return min(max(1 << half.bit_length() - 1, LEAST_TILE), TILE)


def _over_rounds(
    how: Exchange, shape: _Shape, outbox: Outbox, once: Callable[[Shipment], Any]
) -> Any:
    """Returns the sum of `once` over all rounds, a tree; in float32 if there may be several.

    All devices along the exchange's axes make as many rounds as the one that needs most. The loop
    holds the only copy of a round's code.
    """
    if shape.is_one_round:
        return once(cut_round(outbox, outbox.begin_d, shape.bucket))

    def turn(carry):
        begin_d, totals, _ = carry
        cut = cut_round(outbox, begin_d, shape.bucket)
        totals = jax.tree.map(jnp.add, totals, once(cut))
        waits = (cut.end_d < outbox.end_d).any().astype(jnp.int32)
        return cut.end_d, totals, jax.lax.pmax(waits, how.axes) if how.axes else waits

    first = jax.eval_shape(lambda: once(cut_round(outbox, outbox.begin_d, shape.bucket)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), first)
    carry = (outbox.begin_d, zeros, jnp.int32(1))
    return jax.lax.while_loop(lambda carry: carry[2] > 0, turn, carry)[1]


def _send_rows(
    how: Exchange, shape: _Shape, cut: Shipment, gates_nk: jax.Array, ids_nk: jax.Array
) -> Arrived:
    """Sends the description of each row: its message, its expert and its gate."""
    expert_dc = look_up(ids_nk.reshape(-1), cut.row_dc, shape.own) % shape.own
    gate_dc = look_up(gates_nk.reshape(-1), cut.row_dc, 0.0)
    bits_dc = jax.lax.bitcast_convert_type(gate_dc, jnp.int32)
    received = _swap(how, jnp.stack([cut.message_dc, expert_dc, bits_dc], -1))
    return lay_out(
        received[..., 0],
        received[..., 1],
        jax.lax.bitcast_convert_type(received[..., 2], jnp.float32),
        shape.bucket,
        shape.own,
        message_rows=shape.message_rows,
        tile=shape.tile,
    )


def _send_messages(how: Exchange, x_ne: jax.Array, cut: Shipment) -> jax.Array:
    """Returns the rows of x for the messages of a round, as they arrive [d m, e]."""
    sent_dme = look_up(x_ne, cut.token_dm, 0)
    return _swap(how, sent_dme).reshape(-1, x_ne.shape[-1])


def _return_messages(how: Exchange, y_pe: jax.Array, arrived: Arrived, cut: Shipment) -> jax.Array:
    """Sums padded rows into messages, sends these back and sums them into tokens, float32 [n,
    e].
    """
    of_messages = _sum_of(y_pe, arrived.places_mk).astype(y_pe.dtype)
    home = _swap(how, of_messages.reshape(*cut.token_dm.shape, -1))
    return _sum_of(home.reshape(-1, y_pe.shape[-1]), cut.message_nk)


def _sum_of(rows: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the sum of the rows at `places` [..., k], one after another, in float32."""
    add = partial(look_up, rows, otherwise=0)
    terms = [add(places[..., k]).astype(jnp.float32) for k in range(places.shape[-1])]
    return sum(terms[1:], terms[0])


def _swap(how: Exchange, x: jax.Array) -> jax.Array:
    """Exchanges x [d, ...]: each device gets the part that every other one has for it."""
    if not how.axes:
        return x
    return jax.lax.all_to_all(x, how.axes, 0, 0, tiled=True)
