"""The settings of a decoder-only transformer, and the families that preset them."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from spmdtrain.config.schema.model.both import BothConfig
from spmdtrain.config.schema.model.conv import ConvConfig
from spmdtrain.config.schema.model.delta import DeltaConfig
from spmdtrain.config.schema.model.experts import ExpertsConfig
from spmdtrain.config.schema.model.full import FullConfig, of_layer
from spmdtrain.config.schema.model.indexer import IndexerConfig
from spmdtrain.config.schema.model.latent import LatentConfig
from spmdtrain.config.schema.model.layer_kinds import (
    BLOCKS,
    LayerKind,
    LayerMlp,
    LayerParts,
    LayerStack,
    Mixer,
    repeated,
    singles_of,
    stacks_of,
)
from spmdtrain.config.schema.model.multi_token import MultiTokenConfig
from spmdtrain.config.schema.model.rope_scaling import RopeScaling, check_rope, refuse_rope
from spmdtrain.config.schema.model.ssd import SsdConfig
from spmdtrain.config.schema.model.temperature import TemperatureConfig
from spmdtrain.config.schema.model.token_layers import TokenLayersConfig
from spmdtrain.config.settings import (
    Count,
    CountOrZero,
    Derived,
    Fraction,
    NonNegative,
    Positive,
    Settings,
    Share,
)

Attention = Literal["auto", "xla", "triton", "mosaic", "cudnn"]
ContextAttention = Literal["auto", "ring", "gather", "ulysses"]
MlpKind = Literal["gelu", "gelu_exact", "relu2", "xielu", "swiglu", "geglu", "swiglu_clamped"]
GATED = ("swiglu", "geglu", "swiglu_clamped")
NormPlaces = Literal["before", "after", "both", "parallel"]
# Patterns of values that repeat over the layers; TOML has lists only.
Windows = Annotated[tuple[CountOrZero, ...], Field(strict=False)]
Switches = Annotated[tuple[bool, ...], Field(strict=False)]
Mixers = Annotated[tuple[Mixer, ...], Field(strict=False)]
Mlps = Annotated[tuple[LayerMlp, ...], Field(strict=False)]


class TransformerConfig(Settings):
    """A decoder-only transformer.

    `name` picks a family, which is a set of defaults; every field may be set in any family.
    """

    of_no_array: ClassVar = (
        *("dropout", "attention", "context_attention", "windows", "chunks"),
        *("norm_epsilon", "norm_offset", "mup_base"),
        *("rope_theta", "rope_theta_window", "rope_layers", "rope_share"),
        *("value_norm", "mlp_gate_factor", "mlp_out_factor"),
        *("score_scale", "score_cap", "embed_scale"),
        *("residual_scale", "logit_scale", "logit_cap"),
    )

    # The settings of how attention is computed, which change no output.
    of_placement: ClassVar = ("attention", "context_attention")

    layers: Count = 4
    embed: Count = Field(default=128, description="width of the residual stream")
    heads: Count = Field(default=4, description="query heads")
    kv_heads: Derived[Count] = Field(
        default=None, description="key and value heads (GQA); default: heads"
    )
    head_dim: Derived[Count] = Field(default=None, description="default: embed / heads")
    ffn: Derived[Count] = Field(
        default=None, description="hidden width of the mlp; default: 4 embed, if gated 8/3 embed"
    )
    vocab: Count | None = Field(
        default=None, description="rows of the embedding; default: the vocabulary of the tokenizer"
    )
    max_length: Derived[Count] = Field(
        default=None, description="longest sequence; default: train.sequence_length"
    )
    positions: Literal["learned", "rope"]
    norm: Literal["layernorm", "rmsnorm"]
    mlp: MlpKind = Field(
        description="gelu in its tanh form, or exact; relu2 is the square of ReLU; xielu has two "
        "learned slopes a layer (arXiv:2411.13010); swiglu and geglu (tanh) have a gate; "
        "swiglu_clamped is that of gpt-oss"
    )
    bias: bool = Field(description="biases in linear layers and layernorm")
    qkv_bias: Derived[bool] = Field(
        default=None, description="biases of queries, keys and values; default: bias"
    )
    out_bias: Derived[bool] = Field(
        default=None, description="bias of attention's projection back to the stream; default: bias"
    )
    mlp_bias: Derived[bool] = Field(default=None, description="biases of the mlp; default: bias")
    mlp_gate_factor: Positive = Field(
        default=1.0, description="factor of the mlp's gate, before its activation"
    )
    mlp_out_factor: Positive = Field(default=1.0, description="factor of the mlp's output")
    tied: bool = Field(description="one matrix for embedding and head")
    dropout: Fraction = 0.0
    attention: Attention = Field(
        default="auto",
        description="implementation of attention; auto: cuDNN if it supports the call, then our "
        "kernels for the GPU, then XLA; a named one never falls back",
    )
    context_attention: ContextAttention = Field(
        default="auto",
        description="how attention reaches the keys of other devices where mesh.context splits a "
        "sequence: ring sends them round, gather copies all of them, ulysses exchanges heads for "
        "tokens; auto: ring if attention is causal and train.sequence_length is a multiple of "
        "2 context, else gather",
    )
    rope_theta: Positive = 10_000.0
    rope_theta_window: Positive | None = Field(
        default=None,
        description="rope_theta of the layers with a window, which are then not scaled; default: "
        "rope_theta, with rope_scaling in all layers",
    )
    rope_layers: Switches = Field(
        default=(),
        description="which layers have rotary positions; repeats over the layers; default: all",
    )
    rope_share: Share = Field(
        default=1.0, description="share of a head's channels that are rotated, the first ones"
    )
    rope_scaling: RopeScaling | None = Field(
        default=None,
        description="the table [model.rope_scaling]; default: positions are not scaled",
    )
    windows: Windows = Field(
        default=(),
        description="tokens that attention sees, itself among them, 0 for all; "
        "repeats over the layers; default: all",
    )
    chunks: Windows = Field(
        default=(),
        description="tokens of a block of positions, from the start of a document, which attention "
        "does not leave, 0 for no blocks; repeats over the layers; default: none",
    )
    score_scale: Positive | None = Field(
        default=None, description="factor of attention's scores; default: head_dim ** -0.5"
    )
    score_cap: Positive | None = Field(
        default=None, description="a score x becomes cap * tanh(x / cap)"
    )
    sinks: bool = Field(
        default=False,
        description="a learned logit per head that takes part in attention's softmax, "
        "and has no value",
    )
    query_norm: Literal["none", "head", "all", "after"] = Field(
        default="none",
        description="RMSNorm of queries and keys before rope: of each head, or of all heads at "
        "once; after: of each head behind rope, without weights, in layers with rope",
    )
    value_norm: bool = Field(
        default=False, description="RMSNorm of the values of each head, without weights"
    )
    output_gate: Literal["none", "channel", "head"] = Field(
        default="none",
        description="sigmoid of a further projection of attention's input, which multiplies its "
        "output before the projection back to the stream: one for each channel, or for each head",
    )
    mixers: Mixers = Field(
        default=(),
        description="what mixes the tokens of a layer: attention, or in linear time delta, ssd or "
        "conv (the tables [model.delta], [model.ssd], [model.conv]); both: the sum of attention "
        "and ssd, which read one normed input; none: the layer is its mlp alone; repeats over the "
        "layers; default: attention",
    )
    mlps: Mlps = Field(
        default=(),
        description="what follows the mixer of a layer: mlp, experts (the table [model.experts]), "
        "or none: the layer is its mixer alone; repeats over the layers; default: mlp, and with "
        "experts what model.experts.first_dense and model.experts.every say",
    )
    full: FullConfig | None = Field(
        default=None,
        description="the table [model.full]: heads of layers without a window; default: as others",
    )
    shared_keys: CountOrZero = Field(
        default=0,
        description="last layers without keys and values: each reads those of the last layer "
        "before them that has a window, if it has one itself, or that has none",
    )
    shared_ffn: Count | None = Field(
        default=None,
        description="hidden width of the mlps of those layers, or of their shared experts; "
        "default: that of the others",
    )
    idle_keys: bool = Field(
        default=False,
        description="those layers hold projections to keys and values of their own all the same, "
        "which nothing reads and no training changes: some files have them, and some readers ask "
        "for them",
    )
    token_layers: TokenLayersConfig | None = Field(
        default=None,
        description="the table [model.token_layers]: an embedding of each token for each layer; "
        "default: none",
    )
    latent: LatentConfig | None = Field(
        default=None,
        description="the table [model.latent]: keys and values of all heads from a narrow latent; "
        "default: none",
    )
    indexer: IndexerConfig | None = Field(
        default=None,
        description="the table [model.indexer]: indexers of sparse attention, which are kept and "
        "not run; default: none",
    )
    delta: DeltaConfig | None = Field(
        default=None,
        description="the table [model.delta]: the gated delta rule in place of attention; "
        "default: none",
    )
    ssd: SsdConfig | None = Field(
        default=None,
        description="the table [model.ssd]: the state space of Mamba-2 in place of attention; "
        "default: none",
    )
    conv: ConvConfig | None = Field(
        default=None,
        description="the table [model.conv]: a short convolution in place of attention; "
        "default: none",
    )
    both: BothConfig | None = Field(
        default=None,
        description="the table [model.both]: factors of attention in layers that also have a state "
        "space; default: none",
    )
    temperature: TemperatureConfig | None = Field(
        default=None,
        description="the table [model.temperature]: queries grow with their position; default: "
        "none",
    )
    norm_epsilon: Positive = 1e-5
    norm_places: NormPlaces = Field(
        default="before",
        description="where the norms of attention and mlp stand: on their input or output; "
        "parallel: both read one norm of the stream, side by side (GPT-J, Command R)",
    )
    norm_offset: NonNegative = Field(
        default=0.0, description="added to the scale of every RMSNorm: the weight is scale - offset"
    )
    embed_scale: Literal["sqrt"] | Positive = Field(
        default=1.0, description="factor of the embedding's output; sqrt: the square root of embed"
    )
    residual_scale: Positive = Field(
        default=1.0, description="factor of what attention and mlp add to the stream"
    )
    layer_scale: bool = Field(
        default=False,
        description="each layer multiplies the stream by a number of its own, which is not trained",
    )
    logit_scale: Positive = Field(default=1.0, description="multiplies the logits")
    logit_cap: Positive | None = Field(
        default=None, description="a logit x, scaled, becomes cap * tanh(x / cap)"
    )
    experts: ExpertsConfig | None = Field(
        default=None,
        description="the table [model.experts]: experts in place of the mlp; default: none",
    )
    multi_token: MultiTokenConfig | None = Field(
        default=None,
        description="the table [model.multi_token]: training also predicts tokens after the next "
        "one; default: none",
    )
    mup_base: Count | None = Field(
        default=None,
        description="embed of the narrower base model whose learning rate carries over to this "
        "one, by muP (arXiv:2203.03466); if heads grow in number and not in size, "
        "set head_dim; default: no muP",
    )
    make: str | None = Field(
        default=None,
        description="a custom model in place of the shipped one: "
        "FILE.py:CLASS or package.module:CLASS",
    )
    extra: dict[str, Any] = Field(
        default={}, description="settings of that model, checked against the types in its class"
    )

    def __hash__(self) -> int:
        # `extra` is a table, which has no hash. Costs look up parts of one model, and of models of
        # other lengths, side by side: equal hashes would have them compared field by field.
        sizes = self.layers, self.embed, self.heads, self.ffn, self.vocab, self.max_length
        return hash((*sizes, self.mixers, self.mlps, self.experts))

    def derived(self) -> dict[str, Any]:
        """Returns sizes and biases; `max_length` follows from another section, see RunConfig."""
        latent = self.latent
        ffn = -(-8 * self.embed // 3 // 64) * 64 if self.is_gated else 4 * self.embed
        of_expert = self.ffn if self.is_given("ffn") and self.ffn else ffn
        return {
            "kv_heads": self.heads,
            "head_dim": latent.plain_dim + latent.rope_dim if latent else self.embed // self.heads,
            "ffn": ffn,
            "qkv_bias": self.bias,
            "out_bias": self.bias,
            "mlp_bias": self.bias,
            "experts": self.experts and self.experts.with_derived(ffn=of_expert),
            "rope_scaling": self.rope_scaling and self.rope_scaling.for_length(self.max_length),
        }

    def affecting_numbers(self) -> dict[str, Any]:
        return {"dropout": self.dropout}

    @model_validator(mode="after")
    def _check(self):
        if self.latent:
            self._check_latent()
        elif not self.is_given("head_dim") and self.embed % self.heads:
            raise ValueError(
                f"model.embed={self.embed} is not divisible by model.heads={self.heads}; "
                "set model.head_dim"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}"
            )
        if self.norm_offset and self.norm != "rmsnorm":
            raise ValueError(
                f"model.norm_offset={self.norm_offset:g} only applies to RMSNorm; set "
                "model.norm='rmsnorm'"
            )
        if self.mlp_gate_factor != 1 and not self.is_gated:
            raise ValueError(
                f"model.mlp_gate_factor={self.mlp_gate_factor:g} is of a gate, which "
                f"model.mlp={self.mlp!r} does not have; set model.mlp='swiglu'"
            )
        if self.positions == "rope":
            check_rope(self)
        else:
            refuse_rope(self)
        if self.experts:
            self.experts.check_layers(self)
        self._check_mlps()
        self._check_mixers()
        if self.indexer:
            self._check_indexer(self.indexer)
        if self.full:
            self._check_full(self.full)
        if self.shared_keys:
            self._check_shared_keys()
        else:
            for name in ("shared_ffn", "idle_keys"):
                if getattr(self, name):
                    what = f"model.{name} is of layers that share keys; set model.shared_keys"
                    raise ValueError(what)
        if self.token_layers:
            self._check_token_layers(self.token_layers)
        for number, kind in enumerate(self.layer_kinds if any(self.chunks) else ()):
            if kind.window and kind.chunk:
                raise ValueError(
                    f"layer {number} has a window of {kind.window} and blocks of {kind.chunk}; set "
                    "model.windows or model.chunks to 0 there"
                )
        if self.query_norm == "after" and self.positions != "rope":
            raise ValueError("model.query_norm='after' needs model.positions='rope'")
        temperature = self.temperature
        if temperature and temperature.layers == "no_rope" and self._has_rope_everywhere:
            raise ValueError(
                "model.temperature.layers='no_rope' only applies to layers without rotary "
                "positions, and all have them; set model.temperature.layers='all'"
            )
        return self

    def _check_latent(self) -> None:
        """Refuses settings of queries, keys and values that latent attention does not read."""
        if self.positions != "rope":
            raise ValueError("model.latent needs model.positions='rope'")
        if self.qkv_bias:
            raise ValueError(
                "model.latent has no biases of queries, keys and values; set model.qkv_bias=false"
            )
        if self.kv_heads != self.heads:
            raise ValueError(
                f"model.kv_heads={self.kv_heads}: model.latent computes keys and values for each "
                f"of model.heads={self.heads}; leave model.kv_heads out"
            )
        for name in ("head_dim", "query_norm", "output_gate", "rope_share", "mup_base"):
            default = type(self).model_fields[name].default
            if self.is_given(name) and getattr(self, name) != default:
                raise ValueError(
                    f"model.{name}={getattr(self, name)!r} has no meaning with model.latent; "
                    "leave it out"
                )

    def _check_shared_keys(self) -> None:
        """Refuses layers that would share keys of no layer, and what they do not go with."""
        first = self.layers - self.shared_keys
        kinds = [kind.window > 0 for kind in self.layer_kinds]
        if first < 1 or set(kinds[first:]) - set(kinds[:first]):
            raise ValueError(
                f"model.shared_keys={self.shared_keys} leaves no layer of each kind before them, "
                "with a window and without; set it lower"
            )
        if self.query_norm == "all" or self.output_gate != "none" or self.sinks:
            raise ValueError(
                "model.shared_keys does not go with model.query_norm='all', model.output_gate and "
                "model.sinks; leave them out"
            )
        for name in ("latent", "mixers", "mlps", "mup_base", "multi_token"):
            if getattr(self, name):
                raise ValueError(f"model.shared_keys does not go with model.{name}; leave one out")
        if self.experts and (self.experts.first_dense or self.experts.every > 1):
            raise ValueError(
                "model.shared_keys needs experts in all layers or in none; leave "
                "model.experts.first_dense and model.experts.every out"
            )

    def _check_token_layers(self, token_layers: TokenLayersConfig) -> None:
        """Refuses what embeddings of layers do not go with."""
        if self.mlp not in ("geglu", "swiglu"):
            raise ValueError(
                f"model.mlp={self.mlp!r}: [model.token_layers] takes the activation of its gate; "
                "set model.mlp='geglu' or 'swiglu'"
            )
        if self.stack_layers < self.layers or self.multi_token or self.mup_base:
            raise ValueError(
                "[model.token_layers] does not go with model.experts.first_dense, "
                "model.multi_token and model.mup_base; leave it out"
            )
        if (token_layers.vocab or self.vocab or 0) < (self.vocab or 0):
            raise ValueError(
                f"model.token_layers.vocab={token_layers.vocab} is less than "
                f"model.vocab={self.vocab}"
            )

    def _check_full(self, full: FullConfig) -> None:
        """Refuses sizes of heads that do not fit together, and settings that know one size."""
        kv_heads = full.kv_heads or self.kv_heads
        if self.heads % kv_heads:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.full.kv_heads={kv_heads}"
            )
        if (full.head_dim or 2) % 2:
            raise ValueError(
                f"model.full.head_dim={full.head_dim}: rope rotates pairs, so it must be even"
            )
        if not self.full_layers:
            raise ValueError(
                "[model.full] is read by no layer: all have a window; set model.windows with a 0"
            )
        for name in ("latent", "mixers", "mup_base", "multi_token"):
            if getattr(self, name):
                raise ValueError(f"[model.full] does not go with model.{name}; leave one out")

    def _check_mixers(self) -> None:
        """Refuses a mixer without its table, and a table that no layer reads."""
        for mixer in ("delta", "ssd", "conv"):
            names = (mixer, "both") if mixer == "ssd" else (mixer,)
            if readers := [name for name in self.mixers if name in names]:
                if getattr(self, mixer) is None:
                    raise ValueError(
                        f"model.mixers has {readers[0]!r}, which needs the table [model.{mixer}]"
                    )
            elif getattr(self, mixer):
                raise ValueError(
                    f"[model.{mixer}] is read by no layer; set "
                    f"model.mixers=['{mixer}', 'attention']"
                )
        if self.both and "both" not in self.mixers:
            raise ValueError("[model.both] is read by no layer; set model.mixers=['both']")

    def _check_mlps(self) -> None:
        """Refuses experts that the pattern of mlps does not name, and layers of no part."""
        if "experts" in self.mlps and self.experts is None:
            raise ValueError("model.mlps has 'experts', which needs the table [model.experts]")
        if self.mlps and self.experts:
            for name, default in (("first_dense", 0), ("every", 1)):
                if getattr(self.experts, name) != default:
                    raise ValueError(
                        f"model.experts.{name} and model.mlps both say which layers have experts; "
                        f"leave model.experts.{name} out"
                    )
            if "experts" not in self.layer_mlps:
                raise ValueError(
                    "[model.experts] is read by no layer; set model.mlps=['experts', 'mlp']"
                )
        for number, layer in enumerate(self.layer_parts):
            if not layer.parts:
                raise ValueError(
                    f"layer {number} has neither a mixer nor an mlp: model.mixers and model.mlps "
                    "are both 'none' there"
                )

    def _check_indexer(self, indexer: IndexerConfig) -> None:
        """Refuses indexers of other attention, and sequences for which they would choose."""
        if self.latent is None or not self.latent.query_rank:
            raise ValueError(
                "model.indexer reads the latent of queries; set model.latent.query_rank"
            )
        if self.max_length is not None and self.max_length > indexer.kept:
            raise ValueError(
                f"model.max_length={self.max_length}: attention would read only the "
                f"model.indexer.kept={indexer.kept} tokens that an indexer chooses, and indexers "
                f"are not run; set model.max_length={indexer.kept}"
            )

    @property
    def indexer_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with an indexer, and of all blocks after the last layer."""
        if self.indexer is None:
            return ()
        depth = self.multi_token.depth if self.multi_token else 0
        has_indexer = repeated(self.indexer.layers or (True,), self.layers)
        chosen = [number for number, has in enumerate(has_indexer) if has]
        return (*chosen, *range(self.layers, self.layers + depth))

    @property
    def most_tokens(self) -> int | None:
        """The tokens of a sequence beyond which the model is another one; None: there are none."""
        if self.indexer:
            return self.indexer.kept
        return self.max_length if self.positions == "learned" else None

    @property
    def split_heads(self) -> tuple[int, ...]:
        """The numbers of heads, or channels, that `tensor` splits, of each mixer."""
        heads = {"attention": self.kv_heads, "conv": self.embed}
        if self.delta:
            heads["delta"] = self.delta.key_heads
        if self.ssd:
            heads["ssd"] = self.ssd.groups if self.ssd.groups > 1 else self.ssd.heads
        of_full = (self.full.kv_heads or self.kv_heads,) if self.full else ()
        return tuple(heads[mixer] for mixer in self.single_mixers) + of_full

    @property
    def has_jumps(self) -> bool:
        """True if a router leaves experts out: where it chooses others, the loss jumps."""
        return self.experts is not None and self.experts.chosen < self.experts.count

    @property
    def expert_width(self) -> int:
        """The width of what experts read and return: by default that of the stream."""
        return (self.experts.width if self.experts else None) or self.embed

    @property
    def value_width(self) -> int:
        """The channels of a head's values."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def exchangeable_heads(self) -> dict[str, int]:
        """The numbers of heads that may be exchanged for tokens, by setting."""
        heads = {"model.kv_heads": self.kv_heads} if "attention" in self.single_mixers else {}
        if self.full and self.full.kv_heads:
            heads["model.full.kv_heads"] = self.full.kv_heads
        if self.delta:
            heads["model.delta.key_heads"] = self.delta.key_heads
        if self.ssd:
            name = "heads" if self.ssd.groups == 1 else "groups"
            heads[f"model.ssd.{name}"] = getattr(self.ssd, name)
        if self.conv:
            heads["model.embed"] = self.embed
        return heads

    @property
    def cached(self) -> tuple[int, int, int]:
        """The entry of one token in one layer's cache: heads, and the widths of keys and values.

        Latent attention caches the rotated channels and the latent, once for all heads.
        """
        if self.latent:
            return 1, self.latent.rope_dim, self.latent.rank
        return self.kv_heads, self.head_dim, self.value_width

    @property
    def layer_mixers(self) -> tuple[Mixer, ...]:
        """The mixer of tokens of each layer, in order."""
        return tuple(repeated(self.mixers or ("attention",), self.layers))

    def norm_places_of(self, mixer: Mixer) -> NormPlaces:
        """Returns where the norms of the layers with a mixer stand."""
        own = self.delta.norm_places if self.delta and mixer == "delta" else None
        return own or self.norm_places

    @property
    def single_mixers(self) -> tuple[Mixer, ...]:
        """The mixers that the layers have, in order of appearance, of "both" its two."""
        singles = (singles_of(mixer) for mixer in self.layer_mixers)
        return tuple(dict.fromkeys(mixer for mixers in singles for mixer in mixers))

    @property
    def layer_mlps(self) -> tuple[LayerMlp, ...]:
        """The mlp of each layer, in order."""
        if self.mlps or self.experts is None:
            return tuple(repeated(self.mlps or ("mlp",), self.layers))
        first, every = self.experts.first_dense, self.experts.every
        numbers = range(1 - first, self.layers + 1 - first)
        mlps: list[LayerMlp] = [
            "experts" if number > 0 and number % every == 0 else "mlp" for number in numbers
        ]
        return tuple(mlps)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The numbers of the layers whose attention is that of [model.full]."""
        if self.full is None:
            return ()
        windows = repeated(self.windows or (0,), self.layers)
        return tuple(number for number, window in enumerate(windows) if not window)

    @property
    def layer_parts(self) -> tuple[LayerParts, ...]:
        """The parts of each layer, in order."""
        full = self.full_layers
        numbers = range(self.layers)
        are_full = (number in full for number in numbers)
        share = (number >= self.layers - self.shared_keys for number in numbers)
        return tuple(map(LayerParts, self.layer_mixers, self.layer_mlps, are_full, share))

    @property
    def further_parts(self) -> LayerParts:
        """The parts of a block that predicts a further token: attention, and the last mlp that a
        layer has.
        """
        mlps: list[LayerMlp] = [mlp for mlp in self.layer_mlps if mlp != "none"]
        last: LayerMlp = mlps[-1] if mlps else "mlp"
        return LayerParts("attention", last, self.layers - 1 in self.full_layers)

    def of_layer(self, layer: LayerParts) -> Self:
        """Returns the settings of a layer: of a model whose layers all have such attention, norms
        at its places, and an mlp or shared experts of its width.
        """
        settings = of_layer(self, layer) if self.full or self.shared_keys else self
        if self.experts and layer.shares_keys and self.shared_ffn:
            experts = self.experts.model_copy(update={"shared_ffn": self.shared_ffn})
            settings = settings.model_copy(update={"experts": experts})
        places = self.norm_places_of(layer.mixer)
        if places == self.norm_places:
            return settings
        return settings.model_copy(update={"norm_places": places})

    @property
    def stacks(self) -> tuple[LayerStack, ...]:
        """The stacks of layers, one after another: of the first dense ones, and of the others."""
        if self.shared_keys:  # whose layers are one round, written out
            return (LayerStack(BLOCKS, 0, self.layer_parts, 1),)
        return stacks_of(self.layer_parts, self.layers - self.stack_layers)

    @property
    def stack_layers(self) -> int:
        """The layers that a pipeline shares out: all but the first dense ones."""
        return self.layers - (self.experts.first_dense if self.experts else 0)

    @property
    def further_depth(self) -> int:
        """The number of blocks after the last layer that training runs."""
        further = self.multi_token
        return further.depth if further and not further.frozen else 0

    @property
    def has_frozen_further(self) -> bool:
        """True if training keeps the blocks after the last layer as they are."""
        return self.multi_token is not None and self.multi_token.frozen

    @property
    def is_gated(self) -> bool:
        """True if the mlp multiplies its values by a gate: its first projection has two parts."""
        return self.mlp in GATED

    @property
    def rope_dim(self) -> int:
        """The number of channels of one head that are rotated by the position of their token.

        They are the first channels, and in latent attention the last.
        """
        if self.latent:
            return self.latent.rope_dim
        return int(self.head_dim * self.rope_share)

    @property
    def embed_factor(self) -> float:
        """The factor of the embedding: `embed_scale` as a number, with `mup_base` that of the base
        model.
        """
        if self.embed_scale == "sqrt":
            return (self.mup_base or self.embed) ** 0.5
        return self.embed_scale

    # Multipliers of muP, of Table 8 of arXiv:2203.03466.

    @property
    def width_factor(self) -> float:
        """The width of the model over that of `mup_base`; 1 without it."""
        return self.embed / self.mup_base if self.mup_base else 1.0

    @property
    def logit_factor(self) -> float:
        """The factor of the logits: `logit_scale`, divided by the width factor."""
        return self.logit_scale / self.width_factor

    @property
    def score_factor(self) -> float | None:
        """The factor of attention's scores; None: head_dim ** -0.5.

        If `head_dim` is not set, heads grow with the width, and the factor falls as 1 / head_dim
        from that of the base: queries and keys become correlated, so their products grow with
        head_dim.
        """
        if self.width_factor == 1 or self.is_given("head_dim"):
            return self.score_scale
        of_base = self.score_scale or (self.head_dim / self.width_factor) ** -0.5
        return of_base / self.width_factor

    @property
    def _has_rope_everywhere(self) -> bool:
        return all(kind.rope_theta is not None for kind in self.layer_kinds)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, in order."""
        turns = self.positions == "rope"
        windows = repeated(self.windows or (0,), self.layers)
        has_rope = repeated(self.rope_layers or (True,), self.layers)
        chunks = repeated(self.chunks or (0,), self.layers)
        kinds = []
        for window, rope, chunk in zip(windows, has_rope, chunks, strict=True):
            own_theta = self.rope_theta_window if window else None
            theta = own_theta or self.rope_theta
            is_scaled = bool(turns and rope and self.rope_scaling and own_theta is None)
            kinds.append(LayerKind(window, theta if turns and rope else None, is_scaled, chunk))
        return tuple(kinds)


class GPT(TransformerConfig):
    """The GPT-2 family: learned positions, layernorm, gelu, biases, tied head."""

    name: Literal["gpt"] = "gpt"
    positions: Literal["learned", "rope"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    mlp: MlpKind = "gelu"
    bias: bool = True
    tied: bool = True


class Llama(TransformerConfig):
    """The Llama family: rotary positions, RMSNorm, SwiGLU, no biases, untied head."""

    name: Literal["llama"] = "llama"
    positions: Literal["learned", "rope"] = "rope"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    mlp: MlpKind = "swiglu"
    bias: bool = False
    tied: bool = False


def refusals_of_indexers(run: Any) -> Iterator[str]:
    """Yields a refusal of sequences that indexers would have to choose from."""
    if run.model.indexer:
        yield from run.model.indexer.refusals_of_length(run.train.sequence_length)


def refusals_of_pipelines(run: Any) -> Iterator[str]:
    """Yields what a pipeline does not hand on from layer to layer."""
    if run.model.token_layers and run.mesh.pipeline != 1:
        yield (
            f"mesh.pipeline={run.mesh.pipeline} does not go with [model.token_layers]: a "
            "pipeline does not hand on the embedding; set mesh.pipeline=1"
        )
    if run.model.shared_keys and run.mesh.pipeline != 1:
        yield (
            f"mesh.pipeline={run.mesh.pipeline} does not go with model.shared_keys: a pipeline "
            "hands on no keys and values; set mesh.pipeline=1"
        )
