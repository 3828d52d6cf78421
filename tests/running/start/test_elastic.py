"""A run that is resumed on other devices than its mesh wants goes on, with the batches that it
would have had.
"""

import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import tiny
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.config.errors import ConfigError
from spmdtrain.running import loop
from spmdtrain.running.start.elastic import choose_layout

pytestmark = pytest.mark.usefixtures("shared_programs")

STEPS = 9
MESH = {"mesh.data": 2, "mesh.fsdp": 2}
SETTINGS = (
    "model.layers=1",
    "model.embed=16",
    "model.dropout=0.1",
    "train.global_batch=8",
    f"train.steps={STEPS}",
    "optimizer.schedule=constant",
    *(f"{axis}={size}" for axis, size in MESH.items()),
)
sizes = st.integers(1, 4)


@given(
    sizes,
    sizes,
    sizes,
    sizes,
    st.integers(1, 24),
    st.sampled_from([8, 12, 24, 48]),
    st.sampled_from([None, 1, 2]),
)
def test_the_layout_keeps_what_it_must_and_is_refused_only_where_none_would_do(
    data, fsdp, expert, tensor, count, batch, microbatch
):
    wanted = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
    shards = data * fsdp * expert * (microbatch or 1)
    if batch % shards:
        return
    config = tiny(
        f"train.global_batch={batch}", f"train.microbatch={microbatch or 'none'}", "model.embed=64"
    )
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=wanted)})
    stay = expert * tensor
    try:
        layout = choose_layout(config, count)
    except ConfigError as error:
        assert batch % (count // tensor), "some data x fsdp would have done"
        devices, batches = re.search(
            r"try (.*) devices, or --set train.global_batch=(.*)$", str(error)
        ).groups()
        for each in devices.split(" or "):
            assert choose_layout(config, int(each)) is not None
        for each in batches.split(" or "):
            more = config.model_copy(
                update={"train": config.train.model_copy(update={"global_batch": int(each)})}
            )
            assert choose_layout(more, count) is not None
        return
    if layout is None:
        assert count % stay
        return
    assert math.prod(layout.sizes.values()) == count
    assert {axis: layout.sizes[axis] for axis in ("expert", "tensor")} == {
        "expert": expert,
        "tensor": tensor,
    }
    assert layout.sizes["fsdp"] <= fsdp
    at_once = count // tensor * layout.microbatch
    assert batch % at_once == 0
    assert layout.microbatch <= batch // (data * fsdp * expert), (
        "a device would take more at once than before"
    )
    assert layout.accumulation(batch) == batch // at_once
    if count == data * fsdp * stay:
        assert layout.sizes == dict.fromkeys(layout.sizes, 1) | wanted
        assert layout.microbatch * data * fsdp * expert * layout.accumulation(batch) == batch


def run(directory: Path, devices: int, *settings: str, stop: int = 0) -> loop.Outcome:
    """`stop`: the step after which it stops."""
    hooks = [lambda event, step, _: event == "step" and step == stop - 1]
    return loop.run(
        tiny(*SETTINGS, *settings), directory, devices=jax.devices()[:devices], hooks=hooks
    )


def losses(directory: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.long
def test_a_run_shrinks_and_grows_and_trains_the_same(tmp_path, capsys):
    run(tmp_path / "undisturbed", 4)
    moved = tmp_path / "moved"
    assert run(moved, 4, stop=3).step == 3
    assert run(moved, 2, stop=6).step == 6
    said = capsys.readouterr().out
    line = (
        "the mesh data 2 x fsdp 2 does not fit the 2 devices that are available: "
        "continuing with fsdp 2 and 2 microbatches"
    )
    assert line in said
    with pytest.raises(
        ConfigError,
        match="not divisible by 3 shards.* try 2 or 4 devices, or .*global_batch=6 or 9$",
    ):
        run(moved, 3)
    with pytest.raises(ConfigError, match="the mesh does not fit the 1 device"):
        run(moved, 1, "mesh.elastic=false")
    with pytest.raises(ConfigError, match="the mesh does not fit the 1 device"):
        run(moved, 1, "mesh.data=4")  # somebody has changed it, and means it
    with pytest.raises(ConfigError, match="the mesh does not fit the 1 device"):
        run(tmp_path / "new", 1)
    assert run(moved, 8).status == "finished"
    np.testing.assert_allclose(losses(moved), losses(tmp_path / "undisturbed"), rtol=1e-5)
    events = [json.loads(line) for line in (moved / "events.jsonl").read_text().splitlines()]
    meshes = [event["mesh"] for event in events if event["event"] in ("started", "resumed")]
    assert [(mesh["data"], mesh["fsdp"]) for mesh in meshes] == [(2, 2), (1, 2), (4, 2)]
    assert [event["step"] for event in events if event["event"] == "adapted"] == [3, 6]
    kept = json.loads((moved / "config.json").read_text())["config"]
    assert (kept["mesh"]["data"], kept["train"]["microbatch"]) == (2, None), (
        "what was asked, for when they are back"
    )
