"""Refuses sequences that are longer than those of a published model."""

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.load import COMMAND_LINE
from spmdtrain.config.published.read_config import Published
from spmdtrain.config.schema import RunConfig


def check_longest(published: Published, config: RunConfig) -> None:
    """Raises ConfigError if `model.max_length` exceeds the published one, unless --set scales the
    rotary positions.
    """
    longest, length = published.settings["max_length"], config.model.max_length
    scaled = any(
        origin == COMMAND_LINE and name.startswith("model.rope_scaling")
        for name, origin in config.origin.items()
    )
    if length <= longest or scaled:
        return
    scaling = f"kind=yarn factor={-(-length // longest)} original_length={longest}"
    rotary = " ".join(f"--set model.rope_scaling.{pair}" for pair in scaling.split())
    raise ConfigError(
        f"{published.folder} reads at most {longest:,} tokens",
        asked=f"model.max_length={length}",
        fix=rotary if config.model.positions == "rope" else f"--max-length {longest}",
    )
