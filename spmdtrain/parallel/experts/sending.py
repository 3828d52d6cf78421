"""Decides which rows go where in each round, as the sending device sees it."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

NOWHERE = 2**30  # an index past the end of every array: reads a zero, writes nothing


@dataclass(frozen=True)
class Bucket:
    """The most that a round sends from one device to another."""

    rows: int
    messages: int

    def holds_all(self, tokens: int, choices: int, own: int) -> bool:
        """Returns True if one round is enough whatever the tokens choose."""
        return self.messages >= tokens and self.rows >= tokens * min(choices, own)


def bucket_of(tokens: int, choices: int, devices: int, own: int, factor: float) -> Bucket:
    """Returns `factor` times the even share of each device with `own` experts, rounded up.

    If all sets of experts were equally likely, a device would have k / d of a token's rows, and the
    token would be sent there with a probability of 1 - C(x - l, k) / C(x, k), of x experts.
    """
    experts = own * devices
    absent = math.comb(experts - own, choices) / math.comb(experts, choices)
    all_rows = tokens * min(choices, own)
    rows = min(math.ceil(factor * tokens * choices / devices), all_rows)
    messages = min(math.ceil(factor * tokens * (1 - absent)), tokens, rows)
    return Bucket(max(rows, 1), max(messages, 1))


class Outbox(NamedTuple):
    """A device's rows, sorted by the device of their expert and then by token."""

    row_s: jax.Array  # token k + choice
    message_s: jax.Array  # the number of the row's message
    is_first_s: jax.Array  # of its message
    place_of_message_s: jax.Array  # where each message begins; NOWHERE past the last one
    place_nk: jax.Array  # where each row is
    device_nk: jax.Array  # the device of each row; d if a choice is not made
    begin_d: jax.Array  # where the rows of each device begin
    end_d: jax.Array  # where they end


def sort_rows(ids_nk: jax.Array, devices: int, own: int) -> Outbox:
    """Sorts the rows of tokens that chose the experts `ids_nk`; `own` experts are on each device.

    An id that belongs to no expert is a choice that is not made.
    """
    rows, choices = ids_nk.size, ids_nk.shape[1]
    is_made_nk = (ids_nk >= 0) & (ids_nk < devices * own)
    device_nk = jnp.where(is_made_nk, ids_nk // own, devices)
    row_s = jnp.argsort(device_nk.reshape(-1), stable=True).astype(jnp.int32)
    device_s = device_nk.reshape(-1)[row_s]
    token_s = row_s // choices

    is_new_s = (token_s[1:] != token_s[:-1]) | (device_s[1:] != device_s[:-1])
    is_first_s = jnp.concatenate([jnp.ones(1, bool), is_new_s])
    message_s = jnp.cumsum(is_first_s, dtype=jnp.int32) - 1
    place_s = jnp.arange(rows, dtype=jnp.int32)
    begins = jnp.where(is_first_s, message_s, NOWHERE + place_s)
    begin_d, end_d = (count_below(device_s, jnp.arange(devices) + past) for past in (0, 1))
    return Outbox(
        row_s=row_s,
        message_s=message_s,
        is_first_s=is_first_s,
        place_of_message_s=inverse(begins, rows, place_s),
        place_nk=inverse(row_s, rows, place_s).reshape(ids_nk.shape),
        device_nk=device_nk,
        begin_d=begin_d,
        end_d=end_d,
    )


class Shipment(NamedTuple):
    """The content of one round, and where it came from."""

    end_d: jax.Array  # the first sorted row of each device that must wait for a later round
    token_dm: jax.Array  # the token of each message; NOWHERE for none
    row_dc: jax.Array  # the row in each place of the buckets; NOWHERE for none
    message_dc: jax.Array  # the place of its message in the bucket; m for none
    # The flat place of a choice's message, if the choice is the message's first row in this round.
    message_nk: jax.Array
    place_nk: jax.Array  # the flat place of a choice's row; NOWHERE if it is not in this round


def cut_round(outbox: Outbox, begin_d: jax.Array, bucket: Bucket) -> Shipment:
    """Returns the round that begins at the sorted row `begin_d` of each device."""
    choices = outbox.place_nk.shape[1]
    message_d = look_up(outbox.message_s, begin_d, NOWHERE)
    no_room_d = look_up(outbox.place_of_message_s, message_d + bucket.messages, NOWHERE)
    end_d = jnp.minimum(jnp.minimum(begin_d + bucket.rows, no_room_d), outbox.end_d)

    place_dc = begin_d[:, None] + jnp.arange(bucket.rows, dtype=jnp.int32)
    is_sent_dc = place_dc < end_d[:, None]
    place_dc = jnp.where(is_sent_dc, place_dc, NOWHERE)
    message_dc = look_up(outbox.message_s, place_dc, 0) - message_d[:, None]

    number_dm = message_d[:, None] + jnp.arange(bucket.messages, dtype=jnp.int32)
    first_dm = look_up(outbox.place_of_message_s, number_dm, NOWHERE)
    # Part of a message may have been sent before: then it begins before this round does.
    is_sent_dm = (first_dm < end_d[:, None]) & (begin_d < end_d)[:, None]
    row_dm = look_up(outbox.row_s, jnp.where(is_sent_dm, first_dm, NOWHERE), NOWHERE)

    begin_nk = look_up(begin_d, outbox.device_nk, NOWHERE)
    end_nk = look_up(end_d, outbox.device_nk, 0)
    is_sent_nk = (begin_nk <= outbox.place_nk) & (outbox.place_nk < end_nk)
    is_first_nk = outbox.is_first_s[outbox.place_nk] | (outbox.place_nk == begin_nk)
    message_nk = outbox.message_s[outbox.place_nk] - look_up(message_d, outbox.device_nk, 0)
    in_messages = outbox.device_nk * bucket.messages + message_nk
    in_rows = outbox.device_nk * bucket.rows + outbox.place_nk - begin_nk
    return Shipment(
        end_d=end_d,
        token_dm=jnp.where(is_sent_dm, row_dm // choices, NOWHERE),
        row_dc=look_up(outbox.row_s, place_dc, NOWHERE),
        message_dc=jnp.where(is_sent_dc, message_dc, bucket.messages),
        message_nk=jnp.where(is_sent_nk & is_first_nk, in_messages, NOWHERE),
        place_nk=jnp.where(is_sent_nk, in_rows, NOWHERE),
    )


def count_below(values: jax.Array, limits: jax.Array) -> jax.Array:
    """Returns how many of the values are below each of a few limits, int32.

    One reduction: a search, step by step, would be as many kernels.
    """
    return (values < limits[:, None]).sum(1, dtype=jnp.int32)


def look_up(values: jax.Array, index: jax.Array, otherwise: int | float) -> jax.Array:
    """Returns `values[index]`, rows of it if it has more dims; `otherwise` past the end."""
    return jnp.take(values, index, axis=0, mode="fill", fill_value=otherwise)


def inverse(place: jax.Array, size: int, values: jax.Array) -> jax.Array:
    """Returns an array of this size with `values` at their places, and NOWHERE elsewhere.

    No two places are equal. A place past the end is left out.
    """
    empty = jnp.full(size, NOWHERE, jnp.int32)
    return empty.at[place].set(values, mode="drop", unique_indices=True)
