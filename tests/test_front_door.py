"""`import spmdtrain as st`: the public names, there when they are asked for and not before."""

import importlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import tiny

import spmdtrain as st


@pytest.mark.parametrize("name", st.__all__)
def test_every_public_name_is_there_and_documented(name):
    found = getattr(st, name)
    if name != "__version__":
        assert found.__doc__, f"{name} has no docstring"
        assert name in dir(st)


def test_a_name_that_is_none_is_said_so():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = st.trian


def test_no_room_takes_the_name_of_a_public_one():
    """Importing a room binds its name in the package: a verb of that name would be gone."""
    rooms = {home.partition(".")[0] for home in st._HOMES.values()}
    assert not rooms & set(st.__all__)
    importlib.import_module("spmdtrain.running.loop")
    assert callable(st.run)


def test_importing_the_package_imports_neither_jax_nor_numpy():
    program = "import sys, spmdtrain; sys.exit(bool({'jax', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_one_step_by_hand():
    config, data = st.open_data(tiny("mesh.data=2"))
    setup = st.shard(config, devices=jax.devices()[:2])
    state = st.init_state(setup)
    step = st.make_step(setup)
    with st.batches(setup, data, 0, 0) as ahead:
        state, metrics = step(state, next(ahead))
    assert int(state.step) == 1 and np.isfinite(float(metrics["loss"]))
