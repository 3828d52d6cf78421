"""Attention of a long sequence over `context`: the ring, Ulysses and gathering side by side.

    python benchmarks/long_context.py --step         a small step on simulated CPU devices
    python benchmarks/long_context.py --attention    one layer compiled for absent H100s

`--step` times the ways in turn, several rounds of them in one process, and prints the ratio of
their tokens a second. Simulated devices share the cores of the machine, so the ratio says what is
computed, not what a network does.

`--attention` compiles forward and backward of one layer, 32 query heads on 8 key-value heads of
128, in bfloat16 with Triton kernels. It prints temporary bytes per device, how many permutes have a
kernel between their start and their end, and the bytes that cross the links. It needs CUDA's
compiler wheels beside jax >= 0.11 (`make cuda-compiler`) and JAX_PLATFORMS=cpu, no GPU.
"""

import argparse
import statistics
import time

import spmdtrain as st
from pallas_kernels.attention import attention
from spmdtrain.compiled import hlo
from spmdtrain.compiled.step_memory import memory_of
from spmdtrain.config import MeshConfig, RunConfig, TrainConfig
from spmdtrain.parallel.context.ring import ContextRing, ring_attention
from spmdtrain.parallel.context.ulysses import heads_for_time
from spmdtrain.planner import deviceless
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.processes import xla_flags

HEADS, KV_HEADS, DIM = 32, 8, 128
KERNELS = ("xla.gpu.triton", "mosaic_gpu", "cudnn")  # in the compiled text


def attend(way: str, ways: int, window: int | None, q, k, v):
    """Returns attention of this device's tokens to all, by a way; in a manual region."""
    import jax
    import jax.numpy as jnp

    seen = None if window is None else (window, 0)
    if way == "ring":
        ring = ContextRing(("context",), ways, (window,), implementation="triton")
        return ring_attention(ring, q, k, v)[0]
    if way == "ulysses":

        def local(q, k, v):
            flat = q.reshape(*q.shape[:2], -1, DIM)
            out = attention(flat, k, v, causal=True, window=seen, implementation="triton")
            return out.reshape(q.shape)

        groups = q.reshape(*q.shape[:2], KV_HEADS, -1, DIM)
        return heads_for_time(local, ("context",), groups, k, v).reshape(q.shape)
    k, v = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v))
    here = jax.lax.axis_index("context") * q.shape[1] + jnp.arange(q.shape[1], dtype=jnp.int32)
    places = (here[None], jnp.arange(k.shape[1], dtype=jnp.int32)[None])
    options = {"causal": True, "window": seen, "positions": places}
    return attention(q, k, v, implementation="triton", **options)


def compile_attention(way: str, tokens: int, ways: int, window: int | None):
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = deviceless.described_devices(hardware("h100"), ways)
    mesh = jax.sharding.Mesh(devices, ("context",))

    def both(q, k, v, dout):
        out, pull = jax.vjp(lambda *qkv: attend(way, ways, window, *qkv), q, k, v)
        return out, *pull(dout)

    spec = P(None, "context")
    region = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def array(heads):
        shape = (1, tokens, heads, DIM)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    given = [array(HEADS), array(KV_HEADS), array(KV_HEADS), array(HEADS)]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(region).lower(*given).compile()


def permutes(text: str) -> tuple[int, int]:
    """Returns (permutes, those with a kernel between their start and their end)."""
    named, _ = hlo.computations(text)
    total = beside = 0
    for listed in named.values():
        under_way: dict[str, bool] = {}
        for each in listed:
            if each.opcode == "collective-permute-start":
                under_way[each.name] = False
            elif each.opcode == "collective-permute":
                total += 1
            elif each.opcode == "collective-permute-done":
                total += 1
                beside += under_way.pop(each.operands.split()[-1].lstrip("%"))
            elif each.opcode == "custom-call" and any(name in each.line for name in KERNELS):
                under_way = dict.fromkeys(under_way, True)
    return total, beside


def show_attention(chosen: argparse.Namespace) -> None:
    xla_flags.set_xla_flags(deviceless=True)
    for way in chosen.ways:
        start = time.perf_counter()
        made = compile_attention(way, chosen.tokens, chosen.context, chosen.window)
        text = made.as_text()
        if chosen.text:
            with open(f"{chosen.text}.{way}.txt", "w", encoding="utf-8") as file:
                file.write(text)
        sent = sum(each["sent"] for each in hlo.traffic(text, {"context": chosen.context}))
        total, beside = permutes(text)
        print(
            f"{way}: {memory_of(made).temp_bytes / 1e6:.0f} MB temp, {sent / 1e6:.0f} MB sent, "
            f"{beside} of {total} permutes beside a kernel, "
            f"compiled in {time.perf_counter() - start:.0f} s",
            flush=True,
        )


def show_step(chosen: argparse.Namespace) -> None:
    st.simulate_devices(chosen.context)
    import jax

    def prepared(way: str):
        config = RunConfig(
            model={
                "name": "llama",
                "layers": 2,
                "embed": 64,
                "heads": 4,
                "kv_heads": 4,
                "vocab": 256,
                "context_attention": way,
            },
            mesh=MeshConfig(context=chosen.context),
            train=TrainConfig(global_batch=1, sequence_length=chosen.tokens, steps=10),
            data={"corpus": "synthetic"},
        )
        config, data = st.open_data(config)
        setup = st.shard(config)
        with st.batches(setup, data, 0, 0) as ahead:
            batch = next(ahead)
        return st.make_step(setup), st.init_state(setup), batch

    made = {way: prepared(way) for way in chosen.ways}
    seconds: dict[str, list[float]] = {way: [] for way in made}
    for number in range(chosen.rounds + 1):
        for way, (step, state, batch) in made.items():
            start = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            made[way] = (step, state, batch)
            if number:  # the first compiles
                seconds[way].append(time.perf_counter() - start)
    speed = {way: chosen.tokens / statistics.median(each) for way, each in seconds.items()}
    for way, each in speed.items():
        ratio = each / speed[chosen.ways[-1]]
        print(f"{way}: {each:,.0f} tokens a second, {ratio:.2f} x {chosen.ways[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--tokens", type=int, help="of a sequence")
    parser.add_argument("--context", type=int, help="devices that share it")
    parser.add_argument("--window", type=int, help="tokens before its own that a query sees")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=["ring", "ulysses", "gather"])
    parser.add_argument("--text", help="write the compiled text to TEXT.WAY.txt")
    chosen = parser.parse_args()
    if chosen.attention:
        chosen.tokens = chosen.tokens or 131_072
        chosen.context = chosen.context or 8
        show_attention(chosen)
    if chosen.step:
        chosen.tokens = chosen.tokens or 8192
        chosen.context = chosen.context or 4
        show_step(chosen)


if __name__ == "__main__":
    main()
