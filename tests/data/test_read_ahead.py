import threading
import traceback

import pytest

from spmdtrain.data.batches import ReadAhead

SECONDS = 10  # far beyond what any of these needs; a deadlock fails instead of hanging


def alive():
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_steps_come_in_order_from_the_first_asked():
    with ReadAhead(lambda step: step * 10, step=7) as batches:
        assert [next(batches) for _ in range(50)] == [step * 10 for step in range(7, 57)]
    assert not alive()


def test_it_reads_ahead_by_its_depth_and_no_further():
    made, enough = [], threading.Event()

    def make(step):
        made.append(step)
        if len(made) == 3:
            enough.set()
        return step

    with ReadAhead(make, step=0, depth=3):
        assert enough.wait(SECONDS)
        assert not threading.Event().wait(0.05)  # time in which a fourth would be made
        assert made == [0, 1, 2]


@pytest.mark.parametrize("depth", [1, 4])
def test_a_disk_that_hangs_stalls_no_step_before_what_was_read_ahead_is_used_up(depth):
    """It hangs once, after 5 batches, and comes back when the steps have taken all that there
    is.
    """
    hangs, comes_back, made = threading.Event(), threading.Event(), []

    def make(step):
        if step == 5 + depth:
            hangs.set()
            assert comes_back.wait(SECONDS)
        made.append(step)
        return step

    with ReadAhead(make, step=0, depth=depth) as batches:
        assert [next(batches) for _ in range(5)] == list(range(5))
        while len(made) < 5 + depth:
            assert not threading.Event().wait(0.001)
        next_ones = [next(batches)]
        assert hangs.wait(SECONDS)
        next_ones += [next(batches) for _ in range(depth - 1)]  # while it hangs
        assert next_ones == list(range(5, 5 + depth)) and not comes_back.is_set()
        comes_back.set()
        assert next(batches) == 5 + depth


def test_an_error_is_raised_at_its_step_with_the_traceback_of_the_thread():
    def read_the_disk(step):
        if step == 3:
            raise OSError("disk gone")
        return step

    with ReadAhead(read_the_disk, step=0) as batches:
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone") as caught:
                next(batches)
            assert "read_the_disk" in {
                frame.name for frame in traceback.extract_tb(caught.value.__traceback__)
            }
    assert not alive()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_ends_the_thread_whatever_it_waits_for(taken):
    batches = ReadAhead(lambda step: step, step=0)
    for _ in range(taken):
        next(batches)
    closer = threading.Thread(target=batches.close)
    closer.start()
    closer.join(SECONDS)
    assert not closer.is_alive() and not alive()
    batches.close()


def test_close_waits_for_a_batch_in_the_making_and_drops_it():
    started, go_on = threading.Event(), threading.Event()

    def make(step):
        started.set()
        assert go_on.wait(SECONDS)
        return step

    batches = ReadAhead(make, step=0)
    assert started.wait(SECONDS)
    threading.Timer(0.05, go_on.set).start()
    batches.close()
    assert not alive()


def test_close_does_not_hang_on_a_batch_that_never_comes(monkeypatch):
    monkeypatch.setattr(ReadAhead, "CLOSE_SECONDS", 0.05)
    released = threading.Event()
    batches = ReadAhead(lambda _: released.wait(SECONDS), step=0)
    batches.close()
    (stuck,) = alive()
    assert stuck.daemon
    released.set()
    stuck.join(SECONDS)


def test_make_may_close_it():
    held, closed = [], []
    ready = threading.Event()

    def make(step):
        ready.wait(SECONDS)
        held[0].close()
        closed.append(step)
        return step

    held.append(ReadAhead(make, step=0))
    ready.set()
    held[0]._thread.join(SECONDS)
    assert not alive() and closed == [0]


def test_an_iteration_that_is_closed_refuses_to_go_on():
    batches = ReadAhead(lambda step: step, step=0)
    batches.close()
    with pytest.raises(AssertionError, match="after close"):
        next(batches)
