"""What the commands `estimate` and `plan` say: plain values for programs, and the same for a person."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.planner import cost, memory, search
from spmdtrain.planner.cost import Price
from spmdtrain.planner.generation import Generation
from spmdtrain.planner.hardware import Hardware, swept
from spmdtrain.planner.job import Job, job_of
from spmdtrain.planner.memory import SAFE, Memory
from spmdtrain.planner.stack import Stack, stack
from spmdtrain.train.interval import best_interval, lost_share, seconds_between_failures

TO_HOST = 25e9  # bytes/s from a device into its host's memory: PCIe 4 x16, less overhead


def mesh_sizes(config: RunConfig, devices: int | None, device: Hardware) -> dict[str, int]:
    """The mesh with -1 filled, on so many of these devices (default: what it multiplies to), in hosts of equal size;
    refused as a run on them would be."""
    from spmdtrain.parallel.mesh import AXES, arrange

    fixed = math.prod(size for size in config.mesh.sizes.values() if size != -1)
    open_axis = next((axis for axis, size in config.mesh.sizes.items() if size == -1), None)
    if open_axis is not None and devices is None:
        raise ConfigError(f"mesh.{open_axis}=-1 fills the mesh", fix=f"--devices N, a multiple of {fixed}")
    count = devices or fixed
    per_host = max(k for k in range(1, min(count, device.per_host) + 1) if count % k == 0)
    described = [
        SimpleNamespace(id=at, process_index=at // per_host, device_kind=device.name, platform="gpu")
        for at in range(count)
    ]
    return dict(zip(AXES, arrange(config.mesh.sizes, described, config.origin).shape, strict=True))


def with_vocab(config: RunConfig) -> RunConfig:
    """The vocabulary from the corpus if the config does not say it."""
    if config.model.vocab:
        return config
    from spmdtrain.data.corpus import open_corpus

    return config.with_vocab(open_corpus(config.data, None, config.train.seed).vocab)


def checked(config: RunConfig, sizes: dict[str, int]) -> tuple[Job, tuple[int, int]]:
    """The job of a run, and the bytes of its state (memory.exact_state); what the run would refuse is refused here, by
    the same functions."""
    exact = memory.exact_state(config, sizes)
    return job_of(config, sizes), exact


def priced(config: RunConfig, sizes: dict[str, int], device: Hardware, scale: float = 1.0) -> tuple[Price, Memory]:
    """Exactly this layout: time by the schedule's table, parameter and optimizer bytes off the abstract state."""
    job, exact = checked(config, sizes)
    price = replace(cost.price(job, device, our_stack(config, device)), scale=scale)
    return price, memory.ours(job, exact)


def our_stack(config: RunConfig, device: Hardware) -> Stack:
    """This framework's: attention in one kernel where cuDNN has one, else in tiles by XLA, which writes scores out."""
    kernel = config.precision.compute == "bfloat16" and config.data.packing != "documents"
    fused = config.model.attention != "xla" and kernel and not device.name.startswith("mi")
    return stack("spmdtrain" if fused else "spmdtrain-xla", device.name)


def describe(price: Price, held: Memory) -> dict[str, Any]:
    """The JSON object of `estimate`; `plan` gives a list of them."""
    job = price.job
    layout = job.layout.sizes | {
        "microbatch": job.microbatch,
        "accumulation": job.accumulation,
        "schedule": job.schedule if job.layout.pipeline > 1 else None,
        "chunks": job.chunks,
        "remat": job.remat,
        "zero": job.zero,
    }
    return {
        "step_seconds": price.step,
        "tokens_per_second_per_device": price.tokens_per_second_per_device,
        "model_tflops_per_device": price.model_flops_per_device / 1e12,
        "mfu": price.mfu,
        "bubble_fraction": price.bubble_fraction,
        "fits": held.fits(price.device),
        "memory_bytes_per_device": held.describe(),
        "breakdown_seconds": {term: price.scale * seconds for term, seconds in price.seconds.items()},
        "bound_by": {term: price.bound(term) for term in price.seconds},
        "layout": layout,
        "devices": job.layout.devices,
        "hardware": price.device.name,
        "checkpoint": checkpoint(price, held),
        "assumed": assumed(price.device),
    }


