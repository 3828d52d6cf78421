"""Describes the run to be estimated: a model's sizes, its mesh, and the division of its batch.

All are plain numbers. `workload_of(config)` reads them off a run's settings; benchmarks write
published runs down as workloads directly.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from spmdtrain.config.published.teacher import teacher_settings
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.saved_logits.manifest import saved_for
from spmdtrain.models.size import seen_pairs
from spmdtrain.parallel.axes import batch_shards
from spmdtrain.planner.cost.experts import Dispatch, ExpertShape
from spmdtrain.train.layer_loop import is_loop


@dataclass(frozen=True)
class LatentShape:
    """The sizes of `[model.latent]`, under its names; no `query_rank` is 0."""

    rank: int
    query_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int

    @property
    def down_width(self) -> int:
        """The width of the stream's projection, which no axis of heads splits."""
        return self.query_rank + self.rank + self.rope_dim

    @property
    def norm_width(self) -> int:
        """The numbers of a token that norms of latents read."""
        return self.query_rank + self.rank


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of the MLP between its two matmuls
    vocab: int
    gated: bool = False  # SwiGLU: the MLP has two up matrices
    tied: bool = True  # embedding and head share one table
    bias: bool = True
    layernorm: bool = True  # False: RMSNorm
    position_rows: int = 0  # of a learned position table; 0: rotary positions
    dropout: bool = False
    qkv_bias: bool | None = None  # None: as `bias`, and so are the next two
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    norm_places: str = "before"  # attention and mlp, "after" them or "both"
    query_norm: str = "none"  # "head" or "all": of queries and keys
    sinks: bool = False
    windows: tuple[int, ...] = ()  # tokens that attention sees, repeating over the layers; 0: all
    experts: ExpertShape | None = None  # in place of the mlp, in some or all layers
    latent: LatentShape | None = None  # from which keys and values are computed
    further: int = 0  # blocks after the last layer that predict further tokens

    @property
    def value_dim(self) -> int:
        """The channels of a head's values; `head_dim` are those of queries and keys."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def attention_width(self) -> int:
        """The width of the output of attention, and of queries if there is no latent."""
        return self.heads * self.value_dim

    @property
    def mean_dim(self) -> float:
        """The mean of the channels of a key and a value, which attention's FLOPs follow."""
        return (self.head_dim + self.value_dim) / 2

    @property
    def qkv_width(self) -> int:
        """The width of queries, keys and values together."""
        keys_and_values = self.kv_heads * (self.head_dim + self.value_dim)
        return self.heads * self.head_dim + keys_and_values

    @property
    def qkv_matmuls(self) -> tuple[tuple[int, int, bool], ...]:
        """The matrices that compute q, k and v, each as (columns, rows, whether heads split the
        columns).
        """
        if self.latent is None:
            return ((self.qkv_width, self.embed, True),)
        latent = self.latent
        keys = self.heads * (latent.plain_dim + latent.value_dim)
        return (
            (latent.down_width, self.embed, False),
            (self.heads * self.head_dim, latent.query_rank or self.embed, True),
            (keys, latent.rank, True),
        )

    @property
    def qkv_columns(self) -> tuple[int, int]:
        """The columns of the matrices that compute q, k and v: (those that heads split, the
        others).
        """
        of_heads = sum(columns for columns, _, splits in self.qkv_matmuls if splits)
        return of_heads, sum(columns for columns, _, splits in self.qkv_matmuls if not splits)

    @property
    def whole_matrices(self) -> int:
        """The elements of a layer's matrices that `tensor` does not split."""
        return sum(columns * rows for columns, rows, splits in self.qkv_matmuls if not splits)

    @property
    def cached_width(self) -> int:
        """The numbers of a token that a layer's cache holds."""
        if self.latent:
            return self.latent.rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim

    @property
    def up_width(self) -> int:
        """The output width of the MLP's up projection."""
        matrices = 2 if self.gated else 1
        return self.ffn * matrices

    @property
    def repeats(self) -> int:
        """The number of equal parts of the stack that a pipeline divides."""
        return self.experts.repeats(self.layers) if self.experts else self.layers

    @property
    def expert_share(self) -> float:
        """The share of the layers that have experts."""
        return self.experts.share_of(self.layers) if self.experts else 0.0

    @property
    def dense_layer(self) -> "ModelShape":
        """A model of layers like those that have no experts."""
        return replace(self, experts=None)

    @property
    def beside_experts(self) -> "ModelShape":
        """A model of layers like those with experts, but with only the shared ones as their mlp."""
        assert self.experts is not None, "a model with experts"
        ffn = self.experts.shared * self.experts.ffn
        return replace(self, experts=None, ffn=ffn, mlp_bias=self.has_mlp_bias and ffn > 0)

    def mean_of_layers(self, of_layer: Callable[["ModelShape"], float]) -> float:
        """Returns the mean of `of_layer` over the layers, without their experts."""
        share = self.expert_share
        if not share:
            return of_layer(self)
        dense = (1 - share) * of_layer(self.dense_layer) if share < 1 else 0.0
        return dense + share * of_layer(self.beside_experts)

    @property
    def layer_matrices(self) -> float:
        """The number of parameters of one layer that multiply every token.

        With experts, here and in what follows, it is the mean of the layers. Those of experts are
        `expert_matrices`.
        """
        if self.experts is None:
            qkv = sum(columns * rows for columns, rows, _ in self.qkv_matmuls)
            return qkv + self.embed * (self.attention_width + self.up_width + self.ffn)
        router = self.expert_share * self.embed * self.experts.count
        return self.mean_of_layers(lambda layer: layer.layer_matrices) + router

    @property
    def active_matrices(self) -> float:
        """The number of parameters of one layer that a token goes through."""
        if self.experts is None:
            return self.layer_matrices
        return self.layer_matrices + self.experts.chosen / self.experts.count * self.expert_matrices

    @property
    def expert_matrices(self) -> float:
        """The number of parameters of all experts of one layer but for their biases."""
        if self.experts is None:
            return 0
        width = self.experts.ffn * (3 if self.gated else 2)
        return self.expert_share * self.experts.count * self.embed * width

    @property
    def expert_parameters(self) -> float:
        """The number of parameters of all experts of one layer."""
        if self.experts is None:
            return 0
        up_width = self.experts.ffn * (2 if self.gated else 1)
        biases = self.experts.count * (up_width + self.embed) * self.has_mlp_bias
        return self.expert_matrices + self.expert_share * biases

    @property
    def layer_parameters(self) -> float:
        """The number of parameters of one layer, except those of its experts."""
        if self.experts is not None:
            router = self.embed * self.experts.count + self.experts.router_biases
            others = self.mean_of_layers(lambda layer: layer.layer_parameters)
            return others + self.expert_share * router
        norms = self.norms * self.embed * self.vectors_per_norm
        norms += self.latent_norm_size
        return self.layer_matrices + norms + self._biases + self.query_norm_size + self.head_sinks

    @property
    def has_mlp_bias(self) -> bool:
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def norms(self) -> int:
        """The number of norms of one layer."""
        return 4 if self.norm_places == "both" else 2

    @property
    def query_key_width(self) -> int:
        """The width of queries and keys together."""
        return (self.heads + self.kv_heads) * self.head_dim

    @property
    def _biases(self) -> int:
        """The number of biases of one layer's projections."""
        qkv, out = (
            self.bias if given is None else given for given in (self.qkv_bias, self.out_bias)
        )
        mlp = self.has_mlp_bias
        return self.qkv_width * qkv + self.embed * out + (self.up_width + self.embed) * mlp

    @property
    def query_norm_size(self) -> int:
        """The number of parameters of the norms of queries and keys in one layer."""
        if self.query_norm == "all":
            return self.query_key_width
        return 2 * self.head_dim if self.query_norm == "head" else 0

    @property
    def latent_norm_size(self) -> int:
        """The number of parameters of the norms of latents in one layer."""
        return self.latent.norm_width if self.latent else 0

    @property
    def head_sinks(self) -> int:
        """The number of sinks of one layer: one for each head, or none."""
        return self.heads if self.sinks else 0

    def seen_share(self, sequence_length: int) -> float:
        """Returns the pairs of query and key that a layer sees, averaged over the layers.

        They are relative to causal attention without a window.
        """
        if not self.windows:
            return 1.0
        kinds = [self.windows[n % len(self.windows)] for n in range(self.layers)]
        whole = seen_pairs(sequence_length)
        return sum(seen_pairs(sequence_length, window) for window in kinds) / self.layers / whole

    @property
    def outside_parameters(self) -> int:
        """The number of parameters outside the layers: tables and the last norm."""
        tables = self.vocab * self.vocabulary_tables + self.position_rows
        return self.embed * (tables + self.vectors_per_norm)

    @property
    def last_layer(self) -> "ModelShape":
        """A model of layers like the last one."""
        if self.experts is None:
            return self
        return replace(self, experts=replace(self.experts, first_dense=0, every=1))

    @property
    def further_parameters(self) -> float:
        """The number of parameters of the blocks that predict further tokens."""
        last = self.last_layer
        block = last.layer_parameters + last.expert_parameters
        joining = 2 * self.embed**2 + 3 * self.embed * self.vectors_per_norm
        return self.further * (block + joining)

    @property
    def further_matrices(self) -> float:
        """The number of parameters that a token goes through in these blocks, counting the head
        once for each block.
        """
        own = 2 * self.embed**2 + self.embed * self.vocab
        return self.further * (self.last_layer.active_matrices + own)

    @property
    def parameters(self) -> int:
        layer = self.layer_parameters + self.expert_parameters
        inside = self.layers * layer + self.further_parameters
        return round(inside) + self.outside_parameters

    @property
    def vocabulary_tables(self) -> int:
        return 1 if self.tied else 2

    @property
    def vectors_per_norm(self) -> int:
        """The vectors of a norm: a scale, and for a layernorm with biases an offset."""
        return 2 if self.layernorm and self.bias else 1


