"""Defines the class of a kernel's call, for which implementations are measured and remembered.

It is everything about a call except its numbers. Nothing here imports jax.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """A call of `attention` on one device; its arguments in the words of problem.py."""

    dtype: str
    batch: int
    queries: int  # of a sequence
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    left: int | None
    right: int | None
    softcap: float | None
    scale: float
    segments: bool
    positions: bool
    bias: bool
    lse: bool

    @property
    def name(self) -> str:
        """The class. The values of softcap and scale do not belong to it."""
        times = f"{self.queries}" if self.queries == self.keys else f"{self.queries}:{self.keys}"
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}:{self.kv_heads}"
        dims = f"{self.head_dim}"
        if self.head_dim != self.value_dim:
            dims = f"{self.head_dim}:{self.value_dim}"
        parts = ["attention", self.dtype, f"{self.batch}x{times}x{heads}x{dims}"]
        if (self.left, self.right) == (None, 0):
            parts.append("causal")
        elif (self.left, self.right) != (None, None):
            parts.append(f"window {_shown(self.left)}:{_shown(self.right)}")
        flags = {
            "softcap": self.softcap is not None,
            "segments": self.segments,
            "positions": self.positions,
            "bias": self.bias,
            "lse": self.lse,
        }
        parts += [name for name, is_set in flags.items() if is_set]
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class NormCall:
    """A call of `layernorm` or `rmsnorm` on one device."""

    op: str
    rows: int
    width: int
    dtype: str
    scale: str  # its dtype
    bias: str | None  # its dtype
    residual: str | None  # its dtype

    @property
    def name(self) -> str:
        """The class."""
        parts = [self.op, self.dtype, f"{self.rows}x{self.width}", f"scale {self.scale}"]
        if self.bias:
            parts.append(f"bias {self.bias}")
        if self.residual:
            parts.append(f"residual {self.residual}")
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class GroupedCall:
    """A call of `grouped_matmul` on one device, regardless of which tile belongs to which
    expert.
    """

    rows: int
    tile: int
    width: int  # contracted
    experts: int
    out_width: int
    dtype: str

    @property
    def name(self) -> str:
        """The class."""
        sizes = f"{self.rows}x{self.width}x{self.out_width}"
        return f"grouped_matmul {self.dtype} {sizes} experts {self.experts} tile {self.tile}"


@dataclass(frozen=True, kw_only=True)
class LossCall:
    """A call of `linear_cross_entropy` on one device, whose logits make more than one chunk."""

    batch: int
    time: int
    width: int
    rows: int  # of the weight on this device
    dtype: str
    weight: str  # its dtype
    logits: str = "float32"  # their dtype
    whole: bool = True  # this device has all rows, and its tokens are split by manual axes only

    @property
    def name(self) -> str:
        """The class."""
        sizes = f"{self.batch}x{self.time}x{self.width}x{self.rows}"
        parts = [f"linear_cross_entropy {self.dtype} {sizes} weight {self.weight}"]
        if self.logits != "float32":
            parts.append(f"logits {self.logits}")
        if not self.whole:
            parts.append("in parts")
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class ChunksCall:
    """A call of `scan_chunks` on one device."""

    chunks: int
    tokens: int  # of a chunk
    heads: int  # of all sequences
    key_dim: int
    value_dim: int
    dtype: str
    corrects: bool  # what tokens write depends on the state
    by_channel: bool  # each key channel has a decay

    @property
    def name(self) -> str:
        """The class."""
        sizes = f"{self.chunks}x{self.tokens}x{self.heads}x{self.key_dim}:{self.value_dim}"
        parts = ["chunk_scan", self.dtype, sizes]
        flags = {"corrects": self.corrects, "by channel": self.by_channel}
        return " ".join([*parts, *(name for name, is_set in flags.items() if is_set)])


@dataclass(frozen=True, kw_only=True)
class InverseCall:
    """A call of `unit_inverse` on one device."""

    matrices: int
    size: int  # rows of a matrix
    dtype: str

    @property
    def name(self) -> str:
        """The class."""
        return f"unit_inverse {self.dtype} {self.matrices}x{self.size}"


Call = AttentionCall | NormCall | GroupedCall | LossCall | ChunksCall | InverseCall


def to_json(call: Call) -> dict[str, Any]:
    """Returns the call as a JSON object."""
    return asdict(call)


def from_json(values: dict[str, Any]) -> Call:
    """Returns the call that `to_json` wrote. Raises TypeError if it is not one."""
    if "matrices" in values:
        return InverseCall(**values)
    if "chunks" in values:
        return ChunksCall(**values)
    if "experts" in values:
        return GroupedCall(**values)
    if "weight" in values:
        return LossCall(**values)
    return NormCall(**values) if "op" in values else AttentionCall(**values)


def _shown(side: int | None) -> str:
    return "all" if side is None else str(side)
