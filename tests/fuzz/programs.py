"""What a run has compiled is kept for the next run that asks for the same.

A draw runs up to four times, mostly in layouts that it, or a draw beside it, has run in before, and
would spend nearly all its time on compiling the same programs again. Whatever of the settings a
program may depend on is in its key, so what is kept is what would be compiled.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax

from spmdtrain.config import RunConfig
from spmdtrain.lab.replay import opened
from spmdtrain.running.compile_step import compile_step, lower_step, with_stages
from spmdtrain.running.start import begin, compiling, sharding
from spmdtrain.train import evaluation
from spmdtrain.train import fresh as fresh_weights
from spmdtrain.train.distillation.run_teacher import teacher_of
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard

WITHOUT = ("checkpoint", "log", "eval")  # sections that no program depends on
KEPT = 24  # the layouts of a few neighbouring draws, and of their changed settings
Key = tuple[str, str, tuple]

_kept: dict[tuple, Any] = {}


def forget() -> None:
    """Where what is compiled has changed, as a test does that plants a fault."""
    _kept.clear()


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Runs inside share what they compile with those before them."""
    evaluate = evaluation.make_eval_step

    def setup(config, make, devices, loss=None, **own):
        assert not any(own.values()), "an optimizer of one's own is in no key"
        key = _key(config, devices, make, loss)
        found = _once("setup", key, lambda: shard(config, make, devices, loss=loss))
        return replace(found, config=config)

    def fresh(setup):
        teacher = teacher_of(setup)
        if teacher is not None and teacher.on_disk is None:
            return init_state(setup)  # refuses
        key = _key_of(setup)
        if ("state", *key) not in _kept:
            state = init_state(setup)
            _once("state", key, lambda: jax.device_get(state))
            return state
        shardings = jax.tree.map(lambda x: x.sharding, setup.state)
        return jax.device_put(_once("state", key, lambda: None), shardings)

    def lowered(setup):
        return _once("lowered", _key_of(setup), lambda: lower_step(setup))

    def compiled(setup, lowered):
        return _once("step", _key_of(setup), lambda: compile_step(setup, lowered))

    def staged(setup, step, report, done=0):  # noqa: ARG001 - stages that are over are kept too
        if not setup.config.train.stages:
            return step, report
        return _once("stages", _key_of(setup), lambda: with_stages(setup, step, report))

    replaced = [
        (sharding, "shard", setup),
        (begin, "lower_step", lowered),
        (compiling, "lower_step", lowered),
        (compiling, "compile_step", compiled),
        (compiling, "with_stages", staged),
        (fresh_weights, "init_state", fresh),
        (opened, "lower_step", lowered),
        (opened, "compile_step", compiled),
        (opened, "with_stages", staged),
        (opened, "init_state", fresh),
    ]

    def eval_step(setup):
        return _once("evaluation", _key_of(setup), lambda: evaluate(setup))

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(evaluation, "make_eval_step", eval_step))
        for module, name, what in replaced:
            stack.enter_context(patch.object(module, name, what))
        yield


def _once(what: str, key: Key, make: Callable[[], Any]) -> Any:
    """The newest are kept, each for as long as it is asked for."""
    at = (what, *key)
    found = _kept.pop(at) if at in _kept else make()
    _kept[at] = found
    while len(_kept) > KEPT * 5:
        del _kept[next(iter(_kept))]
    return found


def _key_of(setup: Setup) -> Key:
    return _key(setup.config, setup.mesh.devices.ravel(), setup.make, setup.loss)


def _key(
    config: RunConfig, devices: Iterable[jax.Device] | None, *parts: Callable | str | None
) -> Key:
    settings = config.model_dump(mode="json")
    for section in WITHOUT:
        del settings[section]
    del settings["train"]["init_from"]
    devices = jax.devices() if devices is None else devices
    return json.dumps(settings, sort_keys=True), str([device.id for device in devices]), parts