def checkpoint(price: Price, held: Memory) -> dict[str, Any]:
    """How often to save. A save stops the run while the state is copied to the host; writing goes on behind it."""
    save = (held.parameters + held.optimizer) / TO_HOST
    between = seconds_between_failures(price.job.layout.devices)
    steps = max(1, round(best_interval(save, between) / price.step))
    lost = lost_share(steps * price.step, save, between)
    return {"every": steps, "save_seconds": save, "seconds_between_failures": between, "lost_share": lost}


def assumed(device: Hardware) -> dict[str, Any]:
    """What belongs to a cluster and not to a chip."""
    return {
        "network_bandwidth": device.network_bandwidth,
        "network_source": device.sources.get("network_bandwidth", "not stated"),
        "devices_per_host": device.per_host,
        "power_limit": device.power_limit or device.power,
    }


def show(price: Price, held: Memory) -> str:
    """The same for a person."""
    job, device = price.job, price.device
    axes = " x ".join(f"{axis} {size}" for axis, size in job.layout.sizes.items() if size > 1) or "one device"
    cut = f"{job.accumulation} x {job.microbatch} sequences of {job.sequence} tokens per batch shard, remat {job.remat}"
    turns = f", {job.schedule} {job.chunks} chunk{'s' * (job.chunks > 1)}" if job.layout.pipeline > 1 else ""
    total, room = held.total, device.memory
    verdict = "fits" if held.fits(device) else "does not fit"
    lines = [
        f"{job.shape.parameters / 1e9:.3g} G parameters on {job.layout.devices} x {device.name}: {axes}{turns}",
        cut,
        "",
        f"step       {price.step:.4g} s   {price.tokens_per_second_per_device:,.0f} tokens/s per device",
        f"speed      {price.model_flops_per_device / 1e12:.3g} TFLOP/s per device, mfu {price.mfu:.1%}, "
        f"bubble {price.bubble_fraction:.1%}",
        f"memory     {total / 1e9:.3g} of {room / 1e9:.3g} GB, {total / room:.0%}: {verdict} (safe: {SAFE:.0%})",
        "",
    ]
    terms = sorted(((s, term) for term, s in price.seconds.items() if s), reverse=True)
    whole = sum(price.seconds.values())
    lines += [
        f"  {term.replace('_', ' '):<24}{price.scale * seconds:>11.4g} s {seconds / whole:>6.1%}  {price.bound(term)}"
        for seconds, term in terms
    ]
    lines += ["", *(f"  {name:<24}{size / 1e9:>11.4g} GB" for name, size in held.describe().items()), ""]
    network = device.sources.get("network_bandwidth", "not stated")
    saves = checkpoint(price, held)
    lines.append(
        f"checkpoint.every={saves['every']}: a save stops {saves['save_seconds']:.2g} s, a device fails every "
        f"{saves['seconds_between_failures'] / 3600:.3g} h; {saves['lost_share']:.2%} of the time is lost to both"
    )
    lines.append(f"assumed: {device.network_bandwidth / 1e9:.0f} GB/s of network per device ({network})")
    return "\n".join(lines)


def sweep(config: RunConfig, devices: int | None, device: Hardware, asked: str) -> list[dict[str, Any]]:
    """`hardware.memory_bandwidth=2e12,3e12`: the estimate at each value."""
    key, _, values = asked.removeprefix("hardware.").partition("=")
    if not asked.startswith("hardware.") or not values:
        raise ConfigError(f"--sweep {asked}", fix="--sweep hardware.memory_bandwidth=2e12,3e12,4e12")
    found = []
    for text in values.split(","):
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"--sweep {asked}: {text!r} is not a number") from None
        other = swept(device, key, value)
        found.append({key: value} | describe(*priced(config, mesh_sizes(config, devices, other), other)))
    return found


def show_sweep(rows: Sequence[dict[str, Any]]) -> str:
    key = next(iter(rows[0]))
    lines = [f"{key:>20} {'step':>11} {'tokens/s/device':>16} {'mfu':>7}  fits"]
    lines += [
        f"{row[key]:>20.4g} {row['step_seconds']:>9.4g} s {row['tokens_per_second_per_device']:>16,.0f} "
        f"{row['mfu']:>7.1%}  {'yes' if row['fits'] else 'no'}"
        for row in rows
    ]
    return "\n".join(lines)


