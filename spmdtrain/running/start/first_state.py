"""Makes the state that a new run starts from, with the weights that `train.init_from` names."""

import sys
from collections.abc import Callable
from pathlib import Path

import jax

from spmdtrain.train import fresh
from spmdtrain.train.setup import Setup, check_setup
from spmdtrain.train.state import TrainState


def init_state(setup: Setup) -> TrainState:
    """Returns the state at step 0, each leaf born in its shards.

    Its weights are those of the run or the folder of Hugging Face that `train.init_from` names, on
    the mesh of `setup`; without it they depend only on the seed. All processes call it. Raises
    UserError if there are no such weights, or if they do not fit the model. Raises ConfigError if
    `train.epochs` has not been converted to steps, which the learning rate needs.
    """
    check_setup(setup)
    if source := setup.config.train.init_from:
        from spmdtrain.running.start.init_from import check_source

        check_source(setup.config, None, Path(source), fresh=False)
    return first_state(setup, _say)


def first_state(
    setup: Setup, say: Callable[[str], None], directory: Path | None = None
) -> TrainState:
    """Returns what `init_state` does; `say` prints remarks about the weights.

    The files around published weights are kept in the run `directory`, if there is one.
    """
    source = setup.config.train.init_from
    if source is None:
        return fresh.init_state(setup)
    from spmdtrain.running.start.init_from import weights_of
    from spmdtrain.train.external_arrays.state_from_weights import with_weights

    return with_weights(setup, weights_of(Path(source), setup, say, directory))


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(f"spmdtrain: {line}", file=sys.stderr)
