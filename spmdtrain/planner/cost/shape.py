"""Computes the sizes of a decoder-only transformer from its settings, for costs.

Costs read single settings directly; the sizes here depend on several.
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from spmdtrain.config.schema import LatentConfig, TransformerConfig
from spmdtrain.config.schema.model.layer_kinds import LayerMlp, LayerParts, singles_of
from spmdtrain.models.mixer_sizes import MixerSizes, mixer_sizes
from spmdtrain.models.size import seen_pairs


def vocab(model: TransformerConfig) -> int:
    """Returns the rows of the embedding, which must be known: `planner.estimate.with_vocab`."""
    assert model.vocab is not None, "a model with a vocabulary"
    return model.vocab


def position_rows(model: TransformerConfig) -> int:
    """Returns the rows of a learned table of positions."""
    return model.max_length if model.positions == "learned" else 0


def further_tokens(model: TransformerConfig) -> int:
    """Counts the blocks after the last layer that learn further tokens."""
    return model.further_depth


def down_width(latent: LatentConfig) -> int:
    """Returns the width of the stream's projection to latents, which no axis of heads splits."""
    return (latent.query_rank or 0) + latent.rank + latent.rope_dim


@lru_cache(maxsize=1000)
def linear_mixer(model: TransformerConfig) -> MixerSizes | None:
    """Returns the sizes of what mixes tokens in the layers of a model, all alike; None: attention
    does.
    """
    (mixer,) = set(model.layer_mixers)
    return mixer_sizes(model, mixer)


def attention_width(model: TransformerConfig) -> int:
    """Returns the width of what is projected back to the stream: the output of attention, which
    queries have too if there is no latent, or of another mixer.
    """
    if mixer := linear_mixer(model):
        return mixer.width
    return model.heads * model.value_width


def mean_dim(model: TransformerConfig) -> float:
    """Returns the mean of the channels of a key and a value, which attention's FLOPs follow."""
    return (model.head_dim + model.value_width) / 2


def gate_width(model: TransformerConfig) -> int:
    """Returns the width of the output gates that are projected together with queries."""
    return attention_width(model) if model.output_gate == "channel" else 0


def qkv_width(model: TransformerConfig) -> int:
    """Returns the width of queries and their gates, keys and values together."""
    if mixer := linear_mixer(model):
        return mixer.mixed
    keys_and_values = model.kv_heads * (model.head_dim + projected_values(model))
    if model.shared_keys:
        keys_and_values = 0
    return model.heads * model.head_dim + gate_width(model) + keys_and_values


def projected_values(model: TransformerConfig) -> int:
    """Returns the channels of a head's values; 0 if they are its projected keys."""
    return 0 if model.full and model.full.keys_are_values else model.value_width


def qkv_matmuls(model: TransformerConfig) -> tuple[tuple[int, int, bool], ...]:
    """Returns the matrices that compute q, k and v, each as (columns, rows, is split by heads)."""
    if mixer := linear_mixer(model):
        return mixer.matmuls
    if model.latent is None:
        of_gates = ((model.heads, model.embed, True),) if model.output_gate == "head" else ()
        return ((qkv_width(model), model.embed, True), *of_gates)
    latent = model.latent
    keys = model.heads * (latent.plain_dim + latent.value_dim)
    return (
        (down_width(latent), model.embed, False),
        (model.heads * model.head_dim, latent.query_rank or model.embed, True),
        (keys, latent.rank, True),
    )


def qkv_columns(model: TransformerConfig) -> tuple[int, int]:
    """Counts the columns of the matrices that compute q, k and v: (split by heads, whole)."""
    of_heads = sum(columns for columns, _, splits in qkv_matmuls(model) if splits)
    return of_heads, sum(columns for columns, _, splits in qkv_matmuls(model) if not splits)


