"""Measures the recurrence of linear-time mixers by the text that XLA compiles for an absent GPU.

It is that of one layer and 8,192 tokens, alone: without projections, convolution and norm.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.aot import described_devices
from pallas_kernels.choose import INTERPRET
from pallas_kernels.chosen import using
from pallas_kernels.recurrence.api import OP
from spmdtrain.compiled.kernel_launches import kernels
from spmdtrain.models.layers.mixers.recurrence import Tokens, recur

GPU = "h100"
TOKENS = 8192


@dataclass(frozen=True)
class Layer:
    """The sizes of a published model's layer."""

    key_heads: int
    group: int  # value heads of a key head
    key_dim: int
    value_dim: int
    corrects: bool
    by_channel: bool = False


LAYERS = {
    "Qwen3.5 27B": Layer(16, 3, 128, 128, corrects=True),
    "Kimi Linear 48B": Layer(32, 1, 128, 128, corrects=True, by_channel=True),
    "Nemotron 3 Nano": Layer(8, 8, 128, 64, corrects=False),
}


@dataclass(frozen=True)
class Figures:
    """What a program moves (GB), launches and holds beside inputs and outputs (GB)."""

    moved: float
    launches: int
    temporaries: float

    def lines(self) -> list[str]:
        """Returns one line a figure, "name: figure"."""
        return [
            f"bytes: {self.moved:,.1f} GB",
            f"launches: {self.launches:,}",
            f"temporaries: {1e3 * self.temporaries:,.0f} MB",
        ]


KERNELS = ("triton", "mosaic")  # implementations of the scan
# The most that the kernels may need, of what XLA needs.
BOUND = Figures(moved=0.6, launches=0.2, temporaries=1.1)


def figures(only: str) -> Iterator[tuple[str, dict[str, Figures]]]:
    """Yields a layer with a direction, and the figures by implementation."""
    for name, layer in LAYERS.items():
        for direction, program in {"forward": forward, "with gradients": with_gradients}.items():
            title = f"{name}, {direction}"
            if only in title:
                yield title, {by: compiled(program, layer, by) for by in ("xla", *KERNELS)}


def broken(by: Mapping[str, Figures]) -> list[str]:
    """Returns one line for each bound that the kernels do not keep."""
    return [
        f"{kernels}, {name}: {getattr(by[kernels], name):,.6g} is above {share} of XLA's"
        for kernels in KERNELS
        for name, share in vars(BOUND).items()
        if getattr(by[kernels], name) > share * getattr(by["xla"], name)
    ]


def forward(layer: Layer, floats: tuple, state: jax.Array, starts: jax.Array, *_: Any) -> Any:
    """Returns the outputs and the last state."""
    return recur(Tokens(*floats, starts), state, corrects=layer.corrects)


def with_gradients(layer: Layer, floats: tuple, state: jax.Array, starts: jax.Array, *of: Any):
    """Returns the results, and the gradients of all numbers by those `of` the results."""

    def results(floats, state):
        return forward(layer, floats, state, starts)

    found, pull = jax.vjp(results, floats, state)
    return found, pull(of)


def shapes(layer: Layer, tokens: int) -> tuple:
    """Returns what `with_gradients` takes, of one sequence."""

    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *shape), jnp.dtype(dtype))

    heads = (layer.key_heads, layer.group)
    keys = array(tokens, layer.key_heads, layer.key_dim)
    values = array(tokens, *heads, layer.value_dim)
    decays = array(tokens, *heads, layer.key_dim if layer.by_channel else 1, dtype="float32")
    rates = array(tokens, *heads, dtype="float32")
    state = array(*heads, layer.key_dim, layer.value_dim, dtype="float32")
    starts = array(tokens, dtype="bool")
    return ((keys, keys, values, decays, rates), state, starts, values, state)


def chosen_for(calls: Iterable[str], implementation: str) -> dict[str, str]:
    """Returns the implementation of each call: of the scan this one, and of the inverse, which has
    no tilings and no kernel for Hopper, XLA's or Triton's.
    """
    other = "xla" if implementation == "xla" else "triton"
    other += INTERPRET * implementation.endswith(INTERPRET)
    return {call: implementation if call.startswith(OP) else other for call in calls}


def compiled(program: Callable, layer: Layer, implementation: str) -> Figures:
    """Returns the figures of a program of one sequence, with the scan by an implementation."""
    mesh = Mesh(np.array(described_devices(GPU)), ("all",))
    placed = NamedSharding(mesh, P())
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), shapes(layer, TOKENS)
    )

    def lowered(chosen: Mapping[str, str]):
        with using(chosen) as decisions:
            low = jax.jit(lambda *arrays: program(layer, *arrays)).lower(*arrays)
        assert not decisions.missed, decisions.missed
        return low, decisions.calls

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        calls = lowered({})[1]
        made = lowered(chosen_for(calls, implementation))[0].compile()
    launched = kernels(made.as_text())
    return Figures(
        moved=sum(kernel.moved for kernel in launched) / 1e9,
        launches=sum(kernel.launches for kernel in launched),
        temporaries=made.memory_analysis().temp_size_in_bytes / 1e9,
    )
