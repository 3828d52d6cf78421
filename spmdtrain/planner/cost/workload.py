"""Describes the run to be estimated: its settings, its layout, and what was counted in it.

Costs read settings in the run's own config, so that one more of them costs nothing here. Benchmarks
write published runs of other software down as settings, in layouts that no config accepts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from spmdtrain.config.published.teacher import teacher_settings
from spmdtrain.config.schema import RunConfig, TrainConfig, TransformerConfig
from spmdtrain.config.schema.precision import NARROW
from spmdtrain.data.saved_logits.manifest import saved_for
from spmdtrain.parallel.axes import batch_shards
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.experts import Dispatch
from spmdtrain.planner.cost.trained_weights import Trained, trained_part
from spmdtrain.train.layer_loop import is_loop


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

    @cached_property
    def batch_shards(self) -> int:
        """The number of parts into which the batch is split."""
        return batch_shards(self.sizes)

    @cached_property  # a search asks a million times
    def sizes(self) -> Mapping[str, int]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def stride(self, axis: str) -> int:
        """Returns the distance in devices between neighbours along `axis`."""
        axes = list(self.sizes)
        faster = axes[axes.index(axis) + 1 :]
        return math.prod(self.sizes[name] for name in faster)

    def group(self, axis: str) -> Group:
        return Group(self.sizes[axis], self.stride(axis))


def pieces_of(context_method: str, ways: int) -> int:
    """Returns the contiguous pieces of a sequence on `ways` devices: a ring gives each two."""
    return ways * (2 if context_method == "ring" else 1)


class SecondModel(NamedTuple):
    """A frozen model that a step runs forward, on the tokens of the run's own and on its mesh."""

    term: str  # of its seconds
    model: TransformerConfig


# The term of the seconds of each second model -> the settings of a run of it; None: no such model.
SECOND_MODELS: Mapping[str, Callable[[RunConfig], RunConfig | None]] = {"teacher": teacher_settings}

# By optimizer.moment_dtype; 8 bits have a float32 scale for each 256.
MOMENT_BYTES = {"params": None, "bfloat16": 2.0, "8bit": 1 + 4 / 256}
FEEDBACK_BYTES = 4
TOKEN_NUMBERS = 3  # the token, its target and its mask


