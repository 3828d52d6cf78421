"""A tensor of a file lies in a parameter as the rules say, and comes out of it to the bit."""

from dataclasses import replace

import numpy as np
import pytest

from spmdtrain.config.errors import CheckpointError
from spmdtrain.interop import delta_mixer, latent_attention, paired_rotation, pieces, xielu

E, K, G, D, F = 10, 2, 3, 4, 7
R, H = 3, 4  # of latent attention
SIZES = pieces.Sizes(E, K * G, K, D, F, query_rank=R, rope_dim=H)
CASES = {
    pieces.copy: (5, E),
    pieces.transpose: (F, E),
    pieces.heads_out: (K, G, D, E),
    pieces.heads_out_rows: (K, G, D, E),
    pieces.gate_up: (E, 2, F),
    pieces.gate_up_fused: (E, 2, F),
    pieces.gate_up_bias: (2, F),
    pieces.qkv: (E, K, G + 2, D),
    pieces.qkv_fused: (E, K, G + 2, D),
    pieces.qkv_fused_columns: (E, K, G + 2, D),
    pieces.queries: (E, K, G, D),
    pieces.queries_and_keys: (E, K, G + 1, D),
    pieces.queries_bias: (K * G * D,),
    pieces.queries_and_keys_bias: (K * (G + 1) * D,),
    pieces.qkv_bias: (K * (G + 2) * D,),
    pieces.qkv_bias_fused: (K * (G + 2) * D,),
    pieces.one_row: (F,),
    paired_rotation.qkv: (E, K, G + 2, D),
    paired_rotation.qkv_bias: (K * (G + 2) * D,),
    xielu.slope_above: (1,),
    latent_attention.down: (E, R + 5 + H),
    latent_attention.queries: (R, K, 5 + H),
    latent_attention.keys_and_values: (5, K, D + 2),
    latent_attention.joined: (2, E, E),
}
RANDOM = np.random.default_rng(0)


def whole(shape):
    return tuple(slice(0, size) for size in shape)


@pytest.mark.parametrize("rule", CASES, ids=lambda rule: rule.__name__)
def test_writing_inverts_reading_and_any_slice_is_that_of_the_whole(rule):
    shape = CASES[rule]
    mapped = rule(SIZES, shape)
    tensors = [np.asarray(RANDOM.standard_normal(each)) for each in mapped.shapes]
    if rule is xielu.slope_above:
        tensors[1:] = map(np.array, xielu.CONSTANTS.values())
    parameter = mapped.read(tensors, whole(shape))
    assert parameter.shape == shape
    back = mapped.write(parameter)
    assert all(np.array_equal(one, two) for one, two in zip(tensors, back, strict=True))
    for _ in range(20):
        cut = tuple(slice(*sorted(RANDOM.integers(0, size + 1, 2))) for size in shape)
        assert np.array_equal(mapped.read(tensors, cut), parameter[cut])


