"""A run that does not fit ends in one line: what it needs, what is there, and the cheapest
change.
"""

import re
from functools import partial

import jax
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.compiled.step_memory import memory_in
from spmdtrain.config import ConfigError, to_toml
from spmdtrain.config.load import from_resolved, resolved
from spmdtrain.planner.settings.remedy import cheapest_change
from spmdtrain.running.compile_step import lower_step
from spmdtrain.running.guards import host_memory, out_of_memory
from spmdtrain.running.guards.out_of_memory import OutOfMemoryError
from spmdtrain.running.start import compiling

SETTINGS = ("train.steps=2", "train.global_batch=8", "train.sequence_length=64")
DEVICES = jax.devices()
ONE = {"devices": DEVICES[:1]}


@pytest.mark.core
@pytest.mark.seconds
def test_at_compile_time_the_line_names_needs_and_a_change_that_fits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda *_: DEVICES[:1])
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    (tmp_path / "tiny.toml").write_text(to_toml(tiny(*SETTINGS)))
    needs = []
    limit = 1_500_000

    def read(report):
        needs.append(memory_in(report).held)
        return memory_in(report)

    monkeypatch.setattr(out_of_memory, "memory_in", read)
    monkeypatch.setattr(out_of_memory, "available_bytes", lambda _: limit)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    assert main(["train", "tiny.toml"]) == ConfigError.exit_code
    said = capsys.readouterr().err
    pattern = (
        r"out of memory: the step needs \d\.\d MB of a device; found 1.5 MB available, "
        r"parameters 0.\d MB, optimizer 0.\d MB, "
        r"activations and the rest of the step \d\.\d MB; try (--set train\.\S+.*)$"
    )
    match = re.search(pattern, said.strip())
    assert match, said
    assert needs[0] > limit
    needs.clear()
    assert main(["train", "tiny.toml", *match[1].split()]) == 0
    assert needs[0] <= limit


@pytest.mark.core
@pytest.mark.seconds
def test_what_jax_raises_at_run_time_is_the_same_line(tmp_path, monkeypatch):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.")

    monkeypatch.setattr(compiling, "compile_step", exhausted)
    with pytest.raises(
        OutOfMemoryError, match="the step needs more than a device has; found .*parameters 0.. MB"
    ):
        st.run(tiny("train.steps=2"), tmp_path, **ONE)

    def other(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(compiling, "compile_step", other)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        st.run(tiny("train.steps=2"), tmp_path, **ONE)


def test_the_share_that_jax_takes_is_named_where_it_is_all_that_is_wrong(monkeypatch):
    share, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(share, raising=False)
    monkeypatch.delenv(old, raising=False)
    larger = "XLA_CLIENT_MEM_FRACTION=0.92 before the command: jax takes 0.75 of it"
    assert out_of_memory._larger_share(70, 60) == larger
    assert out_of_memory._larger_share(80, 60) == "", "80 of 80 does not fit at all"
    monkeypatch.setenv(share, "0.85")
    assert out_of_memory._larger_share(70, 68) == larger.replace("0.75", "0.85")
    monkeypatch.setenv(share, "0.92")
    assert out_of_memory._larger_share(70, 60) == "", "jax takes all that it should"
    monkeypatch.delenv(share)
    monkeypatch.setenv(old, "0.75")  # jax refuses both
    assert out_of_memory._larger_share(70, 60) == larger.replace(share, old)


def test_the_cheapest_change_comes_first_and_the_impossible_has_none():
    config = tiny(*SETTINGS, "train.global_batch=64")
    sizes = dict.fromkeys(("pipeline", "fsdp", "expert", "context", "tensor"), 1) | {"data": 8}
    assert cheapest_change(config, sizes, 0.9) == ["train.microbatch=4"]
    assert cheapest_change(config, sizes, 0.01) == []
    hard = cheapest_change(config, sizes, 0.12)
    assert any(setting.startswith("train.zero=1") or "fsdp" in setting for setting in hard)


def test_no_change_is_offered_that_the_run_would_refuse():
    """ZeRO-1 would be the cheapest, but for what the codec keeps of each weight."""
    sizes = dict.fromkeys(("pipeline", "fsdp", "expert", "context", "tensor"), 1) | {"data": 8}
    for codec, offered in (("none", True), ("lowrank", False)):
        asked = ("train.global_batch=8", "mesh.data=8", f"compression.codec={codec}")
        values = resolved(tiny(*SETTINGS, *asked))
        changes = cheapest_change(from_resolved(values), sizes, 0.95)
        assert changes and ("train.zero=1" in changes) == offered
        from_resolved(values, changes)


@pytest.mark.long
def test_a_step_that_the_host_has_no_memory_for_is_refused_before_it_runs(tmp_path, monkeypatch):
    """Simulated devices share the host; what fits is let alone, to the byte."""
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(host_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "LIMITS", (tmp_path / "limit",))
    config = tiny(*SETTINGS, "mesh.data=2")
    setup = st.shard(config, devices=DEVICES[:2])
    _, report = compiling.compile_step(setup, lower_step(setup))
    needed = 2 * memory_in(report).held
    steps = []
    for size, fits in ((needed // 1024 + 2, True), (needed // 1024 - 2, False)):
        meminfo.write_text(f"MemTotal: {size - 1} kB\nMemFree: 5 kB\nSwapTotal: 1 kB\n")
        run = partial(st.run, config, tmp_path / str(size), devices=DEVICES[:2])
        hook = lambda event, step, _: steps.append((event, step))  # noqa: E731
        if fits:
            assert run(hooks=[hook]).step == 2
            assert ("step", 1) in steps
            steps.clear()
        else:
            with pytest.raises(OutOfMemoryError, match=r"the step needs .* of a device; found"):
                run(hooks=[hook])
            assert not steps


@pytest.mark.parametrize(
    ("meminfo", "limit", "want"),
    [
        ("MemTotal:  100 kB\nSwapTotal: 20 kB\n", None, 120 * 1024),
        ("MemTotal:  100 kB\nSwapTotal: 20 kB\n", "max\n", 120 * 1024),
        ("MemTotal:  100 kB\nSwapTotal: 20 kB\n", "4096\n", 4096),
        ("MemTotal:  100 kB\nSwapTotal: 20 kB\n", "9223372036854771712\n", 120 * 1024),
        ("MemTotal:\n", None, None),
        (None, "4096", 4096),
        (None, None, None),
    ],
)
def test_the_memory_of_a_host_is_what_it_has_or_what_its_group_may_have(
    meminfo, limit, want, tmp_path, monkeypatch
):
    for name, content in (("MEMINFO", meminfo), ("limit", limit)):
        if content is not None:
            (tmp_path / name).write_text(content)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "MEMINFO")
    monkeypatch.setattr(host_memory, "LIMITS", (tmp_path / "limit",))
    assert host_memory.host_bytes() == want
