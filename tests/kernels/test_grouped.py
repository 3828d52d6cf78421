"""The grouped matmul against its definition in float64: values, gradients, padding."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels.choose import Refused
from pallas_kernels.counting import counted, flops_of_mark
from pallas_kernels.grouped import cases, grouped_matmul, reference, tile_groups, tiles_for

BOTH = "xla", "triton:interpret"
# Relative L2; rounding to bfloat16 alone is 1.7e-3.
LIMITS = {"bfloat16": 2.5e-3, "float16": 4e-4, "float32": 1e-6}


def with_gradients(multiply):
    def both(x, w, dy, expert_of_tile):
        y, pull = jax.vjp(lambda x, w: multiply(x, w, expert_of_tile), x, w)
        return y, *pull(dy)

    return both


@cache
def answers(case):
    """(y, dx, dw) by the definition: in float64, and in the dtype of the case."""
    drawn = case.draw()
    tiles = drawn.pop("expert_of_tile")
    # The definition knows no unused tile when it is differentiated.
    drawn["dy"] = jnp.nan_to_num(drawn["dy"])
    definition = with_gradients(reference.multiply)

    def run(x, w, dy):
        return definition(x, w, dy, tiles)

    return oracle.in_float64(run, *drawn.values()), jax.jit(run)(*drawn.values())


def compare(case, implementation):
    def run(x, w, expert_of_tile):
        return grouped_matmul(x, w, expert_of_tile, implementation=implementation)

    want, plain = answers(case)
    got = jax.jit(with_gradients(run))(**case.draw())
    for name, *three in zip(("y", "dx", "dw"), got, plain, want, strict=True):
        assert three[0].dtype == case.dtype
        oracle.check(name, *three, case.dtype, LIMITS)
    own = set(case.expert_of_tile())
    unused = [expert not in own for expert in range(case.experts)]
    assert not np.any(np.asarray(got[2], np.float32)[unused])


@pytest.mark.seconds
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("case", cases.CI, ids=lambda case: case.name)
def test_grouped(case, implementation):
    compare(case, implementation)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.SLOW, ids=lambda case: case.name)
def test_grouped_on_the_grid(case):
    compare(case, "xla")


@pytest.mark.parametrize(
    "sizes", [(0, 5, 40, 3), (48, 0, 0, 0), (0, 0, 0, 48), (16, 16, 16, 0), (1, 1, 0, 1), (0,) * 4]
)
def test_groups_of_any_size_equal_a_loop_over_them(sizes):
    """48 rows, of which the last ones may be nobody's, in tiles of 16; no shape knows a size."""
    random = np.random.default_rng(0)
    x_rk, dy_rn = random.standard_normal((2, 48, 16)).astype(np.float32)
    w_xkn = random.standard_normal((4, 16, 16)).astype(np.float32)
    y, dx, dw = map(np.asarray, padded(x_rk, w_xkn, dy_rn, np.array(sizes)))
    end = 0
    for expert, size in enumerate(sizes):
        own = slice(end, end := end + size)
        np.testing.assert_allclose(y[own], x_rk[own] @ w_xkn[expert], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dx[own], dy_rn[own] @ w_xkn[expert].T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dw[expert], x_rk[own].T @ dy_rn[own], rtol=1e-5, atol=1e-5)
    assert not dx[end:].any()


@jax.jit
def padded(x_rk, w_xkn, dy_rn, sizes_x):
    tile, tiles = 16, tiles_for(48, 4, 16)
    place_r, expert_of_tile = tile_groups(sizes_x, 48, tile)

    def run(x_rk, w_xkn):
        rows = jnp.zeros((tiles * tile, 16)).at[place_r].set(x_rk, mode="drop")
        return (
            grouped_matmul(rows, w_xkn, expert_of_tile).at[place_r].get(mode="fill", fill_value=0)
        )

    y, pull = jax.vjp(run, x_rk, w_xkn)
    return y, *pull(dy_rn)


@pytest.mark.seconds
def test_tiles_always_suffice_and_are_of_one_expert():
    random = np.random.default_rng(0)
    for rows, experts, tile in ((7, 3, 4), (2, 5, 4), (64, 4, 16), (1, 1, 16)):
        for _ in range(10):
            sizes = random.multinomial(rows, random.dirichlet(np.full(experts, 0.3)))
            place, of_tile = map(np.asarray, tile_groups(jnp.asarray(sizes), rows, tile))
            assert len(set(place)) == rows and place.max() < tiles_for(rows, experts, tile) * tile
            expert = np.repeat(np.arange(experts), sizes)
            np.testing.assert_array_equal(of_tile[place // tile], expert)
            assert set(of_tile) - set(expert) <= {-1}


def test_many_experts_cost_the_memory_of_one_tile():
    """Besides the arrays: rows once. Per-expert rows would be 64 times, a weight a tile 4 times."""
    case = cases.Case(tile=16, width=64, out_width=64, experts=64, tiles=256)

    def run(x, w, expert_of_tile):
        return grouped_matmul(x, w, expert_of_tile, implementation="xla")

    compiled = jax.jit(with_gradients(run)).lower(**case.abstract()).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1.1 * (256 * 16 * 64 * 4)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": "float64"}, "16-bit floats or float32, not float64"),
        ({"tile": 24}, "tiles of a multiple of 16 rows, not 24"),
        ({"width": 40}, "widths that are multiples of 16, not 40 and 48"),
        ({"width": 4096, "out_width": 2048, "experts": 256}, "fewer than 2\\^31 elements"),
    ],
)
def test_triton_refuses_with_a_reason(changed, said):
    shapes = replace(cases.Case(), **changed).abstract()
    shapes.pop("dy")
    if changed.get("dtype"):
        shapes |= {name: np.empty(shapes[name].shape) for name in ("x", "w")}
    with jax.enable_x64(changed.get("dtype") == "float64"), pytest.raises(Refused, match=said):
        jax.eval_shape(
            lambda x, w, expert_of_tile: grouped_matmul(
                x, w, expert_of_tile, implementation="triton:interpret"
            ),
            **shapes,
        )


def test_what_does_not_fit_is_said_in_one_line():
    x, w, tiles = jnp.ones((32, 4)), jnp.ones((2, 4, 6)), np.array([0, 1])
    for arrays, said in (
        ((x, w, np.arange(3)), "32 rows are not whole tiles: expert_of_tile has 3"),
        ((x, w[0], tiles), r"w must be \[experts, k, n\], none of them 0, not \(4, 6\)"),
        ((x, w[:, :3], tiles), r"w \(2, 3, 6\) contracts 3, but x is \(32, 4\)"),
        ((x, w.astype("bfloat16"), tiles), "w is bfloat16 and x is float32; cast one of them"),
        ((x.astype(int), w, tiles), "x is int32, not floating"),
        ((x, w, tiles + 0.5), "expert_of_tile is float64, not integers"),
    ):
        with pytest.raises(ValueError, match=f"^grouped_matmul: {said}$"):
            grouped_matmul(*arrays)


def test_flops_are_counted_by_rows():
    case = cases.CI[0]
    drawn = case.draw()
    drawn.pop("dy")
    with counted():
        text = str(jax.make_jaxpr(lambda: grouped_matmul(**drawn))())
    name = text.partition("name=")[2].split("]")[0].split()[0]
    assert flops_of_mark(name) == 2 * 80 * 32 * 48