def show_plans(plans: Sequence[search.Plan], found: Sequence[search.Plan]) -> str:
    """A table, best first, and the line to paste; `found` are all, of which `plans` are shown."""
    head = (
        "step",
        "tok/s/dev",
        "mfu",
        "memory",
        "pipe",
        "data",
        "fsdp",
        "ctx",
        "tp",
        "mb",
        "schedule",
        "remat",
        "zero",
    )
    rows = [head]
    for plan in plans:
        job, layout = plan.job, plan.job.layout
        turns = f"{job.schedule} {job.chunks}" if layout.pipeline > 1 else "-"
        sizes = (layout.pipeline, layout.data, layout.fsdp, layout.context, layout.tensor, job.microbatch)
        speed = f"{plan.price.tokens_per_second_per_device:,.0f}", f"{plan.price.mfu:.1%}"
        held = f"{plan.memory.total / 1e9:.1f} GB"
        rows.append((f"{plan.price.step:.4g} s", *speed, held, *map(str, sizes), turns, job.remat, str(job.zero)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    lines = [lines[0] + "  why not", *(line + "  " + plan.why for line, plan in zip(lines[1:], plans, strict=True))]
    best = " ".join(f"--set {setting}" for setting in plans[0].settings)
    close = sum(plan.why.startswith("as good") for plan in plans)
    fit = sum(plan.fits for plan in found)
    note = f"{fit} layouts fit, {len(found) - fit} meshes do not; {close} of those shown are within {search.CLOSE:.0%}"
    return "\n".join([*lines, "", note, "", best])


def plan(config: RunConfig, devices: int, device: Hardware, stack_: Stack) -> list[search.Plan]:
    """Layouts of the config's model and batch, best first."""
    one = config.model_copy(update={"mesh": type(config.mesh)(), "pipeline": type(config.pipeline)()})
    one = one.model_copy(update={"train": config.train.model_copy(update={"microbatch": 1})})
    return search.search(job_of(one, one.mesh.sizes), devices, device, stack_)


def show_generation(found: Generation, device: Hardware) -> str:
    return "\n".join(
        [
            f"prefill    {found.prefill_seconds:.4g} s for {found.batch} x {found.prompt} tokens "
            f"({found.prefill_bound})",
            f"decode     {1e3 * found.token_seconds:.3g} ms per token, {found.tokens_per_second:,.0f} tokens/s "
            f"over {found.batch} sequences ({found.decode_bound})",
            f"cache      {found.cache_bytes / 1e9:.2f} GB, weights {found.weight_bytes / 1e9:.2f} GB per device, "
            f"of {device.memory / 1e9:.0f} GB",
        ]
    )


def show_compiled(compiled: dict[str, Any], held: Memory) -> str:
    """XLA's own figures beside the formula's."""
    xla = compiled["memory"]
    whole = xla["argument_bytes"] + xla["output_bytes"] - xla["alias_bytes"] + xla["temp_bytes"]
    at_rest = held.parameters + held.optimizer
    rows = [
        ("arguments", at_rest, xla["argument_bytes"]),
        ("temporary", held.total - at_rest, xla["temp_bytes"]),
        ("total", held.total, whole),
    ]
    lines = ["", f"compiled in {compiled['compile_seconds']:.0f} s; memory in GB   formula       XLA"]
    lines += [f"  {name:<36}{ours / 1e9:>9.3f} {theirs / 1e9:>9.3f}" for name, ours, theirs in rows]
    lines += [
        f"  {each['count']:>3} x {each['kind']:<20} over {each['axis']:<16}{each['bytes'] / 1e6:>10.2f} MB"
        f"{'  in a loop' if each['inside_loop'] else ''}"
        for each in compiled["collectives"]
    ]
    lines += [
        f"  {each['beside_work']:>3} of {each['count']} {each['kind']} over {each['axis']} run beside matmuls or loops"
        for each in compiled["overlap"]
    ]
    lines += [f"  {count:>3} x {name} called" for name, count in compiled["calls"].items()]
    return "\n".join(lines)
