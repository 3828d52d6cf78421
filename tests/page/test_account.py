"""The account of time that is read from the events of a run, against the launcher's."""

import json
import time
from pathlib import Path

import jax
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.config.run_files import EVENTS
from spmdtrain.lab.page.account import account, stretches
from spmdtrain.processes import pulse
from spmdtrain.processes.goodput import DOWN, REPEATED, Goodput
from spmdtrain.running import loop
from spmdtrain.running.start import begin, compiling

SETTINGS = (
    "train.steps=9",
    "train.global_batch=2",
    "model.layers=1",
    "eval.every=3",
    "eval.batches=1",
    "checkpoint.every=2",
)
FAILS_AT = 7  # its figures are read, and nothing after step 6 is saved
SECONDS = {"compile": 20.0, "evaluate": 5.0, "save": 3.0, "restore": 7.0, "step": 1.0, "down": 11.0}


class Clock:
    """The time on the wall, which stands still but where a test says what takes how long."""

    def __init__(self):
        self.now = 1_000_000.0

    def slow(self, function, what: str):
        def slowed(*given, **named):
            self.now += SECONDS[what]
            return function(*given, **named)

        return slowed


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """Two attempts at a run, of which the first fails: (its events, what a launcher heard)."""
    directory = tmp_path_factory.mktemp("account") / "run"
    clock = Clock()
    goodput = Goodput(now=lambda: clock.now)
    told = pulse.tell

    def tell(what: str, step: int = 0) -> None:
        told(what, step)
        goodput.heard(what, step)

    def hook(event: str, step: int, _):
        if event == "step" and step == FAILS_AT and not (directory / "failed").exists():
            (directory / "failed").touch()
            raise RuntimeError
        clock.now += SECONDS["step"] if event == "step" else 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: clock.now)
        patch.setattr(pulse, "tell", tell)
        patch.setattr(compiling, "compile_step", clock.slow(compiling.compile_step, "compile"))
        patch.setattr(begin, "chosen_or_newest", clock.slow(begin.chosen_or_newest, "restore"))
        patch.setattr(Checkpoints, "save", clock.slow(Checkpoints.save, "save"))
        makes = loop.make_eval_figures
        patch.setattr(
            loop,
            "make_eval_figures",
            lambda *given: clock.slow(makes(*given), "evaluate"),
        )

        def run():
            return st.run(tiny(*SETTINGS), directory, devices=jax.devices()[:1], hooks=[hook])

        with pytest.raises(RuntimeError):
            run()
        goodput.failed()
        clock.now += SECONDS["down"]
        assert run().status == "finished"
        goodput.enter(DOWN)
    events = [json.loads(line) for line in (directory / EVENTS).read_text().splitlines()]
    return events, goodput.report()


@pytest.mark.seconds
def test_the_account_that_is_read_is_the_one_that_a_launcher_keeps(attempts):
    events, heard = attempts
    assert account(events) == heard
    seconds = heard["seconds"]
    # The first attempt had nothing to restore.
    assert (seconds[pulse.COMPILE], seconds[pulse.RESTORE], seconds[DOWN]) == (40, 7, 11)
    assert seconds[pulse.EVALUATE] == 15
    assert seconds[pulse.STEP] + seconds[REPEATED] == 7.0  # all but the first of each attempt
    assert heard["wall_seconds"] == events[-1]["time"] - events[0]["time"]


def test_an_attempt_that_was_killed_ends_with_its_last_line(attempts):
    """Its lines of metrics are gone, and `launched` of the next attempt has the time of the last.

    It ends at the same moment as the attempt that could say so.
    """
    events, heard = attempts
    killed = [each for each in events if each.get("exit_code") != 1]
    assert len(killed) == len(events) - 1
    assert account(killed) == heard
    [before] = [each["before"] for each in events if "before" in each]
    assert before["step"] == FAILS_AT


def test_every_moment_of_a_run_cut_anywhere_belongs_to_one_class(attempts):
    events, _ = attempts
    for cut in range(1, len(events) + 1):
        found = account(events[:cut])
        spent = stretches(events[:cut])
        assert found is not None
        assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"])
        assert min(found["seconds"].values()) >= 0.0
        assert all(each.begin < each.end for each in spent)
        assert all(a.end == b.begin for a, b in zip(spent, spent[1:], strict=False))
    assert account([]) is None and account(events[1:3]) is None


def test_a_run_that_lives_is_accounted_until_now(attempts):
    events, _ = attempts
    alive = events[:-1]
    now = alive[-1]["time"] + 100.0
    found = account(alive, until=now)
    assert found is not None
    assert found["wall_seconds"] == now - events[0]["time"]
    assert account(events, until=now) == account(events), "it has ended"


def test_the_events_tell_of_a_launch_and_an_end(attempts):
    events, _ = attempts
    first, second = [each for each in events if each["event"] == "launched"]
    assert first["argv"] and first["processes"] == 1 and first["devices"]["count"] >= 1
    assert (first["step"], second["step"]) == (0, 6)
    assert set(first["versions"]) == {"python", "spmdtrain", "jax", "jaxlib"}
    failed, ended = [each for each in events if each["event"] == "ended"]
    assert (failed["exit_code"], failed["why"], failed["phase"]) == (1, "RuntimeError", "step")
    assert (ended["exit_code"], ended["phase"], ended["step"]) == (0, "end", 9)
    compiled = [each for each in events if each["event"] == "compiled"]
    assert [each["seconds"] for each in compiled] == [20.0, 20.0]
    saved = [each for each in events if each["event"] == "saved"]
    assert all(each["seconds"] == 3.0 and each["bytes"] > 0 for each in saved)


@pytest.mark.seconds
def test_figures_have_the_time_and_the_wait_for_input(tmp_path):
    st.run(tiny(*SETTINGS, "train.steps=3"), tmp_path, devices=jax.devices()[:1])
    lines = [json.loads(line) for line in Path(tmp_path, "metrics.jsonl").read_text().splitlines()]
    times = [line["time"] for line in lines]
    assert times == sorted(times) and abs(times[-1] - time.time()) < 600
    waits = [line["input_seconds"] for line in lines if "loss" in line]
    assert len(waits) == 3 and all(wait >= 0 for wait in waits)
