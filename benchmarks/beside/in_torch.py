"""Times the step in plain PyTorch: torch.compile, flash attention, autocast, fused AdamW.

On CPUs it is eager PyTorch in float32.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_model import Transformer

from spmdtrain.config.schema import RunConfig

AUTO = {True: [SDPBackend.MATH], False: [SDPBackend.FLASH_ATTENTION]}  # by whether it runs dry


def measured(config: RunConfig, chosen: Namespace) -> dict[str, Any]:
    """Takes the first values and batches from `chosen.start`, which a step in jax has written."""
    device = "cpu" if chosen.on_cpu else "cuda"
    given = dict(np.load(chosen.start))
    pairs = []
    while f"batch{len(pairs)}.tokens" in given:
        names = [f"batch{len(pairs)}.{name}" for name in ("tokens", "targets")]
        pairs.append([torch.from_numpy(given.pop(name)).long().to(device) for name in names])
    model = Transformer(config.model, config.train.sequence_length)
    model.take(given)
    model.to(device)
    step = make_step(config, model, chosen.on_cpu)

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    with sdpa_kernel(AUTO[chosen.dry]):
        losses = [float(step(*pair)) for pair in pairs]
        for i in range(chosen.warmup):
            step(*pairs[i % len(pairs)])
        wait()
        start, cpu_start = time.perf_counter(), time.process_time()
        for i in range(chosen.steps):
            step(*pairs[i % len(pairs)])
        wait()
    return {
        "seconds": (time.perf_counter() - start) / chosen.steps,
        "cpu_seconds": (time.process_time() - cpu_start) / chosen.steps,
        "losses": losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "version": f"torch {torch.__version__}",
    }


def make_step(config: RunConfig, model: Transformer, on_cpu: bool) -> Callable:
    """Returns `step(tokens, targets) -> loss`, which updates the model."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    asked = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=asked.learning_rate,
        betas=(asked.beta1, asked.beta2),
        eps=asked.epsilon,
        weight_decay=asked.weight_decay,
        fused=True,
    )
    run = model if on_cpu else torch.compile(model)

    def step(tokens, targets):
        with torch.autocast("cuda", torch.bfloat16, enabled=not on_cpu):
            loss = run(tokens, targets)
        loss.backward()
        if config.train.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
