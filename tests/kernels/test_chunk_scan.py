"""The scan over chunks against its definition in float64: values, gradients, refusals."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels.choose import Refused
from pallas_kernels.chosen import using
from pallas_kernels.counting import counted
from pallas_kernels.recurrence import cases, reference, scan_chunks, state_behind
from pallas_kernels.recurrence.cases import Case, chunks_in

BOTH = "xla", "triton:interpret"
# Relative L2; rounding a factor to bfloat16 is 1.7e-3, and several are rounded one after another.
LIMITS = {"bfloat16": 6e-3, "float32": 1e-6}


def with_gradients(scan, arrays):
    """The results by name, and the gradients by all arrays with a "d" in front."""
    arrays = {name: x for name, x in arrays.items() if x is not None}
    cotangents = arrays.pop("do"), arrays.pop("dlast")
    (o, state), pull = jax.vjp(lambda x: scan(chunks_in(x), x["state"]), arrays)
    gradients = pull(tuple(map(jnp.asarray, cotangents)))[0]
    return {"o": o, "last": state} | {f"d{name}": x for name, x in gradients.items()}


@cache
def answers(case):
    """By the definition in float64, and by XLA in the dtype of the case."""
    drawn = case.draw()

    def run(*arrays):
        return with_gradients(reference.scan_chunks, dict(zip(drawn, arrays, strict=True)))

    return oracle.in_float64(run, *drawn.values()), found(case, "xla")


@cache
def found(case, implementation):
    scan = partial(scan_chunks, implementation=implementation)
    return jax.jit(partial(with_gradients, scan))(case.draw())


def compare(case, implementation):
    want, plain = answers(case)
    got = found(case, implementation)
    for name, drawn in case.draw().items():
        if drawn is not None and not name.startswith("d"):
            assert got[f"d{name}"].dtype == drawn.dtype, name
    for name, x in want.items():
        oracle.check(name, got[name], plain[name], x, case.dtype, LIMITS)


@pytest.mark.seconds
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("case", cases.CI, ids=lambda case: case.name)
def test_chunk_scan(case, implementation):
    compare(case, implementation)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.SLOW, ids=lambda case: case.name)
def test_chunk_scan_on_the_grid(case):
    compare(case, "xla")


def test_the_state_alone_is_that_of_the_scan():
    """Its gradient is that of a loss that takes no output."""
    drawn = cases.CI[0].draw()
    arrays = {name: x for name, x in drawn.items() if name not in ("do", "dlast")}

    def run(scan):
        def loss(arrays):
            return jnp.square(scan(chunks_in(arrays), arrays["state"])).sum()

        return jax.jit(jax.value_and_grad(loss))(arrays)

    def of_both(chunks, state):
        return scan_chunks(chunks, state, implementation="xla")[1]

    got = run(partial(state_behind, implementation="triton:interpret"))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(run(of_both)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": 8}, "chunks of a power of 2 of at least 16 tokens, not 8"),
        ({"tokens": 48}, "chunks of a power of 2 of at least 16 tokens, not 48"),
        ({"key_dim": 129}, "up to 128 key channels in float32, not 129"),
        ({"key_dim": 257, "dtype": "bfloat16"}, "up to 256 key channels in bfloat16, not 257"),
        ({"chunks": 4096, "heads": 64, "tokens": 64, "key_dim": 128}, "fewer than 2\\^31 elements"),
        ({"dtype": "float8_e4m3fn"}, "16-bit floats or float32, not float8_e4m3fn"),
    ],
)
def test_triton_refuses_with_a_reason_and_xla_runs(changed, said):
    shapes = replace(Case(), **changed).abstract()

    def scan(implementation, arrays):
        return scan_chunks(chunks_in(arrays), arrays["state"], implementation=implementation)

    with pytest.raises(Refused, match=said):
        jax.eval_shape(partial(scan, "triton:interpret"), shapes)
    with using({}) as decisions:
        jax.eval_shape(partial(scan, None), shapes)
    assert [*decisions.taken.values()] == ["xla"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": "float32"}, "bfloat16 and float16, not float32"),
        ({"tokens": 32}, "chunks of 64 tokens, not 32"),
        ({"key_dim": 96}, "64 or 128 key channels, not 96"),
        ({"key_dim": 256}, "64 or 128 key channels, not 256"),
        ({"value_dim": 96}, "value channels that are a multiple of 64, not 96"),
        ({"batch": 2**16, "heads": 1}, "up to 65535 heads of all sequences, not 65536"),
        ({"chunks": 4096, "heads": 64}, "fewer than 2\\^31 elements"),
        ({}, "needs jax 0.11 or later, this is 0.10.2"),
    ],
)
def test_the_kernels_for_hopper_refuse_with_a_reason(changed, said, monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    sizes = {"dtype": "bfloat16", "tokens": 64, "key_dim": 128, "value_dim": 128}
    shapes = replace(Case(), **(sizes | changed)).abstract()
    with pytest.raises(Refused, match=f"implementation 'mosaic' refuses: .*{said}"):
        jax.eval_shape(
            lambda arrays: scan_chunks(chunks_in(arrays), arrays["state"], implementation="mosaic"),
            shapes,
        )


def test_a_chosen_implementation_runs_and_one_that_refuses_is_named():
    drawn = cases.CI[0].draw()
    chunks, state = chunks_in(drawn), drawn["state"]

    def traced():  # anew: jax keeps what it has traced
        return str(jax.make_jaxpr(lambda *arrays: scan_chunks(*arrays))(chunks, state))

    with using({}) as decisions:
        traced()
    (name,) = decisions.taken
    assert name == "chunk_scan float32 3x16x2x24:40 corrects"
    with using({name: "triton:interpret"}) as decisions:
        assert "pallas_call" in traced()
    assert decisions.taken == {name: "triton:interpret"}
    with using({name: "triton"}) as decisions:
        assert "pallas_call" not in traced()
    assert decisions.taken == {name: "xla"}
    assert decisions.missed == {name: "triton: needs an NVIDIA GPU, this is cpu"}


def test_what_does_not_fit_is_said_in_one_line():
    drawn = cases.CI[0].draw()
    whole, state = chunks_in(drawn), drawn["state"]
    for changed, said in (
        ({"write": whole.write[0, 0]}, r"write must be \[c, \.\.\., i, k\], none of them 0, not "),
        ({"erase": whole.erase[..., 1:]}, r"erase must be float32 \(3, 1, 2, 16, 24\), as write "),
        ({"read": whole.read.astype("bfloat16")}, r".*, not bfloat16 \(3, 1, 2, 16, 24\)$"),
        ({"decay": whole.decay[..., 0]}, r"decay must be float32 \(3, 1, 2, 24\), as write "),
        ({"inner": None}, "inner is an array, not None$"),
    ):
        with pytest.raises(ValueError, match=f"^chunk_scan: {said}"):
            scan_chunks(whole._replace(**changed), state)
    with pytest.raises(ValueError, match=r"^chunk_scan: state must be float32 \(1, 2, 24, 40\)"):
        scan_chunks(whole, state[0])


def test_what_is_counted_are_the_matmuls_of_xla():
    """Inside `counted`, a chosen kernel does not hide its FLOPs."""
    drawn = cases.CI[0].draw()
    chunks, state = chunks_in(drawn), drawn["state"]
    with using({"chunk_scan float32 3x16x2x24:40 corrects": "triton:interpret"}), counted():
        text = str(jax.make_jaxpr(lambda *arrays: scan_chunks(*arrays))(chunks, state))
    assert "pallas_call" not in text and text.count("dot_general") == 4
