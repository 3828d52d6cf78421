"""Compares an imported model with transformers, where that is installed."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.config import ConfigError
from spmdtrain.config.published.read_config import NAME
from spmdtrain.inference.sample import make_logits
from spmdtrain.models.abstract import cast
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard_on

TOKENS = 64
# Model types that AutoModelForCausalLM of transformers 5.24 does not know, and their classes.
OF_NO_AUTO_CLASS = {
    "mistral3": "Mistral3ForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
}
LONGEST = 300  # characters of an error of transformers
UNCHECKED = "or no --check to import it all the same"
TOLERANCE = 2e-6  # relative error of the root mean square, several times the noise of most models
OF_NOISE = 3  # what a model enlarges rounding by decides: a difference of so many times its noise


def require_transformers() -> None:
    """Raises ConfigError if torch or transformers is missing."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise ConfigError(
                f"--check compares with transformers, and {package} is not installed",
                fix=f"pip install torch transformers, {UNCHECKED}",
            )


def check_logits(folder: str | Path, setup: Setup, params: Mapping[str, jax.Array]) -> str:
    """Returns a line with the difference between the two models' logits of 64 random tokens.

    Both compute in float32. The packages of `require_transformers` must be installed. Raises
    ConfigError if the difference is larger than rounding explains: `TOLERANCE`, or `OF_NOISE` times
    what rounding each weight otherwise does to our logits.
    """
    config = setup.config
    length = min(TOKENS, config.model.max_length)
    ids = np.setdiff1d(np.arange(config.vocab), placeholders(folder))
    tokens = np.random.default_rng(0).choice(ids, (1, length))
    theirs = _theirs(folder, tokens)
    exact = config.precision.model_copy(update={"params": "float32", "compute": "float32"})
    in_float32 = shard_on(config.model_copy(update={"precision": exact}), setup.mesh)
    logits_of, wide = make_logits(in_float32), cast(params, "float32")
    ours = np.asarray(logits_of(wide, tokens), np.float64)
    difference = _apart(ours[..., : theirs.shape[-1]], theirs)
    line = f"logits of {length} random tokens differ from transformers' by {difference:.1e} (rms)"
    if difference <= TOLERANCE:
        return line
    noise = _apart(np.asarray(logits_of(rounded_otherwise(wide), tokens), np.float64), ours)
    line = f"{line}; rounding its weights otherwise moves them by {noise:.1e}"
    tolerance = max(TOLERANCE, OF_NOISE * noise)
    if not difference <= tolerance:
        raise ConfigError(
            f"{folder}: the {line}",
            asked=f"{tolerance:.0e}",
            fix=f"an issue that names it, {UNCHECKED}",
        )
    return line


@jax.jit
def rounded_otherwise(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns each number of the weights, float32, as it is or as one of its two neighbours."""

    def moved(key: jax.Array, x: jax.Array) -> jax.Array:
        way = jax.random.randint(key, x.shape, -1, 2).astype(x.dtype)
        return jnp.where(way == 0, x, jnp.nextafter(x, way * jnp.inf))

    keys = jax.random.split(jax.random.key(0), len(params))
    return {path: moved(key, params[path]) for key, path in zip(keys, sorted(params), strict=True)}


def _apart(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def placeholders(folder: str | Path) -> list[int]:
    """Returns the ids in whose place a model with a tower reads pictures or sound, as Gemma 4 does,
    which embeds them as padding.
    """
    values = json.loads((Path(folder) / NAME).read_bytes())
    if "text_config" not in values:
        return []
    ends = ("_token_id", "_token_index")
    return [x for key, x in values.items() if key.endswith(ends) and isinstance(x, int)]


def class_in_transformers(folder: str | Path) -> Any:
    """Returns the class by which transformers loads the model in a directory."""
    import transformers  # pyright: ignore[reportMissingImports]  in no extra of ours

    kind = json.loads((Path(folder) / NAME).read_bytes())["model_type"]
    name = OF_NO_AUTO_CLASS.get(kind, "AutoModelForCausalLM")
    return getattr(transformers, name)


def _theirs(folder: str | Path, tokens: np.ndarray) -> np.ndarray:
    import torch  # pyright: ignore[reportMissingImports]  in no extra of ours

    try:
        model: Any = class_in_transformers(folder).from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",  # other ones leave out score caps in transformers 4
        )
    except Exception as error:  # noqa: BLE001 - another program's, which may raise anything
        raise ConfigError(
            f"transformers {version('transformers')} does not load {folder}",
            found=f"{type(error).__name__}: {error}"[:LONGEST],
            fix=f"another version of transformers, {UNCHECKED}",
        ) from None
    with torch.no_grad():
        return model.float().eval()(torch.tensor(tokens)).logits.double().numpy()
