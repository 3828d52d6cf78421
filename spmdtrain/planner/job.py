"""What is to be priced: a model's sizes, how a batch is cut, and the layout. Plain numbers; no jax.

`job_of(config)` reads a run's settings. Published runs are written down as jobs directly.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from spmdtrain.config.schema import RunConfig, TransformerConfig


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int  # width of the mlp
    vocab: int
    gated: bool = False  # swiglu: two matrices up
    tied: bool = True
    bias: bool = True
    centred: bool = True  # layernorm; else rmsnorm
    positions: int = 0  # rows of a learned position table; 0: rotary
    dropout: bool = False

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def up_width(self) -> int:
        return self.hidden * (2 if self.gated else 1)

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer that multiply every token."""
        return self.embed * (self.qkv_width + self.attention_width + self.up_width + self.hidden)

    @property
    def layer_parameters(self) -> int:
        """All of one layer: matrices, biases, two norms."""
        norms = 2 * self.embed * (2 if self.centred and self.bias else 1)
        biases = (self.qkv_width + self.up_width + 2 * self.embed) * self.bias
        return self.layer_matrices + norms + biases

    @property
    def outside(self) -> int:
        """Parameters outside the layers."""
        tables = self.vocab * (1 if self.tied else 2) + self.positions
        return self.embed * (tables + (2 if self.centred and self.bias else 1))

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outside


@dataclass(frozen=True)
class Layout:
    """Devices along each mesh axis, slowest link first."""

    pipeline: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def shards(self) -> int:
        """Of the batch."""
        return self.data * self.fsdp * self.expert

    @property
    def sizes(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def stride(self, axis: str) -> int:
        """Devices between neighbours along `axis`."""
        order = [each.name for each in fields(self)]
        return math.prod(getattr(self, faster) for faster in order[order.index(axis) + 1 :])


@dataclass(frozen=True)
class Job:
    """A run. `microbatch`: sequences per batch shard. `remat`: none, dots (all but matmuls and attention again), full,
    or of other frameworks matmuls (all but those again: jax's own policy), attention (the scores again: Megatron's
    selective) and half (every other matmul again: torchtitan's).
    `short_ends`: layers that the first and the last stage have fewer than the others.
    """

    shape: Shape
    sequence: int
    global_batch: int
    microbatch: int
    layout: Layout = Layout()
    schedule: str = "1f1b"
    chunks: int = 1
    remat: str = "none"
    zero: int = 0
    sequence_parallel: bool = False
    short_ends: int = 0
    dtype: str = "bfloat16"
    resting: int = 4  # bytes of a weight and of each moment
    moments: int = 2  # of the optimizer, per weight

    @property
    def accumulation(self) -> int:
        """Microbatches per step and batch shard."""
        return self.global_batch // (self.microbatch * self.layout.shards)

    @property
    def tokens(self) -> int:
        """Of one microbatch on one device."""
        return self.microbatch * self.sequence // self.layout.context

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence

    @property
    def layers_per_stage(self) -> int:
        """Places, padding included, of the fullest stage."""
        stages, chunks = self.layout.pipeline, self.chunks
        return chunks * -(-(self.shape.layers + 2 * self.short_ends) // (stages * chunks))


def shape_of(model: TransformerConfig, longest: int) -> Shape:
    return Shape(
        layers=model.layers,
        embed=model.embed,
        heads=model.heads,
        kv_heads=model.key_value_heads,
        head_dim=model.width_per_head,
        hidden=model.hidden,
        vocab=model.vocab,
        gated=model.mlp == "swiglu",
        tied=model.tied,
        bias=model.bias,
        centred=model.norm == "layernorm",
        positions=longest if model.positions == "learned" else 0,
        dropout=model.dropout > 0,
    )


def job_of(config: RunConfig, sizes: Mapping[str, int]) -> Job:
    """The job of a run on a mesh of these `sizes` (none -1) that divide its batch; `model.vocab` must be set."""
    layout, train = Layout(**sizes), config.train
    pipelined = layout.pipeline > 1
    return Job(
        shape=shape_of(config.model, config.max_length),
        sequence=train.sequence_length,
        global_batch=train.global_batch,
        microbatch=train.microbatch or train.global_batch // layout.shards,
        layout=layout,
        schedule=config.pipeline.schedule if pipelined else "1f1b",
        chunks=config.pipeline.chunks if pipelined else 1,
        remat=train.remat,
        zero=train.zero,
        dtype=config.precision.compute,
        resting=4 if config.precision.params == "float32" else 2,
        moments=2 if config.optimizer.name == "adamw" else 1,
    )