def test_heads_lie_where_attention_reads_them():
    """Query head h belongs to the key-value head h // G in both layouts."""
    mapped = pieces.qkv(SIZES, CASES[pieces.qkv])
    q, k, v = tensors = [RANDOM.standard_normal(each) for each in mapped.shapes]
    found = mapped.read(tensors, whole(CASES[pieces.qkv]))
    for head in range(K * G):
        rows = slice(head * D, (head + 1) * D)
        assert np.array_equal(found[:, head // G, head % G], q[rows].T)
    for head in range(K):
        rows = slice(head * D, (head + 1) * D)
        assert np.array_equal(found[:, head, G], k[rows].T)
        assert np.array_equal(found[:, head, G + 1], v[rows].T)


@pytest.mark.parametrize(
    ("turned", "halves"),  # the channels of a file, in our order: the first of each pair leads
    [(4, [0, 2, 1, 3]), (2, [0, 1, 2, 3]), (6, [0, 2, 4, 1, 3, 5, 6, 7])],
)
def test_channels_that_turn_together_are_adjacent_in_files(turned, halves):
    """Of queries and keys; values stay as they are, and biases lie like rows."""
    dim = len(halves)
    sizes = replace(SIZES, head_dim=dim, rope_dim=turned)
    mapped = paired_rotation.qkv(sizes, (E, K, G + 2, dim))
    q, k, v = tensors = [RANDOM.standard_normal(each) for each in mapped.shapes]
    read = mapped.read(tensors, whole(mapped.shape))
    of_bias = paired_rotation.qkv_bias(sizes, (K * (G + 2) * dim,))
    biases = [x[:, 0].copy() for x in tensors]
    read_bias = of_bias.read(biases, whole(of_bias.shape)).reshape(K, G + 2, dim)
    assert np.array_equal(read[0], read_bias)
    for head in range(K * G):
        query = q[head * dim : (head + 1) * dim]
        assert np.array_equal(read[:, head // G, head % G], query[halves].T)
    for head in range(K):
        rows = slice(head * dim, (head + 1) * dim)
        assert np.array_equal(read[:, head, G], k[rows][halves].T)
        assert np.array_equal(read[:, head, G + 1], v[rows].T)


def test_a_constant_of_xielu_that_differs_is_refused():
    mapped = xielu.slope_above(SIZES, (1,))
    slope, beta, eps = np.ones(1), np.array(0.5), np.array(-9.98e-7)  # as bfloat16 rounds it
    assert mapped.read((slope, beta, eps), whole((1,))) == 1
    with pytest.raises(CheckpointError, match=r"xIELU has beta=0\.6 in these files; asked"):
        mapped.read((slope, np.array(0.6), eps), whole((1,)))


def test_the_gates_of_a_query_head_follow_its_query():
    """In the file, each head has its query rows, then its gate rows: Qwen 3.5's q_proj."""
    shape = (E, K, 2 * G + 2, D)
    mapped = pieces.qkv(SIZES, shape)
    q, k, v = tensors = [RANDOM.standard_normal(each) for each in mapped.shapes]
    assert q.shape == (2 * K * G * D, E)
    read = mapped.read(tensors, whole(shape))
    for head in range(K * G):
        query, gate = q[2 * head * D : 2 * (head + 1) * D].reshape(2, D, E)
        assert np.array_equal(read[:, head // G, 2 * (head % G)], query.T)
        assert np.array_equal(read[:, head // G, 2 * (head % G) + 1], gate.T)
    assert np.array_equal(read[:, 1, -2], k[D:].T)
    assert np.array_equal(read[:, 1, -1], v[D:].T)
    assert all(map(np.array_equal, tensors, mapped.write(read)))
    bias = pieces.qkv_bias(SIZES, (K * (2 * G + 2) * D,))
    assert bias.shapes == ((2 * K * G * D,), (K * D,), (K * D,))


def test_rows_of_a_key_head_lie_together_in_one_family_and_apart_in_another():
    """Qwen3-Next and Qwen 3.5 hold the same queries, keys, values and gates, rates and decays."""
    heads, group, key, value = 3, 2, 4, 5
    queries, keys = (RANDOM.standard_normal((heads, key, E)) for _ in range(2))
    values, gates = (RANDOM.standard_normal((heads, group * value, E)) for _ in range(2))
    rates, decays = (RANDOM.standard_normal((heads, group, E)) for _ in range(2))
    sizes = replace(SIZES, key_dim=key)

    def read(rule, width, *tensors):
        mapped = rule(sizes, (E, heads, width))
        flat = [np.concatenate([x.reshape(-1, E) for x in parts]) for parts in tensors]
        assert tuple(x.shape for x in flat) == mapped.shapes
        return mapped.read(flat, whole(mapped.shape))

    for together, rule, apart in (
        ((queries, keys, values, gates), delta_mixer.mixed, ((queries, keys, values), (gates,))),
        ((rates, decays), delta_mixer.rates, ((rates,), (decays,))),
    ):
        by_head = np.concatenate(together, 1)
        width = by_head.shape[1]
        read_apart = read(rule, width, *apart)
        assert np.array_equal(read(pieces.heads_first, width, (by_head,)), read_apart)
        assert np.array_equal(read_apart, by_head.transpose(2, 0, 1))


def test_the_gate_comes_first():
    mapped = pieces.gate_up(SIZES, CASES[pieces.gate_up])
    gate, up = tensors = [RANDOM.standard_normal(each) for each in mapped.shapes]
    found = mapped.read(tensors, whole(CASES[pieces.gate_up]))
    assert np.array_equal(found[:, 0], gate.T)
    assert np.array_equal(found[:, 1], up.T)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_copy_in_squares_is_a_copy(dtype):
    """In any order of dims, with dims of one element, and into a part of an array."""
    for shape in [(300, 5, 130), (1, 257, 3), (129,), (2, 1, 140, 150), (0, 4)]:
        source = RANDOM.standard_normal(shape).astype(np.float32)
        for _ in range(4):
            turned = source.transpose(RANDOM.permutation(len(shape)))
            whole_target = np.zeros((*turned.shape[:-1], turned.shape[-1] + 2), dtype)
            pieces._copy(whole_target[..., 1:-1], turned)
            assert np.array_equal(whole_target[..., 1:-1], turned.astype(dtype))
            assert not whole_target[..., [0, -1]].any()
