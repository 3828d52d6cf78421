"""The recurrence by chunks is the one by tokens, in numpy's float64: outputs, states, gradients.

Tolerances are the errors of float32 on hard inputs, with a factor of three.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import by_kernel
from mixer_oracle import Drawn, convolution, drawn_tokens, error, recurrence

from pallas_kernels.inverse import unit_inverse
from spmdtrain.models.layers.mixers import recurrence as recurrence_by_chunks
from spmdtrain.models.layers.mixers.recurrence import Tokens, chunks_of, recur
from spmdtrain.models.layers.mixers.short_convolution import short_convolution

T = 150  # 19 chunks of 8: two blocks
STATE = (2, 2, 2, 5, 6)  # b, h, r, k, v


@cache
def jitted(corrects: bool, chunk: int):
    return jax.jit(partial(recur, corrects=corrects, chunk=chunk))


def by_chunks(tokens, state=None, *, corrects=True, chunk=8):
    state = np.zeros(STATE, np.float32) if state is None else state
    return jitted(corrects, chunk)(Tokens(*tokens), state)


CASES = {
    "slow": {},
    "slow, documents": {"documents": True},
    "fast": {"decay": 16.0, "documents": True},
    "rates up to 2": {"rate": 2.0, "documents": True},
    "keys alike": {"alike": True},
    "keys alike, rates up to 2": {"alike": True, "rate": 2.0},
}
PARTS = {"head": (False, True, 8), "channel": (True, True, 64), "no correction": (False, False, 8)}


@pytest.mark.core
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("of", PARTS)
def test_outputs_and_states_are_those_of_the_definition(case, of):
    per_channel, corrects, chunk = PARTS[of]
    tokens = drawn_tokens(T, per_channel=per_channel, **CASES[case])
    state = np.random.default_rng(1).normal(size=STATE).astype(np.float32)
    found = by_chunks(tokens, state, corrects=corrects, chunk=chunk)
    for x, y in zip(found, recurrence(tokens, state, corrects=corrects), strict=True):
        assert error(x, y) < 2e-6


@pytest.mark.seconds
@pytest.mark.parametrize("tokens", [53, 1, 15, 16, 17])
@pytest.mark.parametrize("per_channel", [True, False])
def test_any_number_of_tokens(tokens, per_channel):
    drawn = drawn_tokens(T, per_channel=per_channel, documents=True)
    drawn = Drawn(*(x[:, :tokens] for x in drawn))
    for x, y in zip(by_chunks(drawn, chunk=16), recurrence(drawn), strict=True):
        assert error(x, y) < 1e-6


def by_tokens(tokens: Tokens) -> jax.Array:
    """The outputs by the definition, in jax."""

    def step(s, token):
        s = jnp.where(token.starts[:, None, None, None, None], 0, s)
        s = s * jnp.exp(token.log_decay)[..., None]
        new = token.v - jnp.einsum("bhrkv,bhk->bhrv", s, token.k)
        s = s + jnp.einsum("bhk,bhrv->bhrkv", token.k, token.rate[..., None] * new)
        return s, jnp.einsum("bhrkv,bhk->bhrv", s, token.q)

    state = jnp.zeros(STATE, tokens.v.dtype)
    o = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))[1]
    return jnp.moveaxis(o, 0, 1)


@pytest.mark.long
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("case", ["slow, documents", "keys alike, rates up to 2"])
def test_gradients_are_those_of_the_definition(case, per_channel, monkeypatch):
    """Over several blocks of two chunks, and several subchunks if decays are of channels."""
    monkeypatch.setattr(recurrence_by_chunks, "BLOCK", 2)
    tokens = drawn_tokens(T, per_channel=per_channel, **CASES[case])
    weight = np.random.default_rng(2).normal(size=tokens.v.shape)

    def loss(outputs, floats):
        return (outputs(Tokens(*floats, tokens.starts)) * weight).sum()

    chunk = 32 if per_channel else 8
    outputs = partial(recur, state_bhrkv=jnp.zeros(STATE), corrects=True, chunk=chunk)
    found = jax.jit(jax.grad(partial(loss, lambda tokens: outputs(tokens)[0])))(tokens[:5])
    with jax.enable_x64(True):
        wide = tuple(np.float64(x) for x in tokens[:5])
        expected = jax.jit(jax.grad(partial(loss, by_tokens)))(wide)
    for name, x, y in zip(Tokens._fields, found, expected, strict=False):
        assert error(x, y) < 3e-6, name


def gradients_of(tokens, corrects, dtype):
    """(outputs, the last state), gradients by tokens and by the state: of the loss of both."""
    rng = np.random.default_rng(2)
    state = jnp.float32(rng.normal(size=STATE))
    weight, of_state = rng.normal(size=tokens.v.shape), rng.normal(size=STATE)

    def loss(floats, state):
        q, k, v = (x.astype(dtype) for x in floats[:3])
        narrow = Tokens(q, k, v, *floats[3:], tokens.starts)
        o, last = recur(narrow, state, corrects=corrects, chunk=16)
        return (o * weight).sum() + (last * of_state).sum(), (o, last)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(tokens[:5], state)


@pytest.mark.long
@pytest.mark.parametrize("of", PARTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_gives_what_xla_gives(of, dtype, monkeypatch):
    """Over two blocks, with documents and an odd number of tokens, from a state that is not 0."""
    monkeypatch.setattr(recurrence_by_chunks, "BLOCK", 2)
    per_channel, corrects, _ = PARTS[of]
    tokens = drawn_tokens(T, per_channel=per_channel, documents=True)
    tokens = Drawn(*(x[:, :53] for x in tokens))
    (_, wanted), of_wanted = gradients_of(tokens, corrects, "float32")
    with by_kernel() as decisions:
        (_, found), of_found = gradients_of(tokens, corrects, dtype)
    assert set(decisions.taken.values()) == {"triton:interpret"}
    limit = 2e-6 if dtype == "float32" else 1.5e-2
    for name, x, y in zip(("o", "state"), found, wanted, strict=True):
        assert error(x, y) < limit, name
    leaves = (jax.tree.leaves(gradients) for gradients in (of_found, of_wanted))
    for name, x, y in zip((*Tokens._fields[:5], "state"), *leaves, strict=True):
        assert error(x, y) < limit, name


def test_fast_decays_do_not_overflow():
    """The sum of the log decays of a chunk is -2 x 64: exp(128) is infinite in float32."""
    tokens = drawn_tokens(T, per_channel=True)
    tokens = tokens._replace(log_decay=np.full_like(tokens.log_decay, -2))
    o, state = by_chunks(tokens, chunk=64)
    expected = recurrence(tokens)
    assert error(o, expected[0]) < 1e-6
    assert error(state, expected[1]) < 1e-6


def dtypes_before_exp(jaxpr, tainted):
    """(primitive, dtype) of all that is computed from `tainted` inputs, up to an exp."""
    tainted = set(tainted)
    for eqn in jaxpr.eqns:
        if not tainted.isdisjoint(var for var in eqn.invars if not hasattr(var, "val")):
            yield from ((eqn.primitive.name, var.aval.dtype) for var in eqn.outvars)
            if eqn.primitive.name != "exp":
                tainted |= set(eqn.outvars)


@pytest.mark.parametrize("per_channel", [True, False])
def test_decays_are_summed_in_float32_under_bfloat16(per_channel):
    drawn = drawn_tokens(64, per_channel=per_channel)
    tokens = Tokens(*(x.astype(jnp.bfloat16) for x in drawn[:3]), *drawn[3:])
    program = jax.make_jaxpr(partial(chunks_of, corrects=True, size=32))(tokens)
    found = list(dtypes_before_exp(program.jaxpr, [program.jaxpr.invars[3]]))
    assert {"dot_general", "exp"} <= {name for name, _ in found}
    assert {dtype for _, dtype in found} == {np.dtype(np.float32)}


def test_sums_and_states_are_in_float32_under_bfloat16():
    drawn = drawn_tokens(64)
    tokens = Tokens(*(x.astype(jnp.bfloat16) for x in drawn[:3]), *drawn[3:])
    program = jax.make_jaxpr(partial(recur, corrects=True, chunk=32))(tokens, np.zeros(STATE))
    scans = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
    states = [eqn.outvars[0].aval for eqn in scans]
    assert [(x.dtype, x.shape) for x in states] == [(np.float32, STATE)]
    dots = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    dots += [e for s in scans for e in s.params["jaxpr"].eqns if e.primitive.name == "dot_general"]
    assert {eqn.outvars[0].aval.dtype for eqn in dots} == {np.dtype(np.float32)}
    assert {eqn.invars[0].aval.dtype for eqn in dots} > {np.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("size", [1, 2, 64])
def test_the_inverse_by_blocks(size):
    lower = np.tril(np.random.default_rng(size).normal(size=(3, size, size)), -1) / size**0.5
    expected = np.linalg.inv(np.eye(size) + lower)
    assert error(jax.jit(unit_inverse)(jnp.float32(lower)), expected) < 1e-6


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_the_convolution_is_that_of_the_definition(taps, documents):
    rng = np.random.default_rng(taps)
    x, weights = rng.normal(size=(2, 9, 3, 5)), rng.normal(size=(3, 5, taps))
    before = rng.normal(size=(2, taps - 1, 3, 5))
    starts = np.zeros((2, 9), bool)
    starts[0, [0, 4, 5]] = starts[1, 7] = True
    starts &= documents
    found = short_convolution(*map(jnp.float32, (x, weights)), starts, jnp.float32(before))
    assert error(found, convolution(x, weights, starts, before)) < 1e-6
