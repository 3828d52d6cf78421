"""The models whose training step is compared, and what a step of each needs. Imports no jax."""

from pathlib import Path

from spmdtrain.config.load import from_resolved, load, resolved
from spmdtrain.config.schema import (
    AdamW,
    CheckpointConfig,
    DataConfig,
    Llama,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)

CONFIGS = Path(__file__).parents[2] / "configs"
GPT2 = CONFIGS / "gpt2_124m.toml"
SHAKESPEARE = CONFIGS / "shakespeare_char_cpu.toml"
ALONE = ["data.corpus=synthetic", "data.path=none", "data.validation_fraction=0.0", "eval.every=0",
         "optimizer.schedule=constant", "optimizer.warmup=0", "mesh.data=1"]  # fmt: skip
TINY_LLAMA = ["model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=2",
              "model.head_dim=8", "model.ffn=64", "model.vocab=256"]  # fmt: skip
DRY = {
    "gpt2_124m": ["model.layers=2", "model.embed=32", "model.heads=2", "model.vocab=256"],
    "llama_1b": TINY_LLAMA,
    "llama_8b": TINY_LLAMA,
    "llama_4_layers": TINY_LLAMA,
}
# What is trained on CPUs, in float32: nanoGPT's setting of 0.8 M parameters, and one of 5.8 M.
ON_CPU = {
    "shakespeare": ["model.vocab=96"],
    "gpt_6m": ["model.layers=6", "model.embed=256", "model.heads=8", "model.vocab=4096",
               "model.bias=true", "train.sequence_length=256", "train.global_batch=8"],
}  # fmt: skip
# Bytes a parameter that every contender holds: a float32 weight, its gradient and two moments.
HELD = 16
SPARE = 1.15  # of that, with the activations of a step


def configuration(shape: str, dry: bool) -> RunConfig:
    if shape in ON_CPU:
        return load(SHAKESPEARE, [*ALONE, "precision.compute=float32", *ON_CPU[shape]])
    tiny = ["train.global_batch=4", "train.sequence_length=32", "precision.compute=float32"]
    sizes = [*DRY[shape], *tiny] if dry else []
    if shape == "gpt2_124m":
        batch = ["train.microbatch=none", "train.global_batch=32"]
        return load(GPT2, [*ALONE, *batch, *sizes])
    return from_resolved(resolved(LLAMAS[shape]()), [*ALONE, *sizes])


def llama_1b() -> RunConfig:
    """Llama 3.2 1B on 8 k tokens: 1.24 G parameters."""
    model = Llama(
        layers=16, embed=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256,
        rope_theta=500_000.0, tied=True,
    )  # fmt: skip
    return _llama(model, length=8192)


def llama_8b() -> RunConfig:
    """Llama 3 8B: 8.03 G parameters."""
    model = Llama(
        layers=32, embed=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
        rope_theta=500_000.0, tied=False,
    )  # fmt: skip
    return _llama(model, length=4096)


def llama_4_layers() -> RunConfig:
    """Four layers of Llama 3 8B, with its vocabulary: 1.92 G parameters."""
    whole = llama_8b()
    model = whole.model.model_copy(update={"layers": 4})
    train = whole.train.model_copy(update={"global_batch": 2, "remat": "dots"})
    return whole.model_copy(update={"model": model, "train": train})


LLAMAS = {"llama_1b": llama_1b, "llama_8b": llama_8b, "llama_4_layers": llama_4_layers}


def _llama(model: Llama, length: int) -> RunConfig:
    return RunConfig(
        model=model,
        train=TrainConfig(global_batch=1, sequence_length=length),
        optimizer=AdamW(learning_rate=3e-4, weight_decay=0.1),
        precision=PrecisionConfig(compute="bfloat16"),
        data=DataConfig(corpus="synthetic"),
        checkpoint=CheckpointConfig(every=0),
    )


def least_bytes(config: RunConfig) -> float:
    """Returns the bytes that a step of this model needs at least, on one device."""
    model = config.model
    attention = model.embed * model.head_dim * 2 * (model.heads + model.kv_heads)
    mlp = (3 if model.mlp == "swiglu" else 2) * model.embed * model.ffn
    tables = (1 if model.tied else 2) * model.embed * (model.vocab or 0)
    return SPARE * HELD * (model.layers * (attention + mlp) + tables)
