"""Makes the setup of a run that reads data."""

from collections.abc import Sequence
from typing import Any

import jax

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.choose import MakeModel
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard


def shard_with_weights(
    config: RunConfig,
    make: MakeModel | str | None,
    devices: Sequence[jax.Device] | None,
    tokenizer: dict[str, Any] | None,
    **parts: Any,
) -> Setup:
    """Returns what `shard` does, with the weights of its teacher opened if the run has one.

    `tokenizer`: the spec of the tokenizer of the data, None if they are ids; `parts` as in `shard`.
    Raises ConfigError if the teacher has another tokenizer.
    """
    if config.distill.teacher is None:
        return shard(config, make, devices, **parts)
    from spmdtrain.running.distillation.teacher_weights import shard_with_teacher

    return shard_with_teacher(config, make, devices, tokenizer, **parts)