@lru_cache(maxsize=1000)
def whole_matrices(model: TransformerConfig) -> float:
    """Counts the elements of a layer's matrices that `tensor` does not split."""

    def of_layer(alike: TransformerConfig) -> int:
        return sum(columns * rows for columns, rows, splits in qkv_matmuls(alike) if not splits)

    return mean_of_mixers(model, of_layer)


def cached_width(model: TransformerConfig) -> int:
    """Counts the numbers that a layer's cache holds for a token."""
    if linear_mixer(model) or model.shared_keys:
        return 0
    if model.latent:
        return model.latent.rank + model.latent.rope_dim
    return 2 * model.kv_heads * model.head_dim


def state_bytes(model: TransformerConfig) -> int:
    """Counts the bytes that a layer's cache holds for a sequence, whatever its length: the state of
    each head, and the last inputs of the convolution, in float32.
    """
    mixer = linear_mixer(model)
    return mixer.state_bytes if mixer else 0


def up_width(model: TransformerConfig) -> int:
    """Returns the output width of the MLP's up projection."""
    matrices = 2 if model.is_gated else 1
    return model.ffn * matrices


@lru_cache(maxsize=1000)
def layers_of_round(model: TransformerConfig) -> int:
    """Counts the layers of a round of the stack: a stage of a pipeline has whole rounds.

    Segments are one round, however long: no pipeline shares them out.
    """
    stack = model.stacks[-1]
    return len(stack.pattern) if stack.path == "blocks" else model.stack_layers


def layers_of_loop(model: TransformerConfig) -> int:
    """Counts the layers that a turn of a stack's loop runs, in the stack that runs most."""
    return max(len(stack.pattern) for stack in model.stacks)


def repeats(model: TransformerConfig) -> int:
    """Counts the rounds of the stack, which a pipeline divides among its stages."""
    return model.stack_layers // layers_of_round(model)


@lru_cache(maxsize=1000)
def expert_share(model: TransformerConfig) -> float:
    """Returns the share of the layers that have experts."""
    return model.layer_mlps.count("experts") / model.layers


# Settings of attention that another mixer does not read, and what they are without it.
OF_ATTENTION = {"latent": None, "output_gate": "none", "query_norm": "none", "sinks": False}


@lru_cache(maxsize=1000)
def mixer_shares(model: TransformerConfig) -> tuple[tuple[float, TransformerConfig], ...]:
    """Returns, for each mixer of tokens, its share of the layers and a model that has it in all.

    A layer with two mixers counts among those of both, and one without any among none. Attention
    with heads of another width is another mixer.
    """
    if model.full or model.shared_keys:
        of_layers = Counter(layer._replace(mlp="mlp") for layer in model.layer_parts)
        return tuple((n / model.layers, model.of_layer(layer)) for layer, n in of_layers.items())
    counts = Counter(mixer for layer in model.layer_mixers for mixer in singles_of(layer))
    if counts == {"attention": model.layers}:
        return ((1.0, model),)
    return tuple(
        (count / model.layers, model.model_copy(update={"mixers": (mixer,)} | others))
        for mixer, count in counts.items()
        for others in ({} if mixer == "attention" else OF_ATTENTION,)
    )


@lru_cache(maxsize=1000)
def mlp_shares(model: TransformerConfig) -> tuple[tuple[float, TransformerConfig], ...]:
    """Returns, for each kind of mlp, its share of the layers and a model that has it in all; with
    experts it is the one that all tokens go through.
    """
    if model.shared_keys:
        sharing = model.of_layer(model.layer_parts[-1])
        others = model.model_copy(update={"ffn": sharing.ffn, "experts": sharing.experts})
        own, shared = (beside_experts(one) if one.experts else one for one in (model, others))
        share = model.shared_keys / model.layers
        return ((1 - share, own), (share, shared))
    counts = Counter(model.layer_mlps)
    if counts == {"mlp": model.layers}:
        return ((1.0, model),)
    alike: tuple[tuple[LayerMlp, Callable[[TransformerConfig], TransformerConfig]], ...]
    alike = (("mlp", dense_layer), ("experts", beside_experts))
    return tuple((counts[mlp] / model.layers, of(model)) for mlp, of in alike if counts[mlp])


