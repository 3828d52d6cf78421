"""Counts the trained part of a model: all of it, its upper layers, or adapters."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from spmdtrain.config.schema import FinetuneConfig, RunConfig, TransformerConfig
from spmdtrain.planner.cost import shape

# Bytes of an element of a weight with adapters, by `finetune.base`; None: as `precision.frozen`.
# NF4 has a scale of 8 bits for 64 weights, and one of 32 for 256 of those.
BASE_BYTES = {"float": None, "int8": 1.0, "nf4": (4 + 8 / 64 + 32 / (64 * 256)) / 8}


@dataclass(frozen=True)
class Trained:
    """The trained part of a model.

    `share` is the trained share of the model's own elements, and `of_matrices` that of the elements
    that multiply every token. The first `frozen_layers` have no backward.
    """

    share: float = 1.0
    of_matrices: float = 1.0
    frozen_layers: int = 0
    finetune: FinetuneConfig = FinetuneConfig()  # of the adapters

    @property
    def base_bytes(self) -> float | None:
        """The bytes of an element of a weight with adapters; None: those of any frozen one."""
        return BASE_BYTES[self.finetune.base]

    def share_below(self, model: TransformerConfig) -> float:
        """Returns the share of the model's elements that the frozen first layers have."""
        layers = model.layers * shape.layer_parameters(model)
        below = self.frozen_layers / model.layers * layers
        return below / (layers + shape.outside_parameters(model))

    def adapted_elements(self, model: TransformerConfig, tensor: int) -> float:
        """Counts the elements of one layer's weights that have adapters, before `fsdp`."""
        widths = {
            ("q", "k", "v"): shape.qkv_width(model),
            ("out",): shape.attention_width(model),
            ("gate", "up"): shape.mean_of_mlps(model, shape.up_width),
            ("down",): shape.mean_of_mlps(model, lambda layer: layer.ffn),
        }
        targets = set(self.finetune.targets)
        adapted = [width for parts, width in widths.items() if targets.intersection(parts)]
        return model.embed * sum(adapted) / tensor

    def adapter_matrices(self, model: TransformerConfig) -> float:
        """Counts the elements of one layer's adapters that multiply every token."""
        widths = self.adapter_widths(model, 1).values()
        return sum((self.finetune.rank * (model.embed + wide) for wide in widths), start=0.0)

    def adapter_elements(self, model: TransformerConfig, tensor: int) -> float:
        """Counts the elements of one layer's adapters on a device.

        `fsdp` splits none.
        """
        total = 0.0
        for target, wide in self.adapter_widths(model, tensor).items():
            total += self.finetune.rank * (model.embed + wide)
            if self.finetune.kind == "dora":  # the norm of each row of the weight
                total += model.embed if target in ("out", "down") else wide
        return total

    def adapter_widths(self, model: TransformerConfig, tensor: int) -> dict[str, float]:
        """Returns target -> the width, on a device, of an adapter's side that is not the stream.

        It is split like its weight; the side in the stream is whole.
        """
        if not self.finetune.has_adapters:
            return {}
        heads = shape.attention_width(model) / tensor
        queries = heads + shape.gate_width(model) / tensor
        kv_heads = model.kv_heads * model.head_dim / tensor
        ffn = shape.mean_of_mlps(model, lambda layer: layer.ffn) / tensor
        wide = {"q": queries, "k": kv_heads, "v": kv_heads, "out": heads, "up": ffn, "down": ffn}
        if model.is_gated:
            wide["gate"] = ffn
        targets = self.finetune.targets
        return {target: width for target, width in wide.items() if width and target in targets}


def trained_part(config: RunConfig) -> Trained:
    """Returns the trained part of the config's model. `model.vocab` must be set.

    Its own weights are counted in the built model if [finetune] or a group of the optimizer names
    some of them, and so are the adapters of a custom model, or of one with several mixers of
    tokens, as weights of the model.
    """
    finetune = config.finetune
    freezes = any(group.frozen for group in config.optimizer.groups)
    below = config.always_frozen
    if not finetune.has_adapters and not freezes:
        return Trained(frozen_layers=below)
    own = config.model.make is not None or set(config.model.layer_mixers) != {"attention"}
    own = own or config.model.full is not None or config.model.shared_keys > 0
    share = of_matrices = 0.0
    if own or freezes or finetune.also_train:
        share, of_matrices = _built_shares(config, with_adapters=own)
    if own or not finetune.has_adapters:
        return Trained(share, of_matrices, below)
    return Trained(share, of_matrices, below, finetune)


def _built_shares(config: RunConfig, *, with_adapters: bool) -> tuple[float, float]:
    """Returns the share of the built model's elements that is trained, and that of its matrices."""
    from spmdtrain.models.abstract import build_model
    from spmdtrain.models.choose import choose_model

    parameters = build_model(*choose_model(config)).parameters
    groups = config.optimizer.groups
    head = "tokens.table_ve" if config.model.tied else "unembed_ve"
    total = {False: 0, True: 0}  # by whether a matmul reads it
    trained = {False: 0, True: 0}
    for path, parameter in parameters.items():
        if parameter.is_of_adapter and not with_adapters:
            continue
        group = next((group for group in groups if fnmatchcase(path, group.match)), None)
        is_trained = parameter.is_trained and not (group and group.frozen)
        of_matmuls = parameter.is_of_matmuls or path == head
        total[of_matmuls] += parameter.size
        trained[of_matmuls] += parameter.size * is_trained
    of_matrices = trained[True] / total[True] if total[True] else 1.0
    return sum(trained.values()) / sum(total.values()), of_matrices