@dataclass(frozen=True)
class Trained:
    """The trained part of a model.

    share: that of the model's own weights, by elements, and `of_matrices` that of those that
    multiply every token.

    `targets`: the linear layers of each block that have an adapter of `rank`, and `magnitudes` if
    DoRA's; () for none. `frozen_layers`: the first layers, without a backward.
    """

    share: float = 1.0
    of_matrices: float = 1.0
    rank: int = 0
    targets: tuple[str, ...] = ()
    magnitudes: bool = False
    frozen_layers: int = 0
    base_bytes: float | None = None  # of an element of a weight with adapters; None: as other ones

    def share_below(self, model: "ModelShape") -> float:
        """Returns the share of the model's elements that the frozen first layers have."""
        layers = model.layers * model.layer_parameters
        return self.frozen_layers / model.layers * layers / (layers + model.outside_parameters)

    def adapted_elements(self, model: ModelShape, tensor: int) -> float:
        """Counts the elements of one layer's weights that have adapters, before `fsdp`."""
        widths = {
            ("q", "k", "v"): model.qkv_width,
            ("out",): model.attention_width,
            ("gate", "up"): model.mean_of_layers(lambda layer: layer.up_width),
            ("down",): model.mean_of_layers(lambda layer: layer.ffn),
        }
        have = [width for parts, width in widths.items() if set(parts) & set(self.targets)]
        return model.embed * sum(have) / tensor

    def adapter_matrices(self, model: ModelShape) -> float:
        """Counts the elements of one layer's adapters that multiply every token."""
        return replace(self, magnitudes=False).adapter_elements(model, 1)

    def adapter_elements(self, model: ModelShape, tensor: int) -> float:
        """Counts the elements of one layer's adapters on a device.

        `fsdp` splits none.
        """
        total = 0.0
        for target, wide in self.adapter_widths(model, tensor).items():
            total += self.rank * (model.embed + wide)
            if self.magnitudes:
                total += model.embed if target in ("out", "down") else wide
        return total

    def adapter_widths(self, model: ModelShape, tensor: int) -> dict[str, float]:
        """Returns target -> the width, on a device, of an adapter's side that is not the stream.

        It is split like its weight; the side in the stream is whole.
        """
        heads = model.attention_width / tensor
        kv_heads = model.kv_heads * model.head_dim / tensor
        ffn = model.mean_of_layers(lambda layer: layer.ffn) / tensor
        wide = {"q": heads, "k": kv_heads, "v": kv_heads, "out": heads, "up": ffn, "down": ffn}
        if model.gated:
            wide["gate"] = ffn
        return {target: width for target, width in wide.items() if width and target in self.targets}


