"""A fingerprint is the same however an array is split, and any bit that flips changes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.checkpoints.leaves import fingerprint as module
from spmdtrain.checkpoints.leaves.fingerprint import (
    begin,
    fingerprint,
    fingerprints,
    host_fingerprint,
)

DTYPES = ["float32", "bfloat16", "int32", "int8", "bool"]


def array(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(shape) * 50
    return values > 0 if dtype == "bool" else values.astype(jnp.dtype(dtype))


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (8, 1), (1, 1)])
def test_no_sharding_changes_it(sizes):
    mesh = jax.make_mesh(
        sizes, ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[: sizes[0] * sizes[1]]
    )
    specs = [P("x", "y"), P(None, "y"), P(("x", "y")), P("y"), P()]
    plain = {dtype: array(dtype, (16, 8)) for dtype in DTYPES} | {
        "scalar": np.float32(2),
        "empty": np.zeros((0, 3)),
    }
    shardings = dict(zip(plain, [*specs, P(), P()], strict=True))
    for name in DTYPES:  # a second array of the same kind, which is summed along with the first
        plain[f"another {name}"] = plain[name][::-1]
        shardings[f"another {name}"] = shardings[name]
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, shardings[name])) for name, x in plain.items()
    }
    whole = {name: fingerprint(np.asarray(placed[name])) for name in plain}
    assert begin(placed)() == whole, "summed where the arrays are"
    assert fingerprints(placed) == whole


def test_it_does_not_depend_on_the_other_arrays():
    x, y = jnp.arange(6.0), jnp.ones((2, 2))
    for of in (fingerprints, lambda arrays: begin(arrays)()):
        assert of({"b": x, "a": y}) == of({"a": y}) | of({"b": x})
        assert of({}) == {}


def test_the_host_reads_small_arrays_and_compiles_nothing(monkeypatch):
    small, large = jnp.ones(module.SMALL), jnp.ones(module.SMALL + 1)
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    split = jax.device_put(jnp.ones(2 * module.SMALL), NamedSharding(mesh, P("x")))
    started = []
    monkeypatch.setattr(module, "begin", lambda arrays: started.append(set(arrays)) or dict)
    found = fingerprints({"small": small, "large": large, "split": split})
    assert found.keys() == {"small", "large"}
    assert started == [{"split"}]


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_a_cpu_device_mixes_blocks_of_an_array_of_any_size(dtype, monkeypatch):
    """In one program; the index of the first element may be any."""
    monkeypatch.setattr(module, "BLOCK", 16)
    for size in (1, 15, 16, 17, 35, 64):
        x = array(dtype, (size,))
        for first in (0, 5, 2**32 - 20):
            assert host_fingerprint(x, first) == fingerprint(x, first), (size, first)
    whole = jnp.asarray(array(dtype, (9, 2**13)))
    assert whole.size > module.SMALL
    monkeypatch.setattr(module, "BLOCK", 2**12)
    assert fingerprints({"x": whole}) == {"x": fingerprint(np.asarray(whole))}


def test_reading_starts_no_gpu(monkeypatch):
    monkeypatch.setattr(module, "runs_on_gpus", lambda: True)
    monkeypatch.setattr(jax, "local_devices", lambda: pytest.fail("jax looks for devices"))
    x = np.ones(module.BLOCK, np.uint8)
    assert host_fingerprint(x) == fingerprint(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
def test_every_single_bit_changes_both_sums(dtype):
    x = array(dtype, (5, 7))
    before = fingerprint(x)
    for bit in range(8 * x.nbytes):
        x.view(np.uint8).reshape(-1)[bit // 8] ^= 1 << bit % 8
        after = fingerprint(x)
        assert before[0] != after[0] and before[1] != after[1]
        x.view(np.uint8).reshape(-1)[bit // 8] ^= 1 << bit % 8
    assert fingerprint(x) == before


def test_elements_that_change_places_change_it():
    x = array("float32", (64, 4))
    assert fingerprint(x) not in (
        fingerprint(x[::-1]),
        fingerprint(np.roll(x, 1)),
        fingerprint(x.T),
    )


def test_large_arrays_are_read_in_pieces(monkeypatch):
    x = array("float32", (100,))
    whole = fingerprint(x)
    monkeypatch.setattr(module, "CHUNK", 7)
    assert fingerprint(x) == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.seconds
def test_devices_mix_large_arrays_block_by_block(dtype, monkeypatch):
    """XLA for CPU would hold twice the words of all weights at once."""
    monkeypatch.setattr(module, "BLOCK", 8)
    module._program.cache_clear()
    mesh = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    plain = {
        str(shape): array(dtype, shape) for shape in [(4, 6, 10), (2, 2, 2), (64,), (14, 4), ()]
    }
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, P(*["x", None, "y"][: x.ndim])))
        for name, x in plain.items()
    }
    try:
        on_devices = begin({name: module._as_integers(x) for name, x in placed.items()})()
        assert on_devices == {name: fingerprint(x) for name, x in plain.items()}
    finally:
        module._program.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_devices_hold_a_block_of_an_array_at_a_time(dtype, monkeypatch):
    """Or a large model on CPU devices would need several times its own memory to be saved."""
    monkeypatch.setattr(module, "BLOCK", 1 << 8)
    module._program.cache_clear()
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    spec = P(None, "x")
    placed = [
        jax.device_put(array(dtype, shape), NamedSharding(mesh, spec))
        for shape in [(6, 128, 80), (4, 256, 64), (3, 2, 100, 100)]
    ]
    words = [module._as_integers(x) for x in placed]
    try:
        program = module._program(mesh, (spec,) * 3).lower(words).compile()
    finally:
        module._program.cache_clear()
    blocks = 3 * 4 * module.BLOCK  # a block of words of each
    assert program.memory_analysis().temp_size_in_bytes < 5 * blocks
    for x, word in zip(placed, words, strict=True):
        assert word.dtype == (np.uint16 if dtype == "bfloat16" else np.float32)
        pairs = zip(x.addressable_shards, word.addressable_shards, strict=True)
        assert all(
            one.data.unsafe_buffer_pointer() == other.data.unsafe_buffer_pointer()
            for one, other in pairs
        )


def test_many_random_changes_are_missed_as_rarely_as_by_random_numbers():
    """Of a sum, cut to 10 bits: about 1 in 1024 is missed."""
    draw = np.random.default_rng(1)
    x = array("float32", (256,))
    before = fingerprint(x)
    tries = 8192
    missed = np.zeros(2)
    for _ in range(tries):
        changed = x.copy()
        at = draw.choice(256, size=draw.integers(2, 9), replace=False)
        changed[at] = draw.standard_normal(at.size)
        after = fingerprint(changed)
        missed += [before[sum_] % 1024 == after[sum_] % 1024 for sum_ in range(2)]
    assert np.all(missed < 3 * tries / 1024) and np.all(missed > 0)


def test_all_arrays_cross_the_devices_in_one_sum():
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Auto,) * 2)
    specs = (P("x", "y"), P(None, ("y", "x")), P("y"), P())
    arrays = [jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec)) for spec in specs]
    text = module._program(mesh, specs).lower(arrays).compile().as_text()
    sums = [
        line for line in text.splitlines() if "all-reduce(" in line or "all-reduce-start(" in line
    ]
    others = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    assert len(sums) == 1 and "u32[4,2]" in sums[0]
    assert not any(kind in text for kind in others)
