"""Seconds of generating text: prefill reads the prompt at once, decode makes one token after the other.

The same kernels as in training, forward only; decoding reads all weights and the cache for every token, which is why
it is bound by memory until the batch is large.
"""

from dataclasses import dataclass, replace

from spmdtrain.config.errors import ConfigError
from spmdtrain.planner.cost import layer_work
from spmdtrain.planner.hardware import Hardware
from spmdtrain.planner.job import Job, Layout
from spmdtrain.planner.kernels import all_reduce, matmul, memory_pass
from spmdtrain.planner.stack import Stack


@dataclass(frozen=True)
class Generation:
    """Bytes per device; seconds of the whole batch."""

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


def generate(job: Job, batch: int, prompt: int, new: int, device: Hardware, stack: Stack) -> Generation:
    """`batch` sequences of `prompt` tokens, `new` more of each, on the job's tensor axis; weights in its dtype."""
    shape, t, size = job.shape, job.layout.tensor, 4 if job.dtype == "float32" else 2
    if shape.kv_heads % t:
        raise ConfigError(f"kv_heads={shape.kv_heads} is not divisible by mesh.tensor={t}")
    layout = Layout(tensor=t)
    reading = replace(job, sequence=prompt, microbatch=batch, layout=layout, remat="none")
    layer = layer_work(reading, device, stack)
    prefill = shape.layers * sum(work[0] for work in layer.values())
    prefill += matmul(batch, shape.vocab // t, shape.embed, device, stack, job.dtype)
    network = shape.layers * layer["tensor_collectives"][0]

    weights = size * (shape.layers * shape.layer_matrices + shape.embed * shape.vocab) / t
    per_token = size * 2 * shape.layers * shape.kv_heads * shape.head_dim * batch / t
    cache = per_token * (prompt + new / 2)
    run = lambda columns, inner: matmul(batch, columns, inner, device, stack, job.dtype)  # noqa: E731
    e, attended = shape.embed, shape.attention_width // t
    matrices = run(shape.qkv_width // t, e) + run(e, attended) + run(shape.up_width // t, e) + run(e, shape.hidden // t)
    compute = shape.layers * matrices + run(shape.vocab // t, e)
    moved = memory_pass(weights + cache, device)
    summed = 2 * shape.layers * all_reduce(batch * e * size, t, 1, device)
    reads_cache = memory_pass(cache, device)
    token = max(compute + reads_cache, moved) + summed
    return Generation(
        batch=batch,
        prompt=prompt,
        new=new,
        prefill_seconds=prefill,
        token_seconds=token,
        prefill_bound="network" if network > prefill / 2 else "compute",
        decode_bound="network" if summed > token / 2 else "memory" if moved > 0.8 * (token - summed) else "compute",
        weight_bytes=weights,
        cache_bytes=per_token * (prompt + new),
    )