def dense_layer(model: TransformerConfig) -> TransformerConfig:
    """Returns a model whose layers are all like those without experts."""
    return model.model_copy(update={"experts": None, "mlps": ()})


def beside_experts(model: TransformerConfig) -> TransformerConfig:
    """Returns a model whose layers are all like those with experts, reduced to the shared ones."""
    assert model.experts is not None, "a model with experts"
    ffn = model.experts.shared_width
    narrow = {"experts": None, "mlps": (), "ffn": ffn, "mlp_bias": model.mlp_bias and ffn > 0}
    return model.model_copy(update=narrow)


def mean_of_mlps(model: TransformerConfig, of_mlp: Callable[[TransformerConfig], float]) -> float:
    """Returns the mean over the layers of `of_mlp`, which depends on their mlps alone, of those
    without experts, and beside them.
    """
    return _mean(mlp_shares(model), of_mlp)


def mean_of_mixers(
    model: TransformerConfig, of_mixer: Callable[[TransformerConfig], float]
) -> float:
    """Returns the mean over the layers of `of_mixer`, which depends on their mixers alone; in a
    layer with two of them it is their sum.
    """
    return _mean(mixer_shares(model), of_mixer)


def _mean(
    shares: tuple[tuple[float, TransformerConfig], ...],
    of_part: Callable[[TransformerConfig], float],
) -> float:
    if [share for share, _ in shares] == [1.0]:
        return of_part(shares[0][1])
    return sum(share * of_part(alike) for share, alike in shares)


@lru_cache(maxsize=1000)
def layer_matrices(model: TransformerConfig) -> float:
    """Counts the parameters of one layer that multiply every token, except those of experts.

    This is the mean over the layers, as in the functions below.
    """
    router = 0.0
    if model.experts is not None:
        projections = model.experts.count + model.experts.shared_gate
        projections += 2 * (model.experts.width or 0)
        router = expert_share(model) * model.embed * projections
    of_tokens = 3 * model.embed * token_width(model)  # the embedding's, and two of the layer
    own = mean_of_mixers(model, mixer_matrices) + mean_of_mlps(model, mlp_matrices)
    return own + router + of_tokens


def token_width(model: TransformerConfig) -> int:
    """Returns the channels of each token that a layer reads of its own embeddings."""
    return model.token_layers.dim if model.token_layers else 0


def token_table(model: TransformerConfig) -> int:
    """Counts the elements of the table of layers' embeddings."""
    if model.token_layers is None:
        return 0
    return (model.token_layers.vocab or vocab(model)) * model.layers * model.token_layers.dim


def mixer_matrices(model: TransformerConfig) -> int:
    """Counts the parameters of the matrices of a mixer."""
    qkv = sum(columns * rows for columns, rows, _ in qkv_matmuls(model))
    return qkv + model.embed * attention_width(model)


def mlp_matrices(model: TransformerConfig) -> int:
    """Counts the parameters of the matrices of an mlp."""
    return model.embed * (up_width(model) + model.ffn)


def active_matrices(model: TransformerConfig) -> float:
    """Counts the parameters of one layer that a token goes through."""
    if model.experts is None:
        return layer_matrices(model)
    return layer_matrices(model) + model.experts.chosen / model.experts.count * expert_matrices(
        model
    )


def expert_matrices(model: TransformerConfig) -> float:
    """Counts the parameters of all experts of one layer except their biases."""
    if model.experts is None:
        return 0
    width = model.experts.ffn * (3 if model.is_gated else 2)
    return expert_share(model) * model.experts.count * model.expert_width * width


def expert_parameters(model: TransformerConfig) -> float:
    """Counts the parameters of all experts of one layer."""
    if model.experts is None:
        return 0
    columns = model.experts.ffn * (2 if model.is_gated else 1)
    biases = model.experts.count * (columns + model.expert_width) * model.mlp_bias
    return expert_matrices(model) + expert_share(model) * biases


