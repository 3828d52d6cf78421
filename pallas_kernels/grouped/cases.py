"""Grouped matmuls that tests check, aot.py compiles and bench.py times."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

UNUSED = -1


@dataclass(frozen=True, kw_only=True)
class Case:
    tile: int = 16  # rows
    width: int = 32  # contracted
    out_width: int = 48
    experts: int = 3
    # The expert of each tile; or how many tiles there are, spread over the experts in order.
    tiles: tuple[int, ...] | int = (0, 0, 1, 2, UNUSED)
    dtype: str = "float32"

    @property
    def name(self) -> str:
        tiles = self.expert_of_tile()
        sizes = f"{tiles.size * self.tile}x{self.width}x{self.out_width}"
        parts = [sizes, f"experts{self.experts}", f"tile{self.tile}", self.dtype]
        if not isinstance(self.tiles, int):
            parts.append(",".join(map(str, self.tiles)))
        return "-".join(parts)

    def expert_of_tile(self) -> np.ndarray:
        if isinstance(self.tiles, int):
            return (np.arange(self.tiles) * self.experts // self.tiles).astype(np.int32)
        return np.array(self.tiles, np.int32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of x, w and dy."""
        rows = self.expert_of_tile().size * self.tile
        return {
            "x": (rows, self.width),
            "w": (self.experts, self.width, self.out_width),
            "dy": (rows, self.out_width),
        }

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of the arrays of `draw`."""
        dtype = jnp.dtype(self.dtype)
        arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in self.shapes().items()}
        tiles = self.expert_of_tile()
        return arrays | {"expert_of_tile": jax.ShapeDtypeStruct(tiles.shape, tiles.dtype)}

    def draw(self, seed: int = 0) -> dict[str, jax.Array]:
        """Draws x, w and dy, and gives them expert_of_tile; unused tiles of x and dy are NaN."""
        random = np.random.default_rng(seed)
        arrays = {
            name: random.standard_normal(shape).astype(np.float32)
            for name, shape in self.shapes().items()
        }
        tiles = self.expert_of_tile()
        unused = np.repeat((tiles < 0) | (tiles >= self.experts), self.tile)
        for name in ("x", "dy"):
            arrays[name][unused] = np.nan
        drawn = {name: jnp.asarray(x, self.dtype) for name, x in arrays.items()}
        return drawn | {"expert_of_tile": jnp.asarray(tiles)}


# What the kernels for Hopper take: an expert without tiles, an unused tile, more steps than slots.
HOPPER = (
    Case(dtype="bfloat16", tile=128, width=128, out_width=256, tiles=(2, UNUSED, 0)),
    Case(dtype="float16", tile=256, width=384, out_width=128, experts=1, tiles=(0, 0)),
)

CI = (
    Case(),
    *HOPPER,
    Case(dtype="bfloat16", tiles=(2, 0, UNUSED, 2, 0)),  # no order, and expert 1 has none
    Case(experts=4, tiles=(3, 3, 3), tile=48, width=80, out_width=16),  # all of one expert
    Case(dtype="bfloat16", tile=32, width=128, out_width=192, experts=2, tiles=(0, 1, 7)),
    Case(experts=1, tiles=(0,), dtype="float16"),
)

SLOW = tuple(
    Case(tile=tile, width=width, out_width=out_width, experts=8, tiles=12, dtype=dtype)
    for tile in (16, 64, 128, 256)
    for width, out_width in ((128, 384), (1536, 512), (48, 2048))
    for dtype in ("bfloat16", "float32")
)


def timed() -> list[Case]:
    """Lists the up and the down matmul of published models, of one device's experts."""
    shapes = {  # embed, ffn, experts of a device, rows
        "mixtral_8x7b": (4096, 14336, 1, 8192),
        "qwen3_30b_a3b": (2048, 768, 16, 65536),
        "deepseek_v3": (7168, 2048, 4, 32768),
    }
    cases = []
    for embed, ffn, experts, rows in shapes.values():
        for width, out_width in ((embed, 2 * ffn), (ffn, embed)):
            cases.append(
                Case(
                    tile=128,
                    width=width,
                    out_width=out_width,
                    experts=experts,
                    tiles=rows // 128,
                    dtype="bfloat16",
                )
            )
    return cases