@dataclass(frozen=True)
class Workload:
    """One training run: its settings, its layout, and the sizes that had to be counted.

    The layout is that of `config`, unless a search tries another one: costs read these settings
    here, and all others in `config`. `remat` says what the backward recomputes. This framework's
    policies are "none", "dots" (all but matmuls and attention) and "full". Other frameworks have
    "matmuls" (all but matmuls: one of jax's policies), "attention" (the scores: Megatron's
    selective recomputation) and "half" (every other matmul: torchtitan's).
    """

    config: RunConfig
    # The layout.
    mesh: MeshShape = MeshShape()
    microbatch: int = 1  # sequences per batch shard
    schedule: str = "1f1b"
    chunks: int = 1
    remat: str = "none"
    offloads: bool = False  # with "full": the host keeps what layers keep
    zero: int = 0
    sequence_parallel: bool = False
    collective_matmul: bool = False  # only with sequence_parallel
    # How attention reaches keys on other devices of `context`. This framework's ways are "auto",
    # "ring", "gather" and "ulysses"; "balanced" gathers, with the tokens in zigzag order (Llama 3).
    context_attention: str = "balanced"
    moments_on_host: bool = False
    dense_over_expert: bool = False  # `expert` splits all weights, in addition to `fsdp`
    experts_over_tensor: bool = False  # `tensor` owns experts, and does not split each of them
    short_ends: int = 0  # layers that the first and the last stage each have fewer
    last_takes_rest: bool = False  # the last stage has the layers that full stages leave
    device_kind: str = ""  # jax's name of the device; "": no particular one
    # Counted on a traced model.
    trained: Trained = Trained()
    moments: float = 2  # that the optimizer keeps of each trained weight, on average
    sent_gradient_bytes: float | None = None  # as it crosses `data`; None: as the software sends it
    item_bytes: int = 0  # per weight, of other items of the state, such as its average
    second_models: tuple[SecondModel, ...] = ()
    token_numbers: int = TOKEN_NUMBERS  # of 4 bytes, for each token of a batch
    compares_logits: bool = False  # with other probabilities of each token, in float32

    @property
    def model(self) -> TransformerConfig:
        return self.config.model

    @property
    def train(self) -> TrainConfig:
        return self.config.train

    @property
    def dtype(self) -> str:
        """The dtype of the computation."""
        return self.config.precision.compute

    def with_settings(self, **sections: Mapping[str, Any] | TransformerConfig) -> "Workload":
        """Returns the workload with other settings, given as sections or as changes of sections.

        They are not checked. The layout stays the same, and so does what was counted.
        """
        changed = {
            name: getattr(self.config, name).model_copy(update=section)
            if isinstance(section, Mapping)
            else section
            for name, section in sections.items()
        }
        return replace(self, config=self.config.model_copy(update=changed))

    @property
    def scans_layers(self) -> bool:
        """True if the layers run as one loop, and are not written out."""
        scan, layers = self.train.scan_layers, self.model.layers
        return is_loop(scan, layers, self.offloads, self.mesh.sizes, self.device_kind)

    @property
    def forward_only(self) -> dict[str, "Workload"]:
        """The part of each second model as a separate run, by the term of its seconds."""
        alone = {"second_models": (), "remat": "none", "offloads": False, "zero": 0}
        frozen = Trained(share=0.0, of_matrices=0.0)
        return {
            term: replace(self.with_settings(model=model), trained=frozen, item_bytes=0, **alone)
            for term, model in self.second_models
        }

    @property
    def accumulation(self) -> int:
        """The number of microbatches per step and batch shard."""
        return self.train.global_batch // (self.microbatch * self.mesh.batch_shards)

    @property
    def context_method(self) -> str:
        """The value of `context_attention`, with "auto" resolved as a run resolves it."""
        if self.context_attention != "auto":
            return self.context_attention
        return "gather" if self.train.sequence_length % (2 * self.mesh.context) else "ring"

    @property
    def takes_ulysses(self) -> bool:
        """True if the devices of `context` divide the heads of a device that they exchange."""
        heads = self.model.exchangeable_heads.values()
        return all(count // self.mesh.tensor % self.mesh.context == 0 for count in heads)

    @property
    def stored_bytes(self) -> int:
        """The bytes of a trained weight at rest."""
        return bytes_of(self.config.precision.params)

    @property
    def frozen_bytes(self) -> int:
        """The bytes of a weight at rest that is not trained."""
        return bytes_of(self.config.precision.frozen)

    @property
    def moment_bytes(self) -> float:
        """The bytes of one moment of a weight at rest."""
        return MOMENT_BYTES[self.config.optimizer.moment_dtype] or self.stored_bytes

    @property
    def optimizer_bytes(self) -> float:
        """The bytes per weight, on the device, of the moments and of other items of the state."""
        moments = 0.0 if self.moments_on_host else self.moment_bytes * self.moments
        return moments + self.held_item_bytes

    @property
    def held_item_bytes(self) -> int:
        """The bytes per weight of the items of a state that this mesh has.

        A data shard keeps the float32 error of its compression, split like the weight.
        """
        has_feedback = self.config.compression.has_feedback and self.mesh.data > 1
        return self.item_bytes + (FEEDBACK_BYTES if has_feedback else 0)

    @property
    def data_within(self) -> int:
        """The neighbours along `data` that sum in full before others, compressed."""
        return self.config.compression.within or 1

    @property
    def data_exchanges(self) -> bool:
        """True if an all-to-all scatters compressed gradients, in place of a ring."""
        return self.config.compression.exchanges

    @property
    def replays_steps(self) -> bool:
        """True if some steps are taken twice, from a copy of the state."""
        return self.config.guard.replay_check > 0

    @property
    def tokens(self) -> int:
        """The number of tokens of one microbatch on one device."""
        return self.microbatch * self.train.sequence_length // self.mesh.context

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.train.sequence_length

    @property
    def dense_ways(self) -> int:
        """The number of parts into which `expert` splits the weights that no expert owns."""
        return self.mesh.expert if self.dense_over_expert else 1

    @property
    def dense_group(self) -> Group:
        """The devices that split and gather the weights that no expert owns."""
        fsdp = self.mesh.group("fsdp")
        if self.dense_ways == 1:
            return fsdp
        return Group(fsdp.size * self.dense_ways, self.mesh.stride("expert"))

    @property
    def exchange_group(self) -> Group:
        """The devices that own the experts of a layer, and exchange tokens."""
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

    @cached_property
    def layers_per_stage(self) -> int:
        """The number of layers of the fullest stage, including padding.

        The first dense layers of a model with experts run on every stage, and so do the blocks of
        further tokens, which count as layers.
        """
        first = self.model.experts.first_dense if self.model.experts else 0
        return self.chunks * self.layers_per_chunk + first + shape.further_tokens(self.model)

    @cached_property
    def layers_per_chunk(self) -> int:
        """The number of layers of the fullest chunk, including padding."""
        of_round = shape.layers_of_round(self.model)
        layers = self.model.stack_layers + 2 * self.short_ends
        return of_round * -(-layers // (self.mesh.pipeline * self.chunks * of_round))

    @property
    def frozen_chunks(self) -> int:
        """The chunks of a pipeline that a microbatch passes before the first trained one."""
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
        further = shape.further_tokens(self.model)
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
        divides = self.train.sequence_length // self.mesh.context % self.mesh.tensor == 0
        return self.mesh.tensor if divides else 1

    @property
    def activation_bytes(self) -> int:
        """The bytes of one microbatch's activations between two layers, [batch, time, embed]."""
        return self.tokens * self.model.embed * self.compute_bytes


BYTES = {"float32": 4, **dict.fromkeys(NARROW, 1)}  # others have 2


def bytes_of(dtype: str) -> int:
    return BYTES.get(dtype, 2)


def model_of(config: RunConfig) -> TransformerConfig:
    """Returns the model whose sizes determine the costs.

    A custom model has no [model.experts] here, since it uses these settings as it likes.
    """
    own = config.model.make is not None
    return config.model.model_copy(update={"experts": None}) if own else config.model


def workload_of(
    config: RunConfig, mesh_sizes: Mapping[str, int], device_kind: str = ""
) -> Workload:
    """Returns the workload of a run. No size may be -1, and `model.vocab` must be set."""
    mesh = MeshShape(**mesh_sizes)
    train = config.train
    pipelined = mesh.pipeline > 1
    stream_axes = config.rules.activations.get("stream_time", ())
    sequence_parallel = "tensor" in stream_axes and mesh.tensor > 1
    logits = saved_for(config)
    return Workload(
        config=config.model_copy(update={"model": model_of(config)}),
        mesh=mesh,
        microbatch=train.microbatch or train.global_batch // mesh.batch_shards,
        schedule=config.pipeline.schedule if pipelined else "1f1b",
        chunks=config.pipeline.chunks if pipelined else 1,
        remat="full" if train.remat == "offload" else train.remat,
        offloads=train.remat == "offload",
        zero=train.zero,
        sequence_parallel=sequence_parallel,
        collective_matmul=sequence_parallel and config.mesh.collective_matmul,
        context_attention=_context_attention(config),
        moments_on_host=config.optimizer.memory == "host",
        dense_over_expert="expert" in config.rules.parameters.get("embed", ()),
        experts_over_tensor="tensor" in config.rules.parameters.get("experts", ()),
        device_kind=device_kind,
        trained=trained_part(config),
        moments=config.optimizer.moments,
        sent_gradient_bytes=_sent_gradient_bytes(config),
        item_bytes=_item_bytes(config),
        second_models=_second_models(config),
        token_numbers=TOKEN_NUMBERS + (0 if logits is None else logits.token_numbers),
        compares_logits=logits is not None,
    )


def _second_models(config: RunConfig) -> tuple[SecondModel, ...]:
    by_term = {term: settings_of(config) for term, settings_of in SECOND_MODELS.items()}
    return tuple(
        SecondModel(term, model_of(settings))
        for term, settings in by_term.items()
        if settings is not None
    )


def may_move(config: RunConfig) -> bool:
    """Returns True if the settings could ask for moments on the host."""
    optimizer = config.optimizer
    return optimizer.by_element and optimizer.moment_dtype != "8bit" and not config.own.optimizer


def _sent_gradient_bytes(config: RunConfig) -> float | None:
    """Returns the bytes of a compressed gradient element, treating all weights as matrices."""
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
    """Returns the mean bytes of a gradient element, as factors or in float32.

    Only the built model has the paths that `compression.ranks` matches.
    """
    from spmdtrain.models.abstract import build_model
    from spmdtrain.models.choose import choose_model
    from spmdtrain.parallel.feedback.low_rank import LowRank
    from spmdtrain.train.compression.feedback_codecs import feedback_codecs

    model = build_model(*choose_model(config))
    codecs = feedback_codecs(config, model, {"data": 2})
    trained = {path: weight for path, weight in model.parameters.items() if weight.is_trained}
    numbers = 0
    for path, weight in trained.items():
        codec = codecs.get(path)
        numbers += codec.numbers(weight.shape) if isinstance(codec, LowRank) else weight.size
    return 4 * numbers / sum(weight.size for weight in trained.values())


def _context_attention(config: RunConfig) -> str:
    """Returns the method of attention over `context`; a custom model is assumed to gather."""
    way = config.model.context_attention
    return "gather" if way == "auto" and config.model.make else way


def _item_bytes(config: RunConfig) -> int:
    """Returns the bytes of the state's items for an element of a matrix, on any mesh."""
    import jax
    from jax.sharding import PartitionSpec

    from spmdtrain.parallel.mesh import AXES
    from spmdtrain.train.all_parts import items_of, parts_of
    from spmdtrain.train.items.item import Start, as_parameters

    weight: dict[str, Any] = {"weight": jax.ShapeDtypeStruct((1,), config.precision.params)}
    where = {"weight": PartitionSpec()}
    items = items_of(parts_of(config))
    about = [item for item in items.table if item.subjects and item.rests is as_parameters]
    subjects = {item.name: weight for item in about}
    start = Start(config, weight, weight, where, dict.fromkeys(AXES, 1), subjects)
    of_weight = [tree["weight"] for tree in items.by_parameter(items.shapes(start))]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(of_weight))
