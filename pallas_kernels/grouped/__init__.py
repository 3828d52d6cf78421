"""Multiplies many groups of rows, each by its own weight. Start with api.py."""

from pallas_kernels.grouped.api import grouped_matmul as grouped_matmul
from pallas_kernels.grouped.tiles import Tiles as Tiles
from pallas_kernels.grouped.tiles import tile_groups as tile_groups
from pallas_kernels.grouped.tiles import tiles_for as tiles_for
