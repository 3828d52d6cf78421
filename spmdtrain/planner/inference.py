"""Estimates the seconds of generating text: `spmdtrain estimate --generate`.

Prefill reads the whole prompt at once; decode makes one token after another. The kernels are those
of training, forward only. Decode reads all weights and the key-value cache for every token, so
memory limits it until the batch is large.
"""

from dataclasses import dataclass, replace
from functools import partial

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig, TransformerConfig
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.collective_time import all_reduce_seconds
from spmdtrain.planner.cost.hardware import Hardware
from spmdtrain.planner.cost.kernel_time import matmul_seconds, memory_seconds
from spmdtrain.planner.cost.layer_time import layer_time
from spmdtrain.planner.cost.software import Software
from spmdtrain.planner.cost.workload import MeshShape, Workload, workload_of
from spmdtrain.planner.estimate import mesh_sizes, our_software, with_vocab


@dataclass(frozen=True)
class InferenceEstimate:
    """The estimate of a generation. Seconds are for the whole batch, bytes per device."""

    batch: int
    prompt: int
    new: int
    prefill_seconds: float
    token_seconds: float
    prefill_bound: str
    decode_bound: str
    weight_bytes: float
    cache_bytes: float

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.token_seconds


def estimate_inference(
    config: RunConfig,
    devices: int | None,
    hardware: Hardware,
    *,
    batch: int,
    prompt: int,
    new: int,
) -> InferenceEstimate:
    """Estimates `batch` sequences of `prompt` + `new` tokens each, on the config's tensor axis."""
    config = with_vocab(config)
    workload = workload_of(config, mesh_sizes(config, devices, hardware))
    return inference_time(
        workload,
        hardware,
        our_software(config, hardware),
        batch=batch,
        prompt=prompt,
        new=new,
    )


def inference_time(
    workload: Workload,
    hardware: Hardware,
    software: Software,
    *,
    batch: int,
    prompt: int,
    new: int,
) -> InferenceEstimate:
    """Estimates the same for a workload; only its model, tensor axis and dtype matter."""
    model = workload.model
    tensor = workload.mesh.tensor
    for _, alike in shape.mixer_shares(model):
        if alike.kv_heads % tensor:
            raise ConfigError(f"kv_heads={alike.kv_heads} is not divisible by mesh.tensor={tensor}")

    prefill, prefill_network = _prefill(workload, hardware, software, batch, prompt)

    size = workload.compute_bytes
    dense = model.layers * shape.layer_matrices(model) + model.embed * shape.vocab(model)
    of_experts = model.layers * shape.expert_matrices(model)
    weight_bytes = size * (dense + of_experts) / tensor
    read_bytes = size * (dense + _used_share(model, batch) * of_experts) / tensor
    # Keys and values of all layers; while new tokens are made, half of them are cached on average.
    # A latent is whole on every device of `tensor`.
    ways = 1 if model.latent else tensor
    cached = model.layers * shape.mean_of_mixers(model, shape.cached_width)
    cache_per_token = size * cached * batch / ways
    states = model.layers * shape.mean_of_mixers(model, shape.state_bytes) * batch / tensor
    mean_cache = cache_per_token * (prompt + new / 2) + states

    # Either the matmuls take longest, or reading the weights does; the cache is read in both cases.
    compute = _decode_matmuls(workload, hardware, software, batch)
    reading_cache = memory_seconds(mean_cache, hardware)
    reading_all = memory_seconds(read_bytes + mean_cache, hardware)
    tensor_sum = all_reduce_seconds(
        batch * model.embed * size, workload.mesh.group("tensor"), hardware
    )
    network = shape.parts(model) * model.layers * tensor_sum  # after a mixer, and after an mlp
    token = max(compute + reading_cache, reading_all) + network
    return InferenceEstimate(
        batch=batch,
        prompt=prompt,
        new=new,
        prefill_seconds=prefill,
        token_seconds=token,
        prefill_bound="network" if prefill_network > prefill / 2 else "compute",
        decode_bound=_decode_bound(token, network, reading_all),
        weight_bytes=weight_bytes,
        cache_bytes=cache_per_token * (prompt + new) + states,
    )


def _used_share(model: TransformerConfig, batch: int) -> float:
    """Returns the share of a layer's experts that `batch` tokens use, if they choose at random."""
    if model.experts is None:
        return 0.0
    return 1 - (1 - model.experts.chosen / model.experts.count) ** batch


def _prefill(
    workload: Workload, hardware: Hardware, software: Software, batch: int, prompt: int
) -> tuple[float, float]:
    """Returns (seconds of the prompt, seconds of that in collectives)."""
    model = workload.model
    tensor = workload.mesh.tensor
    reading = replace(
        workload.with_settings(train={"sequence_length": prompt}),
        microbatch=batch,
        mesh=MeshShape(tensor=tensor),
        experts_over_tensor=False,
        remat="none",
    )
    layer = layer_time(reading, hardware, software)
    layers = model.layers * sum(work.forward for work in layer.values())
    # Only the last token of each prompt needs logits.
    head = matmul_seconds(
        batch,
        shape.vocab(model) // tensor,
        model.embed,
        hardware=hardware,
        software=software,
        dtype=workload.dtype,
    )
    network = model.layers * layer["tensor_collectives"].forward
    return layers + head, network


def _decode_matmuls(
    workload: Workload, hardware: Hardware, software: Software, batch: int
) -> float:
    """Returns the seconds of all matmuls for one token of each sequence."""
    model = workload.model
    tensor = workload.mesh.tensor
    seconds = partial(
        matmul_seconds, batch, hardware=hardware, software=software, dtype=workload.dtype
    )

    def of_mixer(layer: TransformerConfig) -> float:
        products = sum(
            seconds(columns // (tensor if splits else 1), rows)
            for columns, rows, splits in shape.qkv_matmuls(layer)
        )
        return products + seconds(model.embed, shape.attention_width(layer) // tensor)

    def of_mlp(layer: TransformerConfig) -> float:
        if not layer.ffn:
            return 0.0
        up = seconds(shape.up_width(layer) // tensor, model.embed)
        return up + seconds(model.embed, layer.ffn // tensor)

    layer = shape.mean_of_mixers(model, of_mixer) + shape.mean_of_mlps(model, of_mlp)
    if model.experts:
        # Each expert that is used at all has a matmul of few rows.
        used = max(1, round(_used_share(model, batch) * model.experts.count))
        rows = -(-batch * model.experts.chosen // used)
        ffn = model.experts.ffn // tensor
        of_expert = partial(
            matmul_seconds, rows, hardware=hardware, software=software, dtype=workload.dtype
        )
        up = of_expert(ffn * (2 if model.is_gated else 1), model.expert_width, count=used)
        down = of_expert(model.expert_width, ffn, count=used)
        layer += shape.expert_share(model) * (up + down)
    return model.layers * layer + seconds(shape.vocab(model) // tensor, model.embed)


def _decode_bound(token: float, network: float, reading: float) -> str:
    if network > token / 2:
        return "network"
    if reading > 0.8 * (token - network):
        return "memory"
    return "compute"