class Group(NamedTuple):
    """The devices that run one collective: `size` of them, each `stride` from the next."""

    size: int
    stride: int


@dataclass(frozen=True)
class MeshShape:
    """The number of devices along each mesh axis, slowest link first."""

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
    def batch_shards(self) -> int:
        """The number of parts into which the batch is split."""
        return batch_shards(self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: getattr(self, axis.name) for axis in fields(self)}

    def stride(self, axis: str) -> int:
        """Returns the distance in devices between neighbours along `axis`."""
        axes = list(self.sizes)
        faster = axes[axes.index(axis) + 1 :]
        return math.prod(self.sizes[name] for name in faster)

    def group(self, axis: str) -> Group:
        return Group(self.sizes[axis], self.stride(axis))


@dataclass(frozen=True)
class Workload:
    """One training run, as far as its time and memory depend on it.

    `remat` says what the backward recomputes. This framework's policies are "none", "dots" (all but
    matmuls and attention) and "full". Other frameworks have "matmuls" (all but matmuls: one of
    jax's policies), "attention" (the scores: Megatron's selective recomputation) and "half" (every
    other matmul: torchtitan's).
    """

    model: ModelShape
    sequence_length: int
    global_batch: int
    microbatch: int  # sequences per batch shard
    mesh: MeshShape = MeshShape()
    schedule: str = "1f1b"
    chunks: int = 1
    remat: str = "none"
    offloads: bool = False  # with "full": the host keeps what layers keep
    zero: int = 0
    sequence_parallel: bool = False
    collective_matmul: bool = False  # only with sequence_parallel
    short_ends: int = 0  # layers that the first and the last stage each have fewer
    last_takes_rest: bool = False  # the last stage has the layers that full stages leave
    dtype: str = "bfloat16"  # of the computation
    # How attention reaches keys on other devices of `context`. This framework's ways are "auto",
    # "ring", "gather" and "ulysses"; "balanced" gathers, with the tokens in zigzag order (Llama 3).
    context_attention: str = "balanced"
    matmul: str = "compute"  # numbers of the layers' matmuls, as precision.matmul
    stored_bytes: int = 4  # of a weight at rest, and of each moment
    trained: Trained = Trained()
    frozen_bytes: int = 4  # of a weight at rest that is not trained
    moments: float = 2  # that the optimizer keeps of each trained weight, on average
    own_moment_bytes: float | None = None  # of each at rest; None: stored_bytes
    moments_on_host: bool = False
    moments_may_move: bool = False  # to the host: optimizer.memory is built for them
    sent_gradient_bytes: float | None = None  # as it crosses `data`; None: as the software sends it
    data_within: int = 1  # neighbours along `data` that sum in full before others, compressed
    data_exchanges: bool = False  # compressed gradients are scattered by an all-to-all
    gradients_at_weights: bool = True  # False: at a separate point, which a step holds as well
    item_bytes: int = 0  # per weight, of other items of the state, such as its average
    feedback_bytes: int = (
        0  # the same, of what compressed gradients leave on each of several shards
    )
    replays_steps: bool = False  # guard.replay_check takes some steps twice, from a copy
    dense_over_expert: bool = False  # `expert` splits all weights, in addition to `fsdp`
    experts_over_tensor: bool = False  # `tensor` owns experts, and does not split each of them
    teacher: ModelShape | None = None  # a frozen second model, of which only the forward pass runs
    likeliest: int = 0  # saved log-probabilities of each token, from which it learns
    logits: str = "float32"  # dtype of the logits that the loss is taken from
    scan_layers: bool | Literal["auto"] = "auto"
    device_kind: str = ""  # jax's name of the device; "": no particular one

    @property
    def scans_layers(self) -> bool:
        """True if the layers run as one loop, and are not written out."""
        layers = self.model.layers
        return is_loop(self.scan_layers, layers, self.offloads, self.mesh.sizes, self.device_kind)

    @property
    def of_teacher(self) -> "Workload | None":
        """The teacher's part of the run, as a run of its own; None without a teacher."""
        if self.teacher is None:
            return None
        alone = {
            "remat": "none",
            "offloads": False,
            "zero": 0,
            "item_bytes": 0,
            "feedback_bytes": 0,
        }
        frozen = Trained(share=0.0, of_matrices=0.0)
        return replace(self, model=self.teacher, teacher=None, trained=frozen, **alone)

    @property
    def accumulation(self) -> int:
        """The number of microbatches per step and batch shard."""
        return self.global_batch // (self.microbatch * self.mesh.batch_shards)

    @property
    def context_way(self) -> str:
        """The value of `context_attention`, with "auto" resolved as a run resolves it."""
        if self.context_attention != "auto":
            return self.context_attention
        return "gather" if self.sequence_length % (2 * self.mesh.context) else "ring"

    @property
    def takes_ulysses(self) -> bool:
        """True if the key-value heads of a device divide by the devices of `context`."""
        return self.model.kv_heads // self.mesh.tensor % self.mesh.context == 0

    @property
    def moment_bytes(self) -> float:
        """The bytes of one moment of a weight at rest."""
        return self.stored_bytes if self.own_moment_bytes is None else self.own_moment_bytes

    @property
    def optimizer_bytes(self) -> float:
        """The bytes per weight, on the device, of the moments and of other items of the state."""
        held = 0.0 if self.moments_on_host else self.moment_bytes * self.moments
        return held + self.held_item_bytes

    @property
    def held_item_bytes(self) -> int:
        """The bytes per weight of the items of a state that this mesh has."""
        return self.item_bytes + (self.feedback_bytes if self.mesh.data > 1 else 0)

    @property
    def tokens(self) -> int:
        """The number of tokens of one microbatch on one device."""
        return self.microbatch * self.sequence_length // self.mesh.context

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def dense_ways(self) -> int:
        """The parts into which `expert` splits weights that are not experts'."""
        return self.mesh.expert if self.dense_over_expert else 1

    @property
    def dense_group(self) -> Group:
        """The devices that split weights that are not experts', and gather them."""
        fsdp = self.mesh.group("fsdp")
        if self.dense_ways == 1:
            return fsdp
        return Group(fsdp.size * self.dense_ways, self.mesh.stride("expert"))

    @property
    def exchange_group(self) -> Group:
        """The devices that own the experts of a layer, among which tokens travel."""
        mesh = self.mesh
        if self.experts_over_tensor:
            return Group(mesh.expert * mesh.tensor, mesh.context)
        return mesh.group("expert")

    def dispatch(self, imbalance: float = 1.0) -> Dispatch:
        """Returns the exchange of a microbatch's tokens in a layer with experts."""
        assert self.model.experts is not None, "a model with experts"
        tokens = self.tokens
        if self.experts_over_tensor:
            tokens = -(-tokens // self.mesh.tensor)
        return Dispatch(self.model.experts, tokens, self.exchange_group.size, imbalance)

    @property
    def layers_per_stage(self) -> int:
        """The number of layers of the fullest stage, including padding.

        The first dense layers of a model with experts run on every stage, and so do the blocks of
        further tokens, which count as layers.
        """
        first = self.model.experts.first_dense if self.model.experts else 0
        return self.chunks * self.layers_per_chunk + first + self.model.further

    @property
    def layers_per_chunk(self) -> int:
        """The number of layers of the fullest chunk, including padding."""
        experts = self.model.experts
        first, every = (experts.first_dense, experts.every) if experts else (0, 1)
        layers = self.model.layers - first + 2 * self.short_ends
        return every * -(-layers // (self.mesh.pipeline * self.chunks * every))

    @property
    def frozen_chunks(self) -> int:
        """The chunks of a pipeline that a microbatch passes before one that learns."""
        if self.mesh.pipeline == 1:
            return 0
        first = self.model.experts.first_dense if self.model.experts else 0
        return max(0, self.trained.frozen_layers - first) // self.layers_per_chunk

    @property
    def frozen_per_stage(self) -> int:
        """The number of layers without a backward that every stage has."""
        if self.mesh.pipeline == 1:
            return self.trained.frozen_layers
        return self.frozen_chunks // self.mesh.pipeline * self.layers_per_chunk

    @property
    def layers_of_last_stage(self) -> int:
        """The number of layers of the last stage of software that pads no stage.

        Layers that the stages do not divide are spread over them, one more for some of them, unless
        `last_takes_rest`. Blocks of further tokens run on the last stage alone.
        """
        further = self.model.further
        full = self.layers_per_stage - further
        if self.short_ends:
            return full - self.short_ends + further
        if self.last_takes_rest:
            return max(0, self.model.layers - (self.mesh.pipeline - 1) * full) + further
        return min(full, self.model.layers // self.mesh.pipeline) + further

    @property
    def remat_setting(self) -> str:
        """The value of `train.remat`."""
        return "offload" if self.offloads else self.remat

    @property
    def compute_bytes(self) -> int:
        """The bytes of one element in the computation's precision."""
        return bytes_of(self.dtype)

    @property
    def stream_ways(self) -> int:
        """The parts into which `tensor` splits the tokens of residual stream and norms."""
        return self.mesh.tensor if self.sequence_parallel else 1

    @property
    def sum_ways(self) -> int:
        """The parts into which `tensor` splits an activation that is summed over the stages."""
        divides = self.sequence_length // self.mesh.context % self.mesh.tensor == 0
        return self.mesh.tensor if divides else 1

    @property
    def activation_bytes(self) -> int:
        """The bytes of one microbatch's activations between two layers, [batch, time, embed]."""
        return self.tokens * self.model.embed * self.compute_bytes


def bytes_of(dtype: str) -> int:
    return {"float32": 4, "float8": 1, "mxfp8": 1}.get(dtype, 2)


def model_shape(config: RunConfig) -> ModelShape:
    """Returns the shape of the config's model, whose vocabulary must be set."""
    model = config.model
    return ModelShape(
        layers=model.layers,
        embed=model.embed,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn,
        vocab=config.vocab,
        gated=model.is_gated,
        tied=model.tied,
        bias=model.bias,
        layernorm=model.norm == "layernorm",
        position_rows=config.model.max_length if model.positions == "learned" else 0,
        dropout=model.dropout > 0,
        qkv_bias=model.qkv_bias,
        out_bias=model.out_bias,
        mlp_bias=model.mlp_bias,
        norm_places=model.norm_places,
        query_norm=model.query_norm,
        sinks=model.sinks,
        windows=model.windows,
        experts=_expert_shape(config),
        latent=_latent_shape(config),
        further=model.multi_token.depth if model.multi_token else 0,
    )


def _latent_shape(config: RunConfig) -> LatentShape | None:
    latent = config.model.latent
    if latent is None:
        return None
    sizes = latent.model_dump()
    return LatentShape(**sizes | {"query_rank": latent.query_rank or 0})


def _expert_shape(config: RunConfig) -> ExpertShape | None:
    """Returns the sizes of the config's experts; None for a custom model, which has its own."""
    experts = config.model.experts
    if experts is None or config.model.make:
        return None
    return ExpertShape(
        count=experts.count,
        chosen=experts.chosen,
        ffn=experts.ffn,
        shared=experts.shared,
        first_dense=experts.first_dense,
        every=experts.every,
        bucket_factor=experts.bucket_factor,
        logit_bias=experts.logit_bias,
    )


def trained_part(config: RunConfig) -> Trained:
    """Returns the trained part of the config's model. `model.vocab` must be set.

    Its own weights are counted in the built model if [finetune] or a group of the optimizer names
    some of them, and so are the adapters of a custom model, as weights of the model.
    """
    finetune = config.finetune
    patterns = [group.match for group in config.optimizer.groups if group.frozen]
    below = config.always_frozen
    if not finetune.has_adapters and not patterns:
        return Trained(frozen_layers=below)
    own = config.model.make is not None
    share = of_matrices = 0.0
    if own or patterns or finetune.also_train:
        share, of_matrices = _built_shares(config, with_adapters=own)
    if own or not finetune.has_adapters:
        return Trained(share, of_matrices, frozen_layers=below)
    # NF4 has a scale of 8 bits for 64 weights, and one of 32 for 256 of those.
    held = {"float": None, "int8": 1.0, "nf4": (4 + 8 / 64 + 32 / (64 * 256)) / 8}[finetune.base]
    dora = finetune.kind == "dora"
    return Trained(share, of_matrices, finetune.rank, finetune.targets, dora, below, held)


def _built_shares(config: RunConfig, *, with_adapters: bool) -> tuple[float, float]:
    """Returns the share of the built model's elements that is trained, and that of its matrices."""
    from spmdtrain.models.abstract import build_model
    from spmdtrain.models.choose import choose_model

    parameters = build_model(*choose_model(config)).parameters
    groups = config.optimizer.groups
    head = "tokens.table_ve" if config.model.tied else "unembed_ve"
    total = {False: 0, True: 0}  # by whether a matmul reads it
    trained = {False: 0, True: 0}
    for path, each in parameters.items():
        if each.is_of_adapter and not with_adapters:
            continue
        group = next((group for group in groups if fnmatchcase(path, group.match)), None)
        of_matmuls = each.is_of_matmuls or path == head
        total[of_matmuls] += each.size
        trained[of_matmuls] += each.size * (each.is_trained and not (group and group.frozen))
    of_matrices = trained[True] / total[True] if total[True] else 1.0
    return sum(trained.values()) / sum(total.values()), of_matrices


# By optimizer.moment_dtype; 8 bits have a float32 scale for each 256.
MOMENT_BYTES = {"params": None, "bfloat16": 2.0, "8bit": 1 + 4 / 256}


def workload_of(
    config: RunConfig, mesh_sizes: Mapping[str, int], device_kind: str = ""
) -> Workload:
    """Returns the workload of a run. No size may be -1, and `model.vocab` must be set."""
    mesh = MeshShape(**mesh_sizes)
    train = config.train
    pipelined = mesh.pipeline > 1
    stream_axes = config.rules.activations.get("stream_time", ())
    sequence_parallel = "tensor" in stream_axes and mesh.tensor > 1
    return Workload(
        model=model_shape(config),
        sequence_length=train.sequence_length,
        global_batch=train.global_batch,
        microbatch=train.microbatch or train.global_batch // mesh.batch_shards,
        mesh=mesh,
        schedule=config.pipeline.schedule if pipelined else "1f1b",
        chunks=config.pipeline.chunks if pipelined else 1,
        remat="full" if train.remat == "offload" else train.remat,
        offloads=train.remat == "offload",
        zero=train.zero,
        sequence_parallel=sequence_parallel,
        collective_matmul=sequence_parallel and config.mesh.collective_matmul,
        dtype=config.precision.compute,
        context_attention=_context_attention(config),
        matmul=config.precision.matmul,
        stored_bytes=4 if config.precision.params == "float32" else 2,
        trained=trained_part(config),
        frozen_bytes=4 if config.precision.frozen == "float32" else 2,
        moments=config.optimizer.moments,
        own_moment_bytes=MOMENT_BYTES[config.optimizer.moment_dtype],
        moments_on_host=config.optimizer.memory == "host",
        moments_may_move=may_move(config),
        sent_gradient_bytes=_sent_gradient_bytes(config),
        data_within=config.compression.within or 1,
        data_exchanges=config.compression.codec in ("int8", "float8", "topk"),
        gradients_at_weights=config.optimizer.gradients_at_weights,
        item_bytes=_item_bytes(config),
        # The float32 error that a data shard keeps is split like the weight.
        feedback_bytes=4 if config.compression.has_feedback else 0,
        replays_steps=config.guard.replay_check > 0,
        dense_over_expert="expert" in config.rules.parameters.get("embed", ()),
        experts_over_tensor="tensor" in config.rules.parameters.get("experts", ()),
        teacher=_teacher_shape(config),
        likeliest=_likeliest(config),
        logits=config.precision.logits,
        scan_layers=train.scan_layers,
        device_kind=device_kind,
    )


def _teacher_shape(config: RunConfig) -> ModelShape | None:
    settings = teacher_settings(config)
    return None if settings is None else model_shape(settings)


def _likeliest(config: RunConfig) -> int:
    saved = saved_for(config)
    return 0 if saved is None else saved.top


def may_move(config: RunConfig) -> bool:
    """Returns True if the settings could ask for moments on the host."""
    optimizer = config.optimizer
    return optimizer.by_element and optimizer.moment_dtype != "8bit" and not config.own.optimizer


def _sent_gradient_bytes(config: RunConfig) -> float | None:
    """Returns the bytes of a compressed gradient, as if all were matrices: vectors are few."""
    settings = config.compression
    if settings.ranks:
        return _mean_factor_bytes(config)
    if settings.rank is not None:
        # As if all matrices were square: two factors of `rank` columns, in float32.
        return 4 * min(1.0, 2 * settings.rank / config.model.embed)
    if settings.keep is not None:
        return 4 * settings.keep
    return None if settings.codec == "none" else 1 + 4 / settings.block


def _mean_factor_bytes(config: RunConfig) -> float:
    """Returns the bytes of the built model's gradients as factors, or in float32, for each weight.

    Only a built model knows the paths to which `compression.ranks` gives ranks.
    """
    from spmdtrain.models.abstract import build_model
    from spmdtrain.models.choose import choose_model
    from spmdtrain.parallel.feedback.low_rank import LowRank
    from spmdtrain.train.compression.feedback_codecs import feedback_codecs

    model = build_model(*choose_model(config))
    codecs = feedback_codecs(config, model, {"data": 2})
    trained = {path: each for path, each in model.parameters.items() if each.is_trained}
    numbers = 0
    for path, each in trained.items():
        codec = codecs.get(path)
        numbers += codec.numbers(each.shape) if isinstance(codec, LowRank) else each.size
    return 4 * numbers / sum(each.size for each in trained.values())


def _context_attention(config: RunConfig) -> str:
    """Returns the way of attention over `context`; a custom model is assumed to gather by
    itself.
    """
    asked = config.model.context_attention
    return "gather" if asked == "auto" and config.model.make else asked


def _item_bytes(config: RunConfig) -> int:
    """Returns the bytes that the items of a state hold for one weight on every mesh, as if all were
    matrices.
    """
    import jax
    from jax.sharding import PartitionSpec

    from spmdtrain.parallel.mesh import AXES
    from spmdtrain.train.all_parts import all_items
    from spmdtrain.train.items.item import Start
    from spmdtrain.train.sparsity import masks

    weight: dict[str, Any] = {"weight": jax.ShapeDtypeStruct((1,), config.precision.params)}
    where = {"weight": PartitionSpec()}
    subjects = {} if config.sparsity.pattern == "none" else {masks.NAME: weight}
    start = Start(config, weight, weight, where, dict.fromkeys(AXES, 1), subjects)
    of_weight = [tree["weight"] for tree in all_items().by_parameter(all_items().shapes(start))]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(of_weight))
