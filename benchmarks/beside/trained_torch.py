"""Trains nanoGPT's CPU setting in eager PyTorch: what docs/open_model.md compares a run with.

    python benchmarks/beside/trained_torch.py --text FILE [--seed N] [--threads N]

The settings are those of configs/shakespeare_char_cpu.toml, and the loop is what one writes by
hand: windows at random offsets, first values and order from PyTorch's own generator. The loss is
that of the whole held-out end of the text, in windows side by side, as our runs evaluate it.
"""

import argparse
import math
import resource
from pathlib import Path

import torch
from shapes import CONFIGS
from torch_model import Transformer

from spmdtrain.config.load import load
from spmdtrain.config.schema import AdamW, RunConfig

SPREAD = 0.02  # standard deviation of the first values, as GPT-2 has it
EVALUATED_AT_ONCE = 64  # windows


def ids_of(text: str) -> torch.Tensor:
    """Returns the number of each character among those that occur."""
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text])


def first_values(model: Transformer, layers: int) -> None:
    """Draws GPT-2's first values; what ends in the stream is smaller, by the depth."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            ends = name.endswith(("out.weight", "down.weight"))
            torch.nn.init.normal_(parameter, std=SPREAD / math.sqrt(2 * layers) ** ends)


def rate_at(step: int, asked: AdamW, steps: int) -> float:
    """Returns the learning rate of step `step`, from 0: a line up, then half a cosine down."""
    if step < asked.warmup:
        return asked.learning_rate * (step + 1) / (asked.warmup + 1)
    share = (step - asked.warmup) / (steps - asked.warmup)
    low = asked.final_learning_rate
    return low + (asked.learning_rate - low) * (1 + math.cos(math.pi * share)) / 2


def windows(ids: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Returns [window, length + 1]: inputs, and the targets one further."""
    return ids[starts[:, None] + torch.arange(length + 1)]


def trained(config: RunConfig, ids: torch.Tensor) -> Transformer:
    train, asked = config.train, config.optimizer
    assert isinstance(asked, AdamW)
    model = Transformer(config.model, train.sequence_length)
    first_values(model, config.model.layers)
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": asked.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(asked.beta1, asked.beta2),
        eps=asked.epsilon,
        fused=True,
    )
    for step in range(train.steps):
        starts = torch.randint(len(ids) - train.sequence_length, (train.global_batch,))
        batch = windows(ids, starts, train.sequence_length)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, asked, train.steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 500 == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    return model


@torch.no_grad()
def evaluated(model: Transformer, ids: torch.Tensor, length: int) -> float:
    """Returns the mean loss of the held-out text, without the end that fills no window."""
    batches = windows(ids, torch.arange(0, len(ids) - length, length), length)
    losses = [
        (float(model(each[:, :-1], each[:, 1:])), len(each))
        for each in batches.split(EVALUATED_AT_ONCE)
    ]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="default: PyTorch's own choice")
    parser.add_argument("--steps", type=int, help="default: those of the config")
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    ids = ids_of(chosen.text.read_text(encoding="utf-8"))
    steps = [f"train.steps={chosen.steps}", "optimizer.warmup=0"] if chosen.steps else []
    sizes = [f"model.vocab={int(ids.max()) + 1}", *steps]
    config = load(CONFIGS / "shakespeare_char_cpu.toml", sizes)
    kept = int(len(ids) * (1 - config.data.validation_fraction))
    model = trained(config, ids[:kept])
    loss = evaluated(model, ids[kept:], config.train.sequence_length)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"{sum(each.numel() for each in model.parameters())} parameters, "
        f"held-out loss {loss:.4f}, {used.ru_utime + used.ru_stime:.0f} CPU seconds"
    )


if __name__ == "__main__":
    main()
