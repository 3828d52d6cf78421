"""Counts what a layer has and computes that mixes tokens in linear time, in closed form."""

from collections.abc import Callable
from typing import NamedTuple

from spmdtrain.config.schema import ConvConfig, DeltaConfig, Mixer, SsdConfig, TransformerConfig

CHUNK = 64  # tokens that a recurrence takes at a time: layers.mixers.recurrence.CHUNK
Matmul = tuple[int, int, bool]  # columns, rows, whether `tensor` splits the columns


class MixerSizes(NamedTuple):
    """The sizes of one layer's mixer."""

    matmuls: tuple[Matmul, ...]  # from the stream
    mixed: int  # channels between these and the projection back to the stream
    width: int  # of what is projected back
    vectors: int  # parameters that are in no matrix
    state_bytes: int  # of a cache, for a sequence of any length; the inputs in float32
    # The forward FLOPs of a token, beside those of the projections, in chunks of so many tokens.
    flops: Callable[[int], float]
    # The same of finding the map by which a piece of a sequence changes the state, which the pieces
    # behind it need, and its bytes: layers.mixers.in_front.
    map_flops: Callable[[int], float]
    map_bytes: int


def mixer_sizes(model: TransformerConfig, mixer: Mixer) -> MixerSizes | None:
    """Returns the sizes of a mixer of `model`; None for attention, whose time is not linear."""
    if mixer == "delta" and model.delta:
        return _delta(model.embed, model.delta)
    if mixer == "ssd" and model.ssd:
        return _ssd(model.embed, model.ssd)
    if mixer == "conv" and model.conv:
        return _conv(model.embed, model.conv)
    return None


def matrices(sizes: MixerSizes, embed: int) -> int:
    """Counts the parameters of a mixer that multiply every token."""
    return sum(columns * rows for columns, rows, _ in sizes.matmuls) + sizes.width * embed


def chunk_of(sequence_length: int) -> int:
    """Returns the tokens of a chunk."""
    return min(CHUNK, 1 << (sequence_length - 1).bit_length())


def _delta(embed: int, delta: DeltaConfig) -> MixerSizes:
    """Counts the products of a chunk of C tokens, with k and v channels.

    For a key head 4 C k of keys with keys and queries, or for each value head if channels have
    decays; for a value head 2/3 C^2 of an inverse, 2 C (k + 2 v) within the chunk and 6 k v with
    the state; 4/3 C for the sum of each decay, by a mask that has no gradient. A map needs no
    queries, and its state has k columns more.
    """
    values = delta.value_heads * delta.value_dim
    mixed = delta.key_heads * delta.mixed_width
    matmuls = [(mixed, embed, True), (delta.value_heads, embed, True)]
    if delta.gate_rank is None:
        matmuls.append((values, embed, True))
    else:
        matmuls += [(delta.gate_rank, embed, False), (values, delta.gate_rank, True)]
    decays = delta.value_heads
    if delta.decay == "head":
        matmuls.append((decays, embed, True))
    else:
        rank = delta.decay_rank or delta.key_dim
        decays *= delta.key_dim
        matmuls += [(rank, embed, False), (decays, rank, True)]

    product_heads = delta.key_heads if delta.decay == "head" else delta.value_heads
    keys, key_and_value = delta.key_dim, delta.key_dim + delta.value_dim

    def flops(chunk: int) -> float:
        within = 2 / 3 * (chunk**2 - 1) + 2 * chunk * (keys + 2 * delta.value_dim)
        with_state = 6 * keys * delta.value_dim
        products = 4 * chunk * keys * product_heads + 4 / 3 * chunk * decays
        return products + delta.value_heads * (within + with_state)

    def map_flops(chunk: int) -> float:
        within = 2 / 3 * (chunk**2 - 1) + 2 * chunk * key_and_value
        with_state = 4 * keys * key_and_value
        products = 2 * chunk * keys * product_heads + 2 * chunk * decays
        return products + delta.value_heads * (within + with_state)

    return MixerSizes(
        matmuls=tuple(matmuls),
        mixed=mixed,
        width=values,
        vectors=mixed * delta.taps + delta.value_heads + decays + delta.value_dim,
        state_bytes=4 * (values * keys + (delta.taps - 1) * mixed),
        flops=flops,
        map_flops=map_flops,
        map_bytes=4 * delta.value_heads * keys * key_and_value,
    )


def _ssd(embed: int, ssd: SsdConfig) -> MixerSizes:
    """Counts the products of a chunk of C tokens, with n channels of a state and d of a head.

    For a group 2 C n of keys with queries; for a head 2 C d within the chunk, 4 n d with the state
    and 4/3 C for the sum of its decays, by a mask that has no gradient.
    """
    inner, shared = ssd.heads * ssd.head_dim, 2 * ssd.groups * ssd.state
    matmuls = ((2 * inner + ssd.heads, embed, True), (shared, embed, ssd.groups > 1))

    def flops(chunk: int) -> float:
        of_head = 2 * chunk * (ssd.head_dim + 2 / 3) + 4 * ssd.state * ssd.head_dim
        return 2 * chunk * ssd.state * ssd.groups + ssd.heads * of_head

    taps = (inner + shared) * (ssd.taps + ssd.taps_bias)
    return MixerSizes(
        matmuls=matmuls,
        mixed=inner + shared,
        width=inner,
        vectors=taps + 3 * ssd.heads + (inner if ssd.norm == "group" else 0),
        state_bytes=4 * (inner * ssd.state + (ssd.taps - 1) * (inner + shared)),
        flops=flops,
        map_flops=lambda chunk: 2.0 * (chunk * ssd.heads + ssd.state * inner),
        map_bytes=4 * (inner * ssd.state + ssd.heads),  # a factor for each head
    )


def _conv(embed: int, conv: ConvConfig) -> MixerSizes:
    return MixerSizes(
        matmuls=((3 * embed, embed, True),),
        mixed=3 * embed,
        width=embed,
        vectors=embed * (conv.taps + (5 if conv.bias else 0)),
        state_bytes=4 * (conv.taps - 1) * embed,
        flops=lambda _: 0.0,
        map_flops=lambda _: 0.0,
        map_bytes=0,
    )