@lru_cache(maxsize=1000)
def layer_parameters(model: TransformerConfig) -> float:
    """Counts the parameters of one layer, except those of its experts."""
    vectors = norms(model) * model.embed * vectors_per_norm(model)
    vectors += model.layer_scale
    vectors += mean_of_mixers(model, mixer_vectors) + mean_of_mlps(model, mlp_vectors)
    if model.experts is not None:
        # A router has a bias for the choice of each expert, and may have one for its logit.
        # Each may have a learned scale, and the router a norm of its own.
        vectors_of_experts = 1 + model.experts.logit_bias + model.experts.learned_scale
        biases = model.experts.count * vectors_of_experts + model.embed * model.experts.own_norms
        vectors += expert_share(model) * biases
    return layer_matrices(model) + vectors


def mixer_vectors(model: TransformerConfig) -> int:
    """Counts the parameters of a layer's attention, or other mixer, that are in no matrix."""
    if mixer := linear_mixer(model):
        return mixer.vectors
    biases = qkv_width(model) * model.qkv_bias + model.embed * model.out_bias
    vectors = biases + query_norm_size(model) + latent_norm_width(model) + head_sinks(model)
    return vectors + idle_keys(model)


def idle_keys(model: TransformerConfig) -> int:
    """Counts the parameters of keys and values of a layer that shares others, if it keeps its own;
    they are not trained.
    """
    if not (model.idle_keys and model.shared_keys):
        return 0
    are_values = model.full is not None and model.full.keys_are_values
    columns = (1 if are_values else 2) * model.kv_heads * model.head_dim
    norm = model.head_dim if model.query_norm == "head" else 0
    return columns * (model.embed + model.qkv_bias) + norm


def mlp_vectors(model: TransformerConfig) -> int:
    """Counts the parameters of an mlp that are in no matrix."""
    return (up_width(model) + model.embed) * model.mlp_bias + slopes(model)


def parts(model: TransformerConfig) -> float:
    """Counts the parts of one layer that are added to the stream: a mixer, an mlp, or both."""
    return sum(layer.parts for layer in model.layer_parts) / model.layers


def mixers_and_mlps(model: TransformerConfig) -> float:
    """Counts the mixers and mlps of one layer, each of which the devices of `tensor` sum."""
    mixers = sum(len(singles_of(mixer)) for mixer in model.layer_mixers)
    mlps = sum(mlp != "none" for mlp in model.layer_mlps)
    return (mixers + mlps) / model.layers


def norms_of_part(model: TransformerConfig) -> float:
    """Counts the norms of a mixer or an mlp."""
    return _all_norms(model) / sum(layer.parts for layer in model.layer_parts)


def norms(model: TransformerConfig) -> float:
    """Counts the norms of one layer."""
    return _all_norms(model) / model.layers + bool(model.token_layers)


@lru_cache(maxsize=1000)
def _all_norms(model: TransformerConfig) -> int:
    """Counts the norms of all layers."""
    places = [model.norm_places_of(mixer) for mixer in model.layer_mixers]
    total = sum(map(_norms_of_layer, model.layer_parts, places))
    return total + _norms_of_experts(model) * model.layer_mlps.count("experts")


def _norms_of_layer(layer: LayerParts, places: str) -> int:
    """Counts the norms of a layer's parts."""
    if places == "parallel":
        return 1
    return layer.parts * (2 if places == "both" else 1)


def _norms_of_experts(model: TransformerConfig) -> int:
    """Counts the norms of one layer that experts of their own have more than an mlp."""
    if model.experts is None or not model.experts.own_norms:
        return 0
    return {"before": 1, "after": 2, "both": 3}[model.norm_places]


def share_with_out_norms(model: TransformerConfig) -> float:
    """Returns the share of layers that have norms on the output of their parts."""
    places = [model.norm_places_of(mixer) for mixer in model.layer_mixers]
    return sum(place in ("after", "both") for place in places) / model.layers


