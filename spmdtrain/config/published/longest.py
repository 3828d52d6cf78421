"""Refuses sequences that are longer than those of a published model."""

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.load import COMMAND_LINE
from spmdtrain.config.published.read_config import Published
from spmdtrain.config.schema import RunConfig


def check_longest(published: Published, config: RunConfig) -> None:
    """Raises ConfigError for a longer `model.max_length`, unless --set scales rotary positions."""
    longest, asked = published.settings["max_length"], config.model.max_length
    scaled = any(
        origin == COMMAND_LINE and name.startswith("model.rope_scaling")
        for name, origin in config.origin.items()
    )
    if asked <= longest or scaled:
        return
    scaling = f"kind=yarn factor={-(-asked // longest)} original_length={longest}"
    rotary = " ".join(f"--set model.rope_scaling.{each}" for each in scaling.split())
    raise ConfigError(
        f"{published.folder} reads at most {longest:,} tokens",
        asked=f"model.max_length={asked}",
        fix=rotary if config.model.positions == "rope" else f"--max-length {longest}",
    )