def query_key_width(model: TransformerConfig) -> int:
    """Returns the width of queries and keys together."""
    return (model.heads + model.kv_heads) * model.head_dim


def query_norm_size(model: TransformerConfig) -> int:
    """Counts the parameters of the norms of queries and keys in one layer."""
    if model.query_norm == "all":
        return query_key_width(model)
    normed = 1 if model.shared_keys else 2
    return normed * model.head_dim if model.query_norm == "head" else 0


def latent_norm_width(model: TransformerConfig) -> int:
    """Counts the numbers of a token that the norms of latents read: one parameter for each."""
    return (model.latent.query_rank or 0) + model.latent.rank if model.latent else 0


def head_sinks(model: TransformerConfig) -> int:
    """Counts the sinks of one layer: one for each head, or none."""
    return model.heads if model.sinks else 0


def slopes(model: TransformerConfig) -> int:
    """Counts the slopes of one layer's activation: two of xIELU."""
    return 2 if model.mlp == "xielu" else 0


def visible_share(model: TransformerConfig, sequence_length: int) -> float:
    """Returns the share of the pairs of causal attention that windows leave, over the layers that
    have attention.
    """
    if not model.windows and not model.chunks:
        return 1.0
    pairs = [
        seen_pairs(sequence_length, kind.window, kind.chunk)
        for kind, mixer in zip(model.layer_kinds, model.layer_mixers, strict=True)
        if "attention" in singles_of(mixer)
    ]
    return sum(pairs) / max(len(pairs), 1) / seen_pairs(sequence_length)


def outside_parameters(model: TransformerConfig) -> int:
    """Counts the parameters outside the layers: tables and the last norm."""
    tables = vocab(model) * vocabulary_tables(model) + position_rows(model)
    of_layers = token_table(model) + token_width(model)
    return model.embed * (tables + vectors_per_norm(model)) + of_layers + indexer_parameters(model)


def indexer_parameters(model: TransformerConfig) -> int:
    """Counts the parameters of the indexers of sparse attention, which are not trained."""
    if model.indexer is None or model.latent is None:
        return 0
    heads, dim = model.indexer.heads, model.indexer.dim
    rank = model.latent.query_rank or model.embed
    own = rank * heads * dim + model.embed * (dim + heads) + 2 * dim
    return len(model.indexer_layers) * own


def last_layer(model: TransformerConfig) -> TransformerConfig:
    """Returns a model whose layers are all like the blocks of further tokens."""
    parts = model.further_parts
    if set(model.layer_parts) == {parts}:
        return model
    return model.model_copy(update={"mixers": (parts.mixer,), "mlps": (parts.mlp,)})


def further_parameters(model: TransformerConfig) -> float:
    """Counts the parameters of the blocks that predict further tokens, frozen ones too."""
    if model.multi_token is None:
        return 0
    last = last_layer(model)
    block = layer_parameters(last) + expert_parameters(last)
    joining = 2 * model.embed**2 + 3 * model.embed * vectors_per_norm(model)
    return model.multi_token.depth * (block + joining)


def further_matrices(model: TransformerConfig) -> float:
    """Counts the parameters that a token goes through in these blocks, each with the head."""
    own = 2 * model.embed**2 + model.embed * vocab(model)
    return further_tokens(model) * (active_matrices(last_layer(model)) + own)


def parameters(model: TransformerConfig) -> int:
    """Counts all parameters of the model."""
    layer = layer_parameters(model) + expert_parameters(model)
    inside = model.layers * layer + further_parameters(model)
    return round(inside) + outside_parameters(model)


def vocabulary_tables(model: TransformerConfig) -> int:
    """Counts the tables of the vocabulary: embedding and head, or one for both."""
    return 1 if model.tied else 2


def vectors_per_norm(model: TransformerConfig) -> int:
    """Counts the vectors of a norm: a scale, and for a layernorm with biases an offset."""
    return 2 if model.norm == "layernorm" and model.bias else 1
